//! Real models against what PyTorch and transformers compute with them: logits, and the curve of a training run.
//!
//! The reference files hold a float32 and a float64 run of PyTorch. They differ by less than 5e-7 in the loss and 1e-6
//! in the gradient norm, so bounds of 2e-5 and 1e-4 leave room for another order of summation and for nothing else.

use anyhow::{Context, Result, ensure};
use phalanx::api::generate::{Sampling, with_generator};
use phalanx::events::StepMetrics;
use phalanx::{Control, Event, Job};
use phalanx_tests::shared;
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Largest distance of a loss from the reference in f32, nats.
const LOSS_BOUND: f64 = 2e-5;
/// Largest relative distance of a gradient norm.
const GRAD_NORM_BOUND: f64 = 1e-4;
/// Largest relative distance of a parameter's norm after the last step.
const PARAMETER_BOUND: f64 = 1e-5;

struct Reference {
    name: String,
    json: Value,
    shared: PathBuf,
}

/// A run of ours: every step, and the directory it exported.
struct Run {
    steps: Vec<StepMetrics>,
    model: PathBuf,
    _dir: tempfile::TempDir,
}

/// All models that have a reference; empty where the folder is absent.
fn references() -> Result<Vec<Reference>> {
    let Some(shared) = shared() else { return Ok(Vec::new()) };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(shared.join("models"))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    let read = |name: String| -> Result<Reference> {
        let path = shared.join("reference").join(format!("{name}.json"));
        let text = std::fs::read(&path).with_context(|| format!("every model has a reference: {}", path.display()))?;
        Ok(Reference { name, json: serde_json::from_slice(&text)?, shared: shared.clone() })
    };
    names.into_iter().map(read).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().map_or(Vec::new(), |list| list.iter().filter_map(Value::as_f64).collect())
}

impl Reference {
    fn model_dir(&self) -> PathBuf {
        self.shared.join("models").join(&self.name)
    }

    fn hyper(&self, key: &str) -> &Value {
        &self.json["hyperparameters"][key]
    }

    /// The YAML of the reference run; `cut` are the keys that a test is about.
    fn yaml(&self, out: &Path, cut: &str) -> String {
        let data = self.shared.join("data/tinystories.txt");
        format!(
            "base_model: {}\ndatasets:\n  - path: {}\n    type: completion\noutput_dir: {}\nshuffle: false\n\
             sequence_len: {}\nmax_steps: {}\nlearning_rate: {}\nwarmup_steps: {}\nlr_scheduler: cosine\n\
             cosine_min_lr_ratio: {}\nweight_decay: {}\nadam_beta1: {}\nadam_beta2: {}\nadam_epsilon: {:e}\n\
             max_grad_norm: 1.0\n{cut}\n",
            self.model_dir().display(),
            data.display(),
            out.display(),
            self.hyper("seq"),
            self.hyper("steps"),
            self.hyper("lr"),
            self.hyper("warmup"),
            self.hyper("min_lr_ratio"),
            self.hyper("wd"),
            self.hyper("betas")[0],
            self.hyper("betas")[1],
            self.hyper("eps").as_f64().unwrap_or(1e-8),
        )
    }

    fn train(&self, cut: &str) -> Result<Run> {
        let dir = tempfile::tempdir()?;
        let yaml = dir.path().join("job.yaml");
        std::fs::write(&yaml, self.yaml(&dir.path().join("out"), cut))?;
        let mut steps = Vec::new();
        let report = Job::from_yaml(&yaml)?.run_with(&Control::default(), |event| {
            if let Event::Step(m) = event {
                steps.push(m.clone());
            }
        })?;
        ensure!(report.finished, "{}: the run did not finish", self.name);
        let model = report.model_dir.context("a finished run exports its model")?;
        Ok(Run { steps, model, _dir: dir })
    }

    /// Distances of a run from one of the two reference runs: `(loss, relative gradient norm)`, the largest of each.
    fn distances(&self, precision: &str, run: &Run) -> Result<(f64, f64)> {
        let curve = self.json[precision]["curve"].as_array().context("the reference has a curve")?;
        ensure!(curve.len() == run.steps.len(), "{}: {} steps", self.name, run.steps.len());
        let (mut loss, mut norm) = (0f64, 0f64);
        for (ours, theirs) in run.steps.iter().zip(curve) {
            let of = |key: &str| theirs[key].as_f64().with_context(|| format!("the reference has {key}"));
            ensure!(Some(ours.step) == theirs["step"].as_u64(), "{}: step {}", self.name, ours.step);
            let lr = of("lr")?;
            ensure!((ours.lr - lr).abs() <= 1e-12 * lr, "{} step {}: lr {} is not {lr}", self.name, ours.step, ours.lr);
            // `max` would swallow a NaN.
            ensure!(ours.loss.is_finite() && ours.grad_norm.is_finite(), "{} step {}: {ours:?}", self.name, ours.step);
            loss = loss.max((ours.loss - of("loss")?).abs());
            norm = norm.max((ours.grad_norm / of("grad_norm")? - 1.0).abs());
        }
        Ok((loss, norm))
    }

    fn assert_curve(&self, run: &Run, what: &str) -> Result<()> {
        for precision in ["float32", "float64"] {
            let (loss, norm) = self.distances(precision, run)?;
            println!("{} {what}: loss {loss:.1e}, gradient norm {norm:.1e} from {precision}", self.name);
            ensure!(loss < LOSS_BOUND, "{} {what}: a loss is {loss:.2e} from {precision}", self.name);
            ensure!(norm < GRAD_NORM_BOUND, "{} {what}: a gradient norm is {norm:.2e} from {precision}", self.name);
        }
        Ok(())
    }

    /// Final norms of all parameters, by name: within the bound of the nearer of PyTorch's two runs.
    ///
    /// Those two differ by more than the bound in biases of keys, whose gradient is close to zero by the softmax's
    /// invariance and whose AdamW update thus follows rounding errors. A run that sums in another order than the
    /// reference (`reordered`) may therefore be off by three times the largest distance between the two, over the
    /// layers' parameters of that name.
    fn assert_parameters(&self, run: &Run, reordered: bool) -> Result<()> {
        let bytes = std::fs::read(run.model.join("model.safetensors"))?;
        let tensors = SafeTensors::deserialize(&bytes)?;
        let norms = |precision: &str| self.json[precision]["final_parameter_l2_norms"].as_object();
        let (f32s, f64s) = norms("float32").zip(norms("float64")).context("the reference has norms")?;
        ensure!(!f64s.is_empty(), "{}: no norms to compare with", self.name);
        let mut spreads: BTreeMap<String, f64> = BTreeMap::new();
        for (name, wanted) in f64s {
            let (other, wanted) = (f32s[name].as_f64(), wanted.as_f64().context("a norm is a number")?);
            let spread = spreads.entry(without_layer(name)).or_default();
            *spread = spread.max(other.map_or(0.0, |other| (other / wanted - 1.0).abs()));
        }
        let mut worst = 0f64;
        for (name, wanted) in f64s {
            let wanted = wanted.as_f64().context("a norm is a number")?;
            let spread = spreads[&without_layer(name)];
            let tensor = tensors.tensor(name).with_context(|| format!("{}: the export has {name}", self.name))?;
            let floats = tensor.data().as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b)));
            let norm = floats.map(|x| x * x).sum::<f64>().sqrt();
            let other = f32s[name].as_f64().context("a norm is a number")?;
            let distance = (norm / wanted - 1.0).abs().min((norm / other - 1.0).abs());
            let bound = PARAMETER_BOUND.max(if reordered { 3.0 * spread } else { 0.0 });
            ensure!(distance < bound, "{} {name}: norm {norm} is {distance:.2e} from {wanted}", self.name);
            worst = worst.max(distance);
        }
        println!("{}: parameter norms within {worst:.1e}", self.name);
        Ok(())
    }

    /// `micro_batch_size: 4`, the whole batch of the reference.
    fn whole_batch(&self) -> String {
        format!("micro_batch_size: {}", self.hyper("batch"))
    }
}

/// A parameter's name without the number of its layer.
fn without_layer(name: &str) -> String {
    name.split('.').filter(|part| part.parse::<u32>().is_err()).collect::<Vec<_>>().join(".")
}

#[test]
fn logits_are_those_of_transformers() -> Result<()> {
    for r in references()? {
        let ids = numbers(&r.json["logits"]["input_ids"]).into_iter().map(|id| id as u32).collect::<Vec<u32>>();
        let logits = with_generator(&r.model_dir(), ids.len(), None, |g| Ok(g.all_logits(&ids)?.to_vec()))?;

        let wanted = numbers(&r.json["logits"]["last_position"]);
        ensure!(ids.len() == 48 && logits.len() == 48 * wanted.len(), "{}: {} logits", r.name, logits.len());
        let last = logits[logits.len() - wanted.len()..].iter().map(|x| f64::from(*x));
        let distance = last.zip(&wanted).map(|(x, w)| (x - w).powi(2)).sum::<f64>().sqrt();
        let relative = distance / wanted.iter().map(|w| w * w).sum::<f64>().sqrt();
        let squares: f64 = logits.iter().map(|x| f64::from(*x).powi(2)).sum();
        let wanted_squares = r.json["logits"]["sum_of_squares"].as_f64().context("the reference has the sum")?;
        let squares_off = (squares / wanted_squares - 1.0).abs();
        println!("{}: last logits {relative:.1e}, sum of squares {squares_off:.1e}", r.name);
        ensure!(relative < 1e-4, "{}: the last logits are {relative:.2e} off", r.name);
        ensure!(squares_off < 1e-4, "{}: the sum of squares is {squares_off:.2e} off", r.name);
    }
    Ok(())
}

#[test]
fn training_follows_pytorch_and_ends_at_its_weights() -> Result<()> {
    for r in references()? {
        let run = r.train(&r.whole_batch())?;
        r.assert_curve(&run, "whole batch")?;
        r.assert_parameters(&run, false)?;
    }
    Ok(())
}

#[test]
fn accumulated_microbatches_follow_the_same_curve() -> Result<()> {
    for r in references()? {
        let run = r.train("micro_batch_size: 2\ngradient_accumulation_steps: 2")?;
        r.assert_curve(&run, "2 x 2")?;
        r.assert_parameters(&run, true)?;
    }
    Ok(())
}

#[test]
fn recomputed_activations_follow_the_same_curve() -> Result<()> {
    for r in references()? {
        for policy in ["selective", "full"] {
            let run = r.train(&format!("{}\ngradient_checkpointing: {policy}", r.whole_batch()))?;
            r.assert_curve(&run, policy)?;
            r.assert_parameters(&run, true)?;
        }
    }
    Ok(())
}

/// Rounding of activations moves a loss by about one unit of the format's last place times the square root of the
/// number of roundings on the way; averaging over the tokens of a batch brings it below one unit again. The weights are
/// f32, so it does not grow over the steps. The gradient is that of another, rounded function, and follows less closely.
#[test]
fn bf16_stays_within_the_roundings_of_bf16() -> Result<()> {
    const UNIT: f64 = 1.0 / 256.0; // relative spacing of bf16
    for r in references()? {
        let run = r.train(&format!("{}\nbf16: true", r.whole_batch()))?;
        let (loss, norm) = r.distances("float64", &run)?;
        println!("{} bf16: loss {loss:.1e}, gradient norm {norm:.1e}", r.name);
        ensure!(loss > LOSS_BOUND, "{}: {loss:.2e} is too close for bf16; was it used?", r.name);
        ensure!(loss < UNIT, "{}: a loss is {loss:.2e} off", r.name);
        ensure!(norm < 4.0 * UNIT, "{}: a gradient norm is {norm:.2e} off", r.name);
    }
    Ok(())
}

/// As for bf16, with the eight times finer spacing of fp16; the scale must have grown meanwhile, without one overflow.
#[test]
fn fp16_stays_within_the_roundings_of_fp16_while_its_loss_scale_grows() -> Result<()> {
    const UNIT: f64 = 1.0 / 2048.0; // relative spacing of fp16
    for r in references()? {
        let cut = format!("{}\nfp16: true\ninitial_loss_scale: 256\nloss_scale_window: 3", r.whole_batch());
        let run = r.train(&cut)?;
        let (loss, norm) = r.distances("float64", &run)?;
        let scale = run.steps.last().and_then(|m| m.loss_scale).context("fp16 has a loss scale")?;
        println!("{} fp16: loss {loss:.1e}, gradient norm {norm:.1e}, scale {scale}", r.name);
        ensure!(loss < UNIT, "{}: a loss is {loss:.2e} off", r.name);
        ensure!(norm < 4.0 * UNIT, "{}: a gradient norm is {norm:.2e} off", r.name);
        ensure!(scale == 256.0 * f64::from(1u32 << (run.steps.len() / 3)), "{}: the scale is {scale}", r.name);
    }
    Ok(())
}

#[test]
fn greedy_decoding_tells_the_story_of_lily() -> Result<()> {
    let Some(shared) = shared() else { return Ok(()) };
    let text = with_generator(&shared.join("models/stories260k"), 64, None, |g| {
        let bos = g.tokenizer().bos_id().into_iter().collect();
        let ids = g.generate(bos, 63, Sampling::GREEDY, |_| true)?;
        Ok(g.tokenizer().decode(&ids[1..], true)?)
    })?;

    let story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. \
                 One day, she saw a big, red ball.";
    ensure!(text.trim_start().starts_with(story), "{text}");
    Ok(())
}
