//! How an entry of a data set becomes a pair of answers to one prompt.

use super::at::At;
use super::error::{ConfigError, Errors};
use super::section::{Section, section};
use super::setting::Setting;
use serde_yaml_ng::{Mapping, Value};

/// How an entry becomes a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairForm {
    /// TRL's columns: prompt, chosen and rejected, as texts or lists of messages.
    Columns,
    /// A list of messages, and two columns with the last message.
    Messages,
    /// Two columns with whole conversations, which differ in their last message.
    Conversations,
    /// The same, with a question in the column prompt that takes the place of every question in them.
    Asked,
    /// Texts: a question, perhaps with a system text, and two answers, which the chat template renders.
    Answers,
    /// Texts between the markers of a format.
    Framed(Frame, Question),
    /// Texts in the formats of `pair`.
    Formats,
}

/// Markers around a question and its answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Those of ChatML.
    Chatml,
    /// Those of Llama 3.
    Llama3,
}

/// Where question and answers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// In the first of prompt, input, question and instruction; answers in chosen or chosen_response, and so on.
    First,
    /// In this column.
    Column(&'static str),
    /// In the column prompt; answers are the second messages of lists.
    Ultra,
    /// The first message of the preferred conversation; answers are the second ones.
    ArgillaChat,
}

const FRAMES: [(&str, Frame); 2] = [("chatml", Frame::Chatml), ("llama3", Frame::Llama3)];
const QUESTIONS: [(&str, Question); 7] = [
    ("default", Question::First),
    ("icr", Question::Column("input")),
    ("intel", Question::Column("question")),
    ("prompt_pairs", Question::Column("prompt")),
    ("argilla", Question::First),
    ("ultra", Question::Ultra),
    ("argilla_chat", Question::ArgillaChat),
];
const OTHERS: [(&str, PairForm); 7] = [
    ("preference", PairForm::Columns),
    ("passthrough", PairForm::Columns),
    ("chat_template.default", PairForm::Messages),
    ("chat_template.argilla", PairForm::Asked),
    ("chat_template.argilla_chat", PairForm::Conversations),
    ("bradley_terry.chat_template", PairForm::Answers),
    ("user_defined.default", PairForm::Formats),
];

impl PairForm {
    /// The form that a configuration names, in a word of Phalanx or of Axolotl.
    pub(crate) fn of(word: &str) -> Option<Self> {
        let other = OTHERS.iter().find(|(known, _)| *known == word).map(|(_, form)| *form);
        other.or_else(|| {
            let (frame, question) = word.split_once('.').unwrap_or((word, "default"));
            let (_, frame) = FRAMES.iter().find(|(known, _)| *known == frame)?;
            let (_, question) = QUESTIONS.iter().find(|(known, _)| *known == question)?;
            Some(Self::Framed(*frame, *question))
        })
    }

    /// Whether a chat template renders every pair, whatever its columns have.
    pub(crate) fn is_conversation(self) -> bool {
        matches!(self, Self::Messages | Self::Conversations | Self::Asked | Self::Answers)
    }

    /// Its first word.
    pub(crate) fn word(self) -> String {
        match self {
            Self::Framed(frame, question) => {
                let name = |found: Option<&str>| found.expect("every frame and question has a name").to_owned();
                let frame = FRAMES.iter().find(|(_, known)| *known == frame).map(|(word, _)| *word);
                let question = QUESTIONS.iter().find(|(_, known)| *known == question).map(|(word, _)| *word);
                format!("{}.{}", name(frame), name(question))
            }
            other => OTHERS.iter().find(|(_, form)| *form == other).expect("every form has a word").0.to_owned(),
        }
    }

    /// All words, for messages.
    pub(crate) fn words() -> Vec<String> {
        let framed = FRAMES
            .iter()
            .flat_map(|(frame, _)| QUESTIONS.iter().map(move |(question, _)| format!("{frame}.{question}")));
        OTHERS.iter().map(|(word, _)| (*word).to_owned()).chain(framed).collect()
    }
}

impl Frame {
    /// The prompt of a question, after a system text if there is one.
    pub(crate) fn prompt(self, system: Option<&str>, question: &str) -> String {
        self.turns(system.map(|text| ("system", text)).into_iter().chain([("user", question)]))
    }

    /// The prompt of turns with their roles.
    pub(crate) fn turns<'a>(self, turns: impl Iterator<Item = (&'a str, &'a str)>) -> String {
        let turn = |(role, text): (&str, &str)| match self {
            Self::Chatml => format!("<|im_start|>{role}\n{text}<|im_end|>\n"),
            Self::Llama3 => format!("<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"),
        };
        let begin = match self {
            Self::Chatml => "<|im_start|>assistant\n",
            Self::Llama3 => "<|start_header_id|>assistant<|end_header_id|>\n\n",
        };
        turns.map(turn).collect::<String>() + begin
    }

    /// The marker behind an answer.
    pub(crate) const fn end(self) -> &'static str {
        match self {
            Self::Chatml => "<|im_end|>",
            Self::Llama3 => "<|eot_id|>",
        }
    }
}

section! {
    /// Texts and fields of pairs in formats of their own. Names stand in braces, and braces in the text are doubled.
    pub struct PairSection {
        /// Name of the field with the prompt.
        pub field_prompt: String = "prompt".into();
        /// Name of the field with a system text, which a record may not have.
        pub field_system: String = "system".into();
        /// Name of the field with the preferred answer.
        pub field_chosen: String = "chosen".into();
        /// Name of the field with the rejected answer.
        pub field_rejected: String = "rejected".into();
        /// Name of the field with an answer that is labelled by itself.
        pub field_completion: String = "completion".into();
        /// Name of the field that says whether it is desirable.
        pub field_label: String = "label".into();
        /// Text before the answers, with {prompt} and {system}.
        pub prompt_format: String = "{prompt}".into();
        /// Text of the preferred answer, with {chosen}.
        pub chosen_format: String = "{chosen}".into();
        /// Text of the rejected answer, with {rejected}.
        pub rejected_format: String = "{rejected}".into();
        /// Text of an answer that is labelled by itself, with {completion}.
        pub completion_format: String = "{completion}".into();
    }
}

impl PairSection {
    /// Whether a section under `type` is one of pairs.
    pub(crate) fn is_of(keys: &Mapping) -> bool {
        let own = [
            "field_prompt",
            "field_chosen",
            "field_rejected",
            "field_completion",
            "field_label",
            "prompt_format",
            "chosen_format",
            "rejected_format",
            "completion_format",
        ];
        keys.keys().any(|key| key.as_str().is_some_and(|key| own.contains(&key)))
    }

    fn check(&self, at: &At<'_>) -> Result<(), ConfigError> {
        let texts: [(&str, &String, &[&str]); 4] = [
            ("prompt_format", &self.prompt_format, &["prompt", "system"]),
            ("chosen_format", &self.chosen_format, &["chosen"]),
            ("rejected_format", &self.rejected_format, &["rejected"]),
            ("completion_format", &self.completion_format, &["completion"]),
        ];
        let mut errors = Errors::default();
        for (key, text, names) in texts {
            let values: Vec<(&str, &str)> = names.iter().map(|name| (*name, "")).collect();
            if filled(text, &values).is_none() {
                let fits = format!("a text whose only names in braces are {{{}}}", names.join("} and {"));
                errors.keep::<()>(Err(at.key(key).mismatch(&text.as_str().into(), fits)));
            }
        }
        errors.end(())
    }
}

impl Setting for PairSection {
    fn fits() -> String {
        "a section with keys such as `field_chosen` and `prompt_format`".into()
    }

    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        let keys = value.as_mapping().ok_or_else(|| at.mismatch(value, Self::fits()))?;
        let known: Vec<&str> = PairSection::keys().iter().map(|doc| doc.key).collect();
        let mut errors = Errors::default();
        errors.keep(at.refuse_unknown(keys, &known));
        let read = errors.keep(PairSection::read_section(keys, at)).unwrap_or_default();
        errors.keep(read.check(at));
        errors.end(read)
    }

    fn write(&self) -> Value {
        let mut keys = Mapping::new();
        self.write_section(&mut keys);
        Value::Mapping(keys)
    }
}

/// A format with its names replaced by values, as Python's `str.format` does; `None` if it has another name, or a brace that is open.
pub(crate) fn filled(format: &str, values: &[(&str, &str)]) -> Option<String> {
    let (mut text, mut rest) = (String::new(), format);
    while let Some(at) = rest.find(['{', '}']) {
        text += &rest[..at];
        let (brace, behind) = (&rest[at..=at], &rest[at + 1..]);
        if behind.starts_with(brace) {
            text += brace;
            rest = &behind[1..];
            continue;
        }
        let (name, behind) = behind.split_once('}').filter(|_| brace == "{")?;
        text += values.iter().find(|(known, _)| *known == name)?.1;
        rest = behind;
    }
    Some(text + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_names_a_form_that_has_a_word() {
        for word in PairForm::words() {
            let form = PairForm::of(&word).unwrap();
            assert_eq!(PairForm::of(&form.word()), Some(form), "{word}");
        }
        assert_eq!(PairForm::of("chatml"), PairForm::of("chatml.default"));
        assert_eq!(PairForm::of("chat_template"), None);
    }

    #[test]
    fn formats_are_filled_as_those_of_python() {
        let values = [("prompt", "a{b}"), ("system", "")];

        assert_eq!(filled("[{system}] {prompt} =>", &values).as_deref(), Some("[] a{b} =>"));
        assert_eq!(filled("{{{prompt}}} {{x}}", &values).as_deref(), Some("{a{b}} {x}"));
        assert_eq!(["{other}", "{prompt", "}"].map(|format| filled(format, &values)), [None, None, None]);
    }
}
