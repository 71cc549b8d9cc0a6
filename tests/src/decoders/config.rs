//! The YAML file of a job, and keys of the command line.

use super::{Target, as_piece, piece};
use phalanx::config::JobConfig;

pub(super) const TARGET: Target = Target { name: "config", run, seeds };

/// A configuration is refused with one sentence, or survives writing and reading.
fn run(mut bytes: &[u8]) {
    let text = String::from_utf8_lossy(piece(&mut bytes)).into_owned();
    let arguments = String::from_utf8_lossy(bytes).into_owned();
    let split = |line: &str| line.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
    let overrides: Vec<(String, String)> = arguments.lines().filter_map(split).collect();
    match JobConfig::from_yaml_str(&text, &overrides) {
        Ok(config) => {
            let again = JobConfig::from_yaml_str(&config.to_yaml(), &[]);
            assert_eq!(again.as_ref().map(JobConfig::to_yaml), Ok(config.to_yaml()));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let small = "model:\n  model_type: llama\n  hidden_size: 64\n  num_hidden_layers: 2\n  num_attention_heads: 4\n  \
                 intermediate_size: 128\ndatasets:\n  - path: a.txt\n    type: completion\nsequence_len: 64\nmax_steps: 5\n";
    let tuned = "base_model: models/x\ndatasets:\n  - path: d.jsonl\n    type: chat_template\n    roles_to_train: [assistant]\n\
                 sequence_len: 64\nnum_epochs: 2\nlearning_rate: 2e-4\nwarmup_ratio: 0.03\nbf16: auto\nadapter: lora\nlora_r: 8\n\
                 lora_alpha: 16\nlora_target_linear: true\ndp_shard_size: auto\nelastic:\n  min_dp_shard: 1\noutput_dir: out\n";
    let arguments = "learning_rate=1e-4\ndatasets.0.path=b.txt\ntp_size=2\nmax_steps=3\n";
    let with = |text: &str, arguments: &str| [&as_piece(text.as_bytes()), arguments.as_bytes()].concat();
    vec![with(small, ""), with(small, arguments), with(tuned, ""), with(tuned, arguments)]
}
