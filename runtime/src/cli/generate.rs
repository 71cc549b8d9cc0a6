//! `phalanx generate`.

use crate::api::generate::{Sampling, with_generator};
use crate::data::text_stream::TextStream;
use crate::data::tokenizer::TokenizerError;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::error::generate::GenerateError;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

pub(super) const HELP: &str = "Examples:
  phalanx generate outputs/model --prompt 'Once upon a time'
  phalanx generate outputs/model --temperature 0.8 --top_p 0.95 --seed 7";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Model directory.
    model: PathBuf,
    /// Text to continue; an empty prompt starts a new text.
    #[arg(long, default_value = "")]
    prompt: String,
    /// Maximum number of tokens to generate.
    #[arg(long, alias = "max_new_tokens", default_value_t = 200)]
    max_new_tokens: usize,
    /// Sampling temperature; 0 always takes the most likely token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Sample from this many of the most likely tokens; 0 means all.
    #[arg(long, alias = "top_k", default_value_t = 0)]
    top_k: usize,
    /// Sample from the most likely tokens with this total probability.
    #[arg(long, alias = "top_p", default_value_t = 1.0)]
    top_p: f32,
    /// Seed of the sampling; the same seed gives the same text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Compute threads [default: one per core].
    #[arg(long)]
    threads: Option<usize>,
}

pub(super) fn run(args: &Args) -> Result<(), JobError> {
    let sampling = Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p, seed: args.seed };
    continue_text(&args.model, &args.prompt, args.max_new_tokens, sampling, args.threads, &mut std::io::stdout())
}

/// Prints a prompt, then each token of its continuation.
pub(super) fn continue_text(
    model: &Path,
    prompt: &str,
    n_tokens: usize,
    sampling: Sampling,
    n_threads: Option<usize>,
    out: &mut (dyn Write + Send),
) -> Result<(), JobError> {
    // Every token except the first stands for at least one byte of text.
    let longest = (prompt.len() + 1).saturating_add(n_tokens);
    with_generator(model, longest, n_threads, |generator| {
        let tokenizer = generator.tokenizer().clone();
        let mut ids: Vec<u32> = tokenizer.document_start().into_iter().collect();
        if !prompt.is_empty() {
            ids.extend(tokenizer.encode(prompt)?);
        }
        if ids.is_empty() {
            return Err(GenerateError::NoBeginning.into());
        }
        let mut text = TextStream::new(&tokenizer);
        let mut show = |text: &str| out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Unshown::Output);
        let mut shown = Ok(());
        for id in &ids {
            shown = shown.and_then(|()| show(&text.push(*id).map_err(Unshown::Text)?));
        }
        if shown.is_ok() {
            generator.generate(ids, n_tokens, sampling, |id| {
                shown = text.push(id).map_err(Unshown::Text).and_then(|piece| show(&piece));
                shown.is_ok()
            })?;
        }
        let shown = shown.and_then(|()| show(&text.finish().map_err(Unshown::Text)?)).and_then(|()| show("\n"));
        shown.or_else(|why| match why {
            Unshown::Text(error) => Err(error.into()),
            // Nobody wants the rest.
            Unshown::Output(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            Unshown::Output(error) => Err(CommandError::Output(error).into()),
        })
    })
}

/// Why a text is not shown to its end.
enum Unshown {
    Text(TokenizerError),
    Output(std::io::Error),
}
