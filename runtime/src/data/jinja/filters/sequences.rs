//! The filters that choose, order and transform items.

use std::rc::Rc;

use super::{apply as apply_filter, sort_by_keys};
use crate::data::jinja::arguments::Args;
use crate::data::jinja::ast::Binary;
use crate::data::jinja::error::Error;
use crate::data::jinja::interpreter::Interpreter;
use crate::data::jinja::operators::binary;
use crate::data::jinja::predicates;
use crate::data::jinja::str_methods::cased;
use crate::data::jinja::value::{Value, equal};

pub(super) fn apply(interpreter: &Interpreter, name: &str, value: &Value, args: &Args) -> Result<Value, Error> {
    let budget = &interpreter.budget;
    match name {
        "attr" => {
            let bound = args.bind(name, ["name"])?;
            Ok(interpreter.plain_attribute(value, bound.required_text(0)?.as_str()))
        }
        "first" | "last" => {
            args.bind::<0>(name, [])?;
            if name == "last" && matches!(value, Value::Generator(_)) {
                return Err(Error::new("last of a generator; list makes a list of it"));
            }
            let items = value.items(budget)?;
            let found = if name == "first" { items.first() } else { items.last() };
            Ok(found.cloned().unwrap_or_else(|| Value::undefined(format!("No {name} item, sequence was empty."))))
        }
        "list" => Ok(Value::List(value.items(budget)?)),
        "items" => match value {
            Value::Undefined(_) => Ok(Value::generator(Vec::new())),
            Value::Dict(dict) => {
                let pair = |(key, value): &(Value, Value)| Value::Tuple(Rc::new(vec![key.clone(), value.clone()]));
                Ok(Value::generator(dict.entries().iter().map(pair).collect()))
            }
            other => Err(Error::new(format!("items needs an object, not a {}", other.kind()))),
        },
        "map" => map(interpreter, value, args),
        "select" | "reject" | "selectattr" | "rejectattr" => select(interpreter, name, value, args),
        "batch" | "slice" => divided(interpreter, name, value, args),
        "sum" => sum(interpreter, value, args),
        _ => ordered(interpreter, name, value, args),
    }
}

/// The attribute at a path such as `a.0.b`; `default` where a part of it is missing.
pub(super) fn attribute_of(
    interpreter: &Interpreter,
    item: &Value,
    path: &Value,
    default: Option<&Value>,
) -> Result<Value, Error> {
    let found_or = |found: Value| default.filter(|_| found.is_undefined()).cloned().unwrap_or(found);
    let Value::Str(path) = path else { return interpreter.item(item, path).map(found_or) };
    let mut value = item.clone();
    for part in path.as_str().split('.') {
        let is_position = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        let key = part.parse().ok().filter(|_| is_position).map_or_else(|| Value::text(part), Value::Int);
        value = found_or(interpreter.item(&value, &key)?);
    }
    Ok(value)
}

fn map(interpreter: &Interpreter, value: &Value, args: &Args) -> Result<Value, Error> {
    let items = if value.is_true() { value.items(&interpreter.budget)? } else { Rc::default() };
    let mut mapped = Vec::with_capacity(items.len());
    let by_attribute = args.positional.is_empty() && args.named.iter().any(|(name, _)| name == "attribute");
    if by_attribute {
        let bound = args.bind("map", ["attribute", "default"])?;
        for item in items.iter() {
            mapped.push(attribute_of(interpreter, item, bound.required(0)?, bound.given(1))?);
        }
        return Ok(Value::generator(mapped));
    }
    let [Value::Str(filter), rest @ ..] = args.positional.as_slice() else {
        return Err(Error::new("map needs the name of a filter, or attribute=…"));
    };
    let rest = Args { positional: rest.to_vec(), named: args.named.clone() };
    for item in items.iter() {
        mapped.push(interpreter.budget.nested(|| apply_filter(interpreter, filter.as_str(), item, &rest))?);
    }
    Ok(Value::generator(mapped))
}

fn select(interpreter: &Interpreter, name: &str, value: &Value, args: &Args) -> Result<Value, Error> {
    let budget = &interpreter.budget;
    let items = if value.is_true() { value.items(budget)? } else { Rc::default() };
    let mut rest = args.positional.as_slice();
    let attribute = match name.ends_with("attr") {
        false => None,
        true => {
            let (first, others) = rest.split_first().ok_or_else(|| Error::new(format!("{name} needs an attribute")))?;
            rest = others;
            Some(first)
        }
    };
    let test = match rest.split_first() {
        None => None,
        Some((Value::Str(test), others)) => {
            Some((test.as_str(), Args { positional: others.to_vec(), named: args.named.clone() }))
        }
        Some((other, _)) => {
            return Err(Error::new(format!("the test of {name} must be a text, not a {}", other.kind())));
        }
    };
    let wanted = name.starts_with("select");
    let mut kept = Vec::new();
    for item in items.iter() {
        let subject = match attribute {
            Some(attribute) => attribute_of(interpreter, item, attribute, None)?,
            None => item.clone(),
        };
        let holds = match &test {
            Some((test, rest)) => predicates::holds(budget, test, &subject, rest)?,
            None => subject.is_true(),
        };
        if holds == wanted {
            kept.push(item.clone());
        }
    }
    Ok(Value::generator(kept))
}

fn divided(interpreter: &Interpreter, name: &str, value: &Value, args: &Args) -> Result<Value, Error> {
    let budget = &interpreter.budget;
    let bound = args.bind(name, ["count", "fill_with"])?;
    bound.required(0)?;
    let (n, fill) = (bound.count(0, 0)?, bound.given(1));
    if n == 0 {
        return Err(Error::new(format!("{name} into 0")));
    }
    budget.items(n)?;
    let items = value.items(budget)?;
    let mut parts: Vec<Vec<Value>> = Vec::new();
    if name == "batch" {
        parts.extend(items.chunks(n).map(<[Value]>::to_vec));
        if let (Some(fill), Some(last)) = (fill, parts.last_mut()) {
            last.resize(n, fill.clone());
        }
    } else {
        let (each, more) = (items.len() / n, items.len() % n);
        let mut from = 0;
        for part in 0..n {
            let to = from + each + usize::from(part < more);
            let mut own = items[from..to].to_vec();
            own.extend(fill.filter(|_| part >= more).cloned());
            parts.push(own);
            from = to;
        }
    }
    Ok(Value::generator(parts.into_iter().map(Value::list).collect()))
}

fn sum(interpreter: &Interpreter, value: &Value, args: &Args) -> Result<Value, Error> {
    let budget = &interpreter.budget;
    let bound = args.bind("sum", ["attribute", "start"])?;
    let mut total = bound.get(1).cloned().unwrap_or(Value::Int(0));
    if matches!(total, Value::Str(_)) {
        return Err(Error::new("sum adds no texts; join does"));
    }
    for item in value.items(budget)?.iter() {
        let item = match bound.given(0) {
            Some(attribute) => attribute_of(interpreter, item, attribute, None)?,
            None => item.clone(),
        };
        total = binary(budget, Binary::Add, &total, &item)?;
    }
    Ok(total)
}

/// A text in small letters unless case matters.
fn key_of(interpreter: &Interpreter, key: Value, is_case_sensitive: bool) -> Result<Value, Error> {
    match &key {
        Value::Str(text) if !is_case_sensitive => cased(&interpreter.budget, text, "lower").map(Value::Str),
        _ => Ok(key),
    }
}

fn ordered(interpreter: &Interpreter, name: &str, value: &Value, args: &Args) -> Result<Value, Error> {
    let budget = &interpreter.budget;
    let of_attribute = |item: &Value, attribute: Option<&Value>| match attribute {
        Some(attribute) => attribute_of(interpreter, item, attribute, None),
        None => Ok(item.clone()),
    };
    match name {
        "sort" => sort(interpreter, value, args),
        "dictsort" => dictsort(interpreter, value, args),
        "groupby" => groupby(interpreter, value, args),
        "unique" => {
            let bound = args.bind(name, ["case_sensitive", "attribute"])?;
            let (mut seen, mut kept): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
            for item in value.items(budget)?.iter() {
                let key = key_of(interpreter, of_attribute(item, bound.given(1))?, bound.flag(0))?;
                let mut is_new = true;
                for known in &seen {
                    if equal(budget, known, &key)? {
                        is_new = false;
                        break;
                    }
                }
                if is_new {
                    seen.push(key);
                    kept.push(item.clone());
                }
            }
            Ok(Value::generator(kept))
        }
        _ => {
            let bound = args.bind(name, ["case_sensitive", "attribute"])?;
            let mut keyed = Vec::new();
            for item in value.items(budget)?.iter() {
                keyed.push((key_of(interpreter, of_attribute(item, bound.given(1))?, bound.flag(0))?, item.clone()));
            }
            // Stable, so that the first of equal items is taken, from either end.
            sort_by_keys(budget, &mut keyed, name == "max")?;
            let found = keyed.into_iter().next().map(|(_, item)| item);
            Ok(found.unwrap_or_else(|| Value::undefined("No aggregated item, sequence was empty.")))
        }
    }
}

fn sort(interpreter: &Interpreter, value: &Value, args: &Args) -> Result<Value, Error> {
    let budget = &interpreter.budget;
    let bound = args.bind("sort", ["reverse", "case_sensitive", "attribute"])?;
    let mut keyed = Vec::new();
    for item in value.items(budget)?.iter() {
        let key = match bound.given(2) {
            None => key_of(interpreter, item.clone(), bound.flag(1))?,
            Some(Value::Str(paths)) => {
                let mut keys = Vec::new();
                for path in paths.as_str().split(',') {
                    let key = attribute_of(interpreter, item, &Value::text(path), None)?;
                    keys.push(key_of(interpreter, key, bound.flag(1))?);
                }
                Value::list(keys)
            }
            Some(position) => key_of(interpreter, interpreter.item(item, position)?, bound.flag(1))?,
        };
        keyed.push((key, item.clone()));
    }
    sort_by_keys(budget, &mut keyed, bound.flag(0))?;
    Ok(Value::list(keyed.into_iter().map(|(_, item)| item).collect()))
}

fn dictsort(interpreter: &Interpreter, value: &Value, args: &Args) -> Result<Value, Error> {
    let bound = args.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
    let Value::Dict(dict) = value else {
        return Err(Error::new(format!("dictsort needs an object, not a {}", value.kind())));
    };
    let by_value = match bound.text(1)?.map(|by| by.as_str()) {
        None | Some("key") => false,
        Some("value") => true,
        Some(other) => return Err(Error::new(format!("dictsort sorts by key or value, not by {other:?}"))),
    };
    let mut keyed = Vec::new();
    for (key, value) in dict.entries() {
        let sorted_by = key_of(interpreter, if by_value { value } else { key }.clone(), bound.flag(0))?;
        keyed.push((sorted_by, Value::Tuple(Rc::new(vec![key.clone(), value.clone()]))));
    }
    sort_by_keys(&interpreter.budget, &mut keyed, bound.flag(2))?;
    Ok(Value::list(keyed.into_iter().map(|(_, pair)| pair).collect()))
}

fn groupby(interpreter: &Interpreter, value: &Value, args: &Args) -> Result<Value, Error> {
    let budget = &interpreter.budget;
    let bound = args.bind("groupby", ["attribute", "default", "case_sensitive"])?;
    let attribute = bound.required(0)?;
    let of = |item: &Value| attribute_of(interpreter, item, attribute, bound.given(1));
    let mut keyed = Vec::new();
    for item in value.items(budget)?.iter() {
        keyed.push((key_of(interpreter, of(item)?, bound.flag(2))?, item.clone()));
    }
    sort_by_keys(budget, &mut keyed, false)?;
    let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
    for (key, item) in keyed {
        match groups.last_mut() {
            Some((last, items)) if equal(budget, last, &key)? => items.push(item),
            _ => groups.push((key, vec![item])),
        }
    }
    let mut grouped = Vec::with_capacity(groups.len());
    for (_, items) in groups {
        grouped.push(Value::Tuple(Rc::new(vec![of(&items[0])?, Value::list(items)])));
    }
    Ok(Value::list(grouped))
}
