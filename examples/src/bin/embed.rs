//! A trainer inside another program: starts a job, follows its metrics, requests a checkpoint, and stops when the loss is good
//! enough.
//!
//! `cargo run --release -p phalanx-examples --bin embed [text file]`

use anyhow::Context;
use phalanx::{Event, Job};
use std::path::PathBuf;

/// Loss at which this program stops the job, in nats per byte.
const GOOD_ENOUGH: f64 = 2.4;

fn main() -> anyhow::Result<()> {
    let text = std::env::args_os().nth(1).map_or_else(own_source, PathBuf::from);
    let output_dir = std::env::temp_dir().join("phalanx-embed");
    let handle = Job::builder()
        .set("model.model_type", "llama")
        .set("model.hidden_size", 64)
        .set("model.intermediate_size", 160)
        .set("model.num_hidden_layers", 2)
        .set("model.num_attention_heads", 4)
        .set("tokenizer", "bytes")
        .set("datasets.0.path", text.display())
        .set("datasets.0.type", "completion")
        .set("sequence_len", 64)
        .set("micro_batch_size", 8)
        .set("max_steps", 400)
        .set("learning_rate", 5e-3)
        .set("output_dir", output_dir.display())
        .set("resume_from_checkpoint", "none")
        .build()?
        .start()?;
    let control = handle.control();
    for event in handle.events() {
        match event {
            Event::Started(s) => println!("{} parameters, {} steps at most", s.n_params, s.total_steps),
            Event::Step(m) => {
                if m.step % 25 == 0 {
                    println!("step {:>3}  loss {:.3}  {:.0} tokens/s", m.step, m.loss, m.tokens_per_s);
                }
                if m.step == 50 {
                    control.save();
                }
                if m.loss < GOOD_ENOUGH {
                    control.stop();
                }
            }
            Event::Saved { step, .. } => println!("saved after step {step}"),
            Event::NotSaved { step, reason } => println!("step {step} was not saved: {reason}"),
            Event::Eval(_) | Event::Note(_) | Event::Preparing { .. } | Event::Reference { .. } => {}
        }
    }
    let report = handle.wait()?;
    let last = report.last.context("no step was run")?;
    println!("stopped after {} steps at loss {:.3}", report.steps, last.loss);
    Ok(())
}

/// A source file of this project, so that the example needs no other file.
fn own_source() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../strategies/src/passes/backward.rs"))
}
