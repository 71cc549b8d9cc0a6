//! Runs the statements of a template.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use super::arguments::Args;
use super::ast::{Applied, Expr, ForLoop, Macro, Statement, StatementKind, Target};
use super::budget::TEXT_BYTES_MAX;
use super::error::Error;
use super::filters::interpreter_dict;
use super::interpreter::Interpreter;
use super::printed::str_of;
use super::text::{Builder, Text};
use super::value::{Callable, Loop, Scope, Value};

/// What statements print.
#[derive(Debug, Default)]
pub(super) struct Output {
    pub(super) text: Builder,
    /// What is only known of the text itself, not of texts that are made on the way.
    pub(super) root: Option<Root>,
}

#[derive(Debug, Default)]
pub(super) struct Root {
    /// What the body of a loop over messages printed for each message.
    pub(super) turns: Vec<(usize, Range<usize>)>,
    /// What `generation` blocks printed.
    pub(super) blocks: Vec<Range<usize>>,
    in_turn: bool,
}

impl Output {
    fn push(&mut self, text: &Text) -> Result<(), Error> {
        if self.text.len() + text.as_str().len() > TEXT_BYTES_MAX {
            return Err(Error::new(format!("it prints more than {} MiB", TEXT_BYTES_MAX >> 20)));
        }
        self.text.push(text);
        Ok(())
    }
}

/// How statements end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    Next,
    Break,
    Continue,
}

impl Interpreter {
    pub(super) fn run(&self, statements: &[Statement], scope: &Rc<Scope>, out: &mut Output) -> Result<Flow, Error> {
        for statement in statements {
            self.budget.step(1)?;
            let flow = self.budget.nested(|| self.statement(statement, scope, out));
            match flow.map_err(|error| error.at(statement.line))? {
                Flow::Next => {}
                flow => return Ok(flow),
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&self, statement: &Statement, scope: &Rc<Scope>, out: &mut Output) -> Result<Flow, Error> {
        match &statement.kind {
            StatementKind::Data(text) => out.push(&Text::new(text.clone()))?,
            StatementKind::Print(value) => {
                let value = self.evaluate(value, scope)?;
                out.push(&str_of(&self.budget, &value)?)?;
            }
            StatementKind::For(own) => return self.for_loop(own, scope, out),
            StatementKind::If { branches, otherwise } => return self.condition(branches, otherwise, scope, out),
            StatementKind::Set(target, value) => {
                let value = self.evaluate(value, scope)?;
                self.assign(target, value, scope)?;
            }
            StatementKind::SetBlock(target, filters, body) => {
                let text = self.captured(body, &Scope::within(scope))?;
                let value = self.filtered(Value::Str(text), filters, scope)?;
                self.assign(target, value, scope)?;
            }
            StatementKind::Macro(own) => {
                let value = Callable::Macro(Arc::clone(own), Rc::downgrade(scope));
                scope.set(&own.name, Value::Callable(Rc::new(value)));
            }
            StatementKind::CallBlock { callee, arguments, caller } => {
                let callee = self.evaluate(callee, scope)?;
                let mut args = self.arguments(arguments, scope)?;
                let caller = Callable::Macro(Arc::clone(caller), Rc::downgrade(scope));
                args.named.push(("caller".to_owned(), Value::Callable(Rc::new(caller))));
                let value = self.call(&callee, args)?;
                out.push(&str_of(&self.budget, &value)?)?;
            }
            StatementKind::FilterBlock(filters, body) => {
                let text = self.captured(body, &Scope::within(scope))?;
                let value = self.filtered(Value::Str(text), filters, scope)?;
                out.push(&str_of(&self.budget, &value)?)?;
            }
            StatementKind::With(values, body) => {
                let inner = Scope::within(scope);
                for (target, value) in values {
                    self.assign(target, self.evaluate(value, scope)?, &inner)?;
                }
                return self.run(body, &inner, out);
            }
            StatementKind::Generation(body) => {
                let start = out.text.len();
                self.run(body, &Scope::within(scope), out)?;
                let end = out.text.len();
                if let Some(root) = out.root.as_mut().filter(|_| end > start) {
                    root.blocks.push(start..end);
                }
            }
            StatementKind::Break => return Ok(Flow::Break),
            StatementKind::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn condition(
        &self,
        branches: &[(Expr, Vec<Statement>)],
        otherwise: &[Statement],
        scope: &Rc<Scope>,
        out: &mut Output,
    ) -> Result<Flow, Error> {
        for (test, body) in branches {
            if self.evaluate(test, scope)?.is_true() {
                return self.run(body, scope, out);
            }
        }
        self.run(otherwise, scope, out)
    }

    /// What statements print, as a value.
    fn captured(&self, body: &[Statement], scope: &Rc<Scope>) -> Result<Text, Error> {
        let mut out = Output::default();
        self.run(body, scope, &mut out)?;
        self.budget.text(out.text.len())?;
        Ok(out.text.finish())
    }

    fn filtered(&self, value: Value, filters: &[Applied], scope: &Rc<Scope>) -> Result<Value, Error> {
        filters.iter().try_fold(value, |value, filter| self.filter(&value, filter, scope))
    }

    fn assign(&self, target: &Target, value: Value, scope: &Rc<Scope>) -> Result<(), Error> {
        match target {
            Target::Name(name) => scope.set(name, value),
            Target::Attribute(name, attribute) => match scope.get(name) {
                Some(Value::Namespace(_)) if attribute.starts_with('_') => {
                    return Err(Error::new(format!("{attribute} cannot be the name of a namespace's attribute")));
                }
                Some(Value::Namespace(fields)) => fields.borrow_mut().insert(Value::text(attribute), value)?,
                _ => return Err(Error::new(format!("{name}.{attribute} is assigned to, but {name} is no namespace"))),
            },
            Target::Tuple(targets) => {
                let items = value.items(&self.budget)?;
                if items.len() != targets.len() {
                    let (wanted, found) = (targets.len(), items.len());
                    return Err(Error::new(format!("{wanted} names are assigned {found} values")));
                }
                for (target, item) in targets.iter().zip(items.iter()) {
                    self.assign(target, item.clone(), scope)?;
                }
            }
        }
        Ok(())
    }

    fn for_loop(&self, own: &Arc<ForLoop>, scope: &Rc<Scope>, out: &mut Output) -> Result<Flow, Error> {
        let over = self.evaluate(&own.over, scope)?;
        self.loop_over(own, &over, 0, scope, out)
    }

    fn loop_over(
        &self,
        own: &Arc<ForLoop>,
        over: &Value,
        depth: usize,
        scope: &Rc<Scope>,
        out: &mut Output,
    ) -> Result<Flow, Error> {
        let mut items = over.items(&self.budget)?;
        if let Some(test) = &own.test {
            let mut kept = Vec::new();
            for item in items.iter() {
                let inner = Scope::within(scope);
                self.assign(&own.target, item.clone(), &inner)?;
                if self.evaluate(test, &inner)?.is_true() {
                    kept.push(item.clone());
                }
            }
            items = Rc::new(kept);
        }
        let recursive = own.is_recursive.then(|| (Arc::clone(own), Rc::downgrade(scope)));
        let (index, last_changed) = (Cell::new(0), RefCell::new(None));
        let state = Rc::new(Callable::Loop(Loop { items: Rc::clone(&items), index, depth, last_changed, recursive }));
        let mut has_reached_end = false;
        for (idx, item) in items.iter().enumerate() {
            self.budget.step(1)?;
            let inner = Scope::within(scope);
            if let Callable::Loop(state) = &*state {
                state.index.set(idx);
            }
            inner.set("loop", Value::Callable(Rc::clone(&state)));
            self.assign(&own.target, item.clone(), &inner)?;
            match self.iteration(own, item, &inner, out)? {
                Flow::Break => break,
                Flow::Continue => {}
                Flow::Next => has_reached_end = true,
            }
        }
        // Unlike in Python, where only `break` skips it: Jinja2 runs it unless an iteration has reached the end of the body.
        // A `break` in it leaves the loop around this one.
        if has_reached_end { Ok(Flow::Next) } else { self.run(&own.otherwise, &Scope::within(scope), out) }
    }

    /// Runs the body for one item, and notes what it prints if that is a message.
    fn iteration(&self, own: &ForLoop, item: &Value, scope: &Rc<Scope>, out: &mut Output) -> Result<Flow, Error> {
        let message = match item {
            Value::Dict(dict) => dict.message,
            _ => None,
        };
        let start = out.text.len();
        let opens =
            message.is_some() && out.root.as_mut().is_some_and(|root| !std::mem::replace(&mut root.in_turn, true));
        let flow = self.run(&own.body, scope, out)?;
        if let (true, Some(message), Some(root)) = (opens, message, out.root.as_mut()) {
            root.in_turn = false;
            // Many templates first look through the messages without printing anything.
            if out.text.len() > start {
                root.turns.push((message, start..out.text.len()));
            }
        }
        Ok(flow)
    }

    /// `loop(items)` in a recursive loop.
    pub(super) fn call_loop(&self, own: &Loop, args: &Args) -> Result<Value, Error> {
        let bound = args.bind("loop", ["iterable"])?;
        let gone = || Error::new("the loop is not recursive, or has ended");
        let (body, scope) = own.recursive.as_ref().ok_or_else(gone)?;
        let scope = Weak::upgrade(scope).ok_or_else(gone)?;
        let mut out = Output::default();
        self.loop_over(body, bound.required(0)?, own.depth + 1, &scope, &mut out)?;
        self.budget.text(out.text.len())?;
        Ok(Value::Str(out.text.finish()))
    }

    pub(super) fn call_macro(&self, own: &Macro, scope: &Weak<Scope>, mut args: Args) -> Result<Value, Error> {
        let name = &own.name;
        let outer = Weak::upgrade(scope).ok_or_else(|| Error::new(format!("{name} is called outside of its block")))?;
        let inner = Scope::within(&outer);
        let mut positional = args.positional.into_iter();
        for (parameter, default) in &own.parameters {
            let named = args.named.iter().position(|(known, _)| known == parameter).map(|at| args.named.remove(at).1);
            let value = match (positional.next(), named, default) {
                (Some(_), Some(_), _) => return Err(Error::new(format!("{name} is given {parameter} twice"))),
                (Some(value), None, _) | (None, Some(value), _) => value,
                (None, None, Some(default)) => self.evaluate(default, &inner)?,
                (None, None, None) => Value::undefined(format!("parameter '{parameter}' was not provided")),
            };
            inner.set(parameter, value);
        }
        if own.takes_caller {
            let caller = args.named.iter().position(|(known, _)| known == "caller").map(|at| args.named.remove(at).1);
            inner.set("caller", caller.unwrap_or_else(|| Value::undefined("No caller defined")));
        }
        if own.takes_kwargs {
            inner.set("kwargs", interpreter_dict(&args.named)?);
        } else if let Some((unknown, _)) = args.named.first() {
            return Err(Error::new(format!("{name} has no parameter {unknown}")));
        }
        let rest: Vec<Value> = positional.collect();
        match (own.takes_varargs, rest.is_empty()) {
            (true, _) => inner.set("varargs", Value::Tuple(Rc::new(rest))),
            (false, true) => {}
            (false, false) => {
                return Err(Error::new(format!("{name} takes {} arguments", own.parameters.len())));
            }
        }
        self.captured(&own.body, &inner).map(Value::Str)
    }
}
