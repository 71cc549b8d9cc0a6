//! A run on a device whose memory the host cannot address has the same bits as a run on the host.

use super::*;
use crate::api::generate::Generator;
use crate::devices::remote::{Remote, both};
use crate::train::model_source::ModelSource;
use phalanx_device::Device;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A model of two layers whose token embedding is larger than the staging buffer.
fn config(dir: &Path, max_steps: usize, keys: &str) -> JobConfig {
    let text: String = (0..300).map(|i| format!("The {i}th hoplite holds the line. ")).collect();
    fs::write(dir.join("text.txt"), text).unwrap();
    let dir = dir.display();
    let yaml = format!(
        "\
model:
  model_type: llama
  vocab_size: 9001
  hidden_size: 128
  intermediate_size: 96
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  max_position_embeddings: 64
tokenizer: bytes
datasets:
  - path: {dir}/text.txt
    type: completion
val_set_size: 4
sequence_len: 32
micro_batch_size: 2
max_steps: {max_steps}
save_steps: 2
learning_rate: 1e-3
lr_scheduler: constant
threads: 1
resume_from_checkpoint: auto
output_dir: {dir}/out
{keys}"
    );
    JobConfig::from_yaml_str(&yaml, &[]).unwrap()
}

#[test]
fn stop_before_the_data_is_tokenized_ends_the_run_without_steps() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 4, "");
    let control = Control::default();
    control.stop();

    let report = run(&config, None, &Ranks::Threads, &control, &mut |_| {}).unwrap();

    assert_eq!((report.steps, report.finished, report.checkpoint), (0, false, None));
    let n_prepared = fs::read_dir(dir.path().join("out/data")).unwrap().count();
    assert_eq!(n_prepared, 0, "nothing half written stays");
}

/// Trains on a device; returns the bits of all losses.
fn train(device: &Arc<dyn Device>, config: &JobConfig) -> Vec<(u64, u64)> {
    let ranks = Ranks::Threads;
    let mut job = Checked::new(config, None, &ranks).unwrap();
    job.model.device = Arc::clone(device);
    let compile = |rank| Programs::compile(&job.model, MeshRank { mesh: job.mesh, rank }, true).map(Arc::new).unwrap();
    job.programs = (0..job.mesh.size()).map(compile).collect();
    let mut losses = Vec::new();
    let mut on_event = |event: &Event| match event {
        Event::Step(step) => losses.push((step.step, step.loss.to_bits())),
        Event::Eval(eval) => losses.push((eval.step, eval.eval_loss.to_bits())),
        _ => {}
    };

    let report = job.run(&Control::default(), &mut on_event).unwrap();

    assert!(report.finished && report.model_dir.is_some());
    losses
}

/// All tensors in files below a folder.
fn tensors_in(dir: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>, root: &Path) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            tensors_in(&path, files, root);
        } else if path.extension().is_some_and(|extension| extension == "safetensors") {
            files.insert(path.strip_prefix(root).unwrap().to_owned(), fs::read(&path).unwrap());
        }
    }
}

#[test]
fn run_is_bit_identical_on_host_and_remote_memory() {
    for keys in
        ["", "dp_shard_size: 2\n", "tensor_parallel_size: 2\n", "adapter: lora\nlora_r: 4\nlora_target_linear: true\n"]
    {
        let mut runs = Vec::new();
        for device in both() {
            let dir = tempfile::tempdir().unwrap();
            // The second run resumes from the last checkpoint of the first.
            let mut losses = train(&device, &config(dir.path(), 3, keys));
            losses.extend(train(&device, &config(dir.path(), 5, keys)));
            let mut files = BTreeMap::new();
            tensors_in(&dir.path().join("out"), &mut files, dir.path());
            runs.push((device.name(), losses, files));
        }

        let [(_, losses, files), (name, remote_losses, remote_files)] = &runs[..] else { panic!("two devices") };
        assert_eq!(*name, "remote");
        assert!(losses.iter().any(|(step, _)| *step == 5) && files.len() > 2, "{keys}: {losses:?}");
        assert_eq!(losses, remote_losses, "{keys}");
        assert!(files.keys().eq(remote_files.keys()), "{keys}");
        for (path, bytes) in files {
            assert!(remote_files[path] == *bytes, "{keys}: {}", path.display());
        }
    }
}

/// 64 tokens of a microbatch in chunks of 13, on every axis that cuts the head or its tokens: the tensor-parallel vocabulary, the
/// tokens of context-parallel ranks, the last stage, gathered weights, half precision, no gradient of the head. Only the
/// order of sums differs: by some units in the last place of a loss in f32, and in bf16 by some of its units after four steps.
#[test]
fn head_in_chunks_trains_as_the_whole_head() {
    for (keys, tolerance) in [
        ("", 1e-6),
        ("gradient_accumulation_steps: 3\n", 1e-6),
        ("tensor_parallel_size: 2\n", 1e-6),
        ("tensor_parallel_size: 2\nsequence_parallel: true\nbf16: true\n", 1e-3),
        ("context_parallel_size: 2\n", 1e-6),
        ("pipeline_parallel_size: 2\ngradient_accumulation_steps: 3\n", 1e-6),
        ("dp_shard_size: 2\ngradient_accumulation_steps: 2\nbf16: true\n", 1e-3),
        ("adapter: lora\nlora_r: 4\nlora_target_linear: true\n", 1e-6),
    ] {
        let devices: [Arc<dyn Device>; 2] = [crate::devices::host(), Arc::new(Remote::with_head_chunks(13))];
        let [whole, chunks] = devices.map(|device| {
            let dir = tempfile::tempdir().unwrap();
            train(&device, &config(dir.path(), 4, keys))
        });

        let distance = |(a, b): (&(u64, u64), &(u64, u64))| (f64::from_bits(a.1) - f64::from_bits(b.1)).abs();
        let largest = whole.iter().zip(&chunks).map(distance).fold(0.0, f64::max);
        println!("{keys:?}: {largest:e}");
        assert_eq!(whole.len(), chunks.len(), "{keys}");
        assert!(largest <= tolerance, "{keys}: losses differ by {largest:e}");
        assert!(whole != chunks, "{keys}: nothing was cut");
    }
}

/// A chunk ends at the same tokens on every mesh.
#[test]
fn reproducible_run_with_the_head_in_chunks_has_the_bits_of_one_rank_on_every_mesh() {
    let device: Arc<dyn Device> = Arc::new(Remote::with_head_chunks(13));
    let bits = |keys: &str| {
        let dir = tempfile::tempdir().unwrap();
        train(&device, &config(dir.path(), 3, &format!("reproducible: true\n{keys}")))
    };
    let one = bits("gradient_accumulation_steps: 4\n");

    for keys in [
        "dp_shard_size: 2\ngradient_accumulation_steps: 2\n",
        "pipeline_parallel_size: 2\ngradient_accumulation_steps: 4\n",
    ] {
        assert_eq!(bits(keys), one, "{keys}");
    }
}

#[test]
fn logits_are_bit_identical_on_host_and_remote_memory() {
    let dir = tempfile::tempdir().unwrap();
    let [host, remote] = both();
    train(&host, &config(dir.path(), 1, ""));

    let logits = |device: &Arc<dyn Device>| {
        let mut generator =
            Generator::load_on(&**device, &ModelSource::find(&dir.path().join("out/model"), None).unwrap(), 64)
                .unwrap();
        let logits = generator.all_logits(&[72, 111, 108, 100]).unwrap();
        logits.iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
    };

    let (here, there) = (logits(&host), logits(&remote));
    assert_eq!(here.len(), 4 * 9001);
    assert!(here == there);
}
