//! Prompts of instruction data: the texts around the fields of a record, by name or as the user describes them.
//!
//! The names and texts are those that Axolotl documents for its instruction formats, so that a model trained there expects the
//! same prompt. Source of the first: Taori et al. 2023, Stanford Alpaca, data release.
//!
//! Deliberately absent, and refused by name: formats with several answers in a record, or with marks of one family of models.

use std::borrow::Cow;
use std::convert::Infallible;

/// The texts around instruction, input and answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Style {
    word: &'static str,
    system: &'static str,
    with_input: &'static str,
    without_input: &'static str,
}

const INSTRUCT: Style = Style {
    word: "instruct",
    system: "{system}\n\n",
    with_input: "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    without_input: "### Instruction:\n{instruction}\n\n### Response:\n",
};
const CHAT: Style = Style {
    word: "chat",
    system: "SYSTEM: {system}\n",
    with_input: "USER: {instruction}\n{input}\nASSISTANT:",
    without_input: "USER: {instruction}\nASSISTANT:",
};
const CHATML: Style = Style {
    word: "chatml",
    system: "<|im_start|>system\n{system}<|im_end|>\n",
    with_input: "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
    without_input: "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
};
const PHI: Style = Style {
    word: "phi",
    system: "<|system|>\n{system}<|end|>\n",
    with_input: "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
    without_input: "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
};
const OPEN_ORCA: Style = Style {
    word: "",
    system: "### System:\n{system}\n",
    with_input: "### Human:\n{instruction}\n### Additional Context:\n{input}\n### Assistant:\n",
    without_input: "### Human:\n{instruction}\n### Assistant:\n",
};
const ORCA_MINI: Style = Style {
    word: "",
    system: "### System:\n{system}\n\n",
    with_input: "### User:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    without_input: "### User:\n{instruction}\n\n### Response:\n",
};
const PLAIN: Style =
    Style { word: "", system: "{system}", with_input: "{instruction}\n{input}", without_input: "{instruction}" };

/// Styles that can follow the name of a format, as in `alpaca:chat`.
static STYLES: [Style; 4] = [INSTRUCT, CHAT, CHATML, PHI];

/// The system text of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum System {
    None,
    /// With an input, and without.
    Text(&'static str, &'static str),
    Field(&'static str),
}

const ALPACA: System = System::Text(
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response \
     that appropriately completes the request.",
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.",
);
const CONCISE: System = System::Text(
    "Below is an instruction from a USER that describes a task, paired with an input that provides further context. The \
     ASSISTANT writes a response that concisely and appropriately completes the request.\n\n",
    "Below is an instruction from a USER that describes a task. The ASSISTANT writes a response that appropriately and \
     concisely completes the request.\n\n",
);
const CONTEXT: System = System::Text(
    "Use the following contextual information to concisely answer the question.\n",
    "Use the following contextual information to concisely answer the question.\n",
);

/// Which fields of a record are instruction, input and answer.
#[derive(Debug, PartialEq, Eq)]
struct Format {
    word: &'static str,
    style: Style,
    system: System,
    instruction: &'static str,
    input: Option<&'static str>,
    answer: &'static str,
}

const fn format(
    word: &'static str,
    style: Style,
    system: System,
    instruction: &'static str,
    input: Option<&'static str>,
    answer: &'static str,
) -> Format {
    Format { word, style, system, instruction, input, answer }
}

const INPUT: Option<&str> = Some("input");

static FORMATS: &[Format] = &[
    format("alpaca", INSTRUCT, ALPACA, "{instruction}", INPUT, "{output}"),
    format("alpaca_instruct.load", INSTRUCT, ALPACA, "{instruction}", INPUT, "{output}"),
    format("alpaca_instruct.load_no_prompt", INSTRUCT, System::None, "{instruction}", INPUT, "{output}"),
    format("alpaca_chat", CHAT, ALPACA, "{instruction}", INPUT, "{output}"),
    format("alpaca_chat.load", CHAT, ALPACA, "{instruction}", INPUT, "{output}"),
    format("alpaca_chat.load_no_prompt", CHAT, System::None, "{instruction}", INPUT, "{output}"),
    format("alpaca_chat.load_concise", CHAT, CONCISE, "{instruction}", INPUT, "{output}"),
    format("alpaca_chat.load_qa", CHAT, CONCISE, "{question}", None, "{answer}"),
    format("alpaca_chat.load_camel_ai", CHAT, CONCISE, "{message_1}", None, "{message_2}"),
    format("alpaca_w_system", CHAT, System::Field("system"), "{instruction}", INPUT, "{output}"),
    format("alpaca_w_system.load", CHAT, System::Field("system"), "{instruction}", INPUT, "{output}"),
    format("alpaca_w_system.load_chat", CHAT, System::Field("system"), "{instruction}", INPUT, "{output}"),
    format("alpaca_w_system.load_instruct", INSTRUCT, System::Field("system"), "{instruction}", INPUT, "{output}"),
    format(
        "alpaca_w_system.load_open_orca",
        OPEN_ORCA,
        System::Field("system_prompt"),
        "{question}",
        None,
        "{response}",
    ),
    format(
        "alpaca_w_system.load_open_orca_chatml",
        CHATML,
        System::Field("system_prompt"),
        "{question}",
        None,
        "{response}",
    ),
    format("orcamini", ORCA_MINI, System::Field("system_prompt"), "{question}", None, "{response}"),
    format("gpteacher", INSTRUCT, ALPACA, "{instruction}", INPUT, "{response}"),
    format("gpt4all", INSTRUCT, ALPACA, "{prompt}", None, "{response}"),
    format("jeopardy", INSTRUCT, ALPACA, "{question}", Some("category"), "what is {answer}"),
    format("oasst", INSTRUCT, ALPACA, "{INSTRUCTION}", None, "{RESPONSE}"),
    format(
        "summarizetldr",
        CHAT,
        System::None,
        "Summarize the following article as a TL;DR.\n{article}",
        None,
        "{summary}",
    ),
    format("context_qa", CHAT, CONTEXT, "{article}\n===\n{question}", None, "{answer}"),
    format("context_qa.load", CHAT, CONTEXT, "{article}\n===\n{question}", None, "{answer}"),
    format(
        "context_qa.load_v2",
        PLAIN,
        System::None,
        "Context: {context}\nQuestion: {question}\n",
        None,
        "Answer: {answer}",
    ),
];

/// Formats of Axolotl that are refused.
const ABSENT: &[&str] = &[
    "concisechoice",
    "creative_acr",
    "explainchoice",
    "llama2_chat",
    "metharme",
    "pygmalion",
    "reflection",
    "stepwise_supervised",
    "context_qa.load_404",
    "bradley_terry",
    "chat_template.default",
    "chat_template.icr",
    "chatml",
    "llama3",
    "zephyr",
    "user_defined.default",
    "_synthetic",
];

/// A format of instruction data with a name, perhaps in another style, as in `alpaca:chat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedPrompt {
    format: &'static Format,
    style: Option<&'static Style>,
}

impl NamedPrompt {
    /// That of Stanford's Alpaca.
    pub(crate) const ALPACA: Self = Self { format: &FORMATS[0], style: None };

    /// The format with this name.
    pub fn of(word: &str) -> Option<Self> {
        let (name, style) = word.split_once(':').map_or((word, None), |(name, style)| (name, Some(style)));
        let format = FORMATS.iter().find(|format| format.word == name)?;
        let style = match style {
            // A text that the format has of its own would be lost in another style.
            Some(word) if STYLES.contains(&format.style) => Some(STYLES.iter().find(|style| style.word == word)?),
            Some(_) => return None,
            None => None,
        };
        Some(Self { format, style })
    }

    /// The name, as in a configuration.
    pub fn word(&self) -> String {
        match self.style {
            Some(style) => format!("{}:{}", self.format.word, style.word),
            None => self.format.word.to_owned(),
        }
    }

    /// Every name, without styles.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FORMATS.iter().map(|format| format.word)
    }

    /// Why a format of Axolotl is refused, and what to do instead.
    pub(crate) fn absent(word: &str) -> Option<&'static str> {
        let is_one =
            |name: &&str| word == *name || word.strip_prefix(*name).is_some_and(|rest| rest.starts_with(['.', ':']));
        ABSENT.iter().any(is_one).then_some(
            "there is no such format; describe the prompt as a section under `type` (field_instruction, field_output, \
             format), or convert the data to conversations for chat_template",
        )
    }

    /// The prompt that the format describes.
    pub(crate) fn prompt(&self) -> Prompt {
        let Format { style, system, instruction, input, answer, .. } = self.format;
        let style = self.style.unwrap_or(style);
        Prompt {
            system: match system {
                System::None => PromptSystem::None,
                System::Text(with_input, without_input) => PromptSystem::Text { with_input, without_input },
                System::Field(name) => PromptSystem::Field { name: (*name).to_owned(), default: String::new() },
            },
            system_format: style.system.into(),
            with_input: style.with_input.into(),
            without_input: style.without_input.into(),
            instruction: (*instruction).into(),
            input: input.map(str::to_owned),
            answer: (*answer).into(),
        }
    }
}

/// A prompt whose texts and fields the user describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CustomPrompt {
    /// The system text of records without one.
    pub system_prompt: String,
    /// The text around it, with `{system}`.
    pub system_format: String,
    /// The fields of a record.
    pub field_system: String,
    /// As above.
    pub field_instruction: String,
    /// As above; a record may have none.
    pub field_input: String,
    /// As above.
    pub field_output: String,
    /// The text with an input, with `{instruction}` and `{input}`.
    pub format: String,
    /// The text without an input, with `{instruction}`.
    pub no_input_format: String,
}

impl CustomPrompt {
    /// The prompt that it describes.
    pub(crate) fn prompt(&self) -> Prompt {
        let of_field = |field: &str| Cow::Owned(format!("{{{field}}}"));
        Prompt {
            system: PromptSystem::Field { name: self.field_system.clone(), default: self.system_prompt.clone() },
            system_format: self.system_format.clone().into(),
            with_input: self.format.clone().into(),
            without_input: self.no_input_format.clone().into(),
            instruction: of_field(&self.field_instruction),
            input: Some(self.field_input.clone()),
            answer: of_field(&self.field_output),
        }
    }
}

/// The texts of Stanford's Alpaca: around a system text, and before an answer with an input and without; the latter begin with its
/// preamble unless records have system texts of their own.
pub(crate) fn alpaca_texts(has_preamble: bool) -> [String; 3] {
    let System::Text(with_input, without_input) = ALPACA else { return Default::default() };
    let text = |preamble: &str, rest: &str| match has_preamble {
        true => format!("{preamble}\n\n{rest}"),
        false => rest.to_owned(),
    };
    [INSTRUCT.system.to_owned(), text(with_input, INSTRUCT.with_input), text(without_input, INSTRUCT.without_input)]
}

/// The names in braces of a text.
pub(crate) fn names_in(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    // Filling in a text without values cannot fail.
    let _ = filled(text, |name| {
        names.push(name);
        Ok::<_, Infallible>("".into())
    });
    names
}

/// How a record becomes the text before the answer, and the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Prompt {
    pub(crate) system: PromptSystem,
    /// With `{system}`.
    pub(crate) system_format: Cow<'static, str>,
    /// With `{instruction}` and `{input}`.
    pub(crate) with_input: Cow<'static, str>,
    /// With `{instruction}`.
    pub(crate) without_input: Cow<'static, str>,
    /// With names of fields.
    pub(crate) instruction: Cow<'static, str>,
    /// The name of a field.
    pub(crate) input: Option<String>,
    /// With names of fields.
    pub(crate) answer: Cow<'static, str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PromptSystem {
    None,
    Text { with_input: &'static str, without_input: &'static str },
    Field { name: String, default: String },
}

/// A text with values for its names in braces; doubled braces stand for themselves.
pub(crate) fn filled<'a, E>(
    text: &'a str,
    mut value: impl FnMut(&'a str) -> Result<Cow<'a, str>, E>,
) -> Result<String, E> {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(['{', '}']) {
        let (before, brace) = rest.split_at(at);
        out += before;
        let doubled = brace.len() > 1 && brace.as_bytes()[1] == brace.as_bytes()[0];
        let name = (!doubled).then(|| brace.strip_prefix('{')?.split_once('}')).flatten();
        match name {
            Some((name, after)) => {
                out += &value(name)?;
                rest = after;
            }
            None => {
                out += &brace[..1];
                rest = &brace[if doubled { 2 } else { 1 }..];
            }
        }
    }
    Ok(out + rest)
}
