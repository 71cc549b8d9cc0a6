//! A model as a GGUF file of llama.cpp: the names of its metadata and tensors, and the order of rows that it expects.
//!
//! Llama and Mistral rotate pairs of neighbours in llama.cpp, so the rows of their queries and keys are interleaved; Qwen
//! rotates halves, as model files do.

use super::weights::{self, Tensor};
use crate::data::gguf_vocabulary::metadata;
use crate::data::tokenizer::Tokenizer;
use crate::error::JobError;
use crate::error::export::ExportError;
use phalanx_device::Machine;
use phalanx_storage::gguf::{Encoding, GgufTensor, Meta, write_gguf};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::model::{ModelConfig, Output, RopeScaling};
use std::path::Path;

/// Families that are written, and the names of their architectures in llama.cpp.
const ARCHITECTURES: [(&str, &str); 4] =
    [("llama", "llama"), ("mistral", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")];

/// Ends of tensor names within a block, in model files and in llama.cpp.
const PARTS: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// Writes the weights of a machine, whose program has no adapters.
///
/// # Errors
/// When llama.cpp has no such model or tokenizer, `path` exists or cannot be written.
pub(crate) fn export_gguf(
    path: &Path,
    machine: &dyn Machine,
    c: &Compiled,
    model: &ModelConfig,
    tokenizer: &Tokenizer,
    encoding: Encoding,
) -> Result<(), JobError> {
    if path.extension().is_none_or(|e| e != "gguf") {
        return Err(ExportError::NotGguf { path: path.to_owned() }.into());
    }
    if model.output == Output::Score {
        return Err(ExportError::GgufScores.into());
    }
    let family = model.family.model_type;
    let known = || ARCHITECTURES.map(|(family, _)| family).join(", ");
    let architecture = ARCHITECTURES.iter().find(|(known, _)| *known == family).map(|(_, name)| *name);
    let architecture = architecture.ok_or_else(|| ExportError::GgufFamily { family: family.into(), known: known() })?;
    let mut meta = description(model, architecture, encoding);
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    meta.push(("general.name".into(), Meta::Text(name)));
    meta.extend(metadata(tokenizer, model.vocab_size).map_err(ExportError::Vocabulary)?);
    let params = weights::parameters(c);
    let mut tensors = Vec::new();
    for tensor in &params {
        let name = name_of(&tensor.name).ok_or_else(|| ExportError::GgufTensor { tensor: tensor.name.clone() })?;
        let n_heads = match architecture {
            "llama" if name.contains(".attn_q.") => model.n_heads,
            "llama" if name.contains(".attn_k.") => model.n_kv_heads,
            _ => 0,
        };
        let values = move || values_of(machine, c, tensor, n_heads);
        tensors.push(GgufTensor { name, shape: tensor.shape.clone(), values: Box::new(values) });
    }
    if let RopeScaling::Llama3 { .. } = model.rope_scaling {
        let plain = ModelConfig { rope_scaling: RopeScaling::None, ..model.clone() };
        let frequencies = plain.rope_frequencies().into_iter().zip(model.rope_frequencies());
        let factors: Vec<f32> = frequencies.map(|(plain, scaled)| (plain / scaled) as f32).collect();
        let shape = vec![factors.len()];
        tensors.push(GgufTensor { name: "rope_freqs.weight".into(), shape, values: Box::new(move || factors.clone()) });
    }
    Ok(write_gguf(path, &meta, &tensors, encoding)?)
}

fn values_of(machine: &dyn Machine, c: &Compiled, tensor: &Tensor, n_heads: usize) -> Vec<f32> {
    let values = weights::packed(machine, c, tensor).into_owned();
    if n_heads == 0 { values } else { interleaved(&values, tensor.shape[0], n_heads) }
}

/// The rows of each head in the order `0, d/2, 1, d/2 + 1, …`.
fn interleaved(values: &[f32], n_rows: usize, n_heads: usize) -> Vec<f32> {
    let (columns, d) = (values.len() / n_rows.max(1), n_rows / n_heads);
    let row = |new: usize| new / d * d + new % d / 2 + new % 2 * (d / 2);
    (0..n_rows).flat_map(|new| &values[row(new) * columns..][..columns]).copied().collect()
}

/// The name of a tensor in llama.cpp.
fn name_of(name: &str) -> Option<String> {
    match name {
        "model.embed_tokens.weight" => return Some("token_embd.weight".into()),
        "model.norm.weight" => return Some("output_norm.weight".into()),
        "lm_head.weight" => return Some("output.weight".into()),
        _ => {}
    }
    let (block, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (part, kind) = rest.rsplit_once('.')?;
    let (_, short) = PARTS.iter().find(|(long, _)| *long == part)?;
    Some(format!("blk.{block}.{short}.{kind}"))
}

/// What llama.cpp needs to know of the model.
fn description(model: &ModelConfig, architecture: &str, encoding: Encoding) -> Vec<(String, Meta)> {
    // llama.cpp lets these models see all earlier tokens, which is the same within a window.
    let window = model.windows.iter().flatten().min().copied().unwrap_or(usize::MAX);
    let number = |n: usize| Meta::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let mut keys = vec![
        ("block_count", number(model.n_layers)),
        ("context_length", number(model.max_positions.min(window))),
        ("embedding_length", number(model.hidden_size)),
        ("feed_forward_length", number(model.intermediate_size)),
        ("attention.head_count", number(model.n_heads)),
        ("attention.head_count_kv", number(model.n_kv_heads)),
        ("attention.key_length", number(model.head_dim)),
        ("attention.value_length", number(model.head_dim)),
        ("attention.layer_norm_rms_epsilon", Meta::F32(model.norm_eps)),
        ("rope.dimension_count", number(model.head_dim)),
        ("rope.freq_base", Meta::F32(model.rope_theta as f32)),
        ("vocab_size", number(model.vocab_size)),
    ];
    if let RopeScaling::Linear { factor } = model.rope_scaling {
        keys.push(("rope.scaling.type", Meta::Text("linear".into())));
        keys.push(("rope.scaling.factor", Meta::F32(factor as f32)));
    }
    let general = [
        ("general.architecture", Meta::Text(architecture.into())),
        ("general.type", Meta::Text("model".into())),
        ("general.file_type", Meta::U32(encoding.file_type())),
        ("general.quantization_version", Meta::U32(2)),
    ];
    let general = general.into_iter().map(|(key, value)| (key.to_owned(), value));
    general.chain(keys.into_iter().map(|(key, value)| (format!("{architecture}.{key}"), value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_head_are_interleaved() {
        let rows: Vec<f32> = (0..8).map(|i| i as f32).collect();

        assert_eq!(interleaved(&rows, 8, 2), [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        assert_eq!(interleaved(&rows, 4, 1), [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0]);
    }

    #[test]
    fn tensors_have_the_names_of_llama_cpp() {
        let name = |name: &str| name_of(name).unwrap_or_default();

        assert_eq!(name("model.layers.12.self_attn.q_proj.bias"), "blk.12.attn_q.bias");
        assert_eq!(name("model.layers.0.post_attention_layernorm.weight"), "blk.0.ffn_norm.weight");
        assert_eq!(name("lm_head.weight"), "output.weight");
        assert_eq!(name("model.layers.0.mlp.router.weight"), "");
    }
}
