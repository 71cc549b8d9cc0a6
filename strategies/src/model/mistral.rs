//! Mistral: Llama with an optional sliding window on every layer. Source: Jiang et al. 2023 (arXiv:2310.06825).

use super::{Family, HfConfig, ModelConfig, ModelError, decoder};

pub(super) static FAMILY: Family = Family {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    prefix: decoder::PREFIX,
    keys: &[decoder::KEYS, &["sliding_window"]],
    linears: decoder::LINEARS,
    parse,
    forward: decoder::forward,
};

fn parse(hf: &HfConfig) -> Result<ModelConfig, ModelError> {
    let base = decoder::parse(hf, &FAMILY)?;
    let windows = decoder::windows(hf, hf.size("sliding_window")?, 0, base.n_layers)?;
    Ok(ModelConfig { windows, ..base })
}
