//! The comparisons with PyTorch: one body for every device.
//!
//! The reference files hold a float32 and a float64 run of PyTorch, see `tests/reference/README.md`. The distance between
//! these two sets the scale of the bounds: they differ by up to 1.5e-6 in a loss and 6.3e-6 in a final weight, and Phalanx is
//! as near to the float64 run. The bounds are three to ten times the largest measured distance, which only leaves room for
//! another order of summation.

use super::{Reference, Run};
use anyhow::{Context, Result, ensure};
use phalanx::api::generate::with_generator_on;
use phalanx::api::sampling::Sampling;
use phalanx::config::precision::DeviceChoice;

/// A model of every supported family. A new family is one line here.
pub const MODELS: [&str; 9] = [
    "tiny-llama2",
    "tiny-llama3",
    "tiny-mistral",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-gpt2",
    "tiny-phi3",
    "tiny-olmo2",
    "tiny-granite",
];
/// Runs of optimizers other than AdamW.
const OTHER_OPTIMIZERS: [&str; 3] = ["tiny-llama3-sgd", "tiny-llama3-lion", "tiny-llama3-adafactor"];
/// Runs of adapters, which PEFT computed.
const ADAPTERS: [&str; 4] = ["tiny-qwen3-lora", "tiny-gpt2-lora", "tiny-qwen2-dora", "tiny-gpt2-dora"];

/// Largest relative distance of logits.
const LOGITS_BOUND: f64 = 5e-6;
/// Largest distance of a logit that was computed with a cache from the one without, relative to its size plus 1.
const CACHED_BOUND: f32 = 2e-5;
/// Lengths of prompts: one token, odd ones, all tokens but one.
const PROMPTS: [usize; 4] = [1, 7, 33, 47];
/// Largest distance of a loss from the reference in f32, in nats.
const LOSS_BOUND: f64 = 5e-6;
/// Largest relative distance of a gradient norm.
const GRAD_NORM_BOUND: f64 = 5e-6;
/// Largest distance of a final weight. A step of AdamW moves a weight by up to 2e-3.
const WEIGHT_BOUND: f64 = 2e-5;
/// How much farther from float64 than PyTorch's autocast to the same format Phalanx may be. Both distances are the largest of
/// eight steps of random roundings, and Phalanx rounds at other places; the largest measured ratio is 1.8.
const HALF_FACTOR: f64 = 3.0;

/// A comparison of all its models with PyTorch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Logits of a prompt.
    Logits,
    /// Logits and greedy text with a cache of keys and values, equal to those without.
    Generation,
    /// Losses, gradient norms and final weights of a run in f32.
    Training,
    /// The same for optimizers other than AdamW.
    Optimizers,
    /// The same for adapters and modules that are trained whole beside them.
    Adapters,
    /// The same for microbatches whose gradients are summed.
    Accumulation,
    /// The same for recomputed activations.
    Recomputation,
    /// Losses and gradient norms in bf16, as near to float64 as those of PyTorch.
    Bf16,
    /// The same in fp16, with a growing loss scale.
    Fp16,
}

impl Check {
    /// All checks.
    pub const ALL: [Check; 9] = [
        Check::Logits,
        Check::Generation,
        Check::Training,
        Check::Optimizers,
        Check::Adapters,
        Check::Accumulation,
        Check::Recomputation,
        Check::Bf16,
        Check::Fp16,
    ];

    /// Its name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Check::Logits => "logits",
            Check::Generation => "generation",
            Check::Training => "training",
            Check::Optimizers => "optimizers",
            Check::Adapters => "adapters",
            Check::Accumulation => "accumulation",
            Check::Recomputation => "recomputation",
            Check::Bf16 => "bf16",
            Check::Fp16 => "fp16",
        }
    }

    /// Runs the check on a device. Returns a digest of each run's results, to compare runs of one device with each other.
    ///
    /// # Errors
    /// Names the model and what is too far from the reference.
    pub fn run(self, device: DeviceChoice) -> Result<Vec<Digest>> {
        match self {
            Check::Logits => committed()?.iter().map(|r| assert_logits(r, device)).collect(),
            Check::Generation => committed()?.iter().map(|r| assert_generation(r, device)).collect(),
            Check::Training => committed()?.iter().map(|r| as_in_f32(r, device, &r.whole_batch(), "f32")).collect(),
            Check::Optimizers => all_in_f32(&OTHER_OPTIMIZERS, device),
            Check::Adapters => all_in_f32(&ADAPTERS, device),
            Check::Accumulation => {
                let keys = "micro_batch_size: 2\ngradient_accumulation_steps: 2";
                committed()?.iter().map(|r| as_in_f32(r, device, keys, "2 x 2")).collect()
            }
            Check::Recomputation => {
                let policies = ["selective", "full"].map(|policy| committed().map(|references| (policy, references)));
                let mut digests = Vec::new();
                for (policy, references) in policies.into_iter().collect::<Result<Vec<_>>>()? {
                    for r in references {
                        let keys = format!("{}\ngradient_checkpointing: {policy}", r.whole_batch());
                        digests.push(as_in_f32(&r, device, &keys, policy)?);
                    }
                }
                Ok(digests)
            }
            Check::Bf16 => committed()?.iter().map(|r| assert_half(r, device, "bf16")).collect(),
            Check::Fp16 => committed()?.iter().map(|r| assert_half(r, device, "fp16")).collect(),
        }
    }
}

/// What a run computed: a name, and a digest of the bits.
pub type Digest = (String, String);

/// The reference of every model.
///
/// # Errors
/// When its numbers cannot be read.
pub fn committed() -> Result<Vec<Reference>> {
    MODELS.iter().map(|name| Reference::committed(name)).collect()
}

fn all_in_f32(names: &[&str], device: DeviceChoice) -> Result<Vec<Digest>> {
    let references = names.iter().map(|name| Reference::committed(name));
    references.map(|r| r.and_then(|r| as_in_f32(&r, device, &r.whole_batch(), "f32"))).collect()
}

fn as_in_f32(r: &Reference, device: DeviceChoice, keys: &str, what: &str) -> Result<Digest> {
    let run = r.train(device, keys)?;
    assert_curve(r, &run, what)?;
    let (distance, parameter) = r.weight_distance(&run)?;
    println!("{} {what}: final weights within {distance:.1e}, the largest distance in {parameter}", r.name);
    ensure!(distance < WEIGHT_BOUND, "{} {what}: a weight of {parameter} is {distance:.2e} off", r.name);
    digest(r, &run, what)
}

fn digest(r: &Reference, run: &Run, what: &str) -> Result<Digest> {
    Ok((format!("{} {what}", r.name), run.digest()?))
}

/// Compares losses and gradient norms with both runs of PyTorch.
///
/// # Errors
/// Names what is too far.
pub fn assert_curve(r: &Reference, run: &Run, what: &str) -> Result<()> {
    for precision in ["float32", "float64"] {
        let d = r.distances(precision, run)?;
        println!("{} {what}: loss {:.1e}, gradient norm {:.1e} from {precision}", r.name, d.loss, d.grad_norm);
        ensure!(d.loss < LOSS_BOUND, "{} {what}: a loss is {:.2e} from {precision}", r.name, d.loss);
        ensure!(d.grad_norm < GRAD_NORM_BOUND, "{} {what}: a norm is {:.2e} from {precision}", r.name, d.grad_norm);
    }
    Ok(())
}

/// Compares the logits of a prompt.
///
/// # Errors
/// Names what is too far.
pub fn assert_logits(r: &Reference, device: DeviceChoice) -> Result<Digest> {
    let ids: Vec<u32> = r.numbers("/logits/input_ids")?.into_iter().map(|id| id as u32).collect();
    let logits = with_generator_on(device, &r.model, ids.len(), None, |g| Ok(g.all_logits(&ids)?.to_vec()))?;
    let bits: Vec<u8> = logits.iter().flat_map(|x| x.to_le_bytes()).collect();
    let logits: Vec<f64> = logits.into_iter().map(f64::from).collect();
    let squares = |logits: &[f64]| logits.iter().map(|x| x * x).sum::<f64>();

    let wanted = r.numbers("/logits/last_position")?;
    ensure!(ids.len() == 48 && logits.len() == 48 * wanted.len(), "{}: {} logits", r.name, logits.len());
    let rows: Vec<&[f64]> = logits.chunks(wanted.len()).collect();
    let off: Vec<f64> = rows[47].iter().zip(&wanted).map(|(x, w)| x - w).collect();
    let mut distances = vec![("the last logits", (squares(&off) / squares(&wanted)).sqrt())];
    let total = r.numbers("/logits/sum_of_squares")?[0];
    distances.push(("the sum of squares", (squares(&logits) / total - 1.0).abs()));
    if r.has("/logits/logit_of_the_next_id") {
        let wanted = r.numbers("/logits/logit_of_the_next_id")?;
        let found: Vec<f64> = rows.iter().zip(&ids[1..]).map(|(row, next)| row[*next as usize]).collect();
        ensure!(wanted.len() == 47 && found.len() == 47, "{}: {} next ids", r.name, wanted.len());
        let off: Vec<f64> = found.iter().zip(&wanted).map(|(x, w)| x - w).collect();
        distances.push(("the logits of the next ids", (squares(&off) / squares(&wanted)).sqrt()));
        let wanted = r.numbers("/logits/sum_of_squares_of_each_position")?;
        ensure!(wanted.len() == 48, "{}: {} positions", r.name, wanted.len());
        let each = rows.iter().zip(wanted).map(|(row, wanted)| (squares(row) / wanted - 1.0).abs());
        distances.push(("the sum of squares of a position", each.fold(0.0, f64::max)));
    }
    for (what, distance) in distances {
        println!("{}: {what} {distance:.1e} off", r.name);
        ensure!(distance < LOGITS_BOUND, "{}: {what}: {distance:.2e} off", r.name);
    }
    Ok((format!("{} logits", r.name), blake3::hash(&bits).to_hex().to_string()))
}

/// Compares the logits after every token, read from the cache, with those of whole texts, which [`assert_logits`] compares with
/// PyTorch; and greedy texts that end at the longest text that the generator was made for.
fn assert_generation(r: &Reference, device: DeviceChoice) -> Result<Digest> {
    let ids: Vec<u32> = r.numbers("/logits/input_ids")?.into_iter().map(|id| id as u32).collect();
    let (whole, other, cached) = with_generator_on(device, &r.model, ids.len(), None, |g| {
        let mut cached = Vec::new();
        for n_prompt in PROMPTS {
            // The cache has this prompt, and nothing behind it that is valid.
            g.all_logits(&ids[..n_prompt])?;
            for n in n_prompt + 1..=ids.len() {
                cached.push((n_prompt, n, g.logits(&ids[..n])?.to_vec()));
            }
        }
        let whole = g.all_logits(&ids)?.to_vec();
        // Another text of the same length, which the cache has up to the replaced token only.
        let mut other = ids.clone();
        other[20] = (other[20] + 1) % 100;
        let v = whole.len() / ids.len();
        let after_other = g.logits(&other)?.to_vec();
        Ok((whole, (after_other, g.all_logits(&other)?[(ids.len() - 1) * v..].to_vec()), cached))
    })?;
    ensure!(other.0 == other.1, "{}: keys of another text are read from the cache", r.name);
    let (rows, mut worst): (Vec<&[f32]>, f32) = (whole.chunks(whole.len() / ids.len()).collect(), 0.0);
    for (n_prompt, n, logits) in &cached {
        for (x, y) in logits.iter().zip(rows[n - 1]) {
            let distance = (x - y).abs() / (1.0 + y.abs());
            ensure!(
                distance < CACHED_BOUND,
                "{}: the logits after {n} tokens, {n_prompt} of them in the prompt, are {distance:.1e} off",
                r.name
            );
            worst = worst.max(distance);
        }
    }
    println!("{}: logits with a cache {worst:.1e} off", r.name);
    for n_prompt in PROMPTS.into_iter().chain([ids.len()]) {
        assert_greedy(r, device, &ids[..n_prompt], ids.len())?;
    }
    let bits: Vec<u8> = cached.iter().flat_map(|(.., logits)| logits).flat_map(|x| x.to_le_bytes()).collect();
    Ok((format!("{} generation", r.name), blake3::hash(&bits).to_hex().to_string()))
}

/// Continues a prompt with and without a cache up to `longest` tokens.
fn assert_greedy(r: &Reference, device: DeviceChoice, prompt: &[u32], longest: usize) -> Result<()> {
    let (cached, whole) = with_generator_on(device, &r.model, longest, None, |g| {
        let cached = g.generate(prompt.to_vec(), longest, Sampling::GREEDY, |_| true)?;
        let mut whole = prompt.to_vec();
        while whole.len() < longest {
            let logits = g.all_logits(&whole)?;
            let last = &logits[logits.len() / whole.len() * (whole.len() - 1)..];
            let greater = |a: usize, b: usize| if last[b] > last[a] { b } else { a };
            let next = (0..last.len()).reduce(greater).unwrap_or_default() as u32;
            whole.push(next);
            if g.tokenizer().stop_ids().contains(&next) {
                break;
            }
        }
        Ok((cached, whole))
    })?;
    ensure!(cached == whole, "{}: {cached:?} with a cache, {whole:?} without", r.name);
    Ok(())
}

/// A narrow format as `bf16: true` and `fp16: true` use it, which is what PyTorch calls autocast: products of rounded values, with
/// weights in f32, so the error does not grow over the steps. In fp16, the loss scale must grow without an overflow.
fn assert_half(r: &Reference, device: DeviceChoice, format: &str) -> Result<Digest> {
    let (keys, theirs) = match format {
        "fp16" => ("fp16: true\ninitial_loss_scale: 256\nloss_scale_window: 3", "float16"),
        _ => ("bf16: true", "bfloat16"),
    };
    let run = r.train(device, &format!("{}\n{keys}", r.whole_batch()))?;
    let (ours, theirs) = (r.distances("float64", &run)?, r.distances_of_pytorch(theirs)?);
    for (what, ours, theirs) in [("loss", ours.loss, theirs.loss), ("gradient norm", ours.grad_norm, theirs.grad_norm)]
    {
        println!("{} {format}: {what} {ours:.1e} off, PyTorch's {theirs:.1e}: {:.1} times", r.name, ours / theirs);
        let allowed = HALF_FACTOR * theirs;
        ensure!(ours < allowed, "{}: a {what} in {format} is {ours:.2e} off, PyTorch's {theirs:.2e}", r.name);
    }
    ensure!(ours.loss > LOSS_BOUND, "{}: {:.2e} is too small an error for {format}; was it used?", r.name, ours.loss);
    if format == "fp16" {
        let scale = run.steps.last().and_then(|m| m.loss_scale).context("fp16 has a loss scale")?;
        ensure!(scale == 256.0 * f64::from(1u32 << (run.steps.len() / 3)), "{}: the scale is {scale}", r.name);
    }
    digest(r, &run, format)
}
