//! Qwen2: Llama with a bias on q, k and v, and a sliding window where the configuration asks for it. Source: Yang et al.
//! 2024 (arXiv:2407.10671).

use super::{Family, HfConfig, ModelConfig, ModelError, decoder};

pub(super) static FAMILY: Family = Family {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    prefix: decoder::PREFIX,
    keys: &[decoder::KEYS, decoder::OPTIONAL_WINDOW_KEYS],
    linears: decoder::LINEARS,
    parse,
    hidden: decoder::hidden,
};

fn parse(hf: &HfConfig) -> Result<ModelConfig, ModelError> {
    let base = decoder::parse(hf, &FAMILY)?;
    let windows = decoder::optional_windows(hf, base.n_layers)?;
    Ok(ModelConfig { qkv_bias: true, o_bias: false, windows, ..base })
}
