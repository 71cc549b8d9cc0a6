//! The functions of chat templates: those of Jinja2, and `raise_exception` and `strftime_now` of transformers.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::arguments::Args;
use super::clock::Clock;
use super::error::Error;
use super::filters::interpreter_dict;
use super::interpreter::Interpreter;
use super::printed::str_of;
use super::text::Text;
use super::value::{Callable, Dict, Range, Value, equal};

const NAMES: [&str; 7] = ["cycler", "dict", "joiner", "namespace", "raise_exception", "range", "strftime_now"];
/// Known by Jinja2, and of no use in a text for a model.
const ABSENT: [&str; 1] = ["lipsum"];

/// As in the sandbox of Jinja2.
const RANGE_MAX: i128 = 100_000;

/// The function of this name.
pub(super) fn find(name: &str, clock: Option<Clock>) -> Option<Value> {
    if clock.is_none() && name == "strftime_now" {
        return None;
    }
    let known = NAMES.into_iter().chain(ABSENT).find(|known| *known == name)?;
    Some(Value::Callable(Rc::new(Callable::Function(known))))
}

pub(super) fn call(interpreter: &Interpreter, name: &'static str, args: Args) -> Result<Value, Error> {
    match name {
        "raise_exception" => {
            let bound = args.bind(name, ["message"])?;
            let message = str_of(&interpreter.budget, bound.required(0)?)?;
            Err(Error::new(message.as_str()))
        }
        "strftime_now" => {
            let bound = args.bind(name, ["format"])?;
            let text = interpreter.clock.get().unwrap_or_default().text(bound.required_text(0)?.as_str())?;
            Ok(Value::text(&text))
        }
        "range" => range(&args),
        "dict" => Ok(Value::Dict(Rc::new(dict(interpreter, name, &args)?))),
        "namespace" => {
            let fields = Rc::new(RefCell::new(dict(interpreter, name, &args)?));
            interpreter.namespaces.borrow_mut().push(Rc::clone(&fields));
            Ok(Value::Namespace(fields))
        }
        "cycler" if !args.positional.is_empty() => {
            Ok(Value::Callable(Rc::new(Callable::Cycler(args.positional, Cell::new(0)))))
        }
        "joiner" => {
            let bound = args.bind(name, ["sep"])?;
            let separator = bound.text(0)?.cloned().unwrap_or_else(|| Text::new(", "));
            Ok(Value::Callable(Rc::new(Callable::Joiner(separator, Cell::new(false)))))
        }
        "cycler" => Err(Error::new("cycler needs an item")),
        _ => Err(Error::new(format!("the function {name:?} is not supported in chat templates"))),
    }
}

/// A method of `loop` or of a cycler.
pub(super) fn method_of(callable: &Rc<Callable>, name: &str) -> Option<Value> {
    let known = ["changed", "cycle", "next", "reset"].into_iter().find(|known| *known == name)?;
    Some(Value::Callable(Rc::new(Callable::Method(Value::Callable(Rc::clone(callable)), known))))
}

/// Calls what [`method_of`] gave.
pub(super) fn call_method(
    interpreter: &Interpreter,
    callable: &Callable,
    name: &'static str,
    args: &Args,
) -> Result<Value, Error> {
    let rest = args.positional.as_slice();
    match (callable, name) {
        (Callable::Loop(own), "cycle") => {
            let at = own.index.get().checked_rem(rest.len());
            at.map(|at| rest[at].clone()).ok_or_else(|| Error::new("loop.cycle needs an item"))
        }
        (Callable::Loop(own), "changed") => {
            let mut last = own.last_changed.borrow_mut();
            let is_same = match last.as_ref() {
                Some(last) => equal(&interpreter.budget, &Value::list(last.clone()), &Value::list(rest.to_vec()))?,
                None => false,
            };
            *last = Some(rest.to_vec());
            Ok(Value::Bool(!is_same))
        }
        (Callable::Cycler(items, at), "next") => {
            let current = at.get();
            at.set((current + 1) % items.len());
            Ok(items[current].clone())
        }
        (Callable::Cycler(_, at), "reset") => {
            at.set(0);
            Ok(Value::None)
        }
        _ => Err(Error::new(format!("there is no method {name:?}"))),
    }
}

/// Calls a joiner; a cycler cannot be called.
pub(super) fn call_object(callable: &Callable, args: &Args) -> Result<Value, Error> {
    match callable {
        Callable::Joiner(separator, was_used) => {
            args.bind::<0>("joiner", [])?;
            Ok(Value::Str(if was_used.replace(true) { separator.clone() } else { Text::new("") }))
        }
        _ => Err(Error::new("a cycler cannot be called; its method next gives the next item")),
    }
}

fn range(args: &Args) -> Result<Value, Error> {
    let bound = args.bind("range", ["start", "stop", "step"])?;
    bound.required(0)?;
    let (start, stop) = match bound.get(1) {
        None => (0, bound.int(0, 0)?),
        Some(_) => (bound.int(0, 0)?, bound.int(1, 0)?),
    };
    let step = bound.int(2, 1)?;
    if step == 0 {
        return Err(Error::new("range with step 0"));
    }
    let span = if step > 0 { stop.saturating_sub(start) } else { start.saturating_sub(stop) };
    let len = if span <= 0 { 0 } else { (span - 1) / step.abs() + 1 };
    if len > RANGE_MAX {
        return Err(Error::new(format!("range of {len} numbers; at most {RANGE_MAX} are allowed")));
    }
    Ok(Value::Range(Range { start, step, len: len as usize }))
}

/// The object that Python's `dict(…)` makes.
fn dict(interpreter: &Interpreter, name: &str, args: &Args) -> Result<Dict, Error> {
    let mut dict = Dict::default();
    match args.positional.as_slice() {
        [] => {}
        [Value::Dict(other)] => {
            for (key, value) in other.entries() {
                dict.insert(key.clone(), value.clone())?;
            }
        }
        [pairs] => {
            for pair in pairs.items(&interpreter.budget)?.iter() {
                match pair.items(&interpreter.budget)?.as_slice() {
                    [key, value] => dict.insert(key.clone(), value.clone())?,
                    _ => return Err(Error::new(format!("{name} needs pairs"))),
                }
            }
        }
        _ => return Err(Error::new(format!("{name} takes one argument without a name"))),
    }
    if let Value::Dict(named) = interpreter_dict(&args.named)? {
        for (key, value) in named.entries() {
            dict.insert(key.clone(), value.clone())?;
        }
    }
    Ok(dict)
}
