//! The benchmark step: a Llama-shaped model with heads of width 64, SwiGLU and AdamW, in the shapes that are compared with PyTorch.

use phalanx::data::columns::Columns;
use phalanx::devices;
use phalanx_device::groups::Groups;
use phalanx_device::{Backing, Machine, Run};
use phalanx_strategies::compile::{Compiled, Offload, Parallel, StepSpec, compile_step};
use phalanx_strategies::model::{
    BatchShape, Family, Head, ModelConfig, Multipliers, NormPlacement, Output, QkNorm, RopeScaling,
};
use phalanx_strategies::optimizer::{AdamW, OptimizerSpec};
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::program::{Column, Hyper, Init, Kind, Op, Role, ValueId};
use phalanx_strategies::rng::CounterRng;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError};
use std::collections::BTreeMap;
use std::path::Path;

/// The small model: 6 layers of width 512, a vocabulary of 4,096, 24 million parameters.
pub fn small_model() -> ModelConfig {
    llama(6, 512, 1408, 4096)
}

/// A model and a batch by the name of their shape: `small` (4 rows of 256 tokens), or `medium`: 12 layers of width 768, a vocabulary of
/// 32,000 whose embeddings are the output's weights as well, 110 million parameters, one row of 1,024 tokens. Others are named by their
/// numbers, `WIDTHxLAYERSxVOCABULARYxROWSxTOKENS`; the width is a multiple of 64.
pub fn shape_named(name: &str) -> Option<(ModelConfig, BatchShape)> {
    match name {
        "small" => Some((small_model(), SMALL_BATCH)),
        "medium" => {
            let model = ModelConfig { tie_embeddings: true, max_positions: 1024, ..llama(12, 768, 2048, 32_000) };
            Some((model, BatchShape { n_rows: 1, seq_len: 1024 }))
        }
        _ => {
            let numbers: Vec<usize> = name.split('x').map_while(|n| n.parse().ok().filter(|n| *n > 0)).collect();
            let [width, n_layers, vocab_size, n_rows, seq_len] = numbers.try_into().ok()?;
            let model = ModelConfig { max_positions: seq_len, ..llama(n_layers, width, width * 11 / 4, vocab_size) };
            width.is_multiple_of(64).then_some((model, BatchShape { n_rows, seq_len }))
        }
    }
}

fn llama(n_layers: usize, hidden_size: usize, intermediate_size: usize, vocab_size: usize) -> ModelConfig {
    let head_dim = 64;
    ModelConfig {
        family: Family::named("llama").expect("a supported family"),
        vocab_size,
        hidden_size,
        intermediate_size,
        n_layers,
        n_heads: hidden_size / head_dim,
        n_kv_heads: hidden_size / head_dim,
        head_dim,
        max_positions: 256,
        norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        tie_embeddings: false,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        output: Output::Logits,
        multipliers: Multipliers::default(),
        norm_placement: NormPlacement::Before,
        qk_norm: QkNorm::None,
        packed_projections: false,
        windows: vec![None; n_layers],
        init_std: 0.02,
    }
}

/// A compiled step, before any of its memory exists.
#[derive(Debug)]
pub struct BenchProgram {
    model: ModelConfig,
    compiled: Compiled,
    spec: StepSpec,
    batch: BatchShape,
}

/// A compiled step with random weights and tokens.
pub struct BenchStep {
    machine: Box<dyn Machine>,
    compiled: Compiled,
    step: u64,
    spec: StepSpec,
    batch: BatchShape,
}

const SMALL_BATCH: BatchShape = BatchShape { n_rows: 4, seq_len: 256 };

impl BenchProgram {
    /// Compiles a step of `model` on batches of this shape.
    ///
    /// # Panics
    /// If a row is longer than the model's positions.
    pub fn new(model: ModelConfig, bf16: bool, batch: BatchShape) -> BenchProgram {
        let spec = StepSpec {
            n_microbatches: 1,
            precision: if bf16 { Precision::Bf16 } else { Precision::F32 },
            recompute: Recompute::None,
            lora: None,
            optimizer: OptimizerSpec::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() }),
            max_grad_norm: None,
            offload: Offload::default(),
            parallel: Parallel::default(),
        };
        let forward = model.forward(batch, Head::Loss).expect("the rows fit the positions");
        let compiled = compile_step(forward, &spec, devices::host().target()).expect("the step compiles");
        BenchProgram { model, compiled, spec, batch }
    }

    /// Memory of a step according to its layout.
    pub fn total_bytes(&self) -> u64 {
        self.compiled.layout.total_bytes() as u64
    }

    /// Allocates the machine and fills weights and inputs.
    ///
    /// # Panics
    /// If there is not enough memory.
    pub fn allocate(self) -> BenchStep {
        let BenchProgram { model, compiled, spec, batch } = self;
        let mut machine = devices::host().machine(&[&compiled], &Backing::default()).expect("memory for the step");
        let rng = CounterRng::new(7);
        for p in &compiled.program.params {
            let stream = rng.fork_named(&p.parts[0].name);
            machine.fill(&compiled, p.value, 0..compiled.program.value(p.value).n_elements(), |first, run| {
                for (i, x) in (first..).zip(run) {
                    *x = match p.init {
                        Init::Normal { std } => std * stream.normal(i as u64) as f32,
                        Init::Ones | Init::RowLengths(_) => 1.0,
                        Init::Zeros => 0.0,
                    };
                }
            });
        }
        for (i, v) in compiled.program.values.iter().enumerate().filter(|(_, v)| v.kind == Kind::Constant) {
            let table = model.constant(&v.name, &v.shape).expect("the model knows its tables");
            machine.write(&compiled, ValueId(i as u32), 0, &table);
        }
        for column in [Column::Ids, Column::Labels, Column::Positions, Column::DocStart] {
            let value = compiled.program.bound(Role::Column(column)).next().expect("the input is bound");
            let stream = rng.fork_named(&format!("{column:?}"));
            let token = |i: usize| match column {
                Column::Positions => (i % batch.seq_len) as i32,
                Column::DocStart => 0,
                _ => (stream.bits(i as u64) % model.vocab_size as u64) as i32,
            };
            let tokens: Vec<i32> = (0..compiled.program.value(value).n_elements()).map(token).collect();
            machine.write(&compiled, value, 0, &tokens);
        }
        BenchStep { machine, compiled, step: 0, spec, batch }
    }
}

impl BenchStep {
    /// The small model on 4 rows of 256 tokens.
    ///
    /// # Panics
    /// If there is not half a gigabyte of memory.
    pub fn new(bf16: bool) -> BenchStep {
        BenchProgram::new(small_model(), bf16, SMALL_BATCH).allocate()
    }

    /// Writes the current weights and batch, with the tensor names of a model directory.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_start(&self, path: &Path) -> Result<(), SafeTensorError> {
        let c = &self.compiled;
        let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
        for param in &c.program.params {
            let values = self.machine.read::<f32>(c, param.value);
            let mut at = 0;
            for part in &param.parts {
                let values = values[at..at + part.n_elements()].iter();
                tensors.push((
                    part.name.clone(),
                    Dtype::F32,
                    part.shape.clone(),
                    values.flat_map(|x| x.to_le_bytes()).collect(),
                ));
                at += part.n_elements();
            }
        }
        for (name, role) in [("ids", Role::Column(Column::Ids)), ("labels", Role::Column(Column::Labels))] {
            let value = c.program.bound(role).next().expect("the input is bound");
            let tokens = self.machine.read::<i32>(c, value);
            let bytes = tokens.iter().flat_map(|x| x.to_le_bytes()).collect();
            tensors.push((name.to_owned(), Dtype::I32, vec![self.batch.n_rows, self.batch.seq_len], bytes));
        }
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?)));
        safetensors::serialize_to_file(views.collect::<Result<Vec<_>, SafeTensorError>>()?, None, path)
    }

    /// Writes a batch in place of the random one.
    ///
    /// # Panics
    /// If a column has another length.
    pub fn write_batch(&mut self, batch: &Columns) {
        for (column, tokens) in batch.iter() {
            let value = self.compiled.program.bound(Role::Column(column)).next().expect("the input is bound");
            self.machine.write(&self.compiled, value, 0, tokens);
        }
    }

    /// Runs one step; returns the mean loss.
    ///
    /// # Panics
    /// Never: the program has no operation that can fail.
    pub fn run(&mut self) -> f64 {
        self.prepare();
        self.machine.run_all(&self.compiled, &mut Groups::none()).expect("the step runs");
        let loss = self.compiled.program.bound(Role::LossSum).next().expect("the loss is bound");
        self.machine.first::<f64>(&self.compiled, loss) / self.batch.n_tokens() as f64
    }

    fn prepare(&mut self) {
        self.step += 1;
        let of_rule = self.spec.optimizer.scalars(self.step);
        let hyper = self.compiled.program.bound(Role::Hyper).next().expect("the scalars are bound");
        let mut scalars = [0.0; Hyper::LEN];
        scalars[Hyper::LEARNING_RATE] = 3e-4;
        scalars[Hyper::RULE..][..of_rule.len()].copy_from_slice(&of_rule);
        scalars[Hyper::LOSS_GRAD_SCALE] = 1.0 / self.batch.n_tokens() as f64;
        scalars[Hyper::LOSS_SCALE] = 1.0;
        self.machine.write(&self.compiled, hyper, 0, &scalars);
    }

    /// Prints the time of a step by operation and shape of its result, as the median of `n` runs.
    ///
    /// # Panics
    /// As [`BenchStep::run`].
    pub fn print_profile(&mut self, n: usize) {
        let mut runs = Vec::new();
        for _ in 0..n {
            self.prepare();
            let mut timings = Vec::new();
            let mut groups = Groups::none();
            let with = &mut Run { timings: Some(&mut timings), ..Run::with(&mut groups) };
            self.machine.run(&self.compiled, 0..self.compiled.program.instrs.len(), with).expect("the step runs");
            runs.push(timings);
        }
        let mut by_kind: BTreeMap<String, (f64, usize)> = BTreeMap::new();
        for (i, instr) in self.compiled.program.instrs.iter().enumerate() {
            let mut times: Vec<f64> = runs.iter().map(|r| r[i].as_secs_f64() * 1e3).collect();
            times.sort_by(f64::total_cmp);
            let shape = instr.writes.first().map(|v| self.compiled.program.value(*v).shape.clone());
            let layout = match &instr.op {
                Op::MatMul(m) => format!(" {}{} res={}", letter(m.trans_a), letter(m.trans_b), m.residual),
                _ => String::new(),
            };
            let kind = format!("{}{layout} {:?}", instr.op.name(), shape.unwrap_or_default());
            let entry = by_kind.entry(kind).or_default();
            *entry = (entry.0 + times[n / 2], entry.1 + 1);
        }
        let mut rows: Vec<_> = by_kind.into_iter().collect();
        rows.sort_by(|a, b| b.1.0.total_cmp(&a.1.0));
        rows.iter().take(30).for_each(|(k, (ms, n))| eprintln!("{ms:8.2} ms  {n:3} x  {k}"));
    }
}

fn letter(transposed: bool) -> char {
    if transposed { 'T' } else { 'N' }
}
