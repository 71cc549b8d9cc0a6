//! Costs against their formulas, bounds against simulated pipelines, the search against exhaustive search.

mod bounds;
mod costs;
mod searches;

use super::*;
use crate::optimizer::{AdamW, OptimizerSpec};
use crate::plan::workload::Kept;
use crate::program::Compute;

fn h100() -> Hardware {
    Hardware::named("h100").unwrap()
}

/// Llama 3 70B, rows of 8192 tokens.
fn llama_70b(global_batch_rows: usize) -> Workload {
    Workload {
        n_layers: 80,
        n_heads: 64,
        n_kv_heads: 8,
        head_dim: 128,
        hidden_size: 8192,
        intermediate_size: 28672,
        vocab_size: 128_256,
        layer_params: 855_654_400,
        embedding_params: 128_256 * 8192,
        head_params: 128_256 * 8192,
        trainable_params: 80 * 855_654_400 + 2 * 128_256 * 8192,
        uneven_blocks: false,
        optimizer: OptimizerSpec::AdamW(AdamW::default()),
        seq_len: 8192,
        global_batch_rows,
        compute: Compute::Bf16,
        activation_bytes: 2,
        gathered_bytes: 4,
        stored_bits: 32,
        head_tokens_max: None,
        logit_bytes: 4,
        layer_streamed_bytes: [0; 2],
        head_streamed_bytes: [0; 2],
        layer_kept_bytes: kept(8192, 2 * 8192 + 10_240 + 3 * 28_672),
    }
}

/// Kept bytes for a residual stream of width `stream` and other activations of width `shared`, 2 bytes per element.
fn kept(stream: usize, shared: usize) -> [Kept; 3] {
    let with = |shared| Kept { stream: 2 * stream, shared: 2 * shared };
    [with(4 * stream + shared), with(stream), with(0)]
}

fn small(global_batch_rows: usize) -> Workload {
    Workload {
        n_layers: 12,
        n_heads: 12,
        n_kv_heads: 12,
        head_dim: 64,
        hidden_size: 768,
        intermediate_size: 3072,
        vocab_size: 50_257,
        layer_params: 7_087_872,
        embedding_params: 50_257 * 768,
        head_params: 0,
        trainable_params: 12 * 7_087_872 + 50_257 * 768,
        uneven_blocks: false,
        optimizer: OptimizerSpec::AdamW(AdamW::default()),
        seq_len: 1024,
        global_batch_rows,
        compute: Compute::Bf16,
        activation_bytes: 2,
        gathered_bytes: 4,
        stored_bits: 32,
        head_tokens_max: None,
        logit_bytes: 4,
        layer_streamed_bytes: [0; 2],
        head_streamed_bytes: [0; 2],
        layer_kept_bytes: kept(768, 13 * 768),
    }
}
