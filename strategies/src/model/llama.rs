//! Llama 2 and 3. Source: Touvron et al. 2023 (arXiv:2307.09288); Dubey et al. 2024 (arXiv:2407.21783).

use super::{Family, decoder};

pub(super) static FAMILY: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    prefix: decoder::PREFIX,
    keys: &[decoder::KEYS, &["pretraining_tp"]],
    linears: decoder::LINEARS,
    parse: |hf| decoder::parse(hf, &FAMILY),
    hidden: decoder::hidden,
};
