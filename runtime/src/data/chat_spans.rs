//! Finds the turns of a rendered conversation that a model is trained on.
//!
//! Nothing is searched for by its letters: the rendering tells of each byte which message it comes from. What remains to be
//! decided is which of the template's own letters around a message belong to its turn:
//!
//! - The opening of an answer is what the generation prompt prints, as far as the turn has it; that of other turns, and of
//!   answers of templates without a generation prompt, is all before the message.
//! - The end of a turn is what the loop over the messages prints for it after the message, and a token that ends the text.
//! - `generation` blocks of a template decide both by themselves.

use std::cell::OnceCell;
use std::ops::Range;

use super::chat_template::{ChatTemplate, ChatTemplateError, Conversation, Message, THOUGHT_FIELDS};
use super::conversation_forms::rendered_in_form;
use super::jinja::{Origin, Rendered};

/// A conversation as text, and where its trained turns are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    /// The whole conversation.
    pub text: String,
    /// The number of each trained message and its byte range in the text, in order: from after the opening of the turn up to
    /// and with its end-of-turn marker, without white space that only separates it from the next turn. A message that the
    /// template prints in several places has several ranges; one of which it prints nothing but blanks has none.
    pub turns: Vec<(usize, Range<usize>)>,
    origins: Vec<Origin>,
    fields: Vec<Vec<String>>,
}

impl RenderedChat {
    /// Where the text of a message's field is, in order.
    pub(super) fn pieces(&self, idx: usize, field: &str) -> Vec<Origin> {
        let names: &[&str] = if THOUGHT_FIELDS.contains(&field) { &THOUGHT_FIELDS } else { &[field] };
        let of_field =
            |origin: &&Origin| origin.of.message == idx && names.contains(&self.fields[idx][origin.of.field].as_str());
        self.origins.iter().filter(of_field).cloned().collect()
    }
}

/// The fields of a message that say who speaks. They are part of the opening of a turn, wherever the template prints them.
const SPEAKER_FIELDS: [&str; 1] = ["name"];

/// The text of a conversation, which takes the form that the template expects, and the positions of the turns in `trained`, which is
/// in ascending order.
///
/// # Errors
/// When the template refuses the conversation.
pub fn render_for_training(
    template: &ChatTemplate,
    conversation: &mut Conversation,
    trained: &[usize],
) -> Result<RenderedChat, ChatTemplateError> {
    let whole = rendered_in_form(template, conversation, false)?.with_first_origins();
    let mut turns = Vec::new();
    for &idx in trained {
        let turn = Turn { template, conversation, whole: &whole, idx, prompted: OnceCell::new() };
        turns.extend(turn.ranges().into_iter().map(|range| (idx, range)));
    }
    turns.sort_by_key(|(_, range)| range.start);
    let Rendered { text, origins, fields, .. } = whole;
    Ok(RenderedChat { text, turns, origins, fields })
}

/// Where in the text of a whole conversation its completion begins, as TRL finds it: where it differs from the prompt alone, with which
/// a model is asked. `None` if the template refuses the prompt alone.
pub(super) fn end_of_prompt(template: &ChatTemplate, prompt: &Conversation, text: &str) -> Option<usize> {
    let asked = template.render_parts(prompt, true).ok()?;
    Some(common_prefix(&asked.text, text))
}

/// A turn of a rendered conversation.
struct Turn<'a> {
    template: &'a ChatTemplate,
    conversation: &'a Conversation,
    whole: &'a Rendered,
    idx: usize,
    /// The conversation before this turn with a generation prompt, once it was needed: to render it takes longest.
    prompted: OnceCell<Option<Rendered>>,
}

impl Turn<'_> {
    fn ranges(&self) -> Vec<Range<usize>> {
        let runs = self.runs();
        let is_blank = |run: &Range<usize>| self.whole.text[run.clone()].trim().is_empty();
        let (Some(first), Some(last)) = (runs.first(), runs.last()) else { return Vec::new() };
        if runs.iter().all(is_blank) {
            return Vec::new();
        }
        if self.is_answer() {
            let holds = |block: &&Range<usize>| runs.iter().any(|run| block.start < run.end && run.start < block.end);
            let blocks: Vec<Range<usize>> = self.whole.blocks.iter().filter(holds).cloned().collect();
            if !blocks.is_empty() {
                return blocks;
            }
        }
        let start = self.start(first.start);
        let mut ranges: Vec<Range<usize>> = runs
            .iter()
            .map(|run| run.start..if run == last { self.end(run.end) } else { self.inner_end(run.end) })
            .collect();
        ranges[0].start = start;
        ranges
    }

    fn is_answer(&self) -> bool {
        self.conversation.messages[self.idx].role() == "assistant"
    }

    /// From the first to the last byte of the message; several ranges if other messages are in between.
    fn runs(&self) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        let mut is_open = false;
        for origin in self.whole.origins.iter().filter(|origin| !self.is_speaker(origin)) {
            let is_own = origin.of.message == self.idx;
            match runs.last_mut() {
                Some(run) if is_own && is_open => run.end = origin.bytes.end,
                _ if is_own => runs.push(origin.bytes.clone()),
                _ => {}
            }
            is_open = is_own;
        }
        runs
    }

    /// Whether these bytes name the one who speaks in this turn.
    fn is_speaker(&self, origin: &Origin) -> bool {
        let field = self.whole.fields[origin.of.message][origin.of.field].as_str();
        origin.of.message == self.idx && SPEAKER_FIELDS.contains(&field)
    }

    /// Where the turn begins whose message begins at `told`.
    fn start(&self, told: usize) -> usize {
        let before = last_origin(&self.whole.origins, told);
        let zone_start = before.map_or(0, |origin| origin.bytes.end);
        let zone = &self.whole.text[zone_start..told];
        let opening = match self.is_answer() {
            true => zone_start + self.opening(zone, before.map(|origin| origin.of.message), told),
            false => told,
        };
        // What the loop printed for earlier messages is no part of this turn.
        let own = self.printed().filter(|range| range.contains(&told) || range.end == told);
        let from = own.map_or(zone_start, |range| range.start.max(zone_start));
        // Most vocabularies join a space to the word after it; that token belongs to the word.
        from + self.whole.text[from..opening.max(from)].trim_end_matches(' ').len()
    }

    /// How many bytes of `zone`, which is what the template prints between the message `before` and this one, open the turn.
    fn opening(&self, zone: &str, before: Option<usize>, told: usize) -> usize {
        if self.prompted().is_none() {
            return self.plain_opening().map_or(zone.len(), |plain| shared_opening(zone, &plain).0);
        }
        let shared = self.prompt(before).map(|prompt| shared_opening(zone, &prompt));
        if let Some((len, true)) = shared {
            return len;
        }
        // Where earlier messages end differently before a prompt, what the loop prints for this turn is compared with the prompt alone.
        let own = self.printed().map(|range| range.start).filter(|start| (told - zone.len()..=told).contains(start));
        if let (Some(start), Some(prompt)) = (own, self.prompt_after_loop()) {
            let own = &self.whole.text[start..told];
            let (len, is_whole) = shared_opening(own, &prompt);
            if is_whole && !prompt.trim().is_empty() {
                return zone.len() - own.len() + len;
            }
        }
        shared.map_or(zone.len(), |(len, _)| len)
    }

    /// What the template prints after message `before` where this answer would begin, if it asks for answers at all.
    fn prompt(&self, before: Option<usize>) -> Option<String> {
        let before = before?;
        let prompted = self.prompted()?;
        let last = prompted.origins.last()?;
        (last.of.message == before).then(|| prompted.text[last.bytes.end..].to_owned())
    }

    /// The generation prompt alone, if the template loops over messages.
    fn prompt_after_loop(&self) -> Option<String> {
        let prompted = self.prompted()?;
        let (_, last) = prompted.turns.last()?;
        Some(prompted.text[last.end..].to_owned())
    }

    /// The conversation before this turn with a generation prompt, if that makes a difference.
    fn prompted(&self) -> Option<&Rendered> {
        self.prompted.get_or_init(|| self.rendered_with_prompt()).as_ref()
    }

    fn rendered_with_prompt(&self) -> Option<Rendered> {
        // Many templates access the first message, so the empty conversation is never rendered.
        if self.idx == 0 || !self.template.mentions("add_generation_prompt") {
            return None;
        }
        let earlier = self.conversation.upto(self.idx);
        let prompted = self.template.render_parts(&earlier, true).ok()?;
        let plain = self.template.render_parts(&earlier, false);
        (!plain.is_ok_and(|plain| plain.text == prompted.text)).then_some(prompted)
    }

    /// What the template prints before this answer if it is nothing but a short text.
    fn plain_opening(&self) -> Option<String> {
        let mut plain = self.conversation.clone();
        plain.messages[self.idx] = Message::new(plain.messages[self.idx].role(), "x");
        let rendered = self.template.render_parts(&plain, false).ok()?.with_first_origins();
        let told = rendered.origins.iter().find(|origin| origin.of.message == self.idx)?.bytes.start;
        let before = last_origin(&rendered.origins, told).map_or(0, |origin| origin.bytes.end);
        Some(rendered.text[before..told].to_owned())
    }

    /// What the loop over the messages printed for this one.
    fn printed(&self) -> Option<Range<usize>> {
        self.whole.turns.iter().find(|(message, _)| *message == self.idx).map(|(_, range)| range.clone())
    }

    /// Where the turn ends whose message ends at `told`.
    fn end(&self, told: usize) -> usize {
        let text = &self.whole.text;
        let (limit, is_last) = self.limit(told);
        let eos_after = |at: usize| {
            let rest = &text[at..limit];
            let eos = Some(self.template.eos()).filter(|eos| !eos.is_empty() && rest.trim_start().starts_with(eos));
            eos.map(|eos| at + rest.len() - rest.trim_start().len() + eos.len())
        };
        let own = self.printed().map(|range| range.end).filter(|end| (told..=limit).contains(end));
        // Without a loop over messages, the last turn has the rest of the text.
        let tail = own.or(is_last.then_some(limit)).map(|end| &text[told..end]).unwrap_or_default();
        match (tail.trim_end().len(), is_last) {
            (0, true) => eos_after(told).or_else(|| self.closing_mark(told)).unwrap_or(told + tail.len()),
            (0, false) => match self.inner_end(told) {
                end if end > told => end,
                _ => told + tail.len(),
            },
            // A token that ends the text after the loop, where the template has one there.
            (len, true) => eos_after(told + len).unwrap_or(told + len),
            (len, false) => told + len,
        }
    }

    /// The end of the mark that the template prints behind the loop for the last turn, where it ends the others when the next one
    /// begins: the only word there, in brackets, and none that opens turns.
    fn closing_mark(&self, told: usize) -> Option<usize> {
        let rest = &self.whole.text[told..];
        let mark = rest.trim();
        let is_mark = mark.starts_with(['<', '[']) && !mark.contains(char::is_whitespace);
        let opens_turns =
            self.whole.origins.iter().any(|origin| self.whole.text[..origin.bytes.start].trim_end().ends_with(mark));
        (is_mark && !opens_turns).then(|| told + rest.trim_end().len())
    }

    /// Where the next message begins after `told`, or the text ends, and whether it does.
    fn limit(&self, told: usize) -> (usize, bool) {
        let origins = &self.whole.origins;
        let next = origins.get(origins.partition_point(|origin| origin.bytes.start < told));
        (next.map_or(self.whole.text.len(), |origin| origin.bytes.start), next.is_none())
    }

    /// The end of what the template also prints after `told` if the conversation ends with this message.
    fn inner_end(&self, told: usize) -> usize {
        let tail = &self.whole.text[told..self.limit(told).0];
        let earlier = self.conversation.upto(self.idx + 1);
        let (Ok(last), Some(own)) =
            (self.template.render_parts(&earlier, false), last_origin(&self.whole.origins, told))
        else {
            return told;
        };
        let is_same = |origin: &&Origin| origin.of == own.of && origin.source == own.source;
        let Some(same) = last.origins.iter().find(is_same) else { return told };
        let ending = &last.text[same.bytes.end..];
        let common = common_prefix(tail, ending);
        let whole = if common == ending.len() { common } else { whole_words(&tail[..common]) };
        told + tail[..whole].trim_end().len()
    }
}

/// The last origin that ends at or before `at`.
fn last_origin(origins: &[Origin], at: usize) -> Option<&Origin> {
    origins[..origins.partition_point(|origin| origin.bytes.end <= at)].last()
}

/// How many bytes of `zone` are also printed where a turn is `opened`, and whether that is all of one of them. Blanks count as one:
/// blocks of a template leave them around what they print, more after one turn than after another.
fn shared_opening(zone: &str, opened: &str) -> (usize, bool) {
    let (mut at, mut other) = (0, 0);
    let blanks = |text: &str| text.len() - text.trim_start().len();
    loop {
        let (zone_blanks, opened_blanks) = (blanks(&zone[at..]), blanks(&opened[other..]));
        let both = &zone[at..at + zone_blanks];
        let (rest, opened_rest) = (&zone[at + zone_blanks..], &opened[other + opened_blanks..]);
        match (rest.chars().next(), opened_rest.chars().next()) {
            (None, _) => return (zone.len(), true),
            (_, None) => return (at + common_prefix(both, &opened[other..]), true),
            (Some(a), Some(b)) if a == b && (zone_blanks > 0) == (opened_blanks > 0) => {
                at += zone_blanks + a.len_utf8();
                other += opened_blanks + b.len_utf8();
            }
            _ => return (whole_words(&zone[..at + common_prefix(both, &opened[other..])]), false),
        }
    }
}

/// The bytes of `text` without a last word or tag that may continue differently.
fn whole_words(text: &str) -> usize {
    text.rfind(['\n', '>', ']', '}', ':', ' ']).map_or(0, |at| at + 1)
}

fn common_prefix(a: &str, b: &str) -> usize {
    a.char_indices().zip(b.chars()).find(|((_, x), y)| x != y).map_or(a.len().min(b.len()), |((at, _), _)| at)
}

#[cfg(test)]
#[path = "chat_spans_tests.rs"]
mod tests;
