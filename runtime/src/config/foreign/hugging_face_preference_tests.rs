//! Files of TRL's and LLaMA-Factory's training on answers become jobs over answers, with their numbers.

use super::hugging_face_tests::{imported, imported_with, job};
use super::import::Imported;
use super::tests::{set, shown_keys};
use crate::config::preference::{DpoLoss, Rl};

const TRL: &str = "model_name_or_path: m\ndataset_name: d\n";

fn trl(keys: &str) -> Imported {
    imported(&[("a.yaml", &format!("{TRL}{keys}"))]).unwrap_or_else(|error| panic!("{keys}: {error}"))
}

#[test]
fn keys_of_trl_tell_the_trainer_and_become_its_numbers() {
    for (keys, expected) in [
        ("beta: 0.05\n", &["rl: dpo", "rl_beta: 0.05", "learning_rate: 1e-6"][..]),
        ("beta: 0.05\nloss_type: [sigmoid]\n", &["rl: dpo", "dpo_loss_type: sigmoid"]),
        ("loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.2]\n", &["rl: dpo", "rpo_alpha: 0.2"]),
        (
            "loss_type: robust\nlabel_smoothing: 0.1\n",
            &["rl: dpo", "dpo_loss_type: robust", "dpo_label_smoothing: 0.1"],
        ),
        (
            "precompute_ref_log_probs: true\nlearning_rate: 2e-6\n",
            &["rl: dpo", "learning_rate: 2e-6", "precompute_ref_log_probs: true"],
        ),
        (
            "desirable_weight: 1.5\nbeta: 0.2\n",
            &["rl: kto", "rl_beta: 0.2", "kto_desirable_weight: 1.5", "shuffle: false"],
        ),
        ("loss_type: kto\ntrain_sampling_strategy: random\n", &["rl: kto", "shuffle: true"]),
        ("cpo_alpha: 0.5\n", &["rl: cpo", "cpo_alpha: 0.5"]),
        (
            "loss_type: simpo\nsimpo_gamma: 1.6\nbeta: 2.0\ncpo_alpha: 0.0\n",
            &["rl: simpo", "simpo_gamma: 1.6", "rl_beta: 2.0"],
        ),
        (
            "center_rewards_coefficient: 0.01\n",
            &["reward_model: true", "learning_rate: 0.0001", "excess_length_strategy: drop"],
        ),
        ("use_peft: true\nlora_task_type: SEQ_CLS\n", &["reward_model: true", "adapter: lora"]),
    ] {
        let found = trl(keys);

        let shown = shown_keys(&found);
        assert!(shown.is_superset(&set(expected)), "{keys}: {shown:?}");
        assert_eq!(job(&found).data.datasets[0].r#type.word(), "preference", "{keys}");
        assert!(!job(&found).notes.iter().any(|note| note.contains("lora_dropout")), "{keys}");
    }
}

#[test]
fn file_that_fits_several_trainers_of_trl_is_taken_for_dpo_and_says_so() {
    assert!(trl("beta: 0.05\n").notes.join("\n").contains("taken for one of TRL's DPO trainer"));
    assert!(!trl("precompute_ref_log_probs: true\nrpo_alpha: 0.5\n").notes.join("\n").contains("taken for"));
}

#[test]
fn rate_that_is_left_out_is_that_of_the_trainer() {
    let schedule = "beta: 0.1\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-7}\n";
    assert!(shown_keys(&trl(schedule)).contains("cosine_min_lr_ratio: 0.1"), "{:?}", shown_keys(&trl(schedule)));
    let json = r#"{"per_device_train_batch_size": 4, "beta": 0.1, "precompute_ref_log_probs": false}"#;
    let saved = imported(&[("a.json", json)]).unwrap();
    assert_eq!(saved.tool, "TRL");
    assert!(shown_keys(&saved).is_superset(&set(&["rl: dpo", "learning_rate: 1e-6"])));
}

#[test]
fn data_tell_what_a_file_without_keys_trains() {
    let of = |keys: &str, rl: Option<Rl>| imported_with(&[("a.yaml", &format!("{TRL}{keys}"))], &|_| rl).unwrap();
    let pairs = of("", Some(Rl::Dpo));
    assert!(shown_keys(&pairs).is_superset(&set(&["rl: dpo", "learning_rate: 1e-6"])));
    assert!(pairs.notes.join("\n").contains("the data have pairs of answers"));
    assert!(shown_keys(&of("", Some(Rl::Kto))).contains("rl: kto"));
    assert!(shown_keys(&of("beta: 0.2\n", Some(Rl::Kto))).contains("rl: kto"));
    // The trainer of texts reads the messages that pairs often have, too.
    assert!(!shown_keys(&of("assistant_only_loss: true\n", Some(Rl::Dpo))).contains("rl: dpo"));
    let unknown = of("", None);
    assert!(!shown_keys(&unknown).contains("rl: dpo"));
    assert!(unknown.notes.join("\n").contains("for pairs of answers `type: preference` and `rl: dpo`"));
}

#[test]
fn what_trl_does_and_is_not_done_here_is_refused_by_its_key() {
    for (keys, named) in [
        ("loss_type: [sigmoid, hinge]\n", "`loss_type` (line 3)"),
        ("loss_type: apo_zero_unpaired\n", "`loss_type` (line 3)"),
        ("loss_type: hinge\ncpo_alpha: 1\n", "of CPO, there are sigmoid and simpo"),
        ("f_divergence_type: js_divergence\n", "`f_divergence_type` (line 3)"),
        ("use_weighting: true\n", "all pairs count alike"),
        ("sync_ref_model: true\n", "`sync_ref_model` (line 3)"),
        ("desirable_weight: 1\nrpo_alpha: 1\n", "no trainer of TRL has it beside `rpo_alpha`"),
        ("loss_type: dapo\nnum_generations: 4\n", "there is no reinforcement training"),
    ] {
        let error = imported(&[("a.yaml", &format!("{TRL}{keys}"))]).unwrap_err().to_string();

        assert!(error.contains(named), "{keys}: {error}");
    }
}

const INFO: &str = r#"{
  "texts": {"file_name": "t.json", "ranking": true, "columns": {"prompt": "q", "query": "input", "chosen": "good", "rejected": "bad"}},
  "talks": {"file_name": "c.json", "ranking": true, "formatting": "sharegpt", "columns": {"messages": "talk", "chosen": "chosen", "rejected": "rejected"}},
  "labels": {"file_name": "l.json", "formatting": "sharegpt", "columns": {"messages": "talk", "kto_tag": "label"}}
}"#;

fn factory(keys: &str, texts: &str) -> Result<Imported, String> {
    let text = format!("model_name_or_path: m\n{keys}");
    let files = [("a.yaml", &text[..]), ("data/dataset_info.json", INFO), ("data/t.json", texts)];
    imported(&files).map_err(|error| error.to_string())
}

#[test]
fn stages_of_llama_factory_become_jobs_over_answers() {
    let texts = r#"[{"q": "Sky?", "input": "", "good": "Blue.", "bad": "Green."}]"#;
    for (keys, expected) in [
        (
            "stage: dpo\ndataset: texts\npref_beta: 0.2\npref_ftx: 0.5\n",
            &["rl: dpo", "rl_beta: 0.2", "rpo_alpha: 0.5"][..],
        ),
        ("stage: dpo\ndataset: talks\npref_loss: ipo\n", &["rl: dpo", "dpo_loss_type: ipo"]),
        (
            "stage: dpo\ndataset: talks\npref_loss: simpo\nsimpo_gamma: 1.0\n",
            &["rl: simpo", "simpo_gamma: 1.0", "cpo_alpha: 0.0"],
        ),
        ("stage: dpo\ndataset: talks\npref_loss: orpo\npref_beta: 0.3\n", &["rl: orpo", "orpo_alpha: 0.3"]),
        ("stage: kto\ndataset: labels\nkto_chosen_weight: 2.0\n", &["rl: kto", "kto_desirable_weight: 2.0"]),
        ("stage: rm\ndataset: texts\n", &["reward_model: true"]),
    ] {
        let found = factory(keys, texts).unwrap_or_else(|error| panic!("{keys}: {error}"));

        let shown = shown_keys(&found);
        assert!(shown.is_superset(&set(expected)), "{keys}: {shown:?}");
        let job = job(&found);
        assert_eq!(job.data.datasets[0].r#type.word(), "chat_template.default", "{keys}");
        assert_eq!(job.preference.dpo_loss_type == DpoLoss::Ipo, keys.contains("ipo"), "{keys}");
    }
    let talks = factory("stage: dpo\ndataset: talks\n", texts).unwrap().notes.join("\n");
    assert!(talks.contains("a field `tools`") && !talks.contains("a field `system`"), "{talks}");
    let job = job(&factory("stage: dpo\ndataset: texts\n", texts).unwrap());
    let dataset = &job.data.datasets[0];
    assert_eq!(
        [&dataset.field_messages, &dataset.field_chosen, &dataset.field_rejected].map(Option::as_deref),
        [Some("q"), Some("good"), Some("bad")]
    );
}

#[test]
fn answers_of_llama_factory_that_cannot_be_read_are_refused_by_name() {
    let with_input = "{\"q\": \"a\", \"input\": \"b\"}\n{\"q\": \"a\"}\n";
    for (keys, texts, named) in [
        ("stage: sft\ndataset: talks\n", "[]", "only `stage: dpo`, `kto` and `rm` train on such answers"),
        ("stage: dpo\ndataset: texts\n", with_input, "append the texts of input to those of q"),
        ("stage: kto\ndataset: texts\n", "[]", "store the records as messages"),
        ("stage: dpo\ndataset: labels\n", "[]", "it must name `chosen` and `rejected`"),
        ("stage: dpo\ndataset: talks\npref_loss: kto_pair\n", "[]", "use sigmoid, hinge, ipo, orpo or simpo"),
        ("stage: dpo\ndataset: talks\npref_loss: orpo\npref_ftx: 1\n", "[]", "`pref_ftx` (line 5)"),
        ("stage: dpo\ndataset: talks\nref_model: other\n", "[]", "`ref_model` (line 4)"),
    ] {
        let error = factory(keys, texts).unwrap_err();

        assert!(error.contains(named), "{keys}: {error}");
    }
    assert!(factory("stage: dpo\ndataset: texts\n", "no JSON").unwrap().notes.join("\n").contains("a text in input"));
}
