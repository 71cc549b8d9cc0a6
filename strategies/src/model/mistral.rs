//! Mistral: Llama with an optional sliding window on every layer. Source: Jiang et al. 2023 (arXiv:2310.06825).

use super::{Family, HfConfig, ModelConfig, ModelError, decoder};

pub(super) static FAMILY: Family = Family {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    prefix: decoder::PREFIX,
    keys: &[decoder::KEYS, &["sliding_window"]],
    linears: decoder::LINEARS,
    parse,
    hidden: decoder::hidden,
};

fn parse(hf: &HfConfig) -> Result<ModelConfig, ModelError> {
    // In transformers, `null` means no window, and an absent key this one.
    let hf = &hf.with_default("sliding_window", 4096);
    let base = decoder::parse(hf, &FAMILY)?;
    let windows = decoder::window_of_all(hf, base.n_layers)?;
    Ok(ModelConfig { windows, ..base })
}
