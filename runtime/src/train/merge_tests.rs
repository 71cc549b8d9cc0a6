//! Adapters as PEFT writes them, merged into a small model; compared with sums of this file.

use super::*;
use crate::devices;
use crate::train::model_source::{ModelSource, forward_spec};
use phalanx_device::Backing;
use phalanx_storage::hf::adapter::ADAPTER_CONFIG;
use phalanx_storage::hf::dtype::Dtype;
use phalanx_storage::hf::layout::encode_header;
use phalanx_strategies::compile::compile_forward;
use phalanx_strategies::model::{BatchShape, Head, HfConfig, ModelConfig};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Element `i` of a tensor.
fn element(name: &str, i: usize) -> f32 {
    ((i * 7 + name.len() * 13) % 19) as f32 / 8.0 - 1.0
}

/// A tensor of an adapter.
type Part = (&'static str, Vec<usize>);

fn values((name, shape): &Part) -> Vec<f32> {
    (0..shape.iter().product()).map(|i| element(name, i)).collect()
}

fn adapter_dir(settings: &Value, parts: &[Part]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(ADAPTER_CONFIG), settings.to_string()).unwrap();
    let names: Vec<String> = parts.iter().map(|(name, _)| format!("{PREFIX}{name}")).collect();
    let list: Vec<_> =
        names.iter().zip(parts).map(|(name, (_, shape))| (name.as_str(), Dtype::F32, &shape[..])).collect();
    let mut bytes = encode_header(&list, &BTreeMap::new(), 8);
    bytes.extend(parts.iter().flat_map(values).flat_map(f32::to_le_bytes));
    std::fs::write(dir.path().join(ADAPTER_WEIGHTS), bytes).unwrap();
    dir
}

/// The weights after a merge, by name; those before it are zeros.
fn merged(model: &Value, settings: Value, parts: &[Part]) -> Result<BTreeMap<String, Vec<f32>>, String> {
    let mut all = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 3});
    settings.as_object().unwrap().iter().for_each(|(key, value)| all[key] = value.clone());
    let dir = adapter_dir(&all, parts);
    let config = ModelConfig::try_from(&serde_json::from_value::<HfConfig>(model.clone()).unwrap()).unwrap();
    let device = devices::host();
    let forward = config.forward(BatchShape { n_rows: 1, seq_len: 4 }, Head::Loss).unwrap();
    let c = compile_forward(forward, &forward_spec(), device.target()).unwrap();
    let mut machine = device.machine(&[&c], &Backing::default()).unwrap();
    for tensor in weights::parameters(&c) {
        weights::unpack_from_whole(&mut *machine, &c, &tensor, &vec![0.0; tensor.shape.iter().product()]);
    }
    let adapter = AdapterWeights::open(dir.path()).map_err(|error| error.to_string())?;
    merge(&mut *machine, &c, &adapter).map_err(|error| error.to_string())?;
    let tensors = weights::parameters(&c);
    Ok(tensors.iter().map(|t| (t.name.clone(), weights::packed(&*machine, &c, t).into_owned())).collect())
}

fn llama(more: Value) -> Value {
    let mut model = json!({"model_type": "qwen2", "vocab_size": 6, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 8});
    more.as_object().unwrap().iter().for_each(|(key, value)| model[key] = value.clone());
    model
}

/// `base + scale B A`, `[out, in]`.
fn sum(base: Option<&Part>, scale: f32, a: &Part, b: &Part) -> Vec<f32> {
    let (n_in, rank, n_out) = (a.1[1], a.1[0], b.1[0]);
    let (a, b) = (values(a), values(b));
    let base = base.map_or_else(|| vec![0.0; n_out * n_in], values);
    let product = |i: usize| (0..rank).map(|r| b[i / n_in * rank + r] * a[r * n_in + i % n_in]).sum::<f32>();
    base.iter().enumerate().map(|(i, base)| base + scale * product(i)).collect()
}

fn assert_near(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{found:?} {expected:?}");
}

#[test]
fn adapters_of_head_and_embedding_add_to_the_weights_that_are_stored_beside_them() {
    let base = ("lm_head.base_layer.weight", vec![6, 4]);
    let (a, b) = (("lm_head.lora_A.weight", vec![2, 4]), ("lm_head.lora_B.weight", vec![6, 2]));
    let e_a = ("model.embed_tokens.lora_embedding_A", vec![2, 6]);
    let e_b = ("model.embed_tokens.lora_embedding_B", vec![4, 2]);
    let settings = json!({"target_modules": ["lm_head", "embed_tokens"], "alpha_pattern": {"lm_head": 5}});

    let found =
        merged(&llama(json!({})), settings, &[base.clone(), a.clone(), b.clone(), e_a.clone(), e_b.clone()]).unwrap();

    assert_near(&found["lm_head.weight"], &sum(Some(&base), 2.5, &a, &b));
    let table = sum(None, 1.5, &e_a, &e_b);
    let transposed: Vec<f32> = (0..24).map(|i| table[i % 4 * 6 + i / 4]).collect();
    assert_near(&found["model.embed_tokens.weight"], &transposed);
}

#[test]
fn biases_of_matrices_b_and_of_adapted_modules_are_merged() {
    let module = "model.layers.0.self_attn.q_proj";
    let parts = |more: &[&'static str]| {
        let names = ["model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.self_attn.q_proj.lora_B.weight"];
        let mut parts: Vec<Part> = names.into_iter().zip([vec![2, 4], vec![4, 2]]).collect();
        parts.extend(more.iter().map(|name| (*name, vec![4])));
        parts
    };
    let settings = |lora_bias: bool| json!({"target_modules": ["q_proj"], "lora_bias": lora_bias});
    let (of_b, own) =
        ("model.layers.0.self_attn.q_proj.lora_B.bias", "model.layers.0.self_attn.q_proj.base_layer.bias");

    let found = merged(&llama(json!({})), settings(true), &parts(&[of_b, own])).unwrap();

    let expected: Vec<f32> = (0..4).map(|i| element(own, i) + 1.5 * element(of_b, i)).collect();
    assert_near(&found[&format!("{module}.bias")], &expected);
    assert!(
        merged(&llama(json!({})), settings(false), &parts(&[of_b])).unwrap_err().contains("`lora_bias` is not true")
    );
}

#[test]
fn adapter_whose_tensors_and_settings_differ_is_refused_by_the_tensor() {
    let a: Part = ("model.layers.0.self_attn.q_proj.lora_A.weight", vec![2, 4]);
    let b: Part = ("model.layers.0.self_attn.q_proj.lora_B.weight", vec![4, 2]);
    let both = [a.clone(), b.clone()];
    let norm: Part = ("model.norm.weight", vec![4]);
    let table: Part = ("model.embed_tokens.weight", vec![6, 4]);
    let refused = |model: Value, settings: Value, parts: &[Part], text: &str| {
        let error = merged(&llama(model), settings, parts).unwrap_err();
        assert!(error.contains(text), "{error}");
    };

    refused(json!({}), json!({"r": 8}), &both, "that of rank 8 is [8, 4]");
    refused(json!({}), json!({"rank_pattern": {"q_proj": 1}}), &both, "that of rank 1");
    refused(json!({}), json!({"use_dora": true}), &both, "lora_magnitude_vector, although `use_dora` is true");
    refused(
        json!({}),
        json!({"target_modules": ["q_proj", "o_proj"]}),
        &both,
        "o_proj.lora_A.weight, although target_modules",
    );
    refused(json!({}), json!({"target_modules": ["k_proj"]}), &both, "q_proj.lora_A.weight");
    refused(json!({}), json!({"target_modules": ["q_proj"]}), &both[..1], "lacks tensor");
    refused(
        json!({}),
        json!({"modules_to_save": ["norm"]}),
        &[norm],
        "input_layernorm.weight, although modules_to_save",
    );
    let tied = json!({"tie_word_embeddings": true});
    refused(tied, json!({"modules_to_save": ["embed_tokens"]}), &[table], "also uses this weight as its head");
}

#[test]
fn model_of_an_adapter_has_a_row_for_every_token_of_its_job() {
    let parts: [Part; 2] = [("model.embed_tokens.weight", vec![8, 4]), ("lm_head.base_layer.weight", vec![8, 4])];
    let base = tempfile::tempdir().unwrap();
    std::fs::write(base.path().join("config.json"), llama(json!({})).to_string()).unwrap();
    let settings = json!({"peft_type": "LORA", "base_model_name_or_path": base.path()});

    let rows = |parts: &[Part]| {
        let adapter = adapter_dir(&settings, parts);
        ModelSource::find(adapter.path(), None).unwrap().model().unwrap().vocab_size
    };

    assert_eq!([rows(&parts), rows(&parts[1..]), rows(&[])], [8, 8, 6]);
}
