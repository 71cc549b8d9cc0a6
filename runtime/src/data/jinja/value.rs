//! The values of a template, with Python's ideas of truth, equality and order.

use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use serde_json::Value as Json;

use super::ast::{ForLoop, Macro};
use super::budget::Budget;
use super::error::Error;
use super::text::{Field, Text};
use crate::data::exact_json;

#[derive(Debug, Clone)]
pub(super) enum Value {
    /// A name or attribute that is not there, with the sentence that using it gives.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    /// An integer of the data beyond 128 bits, which is only printed.
    LongInt(Rc<str>),
    Str(Text),
    List(Rc<Vec<Value>>),
    Tuple(Rc<Vec<Value>>),
    Dict(Rc<Dict>),
    /// `dict.items()` and its like, with Python's name.
    View(&'static str, Rc<Vec<Value>>),
    Range(Range),
    /// What filters such as `map` give, which can be read once.
    Generator(Rc<RefCell<VecDeque<Value>>>),
    Namespace(Rc<RefCell<Dict>>),
    Callable(Rc<Callable>),
}

/// Something that can be called.
#[derive(Debug)]
pub(super) enum Callable {
    Function(&'static str),
    Method(Value, &'static str),
    Macro(Arc<Macro>, Weak<Scope>),
    Loop(Loop),
    Cycler(Vec<Value>, Cell<usize>),
    Joiner(Text, Cell<bool>),
}

/// The variable `loop` of a `for` block.
#[derive(Debug)]
pub(super) struct Loop {
    pub(super) items: Rc<Vec<Value>>,
    pub(super) index: Cell<usize>,
    pub(super) depth: usize,
    pub(super) last_changed: RefCell<Option<Vec<Value>>>,
    /// What a recursive loop runs again.
    pub(super) recursive: Option<(Arc<ForLoop>, Weak<Scope>)>,
}

/// Variables of a block, and those around it.
#[derive(Debug, Default)]
pub(super) struct Scope {
    variables: RefCell<Vec<(String, Value)>>,
    parent: Option<Rc<Scope>>,
}

impl Scope {
    pub(super) fn within(parent: &Rc<Self>) -> Rc<Self> {
        Rc::new(Self { variables: RefCell::default(), parent: Some(Rc::clone(parent)) })
    }

    pub(super) fn set(&self, name: &str, value: Value) {
        let mut variables = self.variables.borrow_mut();
        match variables.iter_mut().find(|(known, _)| known == name) {
            Some((_, old)) => *old = value,
            None => variables.push((name.to_owned(), value)),
        }
    }

    pub(super) fn get(&self, name: &str) -> Option<Value> {
        let mut scope = Some(self);
        while let Some(current) = scope {
            if let Some((_, value)) = current.variables.borrow().iter().find(|(known, _)| known == name) {
                return Some(value.clone());
            }
            scope = current.parent.as_deref();
        }
        None
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: i128,
    pub(super) step: i128,
    pub(super) len: usize,
}

impl Range {
    pub(super) fn get(self, idx: usize) -> Value {
        Value::Int(self.start + self.step * idx as i128)
    }
}

/// Keys and values in the order of insertion.
#[derive(Debug, Clone, Default)]
pub(super) struct Dict {
    entries: Vec<(Value, Value)>,
    /// Positions of the keys that are texts, once there are many.
    by_text: HashMap<Arc<str>, usize>,
    /// The message of the conversation that this is.
    pub(super) message: Option<usize>,
}

/// Entries from which on keys are found by their hash.
const HASHED_FROM: usize = 12;

impl Dict {
    pub(super) fn entries(&self) -> &[(Value, Value)] {
        &self.entries
    }

    pub(super) fn get(&self, key: &Value) -> Option<&Value> {
        match key {
            Value::Str(text) => self.get_text(text.as_str()),
            _ => self.entries.iter().find(|(known, _)| same_key(known, key)).map(|(_, value)| value),
        }
    }

    pub(super) fn get_text(&self, key: &str) -> Option<&Value> {
        Some(&self.entries[self.position(key)?].1)
    }

    fn position(&self, key: &str) -> Option<usize> {
        match self.entries.len() < HASHED_FROM {
            true => {
                self.entries.iter().position(|(known, _)| matches!(known, Value::Str(text) if text.as_str() == key))
            }
            false => self.by_text.get(key).copied(),
        }
    }

    /// Sets a key, which must be hashable.
    pub(super) fn insert(&mut self, key: Value, value: Value) -> Result<(), Error> {
        let known = match &key {
            Value::Str(text) => self.position(text.as_str()),
            Value::List(_) | Value::Dict(_) => {
                return Err(Error::new(format!("a {} cannot be the key of an object", key.kind())));
            }
            _ => self.entries.iter().position(|(known, _)| same_key(known, &key)),
        };
        match known {
            Some(at) => self.entries[at].1 = value,
            None => {
                self.entries.push((key, value));
                let new = if self.entries.len() == HASHED_FROM { 0 } else { self.entries.len() - 1 };
                if self.entries.len() >= HASHED_FROM {
                    for at in new..self.entries.len() {
                        if let Value::Str(text) = &self.entries[at].0 {
                            self.by_text.insert(text.as_str().into(), at);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Keys are numbers, texts and what is only equal to itself, so no budget is needed to compare them.
fn same_key(a: &Value, b: &Value) -> bool {
    equal(&Budget::default(), a, b).unwrap_or(false)
}

impl Value {
    pub(super) fn text(text: &str) -> Self {
        Self::Str(Text::new(text))
    }

    pub(super) fn list(items: Vec<Self>) -> Self {
        Self::List(Rc::new(items))
    }

    pub(super) fn generator(items: Vec<Self>) -> Self {
        Self::Generator(Rc::new(RefCell::new(items.into())))
    }

    pub(super) fn undefined(sentence: impl Into<Rc<str>>) -> Self {
        Self::Undefined(sentence.into())
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    /// JSON.
    pub(super) fn of_json(json: &Json) -> Self {
        Self::of_json_in(json, &mut None)
    }

    /// JSON, whose texts come from a field of a message: `of` is the next one.
    pub(super) fn of_json_in(json: &Json, of: &mut Option<Field>) -> Self {
        let text = |text: &str, of: &mut Option<Field>| match of {
            None => Text::new(text),
            Some(field) => {
                let own = Text::of_field(text, *field);
                field.text += 1;
                own
            }
        };
        match json {
            Json::Null => Self::None,
            Json::Bool(flag) => Self::Bool(*flag),
            Json::Number(number) => Self::of_number(&number.to_string()),
            Json::String(string) => Self::Str(text(string, of)),
            Json::Array(items) => Self::list(items.iter().map(|item| Self::of_json_in(item, of)).collect()),
            Json::Object(_) if exact_json::number(json).is_some() => {
                Self::of_number(exact_json::number(json).unwrap_or_default())
            }
            Json::Object(fields) => {
                let mut dict = Dict::default();
                for (key, value) in fields {
                    let key = Self::Str(text(key, of));
                    let value = Self::of_json_in(value, of);
                    dict.insert(key, value).expect("a text can be a key");
                }
                Self::Dict(Rc::new(dict))
            }
        }
    }

    fn of_number(text: &str) -> Self {
        if let Ok(number) = text.parse() {
            return Self::Int(number);
        }
        match text.bytes().all(|b| b.is_ascii_digit() || b == b'-') {
            true => Self::LongInt(text.into()),
            false => Self::Float(text.parse().unwrap_or(f64::NAN)),
        }
    }

    /// Python's name of the type.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "undefined value",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) | Self::LongInt(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::View(name, _) => name,
            Self::Range(_) => "range",
            Self::Generator(_) => "generator",
            Self::Namespace(_) => "namespace",
            Self::Callable(_) => "function",
        }
    }

    pub(super) fn is_true(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(flag) => *flag,
            Self::Int(number) => *number != 0,
            Self::Float(number) => *number != 0.0,
            Self::Str(text) => !text.as_str().is_empty(),
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => !items.is_empty(),
            Self::Dict(dict) => !dict.entries.is_empty(),
            Self::Range(range) => range.len > 0,
            Self::LongInt(_) | Self::Generator(_) | Self::Namespace(_) | Self::Callable(_) => true,
        }
    }

    /// Python's `len`.
    pub(super) fn len(&self) -> Option<usize> {
        match self {
            Self::Undefined(_) => Some(0),
            Self::Str(text) => Some(text.as_str().chars().count()),
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => Some(items.len()),
            Self::Dict(dict) => Some(dict.entries.len()),
            Self::Range(range) => Some(range.len),
            Self::Callable(callable) => match &**callable {
                Callable::Loop(own) => Some(own.items.len()),
                _ => None,
            },
            _ => None,
        }
    }

    /// The items that a loop over the value visits.
    pub(super) fn items(&self, budget: &Budget) -> Result<Rc<Vec<Self>>, Error> {
        budget.items(self.len().unwrap_or(1))?;
        Ok(match self {
            Self::Undefined(_) => Rc::default(),
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => Rc::clone(items),
            Self::Str(text) => {
                let letters = text.as_str().char_indices();
                Rc::new(letters.map(|(at, c)| Self::Str(text.slice(at..at + c.len_utf8()))).collect())
            }
            Self::Dict(dict) => Rc::new(dict.entries.iter().map(|(key, _)| key.clone()).collect()),
            Self::Range(range) => Rc::new((0..range.len).map(|idx| range.get(idx)).collect()),
            Self::Generator(items) => {
                let items = std::mem::take(&mut *items.borrow_mut());
                budget.items(items.len())?;
                Rc::new(items.into())
            }
            _ => return Err(Error::new(format!("a value of type {} has no items to visit", self.kind()))),
        })
    }

    /// The number that a number or truth value is.
    pub(super) fn number(&self) -> Option<Number> {
        match self {
            Self::Bool(flag) => Some(Number::Int(i128::from(*flag))),
            Self::Int(number) => Some(Number::Int(*number)),
            Self::Float(number) => Some(Number::Float(*number)),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    pub(super) fn float(self) -> f64 {
        match self {
            Self::Int(number) => number as f64,
            Self::Float(number) => number,
        }
    }

    fn compare(self, other: Self) -> Option<Ordering> {
        match (self, other) {
            (Self::Int(a), Self::Int(b)) => Some(a.cmp(&b)),
            (a, b) => a.float().partial_cmp(&b.float()),
        }
    }
}

/// Python's `==`.
pub(super) fn equal(budget: &Budget, a: &Value, b: &Value) -> Result<bool, Error> {
    budget.step(1)?;
    if let (Some(a), Some(b)) = (a.number(), b.number()) {
        return Ok(a.compare(b) == Some(Ordering::Equal));
    }
    match (a, b) {
        (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => Ok(true),
        (Value::LongInt(a), Value::LongInt(b)) => Ok(a == b),
        (Value::Str(a), Value::Str(b)) => Ok(a == b),
        (Value::Range(a), Value::Range(b)) => Ok(a == b),
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
            Ok(Rc::ptr_eq(a, b) || all_equal(budget, a, b)?)
        }
        (Value::Dict(a), Value::Dict(b)) => {
            if Rc::ptr_eq(a, b) {
                return Ok(true);
            }
            if a.entries.len() != b.entries.len() {
                return Ok(false);
            }
            for (key, value) in &a.entries {
                let same = match b.get(key) {
                    Some(other) => budget.nested(|| equal(budget, value, other))?,
                    None => false,
                };
                if !same {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        (Value::Generator(a), Value::Generator(b)) => Ok(Rc::ptr_eq(a, b)),
        (Value::Namespace(a), Value::Namespace(b)) => Ok(Rc::ptr_eq(a, b)),
        (Value::Callable(a), Value::Callable(b)) => Ok(Rc::ptr_eq(a, b)),
        (Value::View("dict_keys", a), Value::View("dict_keys", b)) => all_equal(budget, a, b),
        _ => Ok(false),
    }
}

fn all_equal(budget: &Budget, a: &[Value], b: &[Value]) -> Result<bool, Error> {
    if a.len() != b.len() {
        return Ok(false);
    }
    for (a, b) in a.iter().zip(b) {
        if !budget.nested(|| equal(budget, a, b))? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Python's order; `None` between numbers of which one is none.
pub(super) fn compare(budget: &Budget, a: &Value, b: &Value) -> Result<Option<Ordering>, Error> {
    budget.step(1)?;
    if let (Some(a), Some(b)) = (a.number(), b.number()) {
        return Ok(a.compare(b));
    }
    match (a, b) {
        (Value::Str(a), Value::Str(b)) => Ok(Some(a.as_str().cmp(b.as_str()))),
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
            for (a, b) in a.iter().zip(b.iter()) {
                if !budget.nested(|| equal(budget, a, b))? {
                    return budget.nested(|| compare(budget, a, b));
                }
            }
            Ok(Some(a.len().cmp(&b.len())))
        }
        (Value::Undefined(sentence), _) | (_, Value::Undefined(sentence)) => Err(Error::new(&**sentence)),
        _ => Err(Error::new(format!("values of type {} and {} have no order", a.kind(), b.kind()))),
    }
}

/// Python's `in`.
pub(super) fn contains(budget: &Budget, container: &Value, item: &Value) -> Result<bool, Error> {
    match (container, item) {
        (Value::Str(text), Value::Str(part)) => {
            budget.step(text.as_str().len() / 256)?;
            Ok(text.as_str().contains(part.as_str()))
        }
        (Value::Str(_), Value::Undefined(sentence)) => Err(Error::new(&**sentence)),
        (Value::Str(_), other) => Err(Error::new(format!("a text cannot contain a value of type {}", other.kind()))),
        (Value::Dict(dict), key) => {
            budget.step(1)?;
            match key {
                Value::List(_) | Value::Dict(_) => Err(Error::new(format!("a {} cannot be a key", key.kind()))),
                _ => Ok(dict.get(key).is_some()),
            }
        }
        (container, item) => {
            for candidate in container.items(budget)?.iter() {
                if equal(budget, candidate, item)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
    }
}
