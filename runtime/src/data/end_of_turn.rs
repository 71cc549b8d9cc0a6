//! The mark with which a chat template ends an answer: a model that is trained on the template's conversations writes it, and
//! whoever asks the model must stop there.

use serde_json::{Value, json};

use super::chat_template::{ChatTemplate, Conversation, Message};
use super::tokenizer::Tokenizer;

/// An answer that no template has in its own text, and that none changes.
const ANSWER: &str = "Aspis4071";

/// Fewest characters of a mark that is no token: a full stop ends no turn.
const MARK_LEN_MIN: usize = 3;

/// The end of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EndOfTurn {
    Token(u32),
    /// A text that the vocabulary has no token for, so that the model writes it in pieces.
    Text(String),
}

impl EndOfTurn {
    /// The token, if it is one.
    pub(crate) fn token(&self) -> Option<u32> {
        match self {
            EndOfTurn::Token(id) => Some(*id),
            EndOfTurn::Text(_) => None,
        }
    }

    /// The text, if it is no token.
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            EndOfTurn::Token(_) => None,
            EndOfTurn::Text(text) => Some(text),
        }
    }
}

/// The mark behind an answer at the end of a conversation; `None` if the template puts none there, or refuses a plain question
/// and its answer.
pub(crate) fn of_template(tokenizer: &Tokenizer, template: &ChatTemplate) -> Option<EndOfTurn> {
    let messages = vec![Message::new("user", "Who?"), Message::new("assistant", ANSWER)];
    let text = template.render(&Conversation { messages, ..Conversation::default() }, false).ok()?;
    let (_, behind) = text.rsplit_once(ANSWER)?;
    let behind = behind.trim_start();
    if let Some(id) = token_at_start(tokenizer, behind) {
        return Some(EndOfTurn::Token(id));
    }
    let mark = behind.split_whitespace().next().filter(|mark| mark.chars().count() >= MARK_LEN_MIN);
    mark.filter(|mark| mark.starts_with(['<', '['])).map(|mark| EndOfTurn::Text(mark.to_owned()))
}

/// The longest added token with which a text begins.
fn token_at_start(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    let added = tokenizer.added_tokens().into_iter();
    let here = added.filter(|(token, ..)| !token.is_empty() && text.starts_with(token.as_str()));
    here.max_by_key(|(token, ..)| token.len()).map(|(_, id, _)| id)
}

/// Token ids as a configuration file has them: one number or a list, without those that are there already.
pub(crate) fn with_ids(found: &Value, more: &[u32]) -> Value {
    let mut ids: Vec<Value> = match found {
        Value::Null => Vec::new(),
        Value::Array(ids) => ids.clone(),
        one => vec![one.clone()],
    };
    for id in more.iter().map(|id| json!(id)) {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    match &ids[..] {
        [one] if !found.is_array() => one.clone(),
        _ => Value::Array(ids),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::named_templates::NamedTemplate;
    use crate::data::token_changes::TokenChanges;

    #[test]
    fn token_behind_the_last_answer_ends_a_turn() {
        let added = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"].map(str::to_owned).to_vec();
        let base = Tokenizer::from_dir(&phalanx_needs::reference("models/tiny-llama3")).unwrap();
        let tokenizer = base.changed(&TokenChanges { additional: added, ..TokenChanges::default() }).unwrap();
        for (name, token) in [
            ("chatml", Some("<|im_end|>")),
            ("llama3", Some("<|eot_id|>")),
            ("gemma3", Some("<end_of_turn>")),
            ("phi_35", Some("<|end|>")),
            ("mistral_v1", tokenizer.token_text(tokenizer.eos_id().unwrap()).as_deref()),
        ] {
            let template = tokenizer.parse_template(NamedTemplate::of(name).unwrap().source()).unwrap();

            let expected = token.and_then(|token| tokenizer.token_id(token)).map(EndOfTurn::Token);
            assert_eq!(of_template(&tokenizer, &template), expected, "{name}");
        }
        let chatml = base.parse_template(NamedTemplate::of("chatml").unwrap().source()).unwrap();
        assert_eq!(of_template(&base, &chatml), Some(EndOfTurn::Text("<|im_end|>".into())));
    }

    #[test]
    fn template_that_expects_parts_or_adds_a_line_is_understood() {
        let tokenizer = Tokenizer::bytes();
        let of = |source: &str| of_template(&tokenizer, &tokenizer.parse_template(source).unwrap());
        let end = tokenizer.token_id("<|im_end|>").map(EndOfTurn::Token);

        assert!(end.is_some());
        let parts =
            "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}\n<|im_end|>{% endfor %}";
        assert_eq!(of(parts), end);
        assert_eq!(of("{% for m in messages %}{{ m['content'] }}.{% endfor %}"), None);
        assert_eq!(of("{{ raise_exception('no') }}"), None);
    }

    #[test]
    fn ids_are_added_once_and_stay_one_number_if_there_is_one() {
        assert_eq!(with_ids(&Value::Null, &[7]), json!(7));
        assert_eq!(with_ids(&json!(2), &[2]), json!(2));
        assert_eq!(with_ids(&json!(2), &[2, 7]), json!([2, 7]));
        assert_eq!(with_ids(&json!([2]), &[2]), json!([2]));
        assert_eq!(with_ids(&json!([2, 3]), &[7, 3]), json!([2, 3, 7]));
    }
}
