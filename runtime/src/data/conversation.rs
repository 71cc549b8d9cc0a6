//! Reads conversations from the records of a data file, and decides which parts of them are trained on.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Mutex;

use serde_json::{Map, Value};

use super::chat_spans::{RenderedChat, end_of_prompt, render_for_training};
use super::chat_template::{ChatTemplate, ChatTemplateError, Conversation, Message};
use super::config::{ConversationConfig, MarkerConfig};
use super::document::Document;
use super::exact_json;
use super::function_calls;
use super::loss_weights;
use super::prompt_completion::{self, parsed, parsed_object};
use super::record_error::{RecordError, field_of, type_name, wrong_type};
use super::thinking;
use super::training_parts::{self, Span, TrainingPart};
use crate::config::datasets::{EndTraining, TrainedRoles};

/// Fields that carry what the model reads or answers: a template that does not render them would train on another conversation.
const CONTENT_FIELDS: [&str; 3] = ["reasoning_content", "tool_calls", function_calls::ROLE];

/// Roles whose turns are no answers, beside those that a template names and those of the data set's configuration.
const KNOWN_ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Fields of a record with what its conversation is about, by the names that `datasets` and TRL give them.
pub(super) const MEDIA: [&str; 6] = ["image", "images", "video", "videos", "audio", "audios"];

/// Refuses a record with pictures, sounds or videos.
pub(super) fn refuse_media(record: &Value) -> Result<(), RecordError> {
    match MEDIA.into_iter().find(|field| record.get(field).is_some_and(has_contents)) {
        Some(field) => Err(RecordError::Media { field: field.to_owned() }),
        None => Ok(()),
    }
}

/// Whether a field of media has some; data sets leave it empty in conversations about texts.
fn has_contents(field: &Value) -> bool {
    match field {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => items.iter().any(has_contents),
        _ => true,
    }
}

/// How the conversations of one data set are read.
#[derive(Debug)]
pub(crate) struct ConversationReader {
    template: ChatTemplate,
    config: ConversationConfig,
    /// The data set's name of each field of a message that has another name in templates.
    renamed: BTreeMap<String, String>,
    train_on_inputs: bool,
    /// Whether messages may count in part.
    weighs: bool,
    /// All of them if there is no set.
    trained_roles: Option<BTreeSet<String>>,
    /// Marks that end a turn, and when they are trained on.
    markers: Vec<(String, EndTraining)>,
    /// Fields that are already reported as unused.
    reported: Mutex<BTreeSet<String>>,
}

impl ConversationReader {
    pub(crate) fn new(config: &ConversationConfig, template: ChatTemplate, train_on_inputs: bool) -> Self {
        let named = |roles: &[String]| {
            roles.iter().map(|role| role_of(config, &template, role).to_owned()).map(answerer).collect()
        };
        let trained_roles = match &config.roles_to_train {
            TrainedRoles::All => None,
            TrainedRoles::Answers => Some(BTreeSet::from(["assistant".to_owned()])),
            TrainedRoles::Named(roles) => Some(named(roles)),
        };
        let renamed = config.properties.iter().map(|(property, field)| (field.clone(), property.clone())).collect();
        let MarkerConfig { eos, eot, train_on_eos, train_on_eot } = config.markers.clone();
        let eos = eos.into_iter().filter(|eos| !eot.contains(eos)).map(|token| (token, train_on_eos));
        let eot = eot.iter().cloned().map(|token| (token, train_on_eot.unwrap_or(train_on_eos)));
        let markers = eos.chain(eot).collect();
        Self {
            template,
            config: config.clone(),
            renamed,
            train_on_inputs,
            weighs: false,
            trained_roles,
            markers,
            reported: Mutex::default(),
        }
    }

    /// The same reader, of messages that may count in part.
    pub(crate) fn weighing(self, weighs: bool) -> Self {
        Self { weighs, ..self }
    }

    /// The fields with lists of turns.
    pub(crate) fn fields_of_messages(&self) -> Vec<String> {
        let pair = prompt_completion::FIELDS.map(str::to_owned);
        std::iter::once(self.config.field_messages.clone()).chain(pair).collect()
    }

    /// Whether the record describes functions that the model may call.
    pub(crate) fn has_tools(&self, record: &Value) -> bool {
        match record.get(&self.config.field_tools) {
            None | Some(Value::Null) => false,
            Some(Value::String(text)) => !matches!(text.trim(), "" | "[]" | "null"),
            Some(Value::Array(tools)) => !tools.is_empty(),
            Some(_) => true,
        }
    }

    /// The text of the conversation in `record`, and what is trained on; `None` if the record has no turns or no answer: null.
    pub(crate) fn document(&self, record: &Value) -> Result<Option<Document>, RecordError> {
        let Some(told) = self.conversation(record)? else { return Ok(None) };
        let Told { mut conversation, turns, weights: of_turns, completion } = told;
        let is_located = |idx: usize| turns[idx].is_trained() || completion.is_some_and(|first| idx >= first);
        let located: Vec<usize> = (0..turns.len()).filter(|&idx| is_located(idx)).collect();
        let chat = render_for_training(&self.template, &mut conversation, &located)?;
        let mut spans = completion.map_or(Vec::new(), |first| {
            let start = end_of_prompt(&self.template, &conversation.upto(first), &chat.text);
            completion_spans(&chat, &turns, first, start)
        });
        let mut weights = Vec::new();
        for (idx, training) in turns.iter().enumerate() {
            let own: Vec<Range<usize>> =
                chat.turns.iter().filter(|(of, _)| *of == idx).map(|(_, span)| span.clone()).collect();
            if let Some(weight) = of_turns[idx] {
                // What a template prints behind a conversation belongs to the last turn of a completion.
                let is_last = completion.is_some() && idx + 1 == turns.len();
                let end = |span: &Range<usize>| if is_last { chat.text.len() } else { span.end };
                weights.extend(own.iter().map(|span| (span.start..end(span), weight)));
            }
            match training {
                Training::Parts { .. } => {
                    let located = self.spans_of_parts(&conversation.messages[idx], training, &chat, idx, &own);
                    let located = located.ok_or(RecordError::PartsNotLocated { number: idx + 1 })?;
                    weights.extend(located.iter().filter_map(|(span, weight)| Some((span.clone(), (*weight)?))));
                    spans.extend(located.into_iter().map(|(span, _)| span));
                }
                Training::Turn(true) if completion.is_none_or(|first| idx < first) => spans.extend(own),
                Training::Turn(_) => {}
            }
        }
        spans.sort_by_key(|span| span.start);
        let trained =
            self.markers.iter().fold(spans, |spans, (marker, when)| train_on_ends(&chat.text, spans, marker, *when));
        weights.retain(|_| self.weighs);
        Ok(Some(Document { text: chat.text, trained, weights, bounded: false }))
    }

    fn conversation(&self, record: &Value) -> Result<Option<Told>, RecordError> {
        refuse_media(record)?;
        let messages = self.config.field_messages.as_str();
        let pair = record.get(messages).is_none_or(Value::is_null).then(|| prompt_completion::of(record)).flatten();
        let lists = match pair {
            Some([prompt, completion]) => {
                let [of_prompt, of_completion] = prompt_completion::FIELDS;
                vec![(of_prompt, prompt, Place::Prompt), (of_completion, completion, Place::Completion)]
            }
            None => vec![(messages, field_of(record, messages)?, Place::Conversation)],
        };
        if lists.iter().any(|(_, list, _)| list.is_null()) {
            return Ok(None);
        }
        let (mut messages, mut turns, mut weights, mut completion) = (Vec::new(), Vec::new(), Vec::new(), None);
        for (field, list, place) in lists {
            if place == Place::Completion && self.trains_whole_completions() {
                completion = Some(messages.len());
            }
            let list = parsed(list);
            for turn in list.as_array().ok_or_else(|| wrong_type(field, "a list of turns", &list))? {
                let (message, training, weight) = self.message(field, &parsed_object(turn), place)?;
                if messages.is_empty() && message.role() == "system" && self.config.drop_system_message {
                    continue;
                }
                messages.push(message);
                turns.push(training);
                weights.push(weight);
            }
        }
        if let Some(system) = self.system_beside(record, messages.first())? {
            messages.insert(0, system);
            let place = if pair.is_some() { Place::Prompt } else { Place::Conversation };
            turns.insert(0, Training::Turn(self.trains("system", place)));
            weights.insert(0, None);
            completion = completion.map(|first| first + 1);
        }
        let conversation = Conversation { messages, tools: self.tools(record)?, variables: variables(record)? };
        Ok(Some(Told { conversation, turns, weights, completion }))
    }

    /// Whether turns of this role are trained on, unless they say otherwise.
    fn trains(&self, role: &str, place: Place) -> bool {
        let is_named = || self.trained_roles.as_ref().is_none_or(|roles| roles.contains(role));
        self.train_on_inputs
            || match place {
                Place::Prompt => false,
                Place::Completion => self.trains_whole_completions() || is_named(),
                Place::Conversation => is_named(),
            }
    }

    fn trains_whole_completions(&self) -> bool {
        !matches!(self.config.roles_to_train, TrainedRoles::Named(_))
    }

    /// A system message that the record has beside the turns.
    fn system_beside(&self, record: &Value, first: Option<&Message>) -> Result<Option<Message>, RecordError> {
        const FIELD: &str = "system";
        let has_one = first.is_some_and(|message| message.role() == "system");
        match record.get(FIELD).filter(|_| !has_one && !self.config.drop_system_message) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) if text.is_empty() => Ok(None),
            Some(Value::String(text)) => Ok(Some(Message::new("system", text))),
            Some(other) => Err(wrong_type(FIELD, "text", other)),
        }
    }

    fn tools(&self, record: &Value) -> Result<Option<Value>, RecordError> {
        let tools = match record.get(&self.config.field_tools) {
            None | Some(Value::Null) => None,
            // Columns of tables cannot hold schemas of different shapes, so data sets keep them as JSON in a text.
            Some(Value::String(text)) if text.trim().is_empty() => None,
            Some(Value::String(text)) => Some(exact_json::value(text).ok_or_else(|| {
                wrong_type(
                    &self.config.field_tools,
                    "a list of tools, or such a list as JSON",
                    &Value::String(text.clone()),
                )
            })?),
            Some(tools) => Some(tools.clone()),
        };
        let tools = tools.filter(|tools| !tools.is_null()).filter(|tools| !tools.as_array().is_some_and(Vec::is_empty));
        if tools.as_ref().is_some_and(|tools| !tools.is_array()) {
            return Err(wrong_type(
                &self.config.field_tools,
                "a list of tools",
                tools.as_ref().unwrap_or(&Value::Null),
            ));
        }
        if tools.is_some() && !self.template.mentions("tools") {
            return Err(ChatTemplateError::NotRendered { field: self.config.field_tools.clone() }.into());
        }
        let tools = tools.map(with_parsed_parameters);
        Ok(if self.config.has_names_of_sharegpt() { tools.map(function_calls::framed) } else { tools })
    }

    /// A message, what of it is trained on, and how much it counts if it says so.
    fn message(&self, list: &str, turn: &Value, place: Place) -> Result<(Message, Training, Option<f32>), RecordError> {
        let Fields { mut message, flag, parts, weight } = self.fields_of(list, turn)?;
        self.check_role(turn, &mut message)?;
        if message["role"] == function_calls::ROLE {
            self.check_content(turn, &message)?;
            function_calls::into_answer(&mut message, &self.config.thinking_key)?;
            let needed =
                ["tool_calls", &self.config.thinking_key].into_iter().filter(|&name| message.contains_key(name));
            if needed.into_iter().any(|name| !self.template.renders(name)) {
                return Err(ChatTemplateError::NotRendered { field: function_calls::ROLE.to_owned() }.into());
            }
        }
        let role = message["role"].as_str().unwrap_or_default().to_owned();
        let is_trained = flag.unwrap_or_else(|| self.trains(&role, place));
        if flag.is_none() && !is_trained && place != Place::Prompt && !self.knows_role(&role) {
            return Err(RecordError::UnknownRole { role });
        }
        if self.config.split_thinking && role == "assistant" {
            thinking::split(&mut message, &self.config.thinking_key);
        }
        let thought = self.config.thinking_key.as_str();
        let thought = flagged_parts(&mut message, thought, is_trained);
        let parts = flagged_parts(&mut message, "content", is_trained).or(parts);
        self.check_content(turn, &message)?;
        let has_parts = parts.is_some() || thought.is_some();
        let training = match has_parts && (flag.is_none() || is_trained) {
            true => Training::Parts { content: parts, thought },
            false => Training::Turn(is_trained),
        };
        Ok((Message(message), training, weight))
    }

    /// The fields of a turn under the names that templates know.
    fn fields_of(&self, list: &str, turn: &Value) -> Result<Fields, RecordError> {
        let fields = turn.as_object().ok_or_else(|| wrong_type(list, "a list of objects", turn))?;
        let mut message = Map::new();
        let (mut flag, mut parts, mut weight) = (None, None, None);
        for (name, value) in fields {
            if Some(name) == self.config.field_training.as_ref() {
                flag = match value {
                    Value::Null => None,
                    Value::Bool(flag) => Some(*flag),
                    other => return Err(wrong_type(name, "true or false", other)),
                };
                continue;
            }
            if Some(name) == self.config.field_training_detail.as_ref() {
                parts = (!value.is_null()).then(|| TrainingPart::list(name, value)).transpose()?;
                continue;
            }
            // Files for OpenAI's fine-tuning leave answers out so.
            if name == "weight" && (self.weighs || self.config.field_training.is_none()) {
                weight = self.weight(value, "a message")?;
                if weight.is_some() || self.weighs {
                    continue;
                }
            }
            for part in value.as_array().into_iter().flatten() {
                self.weight(&part["weight"], "a content part")?;
            }
            let property = self.renamed.get(name).unwrap_or(name);
            // A field that the data set names for this property precedes one that has the property's own name.
            let named = self.config.properties.get(name).filter(|field| *field != name);
            if named.is_some_and(|field| fields.get(field).is_some_and(|value| !value.is_null())) {
                continue;
            }
            // Tables have every column in every row; only the content of an answer that is all calls is null on purpose.
            if value.is_null() && property != "content" || value.as_array().is_some_and(Vec::is_empty) {
                continue;
            }
            if !matches!(property.as_str(), "role" | "content") && !self.template.renders(property) {
                self.unused(name, property, value)?;
                continue;
            }
            // Columns of tables cannot hold calls with different arguments, so data sets keep them as JSON in a text.
            let value = if property == "tool_calls" { parsed(value) } else { Cow::Borrowed(value) };
            message.insert(property.clone(), value.into_owned());
        }
        let flag = if weight == Some(0.0) { Some(false) } else { flag };
        Ok(Fields { message, flag, parts, weight: weight.filter(|_| self.weighs) })
    }

    /// How much something counts, if it says so: without `loss_weights`, once or not at all.
    fn weight(&self, value: &Value, of: &str) -> Result<Option<f32>, RecordError> {
        if !self.weighs {
            let weight = value.as_f64();
            let in_part = weight.filter(|number| *number != 0.0 && *number != 1.0);
            let whole = weight.map(|number| number as f32);
            return in_part.map_or(Ok(whole), |_| Err(RecordError::Weight { weight: value.to_string() }));
        }
        (!value.is_null()).then(|| loss_weights::weight(value, || format!("`weight` of {of}"))).transpose()
    }

    /// The trained parts of a turn and its end-of-turn marker, as byte ranges of the conversation; `None` if the template prints
    /// nothing of the content.
    fn spans_of_parts(
        &self,
        message: &Message,
        training: &Training,
        chat: &RenderedChat,
        idx: usize,
        turn: &[Range<usize>],
    ) -> Option<Vec<Span>> {
        let (Training::Parts { content, thought }, Some(turn)) = (training, turn.last()) else {
            return Some(Vec::new());
        };
        let of_content = message.text().unwrap_or_default();
        let pieces = chat.pieces(idx, "content");
        if pieces.is_empty() && !of_content.trim().is_empty() {
            return None;
        }
        let whole = [TrainingPart::whole(of_content)];
        let mut spans = training_parts::spans(of_content, content.as_deref().unwrap_or(&whole), &pieces);
        if let Some(parts) = thought {
            let key = self.config.thinking_key.as_str();
            let thought = message.0.get(key).and_then(Value::as_str).unwrap_or_default();
            spans.extend(training_parts::spans(thought, parts, &chat.pieces(idx, key)));
        }
        let content_end = pieces.last().map_or(turn.end, |piece| piece.bytes.end);
        spans.extend((content_end < turn.end).then_some((content_end..turn.end, None)));
        Some(spans)
    }

    /// A message with the data set's names.
    pub(super) fn message_of(&self, role: &str, text: &str) -> Value {
        let [role_field, content] = ["role", "content"].map(|property| self.name_of(property));
        Value::Object(Map::from_iter([(role_field, role.into()), (content, text.into())]))
    }

    /// The data set's name of a field that templates call `property`.
    fn name_of(&self, property: &str) -> String {
        self.config.properties.get(property).cloned().unwrap_or_else(|| property.to_owned())
    }

    fn check_role(&self, turn: &Value, message: &mut Map<String, Value>) -> Result<(), RecordError> {
        let name_of = |property: &str| self.name_of(property);
        let role = match message.get("role") {
            None => {
                return Err(field_of(turn, &name_of("role"))
                    .map(|found| wrong_type(&name_of("role"), "text", found))
                    .unwrap_or_else(|missing| missing));
            }
            Some(Value::String(role)) => role_of(&self.config, &self.template, role).to_owned(),
            Some(other) => return Err(wrong_type(&name_of("role"), "text", other)),
        };
        message.insert("role".to_owned(), role.into());
        Ok(())
    }

    /// Whether turns of this role are known to be no answers.
    fn knows_role(&self, role: &str) -> bool {
        KNOWN_ROLES.contains(&role) || self.config.roles.contains_key(role) || self.template.names(role)
    }

    fn check_content(&self, turn: &Value, message: &Map<String, Value>) -> Result<(), RecordError> {
        let name_of = |property: &str| self.name_of(property);
        let has_calls = message.contains_key("tool_calls");
        match message.get("content") {
            Some(Value::String(_)) => Ok(()),
            Some(Value::Null) | None if has_calls => Ok(()),
            Some(Value::Array(parts)) => match parts.iter().find(|part| !part["text"].is_string()) {
                None => Ok(()),
                Some(part) => Err(RecordError::NotText {
                    kind: part["type"]
                        .as_str()
                        .unwrap_or(if part.is_string() { "string" } else { type_name(part) })
                        .to_owned(),
                }),
            },
            Some(other) => Err(wrong_type(&name_of("content"), "text", other)),
            None => field_of(turn, &name_of("content")).map(|_| ()),
        }
    }

    /// A field that the template does not mention: an error if it is part of the conversation, else reported once.
    fn unused(&self, name: &str, property: &str, value: &Value) -> Result<(), RecordError> {
        let is_empty = value.as_str().is_some_and(str::is_empty);
        if CONTENT_FIELDS.contains(&property) && !is_empty {
            return Err(ChatTemplateError::NotRendered { field: name.to_owned() }.into());
        }
        let mut reported = self.reported.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !is_empty && reported.insert(name.to_owned()) {
            tracing::warn!(field = name, "messages have a field that the chat template does not use; it is ignored");
        }
        Ok(())
    }
}

/// A conversation as a record tells it.
struct Told {
    conversation: Conversation,
    turns: Vec<Training>,
    /// How much each of them counts, if it says so.
    weights: Vec<Option<f32>>,
    /// The position of the message from which on everything is trained on.
    completion: Option<usize>,
}

/// Where in a record a turn is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Conversation,
    Prompt,
    Completion,
}

/// The role that templates know, for a role of the data set.
fn role_of<'a>(config: &'a ConversationConfig, template: &ChatTemplate, found: &'a str) -> &'a str {
    match config.role(found) {
        // LLaMA-Factory's names, unless the template has the same ones.
        "observation" if !template.names("observation") && !config.roles.contains_key("observation") => "tool",
        role => role,
    }
}

/// The role of turns with calls, once these are a field of theirs.
fn answerer(role: String) -> String {
    if role == function_calls::ROLE { "assistant".to_owned() } else { role }
}

/// From the end of the prompt, else from the message `first`, to the end of the text, without turns that say otherwise.
fn completion_spans(
    chat: &RenderedChat,
    turns: &[Training],
    first: usize,
    end_of_prompt: Option<usize>,
) -> Vec<Range<usize>> {
    let own = chat.turns.iter().filter(|(idx, _)| *idx >= first);
    let first_turn = own.clone().map(|(_, range)| range.start).min();
    let Some(start) = end_of_prompt.or(first_turn) else { return Vec::new() };
    let says_otherwise = |idx: usize| !matches!(turns[idx], Training::Turn(true));
    let holes: Vec<Range<usize>> =
        own.filter(|(idx, _)| says_otherwise(*idx)).map(|(_, range)| range.clone()).collect();
    without(start..chat.text.len(), &holes)
}

/// What a turn has.
struct Fields {
    message: Map<String, Value>,
    /// Whether it is trained on, if it says so.
    flag: Option<bool>,
    /// The parts of its content that are.
    parts: Option<Vec<TrainingPart>>,
    /// How much it counts, if it says so.
    weight: Option<f32>,
}

/// What of a message is trained on.
#[derive(Debug)]
enum Training {
    Turn(bool),
    /// Parts of the content and of the thought; all of the content if it has none.
    Parts {
        content: Option<Vec<TrainingPart>>,
        thought: Option<Vec<TrainingPart>>,
    },
}

impl Training {
    fn is_trained(&self) -> bool {
        match self {
            Self::Turn(is_trained) => *is_trained,
            Self::Parts { content, thought } => {
                content.as_ref().is_none_or(|parts| !parts.is_empty()) || thought.is_some()
            }
        }
    }
}

/// Adds or removes every occurrence of an end-of-turn marker; trained turns have theirs already.
fn train_on_ends(text: &str, spans: Vec<Range<usize>>, marker: &str, when: EndTraining) -> Vec<Range<usize>> {
    if marker.is_empty() || when == EndTraining::Turn {
        return spans;
    }
    let ends: Vec<Range<usize>> = text.match_indices(marker).map(|(at, _)| at..at + marker.len()).collect();
    let mut trained: Vec<Range<usize>> = spans.into_iter().flat_map(|span| without(span, &ends)).collect();
    match when {
        EndTraining::All => trained.extend(ends),
        EndTraining::Last => trained.extend(ends.last().cloned()),
        EndTraining::Turn | EndTraining::Never => {}
    }
    trained.sort_by_key(|span| span.start);
    trained
}

/// The parts of `span` outside of `holes`, which are in order.
fn without(span: Range<usize>, holes: &[Range<usize>]) -> Vec<Range<usize>> {
    let (mut kept, mut from) = (Vec::new(), span.start);
    for hole in holes.iter().filter(|hole| hole.start < span.end && hole.end > span.start) {
        kept.push(from..hole.start.max(from));
        from = hole.end.min(span.end);
    }
    kept.push(from..span.end);
    kept.retain(|part| !part.is_empty());
    kept
}

/// The parts of a field whose content parts have flags, which becomes their joined text.
fn flagged_parts(message: &mut Map<String, Value>, field: &str, is_trained: bool) -> Option<Vec<TrainingPart>> {
    let (text, parts) = TrainingPart::of_content(message.get(field)?.as_array()?, is_trained)?;
    message.insert(field.to_owned(), text.into());
    Some(parts)
}

/// Values of variables of the template that a record has for itself, where TRL's data sets have them.
fn variables(record: &Value) -> Result<Map<String, Value>, RecordError> {
    const FIELD: &str = "chat_template_kwargs";
    let value = record.get(FIELD).map(parsed_object);
    match value.as_deref() {
        None | Some(Value::Null) => Ok(Map::new()),
        // Tables have every column in every row, with null where a row has none.
        Some(Value::Object(variables)) => Ok(variables
            .iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect()),
        Some(other) => Err(wrong_type(FIELD, "an object with values of the template's variables", other)),
    }
}

/// Tools whose parameters are objects; data sets may keep both as JSON in a text.
fn with_parsed_parameters(mut tools: Value) -> Value {
    for tool in tools.as_array_mut().into_iter().flatten() {
        if let Some(object) = tool.as_str().and_then(exact_json::object) {
            *tool = Value::Object(object);
        }
        let Some(parameters) = tool.get_mut("function").and_then(|function| function.get_mut("parameters")) else {
            continue;
        };
        if let Some(parsed) = parameters.as_str().and_then(exact_json::object) {
            *parameters = Value::Object(parsed);
        }
    }
    tools
}

#[cfg(test)]
#[path = "conversation_tests.rs"]
mod tests;
