//! A language model written in dfdx, trained by a job: custom modules, Phalanx's fused operations, dfdx's tape.
//!
//! `cargo run --release -p phalanx-examples --bin dfdx_model`

use dfdx::nn::tensor_collection::{ModuleVisitor, TensorCollection, TensorOptions};
use dfdx::prelude::*;
use phalanx::frontend::dfdx::{Batch, DfdxModel, Loss, Tape, ops};
use phalanx::{Control, Event, Job};

/// Tokens of the byte tokenizer: 256 bytes and a few markers of documents and turns.
const VOCAB: usize = 264;
/// Width.
const C: usize = 96;
/// Feed-forward width.
const F: usize = 256;
/// Heads.
const H: usize = 4;
/// Tokens of a row.
const SEQ_LEN: usize = 128;

type Weight<const OUT: usize, const IN: usize> = Tensor<Rank2<OUT, IN>, f32, Cpu>;
type Gain = Tensor<Rank1<C>, f32, Cpu>;
type Activations = Tensor<(usize, Const<C>), f32, Cpu, Tape>;

/// Attention and a gated feed-forward layer, each after a norm and with a residual connection.
#[derive(Clone)]
struct Block {
    attention_norm: Gain,
    qkv: Weight<{ 3 * C }, C>,
    out: Weight<C, C>,
    ffn_norm: Gain,
    gate_up: Weight<{ 2 * F }, C>,
    down: Weight<C, F>,
}

impl Block {
    fn new(device: &Cpu) -> Block {
        Block {
            attention_norm: device.ones(),
            qkv: device.sample_normal() * 0.05,
            out: device.sample_normal() * 0.05,
            ffn_norm: device.ones(),
            gate_up: device.sample_normal() * 0.05,
            down: device.sample_normal() * 0.05,
        }
    }

    fn forward(&self, x: Activations, attention: &ops::CausalAttention, batch: &Batch<'_>) -> Activations {
        let h = ops::rms_norm(x.with_empty_tape(), &self.attention_norm, 1e-5);
        let h = attention.forward(ops::linear(h, &self.qkv, None), Const::<C>, batch.positions, batch.doc_start);
        let x = x + ops::linear(h, &self.out, None);
        let h = ops::rms_norm(x.with_empty_tape(), &self.ffn_norm, 1e-5);
        let h = ops::swiglu(ops::linear(h, &self.gate_up, None), Const::<F>);
        x + ops::linear(h, &self.down, None)
    }
}

impl TensorCollection<f32, Cpu> for Block {
    // The model is visited only, never converted to another device or element type.
    type To<E: Dtype, D: Device<E>> = ();

    fn iter_tensors<V: ModuleVisitor<Self, f32, Cpu>>(visitor: &mut V) -> Result<Option<()>, V::Err> {
        visitor.visit_fields(
            (
                Self::tensor(
                    "attention_norm",
                    |b| &b.attention_norm,
                    |b| &mut b.attention_norm,
                    TensorOptions::reset_to_ones(),
                ),
                Self::tensor("qkv", |b| &b.qkv, |b| &mut b.qkv, TensorOptions::reset_to_zeros()),
                Self::tensor("out", |b| &b.out, |b| &mut b.out, TensorOptions::reset_to_zeros()),
                Self::tensor("ffn_norm", |b| &b.ffn_norm, |b| &mut b.ffn_norm, TensorOptions::reset_to_ones()),
                Self::tensor("gate_up", |b| &b.gate_up, |b| &mut b.gate_up, TensorOptions::reset_to_zeros()),
                Self::tensor("down", |b| &b.down, |b| &mut b.down, TensorOptions::reset_to_zeros()),
            ),
            |_| (),
        )
    }
}

/// The language model: two blocks between an embedding and an output layer with the same weights.
#[derive(Clone)]
struct Model {
    table: Weight<VOCAB, C>,
    blocks: Repeated<Block, 2>,
    norm: Gain,
}

impl Model {
    fn loss(&self, batch: &Batch<'_>, attention: &ops::CausalAttention, tape: Tape) -> Loss {
        let embedded = ops::embedding(&self.table, batch.ids, tape);
        let x = self.blocks.modules.iter().fold(embedded, |x, block| block.forward(x, attention, batch));
        let logits = ops::linear(ops::rms_norm(x, &self.norm, 1e-5), &self.table, None);
        ops::cross_entropy(logits, batch.labels)
    }
}

impl TensorCollection<f32, Cpu> for Model {
    type To<E: Dtype, D: Device<E>> = ();

    fn iter_tensors<V: ModuleVisitor<Self, f32, Cpu>>(visitor: &mut V) -> Result<Option<()>, V::Err> {
        visitor.visit_fields(
            (
                Self::tensor("table", |m| &m.table, |m| &mut m.table, TensorOptions::reset_to_zeros()),
                Self::module("blocks", |m| &m.blocks, |m| &mut m.blocks),
                Self::tensor("norm", |m| &m.norm, |m| &mut m.norm, TensorOptions::reset_to_ones()),
            ),
            |_| (),
        )
    }
}

fn main() -> anyhow::Result<()> {
    let device = Cpu::seed_from_u64(1);
    let blocks = Repeated { modules: vec![Block::new(&device), Block::new(&device)] };
    let module = Model { table: device.sample_normal() * 0.05, blocks, norm: device.ones() };
    let attention = ops::CausalAttention::new(H, H, C / H, SEQ_LEN).with_rotary(10_000.0);
    let model =
        DfdxModel::new(module, VOCAB, move |m: &Model, batch: &Batch<'_>, tape: Tape| m.loss(batch, &attention, tape))?;
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/../*/src/**/*.rs");
    let job = Job::builder()
        .set("tokenizer", "bytes")
        .set("datasets.0.path", format!("'{sources}'"))
        .set("datasets.0.type", "completion")
        .set("sequence_len", SEQ_LEN)
        .set("micro_batch_size", 8)
        .set("max_steps", 200)
        .set("learning_rate", 5e-3)
        .set("warmup_steps", 10)
        .set("val_set_size", 0.02)
        .set("output_dir", std::env::temp_dir().join("phalanx-dfdx-model").display())
        .set("resume_from_checkpoint", "none")
        .model(model)
        .build()?;
    let report = job.run_with(&Control::default(), |event| match event {
        Event::Started(s) => println!("{} parameters", s.n_params),
        Event::Step(m) if m.step == 1 || m.step % 25 == 0 => {
            println!("step {:>3}  loss {:.3}  {:.0} tokens/s", m.step, m.loss, m.tokens_per_s);
        }
        Event::Eval(m) => println!("validation loss {:.3}", m.eval_loss),
        _ => {}
    })?;
    if let Some(dir) = report.model_dir {
        println!("model in {}", dir.display());
    }
    Ok(())
}
