//! Phi-3: Llama with queries, keys and values in one tensor of the model file, gate and up in another, and an optional
//! sliding window on every layer. Source: Abdin et al. 2024 (arXiv:2404.14219).
//!
//! Deliberately absent: the stretched positions of its long-context variants (`longrope`) and partly rotated heads.

use super::{Family, HfConfig, ModelConfig, ModelError, decoder};

pub(super) static FAMILY: Family = Family {
    model_type: "phi3",
    architecture: "Phi3ForCausalLM",
    prefix: decoder::PREFIX,
    keys: &[decoder::KEYS, &["partial_rotary_factor", "sliding_window"], DROPOUTS],
    linears: &["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    parse,
    hidden: decoder::hidden,
};

/// Keys that do not change training here.
const DROPOUTS: &[&str] = &["embd_pdrop", "resid_pdrop"];

fn parse(hf: &HfConfig) -> Result<ModelConfig, ModelError> {
    for keys in [Some(hf), hf.section("rope_parameters")?].into_iter().flatten() {
        if let Some(share) = keys.number("partial_rotary_factor")?.filter(|share| *share != 1.0) {
            return Err(ModelError::value("partial_rotary_factor", share, "expected 1"));
        }
    }
    let base = decoder::parse(hf, &FAMILY)?;
    Ok(ModelConfig {
        max_positions: hf.size("max_position_embeddings")?.unwrap_or(4096),
        norm_eps: hf.float("rms_norm_eps")?.unwrap_or(1e-5),
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        packed_projections: true,
        windows: decoder::window_of_all(hf, base.n_layers)?,
        ..base
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{BatchShape, Head};

    fn parse(keys: &str) -> Result<ModelConfig, ModelError> {
        let json = format!(
            r#"{{"model_type": "phi3", "vocab_size": 32064, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2{keys}}}"#
        );
        ModelConfig::try_from(&serde_json::from_str::<HfConfig>(&json).unwrap())
    }

    #[test]
    fn packed_tensors_have_the_names_and_shapes_of_transformers() {
        let model = parse("").unwrap();

        let program = model.forward(BatchShape { n_rows: 1, seq_len: 4 }, Head::Loss).unwrap();

        let parts = program.params.iter().flat_map(|p| &p.parts);
        let packed: Vec<_> = parts.filter(|p| p.name.contains("qkv") || p.name.contains("gate")).collect();
        assert_eq!(packed.len(), 2);
        assert_eq!((&*packed[0].name, &*packed[0].shape), ("model.layers.0.self_attn.qkv_proj.weight", &[128, 64][..]));
        assert_eq!((&*packed[1].name, &*packed[1].shape), ("model.layers.0.mlp.gate_up_proj.weight", &[192, 64][..]));
    }

    #[test]
    fn longrope_and_partly_rotated_heads_are_refused() {
        let text = |keys: &str| parse(keys).unwrap_err().to_string();

        let long = text(r#", "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}"#);
        let partial = text(r#", "partial_rotary_factor": 0.75"#);
        let nested = text(r#", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}"#);

        assert_eq!(long, "`rope_type: longrope` is not supported; supported are default, linear, llama3");
        assert_eq!(partial, "`partial_rotary_factor: 0.75` is not supported; expected 1");
        assert_eq!(nested, "`partial_rotary_factor: 0.5` is not supported; expected 1");
    }
}
