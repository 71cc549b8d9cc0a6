//! `phalanx prepare`.

use super::{JobArgs, conclude, conclude_json, conclude_styled, report_note};
use crate::console::{Console, printable};
use crate::data::prepare::Summary;
use crate::data::shown::{ShownSample, first_samples};
use crate::devices;
use crate::error::JobError;
use crate::events::Event;
use crate::train::progress::Tokenising;
use crate::train::{plan, preparation, vocabulary};

pub(super) const HELP: &str = "Examples:
  phalanx prepare my.yaml            tokenize the data; training starts at once
  phalanx prepare --show 3 my.yaml   and show what of 3 samples is trained on

On a terminal, tokens that are trained on are green. Elsewhere they are
between the marks >> and <<. Special tokens are shown as text.";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Show the first samples, with the tokens that are trained on.
    #[arg(long, value_name = "N", default_value_t = 0)]
    show: usize,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    job: JobArgs,
}

pub(super) fn run(args: &Args, console: &Console) -> Result<(), JobError> {
    let config = args.job.load()?;
    let tokenizer = plan::tokenizer(&config)?;
    let model = plan::model_plan_on(&config, &tokenizer, || devices::planned(config.precision.device))?;
    vocabulary::notes(&config, &tokenizer).iter().for_each(|note| report_note(note));
    let mut tokenising = Tokenising::new(console);
    let mut on_event = |event: &Event| {
        tokenising.see(event);
        if let Event::Note(text) = event {
            if args.json { console.err() } else { console.out() }.say(text);
        }
    };
    let prepared = preparation::prepare_data(&config, &model, &tokenizer, &|| false, &mut on_event)?;
    preparation::prepare_rest(&prepared, &mut on_event)?;
    tokenising.see(&Event::Note(String::new()));
    let samples = first_samples(&prepared.train, args.show, &tokenizer).map_err(JobError::Show)?;
    if args.json {
        let result = serde_json::json!({
            "rows": prepared.train.len(),
            "row_tokens": prepared.train.row_len(),
            "validation_rows": prepared.validation.as_ref().map_or(0, |rows| rows.len()),
            "skipped": skipped(&preparation::files_with_skipped(&prepared)),
            "samples": samples.iter().map(as_json).collect::<Vec<_>>(),
        });
        conclude_json(console, &result, true);
        return Ok(());
    }
    let validation =
        prepared.validation.as_ref().map_or(String::new(), |rows| format!(", {} to evaluate on", rows.len()));
    conclude(console, format_args!("{} rows of {} tokens{validation}", prepared.train.len(), prepared.train.row_len()));
    let colours = console.out().is_terminal();
    for (n, sample) in samples.iter().enumerate() {
        conclude_styled(console, drawn(n + 1, sample, colours));
    }
    Ok(())
}

/// The records that were left out.
fn skipped(files: &[Summary]) -> serde_json::Value {
    let file = |s: &Summary| {
        serde_json::json!({
            "path": s.path.display().to_string(),
            "records": s.n_records,
            "skipped": s.n_skipped,
            "list": s.skipped_list.as_ref().map(|list| list.display().to_string()),
        })
    };
    serde_json::json!({
        "records": files.iter().map(|s| s.n_skipped).sum::<usize>(),
        "files": files.iter().map(file).collect::<Vec<_>>(),
    })
}

fn as_json(sample: &ShownSample) -> serde_json::Value {
    let piece = |(weight, text): &(f32, String)| {
        let mut piece = serde_json::json!({"trained": *weight > 0.0, "text": text});
        if is_weighted(*weight) {
            piece["weight"] = (*weight).into();
        }
        piece
    };
    serde_json::json!({
        "row": sample.row,
        "tokens": sample.n_tokens,
        "trained_tokens": sample.n_predicted,
        "pieces": sample.pieces.iter().map(piece).collect::<Vec<_>>(),
    })
}

/// A sample under a line with its numbers.
fn drawn(number: usize, sample: &ShownSample, colours: bool) -> String {
    let ShownSample { row, n_tokens, n_predicted, pieces } = sample;
    let mut text = format!("\nsample {number} (row {row}): {n_tokens} tokens, {n_predicted} trained on\n");
    let (begin, end) = if colours { ("\u{1b}[32m", "\u{1b}[0m") } else { (">>", "<<") };
    for (weight, piece) in pieces {
        let piece = printable(piece);
        match *weight > 0.0 {
            true => text.extend([begin, &piece, end]),
            false => text += &piece,
        }
        if is_weighted(*weight) {
            text += &format!("(×{weight})");
        }
    }
    text
}

/// Whether something is trained on that counts more or less than once.
fn is_weighted(weight: f32) -> bool {
    weight > 0.0 && weight != 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_of_a_sample_with_control_characters_is_json() {
        let text = "a\u{7f}b\u{1b}[2J\u{9b}\u{202e}\n";
        let pieces = vec![(0.5, text.to_owned())];
        let sample = ShownSample { row: 4, n_tokens: 9, n_predicted: 3, pieces };

        let line = super::super::json_line(&as_json(&sample), true);

        assert_eq!(crate::console::printable(&line), line, "it controls no terminal");
        let read: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(read["pieces"][0], serde_json::json!({"trained": true, "text": text, "weight": 0.5}));
    }

    #[test]
    fn trained_tokens_are_marked_with_and_without_colours() {
        let pieces = vec![(0.0, "Hi\u{1b}".to_owned()), (1.0, "Ho".to_owned()), (2.5, "Ha".to_owned())];
        let sample = ShownSample { row: 4, n_tokens: 9, n_predicted: 3, pieces };

        assert_eq!(drawn(1, &sample, false), "\nsample 1 (row 4): 9 tokens, 3 trained on\nHi\\u{1b}>>Ho<<>>Ha<<(×2.5)");
        assert!(drawn(1, &sample, true).ends_with("Hi\\u{1b}\u{1b}[32mHo\u{1b}[0m\u{1b}[32mHa\u{1b}[0m(×2.5)"));
    }
}
