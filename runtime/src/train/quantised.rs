//! Refuses model directories whose weights other tools have quantised: their files hold codes and scales instead of weights.

use crate::error::plan::PlanError;
use serde_json::Value;

/// Characters of a name from a file that a message repeats.
const NAME_MAX: usize = 40;

/// Checks that a model configuration declares no quantised weights.
///
/// # Errors
/// When it does; the error names the format.
pub(super) fn check_unquantised(hf_config: &Value, origin: &str) -> Result<(), PlanError> {
    // compressed-tensors wrote the second key in its first versions.
    let declared = ["quantization_config", "compression_config"].map(|key| hf_config.get(key));
    match declared.into_iter().flatten().find(|value| !value.is_null()) {
        Some(config) => Err(PlanError::Quantised { origin: origin.into(), format: format_of(config) }),
        None => Ok(()),
    }
}

/// The format as its tool calls it, and its variant.
fn format_of(config: &Value) -> String {
    let text = |key: &str| {
        let value = config.get(key).and_then(Value::as_str)?;
        Some(value.chars().filter(|c| !c.is_control()).take(NAME_MAX).collect::<String>())
    };
    let flag = |key: &str| config.get(key).and_then(Value::as_bool).unwrap_or(false);
    let method = text("quant_method").or_else(|| flag("load_in_4bit").then(|| "bitsandbytes".into()));
    let method = method.or_else(|| flag("load_in_8bit").then(|| "bitsandbytes".into()));
    let bits = || config.get("bits").and_then(Value::as_u64).map(|bits| format!("{bits} bits"));
    let of_bitsandbytes = || match flag("load_in_4bit") {
        true => Some(text("bnb_4bit_quant_type").unwrap_or_else(|| "fp4".into())),
        false => flag("load_in_8bit").then(|| "int8".into()),
    };
    let variant = of_bitsandbytes().or_else(|| text("format")).or_else(bits);
    let method = method.unwrap_or_else(|| "an unnamed format".into());
    variant.map_or(method.clone(), |variant| format!("{method} ({variant})"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn quantised_weights_are_refused_by_the_name_of_their_format() {
        let of = |config: Value| check_unquantised(&json!({ "quantization_config": config }), "m/config.json");
        let cases = [
            (json!({"quant_method": "gptq", "bits": 4, "group_size": 128}), "gptq (4 bits)"),
            (json!({"quant_method": "awq", "bits": 4}), "awq (4 bits)"),
            (json!({"quant_method": "fp8", "weight_block_size": [128, 128]}), "fp8"),
            (
                json!({"quant_method": "compressed-tensors", "format": "float-quantized"}),
                "compressed-tensors (float-quantized)",
            ),
            (
                json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}),
                "bitsandbytes (nf4)",
            ),
            (json!({"load_in_8bit": true}), "bitsandbytes (int8)"),
            (json!({}), "an unnamed format"),
        ];
        for (config, format) in cases {
            let error = of(config).unwrap_err().to_string();
            let expected = format!("m/config.json: the weights are quantised in the format {format}");
            assert!(error.starts_with(&expected), "{error}");
        }
        let old = check_unquantised(&json!({"compression_config": {"quant_method": "sparseml"}}), "m/config.json");
        assert!(old.unwrap_err().to_string().contains("sparseml"));
    }

    #[test]
    fn null_and_absent_declarations_are_accepted() {
        assert!(check_unquantised(&json!({"quantization_config": null}), "").is_ok());
        assert!(check_unquantised(&json!({"torch_dtype": "bfloat16"}), "").is_ok());
    }

    #[test]
    fn names_from_a_file_are_cut() {
        let long = "x\n".repeat(5000);
        let error = check_unquantised(&json!({"quantization_config": {"quant_method": long}}), "").unwrap_err();

        assert!(error.to_string().len() < 400 && !error.to_string().contains('\n'), "{error}");
    }
}
