//! `phalanx eval`.

use super::{JobArgs, conclude, conclude_json, report_notes, right};
use crate::config::JobConfig;
use crate::config::output::is_url;
use crate::console::Console;
use crate::data::rows::Rows;
use crate::devices;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::events::Event;
use crate::train::evaluation::Evaluation;
use crate::train::progress::{Evaluating, Tokenising};
use crate::train::subject::{Subject, yaml_of_run};
use crate::train::{preparation, step_plan};
use crate::units::human_duration;
use comfy_table::{Table, presets};
use phalanx_strategies::objective::Unit;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::program::Packing;
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub(super) const HELP: &str = "Examples:
  phalanx eval my.yaml                        the model that this job trained
  phalanx eval my.yaml --model models/base    another model, for comparison
  phalanx eval my.yaml --model outputs/checkpoints/step-0000000100.g0001
  phalanx eval outputs                        the run in this folder
  phalanx eval my.yaml --json --bf16 false

The data is that of the job: `test_datasets`, else the samples that
`val_set_size` holds out, else all of `datasets`. Keys of the file can be
overridden, and the flags may follow the file.";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Model, adapter or checkpoint directory, or output_dir of a run [default: the model that the job trained].
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Print the result as a JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    job: JobArgs,
}

impl Args {
    /// The job, and the folder that stands in the place of its file: a run knows its job.
    fn load(&self) -> Result<(JobConfig, Option<PathBuf>), JobError> {
        let dir = &self.job.config;
        if !dir.is_dir() && !is_url(dir) {
            return Ok((self.job.load()?, None));
        }
        let yaml = yaml_of_run(dir)?.ok_or_else(|| CommandError::NoJobIn { dir: dir.clone() })?;
        let config = JobConfig::from_yaml_str(&yaml, &self.job.overrides()?)?;
        report_notes(&config);
        Ok((config, Some(dir.clone())))
    }
}

pub(super) fn run(args: &Args, console: &Console) -> Result<(), JobError> {
    let (mut config, folder) = args.load()?;
    // All rows are evaluated.
    config.data.streaming = false;
    let base_model = config.model.base_model.as_deref();
    let (subject, skipped) = match args.model.as_ref().or(folder.as_ref()) {
        Some(path) => Subject::find(path, base_model, &config.objective())?,
        None => Subject::trained_by(&config)?,
    };
    let note = |line: &str| if args.json { console.err().say(line) } else { console.say(line) };
    skipped.iter().for_each(|line| note(line));
    let (tokenizer, model) = (subject.tokenizer()?, subject.architecture()?);
    let mut tokenising = Tokenising::new(console);
    let mut on_event = |event: &Event| {
        tokenising.see(event);
        if let Event::Note(text) = event {
            note(text);
        }
    };
    let prepared = preparation::prepare_rows(&config, model.vocab_size(), &tokenizer, &|| false, &mut on_event)?;
    let rows = prepared.validation.as_ref().unwrap_or(&prepared.train);
    let device = devices::chosen(&config.precision)?.0;
    let n_threads = config.precision.threads.unwrap_or_else(|| device.available_threads());
    let bar = Evaluating::new(console, rows.len());
    let begin = Instant::now();
    let found = device.on_device_thread(n_threads, || subject.evaluate(&config, rows, &*device, |n| bar.see(n)))??;
    bar.finish();
    let precision = step_plan::precision(&config, &model, &*device);
    let result = Outcome { subject, config: &config, rows, found, precision, seconds: begin.elapsed().as_secs_f64() };
    match args.json {
        true => conclude_json(console, &result.json(), false),
        false => conclude(console, result.table()),
    }
    Ok(())
}

/// What was measured.
struct Outcome<'a> {
    subject: Subject,
    config: &'a JobConfig,
    rows: &'a Rows,
    found: Evaluation,
    precision: Precision,
    seconds: f64,
}

impl Outcome<'_> {
    /// Which data it was.
    fn data(&self) -> &'static str {
        match (self.config.data.test_datasets.is_empty(), self.config.data.evaluates()) {
            (false, _) => "test_datasets",
            (true, true) => "val_set_size",
            (true, false) => "datasets",
        }
    }

    fn precision(&self) -> &'static str {
        match self.precision {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::Fp8 => "fp8",
            Precision::F16 => "fp16",
        }
    }

    /// How the frozen weights are stored, if not as numbers.
    fn frozen_weights(&self) -> Option<&'static str> {
        match self.subject.packing(self.config)? {
            Packing::Nf4 { .. } => Some("nf4"),
            Packing::Int8 => Some("int8"),
            Packing::Bf16 => Some("bf16"),
            Packing::E4m3 => Some("fp8"),
        }
    }

    fn json(&self) -> serde_json::Value {
        let (kind, path) = self.subject.kind();
        let mut json = json!({
            "kind": kind,
            "model": path,
            "data": self.data(),
            "rows": self.rows.len(),
            "predicted_tokens": self.found.counts.number(Unit::Token),
            "loss": self.found.loss(),
            "perplexity": self.found.perplexity(),
            "precision": self.precision(),
            "frozen_weights": self.frozen_weights(),
            "seconds": self.seconds,
        });
        let scalars = self.found.scalars();
        if !scalars.is_empty() {
            json["scalars"] = json!(scalars);
        }
        json
    }

    fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY).set_header([self.subject.describe().as_str(), ""]);
        let data = match self.data() {
            "val_set_size" => "rows that `val_set_size` holds out".to_owned(),
            key => format!("rows of `{key}`"),
        };
        table.add_row([data, self.rows.len().to_string()]);
        table.add_row(["predicted tokens".into(), self.found.counts.number(Unit::Token).to_string()]);
        let perplexity = self.found.perplexity();
        let unit = if perplexity.is_some() { "nats per token" } else { "mean of pairs" };
        table.add_row([format!("loss ({unit})"), format!("{:.5}", self.found.loss())]);
        if let Some(perplexity) = perplexity {
            table.add_row(["perplexity".into(), format!("{perplexity:.4}")]);
        }
        for (name, value) in self.found.scalars() {
            table.add_row([name, format!("{value:.5}")]);
        }
        table.add_row(["number format".into(), self.precision().to_owned()]);
        if let Some(stored) = self.frozen_weights() {
            table.add_row(["frozen weights".into(), format!("{stored}, as in training")]);
        }
        table.add_row(["time".into(), human_duration(Duration::from_secs_f64(self.seconds))]);
        right(&mut table, &[1]);
        table.to_string()
    }
}
