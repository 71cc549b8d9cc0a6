//! Jobs over models written in dfdx, against plain dfdx training loops and against themselves.

use super::test_models::{Mlp, Transformer, VOCAB, mlp_loss};
use super::{Batch, DfdxModel, Loss, Tape};
use crate::frontend::{UserModel, UserModelError};
use crate::train::export::{ExportOptions, export_checkpoint};
use crate::{Control, Event, Job, JobError, Report};
use dfdx::nn::tensor_collection::TensorCollection;
use dfdx::optim::{Adam, AdamConfig, Momentum, Optimizer, Sgd, SgdConfig};
use dfdx::prelude::{AsArray, Backward, BatchNorm1D, Cpu, DeviceBuildExt, Linear};
use phalanx_storage::hf::source::TensorSource;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

const STEPS: u64 = 8;

/// A job over a text in `dir`: rows of 16 tokens in file order, 2 per step, learning rate 0.01.
fn job(dir: &Path, model: impl Into<UserModel>, keys: &[(&str, &str)]) -> Result<Job, JobError> {
    let text = dir.join("text.txt");
    std::fs::write(&text, include_str!("model.rs")).unwrap();
    let defaults = [
        ("datasets.0.path", text.to_str().unwrap()),
        ("datasets.0.type", "completion"),
        ("output_dir", dir.to_str().unwrap()),
        ("tokenizer", "bytes"),
        ("sequence_len", "16"),
        ("micro_batch_size", "2"),
        ("max_steps", &STEPS.to_string()),
        ("shuffle", "false"),
        ("learning_rate", "0.01"),
        ("lr_scheduler", "constant"),
        ("max_grad_norm", "none"),
    ];
    let set = |builder: crate::JobBuilder, (key, value): &(&str, &str)| builder.set(*key, value);
    let kept = defaults.iter().filter(|(key, _)| keys.iter().all(|(other, _)| key != other));
    kept.chain(keys).fold(Job::builder(), set).model(model).build()
}

/// Runs a job to the end; returns the loss of every step, and the report.
fn losses(job: Job) -> (Vec<f64>, Report) {
    let mut losses = Vec::new();
    let on_event = |event: &Event| {
        if let Event::Step(m) = event {
            losses.push(m.loss);
        }
    };
    let report = job.run_with(&Control::default(), on_event).unwrap();
    (losses, report)
}

/// Ids and labels of every microbatch that a model received.
type Seen = Arc<Mutex<Vec<(Vec<i32>, Vec<i32>)>>>;

fn transformer(seed: u64) -> DfdxModel<Transformer, impl FnMut(&Transformer, &Batch<'_>, Tape) -> Loss + Clone + Send> {
    DfdxModel::new(Transformer::new(seed), VOCAB, Transformer::fused).unwrap()
}

fn noting<M>(
    seen: &Seen,
    mut loss: impl FnMut(&M, &Batch<'_>, Tape) -> Loss + Clone + Send + 'static,
) -> impl FnMut(&M, &Batch<'_>, Tape) -> Loss + Clone + Send + 'static {
    let seen = Arc::clone(seen);
    move |model, batch, tape| {
        seen.lock().unwrap().push((batch.ids.to_vec(), batch.labels.to_vec()));
        loss(model, batch, tape)
    }
}

/// A training loop as in dfdx's documentation, over the batches of a job; returns the mean loss of every step.
fn plain_loop<M: TensorCollection<f32, Cpu>>(
    mut model: M,
    mut optimizer: impl Optimizer<M, Cpu, f32>,
    seen: &Seen,
    loss: impl Fn(&M, &Batch<'_>, Tape) -> Loss,
) -> Vec<f64> {
    let step = |(ids, labels): &(Vec<i32>, Vec<i32>)| {
        let nothing = vec![0; ids.len()];
        let (n_rows, seq_len) = (ids.len() / 16, 16);
        let batch = Batch { ids, labels, positions: &nothing, doc_start: &nothing, n_rows, seq_len };
        let predicted = labels.iter().filter(|l| **l >= 0).count();
        let mean = loss(&model, &batch, Tape::default()) / predicted as f32;
        let value = f64::from(mean.array());
        optimizer.update(&mut model, &mean.backward()).unwrap();
        value
    };
    seen.lock().unwrap().iter().map(step).collect()
}

fn assert_close(found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() <= tolerance, "step {step}: {found} is not {expected}");
    }
}

fn weights(dir: &Path) -> Vec<(String, Vec<f32>)> {
    let source = TensorSource::open(dir).unwrap();
    let read = |name: &str| {
        let mut values = vec![0.0; source.shape(name).unwrap().iter().product()];
        source.read_into(name, &mut values).unwrap();
        (name.to_owned(), values)
    };
    source.names().map(read).collect()
}

#[test]
fn network_of_stock_layers_trains_as_in_a_plain_dfdx_loop_with_momentum() {
    let (dir, seen) = (TempDir::new().unwrap(), Seen::default());
    let build = || Cpu::seed_from_u64(5).build_module::<Mlp, f32>();
    let model = DfdxModel::new(build(), VOCAB, noting(&seen, mlp_loss)).unwrap();
    let keys = [("optimizer", "sgd"), ("momentum", "0.9"), ("learning_rate", "0.5")];

    let (found, report) = losses(job(dir.path(), model, &keys).unwrap());

    let momentum = Some(Momentum::Classic(0.9));
    let sgd = Sgd::new(&build(), SgdConfig { lr: 0.5, momentum, weight_decay: None });
    let expected = plain_loop(build(), sgd, &seen, mlp_loss);
    assert!(report.finished && found.len() as u64 == STEPS);
    assert!(expected[7] < expected[0] - 0.3, "{expected:?}");
    // f32 sums in another order.
    assert_close(&found, &expected, 1e-5);
}

#[test]
fn transformer_of_fused_operations_trains_as_one_of_stock_operations_with_adam() {
    let (dir, seen) = (TempDir::new().unwrap(), Seen::default());
    let model = DfdxModel::new(Transformer::new(6), VOCAB, noting(&seen, Transformer::fused)).unwrap();

    let (found, _) = losses(job(dir.path(), model, &[]).unwrap());

    let adam = Adam::new(&Transformer::new(6), AdamConfig { lr: 0.01, ..AdamConfig::default() });
    let expected = plain_loop(Transformer::new(6), adam, &seen, Transformer::stock);
    assert!(expected[7] < expected[0] - 0.3, "{expected:?}");
    // f32 sums in another order.
    assert_close(&found, &expected, 1e-5);
}

#[test]
fn two_microbatches_of_one_row_train_like_one_of_two_rows() {
    let (together, apart) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let keys = [("max_grad_norm", "0.5")];
    let cut = [("max_grad_norm", "0.5"), ("micro_batch_size", "1"), ("gradient_accumulation_steps", "2")];

    let (expected, _) = losses(job(together.path(), transformer(1), &keys).unwrap());
    let (found, _) = losses(job(apart.path(), transformer(1), &cut).unwrap());

    assert_close(&found, &expected, 1e-5);
}

#[test]
fn resumed_run_ends_with_the_same_bits_as_an_uninterrupted_run() {
    let (straight, stopped) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let keys = [("gradient_accumulation_steps", "2"), ("shuffle", "true"), ("lr_scheduler", "cosine")];
    let (expected, whole) = losses(job(straight.path(), transformer(2), &keys).unwrap());

    let control = Control::default();
    let mut found = Vec::new();
    let stop_after_three = |event: &Event| {
        if let Event::Step(m) = event {
            found.push(m.loss);
            if m.step == 3 {
                control.stop();
            }
        }
    };
    let first = job(stopped.path(), transformer(2), &keys).unwrap().run_with(&control, stop_after_three).unwrap();
    // The second run starts from the checkpoint, not from its model's initial values.
    let (rest, second) = losses(job(stopped.path(), transformer(3), &keys).unwrap());

    assert_eq!((first.steps, first.finished, second.finished), (3, false, true));
    found.extend(rest);
    assert_eq!(found, expected);
    assert_eq!(weights(&second.model_dir.unwrap()), weights(&whole.model_dir.unwrap()));
}

#[test]
fn evaluation_is_the_mean_over_the_validation_rows_and_does_not_change_training() {
    let (with, without, seen) = (TempDir::new().unwrap(), TempDir::new().unwrap(), Seen::default());
    let model = DfdxModel::new(Transformer::new(4), VOCAB, noting(&seen, Transformer::fused)).unwrap();
    let mut evals = Vec::new();
    let on_event = |event: &Event| {
        if let Event::Eval(m) = event {
            evals.push(m.eval_loss);
        }
    };

    let keys = [("val_set_size", "5"), ("eval_steps", "4"), ("learning_rate", "0")];
    let report = job(with.path(), model, &keys).unwrap().run_with(&Control::default(), on_event).unwrap();

    let mean = |seen: &[(Vec<i32>, Vec<i32>)]| {
        let (mut sum, mut predicted) = (0.0, 0);
        for (ids, labels) in seen {
            let nothing = vec![0; ids.len()];
            let batch = Batch { ids, labels, positions: &nothing, doc_start: &nothing, n_rows: 2, seq_len: 16 };
            sum += f64::from(Transformer::new(4).stock(&batch, Tape::default()).array());
            predicted += labels.iter().filter(|l| **l >= 0).count();
        }
        sum / predicted as f64
    };
    // Twice: four steps, then three microbatches for five rows.
    let seen = seen.lock().unwrap();
    assert_eq!((seen.len(), evals.len()), (14, 2));
    assert_close(&evals, &[mean(&seen[4..7]), mean(&seen[11..14])], 1e-5);
    let (_, plain) = losses(job(without.path(), transformer(4), &keys[2..]).unwrap());
    assert_eq!(weights(&report.model_dir.unwrap()), weights(&plain.model_dir.unwrap()));
}

#[test]
fn export_has_the_users_names_and_can_be_made_from_a_checkpoint_alone() {
    let dir = TempDir::new().unwrap();
    let (_, report) = losses(job(dir.path(), transformer(9), &[("learning_rate", "0")]).unwrap());
    let model_dir = report.model_dir.unwrap();

    export_checkpoint(&report.checkpoint.unwrap(), &dir.path().join("again"), ExportOptions::default()).unwrap();

    let weights = weights(&model_dir);
    let mut names: Vec<&str> = weights.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["down", "gain", "gate_up", "qkv", "qkv_bias", "table"]);
    let first = UserModel::from(transformer(9));
    for param in first.params() {
        let exported = weights.iter().find(|(name, _)| *name == param.name).unwrap();
        assert_eq!(exported.1, param.values, "{}", param.name);
    }
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(model_dir.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["model_type"], "user_defined");
    assert_eq!(self::weights(&dir.path().join("again")), weights);
}

#[test]
fn inapplicable_keys_are_refused_in_one_sentence() {
    let dir = TempDir::new().unwrap();
    for (key, value) in [
        ("bf16", "true"),
        ("device", "cuda"),
        ("gradient_checkpointing", "true"),
        ("model.hidden_size", "8"),
        ("loss_weights", "true"),
    ] {
        let error = job(dir.path(), transformer(1), &[(key, value)]).unwrap_err();

        let expected = format!("`{key}` does not apply to a user-defined model; remove it");
        assert_eq!(error.to_string(), expected);
    }
    let other = Job::builder().set("tokenizer", "bytes").set("model.model_type", "llama").set("max_steps", 1);
    let other = other.set("datasets.0.path", "text.txt").set("datasets.0.type", "completion").build().unwrap();
    let error = other.with_model(transformer(1)).unwrap_err();
    assert_eq!(error.to_string(), "the job was given a model, but its configuration names another one");
}

#[test]
fn user_defined_model_does_not_run_from_its_configuration_alone() {
    let dir = TempDir::new().unwrap();
    let yaml = job(dir.path(), transformer(1), &[]).unwrap().config().to_yaml();

    let error = Job::from_config(crate::config::JobConfig::from_yaml_str(&yaml, &[]).unwrap()).run().unwrap_err();

    let expected = "the model is user-defined and exists only in the program that built this job; run that program";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn panicking_loss_ends_the_run_with_its_message() {
    let dir = TempDir::new().unwrap();
    let model = DfdxModel::new(Transformer::new(1), VOCAB, |_: &Transformer, batch: &Batch<'_>, _| -> Loss {
        panic!("no rows of {}", batch.seq_len)
    });

    let error = job(dir.path(), model.unwrap(), &[]).unwrap().run().unwrap_err();

    assert_eq!(error.to_string(), "user-defined model 0: panicked: no rows of 16");
}

#[test]
fn tensors_are_named_by_their_path_and_detached_ones_are_not_trained() {
    let device = Cpu::seed_from_u64(1);
    let module = device.build_module::<(Linear<2, 3>, BatchNorm1D<3>), f32>();

    let model = DfdxModel::new(module, 3, |_, _: &Batch<'_>, _| -> Loss { unreachable!("not run here") }).unwrap();

    let model = UserModel::from(model);
    let params: Vec<(&str, &[usize], bool)> =
        model.params().iter().map(|p| (p.name.as_str(), p.shape.as_slice(), p.trainable)).collect();
    let expected: [(&str, &[usize], bool); 6] = [
        ("0.weight", &[3, 2], true),
        ("0.bias", &[3], true),
        ("1.scale", &[3], true),
        ("1.bias", &[3], true),
        ("1.running_mean", &[3], false),
        ("1.running_var", &[3], false),
    ];
    assert_eq!(params, expected);
}

#[test]
fn module_without_parameters_is_refused() {
    let error = DfdxModel::new((), 3, |_, _: &Batch<'_>, _| -> Loss { unreachable!("not run here") }).unwrap_err();

    assert_eq!(error.to_string(), UserModelError::NothingTrainable.to_string());
}

#[test]
fn ranks_that_share_a_user_defined_model_have_the_losses_of_one_rank() {
    let train = |keys: &[(&str, &str)]| {
        let dir = TempDir::new().unwrap();
        let keys: Vec<(&str, &str)> =
            [("max_grad_norm", "0.5"), ("weight_decay", "0.1")].iter().chain(keys).copied().collect();
        let (losses, report) = losses(job(dir.path(), transformer(3), &keys).unwrap());
        let source = TensorSource::open(&report.model_dir.unwrap()).unwrap();
        let mut weights = vec![0.0; source.shape("qkv").unwrap().iter().product()];
        source.read_into("qkv", &mut weights).unwrap();
        (losses, weights)
    };
    let (alone, weights) = train(&[("micro_batch_size", "4")]);
    for (micro_batch, mesh) in [
        ("2", &[("dp_replicate_size", "2")][..]),
        ("2", &[("dp_shard_size", "2"), ("zero_stage", "1")]),
        ("2", &[("dp_shard_size", "2"), ("zero_stage", "2")]),
        ("2", &[("dp_shard_size", "2"), ("zero_stage", "3")]),
        ("1", &[("dp_shard_size", "2"), ("dp_replicate_size", "2"), ("zero_stage", "3")]),
    ] {
        let keys: Vec<(&str, &str)> = [("micro_batch_size", micro_batch)].iter().chain(mesh).copied().collect();

        let (shared, shared_weights) = train(&keys);

        for (step, (a, b)) in alone.iter().zip(&shared).enumerate() {
            assert!((a - b).abs() < 2e-5, "{mesh:?}: loss of step {step} is {b}, and {a} on one rank");
        }
        let off = weights.iter().zip(&shared_weights).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 1e-5, "{mesh:?}: weights differ by {off}");
    }
}

#[test]
fn mesh_that_would_split_a_user_defined_model_is_refused() {
    for axis in ["tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"] {
        let dir = TempDir::new().unwrap();

        let error = job(dir.path(), transformer(3), &[(axis, "2")]).unwrap().run().unwrap_err();

        let text = error.to_string();
        assert!(text.starts_with("a user-defined model is one operation") && !text.contains('\n'), "{axis}: {text}");
        assert!(!dir.path().join("checkpoints").exists());
    }
}
