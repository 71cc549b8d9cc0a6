//! Whole training steps of small models of every kind, run on two devices.

use anyhow::{Result, ensure};
use half::bf16;
use phalanx_device::e4m3;
use phalanx_device::groups::Groups;
use phalanx_device::{Backing, Device, Machine, Run, packed};
use phalanx_strategies::compile::{Compiled, Offload, Parallel, StepSpec, compile_step};
use phalanx_strategies::model::{
    BatchShape, Family, Head, ModelConfig, Multipliers, NormPlacement, Output, QkNorm, RopeScaling,
};
use phalanx_strategies::optimizer::{AdamW, OptimizerSpec};
use phalanx_strategies::passes::lora::LoraSpec;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::program::packing::E4M3_STEP;
use phalanx_strategies::program::{Column, Hyper, Init, Kind, Packing, Param, Role, ValueId};
use phalanx_strategies::rng::CounterRng;
use std::time::Instant;

/// A model and how it is trained.
#[derive(Clone, Debug)]
pub struct StepCase {
    /// Its name in reports.
    pub name: String,
    /// The model.
    pub model: ModelConfig,
    /// The batch of one microbatch.
    pub batch: BatchShape,
    /// How it is trained.
    pub spec: StepSpec,
    /// Tokens of a document; documents are packed in a row.
    pub document: usize,
    /// How far losses may differ, relative.
    pub loss_tolerance: f64,
    /// How far weights may differ after all steps, relative to their largest update.
    pub weight_tolerance: f64,
    /// Least cosine between what a tensor moved by on either device.
    pub movement_cosine_min: f64,
}

/// What a device computed.
#[derive(Clone, Debug, PartialEq)]
pub struct Trained {
    /// Mean loss of each step.
    pub losses: Vec<f64>,
    /// Norm of each step's gradient.
    pub grad_norms: Vec<f64>,
    /// Parameters in the order of the table.
    pub weights: Vec<TrainedParam>,
}

/// A step that was timed.
#[derive(Debug)]
pub struct Timed {
    /// The step.
    pub compiled: Compiled,
    /// The least time of each instruction, in seconds; infinite without runs.
    pub instrs: Vec<f64>,
    /// The times of whole steps, in seconds, the least first.
    pub steps: Vec<f64>,
    /// Bytes that the machine holds.
    pub bytes: usize,
}

impl Timed {
    /// The median of whole steps, in seconds.
    pub fn median(&self) -> f64 {
        self.steps.get(self.steps.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// The weights of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainedParam {
    /// Its name.
    pub name: String,
    /// Before the first step.
    pub start: Vec<f32>,
    /// After the last step.
    pub end: Vec<f32>,
}

const LEARNING_RATE: f64 = 1e-3;
/// Part of a parameter's elements that may differ by more than the tolerance: AdamW divides by the root of the squared gradient, so
/// a gradient that is only rounding moves its weight as far as any other.
const NOISY: f64 = 0.01;
/// A third of the bias of queries, keys and values is that of the keys. It adds the same to all scores of a query, which the
/// softmax ignores: its gradient is zero but for rounding.
const NOISY_BIAS: f64 = 0.34;

/// A small Llama.
pub fn small_model() -> ModelConfig {
    ModelConfig {
        family: Family::named("llama").expect("a supported family"),
        vocab_size: 131,
        hidden_size: 64,
        intermediate_size: 88,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 16,
        max_positions: 64,
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
        windows: vec![None; 2],
        init_std: 0.08,
    }
}

fn spec() -> StepSpec {
    StepSpec {
        n_microbatches: 1,
        precision: Precision::F32,
        recompute: Recompute::None,
        lora: None,
        optimizer: OptimizerSpec::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() }),
        max_grad_norm: Some(1.0),
        offload: Offload::default(),
        parallel: Parallel::default(),
    }
}

/// From this many elements on, a parameter begins with uniform numbers: to draw billions of normal ones takes longer than the steps.
const LARGE: usize = 1 << 24;
/// What makes uniform 32-bit integers numbers with a standard deviation of 1.
const UNIT_UNIFORM: f32 = 1.732_050_8 / 2_147_483_648.0;

/// Writes `number(i)` to each element `i` of a run that begins with element `first`; all processors share the work.
fn fill_run<T: Send>(first: usize, run: &mut [T], number: &(impl Fn(usize) -> T + Sync)) {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let len = run.len().div_ceil(n_threads).max(1 << 14);
    std::thread::scope(|scope| {
        for (i, part) in run.chunks_mut(len).enumerate() {
            scope.spawn(move || (first + i * len..).zip(part).for_each(|(i, x)| *x = number(i)));
        }
    });
}

/// The word at `i` of packed weights with this standard deviation, uniform where the packing has numbers. Billions of them are made.
fn packed_word(packing: Packing, std: f32, i: usize, random: u64) -> u32 {
    match packing {
        Packing::Bf16 => {
            let scale = std * UNIT_UNIFORM;
            let bits = |half: u64| u32::from(bf16::from_f32(half as u32 as i32 as f32 * scale).to_bits());
            bits(random) | bits(random >> 32) << 16
        }
        // Magnitudes up to twice the deviation, rounded towards zero.
        Packing::E4m3 => {
            let code = |byte: u64| u32::from(e4m3::encode(byte as u8 as i8 as f32 / 64.0 * std / E4M3_STEP));
            (0..4).map(|i| code(random >> (8 * i)) << (8 * i)).sum()
        }
        // The largest magnitude of a block, before its codes.
        Packing::Int8 | Packing::Nf4 { .. } if i.is_multiple_of(packing.n_words()) => (2.0 * std).to_bits(),
        Packing::Int8 | Packing::Nf4 { .. } => random as u32,
    }
}

/// Steps of every kind of model, precision and memory option.
pub fn all() -> Vec<StepCase> {
    let llama = small_model();
    let family = |name: &str| Family::named(name).expect("a supported family");
    let gpt2 = small_gpt2();
    let gpt2_wide = ModelConfig { intermediate_size: 96, ..gpt2.clone() };
    let models = [
        ("llama", llama.clone()),
        ("llama with tied embeddings", ModelConfig { tie_embeddings: true, ..llama.clone() }),
        ("mistral", ModelConfig { family: family("mistral"), windows: vec![Some(9); 2], ..llama.clone() }),
        ("qwen2", ModelConfig { family: family("qwen2"), qkv_bias: true, ..llama.clone() }),
        ("qwen3", ModelConfig { family: family("qwen3"), qk_norm: QkNorm::Heads, ..llama.clone() }),
        (
            "olmo2",
            ModelConfig {
                family: family("olmo2"),
                qk_norm: QkNorm::Projections,
                norm_placement: NormPlacement::After,
                ..llama.clone()
            },
        ),
        ("gpt2", gpt2),
    ];
    let mut cases: Vec<StepCase> = Vec::new();
    for (name, model) in models {
        cases.push(case(format!("{name} in f32"), model, spec()));
    }
    let half = |precision| StepSpec { precision, ..spec() };
    cases.push(case("llama in bf16".into(), llama.clone(), half(Precision::Bf16)));
    cases.push(case("llama in fp16".into(), llama.clone(), half(Precision::F16)));
    let recompute = StepSpec { recompute: Recompute::Full, ..spec() };
    cases.push(case("llama with recomputation".into(), llama.clone(), recompute));
    let accumulate = StepSpec { n_microbatches: 3, ..spec() };
    cases.push(case("llama with three microbatches".into(), llama.clone(), accumulate));
    let target_modules = ["q_proj", "v_proj", "down_proj"].map(String::from).to_vec();
    let lora = StepSpec {
        lora: Some(LoraSpec { rank: 4, alpha: 8.0, target_modules, dropout: 0.1, ..LoraSpec::default() }),
        ..spec()
    };
    for (name, precision) in [("bf16", Precision::Bf16), ("fp16", Precision::F16)] {
        let spec = StepSpec { precision, ..lora.clone() };
        cases.push(case(format!("llama with adapters in {name}"), llama.clone(), spec));
    }
    cases.push(case("llama with adapters".into(), llama.clone(), lora.clone()));
    let sharing = lora.lora.clone().map(|lora| LoraSpec { dropout: 0.0, ..lora });
    for (name, precision) in [("f32", Precision::F32), ("bf16", Precision::Bf16)] {
        let spec = StepSpec { precision, lora: sharing.clone(), ..spec() };
        cases.push(case(format!("llama with adapters that share products in {name}"), llama.clone(), spec));
    }
    cases.extend(fp8([llama.clone(), gpt2_wide], [lora.lora, sharing]));
    let offload = StepSpec { offload: Offload { optimizer: true, ..Offload::default() }, ..spec() };
    cases.push(case("llama with offloaded state".into(), llama, offload));
    cases
}

fn small_gpt2() -> ModelConfig {
    ModelConfig {
        family: Family::named("gpt2").expect("a supported family"),
        n_kv_heads: 4,
        tie_embeddings: true,
        qkv_bias: true,
        o_bias: true,
        mlp_bias: true,
        ..small_model()
    }
}

/// Steps in FP8, whole and with these adapters. Feed-forward layers of 88 stay in bf16, of 96 they are in FP8.
fn fp8([llama, gpt2]: [ModelConfig; 2], [dropout, sharing]: [Option<LoraSpec>; 2]) -> Vec<StepCase> {
    let wide = ModelConfig { intermediate_size: 96, ..llama.clone() };
    let fp8 = StepSpec { precision: Precision::Fp8, ..spec() };
    let recompute = StepSpec { recompute: Recompute::Full, n_microbatches: 2, ..fp8.clone() };
    let [dropout, sharing] = [dropout, sharing].map(|lora| StepSpec { lora, ..fp8.clone() });
    vec![
        case("llama in fp8".into(), wide.clone(), fp8.clone()),
        case("gpt2 in fp8".into(), gpt2, fp8),
        case("llama in fp8 with recomputation".into(), llama, recompute),
        case("llama with adapters in fp8".into(), wide.clone(), sharing),
        case("llama with adapters and dropout in fp8".into(), wide, dropout),
    ]
}

/// The numbers of a parameter.
fn weights(machine: &dyn Machine, c: &Compiled, param: &Param) -> Vec<f32> {
    let Some(packing) = param.packing else { return machine.read(c, param.value) };
    let words: Vec<u32> = machine.read(c, param.value);
    let mut weights = vec![0.0; packing.weights(words.len())];
    packed::unpack(packing, &words, &mut weights);
    weights
}

fn case(name: String, model: ModelConfig, spec: StepSpec) -> StepCase {
    // f32: the sums of products and norms run in other orders. Narrow types: a unit in the last place of an activation; the gradient of
    // an adapter's first matrix is nearly zero at first, and its direction the least certain (0.92 in bf16).
    let (loss_tolerance, weight_tolerance, movement_cosine_min) = match spec.precision {
        Precision::F32 => (2e-5, 2e-2, 0.999),
        Precision::Bf16 => (2e-2, 1.0, 0.85),
        // One more or less in the last place of an activation may be the next number of FP8, which is an eighth larger.
        Precision::Fp8 => (2e-2, 1.0, 0.8),
        Precision::F16 => (2e-3, 1.0, 0.85),
    };
    let batch = BatchShape { n_rows: 2, seq_len: 40 };
    StepCase { name, model, batch, spec, document: 17, loss_tolerance, weight_tolerance, movement_cosine_min }
}

impl TrainedParam {
    /// What training added to the weights.
    fn movement(&self) -> Vec<f64> {
        self.start.iter().zip(&self.end).map(|(start, end)| f64::from(*end) - f64::from(*start)).collect()
    }
}

/// The cosine of the angle between two vectors; 1 between two that are zero, and 0 between one that is zero and one that is not.
fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let lengths = (dot(a, a) * dot(b, b)).sqrt();
    if lengths > 0.0 { dot(a, b) / lengths } else { f64::from(u8::from(dot(a, a) == dot(b, b))) }
}

impl StepCase {
    /// A case of this model, batch and precision.
    pub fn new(name: &str, model: ModelConfig, batch: BatchShape, precision: Precision) -> StepCase {
        let case = case(name.to_owned(), model, StepSpec { precision, ..spec() });
        StepCase { batch, document: batch.seq_len, ..case }
    }

    /// The same case, trained in another way.
    #[must_use]
    pub fn trained(self, change: impl FnOnce(StepSpec) -> StepSpec) -> StepCase {
        StepCase { spec: change(self.spec), ..self }
    }

    /// Times the step: `n_runs` times instruction by instruction, after one run that warms up, and then `n_steps` times as a whole,
    /// its tokens written and its loss read each time, after two steps that warm up.
    ///
    /// # Errors
    /// What the compiler or the device reports.
    pub fn time(&self, device: &dyn Device, n_runs: usize, n_steps: usize) -> Result<Timed> {
        let compiled = self.compiled(device)?;
        let c = &compiled;
        let (instrs, steps, bytes) = device.on_device_thread(1, || {
            let mut machine = device.machine(&[c], &Backing::default())?;
            self.fill(&mut *machine, c);
            let instrs = self.time_instrs(&mut *machine, c, n_runs)?;
            let steps = self.time_steps(&mut *machine, c, n_steps)?;
            Ok::<_, anyhow::Error>((instrs, steps, machine.allocated_bytes()))
        })??;
        Ok(Timed { compiled, instrs, steps, bytes })
    }

    /// The step, compiled for a device.
    ///
    /// # Errors
    /// What the compiler reports.
    pub fn compiled(&self, device: &dyn Device) -> Result<Compiled> {
        let forward = self.model.forward(self.batch, Head::Loss)?;
        Ok(compile_step(forward, &self.spec, device.target())?)
    }

    fn time_instrs(&self, machine: &mut dyn Machine, c: &Compiled, n_runs: usize) -> Result<Vec<f64>> {
        let (mut best, mut groups) = (vec![f64::INFINITY; c.program.instrs.len()], Groups::none());
        self.put_tokens(machine, c, 1);
        for run in 0..n_runs + usize::from(n_runs > 0) {
            self.put_scalars(machine, c, 1 + run as u64);
            let mut timings = Vec::new();
            let with = &mut Run { timings: Some(&mut timings), ..Run::with(&mut groups) };
            machine.run(c, 0..c.program.instrs.len(), with)?;
            if run > 0 {
                best.iter_mut().zip(&timings).for_each(|(best, time)| *best = best.min(time.as_secs_f64()));
            }
        }
        Ok(best)
    }

    fn time_steps(&self, machine: &mut dyn Machine, c: &Compiled, n_steps: usize) -> Result<Vec<f64>> {
        let (mut seconds, tokens) = (Vec::new(), self.tokens(c, 1));
        for step in 1..=(if n_steps > 0 { n_steps as u64 + 2 } else { 0 }) {
            let begin = Instant::now();
            self.put_scalars(machine, c, step);
            tokens.iter().for_each(|(v, tokens)| machine.write(c, *v, 0, tokens));
            machine.run_all(c, &mut Groups::none())?;
            let loss = c.program.bound(Role::LossSum).map(|v| machine.first::<f64>(c, v)).sum::<f64>();
            ensure!(loss.is_finite(), "{}: the loss of step {step} is {loss}", self.name);
            seconds.push(begin.elapsed().as_secs_f64());
        }
        seconds.drain(..seconds.len().min(2));
        seconds.sort_by(f64::total_cmp);
        Ok(seconds)
    }

    /// Trains for `n_steps` on a device.
    ///
    /// # Errors
    /// What the compiler or the device reports.
    pub fn run(&self, device: &dyn Device, n_steps: u64) -> Result<Trained> {
        let c = self.compiled(device)?;
        device.on_device_thread(1, || {
            let mut machine = device.machine(&[&c], &Backing::default())?;
            let (planned, taken) = (device.bytes_for(&[&c]), machine.allocated_bytes());
            ensure!(planned == taken, "{}: {planned} bytes planned, {taken} allocated", self.name);
            self.fill(&mut *machine, &c);
            let start = |p: &Param| TrainedParam {
                name: p.parts[0].name.clone(),
                start: weights(&*machine, &c, p),
                end: Vec::new(),
            };
            let params = c.program.params.iter().map(start).collect();
            let mut trained = Trained { losses: Vec::new(), grad_norms: Vec::new(), weights: params };
            for step in 1..=n_steps {
                self.put_scalars(&mut *machine, &c, step);
                self.put_tokens(&mut *machine, &c, step);
                machine.run_all(&c, &mut Groups::none())?;
                let losses = c.program.bound(Role::LossSum).map(|v| machine.first::<f64>(&c, v)).sum::<f64>();
                trained.losses.push(losses / self.n_tokens() as f64);
                let norm = c.program.bound(Role::GradNorm).next();
                trained.grad_norms.extend(norm.map(|v| machine.first::<f64>(&c, v)));
            }
            for (p, param) in c.program.params.iter().zip(&mut trained.weights) {
                param.end = weights(&*machine, &c, p);
            }
            Ok(trained)
        })?
    }

    /// Trains on both devices and compares losses, norms and weights.
    ///
    /// # Errors
    /// Names what differs.
    pub fn compare(&self, reference: &dyn Device, device: &dyn Device, n_steps: u64) -> Result<()> {
        let (expected, found) = (self.run(reference, n_steps)?, self.run(device, n_steps)?);
        let pairs = expected.losses.iter().zip(&found.losses).map(|pair| ("loss", pair));
        let norms = expected.grad_norms.iter().zip(&found.grad_norms).map(|pair| ("gradient norm", pair));
        for (what, (y, x)) in pairs.chain(norms) {
            let agrees = (x - y).abs() <= self.loss_tolerance * y.abs().max(1.0);
            ensure!(agrees, "{}: {what} {x} on {}, {y} on {}", self.name, device.name(), reference.name());
        }
        let allowed = self.weight_tolerance * LEARNING_RATE * n_steps as f64;
        expected.weights.iter().zip(&found.weights).try_for_each(|(y, x)| self.compare_weights(y, x, allowed))
    }

    /// Compares a parameter's weights, and the directions in which it moved: in narrow types the tolerance of a weight is as large as
    /// the largest movement, so the weights alone would also agree with a device that updates nothing.
    fn compare_weights(&self, expected: &TrainedParam, found: &TrainedParam, allowed: f64) -> Result<()> {
        let (case, name, n) = (&self.name, &expected.name, expected.end.len());
        let is_apart = |(y, x): &(&f32, &f32)| f64::from((*x - *y).abs()) > allowed || x.is_nan();
        let n_apart = expected.end.iter().zip(&found.end).filter(is_apart).count();
        let noisy = if self.model.qkv_bias && name.contains("bias") { NOISY_BIAS } else { NOISY };
        // Of a small parameter, one element in narrow types, and two in FP8, whose numbers have steps of a sixteenth.
        let n_min = match self.spec.precision {
            Precision::F32 => 0,
            Precision::Fp8 => 2,
            _ => 1,
        };
        let n_max = ((n as f64 * noisy) as usize).max(n_min);
        ensure!(n_apart <= n_max, "{case}: {n_apart} of {n} elements of {name} differ by more than {allowed:.1e}");

        let cosine = cosine(&expected.movement(), &found.movement());
        let least = self.movement_cosine_min - 2.0 * noisy;
        ensure!(cosine >= least, "{case}: the movements of {name} have a cosine of {cosine:.4}, less than {least:.4}");
        Ok(())
    }

    fn n_tokens(&self) -> usize {
        self.batch.n_tokens() * self.spec.n_microbatches
    }

    fn fill(&self, machine: &mut dyn Machine, c: &Compiled) {
        let rng = CounterRng::new(7);
        for p in &c.program.params {
            let stream = rng.fork_named(&p.parts[0].name);
            let n = c.program.value(p.value).n_elements();
            let all = 0..n;
            let number = |i: usize| match p.init {
                Init::Normal { std } if n >= LARGE => std * UNIT_UNIFORM * stream.bits(i as u64) as u32 as i32 as f32,
                Init::Normal { std } => std * stream.normal(i as u64) as f32,
                Init::Ones | Init::RowLengths(_) => 1.0,
                Init::Zeros => 0.0,
            };
            match (p.packing, p.init) {
                (Some(packing), Init::Normal { std }) => {
                    let word = |i: usize| packed_word(packing, std, i, stream.bits(i as u64));
                    machine.fill(c, p.value, all, |first, run| fill_run(first, run, &word));
                }
                _ => machine.fill(c, p.value, all, |first, run| fill_run(first, run, &number)),
            }
        }
        for (i, v) in c.program.values.iter().enumerate().filter(|(_, v)| v.kind == Kind::Constant) {
            let table = self.model.constant(&v.name, &v.shape).expect("the model knows its tables");
            machine.write(c, ValueId(i as u32), 0, &table);
        }
    }

    fn put_tokens(&self, machine: &mut dyn Machine, c: &Compiled, step: u64) {
        self.tokens(c, step).iter().for_each(|(v, tokens)| machine.write(c, *v, 0, tokens));
    }

    /// The inputs of a step.
    fn tokens(&self, c: &Compiled, step: u64) -> Vec<(ValueId, Vec<i32>)> {
        let mut inputs = Vec::new();
        for column in [Column::Ids, Column::Labels, Column::Positions, Column::DocStart, Column::DropoutKeys] {
            for (microbatch, value) in c.program.bound(Role::Column(column)).enumerate() {
                let stream = CounterRng::new(step).fork_named(&format!("{column:?} {microbatch}"));
                let token = |i: usize| {
                    let t = i % self.batch.seq_len;
                    match column {
                        Column::Positions => (t % self.document) as i32,
                        Column::DocStart => (t - t % self.document) as i32,
                        // The last token of a document predicts nothing.
                        Column::Labels if t % self.document == self.document - 1 => -100,
                        Column::DropoutKeys => stream.bits(i as u64) as i32,
                        _ => (stream.bits(i as u64) % self.model.vocab_size as u64) as i32,
                    }
                };
                inputs.push((value, (0..c.program.value(value).n_elements()).map(token).collect()));
            }
        }
        inputs
    }

    fn put_scalars(&self, machine: &mut dyn Machine, c: &Compiled, step: u64) {
        let of_rule = self.spec.optimizer.scalars(step);
        let hyper = c.program.bound(Role::Hyper).next().expect("the scalars are bound");
        let loss_scale = if self.spec.precision == Precision::F16 { 1024.0 } else { 1.0 };
        let mut scalars = [0.0; Hyper::LEN];
        scalars[Hyper::LEARNING_RATE] = LEARNING_RATE;
        scalars[Hyper::RULE..][..of_rule.len()].copy_from_slice(&of_rule);
        scalars[Hyper::LOSS_GRAD_SCALE] = loss_scale / self.n_tokens() as f64;
        scalars[Hyper::LOSS_SCALE] = loss_scale;
        machine.write(c, hyper, 0, &scalars);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_that_updates_nothing_is_found_in_every_precision() {
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            let case = case("a step".into(), small_model(), StepSpec { precision, ..spec() });
            let start: Vec<f32> = (0..1000).map(|i| i as f32).collect();
            let moved = start.iter().map(|w| w + 1e-3).collect();
            let expected = TrainedParam { name: "w".into(), start: start.clone(), end: moved };
            let found = TrainedParam { end: start, ..expected.clone() };

            let error = case.compare_weights(&expected, &found, f64::INFINITY).unwrap_err();

            assert_eq!(error.to_string().split(',').next(), Some("a step: the movements of w have a cosine of 0.0000"));
            assert!(case.compare_weights(&expected, &expected, 0.0).is_ok());
        }
    }
}
