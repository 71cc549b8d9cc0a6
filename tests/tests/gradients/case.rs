//! A small random model with its data, and a machine that computes its loss and gradient.

use phalanx::devices;
use phalanx_device::groups::Groups;
use phalanx_device::{Backing, Machine, packed};
use phalanx_strategies::compile::{Compiled, Offload, Parallel, StepSpec, compile_forward, compile_step};
use phalanx_strategies::model::{BatchShape, FAMILIES, Family, HfConfig, ModelConfig, RopeScaling};
use phalanx_strategies::objective::{Objective, Weighted};
use phalanx_strategies::optimizer::{OptimizerSpec, Sgd};
use phalanx_strategies::passes::lora::LoraSpec;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::program::{Column, DType, Hyper, Init, Instr, Kind, Op, Packing, Program, Role, ValueId, op};
use phalanx_strategies::rng::CounterRng;
use phalanx_strategies::target::Target;
use proptest::prelude::*;
use serde_json::json;
use std::collections::BTreeMap;

/// Tensors by parameter name.
pub type Tensors = BTreeMap<String, Vec<f32>>;

pub const VOCABULARY: usize = 37;

/// A model and how its step is split.
#[derive(Clone, Debug)]
pub struct Case {
    pub model: ModelConfig,
    pub seq_len: usize,
    pub rows: usize,
    pub n_microbatches: usize,
    pub recompute: Recompute,
    /// f32, except in tests that compare bits.
    pub precision: Precision,
    pub lora: Option<LoraSpec>,
    /// Rows hold two documents each.
    pub packed: bool,
    /// Tokens count more or less.
    pub weighted: bool,
    pub seed: u64,
}

/// The tokens of a step, row after row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Data {
    pub ids: Vec<i32>,
    pub labels: Vec<i32>,
    pub positions: Vec<i32>,
    pub doc_start: Vec<i32>,
    /// How much each label counts; 1 if tokens have no weights.
    pub loss_weights: Vec<f32>,
}

impl Data {
    /// One over the sum of the weights of all labels.
    fn scale(&self) -> f64 {
        let counted = self.labels.iter().zip(&self.loss_weights).filter(|(label, _)| **label >= 0);
        1.0 / counted.map(|(_, weight)| f64::from(*weight)).sum::<f64>()
    }
}

/// Every family, with biases, grouped heads, windows, tied heads and adapters where it supports them.
pub fn cases() -> impl Strategy<Value = Case> {
    let family = prop::sample::select(FAMILIES.to_vec());
    let shape = (1usize..=2, prop::sample::select(vec![1usize, 2, 4]), any::<bool>(), prop::option::of(2usize..9));
    let cut = (6usize..=14, 1usize..=2, 1usize..=3);
    let recompute = prop::sample::select(vec![Recompute::None, Recompute::Selective, Recompute::Full]);
    (family, shape, cut, recompute, any::<bool>(), any::<bool>(), any::<u64>()).prop_map(
        |(
            family,
            (n_layers, n_kv_heads, tied, window),
            (seq_len, rows, n_microbatches),
            recompute,
            lora,
            packed,
            seed,
        )| {
            let model = small_model(family, n_layers, n_kv_heads, tied, window);
            let lora = lora.then(|| adapters(family));
            let (precision, weighted) = (Precision::F32, false);
            Case { model, seq_len, rows, n_microbatches, recompute, precision, lora, packed, weighted, seed }
        },
    )
}

/// Read from a `config.json`, so that every family sets its own fields; values are far from their defaults, so that a missing
/// term is detected.
fn small_model(family: &Family, n_layers: usize, n_kv_heads: usize, tied: bool, window: Option<usize>) -> ModelConfig {
    let keys = json!({
        "model_type": family.model_type, "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 20,
        "n_inner": 20, "num_hidden_layers": n_layers, "num_attention_heads": 4, "num_key_value_heads": n_kv_heads,
        "max_position_embeddings": 32, "rope_theta": 100.0, "rms_norm_eps": 1e-5, "initializer_range": 0.3,
        "tie_word_embeddings": tied, "attention_bias": tied, "mlp_bias": tied,
        "embedding_multiplier": 1.5, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 1.25,
    });
    let hf: HfConfig = serde_json::from_value(keys).expect("an object");
    ModelConfig {
        rope_scaling: if n_layers == 2 { RopeScaling::Linear { factor: 2.0 } } else { RopeScaling::None },
        windows: (0..n_layers).map(|layer| window.filter(|_| layer == 0)).collect(),
        ..ModelConfig::try_from(&hf).expect("every family reads these keys")
    }
}

/// Adapters on some of a family's layers: alone, and several in one fused projection.
pub fn adapters(family: &Family) -> LoraSpec {
    let left_out = ["k_proj", "gate_proj", "c_fc"];
    let targets = family.linears.iter().filter(|name| !left_out.contains(name));
    let target_modules = targets.map(ToString::to_string).collect();
    LoraSpec { rank: 3, alpha: 3.0, target_modules, ..LoraSpec::default() }
}

impl Case {
    pub fn spec(&self) -> StepSpec {
        StepSpec {
            n_microbatches: self.n_microbatches,
            precision: self.precision,
            recompute: self.recompute,
            lora: self.lora.clone(),
            // Without momentum the buffer is the gradient itself, bit for bit.
            optimizer: OptimizerSpec::Sgd(Sgd::default()),
            max_grad_norm: None,
            offload: Offload::default(),
            parallel: Parallel::default(),
        }
    }

    pub fn rng(&self, name: &str) -> CounterRng {
        CounterRng::new(self.seed).fork_named(name)
    }

    /// Weights far from their defaults, so that a missing term is detected.
    pub fn weights(&self) -> Tensors {
        let compiled = self.compile_train();
        let std = 1.2 / (self.model.hidden_size as f32).sqrt();
        let of = |p: &phalanx_strategies::program::Param| {
            let value = compiled.program.value(p.value);
            let stream = self.rng(&value.name);
            let normal = |i: usize| stream.normal(i as u64) as f32;
            let element = |i| match p.init {
                Init::Normal { .. } => std * normal(i),
                Init::Ones | Init::RowLengths(_) => 1.0 + 0.2 * normal(i),
                Init::Zeros => 0.2 * normal(i),
            };
            let n_weights = p.packing.map_or(value.n_elements(), |packing| packing.weights(value.n_elements()));
            (value.name.clone(), (0..n_weights).map(element).collect())
        };
        compiled.program.params.iter().map(of).collect()
    }

    /// Random rows of one or two documents; a few tokens have no label.
    pub fn data(&self) -> Data {
        let mut data = Data::default();
        for row in 0..self.rows * self.n_microbatches {
            let rng = self.rng("row").fork(row as u64);
            let second = if self.packed { 2 + rng.bits(0) as usize % (self.seq_len - 3) } else { 0 };
            for t in 0..self.seq_len {
                let start = if t < second { 0 } else { second };
                let label = (rng.bits(2 * t as u64 + 2) % VOCABULARY as u64) as i32;
                let last = t + 1 == second || t + 1 == self.seq_len;
                data.ids.push((rng.bits(2 * t as u64 + 1) % VOCABULARY as u64) as i32);
                data.labels.push(if last || label == 0 { -100 } else { label });
                data.positions.push((t - start) as i32);
                data.doc_start.push(start as i32);
                let weight = if self.weighted { 1 + rng.fork_named("weight").bits(t as u64) % 4 } else { 2 };
                data.loss_weights.push(0.5 * weight as f32);
            }
        }
        data
    }

    pub fn compile_train(&self) -> Compiled {
        self.compile_train_for(devices::host().target())
    }

    /// The training program in which something reads every frozen matrix as f32, so that all are stored as f32.
    pub fn compile_train_in_f32(&self) -> Compiled {
        let mut forward = self.forward();
        let mut program = Program { instrs: Vec::new(), ..forward.clone() };
        let site = forward.instrs[0].site;
        for param in forward.params.iter().filter(|param| param.shape.len() == 2) {
            let copy = program.add_value("copy", &param.shape, DType::F16, Kind::Activation);
            program.push(Op::Cast(op::Cast), vec![param.value], vec![copy], site);
        }
        program.instrs.append(&mut forward.instrs);
        compile_step(program, &self.spec(), devices::host().target()).expect("every case compiles")
    }

    fn compile_train_for(&self, target: &dyn Target) -> Compiled {
        compile_step(self.forward(), &self.spec(), target).expect("every case compiles")
    }

    fn forward(&self) -> Program {
        let batch = BatchShape { n_rows: self.rows, seq_len: self.seq_len };
        let objective = if self.weighted { Objective::Weighted(Weighted) } else { Objective::Supervised };
        objective.program(&self.model, batch).expect("the rows fit the positions")
    }
}

/// The host, with the logits of so many tokens at a time.
struct HeadChunks(usize);

impl Target for HeadChunks {
    fn scratch_bytes(&self, program: &Program, instr: &Instr) -> usize {
        devices::host().target().scratch_bytes(program, instr)
    }

    fn head_chunk_tokens(&self) -> Option<usize> {
        Some(self.0)
    }
}

/// A compiled case on a machine.
pub struct Bench {
    machine: Box<dyn Machine>,
    pub train: Compiled,
    eval: Compiled,
    scale: f64,
}

impl Bench {
    pub fn new(case: &Case) -> Bench {
        Bench::with_program(case, case.compile_train())
    }

    /// A bench with a modified training program.
    pub fn with_program(case: &Case, train: Compiled) -> Bench {
        Bench::with_programs(case, train, devices::host().target())
    }

    /// A bench that computes the logits of so many tokens at a time.
    pub fn with_head_chunks(case: &Case, tokens: usize) -> Bench {
        let target = HeadChunks(tokens);
        Bench::with_programs(case, case.compile_train_for(&target), &target)
    }

    fn with_programs(case: &Case, train: Compiled, target: &dyn Target) -> Bench {
        let eval = compile_forward(case.forward(), &case.spec(), target).expect("every case compiles");
        let mut machine = devices::host().machine(&[&train, &eval], &Backing::default()).expect("a small model fits");
        for compiled in [&train, &eval] {
            let constants = compiled.program.values.iter().enumerate().filter(|(_, v)| v.kind == Kind::Constant);
            for (i, v) in constants {
                let table = case.model.constant(&v.name, &v.shape).expect("the model knows its tables");
                machine.write(compiled, ValueId(i as u32), 0, &table);
            }
        }
        let mut bench = Bench { machine, train, eval, scale: 1.0 };
        bench.set_weights(&case.weights());
        bench
    }

    /// Sets the weights of the program's parameters and ignores others, such as those of an adapter.
    pub fn set_weights(&mut self, weights: &Tensors) {
        for p in &self.train.program.params {
            let weights = &weights[&self.train.program.value(p.value).name];
            match p.packing {
                Some(packing) => self.machine.write(&self.train, p.value, 0, &words(packing, weights)),
                None => self.machine.write(&self.train, p.value, 0, weights),
            }
        }
    }

    pub fn weights(&self) -> Tensors {
        let of = |p: &phalanx_strategies::program::Param| {
            let name = self.train.program.value(p.value).name.clone();
            let Some(packing) = p.packing else { return (name, self.machine.read(&self.train, p.value)) };
            let words: Vec<u32> = self.machine.read(&self.train, p.value);
            let mut weights = vec![0.0; packing.weights(words.len())];
            packed::unpack(packing, &words, &mut weights);
            (name, weights)
        };
        self.train.program.params.iter().map(of).collect()
    }

    /// Trains one step with learning rate `lr`; returns the mean loss and the gradient of every trained parameter.
    pub fn step(&mut self, data: &Data, lr: f64) -> (f64, Tensors) {
        self.scale = data.scale();
        let train = self.train.clone();
        self.fill(&train, data, 0);
        let hyper = train.program.bound(Role::Hyper).next().expect("a step has scalars");
        self.machine.write(&train, hyper, 0, &[lr, 1.0, 1.0, self.scale, 1.0]);
        assert_eq!((Hyper::LEARNING_RATE, Hyper::LOSS_GRAD_SCALE, Hyper::LOSS_SCALE), (0, 3, 4));
        self.machine.run_all(&train, &mut Groups::none()).expect("the step runs");
        let mut grads = Tensors::new();
        for (i, v) in train.program.values.iter().enumerate() {
            if let Some(name) = v.name.strip_prefix("momentum_buffer.") {
                grads.insert(name.into(), self.machine.read(&train, ValueId(i as u32)));
            }
        }
        (self.loss_of(&train) * self.scale, grads)
    }

    /// Mean loss of the same step, computed by the forward program, microbatch after microbatch.
    pub fn loss(&mut self, data: &Data) -> f64 {
        let eval = self.eval.clone();
        let ids = eval.program.bound(Role::Column(Column::Ids)).next().expect("a model reads ids");
        let n = eval.program.value(ids).n_elements();
        let mut sum = 0.0;
        for first in (0..data.ids.len()).step_by(n) {
            self.fill(&eval, data, first);
            self.machine.run_all(&eval, &mut Groups::none()).expect("the forward program runs");
            sum += self.loss_of(&eval);
        }
        sum * data.scale()
    }

    fn loss_of(&self, compiled: &Compiled) -> f64 {
        let loss = compiled.program.bound(Role::LossSum).next().expect("the program ends at a loss");
        self.machine.first::<f64>(compiled, loss)
    }

    /// Fills all microbatches of the program with the tokens from `first` on.
    fn fill(&mut self, compiled: &Compiled, data: &Data, first: usize) {
        let columns = [
            (Role::Column(Column::Ids), &data.ids),
            (Role::Column(Column::Labels), &data.labels),
            (Role::Column(Column::Positions), &data.positions),
            (Role::Column(Column::DocStart), &data.doc_start),
        ];
        for (role, column) in columns {
            let mut at = first;
            for value in compiled.program.bound(role) {
                let n = compiled.program.value(value).n_elements();
                self.machine.write(compiled, value, 0, &column[at..at + n]);
                at += n;
            }
        }
        let mut at = first;
        for value in compiled.program.bound(Role::Column(Column::LossWeights)) {
            let n = compiled.program.value(value).n_elements();
            self.machine.write(compiled, value, 0, &data.loss_weights[at..at + n]);
            at += n;
        }
    }
}

/// Weights of bf16 as words.
fn words(packing: Packing, weights: &[f32]) -> Vec<u32> {
    let mut words = vec![0; packing.words(weights.len())];
    let blocks = words.chunks_mut(packing.n_words()).zip(weights.chunks(packing.n_weights()));
    blocks.for_each(|(words, weights)| packed::pack(packing, weights, packed::scale_of(packing, weights), words));
    words
}

/// L2 norm of a tensor.
pub fn norm(x: &[f32]) -> f64 {
    x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
}

/// Largest distance of a tensor from its counterpart, relative to the norm of all tensors; infinite if names or shapes differ
/// or a value is not finite.
pub fn distance(a: &Tensors, b: &Tensors) -> f64 {
    let all = b.values().map(|t| norm(t).powi(2)).sum::<f64>().sqrt();
    if a.keys().ne(b.keys()) {
        return f64::INFINITY;
    }
    let of = |(x, y): (&Vec<f32>, &Vec<f32>)| {
        let difference: Vec<f32> = x.iter().zip(y).map(|(x, y)| x - y).collect();
        let distance = norm(&difference) / all;
        if x.len() == y.len() && distance.is_finite() { distance } else { f64::INFINITY }
    };
    a.values().zip(b.values()).map(of).fold(0.0, f64::max)
}
