//! The adapter with which a run begins: a directory of PEFT, or of an earlier run.

use crate::config::adapter::Lora;
use crate::error::JobError;
use crate::error::plan::PlanError;
use phalanx_storage::hf::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, peft_name};
use phalanx_storage::hf::source::{TensorSource, read_json};
use phalanx_strategies::passes::lora::{LoraSpec, lora};
use phalanx_strategies::program::Program;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Opens the weights of an adapter.
///
/// # Errors
/// When the directory has none that can be read.
pub(crate) fn open(dir: &Path) -> Result<TensorSource, JobError> {
    Ok(TensorSource::open_file(&dir.join(ADAPTER_WEIGHTS))?)
}

/// Checks that an adapter computes what the job's own adapters compute, and that it has exactly the tensors that the job trains.
/// `whole` is the model's forward program on one rank.
///
/// # Errors
/// Names the first difference.
pub(super) fn check(dir: &Path, job: &Lora<'_>, spec: &LoraSpec, mut whole: Program) -> Result<(), JobError> {
    let config = read_json(&dir.join(ADAPTER_CONFIG))?;
    check_config(dir, job, &config)?;
    if lora(&mut whole, spec).is_err() {
        // Compiling the step reports it.
        return Ok(());
    }
    let trained = whole.params.iter().filter(|param| param.trainable).flat_map(|param| &param.parts);
    let expected: BTreeSet<String> = trained.map(|part| peft_name(&part.name)).collect();
    let source = open(dir)?;
    let found: BTreeSet<String> = source.names().map(str::to_owned).collect();
    let differs = |tensor: &String, has: &'static str| {
        Err(PlanError::AdapterTensor { dir: dir.to_owned(), has, tensor: tensor.clone() }.into())
    };
    match (found.difference(&expected).next(), expected.difference(&found).next()) {
        (Some(tensor), _) => differs(tensor, "has"),
        (None, Some(tensor)) => differs(tensor, "lacks"),
        (None, None) => Ok(()),
    }
}

/// Compares the settings that change what an adapter computes. An absent one has PEFT's default.
fn check_config(dir: &Path, job: &Lora<'_>, config: &Value) -> Result<(), PlanError> {
    let refuse = |key: &'static str, found: &Value, wanted: String| {
        let found = found.to_string().chars().take(60).collect();
        Err(PlanError::Adapter { dir: dir.to_owned(), key, found, wanted })
    };
    let kind = &config["peft_type"];
    if kind != "LORA" {
        return refuse("peft_type", kind, "only \"LORA\" can be continued".into());
    }
    for key in ["lora_bias", "rank_pattern", "alpha_pattern"] {
        let value = &config[key];
        let is_empty = value.as_object().is_some_and(|map| map.is_empty());
        if !(value.is_null() || *value == false || is_empty) {
            return refuse(key, value, "this build cannot continue such an adapter".into());
        }
    }
    let numbers = [
        ("r", "lora_r", job.rank as f64, config["r"].as_f64().unwrap_or(8.0)),
        ("lora_alpha", "lora_alpha", job.alpha, config["lora_alpha"].as_f64().unwrap_or(8.0)),
    ];
    if let Some((key, own, wanted, found)) = numbers.into_iter().find(|(_, _, wanted, found)| wanted != found) {
        return refuse(key, &found.into(), format!("this job has `{own}: {wanted}`; set `{own}: {found}`"));
    }
    let switches = [
        ("use_rslora", "peft_use_rslora", job.section.peft_use_rslora),
        ("use_dora", "peft_use_dora", job.section.peft_use_dora),
    ];
    let differs = switches.into_iter().find(|(key, _, wanted)| config[key].as_bool().unwrap_or(false) != *wanted);
    match differs {
        None => Ok(()),
        Some((key, own, wanted)) => refuse(key, &(!wanted).into(), format!("set `{own}: {}`", !wanted)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::adapter::{Adapter, AdapterSection};
    use serde_json::json;

    #[test]
    fn settings_that_change_the_result_must_be_equal() {
        let section = AdapterSection {
            adapter: Some(Adapter::Lora),
            lora_r: Some(4),
            lora_alpha: Some(8.0),
            ..AdapterSection::default()
        };
        let check = |config: Value| check_config(Path::new("a"), &section.lora().unwrap(), &config);
        let base = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "rank_pattern": {}, "use_dora": false});
        let with = |key: &str, value: Value| {
            let mut config = base.clone();
            config[key] = value;
            check(config).unwrap_err().to_string()
        };

        assert!(check(base.clone()).is_ok());
        assert!(with("r", json!(16)).contains("set `lora_r: 16`"), "{}", with("r", json!(16)));
        assert!(with("lora_alpha", json!(32)).contains("set `lora_alpha: 32`"));
        assert!(with("use_rslora", json!(true)).contains("set `peft_use_rslora: true`"));
        assert!(with("use_dora", json!(true)).contains("set `peft_use_dora: true`"));
        assert!(with("rank_pattern", json!({"q_proj": 2})).contains("rank_pattern"));
        assert!(with("peft_type", json!("IA3")).contains("IA3"));
    }
}
