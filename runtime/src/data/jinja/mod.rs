//! Jinja2 as chat templates of transformers use it, with the values of Python.
//!
//! A template engine of Rust would differ from Python in what it prints, accepts and counts as empty, and every difference
//! trains another text without a word. This one is held to Jinja2's own output (`golden.json`, made by
//! `tests/reference/jinja.py`), bounds the steps, bytes and depth of a rendering, and knows of each letter which message it
//! comes from, so that answers need not be searched for in the text.
//!
//! Deliberately absent: other templates (`include`, `import`, `extends`, `block`), `autoescape`, `do` (transformers has none),
//! and what [`filters`] names.

mod arguments;
mod ast;
mod budget;
mod clock;
mod error;
mod expressions;
mod filter_names;
mod filters;
mod functions;
mod interpreter;
mod items;
mod json;
mod lexer;
mod methods;
mod operators;
mod parser;
mod percent;
mod predicates;
mod printed;
mod statements;
mod str_methods;
mod text;
mod value;

#[cfg(test)]
mod golden_tests;

use std::collections::HashSet;
use std::ops::Range;
use std::rc::Rc;

use serde_json::{Map, Value as Json};

pub(super) use clock::Clock;
pub(super) use error::Error;
use interpreter::Interpreter;
use statements::{Flow, Output, Root};
use text::Field;
pub(super) use text::Origin;
use value::{Dict, Scope, Value};

/// Fields of a message that may be in the opening of its turn, and are no part of what it tells.
const HEADER_FIELDS: [&str; 3] = ["role", "id", "tool_call_id"];

/// A parsed template.
#[derive(Debug)]
pub(super) struct Template {
    statements: Vec<ast::Statement>,
    does_without_clock: bool,
}

/// The text of a conversation, and where its parts are.
#[derive(Debug)]
pub(super) struct Rendered {
    pub(super) text: String,
    /// Bytes that come from messages, in order.
    pub(super) origins: Vec<Origin>,
    /// The names of each message's fields.
    pub(super) fields: Vec<Vec<String>>,
    /// What the body of a loop over messages printed for each of them, in order.
    pub(super) turns: Vec<(usize, Range<usize>)>,
    /// What `generation` blocks printed, in order.
    pub(super) blocks: Vec<Range<usize>>,
}

impl Rendered {
    /// Without the origins of what is printed again: a template that repeats the name of a called function beside the function's
    /// answer only refers to the call.
    #[must_use]
    pub(super) fn with_first_origins(mut self) -> Self {
        let mut seen = HashSet::new();
        self.origins.retain(|origin| seen.insert((origin.of, origin.source.clone())));
        self
    }
}

impl Template {
    /// # Errors
    /// When the source is not valid Jinja2.
    pub(super) fn parse(source: &str) -> Result<Self, Error> {
        Ok(Self { statements: parser::parse(source)?, does_without_clock: source.contains("strftime_now is defined") })
    }

    /// The text for the messages and variables.
    ///
    /// # Errors
    /// When the template refuses, uses something that Python would refuse, or takes more than it may.
    pub(super) fn render(
        &self,
        messages: &[&Map<String, Json>],
        variables: &[(&str, &Json)],
        clock: Clock,
    ) -> Result<Rendered, Error> {
        let interpreter = Interpreter::default();
        // A template that can do without a clock has a date of its own.
        interpreter.clock.set((clock == Clock::Local || !self.does_without_clock).then_some(clock));
        let scope = Rc::new(Scope::default());
        for (name, value) in variables {
            scope.set(name, Value::of_json(value));
        }
        let values = messages.iter().enumerate().map(|(idx, fields)| message(fields, idx));
        scope.set("messages", Value::list(values.collect()));
        let mut out = Output { root: Some(Root::default()), ..Output::default() };
        match interpreter.run(&self.statements, &scope, &mut out)? {
            Flow::Next => {}
            Flow::Break | Flow::Continue => return Err(Error::new("break or continue outside of a loop")),
        }
        let (text, origins) = out.text.into_parts();
        let Root { turns, blocks, .. } = out.root.unwrap_or_default();
        let fields = messages.iter().map(|fields| fields.keys().cloned().collect()).collect();
        Ok(Rendered { text, origins, fields, turns, blocks })
    }
}

/// A message, whose texts know where they come from.
fn message(fields: &Map<String, Json>, idx: usize) -> Value {
    let mut dict = Dict::default();
    for (field, (key, value)) in fields.iter().enumerate() {
        let is_told = !HEADER_FIELDS.contains(&key.as_str());
        let value = Value::of_json_in(value, &mut is_told.then_some(Field { message: idx, field, text: 0 }));
        dict.insert(Value::text(key), value).expect("a text can be a key");
    }
    dict.message = Some(idx);
    Value::Dict(Rc::new(dict))
}
