//! The chat templates that a configuration names: formats of published models, under the names that Axolotl uses.
//!
//! Each file is written from the format that the model's card or tokenizer documents. None adds a system message that the
//! conversation does not have, except that of Qwen 2.5, which the model was trained with. Formats without calls of tools do not
//! mention `tools`, so a conversation with tools is refused. `tests/peers/chat_templates.py` compares the texts with those of
//! Axolotl's templates, and `chat_texts.json` holds some of them.

/// A template of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedTemplate {
    name: &'static str,
    source: &'static str,
}

macro_rules! templates {
    ($($name:literal: $file:literal,)+) => {
        &[$(NamedTemplate { name: $name, source: include_str!(concat!("../data/templates/", $file, ".jinja")) },)+]
    };
}

const TEMPLATES: &[NamedTemplate] = templates! {
    "chatml": "chatml",
    "alpaca": "alpaca",
    "aya": "cohere",
    "cohere": "cohere",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "exaone": "exaone",
    "exaone4": "exaone4",
    "falcon_h1": "falcon_h1",
    "gemma": "gemma",
    "gemma3": "gemma3",
    "gemma3n": "gemma3",
    "gemma4": "gemma4",
    "gemma4_unified": "gemma4",
    "jamba": "jamba",
    "llama3": "llama3",
    "llama4": "llama4",
    "metharme": "metharme",
    "mistral_v1": "mistral_v1",
    "mistral_v2v3": "mistral_v2v3",
    "mistral_v3_tekken": "mistral_v3_tekken",
    "mistral_v7_tekken": "mistral_v7_tekken",
    "nemotron_h": "nemotron_h",
    "phi_3": "phi_3",
    "phi_35": "phi_35",
    "phi_4": "phi_4",
    "qwen_25": "qwen_25",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3",
};

/// Names of Axolotl's list that are not here, and what to do instead.
const ABSENT: &[(&[&str], &str)] = &[
    (
        &["llama3_2_vision", "llava", "pixtral", "qwen2_vl"],
        "only text is trained on; for conversations of text, use tokenizer_default or a template of a text model",
    ),
    (
        &["command_a", "command_a_tool_use", "command_a_rag"],
        "it has a long system message of its own, which is in the model's tokenizer; use tokenizer_default",
    ),
];

impl NamedTemplate {
    /// The template with this name.
    pub fn of(name: &str) -> Option<Self> {
        TEMPLATES.iter().copied().find(|template| template.name == name)
    }

    /// Every name, in the order of the reference.
    pub fn names() -> impl Iterator<Item = &'static str> {
        TEMPLATES.iter().map(|template| template.name)
    }

    /// Why a name of Axolotl's list is refused, and what to do instead.
    pub(crate) fn absent(name: &str) -> Option<&'static str> {
        ABSENT.iter().find(|(names, _)| names.contains(&name)).map(|(_, instead)| *instead)
    }

    /// Whether Axolotl's template of this name begins a conversation with a system message of its own, which this one has not.
    pub(crate) fn lacks_system_of_axolotl(&self) -> bool {
        ["metharme", "mistral_v7_tekken", "phi_4"].contains(&self.name)
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its text.
    pub fn source(&self) -> &'static str {
        self.source
    }
}
