//! Qwen3: Llama with a norm on each query and key head, and a sliding window where the configuration asks for it. Source:
//! Yang et al. 2025 (arXiv:2505.09388).

use super::{Family, HfConfig, ModelConfig, ModelError, QkNorm, decoder};

pub(super) static FAMILY: Family = Family {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    prefix: decoder::PREFIX,
    keys: &[decoder::KEYS, decoder::OPTIONAL_WINDOW_KEYS],
    linears: decoder::LINEARS,
    parse,
    hidden: decoder::hidden,
};

fn parse(hf: &HfConfig) -> Result<ModelConfig, ModelError> {
    // In transformers, the width of a head does not follow from the width of the model.
    let hf = &hf.with_default("head_dim", 128);
    let base = decoder::parse(hf, &FAMILY)?;
    let windows = decoder::optional_windows(hf, base.n_layers)?;
    Ok(ModelConfig { qk_norm: QkNorm::Heads, windows, ..base })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_keys_have_the_defaults_of_transformers() {
        let parse = |keys: &str| {
            let json = format!(
                r#"{{"model_type": "qwen3", "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 30, "num_attention_heads": 4{keys}}}"#
            );
            ModelConfig::try_from(&serde_json::from_str::<HfConfig>(&json).unwrap()).unwrap()
        };

        assert_eq!((parse("").head_dim, parse(r#", "head_dim": 16"#).head_dim), (128, 16));
        let windows = parse(r#", "use_sliding_window": true, "sliding_window": 8"#).windows;
        assert_eq!(windows.iter().position(Option::is_some), Some(28));
    }
}
