//! Granite: Llama with factors on the embeddings, the attention scores, the terms added to the residual stream, and the
//! logits. Source: Yang et al. 2022 for such factors (arXiv:2203.03466); IBM 2024, Granite 3.0 Language Models.

use super::{Family, HfConfig, ModelConfig, ModelError, Multipliers, decoder};

pub(super) static FAMILY: Family = Family {
    model_type: "granite",
    architecture: "GraniteForCausalLM",
    prefix: decoder::PREFIX,
    keys: &[decoder::KEYS, MULTIPLIERS],
    linears: decoder::LINEARS,
    parse,
    hidden: decoder::hidden,
};

const MULTIPLIERS: &[&str] = &["attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"];

fn parse(hf: &HfConfig) -> Result<ModelConfig, ModelError> {
    let factor = |key| match hf.float(key)?.unwrap_or(1.0) {
        x if x != 0.0 => Ok(x),
        x => Err(ModelError::value(key, x, "expected a factor other than 0")),
    };
    let multipliers = Multipliers {
        embedding: factor("embedding_multiplier")?,
        residual: factor("residual_multiplier")?,
        attention: Some(factor("attention_multiplier")?),
        logits: 1.0 / factor("logits_scaling")?,
    };
    Ok(ModelConfig { multipliers, ..decoder::parse(hf, &FAMILY)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(keys: &str) -> Result<ModelConfig, ModelError> {
        let json = format!(
            r#"{{"model_type": "granite", "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 1, "num_attention_heads": 4{keys}}}"#
        );
        ModelConfig::try_from(&serde_json::from_str::<HfConfig>(&json).unwrap())
    }

    #[test]
    fn absent_factors_are_1_including_the_attention_factor() {
        let keys = r#", "embedding_multiplier": 12, "logits_scaling": 8.0, "residual_multiplier": 0.25"#;

        let given = parse(keys).unwrap().multipliers;

        assert_eq!(given, Multipliers { embedding: 12.0, residual: 0.25, attention: Some(1.0), logits: 0.125 });
    }

    #[test]
    fn factor_of_0_is_refused() {
        let error = parse(r#", "logits_scaling": 0"#).unwrap_err().to_string();

        assert_eq!(error, "`logits_scaling: 0` is not supported; expected a factor other than 0");
    }
}
