//! Low-rank adapters as a directory that PEFT loads beside the base model.

use std::io::Write;
use std::path::Path;

use serde_json::json;

use super::dtype::Dtype;
use super::error::HfError;
use super::export::{ExportTensor, check_tensors, write_json, write_tensors};
use super::staging::Staging;

/// File of an adapter's settings.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// File of an adapter's weights.
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// An adapter to write.
#[derive(Clone, Copy, Debug)]
pub struct AdapterExport<'a> {
    /// The base model's directory or hub name, for `base_model_name_or_path`.
    pub base_model: &'a str,
    /// What PEFT calls the task of the model.
    pub task: &'a str,
    /// Rank of the matrices.
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// Probability of dropout in training.
    pub dropout: f64,
    /// Whether the scale is relative to the root of the rank.
    pub use_rslora: bool,
    /// Whether the rows of adapted weights have trained lengths.
    pub use_dora: bool,
    /// Adapted layers: their paths, or ends of paths such as `q_proj`.
    pub target_modules: &'a [String],
    /// Whether the base model stores its weights as `[in, out]`, as GPT-2 does.
    pub fan_in_fan_out: bool,
    /// Modules that were trained whole: their whole paths.
    pub modules_to_save: &'a [String],
    /// The matrices and the tensors of modules that were trained whole, named with [`peft_name`].
    pub tensors: &'a [ExportTensor<'a>],
    /// The type in the file: F32, BF16 or F16.
    pub dtype: Dtype,
    /// Further files by name: those of the tokenizer.
    pub files: &'a [(String, Vec<u8>)],
}

/// The name that PEFT gives to a trained tensor, such as `model.layers.0.self_attn.q_proj.lora_A.weight` or that of a module that
/// is trained whole.
pub fn peft_name(tensor: &str) -> String {
    format!("base_model.model.{tensor}")
}

/// Writes `adapter_config.json` and `adapter_model.safetensors`; they appear at `dir` complete or not at all.
///
/// # Errors
/// When `dir` holds anything that is not from an earlier export, a tensor is inconsistent, not finite or not named as
/// PEFT expects, or writing fails (`dir` then keeps its previous contents).
pub fn export_adapter(dir: &Path, adapter: &AdapterExport<'_>) -> Result<(), HfError> {
    check_tensors(adapter.tensors, adapter.dtype)?;
    for tensor in adapter.tensors {
        let rank_dim = match (tensor.name.strip_prefix("base_model.model."), tensor.shape) {
            (Some(name), [rank, _]) if name.ends_with(".lora_A.weight") => Some(*rank),
            (Some(name), [_, rank]) if name.ends_with(".lora_B.weight") => Some(*rank),
            (Some(name), _) if !name.contains(".lora_") => continue,
            (Some(name), [_]) if adapter.use_dora && name.ends_with(".lora_magnitude_vector") => continue,
            _ => None,
        };
        if rank_dim != Some(adapter.rank) {
            let reason = format!("shape {:?} does not fit a rank-{} adapter matrix", tensor.shape, adapter.rank);
            return Err(HfError::BadExport { name: tensor.name.to_owned(), reason });
        }
    }
    let mut staging = Staging::new(dir)?;
    let config = json!({
        "peft_type": "LORA",
        "task_type": adapter.task,
        "base_model_name_or_path": adapter.base_model,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": adapter.target_modules,
        "bias": "none",
        "fan_in_fan_out": adapter.fan_in_fan_out,
        "init_lora_weights": true,
        "inference_mode": true,
        "modules_to_save": (!adapter.modules_to_save.is_empty()).then_some(adapter.modules_to_save),
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
    });
    write_json(&mut staging, ADAPTER_CONFIG, &config)?;
    for (name, content) in adapter.files {
        staging.write(name, |file| file.write_all(content))?;
    }
    write_tensors(&mut staging, ADAPTER_WEIGHTS, adapter.tensors, adapter.dtype)?;
    staging.publish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hf::export::Values;
    use crate::hf::source::{TensorSource, read_json};

    #[test]
    fn adapter_is_written_under_the_names_that_peft_reads() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = ([1.0f32, 2.0, 3.0], [4.0f32, 5.0]);
        let module = "model.layers.0.self_attn.q_proj";
        let names = ["A", "B"].map(|matrix| peft_name(&format!("{module}.lora_{matrix}.weight")));
        let (saved, magnitude) = (peft_name("lm_head.weight"), peft_name(&format!("{module}.lora_magnitude_vector")));
        let tensors = [
            ExportTensor { name: &names[0], shape: &[1, 3], values: Values::Here(&a) },
            ExportTensor { name: &names[1], shape: &[2, 1], values: Values::Here(&b) },
            ExportTensor { name: &saved, shape: &[3], values: Values::Here(&a) },
            ExportTensor { name: &magnitude, shape: &[2], values: Values::Here(&b) },
        ];
        let targets = ["q_proj".to_owned()];
        let mut adapter = AdapterExport {
            base_model: "meta/llama",
            task: "CAUSAL_LM",
            rank: 1,
            alpha: 16.0,
            dropout: 0.05,
            use_rslora: true,
            use_dora: true,
            target_modules: &targets,
            modules_to_save: &["lm_head".to_owned()],
            fan_in_fan_out: false,
            tensors: &tensors,
            dtype: Dtype::F32,
            files: &[("tokenizer.json".to_owned(), b"{}".to_vec())],
        };
        let out = dir.path().join("adapter");

        export_adapter(&out, &adapter).unwrap();

        let source = TensorSource::open_file(&out.join("adapter_model.safetensors")).unwrap();
        let [a, b] = ["A", "B"].map(|m| format!("base_model.model.{module}.lora_{m}.weight"));
        let expected = ["base_model.model.lm_head.weight".to_owned(), a, b, magnitude.clone()];
        assert_eq!(source.names().collect::<Vec<_>>(), expected);
        let config = read_json(&out.join("adapter_config.json")).unwrap();
        assert_eq!((&config["r"], &config["peft_type"]), (&json!(1), &json!("LORA")));
        assert_eq!((&config["use_rslora"], &config["modules_to_save"]), (&json!(true), &json!(["lm_head"])));
        assert_eq!(std::fs::read(out.join("tokenizer.json")).unwrap(), b"{}");
        assert_eq!(config["use_dora"], json!(true));
        adapter.use_dora = false;
        assert!(export_adapter(&out, &adapter).unwrap_err().to_string().contains("lora_magnitude_vector"));
        adapter.use_dora = true;
        adapter.rank = 2;
        assert!(export_adapter(&out, &adapter).unwrap_err().to_string().contains("rank-2"));
    }
}
