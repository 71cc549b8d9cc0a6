//! transformers loads an exported model directory and computes the same logits from it.
//!
//! The comparison runs in the Python that `PHALANX_PYTHON` names, or in `python3`. Without transformers there the test is
//! skipped.

use anyhow::{Context, Result, bail, ensure};
use phalanx::Job;
use phalanx::api::generate::with_generator;
use phalanx_needs::{Need, skip};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Exit code of `check_export.py` without transformers.
const SKIPPED: i32 = 77;

const TEXT: &str = "Once upon a time, there was a dragon — ein Drache.";

/// Every family with its distinguishing features: scaled rotary frequencies, windows shorter than the text, biases, norms of
/// heads, tied and untied output layers.
fn families() -> Vec<Value> {
    let decoder = |family: &str, extra: Value| {
        let mut model = json!({
            "model_type": family, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        });
        let keys = extra.as_object().cloned().unwrap_or_default();
        model.as_object_mut().into_iter().for_each(|m| m.extend(keys.clone()));
        model
    };
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    });
    vec![
        decoder("llama", json!({"rope_scaling": scaling, "attention_bias": true, "mlp_bias": true})),
        decoder("mistral", json!({"sliding_window": 9})),
        decoder("qwen2", json!({"tie_word_embeddings": true})),
        decoder("qwen3", json!({"head_dim": 16})),
        decoder("phi3", json!({"sliding_window": 9})),
        decoder("olmo2", json!({"attention_bias": true})),
        decoder(
            "granite",
            json!({
                "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
                "logits_scaling": 2.0, "attention_bias": true, "mlp_bias": true,
            }),
        ),
        json!({"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64}),
    ]
}

/// Trains `model` from scratch for two steps and returns the exported directory.
fn train(model: &Value, dir: &Path) -> Result<PathBuf> {
    let text = dir.join("text.txt");
    std::fs::write(&text, "The line holds while the ranks close up. ".repeat(40))?;
    let job = json!({
        "model": model, "tokenizer": "bytes", "datasets": [{"path": text, "type": "completion"}],
        "sequence_len": 32, "micro_batch_size": 4, "max_steps": 2, "learning_rate": 0.02, "output_dir": dir.join("out"),
    });
    let yaml = dir.join("job.yaml");
    // JSON is a subset of YAML.
    std::fs::write(&yaml, job.to_string())?;
    Job::from_yaml(&yaml)?.run()?.model_dir.context("a finished run exports its model")
}

/// What Phalanx computes from an exported directory, as input of `check_export.py`.
fn expectation(model: &Path) -> Result<Value> {
    let ids: Vec<u32> = (0..24).map(|i| (i * 37 + 11) % 256).collect();
    let (logits, text_ids) = with_generator(model, 64, None, |g| {
        let text_ids = g.tokenizer().encode(TEXT)?;
        Ok((g.logits(&ids)?.to_vec(), text_ids))
    })?;
    Ok(json!({"ids": ids, "logits": logits, "text": TEXT, "text_ids": text_ids}))
}

#[test]
fn transformers_computes_the_same_logits_from_the_export_of_every_family() -> Result<()> {
    let python = std::env::var("PHALANX_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/check_export.py");
    for family in families() {
        let dir = tempfile::tempdir()?;
        let model = train(&family, dir.path())?;
        let expected = dir.path().join("expected.json");
        std::fs::write(&expected, expectation(&model)?.to_string())?;

        let name = &family["model_type"];
        let output = match Command::new(&python).arg(script).args([&model, &expected]).output() {
            Ok(output) => output,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                skip(Need::Transformers, format_args!("`{python}` is not installed"));
                return Ok(());
            }
            Err(error) => bail!("{python}: {error}"),
        };
        let printed = String::from_utf8_lossy(&output.stdout);
        if output.status.code() == Some(SKIPPED) {
            skip(Need::Transformers, format_args!("{python}: {}", printed.trim()));
            return Ok(());
        }
        println!("{name}: {}", printed.trim());
        ensure!(output.status.success(), "{name}: {printed}{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
