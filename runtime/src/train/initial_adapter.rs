//! The adapter with which a run begins: a directory of PEFT, or of an earlier run.

use super::adapter_settings::AdapterSettings;
use crate::config::adapter::Lora;
use crate::error::JobError;
use crate::error::plan::PlanError;
use phalanx_storage::hf::adapter::{ADAPTER_WEIGHTS, peft_name};
use phalanx_storage::hf::source::TensorSource;
use phalanx_strategies::passes::lora::{LoraSpec, lora};
use phalanx_strategies::program::Program;
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
/// `whole` is the model's forward program on one rank; `base` is the directory of the base model, if its weights are used.
///
/// # Errors
/// Names the first difference.
pub(super) fn check(
    dir: &Path,
    job: &Lora<'_>,
    spec: &LoraSpec,
    mut whole: Program,
    base: Option<&Path>,
) -> Result<(), JobError> {
    check_settings(dir, job, &AdapterSettings::read(dir)?)?;
    if lora(&mut whole, spec).is_err() {
        // Compiling the step reports it.
        return Ok(());
    }
    let trained = whole.params.iter().filter(|param| param.trainable).flat_map(|param| &param.parts);
    let expected: BTreeSet<String> = trained.map(|part| peft_name(&part.name)).collect();
    let source = open(dir)?;
    let mut found: BTreeSet<String> = source.names().map(str::to_owned).collect();
    let frozen = whole.params.iter().filter(|param| !param.trainable).flat_map(|param| &param.parts);
    for part in frozen {
        // PEFT stores the weights of an adapted embedding or head beside the adapter.
        let stored = part.name.rsplit_once('.').map(|(module, kind)| peft_name(&format!("{module}.base_layer.{kind}")));
        if let Some(stored) = stored.filter(|stored| found.remove(stored)) {
            check_base(dir, (&source, &stored), base, &part.name)?;
        }
    }
    let differs = |tensor: &String, has: &'static str| {
        Err(PlanError::AdapterTensor { dir: dir.to_owned(), has, tensor: tensor.clone() }.into())
    };
    match (found.difference(&expected).next(), expected.difference(&found).next()) {
        (Some(tensor), _) => differs(tensor, "has"),
        (None, Some(tensor)) => differs(tensor, "lacks"),
        (None, None) => Ok(()),
    }
}

/// Checks that a weight of the base model is the one that is stored in an adapter.
fn check_base(
    dir: &Path,
    (adapter, stored): (&TensorSource, &str),
    base: Option<&Path>,
    name: &str,
) -> Result<(), JobError> {
    let other = || PlanError::AdapterBase { dir: dir.to_owned(), tensor: stored.to_owned() };
    let base = TensorSource::open(base.ok_or_else(other)?)?;
    let shape = base.shape(name)?.to_vec();
    if adapter.shape(stored)? != shape {
        return Err(other().into());
    }
    let (n_rows, n_columns) = (shape.first().copied().unwrap_or(1), shape.iter().skip(1).product::<usize>());
    let rows_at_once = (ELEMENTS_AT_ONCE / n_columns.max(1)).max(1);
    for start in (0..n_rows).step_by(rows_at_once) {
        let rows = start..n_rows.min(start + rows_at_once);
        let mut values = [(); 2].map(|()| vec![0.0; rows.len() * n_columns]);
        adapter.read_rows_into(stored, rows.clone(), &mut values[0])?;
        base.read_rows_into(name, rows, &mut values[1])?;
        if values[0] != values[1] {
            return Err(other().into());
        }
    }
    Ok(())
}

/// Elements of a weight that are compared at a time.
const ELEMENTS_AT_ONCE: usize = 1 << 20;

/// Compares the settings that change what an adapter computes.
fn check_settings(dir: &Path, job: &Lora<'_>, adapter: &AdapterSettings) -> Result<(), PlanError> {
    let refuse = |key: &'static str, found: &dyn std::fmt::Display, wanted: String| {
        Err(PlanError::Adapter { dir: dir.to_owned(), key, found: found.to_string(), wanted })
    };
    if let Some(key) = adapter.uneven() {
        return refuse(key, &"set", "this build cannot continue such an adapter".into());
    }
    if adapter.rank != job.rank {
        let wanted = format!("this job has `lora_r: {}`; set `lora_r: {}`", job.rank, adapter.rank);
        return refuse("r", &adapter.rank, wanted);
    }
    if adapter.alpha != job.alpha {
        let wanted = format!("this job has `lora_alpha: {}`; set `lora_alpha: {}`", job.alpha, adapter.alpha);
        return refuse("lora_alpha", &adapter.alpha, wanted);
    }
    let switches = [
        ("use_rslora", "peft_use_rslora", adapter.use_rslora, job.section.peft_use_rslora),
        ("use_dora", "peft_use_dora", adapter.use_dora, job.section.peft_use_dora),
    ];
    match switches.into_iter().find(|(_, _, found, wanted)| found != wanted) {
        None => Ok(()),
        Some((key, own, found, _)) => refuse(key, &found, format!("set `{own}: {found}`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::adapter::{Adapter, AdapterSection};
    use phalanx_storage::hf::adapter::ADAPTER_CONFIG;
    use serde_json::{Value, json};

    #[test]
    fn settings_that_change_the_result_must_be_equal() {
        let section = AdapterSection {
            adapter: Some(Adapter::Lora),
            lora_r: Some(4),
            lora_alpha: Some(8.0),
            ..AdapterSection::default()
        };
        let dir = tempfile::tempdir().unwrap();
        let check = |config: Value| {
            std::fs::write(dir.path().join(ADAPTER_CONFIG), config.to_string()).unwrap();
            let settings = AdapterSettings::read(dir.path())?;
            Ok::<_, JobError>(check_settings(dir.path(), &section.lora().unwrap(), &settings)?)
        };
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
