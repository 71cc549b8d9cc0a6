//! Finds the turns of a rendered conversation that a model is trained on.
//!
//! Three ways, from the most certain: the template's own `generation` blocks; the text that adding the turn appends, if the
//! template only appends; and a mark at the end of the turn's text, for templates that rewrite earlier turns (Qwen3 drops their
//! reasoning). Every way is checked against the text of the whole conversation. Guessing by marker strings would silently
//! train on the wrong turns of an unfamiliar template.

use std::ops::Range;

use serde_json::Value as Json;

use super::chat_template::{ChatTemplate, ChatTemplateError, Conversation, Message};

/// Unicode reserves this character for the inside of programs, so no text of a data set has a use for it.
const MARK: char = '\u{fdd2}';

/// A conversation as text, and where its trained turns are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    /// The whole conversation.
    pub text: String,
    /// The number of each trained message and its byte range in the text, in order: from after the opening of the turn up to
    /// and with its end-of-turn marker, without white space that only separates it from the next turn.
    pub turns: Vec<(usize, Range<usize>)>,
}

/// The text of a conversation, and the positions of the turns in `trained`, which is in ascending order.
///
/// # Errors
/// When the template refuses the conversation, or hides the position of a turn.
pub fn render_for_training(
    template: &ChatTemplate,
    conversation: &Conversation,
    trained: &[usize],
) -> Result<RenderedChat, ChatTemplateError> {
    let (text, blocks) = template.render_blocks(conversation, false)?;
    let turns = match from_blocks(conversation, trained, &blocks)
        .or_else(|| appended(template, conversation, &text, trained))
    {
        Some(turns) => turns,
        None => marked(template, conversation, &text, trained)?,
    };
    Ok(RenderedChat { text, turns: trained.iter().copied().zip(turns).collect() })
}

/// The turns as the template's `generation` blocks print them, if there is one for each assistant turn.
fn from_blocks(conversation: &Conversation, trained: &[usize], blocks: &[Range<usize>]) -> Option<Vec<Range<usize>>> {
    let assistant = |&idx: &usize| conversation.messages[idx].role() == "assistant";
    let answers: Vec<usize> = (0..conversation.messages.len()).filter(assistant).collect();
    if blocks.is_empty() || blocks.len() != answers.len() {
        return None;
    }
    let block = |idx: &usize| Some(blocks[answers.binary_search(idx).ok()?].clone());
    trained.iter().map(block).collect()
}

/// The turns as the text that each appends to the conversation before it, if the template only appends.
fn appended(
    template: &ChatTemplate,
    conversation: &Conversation,
    text: &str,
    trained: &[usize],
) -> Option<Vec<Range<usize>>> {
    let locate = |&idx: &usize| {
        let last = LastTurn::find(template, conversation, idx)?;
        text.starts_with(&last.text).then_some(last.body)
    };
    trained.iter().map(locate).collect()
}

/// A turn at the end of the conversation up to it.
struct LastTurn {
    /// The conversation up to and with the turn.
    text: String,
    /// Where the turn begins, with its opening.
    begin: usize,
    /// The turn without its opening.
    body: Range<usize>,
}

impl LastTurn {
    /// `None` if the template refuses a part of the conversation, or does not append the turn.
    fn find(template: &ChatTemplate, conversation: &Conversation, idx: usize) -> Option<Self> {
        let message = &conversation.messages[idx];
        let text = template.render(&conversation.upto(idx + 1), false).ok()?;
        // Many templates access the first message, so the empty conversation is never rendered.
        let (before, prompted) = match idx {
            0 => (String::new(), String::new()),
            _ => {
                let earlier = conversation.upto(idx);
                (template.render(&earlier, false).ok()?, template.render(&earlier, true).ok()?)
            }
        };
        if !text.starts_with(&before) {
            return None;
        }
        let begin = before.len();
        // A generation prompt may contain more than the opening of an earlier turn (an opened "think" block, say).
        let opened = match message.role() {
            "assistant" => common_prefix(&prompted, &text).max(begin),
            _ => begin,
        };
        let content = message.text().unwrap_or_default().trim();
        let start = match text[opened..].find(content) {
            // Without a generation prompt, the opening of the turn ends where the content begins.
            Some(offset) if opened == begin => opened + offset,
            _ => opened,
        };
        // Most vocabularies join a space to the word after it; that token belongs to the word.
        let start = begin + text[begin..start].trim_end_matches(' ').len();
        let content_end = text[start..].find(content).map_or(start, |offset| start + offset + content.len());
        let marker = text[content_end..].trim_end();
        let end = if marker.is_empty() { text.len() } else { content_end + marker.len() };
        Some(Self { body: start..end, text, begin })
    }
}

/// The turns by a mark at the end of their text, in the conversation up to the turn and in the whole one.
fn marked(
    template: &ChatTemplate,
    conversation: &Conversation,
    text: &str,
    trained: &[usize],
) -> Result<Vec<Range<usize>>, ChatTemplateError> {
    let mut turns: Vec<Range<usize>> = Vec::new();
    for &idx in trained {
        let from = turns.last().map_or(0, |turn| turn.end);
        let turn = marked_turn(template, conversation, text, idx, from);
        turns.push(turn.ok_or(ChatTemplateError::NotLocated { number: idx + 1 })?);
    }
    Ok(turns)
}

fn marked_turn(
    template: &ChatTemplate,
    conversation: &Conversation,
    text: &str,
    idx: usize,
    from: usize,
) -> Option<Range<usize>> {
    let last = LastTurn::find(template, conversation, idx)?;
    let mut with_mark = conversation.clone();
    with_mark.messages[idx] = with_mark_at_its_end(&conversation.messages[idx])?;
    let mark_in_last = position_of_mark(template, &with_mark.upto(idx + 1), &last.text)?;
    let mark = position_of_mark(template, &with_mark, text)?;
    let (body, tail) = (last.text.get(last.body.start..mark_in_last)?, last.text.get(mark_in_last..last.body.end)?);
    let preceding = text.get(from..mark)?;
    if !text[mark..].starts_with(tail) {
        return None;
    }
    let start = if preceding.ends_with(body) {
        mark - body.len()
    } else {
        // The template changed the turn itself, so it begins after its opening, which must not occur in it.
        let opening = &last.text[last.begin..last.body.start];
        // Only whole lines are certain: the prompt of the last turn may open a thought that earlier turns do not have.
        let opening = opening.trim_start();
        let line = opening.split_inclusive('\n').next()?;
        let own = serde_json::to_string(&conversation.messages[idx].0).ok()?;
        if line.trim().is_empty() || own.contains(line.trim()) {
            return None;
        }
        let found = preceding.rfind(line)?;
        let common = &opening[..common_prefix(opening, &preceding[found..])];
        let whole = common == opening;
        from + found + if whole { common.len() } else { common.rfind('\n').map_or(line.len(), |at| at + 1) }
    };
    Some(start..mark + tail.len())
}

/// Where the mark is in the text of `conversation`, if that text is `unmarked` but for the mark.
fn position_of_mark(template: &ChatTemplate, conversation: &Conversation, unmarked: &str) -> Option<usize> {
    let text = template.render(conversation, false).ok()?;
    let (before, after) = text.split_once(MARK)?;
    let same =
        before.len() + after.len() == unmarked.len() && unmarked.starts_with(before) && unmarked.ends_with(after);
    same.then_some(before.len())
}

/// The message with a mark after the last letter of its content or, without content, of the name of its last call.
fn with_mark_at_its_end(message: &Message) -> Option<Message> {
    let mut message = message.clone();
    let text = match message.0.get("content") {
        Some(Json::String(content)) if !content.trim().is_empty() => message.0.get_mut("content")?,
        Some(Json::Array(_)) => message.0.get_mut("content")?.as_array_mut()?.last_mut()?.get_mut("text")?,
        _ => {
            let call = message.0.get_mut("tool_calls")?.as_array_mut()?.last_mut()?;
            match call.get("function") {
                Some(_) => call.get_mut("function")?.get_mut("name")?,
                None => call.get_mut("name")?,
            }
        }
    };
    let whole = text.as_str()?;
    let end = whole.trim_end().len();
    *text = Json::String(format!("{}{MARK}{}", &whole[..end], &whole[end..]));
    Some(message)
}

fn common_prefix(a: &str, b: &str) -> usize {
    a.char_indices().zip(b.chars()).find(|((_, x), y)| x != y).map_or(a.len().min(b.len()), |((at, _), _)| at)
}

#[cfg(test)]
#[path = "chat_spans_tests.rs"]
mod tests;
