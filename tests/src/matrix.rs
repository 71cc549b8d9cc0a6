//! Every way of sharing a small model, compared with one rank: the same losses, the same gradient norms, and checkpoints
//! that go on under any other way.

use phalanx::{Event, Job, JobBuilder};
use phalanx_strategies::mesh::Mesh;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Largest difference of a loss, in nats.
pub const LOSS_TOLERANCE: f64 = 2e-5;
/// Largest relative difference of a gradient norm.
pub const NORM_TOLERANCE: f64 = 1e-4;
/// Steps of a curve; a checkpoint is saved after half of them.
pub const STEPS: u64 = 8;
/// Rows of a step, over all ranks.
const BATCH_ROWS: usize = 8;

/// Shape of the small model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Shape {
    /// Grouped-query attention, rotary positions, SwiGLU, untied head; extents that no degree divides.
    Llama,
    /// Packed projections, biases, learned positions, tied head.
    Gpt2,
}

impl Shape {
    /// Both.
    pub const ALL: [Shape; 2] = [Shape::Llama, Shape::Gpt2];

    fn keys(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Shape::Llama => &[
                ("model.model_type", "llama"),
                ("model.hidden_size", "32"),
                ("model.intermediate_size", "54"),
                ("model.num_hidden_layers", "9"),
                ("model.num_attention_heads", "4"),
                ("model.num_key_value_heads", "2"),
                ("model.max_position_embeddings", "32"),
                ("model.initializer_range", "0.1"),
            ],
            Shape::Gpt2 => &[
                ("model.model_type", "gpt2"),
                ("model.n_embd", "32"),
                ("model.n_head", "4"),
                ("model.n_layer", "8"),
                ("model.n_positions", "32"),
                ("model.initializer_range", "0.1"),
            ],
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Shape::Llama => "Llama",
            Shape::Gpt2 => "GPT-2",
        })
    }
}

/// One way of sharing the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cell {
    /// How ranks are arranged.
    pub mesh: Mesh,
    /// ZeRO stage; 3 where nothing is sharded.
    pub zero: usize,
    /// Schedule of the pipeline.
    pub schedule: &'static str,
    /// Tokens are shared between tensor-parallel ranks.
    pub sequence_parallel: bool,
    /// How keys travel between context-parallel ranks.
    pub cp_comm: &'static str,
}

/// The schedules of a pipeline.
pub const SCHEDULES: [&str; 4] = ["1f1b", "gpipe", "interleaved", "zero_bubble"];

impl Cell {
    /// One rank.
    pub const ALONE: Cell =
        Cell { mesh: Mesh::ONE, zero: 3, schedule: "1f1b", sequence_parallel: false, cp_comm: "ring" };

    fn keys(&self) -> Vec<(&'static str, String)> {
        let m = self.mesh;
        vec![
            ("pipeline_parallel_size", m.pp.to_string()),
            ("dp_replicate_size", m.dp_replicate.to_string()),
            ("dp_shard_size", m.dp_shard.to_string()),
            ("context_parallel_size", m.cp.to_string()),
            ("tensor_parallel_size", m.tp.to_string()),
            ("zero_stage", self.zero.to_string()),
            ("pipeline_schedule", self.schedule.to_string()),
            ("sequence_parallel", self.sequence_parallel.to_string()),
            ("cp_comm_strategy", self.cp_comm.to_string()),
            ("gradient_accumulation_steps", (BATCH_ROWS / m.data_ranks()).to_string()),
        ]
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = self.mesh;
        write!(
            f,
            "pp {} x dp_replicate {} x dp_shard {} x cp {} x tp {}",
            m.pp, m.dp_replicate, m.dp_shard, m.cp, m.tp
        )?;
        if m.dp_shard * m.cp > 1 {
            write!(f, ", ZeRO-{}", self.zero)?;
        }
        if m.pp > 1 {
            write!(f, ", {}", self.schedule)?;
        }
        if m.tp > 1 && self.sequence_parallel {
            write!(f, ", sequence parallel")?;
        }
        if m.cp > 1 {
            write!(f, ", {}", self.cp_comm)?;
        }
        Ok(())
    }
}

/// All meshes whose axes have 1, 2 or 4 ranks and whose product is at most `max`.
pub fn meshes(max: usize) -> Vec<Mesh> {
    let sizes = [1, 2, 4];
    let mut meshes = Vec::new();
    for pp in sizes {
        for dp_replicate in sizes {
            for dp_shard in sizes {
                for cp in sizes {
                    for tp in sizes {
                        meshes.push(Mesh { pp, dp_replicate, dp_shard, cp, tp });
                    }
                }
            }
        }
    }
    meshes.retain(|m| m.size() <= max);
    meshes
}

/// Every cell: each mesh with all ZeRO stages, schedules and variants that it can have.
pub fn cells(max: usize) -> Vec<Cell> {
    let mut cells = Vec::new();
    for mesh in meshes(max) {
        let stages: &[usize] = if mesh.dp_shard * mesh.cp > 1 { &[1, 2, 3] } else { &[3] };
        let schedules: &[&str] = if mesh.pp > 1 { &SCHEDULES } else { &["1f1b"] };
        let sequence: &[bool] = if mesh.tp > 1 { &[false, true] } else { &[false] };
        let comms: &[&str] = if mesh.cp > 1 { &["ring", "allgather"] } else { &["ring"] };
        for &zero in stages {
            for &schedule in schedules {
                for &sequence_parallel in sequence {
                    for &cp_comm in comms {
                        cells.push(Cell { mesh, zero, schedule, sequence_parallel, cp_comm });
                    }
                }
            }
        }
    }
    cells
}

/// Loss and gradient norm of each step.
pub type Curve = Vec<(f64, f64)>;

/// Trains from the first step, or from the checkpoint `resume`, to step `until` of [`STEPS`]; returns the curve of the
/// steps that ran, and the checkpoint of the last one.
///
/// # Errors
/// What the run reports.
pub fn train(
    shape: Shape,
    cell: &Cell,
    dir: &Path,
    until: u64,
    resume: Option<&Path>,
) -> anyhow::Result<(Curve, PathBuf)> {
    let job = job(shape, cell, dir, until, resume, "")?.build()?;
    let curve = Mutex::new(Vec::new());
    let report = job.run_with(&phalanx::Control::default(), |event| {
        if let Event::Step(m) = event {
            curve.lock().expect("nobody panics with it").push((m.loss, m.grad_norm));
        }
    })?;
    let checkpoint = report.checkpoint.ok_or_else(|| anyhow::anyhow!("no checkpoint was saved"))?;
    Ok((curve.into_inner()?, checkpoint))
}

/// The job of a cell, whose output goes to a folder of its own in `dir`; `name` tells jobs of one cell apart.
///
/// # Errors
/// When the data cannot be written.
pub fn job(
    shape: Shape,
    cell: &Cell,
    dir: &Path,
    until: u64,
    resume: Option<&Path>,
    name: &str,
) -> anyhow::Result<JobBuilder> {
    let text = dir.join("text.jsonl");
    if !text.exists() {
        std::fs::write(&text, documents())?;
    }
    let output = dir.join(format!("{cell}-{until}{name}").replace(' ', "-"));
    let mut job = Job::builder();
    for (key, value) in shape.keys() {
        job = job.set(*key, value);
    }
    for (key, value) in cell.keys() {
        job = job.set(key, value);
    }
    let fixed = [
        ("tokenizer", "bytes"),
        ("datasets.0.type", "completion"),
        ("sequence_len", "32"),
        ("sample_packing", "true"),
        ("excess_length_strategy", "truncate"),
        ("micro_batch_size", "1"),
        ("learning_rate", "1e-3"),
        ("lr_scheduler", "constant"),
        ("warmup_steps", "2"),
        ("max_grad_norm", "0.5"),
        ("weight_decay", "0.1"),
        ("bf16", "false"),
        ("threads", "1"),
        ("zero_prefetch", "1"),
    ];
    for (key, value) in fixed {
        job = job.set(key, value);
    }
    let resume = resume.map_or("none".into(), |p| p.display().to_string());
    Ok(job
        .set("datasets.0.path", text.display())
        .set("dataset_prepared_path", dir.join("data").display())
        .set("max_steps", until)
        .set("resume_from_checkpoint", resume)
        .set("output_dir", output.display()))
}

/// Short documents of different lengths, so that packed rows hold several.
fn documents() -> String {
    let mut text = String::new();
    let mut state = 7u64;
    for i in 0..160 {
        let mut words = String::new();
        let n = 1 + (state >> 33) % 5;
        for _ in 0..n {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            words.push_str(
                ["the line ", "holds ", "when one ", "steps up ", "falls ", "behind "][(state >> 40) as usize % 6],
            );
        }
        text.push_str(&format!("{{\"text\": \"{} {words}\"}}\n", i % 13));
    }
    text
}

/// How far a curve is from the reference: the largest difference of a loss, and of a norm, relative.
pub fn distance(curve: &[(f64, f64)], reference: &[(f64, f64)]) -> (f64, f64) {
    if curve.len() != reference.len() || curve.is_empty() {
        return (f64::INFINITY, f64::INFINITY);
    }
    let pairs = || curve.iter().zip(reference);
    let worst = |d: f64, worst: f64| if d.is_nan() { f64::INFINITY } else { worst.max(d) };
    let loss = pairs().fold(0.0, |w, (a, b)| worst((a.0 - b.0).abs(), w));
    let norm = pairs().fold(0.0, |w, (a, b)| worst((a.1 - b.1).abs() / b.1, w));
    (loss, norm)
}
