//! A model that a configuration describes.

use crate::data::tokenizer::Tokenizer;
use phalanx_strategies::model::{Family, HfConfig, ModelConfig};
use serde_json::{Value, json};

/// A described model, completed from its tokenizer and with the keys that readers of an export expect.
pub(super) fn completed(mut described: Value, tokenizer: &Tokenizer) -> Value {
    if let Some(keys) = described.as_object_mut() {
        let mut default = |key: &str, value: Option<Value>| {
            if let (false, Some(value)) = (keys.contains_key(key), value) {
                keys.insert(key.into(), value);
            }
        };
        default("vocab_size", Some(json!(tokenizer.vocab_size())));
        default("bos_token_id", tokenizer.bos_id().map(|id| json!(id)));
        default("eos_token_id", tokenizer.eos_id().map(|id| json!(id)));
        default("torch_dtype", Some(json!("float32")));
        // A model from scratch has no padding token; the one that transformers assumes for a family may be outside a
        // smaller vocabulary.
        default("pad_token_id", Some(Value::Null));
    }
    let hf = serde_json::from_value::<HfConfig>(described.clone()).ok();
    let family = hf.as_ref().and_then(|hf| Family::of(hf).ok());
    if let (Some(family), Some(keys)) = (family, described.as_object_mut()) {
        keys.entry("architectures").or_insert_with(|| json!([family.architecture]));
        // Of some families, transformers assumes another number, whatever that of all heads is.
        const KV_HEADS: &str = "num_key_value_heads";
        let model = hf.and_then(|hf| ModelConfig::try_from(&hf).ok());
        if let Some(model) = model.filter(|_| family.keys.iter().any(|keys| keys.contains(&KV_HEADS))) {
            keys.entry(KV_HEADS).or_insert_with(|| json!(model.n_kv_heads));
        }
    }
    described
}
