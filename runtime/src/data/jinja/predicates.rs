//! The tests of Jinja2 after `is`. Source: `jinja2/tests.py`.

use std::cmp::Ordering;
use std::rc::Rc;

use super::arguments::Args;
use super::ast::Binary;
use super::budget::Budget;
use super::error::Error;
use super::filter_names;
use super::operators::binary;
use super::printed::str_of;
use super::value::{Callable, Value, compare, contains, equal};

const NAMES: [&str; 39] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

/// Whether the test `name` holds for `value`.
pub(super) fn holds(budget: &Budget, name: &str, value: &Value, args: &Args) -> Result<bool, Error> {
    match name {
        "divisibleby" | "sameas" | "in" | "eq" | "equalto" | "==" | "ne" | "!=" | "gt" | "greaterthan" | ">" | "ge"
        | ">=" | "lt" | "lessthan" | "<" | "le" | "<=" => {
            let bound = args.bind(name, ["other"])?;
            with_other(budget, name, value, bound.required(0)?)
        }
        _ if NAMES.contains(&name) => {
            args.bind::<0>(name, [])?;
            alone(budget, name, value)
        }
        _ => Err(Error::new(format!("the test {name:?} is not known to chat templates"))),
    }
}

fn alone(budget: &Budget, name: &str, value: &Value) -> Result<bool, Error> {
    let remainder = |by| match binary(budget, Binary::Mod, value, &Value::Int(2)) {
        Ok(rest) => equal(budget, &rest, &Value::Int(by)),
        Err(error) => Err(error),
    };
    Ok(match name {
        "odd" => remainder(1)?,
        "even" => remainder(0)?,
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "filter" => matches!(value, Value::Str(text) if filter_names::NAMES.contains(&text.as_str())),
        "test" => matches!(value, Value::Str(text) if NAMES.contains(&text.as_str())),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "false" => matches!(value, Value::Bool(false)),
        "true" => matches!(value, Value::Bool(true)),
        "integer" => matches!(value, Value::Int(_) | Value::LongInt(_)),
        "float" => matches!(value, Value::Float(_)),
        "lower" | "upper" => {
            let text = str_of(budget, value)?;
            let letters = || text.as_str().chars();
            match name {
                "lower" => letters().any(char::is_lowercase) && !letters().any(char::is_uppercase),
                _ => letters().any(char::is_uppercase) && !letters().any(char::is_lowercase),
            }
        }
        "string" => matches!(value, Value::Str(_)),
        "mapping" => matches!(value, Value::Dict(_)),
        "number" => matches!(value, Value::Int(_) | Value::LongInt(_) | Value::Float(_) | Value::Bool(_)),
        "sequence" => {
            matches!(value, Value::Str(_) | Value::List(_) | Value::Tuple(_) | Value::Dict(_) | Value::Range(_))
        }
        "iterable" => {
            matches!(
                value,
                Value::Str(_)
                    | Value::List(_)
                    | Value::Tuple(_)
                    | Value::Dict(_)
                    | Value::Range(_)
                    | Value::View(..)
                    | Value::Generator(_)
                    | Value::Undefined(_)
            ) || matches!(value, Value::Callable(callable) if matches!(**callable, Callable::Loop(_)))
        }
        // Python objects that have no value are callable as classes; `Undefined` has a method for it that raises.
        "callable" => matches!(value, Value::Callable(_) | Value::Undefined(_)),
        _ => matches!(value, Value::Str(text) if text.is_markup()),
    })
}

fn with_other(budget: &Budget, name: &str, value: &Value, other: &Value) -> Result<bool, Error> {
    let ordered = |is: fn(Ordering) -> bool| Ok(compare(budget, value, other)?.is_some_and(is));
    match name {
        "divisibleby" => equal(budget, &binary(budget, Binary::Mod, value, other)?, &Value::Int(0)),
        "sameas" => Ok(is_same(value, other)),
        "in" => contains(budget, other, value),
        "eq" | "equalto" | "==" => equal(budget, value, other),
        "ne" | "!=" => Ok(!equal(budget, value, other)?),
        "gt" | "greaterthan" | ">" => ordered(Ordering::is_gt),
        "ge" | ">=" => ordered(Ordering::is_ge),
        "lt" | "lessthan" | "<" => ordered(Ordering::is_lt),
        _ => ordered(Ordering::is_le),
    }
}

/// Python's `is`, as far as its values have one identity.
fn is_same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::None, Value::None) => true,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        // CPython keeps small integers once.
        (Value::Int(a), Value::Int(b)) => a == b && (-5..=256).contains(a),
        (Value::Str(a), Value::Str(b)) => a.is_same(b),
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => Rc::ptr_eq(a, b),
        (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b),
        (Value::Namespace(a), Value::Namespace(b)) => Rc::ptr_eq(a, b),
        _ => false,
    }
}
