//! Reference runs of PyTorch and transformers: their files, the same run in Phalanx, and the distances between the two.
//!
//! The committed references hold every final weight. The reference of the real model beside the checkout holds only norms.
//! [`checks`]: the comparisons.

pub mod checks;

use anyhow::{Context, Result, bail, ensure};
use phalanx::config::precision::DeviceChoice;
use phalanx::events::StepMetrics;
use phalanx::train::export::{ExportOptions, export_checkpoint};
use phalanx::{Control, Event, Job};
use phalanx_storage::hf::dtype::Dtype as Exported;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The numbers of one run of PyTorch.
pub struct Reference {
    /// Name of the run.
    pub name: String,
    /// The model directory from which the run starts.
    pub model: PathBuf,
    json: Value,
    text: PathBuf,
    /// The safetensors file with the weights after the last step; without it, the reference has only norms.
    final_weights: Option<PathBuf>,
}

/// The same run in Phalanx: every step, and the exported directory.
pub struct Run {
    /// Metrics of each step.
    pub steps: Vec<StepMetrics>,
    model: PathBuf,
    _dir: tempfile::TempDir,
}

/// Largest distances of a run from the reference.
#[derive(Clone, Copy, Debug, Default)]
pub struct Distances {
    /// Of a loss, nats.
    pub loss: f64,
    /// Of a gradient norm, relative.
    pub grad_norm: f64,
}

impl Reference {
    /// The committed reference `name`.
    ///
    /// # Errors
    /// When its numbers cannot be read.
    pub fn committed(name: &str) -> Result<Reference> {
        let numbers = phalanx_needs::reference("numbers");
        let json = read_json(&numbers.join(format!("{name}.json")))?;
        let model = json["model"].as_str().context("the numbers do not name their model")?;
        Ok(Reference {
            name: name.to_owned(),
            model: phalanx_needs::reference("models").join(model),
            text: phalanx_needs::reference("text.txt"),
            final_weights: Some(numbers.join(format!("{name}.safetensors"))),
            json,
        })
    }

    /// The real pretrained model beside the checkout; skips the calling test where it is absent.
    ///
    /// # Errors
    /// When its numbers cannot be read.
    pub fn stories() -> Result<Option<Reference>> {
        let Some(shared) = phalanx_needs::shared("models/stories260k") else { return Ok(None) };
        let shared = shared.ancestors().nth(2).context("two folders above")?;
        Ok(Some(Reference {
            name: "stories260k".to_owned(),
            model: shared.join("models/stories260k"),
            text: shared.join("data/tinystories.txt"),
            final_weights: None,
            json: read_json(&shared.join("reference/stories260k.json"))?,
        }))
    }

    /// A number or list of the reference.
    ///
    /// # Errors
    /// When it is absent or holds values other than numbers.
    pub fn numbers(&self, pointer: &str) -> Result<Vec<f64>> {
        let missing = || format!("{}: the reference has no numbers at {pointer}", self.name);
        match self.json.pointer(pointer).with_context(missing)? {
            Value::Array(list) => list.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>().with_context(missing),
            one => Ok(vec![one.as_f64().with_context(missing)?]),
        }
    }

    /// Whether the reference has this value.
    pub fn has(&self, pointer: &str) -> bool {
        self.json.pointer(pointer).is_some()
    }

    fn hyper(&self, key: &str) -> &Value {
        &self.json["hyperparameters"][key]
    }

    /// The keys of the reference's optimizer. A new optimizer needs an arm here.
    fn optimizer_keys(&self) -> Result<String> {
        let (wd, betas) = (self.hyper("wd"), self.hyper("betas"));
        let own = match self.json["optimizer"].as_str().unwrap_or("adamw") {
            "adamw" => format!(
                "optimizer: adamw\nadam_beta1: {}\nadam_beta2: {}\nadam_epsilon: {:e}",
                betas[0],
                betas[1],
                self.hyper("eps").as_f64().context("eps is a number")?
            ),
            "sgd" => format!("optimizer: sgd\nmomentum: {}", self.hyper("momentum")),
            "lion" => format!("optimizer: lion\nadam_beta1: {}\nadam_beta2: {}", betas[0], betas[1]),
            "adafactor" => format!(
                "optimizer: adafactor\nadafactor_beta2_decay: {}\nadafactor_eps1: {:e}\nadafactor_eps2: {}\nadafactor_d: {}",
                self.hyper("beta2_decay"),
                self.hyper("eps1").as_f64().context("eps1 is a number")?,
                self.hyper("eps2"),
                self.hyper("d")
            ),
            other => bail!("{}: unknown optimizer {other}", self.name),
        };
        Ok(format!("{own}\nweight_decay: {wd}"))
    }

    /// The keys of the reference's adapters, if it trained any.
    fn adapter_keys(&self) -> Result<String> {
        let Some(keys) = self.json["adapter"].as_object() else { return Ok(String::new()) };
        let lines = keys.iter().map(|(key, value)| Ok(format!("{key}: {}\n", serde_json::to_string(value)?)));
        Ok(format!("adapter: lora\n{}", lines.collect::<Result<String>>()?))
    }

    /// The YAML of the reference run; `keys` has the keys under test.
    fn yaml(&self, out: &Path, device: DeviceChoice, keys: &str) -> Result<String> {
        Ok(format!(
            "device: {}\nbase_model: {}\ndatasets:\n  - path: {}\n    type: completion\noutput_dir: {}\nshuffle: false\n\
             sequence_len: {}\nmax_steps: {}\nlearning_rate: {}\nwarmup_steps: {}\nlr_scheduler: cosine\n\
             cosine_min_lr_ratio: {}\nmax_grad_norm: 1.0\n{}\n{}{keys}\n",
            device.word(),
            self.model.display(),
            self.text.display(),
            out.display(),
            self.hyper("seq"),
            self.hyper("steps"),
            self.hyper("lr"),
            self.hyper("warmup"),
            self.hyper("min_lr_ratio"),
            self.optimizer_keys()?,
            self.adapter_keys()?,
        ))
    }

    /// `micro_batch_size` of the whole batch of the reference.
    pub fn whole_batch(&self) -> String {
        format!("micro_batch_size: {}", self.hyper("batch"))
    }

    /// Repeats the reference run on a device, with additional keys.
    ///
    /// # Errors
    /// When the job fails.
    pub fn train(&self, device: DeviceChoice, keys: &str) -> Result<Run> {
        let dir = tempfile::tempdir()?;
        let yaml = dir.path().join("job.yaml");
        std::fs::write(&yaml, self.yaml(&dir.path().join("out"), device, keys)?)?;
        let mut steps = Vec::new();
        let report = Job::from_yaml(&yaml)?.run_with(&Control::default(), |event| {
            if let Event::Step(m) = event {
                steps.push(m.clone());
            }
        })?;
        ensure!(report.finished, "{}: the run did not finish", self.name);
        // The model that the run exported has the type of its base model, which rounds the weights.
        let (checkpoint, model) = (report.checkpoint.context("a finished run is saved")?, dir.path().join("model"));
        export_checkpoint(
            &checkpoint,
            &model,
            ExportOptions { dtype: Some(Exported::F32), ..ExportOptions::default() },
        )?;
        Ok(Run { steps, model, _dir: dir })
    }

    /// Distances of a run from the reference run in `precision`, `float32` or `float64`.
    ///
    /// # Errors
    /// When steps or learning rates differ from the reference, or a value is not finite.
    pub fn distances(&self, precision: &str, run: &Run) -> Result<Distances> {
        let curve = self.curve(precision)?;
        ensure!(!curve.is_empty() && curve.len() == run.steps.len(), "{}: {} steps", self.name, run.steps.len());
        let mut largest = Distances::default();
        for (ours, theirs) in run.steps.iter().zip(curve) {
            let of = |key: &str| theirs[key].as_f64().with_context(|| format!("the reference has no {key}"));
            ensure!(Some(ours.step) == theirs["step"].as_u64(), "{}: step {}", self.name, ours.step);
            let lr = of("lr")?;
            ensure!((ours.lr - lr).abs() <= 1e-12 * lr, "{} step {}: lr {} is not {lr}", self.name, ours.step, ours.lr);
            // `max` ignores NaN.
            ensure!(ours.loss.is_finite() && ours.grad_norm.is_finite(), "{} step {}: {ours:?}", self.name, ours.step);
            largest.loss = largest.loss.max((ours.loss - of("loss")?).abs());
            largest.grad_norm = largest.grad_norm.max((ours.grad_norm / of("grad_norm")? - 1.0).abs());
        }
        Ok(largest)
    }

    /// Distances of PyTorch's run with autocast to `precision`, `bfloat16` or `float16`, from its float64 run.
    ///
    /// # Errors
    /// When the reference has no such run.
    pub fn distances_of_pytorch(&self, precision: &str) -> Result<Distances> {
        let of = |step: &Value, key: &str| step[key].as_f64().with_context(|| format!("the reference has no {key}"));
        let mut largest = Distances::default();
        for (half, f64) in self.curve(precision)?.iter().zip(self.curve("float64")?) {
            largest.loss = largest.loss.max((of(half, "loss")? - of(f64, "loss")?).abs());
            largest.grad_norm = largest.grad_norm.max((of(half, "grad_norm")? / of(f64, "grad_norm")? - 1.0).abs());
        }
        Ok(largest)
    }

    fn curve(&self, precision: &str) -> Result<&Vec<Value>> {
        self.json[precision]["curve"].as_array().with_context(|| format!("{}: no curve in {precision}", self.name))
    }

    /// The largest distance of a final weight from the reference, with the name of its parameter.
    ///
    /// # Errors
    /// When the reference holds no weights, or the export has other parameters or shapes.
    pub fn weight_distance(&self, run: &Run) -> Result<(f64, String)> {
        let theirs = self.final_weights.as_ref().with_context(|| format!("{} has no final weights", self.name))?;
        let (ours, theirs) = (run.trained_weights()?, std::fs::read(theirs)?);
        largest_distance(&SafeTensors::deserialize(&ours)?, &SafeTensors::deserialize(&theirs)?)
            .with_context(|| self.name.clone())
    }

    /// Relative distance of each final norm from the nearer of PyTorch's two runs, and the largest distance between these two
    /// over the parameters of that name in all layers.
    ///
    /// The two runs differ by more than the rounding of a sum in biases of keys: softmax is invariant to them, so their
    /// gradient is close to zero, and their AdamW update follows rounding errors.
    ///
    /// # Errors
    /// When the reference has no norms, or a parameter is missing in the export.
    pub fn norm_distances(&self, run: &Run) -> Result<Vec<NormDistance>> {
        let bytes = std::fs::read(run.model.join("model.safetensors"))?;
        let tensors = SafeTensors::deserialize(&bytes)?;
        let norms = |precision: &str| self.json[precision]["final_parameter_l2_norms"].as_object();
        let (f32s, f64s) = norms("float32").zip(norms("float64")).context("the reference has norms")?;
        ensure!(!f64s.is_empty(), "{}: no norms to compare with", self.name);
        let mut found = Vec::new();
        let mut spreads: BTreeMap<String, f64> = BTreeMap::new();
        for (parameter, wanted) in f64s {
            let wanted = wanted.as_f64().context("a norm is a number")?;
            let other = f32s[parameter].as_f64().context("a norm is a number")?;
            let norm = floats(&tensors, parameter)?.map(|x| x * x).sum::<f64>().sqrt();
            let distance = (norm / wanted - 1.0).abs().min((norm / other - 1.0).abs());
            let spread = spreads.entry(without_layer(parameter)).or_default();
            *spread = spread.max((other / wanted - 1.0).abs());
            found.push(NormDistance { parameter: parameter.clone(), distance, spread: 0.0 });
        }
        found.iter_mut().for_each(|norm| norm.spread = spreads[&without_layer(&norm.parameter)]);
        Ok(found)
    }
}

impl Run {
    /// The file of the exported model, or of the adapters if the run trained some.
    fn trained_weights(&self) -> Result<Vec<u8>> {
        let adapters = self.model.join("adapter_model.safetensors");
        let file = if adapters.exists() { adapters } else { self.model.join("model.safetensors") };
        std::fs::read(&file).with_context(|| file.display().to_string())
    }

    /// A digest of the bits of all losses, gradient norms and final weights.
    ///
    /// # Errors
    /// When the exported model cannot be read.
    pub fn digest(&self) -> Result<String> {
        let mut hasher = blake3::Hasher::new();
        for m in &self.steps {
            hasher.update(&m.loss.to_le_bytes()).update(&m.grad_norm.to_le_bytes());
        }
        hasher.update(&self.trained_weights()?);
        Ok(hasher.finalize().to_hex().to_string())
    }
}

/// How far the final norm of a parameter is from the reference.
pub struct NormDistance {
    /// Name of the parameter.
    pub parameter: String,
    /// Distance from the nearer of PyTorch's two runs.
    pub distance: f64,
    /// Distance between PyTorch's two runs.
    pub spread: f64,
}

/// The largest distance between corresponding elements, with the name of their parameter.
fn largest_distance(ours: &SafeTensors, theirs: &SafeTensors) -> Result<(f64, String)> {
    let sorted = |tensors: &SafeTensors| {
        let mut names: Vec<String> = tensors.names().into_iter().map(str::to_owned).collect();
        names.sort();
        names
    };
    let (found, wanted) = (sorted(ours), sorted(theirs));
    ensure!(found == wanted && !found.is_empty(), "the export has parameters {found:?}, the reference {wanted:?}");
    let mut largest = (0.0, String::new());
    for name in wanted {
        let (shape, wanted) = (ours.tensor(&name)?.shape().to_vec(), theirs.tensor(&name)?.shape().to_vec());
        ensure!(shape == wanted, "{name} has shape {shape:?}, expected {wanted:?}");
        for (x, w) in floats(ours, &name)?.zip(floats(theirs, &name)?) {
            let distance = (x - w).abs();
            ensure!(distance.is_finite(), "{name} has value {x}, expected {w}");
            if distance > largest.0 {
                largest = (distance, name.clone());
            }
        }
    }
    Ok(largest)
}

fn floats<'a>(tensors: &SafeTensors<'a>, name: &str) -> Result<impl Iterator<Item = f64> + use<'a>> {
    let tensor = tensors.tensor(name).with_context(|| format!("the export has no {name}"))?;
    ensure!(tensor.dtype() == Dtype::F32, "{name} has type {:?}, expected F32", tensor.dtype());
    let (chunks, rest) = tensor.data().as_chunks::<4>();
    ensure!(!chunks.is_empty() && rest.is_empty(), "{name} has {} bytes", tensor.data().len());
    Ok(chunks.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))))
}

/// A parameter's name without the number of its layer.
fn without_layer(name: &str) -> String {
    name.split('.').filter(|part| part.parse::<u32>().is_err()).collect::<Vec<_>>().join(".")
}

fn read_json(path: &Path) -> Result<Value> {
    let text = std::fs::read(path).with_context(|| path.display().to_string())?;
    serde_json::from_slice(&text).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    fn file(tensors: &[(&str, &[usize], &[f32])]) -> Vec<u8> {
        let data: Vec<Vec<u8>> = tensors.iter().map(|t| t.2.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
        let views = tensors.iter().zip(&data).map(|(t, bytes)| {
            let view = TensorView::new(Dtype::F32, t.1.to_vec(), bytes).unwrap();
            (t.0, view)
        });
        safetensors::serialize(views, None).unwrap()
    }

    fn compare(ours: &[(&str, &[usize], &[f32])]) -> Result<(f64, String)> {
        let theirs = file(&[("a", &[2, 2], &[1.0, 2.0, 3.0, 4.0]), ("b", &[3], &[0.5, 0.25, 0.125])]);
        largest_distance(&SafeTensors::deserialize(&file(ours))?, &SafeTensors::deserialize(&theirs)?)
    }

    #[test]
    fn largest_distance_names_the_differing_parameter() {
        let (distance, name) =
            compare(&[("a", &[2, 2], &[1.0, 2.0, 3.0, 4.0]), ("b", &[3], &[0.5, 0.251, 0.125])]).unwrap();

        assert!((distance - 1e-3).abs() < 1e-6 && name == "b", "{distance} in {name}");
    }

    #[test]
    fn swapped_elements_are_found_although_all_norms_are_equal() {
        let (distance, name) =
            compare(&[("a", &[2, 2], &[1.0, 3.0, 2.0, 4.0]), ("b", &[3], &[0.5, 0.25, 0.125])]).unwrap();

        assert_eq!((distance, name.as_str()), (1.0, "a"));
    }

    #[test]
    fn missing_reshaped_and_undefined_parameters_are_errors() {
        let a: (&str, &[usize], &[f32]) = ("a", &[2, 2], &[1.0, 2.0, 3.0, 4.0]);

        assert!(compare(&[a]).is_err());
        assert!(compare(&[a, ("b", &[3, 1], &[0.5, 0.25, 0.125])]).is_err());
        assert!(compare(&[a, ("b", &[3], &[0.5, f32::NAN, 0.125])]).is_err());
    }
}
