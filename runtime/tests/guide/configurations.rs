//! Configurations of the pages, whole or in part.

use phalanx::config::JobConfig;
use serde_yaml_ng::Mapping;

/// A model and data for a block that shows other keys only.
const REST: &str =
    "model: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}
tokenizer: bytes
datasets: [{path: text.txt, type: completion}]
";
/// The same beside an adapter, which needs a base model.
const REST_OF_ADAPTERS: &str = "base_model: models/base
datasets: [{path: text.txt, type: completion}]
";

/// Whether a block is a configuration, once it has a model and data.
pub fn check(text: &str) -> Result<(), String> {
    let keys: Mapping = serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?;
    let has_base = keys.contains_key("base_model") || keys.contains_key("adapter");
    let rest = if has_base { REST_OF_ADAPTERS } else { REST };
    let mut whole: Mapping = serde_yaml_ng::from_str(rest).expect("the rest is YAML");
    whole.extend(keys);
    let whole = serde_yaml_ng::to_string(&whole).map_err(|error| error.to_string())?;
    JobConfig::from_yaml_str(&whole, &[]).map(|_| ()).map_err(|error| error.to_string())
}
