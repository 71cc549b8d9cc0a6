//! The rows that a run trains on, prepared before it starts, and the files that make its checkpoints self-contained.

use super::inputs::RunInputs;
use super::plan::ModelPlan;
use super::run_files::{self, INPUTS_JSON, cache_dir};
use super::{data_plan, run_plan, vocabulary};
use crate::config::JobConfig;
use crate::data::end_of_turn::{self, with_ids};
use crate::data::prepare::{PrepareError, Prepared, Summary, prepare};
use crate::data::prepare_error::in_tokens;
use crate::data::skipped::EXTENSION as LIST_EXTENSION;
use crate::data::template_sources::template_sources;
use crate::data::tokenize::{OnProgress, Progress};
use crate::data::tokenize_error::Stopped;
use crate::data::tokenizer::Tokenizer;
use crate::error::JobError;
use crate::error::export::ExportError;
use crate::error::generate::GenerateError;
use crate::events::Event;
use phalanx_device::ThreadError;
use phalanx_storage::foreign_file;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Prepares the rows, or stops soon once `stops` is true; tokens of files that are complete stay in the cache.
///
/// # Errors
/// When the data cannot be used, or [`JobError::is_stop`].
pub(crate) fn prepare_data(
    config: &JobConfig,
    model: &ModelPlan,
    tokenizer: &Tokenizer,
    stops: &dyn Fn() -> bool,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Prepared, JobError> {
    let prepared = prepare_rows(config, model.model.vocab_size(), tokenizer, stops, on_event)?;
    let n_rows = prepared.train.len() as u64;
    let notes = [early_end(config, n_rows), overlong_end(config, n_rows)];
    notes.into_iter().flatten().for_each(|note| on_event(&Event::Note(note)));
    Ok(prepared)
}

/// A sentence if the last step of a run takes many rows of a further pass, as it does not in other trainers.
pub(crate) fn overlong_end(config: &JobConfig, n_rows: u64) -> Option<String> {
    let schedule = &config.schedule;
    let wanted = schedule.num_epochs.filter(|_| !config.data.streaming)? * n_rows as f64;
    let (batch, n_steps) = (config.sequences_per_step(), run_plan::run_plan(config, n_rows).total_steps);
    let n_more = (n_steps as f64 * batch as f64 - wanted).round();
    (n_more > SHARE_OF_LAST * wanted).then(|| {
        format!(
            "every step takes {batch} rows: the last one trains {n_more} rows again, beyond `num_epochs`; for fewer, choose a smaller batch, \
             or `max_steps`"
        )
    })
}

/// Share of all rows of a run that its last step may take beyond the passes without a word.
const SHARE_OF_LAST: f64 = 0.05;

/// A sentence if the passes over the rows end a run before its steps do, as they do not in Axolotl.
pub(crate) fn early_end(config: &JobConfig, n_rows: u64) -> Option<String> {
    let schedule = &config.schedule;
    let max_steps = schedule.max_steps.filter(|_| schedule.num_epochs.is_some() && !config.data.streaming)?;
    let n_steps = run_plan::run_plan(config, n_rows).total_steps;
    (n_steps < max_steps).then(|| {
        format!(
            "`num_epochs` ends the run after {n_steps} steps; for the {max_steps} of `max_steps`, remove `num_epochs`"
        )
    })
}

/// As [`prepare_data`], for a model with a vocabulary of this size.
pub(crate) fn prepare_rows(
    config: &JobConfig,
    vocab_size: usize,
    tokenizer: &Tokenizer,
    stops: &dyn Fn() -> bool,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Prepared, JobError> {
    let data = data_plan::data_config(config)?;
    let prepared =
        with_progress(stops, on_event, |progress| prepare(&data, tokenizer, &cache_dir(config), vocab_size, progress))?;
    if prepared.train.stream().is_some() {
        on_event(&Event::Note("data is streamed: further files are tokenized while the job trains".into()));
    }
    // Each document of a pair has a row of the batch.
    let row_len = data.sequence_len * data.documents_per_row();
    match &prepared.summaries[..] {
        few @ [_] | few @ [_, _] | few @ [_, _, _] => {
            few.iter().for_each(|s| on_event(&Event::Note(describe(s, row_len))))
        }
        many => on_event(&Event::Note(describe(&total(many), row_len))),
    }
    much_skipped(&prepared.summaries).into_iter().for_each(|note| on_event(&Event::Note(note)));
    Ok(prepared)
}

/// Share of the records of a file that may be left out without a warning.
const SHARE_SKIPPED: f64 = 0.1;

/// Files that are named in warnings.
const WARNED_MAX: usize = 3;

/// A warning for each file that had many records left out.
fn much_skipped(summaries: &[Summary]) -> Vec<String> {
    let share = |s: &Summary| s.n_skipped as f64 / s.n_records.max(1) as f64;
    let much: Vec<&Summary> = summaries.iter().filter(|s| share(s) > SHARE_SKIPPED).collect();
    let warning = |s: &&Summary| {
        format!(
            "warning: {:.1}% of the records of {} cannot be used, and training goes on without them",
            100.0 * share(s),
            s.path.display()
        )
    };
    let n_more = much.len().saturating_sub(WARNED_MAX);
    let more = (n_more > 0).then(|| format!("warning: the same holds for {n_more} more files"));
    much.iter().take(WARNED_MAX).map(warning).chain(more).collect()
}

/// What was left out of a file, and where it is listed; nothing if all of it is used.
fn skipped(s: &Summary) -> Option<String> {
    let listed = s.skipped_list.as_ref().map_or(String::new(), |list| format!(" (listed in {})", list.display()));
    let Summary { n_skipped, n_records, .. } = s;
    (*n_skipped > 0).then(|| format!("{n_skipped} of {n_records} records cannot be used and are left out{listed}"))
}

/// The files of prepared data that had records left out; a stream has those that it has prepared so far.
pub(crate) fn files_with_skipped(data: &Prepared) -> Vec<Summary> {
    let of_stream = data.train.stream().map(|stream| stream.with_skipped()).unwrap_or_default();
    data.summaries.iter().filter(|s| s.n_skipped > 0).cloned().chain(of_stream).collect()
}

/// Prepares the files of a stream that are not prepared yet.
pub(crate) fn prepare_rest(data: &Prepared, on_event: &mut (dyn FnMut(&Event) + Send)) -> Result<(), JobError> {
    let Some(stream) = data.train.stream() else { return Ok(()) };
    with_progress(&|| false, on_event, |progress| stream.prepare_now(progress))?;
    let further = stream.with_skipped();
    let note = |s: &Summary| skipped(s).map(|skipped| format!("{}: {skipped}", s.path.display()));
    let notes = further.iter().filter_map(note).chain(much_skipped(&further));
    notes.for_each(|note| on_event(&Event::Note(note)));
    Ok(())
}

/// Does work whose progress becomes events, until `stops` is true.
fn with_progress<T>(
    stops: &dyn Fn() -> bool,
    on_event: &mut (dyn FnMut(&Event) + Send),
    work: impl FnOnce(OnProgress<'_>) -> Result<T, PrepareError>,
) -> Result<T, PrepareError> {
    let listener = std::cell::RefCell::new(on_event);
    work(&|p: Progress<'_>| {
        let (done_bytes, total_bytes) = (p.done_bytes, p.total_bytes);
        listener.borrow_mut()(&Event::Preparing { path: p.path.to_owned(), done_bytes, total_bytes });
        if stops() { Err(Stopped) } else { Ok(()) }
    })
}

/// Lets the files of a stream be prepared in the background from now on.
pub(crate) fn prepare_ahead(data: &Prepared) -> Result<(), JobError> {
    let started = data.train.stream().map_or(Ok(()), |stream| stream.prepare_in_background());
    started.map_err(|error| JobError::Thread(ThreadError::Spawn(error)))
}

/// The sums over many files.
fn total(many: &[Summary]) -> Summary {
    let sum = |count: fn(&Summary) -> usize| many.iter().map(count).sum::<usize>();
    let lens = || many.iter().filter_map(|s| s.dropped_lens);
    Summary {
        path: format!("{} files", many.len()).into(),
        from_cache: many.iter().all(|s| s.from_cache),
        n_tokens: sum(|s| s.n_tokens),
        n_kept_tokens: sum(|s| s.n_kept_tokens),
        n_documents: sum(|s| s.n_documents),
        n_empty: sum(|s| s.n_empty),
        n_dropped: sum(|s| s.n_dropped),
        dropped_lens: lens().map(|(least, _)| least).min().zip(lens().map(|(_, most)| most).max()),
        n_short: sum(|s| s.n_short),
        n_repeated: sum(|s| s.n_repeated),
        n_truncated: sum(|s| s.n_truncated),
        n_cut: sum(|s| s.n_cut),
        n_records: sum(|s| s.n_records),
        n_skipped: sum(|s| s.n_skipped),
        skipped_list: list_of_all(many),
        n_rows: sum(|s| s.n_rows),
    }
}

/// The list of what was left out of several files: one, or a pattern of all in the folder.
fn list_of_all(many: &[Summary]) -> Option<PathBuf> {
    let mut lists = many.iter().filter_map(|s| s.skipped_list.as_ref());
    match (lists.next()?, lists.next()) {
        (one, None) => Some(one.clone()),
        (first, Some(_)) => Some(first.with_file_name(format!("*.{LIST_EXTENSION}"))),
    }
}

fn describe(s: &Summary, row_len: usize) -> String {
    let padding = 100.0 - 100.0 * s.n_kept_tokens as f64 / (s.n_rows * row_len) as f64;
    let mut text = format!("{}: {} tokens, {} rows ({padding:.1}% padding)", s.path.display(), s.n_tokens, s.n_rows);
    let dropped = format!("dropped as longer than sequence_len{}", in_tokens(s.dropped_lens));
    for (n, what) in [
        (s.n_empty, "without a token to predict"),
        (s.n_dropped, dropped.as_str()),
        (s.n_short, "dropped as shorter than min_sample_len"),
        (s.n_repeated, "repeated and kept once"),
        (s.n_truncated, "truncated"),
        (s.n_cut, "cut into several samples"),
    ] {
        if n > 0 {
            text += &format!(", {n} of {} documents {what}", s.n_documents);
        }
    }
    text.extend(skipped(s).map(|skipped| format!(", {skipped}")));
    let n_accounted_for = s.n_empty + s.n_dropped + s.n_short + s.n_repeated + s.n_truncated;
    if n_accounted_for == 0 && s.n_kept_tokens < s.n_tokens {
        text += &format!(", {} tokens at its end, which fill no row, left out", s.n_tokens - s.n_kept_tokens);
    }
    if s.from_cache { text + " (from the cache)" } else { text }
}

/// The model's `generation_config.json`, with the ids of tokens to which the job gives roles, and with those that end a turn of
/// the job's conversations; `None` if the model has none and needs none.
fn generation_config(
    config: &JobConfig,
    model: &ModelPlan,
    tokenizer: &Tokenizer,
    bytes: Option<Vec<u8>>,
) -> Result<Option<Vec<u8>>, JobError> {
    let before = match &bytes {
        None => json!({}),
        Some(text) => match serde_json::from_slice::<Value>(text) {
            Ok(json) if json.is_object() => json,
            _ => return Ok(bytes),
        },
    };
    let mut json = before.clone();
    vocabulary::set_ids(config, &mut json, tokenizer);
    let ends: Vec<u32> = ends_of_turns(config, tokenizer)?;
    let found = [&json["eos_token_id"], &model.hf_config["eos_token_id"]].into_iter().find(|ids| !ids.is_null());
    let found = found.cloned().or_else(|| tokenizer.eos_id().map(|id| json!(id))).unwrap_or_default();
    let all = with_ids(&found, &ends);
    if all != found {
        json["eos_token_id"] = all;
        if let (None, Some(id)) = (json.get("bos_token_id"), tokenizer.bos_id()) {
            json["bos_token_id"] = json!(id);
        }
    }
    match json == before {
        true => Ok(bytes),
        false => Ok(Some(serde_json::to_vec_pretty(&json).map_err(ExportError::Encode)?)),
    }
}

/// The tokens that end a turn in the job's data: those of the configuration, and those of its chat templates.
fn ends_of_turns(config: &JobConfig, tokenizer: &Tokenizer) -> Result<Vec<u32>, JobError> {
    let data = &config.data;
    let conversations = data_plan::conversations(config);
    let mut ends: Vec<u32> = match conversations.first() {
        // A text is no token just because the vocabulary spells one so.
        Some(_) => data.eot_tokens.iter().filter_map(|text| single_token(tokenizer, text)).collect(),
        None => Vec::new(),
    };
    for dataset in conversations {
        let sources = template_sources(&data_plan::template_config(dataset, data), tokenizer, &dataset.path)?;
        for source in std::iter::once(sources.plain).chain(sources.with_tools) {
            let template = tokenizer.parse_template(&source).map_err(GenerateError::Template)?;
            let template = template.with_variables(data.chat_template_kwargs.0.clone());
            ends.extend(end_of_turn::of_template(tokenizer, &template).and_then(|end| end.token()));
        }
    }
    Ok(ends)
}

/// The token that a text is.
fn single_token(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    match tokenizer.encode(text).ok()?[..] {
        [id] => Some(id),
        _ => None,
    }
}

/// The longest `generation_config.json` that is read.
const GENERATION_BYTES_MAX: u64 = 16 << 20;

fn read_if_there(path: PathBuf) -> Result<Option<Vec<u8>>, JobError> {
    let found = foreign_file::is_there(&path).and_then(|is_there| match is_there {
        true => foreign_file::read(&path, GENERATION_BYTES_MAX).map(Some),
        false => Ok(None),
    });
    found.map_err(|source| JobError::Io { action: "read", path, source })
}

/// The files that make a checkpoint self-contained.
pub(crate) fn extras(
    config: &JobConfig,
    model: &ModelPlan,
    tokenizer: &Tokenizer,
    inputs: &RunInputs,
) -> Result<Vec<(String, Vec<u8>)>, JobError> {
    let json = serde_json::to_vec_pretty(&model.hf_config).map_err(ExportError::Encode)?;
    let mut extras = vec![
        (run_files::JOB_YAML.to_string(), config.to_yaml().into_bytes()),
        (run_files::CONFIG_JSON.to_string(), json),
    ];
    extras.push((INPUTS_JSON.to_string(), inputs.encode()));
    extras.extend(vocabulary::exported(config, tokenizer)?.files());
    let found = match &model.weights {
        Some(dir) => read_if_there(dir.join(run_files::GENERATION_JSON))?,
        None => None,
    };
    let generation = generation_config(config, model, tokenizer, found)?;
    extras.extend(generation.map(|bytes| (run_files::GENERATION_JSON.to_string(), bytes)));
    Ok(extras)
}
