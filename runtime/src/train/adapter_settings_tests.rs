use super::*;
use serde_json::json;

fn read(changes: Value) -> Result<AdapterSettings, String> {
    let mut config =
        json!({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]});
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(ADAPTER_CONFIG), config.to_string()).unwrap();
    AdapterSettings::read(dir.path()).map_err(|error| error.to_string())
}

#[test]
fn setting_that_changes_what_an_adapter_computes_is_refused_by_key_and_value() {
    let refused = [
        ("peft_type", json!("IA3")),
        ("task_type", json!("TOKEN_CLS")),
        ("init_lora_weights", json!("pissa")),
        ("init_lora_weights", json!("pissa_niter_16")),
        ("init_lora_weights", json!("OLoRA")),
        ("init_lora_weights", json!("corda")),
        ("init_lora_weights", json!("loftq")),
        ("init_lora_weights", json!("lora_ga")),
        ("init_lora_weights", json!("unheard")),
        ("init_lora_weights", json!(1)),
        ("layer_replication", json!([[0, 2], [1, 3]])),
        ("r", json!(0)),
        ("r", json!(4.5)),
        ("r", json!("4")),
        ("r", json!(null)),
        ("r", json!(true)),
        ("lora_alpha", json!("16")),
        ("lora_alpha", json!(null)),
        ("use_dora", json!("false")),
        ("use_rslora", json!(1)),
        ("lora_bias", json!("yes")),
        ("bias", json!("some")),
        ("rank_pattern", json!({"q_proj": 0})),
        ("rank_pattern", json!(["q_proj"])),
        ("alpha_pattern", json!({"q_proj": "16"})),
        ("alpha_pattern", json!({"q_(": 16})),
        ("modules_to_save", json!("lm_head")),
        ("target_modules", json!(7)),
        ("target_modules", json!("(")),
        ("layers_to_transform", json!("0")),
        ("target_parameters", json!(["mlp.experts.gate_up_proj"])),
        ("trainable_token_indices", json!([1, 2])),
        ("alora_invocation_tokens", json!([5])),
        ("arrow_config", json!({"top_k": 3})),
        ("kasa_config", json!({"beta": 1e-4})),
        ("use_bdlora", json!({"nblocks": 2})),
        ("use_qalora", json!(true)),
        ("velora_config", json!({"num_groups": 2})),
        ("monteclora_config", json!({"sample": 1})),
        ("megatron_config", json!({"tp": 2})),
        ("key_of_a_later_version", json!(0.5)),
    ];
    for (key, value) in refused {
        let error = read(json!({key: value.clone()})).unwrap_err();
        assert!(error.contains(&format!("`{key}` is {value}")), "{key}: {error}");
    }
}

#[test]
fn setting_without_an_effect_on_a_trained_adapter_is_accepted() {
    let mut of_peft = json!({
        "alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null, "bias": "none",
        "corda_config": null, "ensure_weight_tying": false, "eva_config": null, "exclude_modules": null,
        "fan_in_fan_out": false, "inference_mode": true, "init_lora_weights": true, "kasa_config": null,
        "layer_replication": null, "layers_pattern": null, "layers_to_transform": null, "loftq_config": {},
        "lora_bias": false, "lora_dropout": 0.1, "lora_ga_config": null, "megatron_config": null,
        "megatron_core": "megatron.core", "modules_to_save": null, "peft_version": "0.21.2", "qalora_group_size": 16,
        "rank_pattern": {}, "revision": null, "target_parameters": null, "trainable_token_indices": null,
        "use_bdlora": null, "use_dora": false, "use_qalora": false, "use_rslora": false, "key_of_a_later_version": [],
    });
    for init in [json!(true), json!(false), json!("gaussian"), json!("eva"), json!("orthogonal"), json!("mica")] {
        of_peft["init_lora_weights"] = init;
        let settings = read(of_peft.clone()).unwrap();
        assert_eq!((settings.rank, settings.alpha, settings.uneven()), (4, 16.0, None));
    }
}

#[test]
fn absent_settings_have_the_defaults_of_peft() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(ADAPTER_CONFIG), r#"{"peft_type": "LORA"}"#).unwrap();

    let settings = AdapterSettings::read(dir.path()).unwrap();

    assert_eq!((settings.rank, settings.alpha), (8, 8.0));
    assert_eq!(settings.adapts("model.layers.0.self_attn.q_proj"), None);
}

#[test]
fn first_pattern_that_matches_the_end_of_a_path_gives_rank_and_alpha() {
    let settings = read(json!({
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "q_proj": 3},
        "alpha_pattern": {"self_attn.*": 6, ".*q_proj": 99},
        "use_rslora": true,
    }))
    .unwrap();

    assert_eq!(settings.rank_of("model.layers.1.self_attn.q_proj"), 2);
    assert_eq!(settings.rank_of("model.layers.0.self_attn.q_proj"), 3);
    assert_eq!(settings.rank_of("model.layers.0.mlp.up_proj"), 4);
    assert_eq!(settings.scale_of("model.layers.1.self_attn.q_proj"), 6.0 / 2f64.sqrt());
    assert_eq!(settings.scale_of("model.layers.0.mlp.up_proj"), 16.0 / 4f64.sqrt());
    assert_eq!(settings.uneven(), Some("rank_pattern"));
}

#[test]
fn keys_name_the_modules_that_peft_adapts() {
    let modules = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.11.mlp.up_proj"];
    let adapted = |changes: Value| {
        let settings = read(changes).unwrap();
        modules.map(|module| settings.adapts(module).unwrap())
    };

    assert_eq!(adapted(json!({})), [true, true, false]);
    assert_eq!(adapted(json!({"target_modules": ["_proj"]})), [false; 3]);
    assert_eq!(adapted(json!({"target_modules": r".*layers\.1.*"})), [false, true, true]);
    assert_eq!(adapted(json!({"exclude_modules": ["layers.0.self_attn.q_proj"]})), [false, true, false]);
    assert_eq!(adapted(json!({"exclude_modules": r".*\.1\..*"})), [true, false, false]);
    assert_eq!(adapted(json!({"layers_to_transform": 1})), [false, true, false]);
    assert_eq!(adapted(json!({"layers_to_transform": [0, 11], "layers_pattern": "layers"})), [true, false, false]);
    assert_eq!(adapted(json!({"layers_to_transform": [0], "layers_pattern": ["h"]})), [false; 3]);
    assert_eq!(adapted(json!({"modules_to_save": ["self_attn"]})), [false; 3]);
    assert!(read(json!({"modules_to_save": ["norm"]})).unwrap().saves("model.layers.0.input_layernorm"));
}
