//! `phalanx inspect`.

use super::export::resolve;
use super::{say, say_json};
use crate::console::printable;
use crate::error::JobError;
use crate::train::adapter_settings::AdapterSettings;
use crate::train::{architecture, located};
use crate::units::{human_bytes, human_count};
use comfy_table::{Table, presets};
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_storage::hf::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS};
use phalanx_storage::hf::source::{TensorSource, read_json};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Checkpoint, output_dir of a run, model directory or adapter directory.
    path: PathBuf,
    /// Print the contents as a JSON object.
    #[arg(long)]
    json: bool,
}

/// A tensor as a row of the table.
struct Row {
    name: String,
    dtype: String,
    shape: Vec<usize>,
}

pub(super) fn run(args: &Args) -> Result<(), JobError> {
    let has = |name: &str| args.path.join(name).symlink_metadata().is_ok();
    match (has(ADAPTER_CONFIG), has("config.json")) {
        (true, _) => adapter(&args.path, args.json),
        (false, true) => model(&args.path, args.json),
        (false, false) => {
            if !has("checkpoints") {
                located::readable(args.path.clone())?;
            }
            checkpoint(args)
        }
    }
}

fn adapter(dir: &Path, as_json: bool) -> Result<(), JobError> {
    let settings = AdapterSettings::read(dir)?;
    let source = TensorSource::open_file(&dir.join(ADAPTER_WEIGHTS))?;
    let about = json!({
        "kind": "adapter",
        "base_model": settings.base_model,
        "rank": settings.rank,
        "alpha": settings.alpha,
        "rslora": settings.use_rslora,
        "dora": settings.use_dora,
        "target_modules": settings.target_modules,
        "modules_to_save": settings.modules_to_save,
    });
    show(about, &rows(&source)?, as_json);
    Ok(())
}

/// The tensors of a file.
fn rows(source: &TensorSource) -> Result<Vec<Row>, JobError> {
    let row = |name: &str| {
        let (dtype, shape) = (source.dtype(name)?.name().into(), source.shape(name)?.to_vec());
        Ok(Row { name: name.into(), dtype, shape })
    };
    source.names().map(row).collect()
}

fn model(dir: &Path, as_json: bool) -> Result<(), JobError> {
    let path = dir.join("config.json");
    let config = architecture::parse_model(&read_json(&path)?, &path.display().to_string())?;
    let rows = rows(&TensorSource::open(dir)?)?;
    let about = json!({
        "kind": "model",
        "architecture": config.family.architecture,
        "layers": config.n_layers,
        "hidden_size": config.hidden_size,
        "heads": config.n_heads,
        "kv_heads": config.n_kv_heads,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_positions,
    });
    show(about, &rows, as_json);
    Ok(())
}

fn checkpoint(args: &Args) -> Result<(), JobError> {
    let (path, skipped) = resolve(&args.path)?;
    // The JSON has standard output for itself.
    skipped
        .iter()
        .for_each(|line| if args.json { _ = writeln!(std::io::stderr(), "{}", printable(line)) } else { say(line) });
    let checkpoint = Checkpoint::open(&path)?;
    let manifest = checkpoint.contents();
    let rows: Vec<Row> = manifest
        .tensors
        .iter()
        .map(|(name, t)| Row { name: name.clone(), dtype: t.dtype.name().into(), shape: t.shape.clone() })
        .collect();
    let about = json!({
        "kind": "checkpoint",
        "path": path.display().to_string(),
        "job": manifest.job,
        "step": manifest.step,
        "generation": manifest.generation,
        "mesh": manifest.mesh,
        "verified": manifest.verified,
        "compared": manifest.compared,
        "files": manifest.files.iter().map(|(n, f)| (n.clone(), json!(f.len))).collect::<serde_json::Map<_, _>>(),
    });
    show(about, &rows, args.json);
    Ok(())
}

fn show(about: serde_json::Value, rows: &[Row], as_json: bool) {
    let elements = |r: &Row| r.shape.iter().product::<usize>();
    let total: usize = rows.iter().map(elements).sum();
    if as_json {
        let mut about = about;
        let tensors = rows.iter().map(|r| (r.name.clone(), json!({"dtype": r.dtype, "shape": r.shape})));
        about["tensors"] = serde_json::Value::Object(tensors.collect());
        return say_json(&about, false);
    }
    for (key, value) in about.as_object().into_iter().flatten() {
        say(format_args!("{key}: {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned)));
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_header(["tensor", "type", "shape", "size"]);
    for r in rows {
        let bytes = elements(r) * if r.dtype == "F32" { 4 } else { 2 };
        table.add_row([r.name.clone(), r.dtype.clone(), format!("{:?}", r.shape), human_bytes(bytes as u64)]);
    }
    say(table);
    say(format_args!("{} tensors, {} elements", rows.len(), human_count(total)));
}
