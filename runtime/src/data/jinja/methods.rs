//! The methods of Python's `str`, `list`, `tuple`, `dict` and numbers that do not change their value: the sandbox of
//! transformers forbids the others.

use std::rc::Rc;

use super::arguments::Args;
use super::budget::Budget;
use super::error::Error;
use super::str_methods;
use super::value::{Dict, Number, Value, equal};

const LIST: [&str; 3] = ["copy", "count", "index"];
const TUPLE: [&str; 2] = ["count", "index"];
const DICT: [&str; 5] = ["copy", "get", "items", "keys", "values"];
const INT: [&str; 3] = ["bit_count", "bit_length", "is_integer"];
const FLOAT: [&str; 1] = ["is_integer"];
/// Methods that change their value.
const FORBIDDEN: [&str; 11] =
    ["append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update"];

/// The method `name` of a value, by the name that the program knows.
pub(super) fn find(value: &Value, name: &str) -> Option<&'static str> {
    let known: &[&'static str] = match value {
        Value::Str(_) => &str_methods::NAMES,
        Value::List(_) => &LIST,
        Value::Tuple(_) | Value::Range(_) => &TUPLE,
        Value::Dict(_) => &DICT,
        Value::Int(_) | Value::Bool(_) => &INT,
        Value::Float(_) => &FLOAT,
        _ => &[],
    };
    known.iter().copied().find(|known| *known == name)
}

/// The sentence that the use of a method gives that changes its value.
pub(super) fn forbidden(value: &Value, name: &str) -> Option<String> {
    let is_mutable = matches!(value, Value::List(_) | Value::Dict(_));
    (is_mutable && FORBIDDEN.contains(&name))
        .then(|| format!("the method {name} would change a {}, which chat templates may not", value.kind()))
}

/// Calls a method that [`find`] found.
pub(super) fn call(budget: &Budget, value: &Value, name: &'static str, args: &Args) -> Result<Value, Error> {
    match value {
        Value::Str(text) => str_methods::call(budget, text, name, args),
        Value::Dict(dict) => of_dict(budget, dict, name, args),
        Value::List(items) if name == "copy" => {
            args.bind::<0>(name, [])?;
            Ok(Value::List(Rc::clone(items)))
        }
        Value::List(_) | Value::Tuple(_) | Value::Range(_) => of_sequence(budget, value, name, args),
        _ => of_number(value, name, args),
    }
}

fn of_dict(budget: &Budget, dict: &Rc<Dict>, name: &'static str, args: &Args) -> Result<Value, Error> {
    budget.items(dict.entries().len())?;
    let view = |kind, items: Vec<Value>| Value::View(kind, Rc::new(items));
    if name == "get" {
        let bound = args.bind(name, ["key", "default"])?;
        let found = dict.get(bound.required(0)?).or(bound.get(1));
        return Ok(found.cloned().unwrap_or(Value::None));
    }
    args.bind::<0>(name, [])?;
    let entries = dict.entries().iter();
    Ok(match name {
        "items" => {
            let pair = |(key, value): &(Value, Value)| Value::Tuple(Rc::new(vec![key.clone(), value.clone()]));
            view("dict_items", entries.map(pair).collect())
        }
        "keys" => view("dict_keys", entries.map(|(key, _)| key.clone()).collect()),
        "values" => view("dict_values", entries.map(|(_, value)| value.clone()).collect()),
        _ => {
            let mut copy = Dict::clone(dict);
            copy.message = None;
            Value::Dict(Rc::new(copy))
        }
    })
}

fn of_sequence(budget: &Budget, value: &Value, name: &'static str, args: &Args) -> Result<Value, Error> {
    let bound = args.bind(name, ["value", "start", "stop"])?;
    let wanted = bound.required(0)?;
    let items = value.items(budget)?;
    let len = items.len() as i128;
    let at = |bound: i128| (if bound < 0 { bound + len } else { bound }).clamp(0, len) as usize;
    let (start, stop) = (at(bound.int(1, 0)?), at(bound.int(2, len)?));
    let mut n = 0;
    for (idx, item) in items.iter().enumerate() {
        if equal(budget, item, wanted)? {
            if name == "index" && (start..stop).contains(&idx) {
                return Ok(Value::Int(idx as i128));
            }
            n += 1;
        }
    }
    match name {
        "count" => Ok(Value::Int(n)),
        _ => Err(Error::new("the method index does not find the value in the list")),
    }
}

fn of_number(value: &Value, name: &'static str, args: &Args) -> Result<Value, Error> {
    args.bind::<0>(name, [])?;
    let number = value.number().ok_or_else(|| Error::new(format!("a {} has no method {name}", value.kind())))?;
    Ok(match (name, number) {
        ("is_integer", Number::Float(number)) => Value::Bool(number.fract() == 0.0),
        ("bit_count", Number::Int(number)) => Value::Int(i128::from(number.unsigned_abs().count_ones())),
        ("bit_length", Number::Int(number)) => Value::Int(i128::from(128 - number.unsigned_abs().leading_zeros())),
        _ => Value::Bool(true),
    })
}
