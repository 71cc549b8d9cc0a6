//! OLMo 2: norms after the attention and feed-forward parts instead of before them, and norms over all queries and over
//! all keys of a token. Source: OLMo Team 2024 (arXiv:2501.00656).

use super::{Family, HfConfig, ModelConfig, ModelError, NormPlacement, QkNorm, decoder};

pub(super) static FAMILY: Family = Family {
    model_type: "olmo2",
    architecture: "Olmo2ForCausalLM",
    prefix: decoder::PREFIX,
    keys: &[decoder::KEYS],
    linears: decoder::LINEARS,
    parse,
    hidden: decoder::hidden,
};

fn parse(hf: &HfConfig) -> Result<ModelConfig, ModelError> {
    Ok(ModelConfig {
        norm_eps: hf.float("rms_norm_eps")?.unwrap_or(1e-5),
        mlp_bias: false,
        norm_placement: NormPlacement::After,
        qk_norm: QkNorm::Projections,
        ..decoder::parse(hf, &FAMILY)?
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{BatchShape, Head};

    #[test]
    fn norms_have_the_names_and_shapes_of_transformers() {
        let json = r#"{"model_type": "olmo2", "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}"#;
        let model = ModelConfig::try_from(&serde_json::from_str::<HfConfig>(json).unwrap()).unwrap();

        let program = model.forward(BatchShape { n_rows: 1, seq_len: 4 }, Head::Loss).unwrap();

        let parts = program.params.iter().flat_map(|p| &p.parts);
        let mut norms: Vec<_> = parts.filter(|p| p.name.contains("norm")).map(|p| (&*p.name, p.shape[0])).collect();
        norms.sort_unstable();
        let of_block = |name| format!("model.layers.0.{name}.weight");
        let expected = [
            (of_block("post_attention_layernorm"), 64),
            (of_block("post_feedforward_layernorm"), 64),
            (of_block("self_attn.k_norm"), 32),
            (of_block("self_attn.q_norm"), 64),
            ("model.norm.weight".to_string(), 64),
        ];
        assert_eq!(norms, expected.each_ref().map(|(name, n)| (&**name, *n)));
    }
}
