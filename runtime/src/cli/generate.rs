//! `phalanx generate`.

use super::model_args::{ModelArgs, SamplingArgs};
use super::report_note;
use crate::api::completion::Completion;
use crate::api::generate::{Generator, with_model};
use crate::api::sampling::Sampling;
use crate::config::precision::DeviceChoice;
use crate::console::printable;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::error::generate::GenerateError;
use crate::train::model_source::ModelSource;
use std::io::{ErrorKind, IsTerminal, Write};

pub(super) const HELP: &str = "Examples:
  phalanx generate outputs/model --prompt 'Once upon a time'
  phalanx generate outputs/model --temperature 0.8 --top_p 0.95 --seed 7
  phalanx generate outputs/adapter --base_model models/base --stop $'\\n'";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text to continue; an empty prompt starts a new text.
    #[arg(long, default_value = "")]
    prompt: String,
    /// Maximum number of tokens to generate.
    #[arg(long, alias = "max_new_tokens", default_value_t = 200)]
    max_new_tokens: usize,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Continue after the model's end-of-text tokens.
    #[arg(long, alias = "ignore_eos")]
    ignore_eos: bool,
}

pub(super) fn run(args: &Args) -> Result<(), JobError> {
    let wanted = Completion {
        max_new: args.max_new_tokens,
        sampling: args.sampling.or(Sampling::GREEDY),
        stop: args.sampling.stop.clone(),
        stop_ids: Vec::new(),
        ignore_eos: args.ignore_eos,
        n_top: None,
    };
    let source = args.model.source()?;
    Sampling::unfollowed(&source.generation_config()?).iter().for_each(|note| report_note(note));
    continue_text(&source, &args.prompt, &wanted, args.model.threads, &mut std::io::stdout())
}

/// Prints a prompt, then each token of its continuation.
pub(super) fn continue_text(
    source: &ModelSource,
    prompt: &str,
    wanted: &Completion,
    n_threads: Option<usize>,
    out: &mut (dyn Write + Send),
) -> Result<(), JobError> {
    // Every token except the first stands for at least one byte of text.
    let longest = (prompt.len() + 1).saturating_add(wanted.max_new);
    with_model(DeviceChoice::Auto, source, longest, n_threads, |generator| {
        let tokenizer = generator.tokenizer();
        let mut ids: Vec<u32> = tokenizer.document_start().into_iter().collect();
        if !prompt.is_empty() {
            ids.extend(tokenizer.encode(prompt)?);
        }
        if ids.is_empty() {
            return Err(GenerateError::NoBeginning.into());
        }
        let prompt = tokenizer.decode(&ids, true)?;
        let mut shown = write(out, &prompt);
        if shown.is_ok() {
            shown = show(generator, &ids, wanted, out)?.map(|_| ());
        }
        ended(shown.and_then(|()| write(out, "\n")))
    })
}

/// Prints each token of a continuation; returns the text, or why it cannot be printed to its end.
pub(super) fn show(
    generator: &mut Generator,
    ids: &[u32],
    wanted: &Completion,
    out: &mut dyn Write,
) -> Result<std::io::Result<String>, JobError> {
    let mut shown = Ok(String::new());
    // A model may have learned to write anything; files and programs get it as it is.
    let is_terminal = std::io::stdout().is_terminal();
    wanted.run(generator, ids, |piece, _| {
        if let Ok(text) = &mut shown {
            *text += piece;
            let piece = if is_terminal { printable(piece) } else { piece.into() };
            if let Err(error) = write(out, &piece) {
                shown = Err(error);
            }
        }
        shown.is_ok()
    })?;
    Ok(shown)
}

pub(super) fn write(out: &mut dyn Write, text: &str) -> std::io::Result<()> {
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// The end of an output; a closed pipe is no error, since nobody wants the rest.
pub(super) fn ended(shown: std::io::Result<()>) -> Result<(), JobError> {
    match shown {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(CommandError::Output(error).into()),
        _ => Ok(()),
    }
}
