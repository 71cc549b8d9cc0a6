//! Two rank processes train a model written in dfdx; the job survives the death of either.
//!
//! `cargo run --release -p phalanx-examples --bin dfdx_elastic -- [FOLDER [STEPS]]`

use dfdx::prelude::*;
use phalanx::frontend::UserModel;
use phalanx::frontend::dfdx::{Batch, DfdxError, DfdxModel, Tape, ops};
use phalanx::{Event, Job, Runtime, rank_process_with};

/// Tokens of the byte tokenizer: 256 bytes and a few markers of documents and turns.
const VOCAB: usize = 264;
/// Width.
const C: usize = 64;

/// An embedding of bytes, two layers, and the output layer.
type Net = (Embedding<VOCAB, C>, (Linear<C, C>, Tanh, Linear<C, C>), Linear<C, VOCAB>);

/// The same model in every process: the seed determines its initial values.
fn model() -> Result<UserModel, DfdxError> {
    let module = Cpu::seed_from_u64(1).build_module::<Net, f32>();
    let model = DfdxModel::new(module, VOCAB, |net, batch: &Batch<'_>, tape: Tape| {
        let x = ops::embedding(&net.0.weight, batch.ids, tape);
        ops::cross_entropy(net.2.forward(net.1.forward(x)), batch.labels)
    })?;
    Ok(model.into())
}

fn main() -> anyhow::Result<()> {
    // Must come first: a process of this executable that is started as a rank builds the model and never returns from here.
    let program = rank_process_with(|_| Ok(model()?));
    let mut args = std::env::args().skip(1);
    let folder = args.next().unwrap_or_else(|| std::env::temp_dir().join("phalanx-dfdx-elastic").display().to_string());
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/../*/src/**/*.rs");
    let job = Job::builder()
        .set("tokenizer", "bytes")
        .set("datasets.0.path", format!("'{sources}'"))
        .set("datasets.0.type", "completion")
        .set("sequence_len", 128)
        .set("micro_batch_size", 8)
        .set("max_steps", args.next().unwrap_or_else(|| "300".into()))
        .set("learning_rate", 5e-3)
        .set("dp_shard_size", 2)
        .set("save_steps", "none")
        .set("output_dir", folder)
        .set("resume_from_checkpoint", "none")
        .model(model()?)
        .build()?;
    let event_loop = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    event_loop.block_on(async {
        let running = Runtime::new(program)?.start(job).await?;
        let mut events = running.events();
        while let Some(event) = events.next().await {
            match event? {
                Event::Started(_) => {
                    let nodes = running.status().await?.nodes;
                    let pids = nodes.iter().flat_map(|node| &node.ranks).filter_map(|rank| rank.pid);
                    println!(
                        "ranks are the processes {}",
                        pids.map(|pid| pid.to_string()).collect::<Vec<_>>().join(" ")
                    );
                }
                Event::Step(m) if m.step == 1 || m.step % 50 == 0 => println!("step {:>3}  loss {:.6}", m.step, m.loss),
                Event::Note(note) => println!("{note}"),
                _ => {}
            }
        }
        let report = running.wait().await?;
        println!("{} steps, model in {}", report.steps, report.model_dir.unwrap_or_default().display());
        Ok(())
    })
}
