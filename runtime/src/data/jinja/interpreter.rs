//! Evaluates the expressions of a template.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::arguments::Args;
use super::ast::{Applied, Arguments, Comparison, Expr, ExprKind};
use super::budget::Budget;
use super::clock::Clock;
use super::error::Error;
use super::filters;
use super::functions;
use super::items::item_at;
use super::methods;
use super::operators::{binary, signed, slice, tilde};
use super::predicates;
use super::printed::str_of;
use super::text::Text;
use super::value::{Callable, Dict, Loop, Number, Scope, Value, compare, contains, equal};

/// One rendering.
#[derive(Debug, Default)]
pub(super) struct Interpreter {
    pub(super) budget: Budget,
    /// All namespaces, which may contain each other: they are emptied at the end, or none would ever be freed.
    pub(super) namespaces: RefCell<Vec<Rc<RefCell<Dict>>>>,
    /// The template's clock; `None` if it has none and can do without.
    pub(super) clock: Cell<Option<Clock>>,
}

impl Drop for Interpreter {
    fn drop(&mut self) {
        for namespace in self.namespaces.take() {
            namespace.borrow_mut().clear();
        }
    }
}

impl Interpreter {
    pub(super) fn evaluate(&self, expr: &Expr, scope: &Rc<Scope>) -> Result<Value, Error> {
        self.budget.step(1)?;
        self.budget.nested(|| self.evaluate_kind(expr, scope)).map_err(|error| error.at(expr.line))
    }

    fn evaluate_kind(&self, expr: &Expr, scope: &Rc<Scope>) -> Result<Value, Error> {
        match &expr.kind {
            ExprKind::None => Ok(Value::None),
            ExprKind::Bool(flag) => Ok(Value::Bool(*flag)),
            ExprKind::Int(number) => Ok(Value::Int(*number)),
            ExprKind::Float(number) => Ok(Value::Float(*number)),
            ExprKind::Str(text) => Ok(Value::Str(Text::new(text.clone()))),
            ExprKind::Name(name) => Ok(self.name(name, scope)),
            ExprKind::List(items) => Ok(Value::List(Rc::new(self.all(items, scope)?))),
            ExprKind::Tuple(items) => Ok(Value::Tuple(Rc::new(self.all(items, scope)?))),
            ExprKind::Dict(entries) => self.dict(entries, scope),
            ExprKind::Attribute(value, name) => self.attribute(&self.evaluate(value, scope)?, name),
            ExprKind::Item(value, key) => self.item(&self.evaluate(value, scope)?, &self.evaluate(key, scope)?),
            ExprKind::Slice(value, bounds) => self.slice(value, bounds, scope),
            ExprKind::Call(callee, arguments) => {
                let callee = self.evaluate(callee, scope)?;
                self.call(&callee, self.arguments(arguments, scope)?)
            }
            ExprKind::Filter(value, applied) => {
                let value = self.evaluate(value, scope)?;
                self.filter(&value, applied, scope)
            }
            ExprKind::Test(value, applied) => self.test(value, applied, scope),
            ExprKind::Not(value) => Ok(Value::Bool(!self.evaluate(value, scope)?.is_true())),
            ExprKind::Negative(value) => signed(&self.evaluate(value, scope)?, true),
            ExprKind::Positive(value) => signed(&self.evaluate(value, scope)?, false),
            ExprKind::And(left, right) => {
                let left = self.evaluate(left, scope)?;
                if left.is_true() { self.evaluate(right, scope) } else { Ok(left) }
            }
            ExprKind::Or(left, right) => {
                let left = self.evaluate(left, scope)?;
                if left.is_true() { Ok(left) } else { self.evaluate(right, scope) }
            }
            ExprKind::Binary(operator, left, right) => {
                binary(&self.budget, *operator, &self.evaluate(left, scope)?, &self.evaluate(right, scope)?)
            }
            ExprKind::Concat(items) => tilde(&self.budget, &self.all(items, scope)?),
            ExprKind::Compare(first, others) => self.comparison(first, others, scope),
            ExprKind::Condition { test, then, otherwise } => match (self.evaluate(test, scope)?.is_true(), otherwise) {
                (true, _) => self.evaluate(then, scope),
                (false, Some(otherwise)) => self.evaluate(otherwise, scope),
                (false, None) => Ok(Value::undefined("a condition without else has no value here")),
            },
        }
    }

    pub(super) fn all(&self, exprs: &[Expr], scope: &Rc<Scope>) -> Result<Vec<Value>, Error> {
        exprs.iter().map(|expr| self.evaluate(expr, scope)).collect()
    }

    fn name(&self, name: &str, scope: &Rc<Scope>) -> Value {
        scope
            .get(name)
            .or_else(|| functions::find(name, self.clock.get()))
            .unwrap_or_else(|| Value::undefined(format!("'{name}' is undefined")))
    }

    fn dict(&self, entries: &[(Expr, Expr)], scope: &Rc<Scope>) -> Result<Value, Error> {
        let mut dict = Dict::default();
        for (key, value) in entries {
            dict.insert(self.evaluate(key, scope)?, self.evaluate(value, scope)?)?;
        }
        Ok(Value::Dict(Rc::new(dict)))
    }

    fn slice(&self, value: &Expr, bounds: &[Option<Expr>; 3], scope: &Rc<Scope>) -> Result<Value, Error> {
        let value = self.evaluate(value, scope)?;
        let mut numbers = [None; 3];
        for (number, bound) in numbers.iter_mut().zip(bounds) {
            let Some(bound) = bound else { continue };
            *number = match self.evaluate(bound, scope)? {
                Value::None => None,
                Value::Undefined(sentence) => return Err(Error::new(&*sentence)),
                other => match other.number() {
                    Some(Number::Int(number)) => Some(number),
                    _ => return Err(Error::new(format!("a slice needs integers, not a {}", other.kind()))),
                },
            };
        }
        slice(&self.budget, &value, numbers)
    }

    fn comparison(&self, first: &Expr, others: &[(Comparison, Expr)], scope: &Rc<Scope>) -> Result<Value, Error> {
        let mut left = self.evaluate(first, scope)?;
        for (comparison, right) in others {
            let right = self.evaluate(right, scope)?;
            if !self.holds(*comparison, &left, &right)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    fn holds(&self, comparison: Comparison, left: &Value, right: &Value) -> Result<bool, Error> {
        let budget = &self.budget;
        let ordered = |is: fn(std::cmp::Ordering) -> bool| Ok(compare(budget, left, right)?.is_some_and(is));
        match comparison {
            Comparison::Eq => equal(budget, left, right),
            Comparison::Ne => Ok(!equal(budget, left, right)?),
            Comparison::Lt => ordered(std::cmp::Ordering::is_lt),
            Comparison::Le => ordered(std::cmp::Ordering::is_le),
            Comparison::Gt => ordered(std::cmp::Ordering::is_gt),
            Comparison::Ge => ordered(std::cmp::Ordering::is_ge),
            Comparison::In => contains(budget, right, left),
            Comparison::NotIn => Ok(!contains(budget, right, left)?),
        }
    }

    pub(super) fn filter(&self, value: &Value, applied: &Applied, scope: &Rc<Scope>) -> Result<Value, Error> {
        let args = self.arguments(&applied.arguments, scope)?;
        filters::apply(self, &applied.name, value, &args)
    }

    fn test(&self, value: &Expr, applied: &Applied, scope: &Rc<Scope>) -> Result<Value, Error> {
        let value = self.evaluate(value, scope)?;
        let args = self.arguments(&applied.arguments, scope)?;
        predicates::holds(&self.budget, &applied.name, &value, &args).map(Value::Bool)
    }

    pub(super) fn arguments(&self, arguments: &Arguments, scope: &Rc<Scope>) -> Result<Args, Error> {
        let mut args = Args::of(self.all(&arguments.positional, scope)?);
        for (name, value) in &arguments.named {
            args.named.push((name.clone(), self.evaluate(value, scope)?));
        }
        if let Some(rest) = &arguments.rest {
            args.positional.extend(self.evaluate(rest, scope)?.items(&self.budget)?.iter().cloned());
        }
        if let Some(rest) = &arguments.named_rest {
            match self.evaluate(rest, scope)? {
                Value::Dict(dict) => {
                    for (key, value) in dict.entries() {
                        args.named.push((str_of(&self.budget, key)?.as_str().to_owned(), value.clone()));
                    }
                }
                other => return Err(Error::new(format!("** needs an object, not a {}", other.kind()))),
            }
        }
        Ok(args)
    }

    /// `value.name`: what Python has under this name, else the item.
    pub(super) fn attribute(&self, value: &Value, name: &str) -> Result<Value, Error> {
        if let Value::Undefined(sentence) = value {
            return Err(Error::new(&**sentence));
        }
        let attribute = self.plain_attribute(value, name);
        match value {
            Value::Dict(dict) if attribute.is_undefined() && methods::forbidden(value, name).is_none() => {
                Ok(dict.get_text(name).cloned().unwrap_or(attribute))
            }
            _ => Ok(attribute),
        }
    }

    /// Python's `getattr`, undefined where Python has none.
    pub(super) fn plain_attribute(&self, value: &Value, name: &str) -> Value {
        if let Some(method) = methods::find(value, name) {
            return Value::Callable(Rc::new(Callable::Method(value.clone(), method)));
        }
        if let Some(sentence) = methods::forbidden(value, name) {
            return Value::undefined(sentence);
        }
        let found = match value {
            Value::Namespace(fields) => fields.borrow().get_text(name).cloned(),
            Value::Callable(callable) => callable_attribute(callable, name),
            // What groupby gives.
            Value::Tuple(pair) if pair.len() == 2 && matches!(pair[1], Value::List(_)) => match name {
                "grouper" => Some(pair[0].clone()),
                "list" => Some(pair[1].clone()),
                _ => None,
            },
            _ => None,
        };
        found.unwrap_or_else(|| match value {
            Value::None => Value::undefined(format!("'None' has no attribute '{name}'")),
            _ => Value::undefined(format!("'{} object' has no attribute '{name}'", value.kind())),
        })
    }

    /// `value[key]`: the item, else what Python has under this name.
    pub(super) fn item(&self, value: &Value, key: &Value) -> Result<Value, Error> {
        let found = match (value, key) {
            (Value::Undefined(sentence), _) => return Err(Error::new(&**sentence)),
            (Value::Dict(dict), _) => dict.get(key).cloned(),
            (_, Value::Int(_) | Value::Bool(_)) => match key.number() {
                Some(Number::Int(idx)) => item_at(value, idx),
                _ => None,
            },
            _ => None,
        };
        match (found, key) {
            (Some(found), _) => Ok(found),
            (None, Value::Str(name)) => Ok(self.plain_attribute(value, name.as_str())),
            (None, _) => {
                let key = str_of(&self.budget, key)?;
                Ok(Value::undefined(format!("'{} object' has no element {}", value.kind(), key.as_str())))
            }
        }
    }

    pub(super) fn call(&self, callee: &Value, args: Args) -> Result<Value, Error> {
        match callee {
            Value::Undefined(sentence) => Err(Error::new(&**sentence)),
            Value::Callable(callable) => match &**callable {
                Callable::Function(name) => functions::call(self, name, args),
                Callable::Method(Value::Callable(object), name) => functions::call_method(self, object, name, &args),
                Callable::Method(value, name) => methods::call(&self.budget, value, name, &args),
                Callable::Macro(definition, scope) => self.call_macro(definition, scope, args),
                Callable::Loop(own) => self.call_loop(own, &args),
                Callable::Cycler(..) | Callable::Joiner(..) => functions::call_object(callable, &args),
            },
            other => Err(Error::new(format!("a {} cannot be called", other.kind()))),
        }
    }
}

fn callable_attribute(callable: &Rc<Callable>, name: &str) -> Option<Value> {
    match &**callable {
        Callable::Loop(own) => loop_attribute(callable, own, name),
        Callable::Cycler(items, at) => match name {
            "current" => Some(items[at.get()].clone()),
            "next" | "reset" => functions::method_of(callable, name),
            _ => None,
        },
        Callable::Macro(definition, _) if name == "name" => Some(Value::text(&definition.name)),
        _ => None,
    }
}

fn loop_attribute(callable: &Rc<Callable>, own: &Loop, name: &str) -> Option<Value> {
    let (index, len) = (own.index.get(), own.items.len());
    let int = |number: usize| Some(Value::Int(number as i128));
    match name {
        "index" => int(index + 1),
        "index0" => int(index),
        "revindex" => int(len - index),
        "revindex0" => int(len - index - 1),
        "first" => Some(Value::Bool(index == 0)),
        "last" => Some(Value::Bool(index + 1 == len)),
        "length" => int(len),
        "depth" => int(own.depth + 1),
        "depth0" => int(own.depth),
        "previtem" => Some(match index.checked_sub(1) {
            Some(before) => own.items[before].clone(),
            None => Value::undefined("there is no previous item"),
        }),
        "nextitem" => {
            let next = own.items.get(index + 1).cloned();
            Some(next.unwrap_or_else(|| Value::undefined("there is no next item")))
        }
        "cycle" | "changed" => functions::method_of(callable, name),
        _ => None,
    }
}
