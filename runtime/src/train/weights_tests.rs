//! Weights of a model directory on several ranks: each rank reads the bytes of its boxes and no more; of our own exports,
//! which have page digests, the pages of its boxes.

use super::super::grown_rows::Grown;
use super::*;
use crate::devices;
use phalanx_device::{Backing, Device};
use phalanx_storage::hf::dtype::Dtype;
use phalanx_storage::hf::export::{Export, ExportTensor, Values, export_model};
use phalanx_storage::hf::layout::{Entry, encode_header, read_header};
use phalanx_strategies::compile::{Offload, Parallel, StepSpec, compile_step};
use phalanx_strategies::mesh::{Mesh, MeshRank};
use phalanx_strategies::model::{BatchShape, Head, HfConfig};
use phalanx_strategies::optimizer::{OptimizerSpec, Sgd};
use phalanx_strategies::passes::lora::LoraSpec;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::program::Packing;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

fn compile(device: &dyn Device, config: &Value, mesh_rank: MeshRank) -> (ModelConfig, Compiled) {
    compile_with(device, config, mesh_rank, None)
}

fn compile_with(
    device: &dyn Device,
    config: &Value,
    mesh_rank: MeshRank,
    lora: Option<LoraSpec>,
) -> (ModelConfig, Compiled) {
    compile_in(Precision::F32, device, config, mesh_rank, lora)
}

fn compile_in(
    precision: Precision,
    device: &dyn Device,
    config: &Value,
    mesh_rank: MeshRank,
    lora: Option<LoraSpec>,
) -> (ModelConfig, Compiled) {
    let parsed: HfConfig = serde_json::from_value(config.clone()).unwrap();
    let model = ModelConfig::try_from(&parsed).unwrap();
    let mut forward = model.forward(BatchShape { n_rows: 1, seq_len: 8 }, Head::Loss).unwrap();
    forward.mesh_rank = mesh_rank;
    let spec = StepSpec {
        n_microbatches: 2,
        precision,
        recompute: Recompute::None,
        lora,
        optimizer: OptimizerSpec::Sgd(Sgd::default()),
        max_grad_norm: None,
        offload: Offload::default(),
        parallel: Parallel::default(),
    };
    (model, compile_step(forward, &spec, device.target()).unwrap())
}

/// Element `i` of a tensor: a whole number that bf16 represents.
fn element(name: &str, i: usize) -> f32 {
    ((i * 7 + name.len() * 13) % 251) as f32
}

/// A model directory of another tool, in bf16.
fn foreign_dir(whole: &Compiled) -> tempfile::TempDir {
    foreign_dir_of(whole, element)
}

fn foreign_dir_of(whole: &Compiled, element: fn(&str, usize) -> f32) -> tempfile::TempDir {
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

/// A model directory that we export, in bf16, in several files.
fn exported_dir(whole: &Compiled) -> tempfile::TempDir {
    let owned: Vec<(String, Vec<usize>, Vec<f32>)> = parameters(whole)
        .into_iter()
        .map(|t| {
            let n: usize = t.shape.iter().product();
            let values = (0..n).map(|i| element(&t.name, i)).collect();
            (t.name, t.shape, values)
        })
        .collect();
    let tensors: Vec<_> =
        owned.iter().map(|(name, shape, values)| ExportTensor { name, shape, values: Values::Here(values) }).collect();
    let config = json!({});
    let root = tempfile::tempdir().unwrap();
    let export = Export {
        config: &config,
        generation_config: None,
        tensors: &tensors,
        dtype: Dtype::BF16,
        files: &[],
        max_shard_bytes: 600_000,
    };
    export_model(&root.path().join("model"), &export).unwrap();
    root
}

/// Bytes that a rank read to load its weights.
#[derive(Debug)]
struct Loaded {
    compiled: Compiled,
    /// Bytes of headers, and of the index.
    opened: u64,
    /// Bytes after the headers.
    read: u64,
    /// Bytes of the elements that it holds.
    held: u64,
}

/// Loads the model on each rank and compares every element; returns the bytes that each rank read, and all bytes of
/// weights.
fn load_on_every_rank(config: &Value, mesh: Mesh, dir: &Path) -> (Vec<Loaded>, u64) {
    let device = &*devices::host();
    let (_, whole) = compile(device, config, MeshRank::default());
    let all: usize = parameters(&whole).iter().map(|t| t.shape.iter().product::<usize>()).sum();
    let load = |rank: usize| {
        let (model, c) = compile(device, config, MeshRank { mesh, rank });
        let mut machine = device.machine(&[&c], &Backing::default()).unwrap();
        let source = TensorSource::open(dir).unwrap();
        let opened = source.bytes_read();

        let first =
            FirstValues { model: Some(&model), params: &[], source: Some(source), grown: None, adapter: None, seed: 1 };
        initialise(&mut *machine, &c, &first, |_| true).unwrap();
        let source = first.source.unwrap();

        let mut held = 0;
        for tensor in parameters(&c) {
            let values = elements(&*machine, &c, &tensor);
            for (index, at) in tensor.runs() {
                for (i, at) in at.enumerate() {
                    let expected = element(&tensor.name, index + i);
                    assert_eq!(values[at], expected, "rank {rank}: {} {}", tensor.name, index + i);
                    held += 2;
                }
            }
        }
        Loaded { opened, read: source.bytes_read() - opened, held, compiled: c }
    };
    ((0..mesh.size()).map(load).collect(), 2 * all as u64)
}

/// Loads a file of another tool; returns the bytes that each rank read after the header, and all bytes of weights.
fn load_foreign(config: &Value, mesh: Mesh) -> (Vec<u64>, u64) {
    let dir = foreign_dir(&compile(&*devices::host(), config, MeshRank::default()).1);
    let (loaded, all) = load_on_every_rank(config, mesh, dir.path());
    let len = std::fs::metadata(dir.path().join("model.safetensors")).unwrap().len();
    for (rank, loaded) in loaded.iter().enumerate() {
        assert_eq!((loaded.opened, loaded.read), (len - all, loaded.held), "rank {rank} of {mesh} reads what it holds");
    }
    (loaded.iter().map(|loaded| loaded.read).collect(), all)
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
fn ranks_that_shard_all_weights_read_the_file_once_in_total() {
    for (config, mesh) in
        [(llama(), Mesh { dp_shard: 4, ..Mesh::ONE }), (gpt2(), Mesh { dp_shard: 2, cp: 2, ..Mesh::ONE })]
    {
        let (read, all) = load_foreign(&config, mesh);

        assert_eq!(read.iter().sum::<u64>(), all, "{read:?}");
        assert!(read.iter().all(|bytes| *bytes <= all / 4 + all / 100), "{read:?} of {all}");
    }
}

#[test]
fn rank_reads_only_its_rows_and_columns_under_tensor_and_pipeline_parallelism() {
    for config in [llama(), gpt2()] {
        for mesh in
            [Mesh { tp: 4, ..Mesh::ONE }, Mesh { pp: 2, tp: 2, ..Mesh::ONE }, Mesh { dp_shard: 2, tp: 2, ..Mesh::ONE }]
        {
            let (read, all) = load_foreign(&config, mesh);

            // Norms are on every tensor-parallel rank, and key/value heads are on several.
            assert!(read.iter().all(|bytes| *bytes < all * 34 / 100), "{mesh}: {read:?} of {all}");
        }
    }
}

/// Bytes of pages that hold elements of the boxes, and of the digests from each box's first page to its last.
fn bytes_of_pages(dir: &Path, c: &Compiled) -> u64 {
    const PAGE: u64 = 4096;
    let mut tensors = BTreeMap::new();
    for path in std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let bytes = std::fs::read(&path).unwrap();
            let read = |out: &mut [u8], at: u64| {
                out.copy_from_slice(&bytes[at as usize..at as usize + out.len()]);
                Ok(())
            };
            let header = read_header(read, bytes.len() as u64).unwrap();
            let n_bytes = bytes.len() as u64 - header.payload_start;
            let location = |entry: Entry| (entry.name, (entry.start - header.payload_start, n_bytes));
            tensors.extend(header.entries.into_iter().map(location));
        }
    }
    let of_box = |tensor: Tensor| {
        let (start, n_bytes) = tensors[&tensor.name];
        let pages = |(index, at): (usize, Range<usize>)| {
            let first = start + 2 * index as u64;
            first / PAGE..=(first + 2 * at.len() as u64 - 1) / PAGE
        };
        let pages: BTreeSet<u64> = tensor.runs().flat_map(pages).collect();
        let digests = 8 * (1 + pages.last().unwrap() - pages.first().unwrap());
        pages.iter().map(|page| PAGE.min(n_bytes - page * PAGE)).sum::<u64>() + digests
    };
    parameters(c).into_iter().map(of_box).sum()
}

#[test]
fn rank_reads_only_the_pages_of_an_export_that_hold_its_weights_and_their_digests() {
    let config = json!({
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1001,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    });
    let root = exported_dir(&compile(&*devices::host(), &config, MeshRank::default()).1);
    let dir = root.path().join("model");
    assert!(dir.join("model.safetensors.index.json").is_file(), "there are several files");
    let meshes =
        [Mesh { dp_shard: 4, ..Mesh::ONE }, Mesh { tp: 2, dp_shard: 2, ..Mesh::ONE }, Mesh { tp: 4, ..Mesh::ONE }];
    for mesh in meshes {
        let (loaded, all) = load_on_every_rank(&config, mesh, &dir);

        for (rank, Loaded { compiled, read, .. }) in loaded.iter().enumerate() {
            assert_eq!(*read, bytes_of_pages(&dir, compiled), "rank {rank} of {mesh}");
        }
        if mesh.tp == 1 {
            let most = loaded.iter().map(|loaded| loaded.opened + loaded.read).max().unwrap();
            assert!(most < all * 2 / 5, "a rank of four read {most} of {all} bytes");
        }
    }
}

/// The mean of a column of an embedding with so many rows.
fn mean_of_column(name: &str, n_rows: usize, row_len: usize, column: usize) -> f64 {
    (0..n_rows).map(|row| f64::from(element(name, row * row_len + column))).sum::<f64>() / n_rows as f64
}

#[test]
fn new_rows_of_the_embedding_are_the_mean_of_the_others_on_every_rank() {
    let device = &*devices::host();
    let dir = foreign_dir(&compile(device, &llama(), MeshRank::default()).1);
    let grown = json!(108);
    let mut config = llama();
    config["vocab_size"] = grown;
    for mesh in [Mesh::ONE, Mesh { dp_shard: 3, ..Mesh::ONE }, Mesh { tp: 2, ..Mesh::ONE }] {
        for rank in 0..mesh.size() {
            let (model, c) = compile(device, &config, MeshRank { mesh, rank });
            let mut machine = device.machine(&[&c], &Backing::default()).unwrap();
            let grown = Some(Grown { from: 101, to: 108, mean: true });
            let source = TensorSource::open(dir.path()).ok();
            let first = FirstValues { model: Some(&model), params: &[], source, grown, adapter: None, seed: 1 };

            initialise(&mut *machine, &c, &first, |_| true).unwrap();

            for tensor in parameters(&c).iter().filter(|t| t.shape[0] == 108) {
                let values = elements(&*machine, &c, tensor);
                let row_len = tensor.shape[1];
                for (index, at) in tensor.runs().flat_map(|(index, at)| (index..).zip(at)) {
                    let (row, column) = (index / row_len, index % row_len);
                    let expected = match row < 101 {
                        true => f64::from(element(&tensor.name, index)),
                        false => mean_of_column(&tensor.name, 101, row_len, column),
                    };
                    assert!(
                        (f64::from(values[at]) - expected).abs() <= 1e-6 * expected.abs(),
                        "{} {row} {column}",
                        tensor.name
                    );
                }
            }
        }
    }
}

#[test]
fn adapters_start_alike_whether_or_not_they_share_products() {
    let config = json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 101,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    });
    let device = &*devices::host();
    let drawn = |dropout| {
        let target_modules = ["q_proj", "k_proj", "v_proj", "up_proj"].map(String::from).to_vec();
        let lora = LoraSpec { rank: 4, alpha: 8.0, target_modules, dropout, ..LoraSpec::default() };
        let (model, c) = compile_with(device, &config, MeshRank::default(), Some(lora));
        let mut machine = device.machine(&[&c], &Backing::default()).unwrap();
        let first = FirstValues { model: Some(&model), params: &[], source: None, grown: None, adapter: None, seed: 1 };
        initialise(&mut *machine, &c, &first, |_| true).unwrap();
        let trained = parameters(&c).into_iter().filter(|tensor| tensor.trainable);
        let values: BTreeMap<String, (Vec<usize>, Vec<f32>)> =
            trained.map(|t| (t.name.clone(), (t.shape.clone(), elements(&*machine, &c, &t).into_owned()))).collect();
        (c.program.params.iter().filter(|param| param.trainable).count(), values)
    };

    let ((n_shared, shared), (n_apart, apart)) = (drawn(0.0), drawn(0.1));

    assert_eq!((n_shared, n_apart), (2 * 6, 2 * 8));
    assert_eq!(shared.len(), 2 * 8);
    assert!(shared == apart);
}

/// The words of all packed tensors on a rank: tensor, index in the whole tensor, word.
fn packed_words(config: &Value, mesh_rank: MeshRank, packing: Packing, dir: &Path) -> BTreeMap<(String, usize), u32> {
    let device = &*devices::host();
    let target_modules = vec!["q_proj".into()];
    let lora = LoraSpec { rank: 2, alpha: 2.0, target_modules, packing: Some(packing), ..LoraSpec::default() };
    let (model, c) = compile_with(device, config, mesh_rank, Some(lora));
    let mut machine = device.machine(&[&c], &Backing::default()).unwrap();
    let source = TensorSource::open(dir).ok();
    let first = FirstValues { model: Some(&model), params: &[], source, grown: None, adapter: None, seed: 1 };
    initialise(&mut *machine, &c, &first, |_| true).unwrap();

    let mut found = BTreeMap::new();
    for tensor in parameters(&c).iter().filter(|t| c.program.value(t.value).dtype == DType::I32) {
        let words = elements(&*machine, &c, tensor);
        for (index, at) in tensor.runs() {
            found.extend(at.enumerate().map(|(i, at)| ((tensor.name.clone(), index + i), words[at].to_bits())));
        }
    }
    found
}

#[test]
fn packed_words_are_the_same_on_every_mesh_and_stand_for_the_weights() {
    let config = json!({
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 101,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    });
    let dir = foreign_dir(&compile(&*devices::host(), &config, MeshRank::default()).1);
    for packing in [Packing::Nf4 { double: true }, Packing::Int8] {
        let whole = packed_words(&config, MeshRank::default(), packing, dir.path());
        let down = "model.layers.1.mlp.down_proj.weight";
        let words: Vec<u32> = whole.iter().filter(|((name, _), _)| name == down).map(|(_, word)| *word).collect();
        let mut weights = vec![0.0f32; 128 * 256];
        phalanx_device::packed::unpack(packing, &words, &mut weights);

        // Half of the widest gap between numbers of NF4, of a largest weight of 250, or half of a step of int8.
        let allowed = if packing == Packing::Int8 { 1.0 } else { 0.16 * 250.0 };
        assert!(weights.iter().enumerate().all(|(i, x)| (x - element(down, i)).abs() < allowed));
        let meshes = [
            Mesh { dp_shard: 3, ..Mesh::ONE },
            Mesh { tp: 2, ..Mesh::ONE },
            Mesh { pp: 2, dp_shard: 2, tp: 2, ..Mesh::ONE },
        ];
        for mesh in meshes {
            let rank = |rank| packed_words(&config, MeshRank { mesh, rank }, packing, dir.path());
            let together: BTreeMap<_, _> = (0..mesh.size()).flat_map(rank).collect();
            assert!(together == whole, "{mesh}, {packing}");
        }
    }
}

#[test]
fn head_beside_a_tied_embedding_must_have_its_values() {
    let config = json!({"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 1, "tie_word_embeddings": true});
    let parsed: HfConfig = serde_json::from_value(config).unwrap();
    let model = ModelConfig::try_from(&parsed).unwrap();
    let checked = |tensors: [(&str, f32); 2]| {
        let list = tensors.map(|(name, _)| (name, Dtype::F32, &[32, 16][..]));
        let mut bytes = encode_header(&list, &BTreeMap::new(), 8);
        bytes.extend(tensors.iter().flat_map(|(_, value)| value.to_le_bytes().repeat(32 * 16)));
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        check_tied(&model, &TensorSource::open(dir.path()).unwrap())
    };

    for embedding in ["model.embed_tokens.weight", "embed_tokens.weight"] {
        let equal = checked([("lm_head.weight", 1.0), (embedding, 1.0)]);
        let other = checked([("lm_head.weight", 1.0), (embedding, 2.0)]);

        assert_eq!(equal, Ok(()), "{embedding}");
        assert!(matches!(&other, Err(HfError::Untied { embedding: found, .. }) if found == embedding), "{other:?}");
    }
}

#[test]
fn weights_that_products_in_fp8_cannot_multiply_are_refused_with_the_largest_one() {
    let config = json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 101,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    });
    let device = &*devices::host();
    let whole = compile(device, &config, MeshRank::default()).1;
    let large_in = |name: &str, i: usize| {
        let value = element(name, i) / 16.0;
        if name.ends_with("layers.1.mlp.up_proj.weight") && i == 4000 { -30.5 } else { value }
    };
    let beside = LoraSpec { rank: 4, alpha: 8.0, target_modules: vec!["q_proj".into()], ..LoraSpec::default() };
    let in_4_bits = LoraSpec { packing: Some(Packing::Nf4 { double: true }), ..beside.clone() };
    let mesh = Mesh { dp_shard: 2, ..Mesh::ONE };
    let load = |precision, mesh: Mesh, lora: &Option<LoraSpec>, element: fn(&str, usize) -> f32| {
        let dir = foreign_dir_of(&whole, element);
        (0..mesh.size()).find_map(|rank: usize| {
            let (model, c) = compile_in(precision, device, &config, MeshRank { mesh, rank }, lora.clone());
            let mut machine = device.machine(&[&c], &Backing::default()).unwrap();
            let source = TensorSource::open(dir.path()).ok();
            let first = FirstValues { model: Some(&model), params: &[], source, grown: None, adapter: None, seed: 1 };
            initialise(&mut *machine, &c, &first, |_| true).err()
        })
    };

    for lora in [None, Some(beside), Some(in_4_bits)] {
        for mesh in [Mesh::ONE, mesh] {
            let error = load(Precision::Fp8, mesh, &lora, large_in).unwrap().to_string();
            for named in ["model.layers.1.mlp.up_proj.weight", "up to 30.5 in", "beyond 28;", "`fp8: false`"] {
                assert!(error.contains(named), "{error}");
            }
            assert_eq!(load(Precision::Bf16, mesh, &lora, large_in), None);
            assert_eq!(load(Precision::Fp8, mesh, &lora, |name, i| element(name, i) / 16.0), None);
        }
    }
}
