//! `phalanx chat`.

use super::generate::{ended, show, write};
use super::model_args::{ModelArgs, SamplingArgs};
use super::report_note;
use crate::api::completion::Completion;
use crate::api::generate::{Generator, with_model};
use crate::api::sampling::Sampling;
use crate::config::named_templates::NamedTemplate;
use crate::config::precision::DeviceChoice;
use crate::data::chat_template::{ChatTemplate, Conversation, Message};
use crate::data::end_of_turn::{self, EndOfTurn};
use crate::data::exact_json;
use crate::data::template_sources::TEMPLATE_BYTES_MAX;
use crate::data::tokenizer::Tokenizer;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::error::generate::GenerateError;
use phalanx_storage::{foreign_file, home};
use std::io::{BufRead, IsTerminal, Read, Write};
use std::num::NonZeroUsize;
use std::path::Path;

pub(super) const HELP: &str = "On a terminal the chat goes on until its input ends (Ctrl-D); /reset begins
again. With --prompt or a pipe there is one question and one answer.

Examples:
  phalanx chat outputs/model
  phalanx chat outputs/model --prompt 'Why is the sky blue?'
  echo 'Why is the sky blue?' | phalanx chat outputs/model --system 'Be brief.'";

/// Most bytes of a question.
const QUESTION_BYTES_MAX: u64 = 16 << 20;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Ask this, print the answer and end.
    #[arg(long)]
    prompt: Option<String>,
    /// System message before the conversation.
    #[arg(long)]
    system: Option<String>,
    /// Name or file of a chat template [default: that of the tokenizer].
    #[arg(long, alias = "chat_template", value_name = "TEMPLATE")]
    chat_template: Option<String>,
    /// Values of variables of the chat template, as in '{"enable_thinking": false}' [default: those of the model's job].
    #[arg(long, alias = "chat_template_kwargs", value_name = "JSON", value_parser = variables)]
    chat_template_kwargs: Option<Variables>,
    /// Maximum number of tokens of an answer.
    #[arg(long, alias = "max_new_tokens", default_value_t = 1024)]
    max_new_tokens: usize,
    /// Maximum number of tokens of the conversation.
    #[arg(long, alias = "max_len", default_value = "4096")]
    max_len: NonZeroUsize,
    #[command(flatten)]
    sampling: SamplingArgs,
}

pub(super) fn run(args: &Args) -> Result<(), JobError> {
    let source = args.model.source()?;
    let generation = source.generation_config()?;
    let recommended = Sampling::recommended(&generation);
    Sampling::unfollowed(&generation).iter().for_each(|note| report_note(note));
    let tokenizer = source.tokenizer()?;
    tokenizer.notes().iter().for_each(|note| report_note(note));
    let template = template(&tokenizer, args.chat_template.as_deref(), source.tokenizer_dir())?
        .with_variables(args.chat_template_kwargs.clone().unwrap_or_default());
    let end = end_of_turn::of_template(&tokenizer, &template);
    let end_text = end.iter().filter_map(|end| end.text().map(str::to_owned));
    let wanted = Completion {
        max_new: args.max_new_tokens,
        sampling: args.sampling.or(recommended),
        stop: args.sampling.stop.iter().cloned().chain(end_text).collect(),
        stop_ids: end.iter().filter_map(EndOfTurn::token).collect(),
        ignore_eos: false,
        n_top: None,
    };
    let question = match &args.prompt {
        Some(prompt) => Some(prompt.clone()),
        None if std::io::stdin().is_terminal() => None,
        None => Some(piped()?),
    };
    with_model(DeviceChoice::Auto, &source, args.max_len.get(), args.model.threads, |generator| {
        generator.keep_prefix();
        let mut chat = Chat { generator, template, wanted, system: args.system.clone(), messages: Vec::new() };
        chat.reset();
        let out = &mut std::io::stdout();
        match question {
            Some(question) => ended(chat.answer(question, out)?),
            None => ended(chat.talk(out)?),
        }
    })
}

/// A conversation with a model.
struct Chat<'a> {
    generator: &'a mut Generator,
    template: ChatTemplate,
    wanted: Completion,
    system: Option<String>,
    messages: Vec<Message>,
}

impl Chat<'_> {
    fn reset(&mut self) {
        self.messages = self.system.iter().map(|system| Message::new("system", system)).collect();
    }

    /// Asks for questions until the input ends; returns whether everything could be printed.
    fn talk(&mut self, out: &mut dyn Write) -> Result<std::io::Result<()>, JobError> {
        loop {
            if let Err(error) = write(out, "> ") {
                return Ok(Err(error));
            }
            let line = match question(&mut std::io::stdin().lock()).map_err(CommandError::Input)? {
                Line::End => return Ok(write(out, "\n")),
                Line::TooLong => {
                    let message = format!("a question has at most {QUESTION_BYTES_MAX} bytes; this one is left out\n");
                    match write(out, &message) {
                        Ok(()) => continue,
                        failed => return Ok(failed),
                    }
                }
                Line::Question(line) => line,
            };
            let shown = match line.trim() {
                "" => Ok(()),
                "/reset" => {
                    self.reset();
                    Ok(())
                }
                question => match self.answer(question.to_owned(), out) {
                    // The conversation goes on without the question.
                    Err(JobError::Generate(error)) => write(out, &format!("{error}; /reset begins again\n")),
                    shown => shown?,
                },
            };
            if shown.is_err() {
                return Ok(shown);
            }
        }
    }

    fn answer(&mut self, question: String, out: &mut dyn Write) -> Result<std::io::Result<()>, JobError> {
        let mut messages = self.messages.clone();
        messages.push(Message::new("user", &question));
        let text = self.template.render(&Conversation { messages: messages.clone(), ..Conversation::default() }, true);
        let ids = self.generator.tokenizer().encode(&text.map_err(GenerateError::Template)?)?;
        let shown = show(self.generator, &ids, &self.wanted, out)?;
        Ok(shown.and_then(|answer| {
            messages.push(Message::new("assistant", &answer));
            self.messages = messages;
            write(out, "\n")
        }))
    }
}

/// A line of the input.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    Question(String),
    TooLong,
    End,
}

/// The next line; bytes that are no text become U+FFFD. A line that is too long is read to its end, so that its rest is no question.
fn question(input: &mut impl BufRead) -> std::io::Result<Line> {
    let mut line = Vec::new();
    if input.by_ref().take(QUESTION_BYTES_MAX + 1).read_until(b'\n', &mut line)? == 0 {
        return Ok(Line::End);
    }
    if line.len() as u64 <= QUESTION_BYTES_MAX {
        return Ok(Line::Question(String::from_utf8_lossy(&line).into_owned()));
    }
    while line.last() != Some(&b'\n') {
        line.clear();
        if input.by_ref().take(QUESTION_BYTES_MAX).read_until(b'\n', &mut line)? == 0 {
            break;
        }
    }
    Ok(Line::TooLong)
}

fn piped() -> Result<String, CommandError> {
    let mut text = Vec::new();
    std::io::stdin().lock().take(QUESTION_BYTES_MAX + 1).read_to_end(&mut text).map_err(CommandError::Input)?;
    if text.len() as u64 > QUESTION_BYTES_MAX {
        return Err(CommandError::LongQuestion { bytes_max: QUESTION_BYTES_MAX });
    }
    Ok(String::from_utf8_lossy(&text).trim_end_matches(['\n', '\r']).to_owned())
}

type Variables = serde_json::Map<String, serde_json::Value>;

fn variables(text: &str) -> Result<Variables, String> {
    exact_json::object(text).ok_or_else(|| "must be a JSON object".into())
}

/// The template of a name or file, or that of the tokenizer.
fn template(tokenizer: &Tokenizer, wanted: Option<&str>, dir: &Path) -> Result<ChatTemplate, JobError> {
    let source = template_source(tokenizer, wanted)?;
    let source = source.ok_or_else(|| GenerateError::NoTemplate { dir: dir.to_owned() })?;
    Ok(tokenizer.parse_template(&source).map_err(GenerateError::Template)?.for_answers())
}

/// The text of the template of a name or file, or that of the tokenizer, if it has one.
pub(super) fn template_source(tokenizer: &Tokenizer, wanted: Option<&str>) -> Result<Option<String>, JobError> {
    Ok(match wanted {
        None => tokenizer.chat_template().map(str::to_owned),
        Some(name) => Some(match (tokenizer.named_template(name), NamedTemplate::of(name)) {
            (Some(own), _) => own.to_owned(),
            (None, Some(template)) => template.source().to_owned(),
            (None, None) if home::expanded(name).exists() => {
                let path = home::expanded(name);
                let read = foreign_file::read_text(&path, TEMPLATE_BYTES_MAX);
                read.map_err(|source| JobError::Io { action: "read", path, source })?
            }
            (None, None) => {
                let known = NamedTemplate::names().collect();
                return Err(GenerateError::UnknownTemplate { name: name.to_owned(), known }.into());
            }
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_that_a_tokenizer_has_beside_its_usual_one_is_found_by_its_name_before_ours() {
        let dir = tempfile::tempdir().unwrap();
        let own = serde_json::json!({"chat_template": [
            {"name": "default", "template": "usual"},
            {"name": "rag", "template": "with documents"},
            {"name": "chatml", "template": "own"},
        ]});
        std::fs::write(dir.path().join("tokenizer_config.json"), own.to_string()).unwrap();
        let model = phalanx_needs::reference("models/tiny-llama3/tokenizer.json");
        std::fs::copy(model, dir.path().join("tokenizer.json")).unwrap();
        let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();

        let found = [None, Some("rag"), Some("chatml")].map(|name| template_source(&tokenizer, name).unwrap().unwrap());

        assert_eq!(found, ["usual", "with documents", "own"]);
        let unknown = template_source(&tokenizer, Some("tool_use")).unwrap_err().to_string();
        assert!(unknown.contains("tool_use"), "{unknown}");
    }

    #[test]
    fn line_that_is_too_long_is_left_out_and_the_next_one_is_read() {
        let long = vec![b'a'; QUESTION_BYTES_MAX as usize + 1];
        let mut input = std::io::Cursor::new([&b"Hi \xff\n"[..], &long, &long, b"\nb\n"].concat());

        let mut next = || question(&mut input).unwrap();

        assert_eq!(next(), Line::Question("Hi \u{fffd}\n".into()));
        assert_eq!(next(), Line::TooLong);
        assert_eq!(next(), Line::Question("b\n".into()));
        assert_eq!(next(), Line::End);
    }
}
