//! Weights of a model directory on several ranks: each reads what it holds, and no byte more.

use super::*;
use phalanx_cpu::scratch_bytes;
use phalanx_storage::hf::dtype::Dtype;
use phalanx_storage::hf::layout::encode_header;
use phalanx_strategies::compile::{Parallel, StepSpec, compile_step};
use phalanx_strategies::mesh::{Mesh, Place};
use phalanx_strategies::model::{BatchShape, Head, HfConfig};
use phalanx_strategies::passes::optimizer::OptimizerSpec;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn compile(config: &Value, place: Place) -> (ModelConfig, Compiled) {
    let parsed: HfConfig = serde_json::from_value(config.clone()).unwrap();
    let model = ModelConfig::try_from(&parsed).unwrap();
    let mut forward = model.forward(BatchShape { n_rows: 1, seq_len: 8 }, Head::Loss).unwrap();
    forward.place = place;
    let spec = StepSpec {
        n_microbatches: 2,
        precision: Precision::F32,
        recompute: Recompute::None,
        lora: None,
        optimizer: OptimizerSpec::Sgd { momentum: 0.0, weight_decay: 0.0 },
        max_grad_norm: None,
        offload_optimizer: false,
        parallel: Parallel::default(),
    };
    (model, compile_step(forward, &spec, scratch_bytes).unwrap())
}

/// Element `i` of a tensor; whole numbers, so that they survive in bf16.
fn element(name: &str, i: usize) -> f32 {
    ((i * 7 + name.len() * 13) % 251) as f32
}

/// A model directory in bf16.
fn model_dir(whole: &Compiled) -> tempfile::TempDir {
    let tensors = parameters(whole);
    let list: Vec<_> = tensors.iter().map(|t| (t.name.as_str(), Dtype::BF16, t.shape.as_slice())).collect();
    let mut bytes = encode_header(&list, &BTreeMap::new(), 8);
    for t in &tensors {
        let n: usize = t.shape.iter().product();
        bytes.extend((0..n).flat_map(|i| half::bf16::from_f32(element(&t.name, i)).to_le_bytes()));
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    dir
}

/// Loads the model on each rank, compares every element, and returns the bytes that each read and all bytes there are.
fn load_on_every_rank(config: &Value, mesh: Mesh) -> (Vec<u64>, u64) {
    let (_, whole) = compile(config, Place::default());
    let dir = model_dir(&whole);
    let all: usize = parameters(&whole).iter().map(|t| t.shape.iter().product::<usize>()).sum();
    let mut read = Vec::new();
    for rank in 0..mesh.size() {
        let (model, c) = compile(config, Place { mesh, rank });
        let mut machine = CpuMachine::new(&[&c]).unwrap();
        let source = TensorSource::open(dir.path()).unwrap();

        initialise(&mut machine, &c, Some(&model), 1, Some(&source)).unwrap();

        let mut held = 0;
        for tensor in parameters(&c) {
            let values = elements(&machine, &c, &tensor);
            for (index, at) in tensor.runs() {
                for (i, at) in at.enumerate() {
                    let expected = element(&tensor.name, index + i);
                    assert_eq!(values[at], expected, "rank {rank}: {} {}", tensor.name, index + i);
                    held += 1;
                }
            }
        }
        assert_eq!(source.bytes_read(), 2 * held, "rank {rank} reads what it holds");
        read.push(source.bytes_read());
    }
    (read, 2 * all as u64)
}

fn llama() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 48, "intermediate_size": 70, "num_hidden_layers": 4, "vocab_size": 101,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    })
}

fn gpt2() -> Value {
    json!({"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 4, "n_positions": 16, "vocab_size": 101})
}

#[test]
fn ranks_that_share_everything_read_the_file_once_between_them() {
    for (config, mesh) in
        [(llama(), Mesh { dp_shard: 4, ..Mesh::ONE }), (gpt2(), Mesh { dp_shard: 2, cp: 2, ..Mesh::ONE })]
    {
        let (read, all) = load_on_every_rank(&config, mesh);

        assert_eq!(read.iter().sum::<u64>(), all, "{read:?}");
        assert!(read.iter().all(|bytes| *bytes <= all / 4 + all / 100), "{read:?} of {all}");
    }
}

#[test]
fn a_rank_reads_the_rows_and_columns_that_tensor_and_pipeline_parallelism_leave_it() {
    for config in [llama(), gpt2()] {
        for mesh in
            [Mesh { tp: 4, ..Mesh::ONE }, Mesh { pp: 2, tp: 2, ..Mesh::ONE }, Mesh { dp_shard: 2, tp: 2, ..Mesh::ONE }]
        {
            let (read, all) = load_on_every_rank(&config, mesh);

            // Norms, and the key/value heads of several ranks, are on each of them.
            assert!(read.iter().all(|bytes| *bytes < all * 34 / 100), "{mesh}: {read:?} of {all}");
        }
    }
}
