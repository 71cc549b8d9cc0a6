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
    forward: decoder::forward,
};

fn parse(hf: &HfConfig) -> Result<ModelConfig, ModelError> {
    let base = decoder::parse(hf, &FAMILY)?;
    let windows = decoder::optional_windows(hf, base.n_layers)?;
    Ok(ModelConfig { qk_norm: QkNorm::Heads, windows, ..base })
}
