//! Parses the statements of a template. Source: `jinja2/parser.py`, with the tags that transformers gives to chat templates.

use std::sync::Arc;

use super::ast::{Applied, Expr, ExprKind, ForLoop, Macro, Statement, StatementKind, Target};
use super::error::Error;
use super::lexer::{Token, tokens};

/// Expressions and blocks within each other.
const DEPTH_MAX: u32 = 60;

/// The statements of `source`.
pub(super) fn parse(source: &str) -> Result<Vec<Statement>, Error> {
    let mut parser = Parser { tokens: tokens(source)?, at: 0, depth: 0, reads: Vec::new() };
    let statements = parser.statements(&[]).map_err(|error| error.at(parser.line()))?;
    Ok(statements)
}

pub(super) struct Parser {
    tokens: Vec<(u32, Token)>,
    at: usize,
    depth: u32,
    /// Which of the special names the macro that is parsed reads.
    reads: Vec<String>,
}

/// Names that a macro takes only if it reads them.
const SPECIAL: [&str; 3] = ["varargs", "kwargs", "caller"];

impl Parser {
    pub(super) fn line(&self) -> u32 {
        self.tokens[self.at].0
    }

    pub(super) fn peek(&self) -> &Token {
        &self.tokens[self.at].1
    }

    pub(super) fn peek_second(&self) -> &Token {
        &self.tokens[(self.at + 1).min(self.tokens.len() - 1)].1
    }

    pub(super) fn next(&mut self) -> Token {
        let token = self.tokens[self.at].1.clone();
        self.at = (self.at + 1).min(self.tokens.len() - 1);
        token
    }

    pub(super) fn is_sign(&self, sign: &str) -> bool {
        matches!(self.peek(), Token::Sign(found) if *found == sign)
    }

    pub(super) fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Token::Name(found) if found == name)
    }

    pub(super) fn take_sign(&mut self, sign: &str) -> bool {
        let is = self.is_sign(sign);
        if is {
            self.next();
        }
        is
    }

    pub(super) fn take_name(&mut self, name: &str) -> bool {
        let is = self.is_name(name);
        if is {
            self.next();
        }
        is
    }

    pub(super) fn expect_sign(&mut self, sign: &str) -> Result<(), Error> {
        match self.take_sign(sign) {
            true => Ok(()),
            false => Err(self.unexpected(sign)),
        }
    }

    pub(super) fn expect_name(&mut self, what: &str) -> Result<String, Error> {
        match self.peek().clone() {
            Token::Name(name) => {
                self.next();
                Ok(name)
            }
            _ => Err(self.unexpected(what)),
        }
    }

    pub(super) fn unexpected(&self, wanted: &str) -> Error {
        Error::new(format!("expected {wanted}, found {}", self.peek().describe())).at(self.line())
    }

    pub(super) fn note_read(&mut self, name: &str) {
        if SPECIAL.contains(&name) && !self.reads.iter().any(|read| read == name) {
            self.reads.push(name.to_owned());
        }
    }

    /// Parses one level deeper.
    pub(super) fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        if self.depth >= DEPTH_MAX {
            return Err(Error::new(format!("it is nested more than {DEPTH_MAX} levels deep")).at(self.line()));
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    fn expect_block_end(&mut self) -> Result<(), Error> {
        match self.peek() {
            Token::BlockEnd => {
                self.next();
                Ok(())
            }
            _ => Err(self.unexpected("%}")),
        }
    }

    /// Statements up to a tag in `ends`, whose name is the next token; up to the end of the template without any.
    fn statements(&mut self, ends: &[&str]) -> Result<Vec<Statement>, Error> {
        let mut statements = Vec::new();
        loop {
            let line = self.line();
            let kind = match self.next() {
                Token::Data(text) => StatementKind::Data(text.into()),
                Token::PrintBegin => {
                    let value = self.tuple(true)?;
                    match self.next() {
                        Token::PrintEnd => StatementKind::Print(value),
                        _ => {
                            self.at -= 1;
                            return Err(self.unexpected("}}"));
                        }
                    }
                }
                Token::BlockBegin => {
                    if matches!(self.peek(), Token::Name(name) if ends.contains(&name.as_str())) {
                        return Ok(statements);
                    }
                    let kind = self.nested(|parser| parser.tag())?;
                    self.expect_block_end()?;
                    kind
                }
                _ if ends.is_empty() => return Ok(statements),
                _ => return Err(Error::new(format!("the template ends without {}", ends.join(" or "))).at(line)),
            };
            statements.push(Statement { line, kind });
        }
    }

    /// The rest of the opening tag and the statements up to one of `ends`, whose name is taken.
    fn body(&mut self, ends: &[&str]) -> Result<(Vec<Statement>, String), Error> {
        self.take_sign(":");
        self.expect_block_end()?;
        let statements = self.statements(ends)?;
        Ok((statements, self.expect_name("a tag")?))
    }

    fn tag(&mut self) -> Result<StatementKind, Error> {
        let name = self.expect_name("the name of a tag")?;
        match name.as_str() {
            "for" => self.for_loop(),
            "if" => self.condition(),
            "set" => self.set(),
            "macro" => self.macro_block(),
            "call" => self.call_block(),
            "filter" => {
                let filters = self.filters()?;
                Ok(StatementKind::FilterBlock(filters, self.body(&["endfilter"])?.0))
            }
            "with" => self.with(),
            "generation" => Ok(StatementKind::Generation(self.body(&["endgeneration"])?.0)),
            "break" => Ok(StatementKind::Break),
            "continue" => Ok(StatementKind::Continue),
            "print" => self.print(),
            _ => Err(Error::new(format!("the tag {name:?} is not known to chat templates"))),
        }
    }

    fn print(&mut self) -> Result<StatementKind, Error> {
        let line = self.line();
        let mut items = vec![self.expression()?];
        while self.take_sign(",") {
            items.push(self.expression()?);
        }
        Ok(StatementKind::Print(Expr { line, kind: ExprKind::Concat(items) }))
    }

    fn for_loop(&mut self) -> Result<StatementKind, Error> {
        let target = self.target()?;
        if !self.take_name("in") {
            return Err(self.unexpected("in"));
        }
        let over = self.tuple(false)?;
        let test = self.take_name("if").then(|| self.expression()).transpose()?;
        let is_recursive = self.take_name("recursive");
        let (body, end) = self.body(&["endfor", "else"])?;
        let otherwise = if end == "else" { self.body(&["endfor"])?.0 } else { Vec::new() };
        Ok(StatementKind::For(Arc::new(ForLoop { target, over, test, is_recursive, body, otherwise })))
    }

    fn condition(&mut self) -> Result<StatementKind, Error> {
        let mut branches = Vec::new();
        loop {
            let test = self.tuple(false)?;
            let (body, end) = self.body(&["elif", "else", "endif"])?;
            branches.push((test, body));
            match end.as_str() {
                "elif" => {}
                "else" => return Ok(StatementKind::If { branches, otherwise: self.body(&["endif"])?.0 }),
                _ => return Ok(StatementKind::If { branches, otherwise: Vec::new() }),
            }
        }
    }

    fn set(&mut self) -> Result<StatementKind, Error> {
        let target = self.target()?;
        if self.take_sign("=") {
            return Ok(StatementKind::Set(target, self.tuple(true)?));
        }
        let filters = if self.take_sign("|") { self.filters()? } else { Vec::new() };
        Ok(StatementKind::SetBlock(target, filters, self.body(&["endset"])?.0))
    }

    fn with(&mut self) -> Result<StatementKind, Error> {
        let mut values = Vec::new();
        while !matches!(self.peek(), Token::BlockEnd) {
            if !values.is_empty() {
                self.expect_sign(",")?;
            }
            let target = self.target()?;
            self.expect_sign("=")?;
            values.push((target, self.expression()?));
        }
        Ok(StatementKind::With(values, self.body(&["endwith"])?.0))
    }

    fn macro_block(&mut self) -> Result<StatementKind, Error> {
        let name = self.expect_name("the name of a macro")?;
        Ok(StatementKind::Macro(Arc::new(self.macro_of(name, "endmacro", |_| Ok(()))?.0)))
    }

    fn call_block(&mut self) -> Result<StatementKind, Error> {
        let (caller, call) = self.macro_of("caller".to_owned(), "endcall", |parser| parser.expression())?;
        match call.kind {
            ExprKind::Call(callee, arguments) => {
                Ok(StatementKind::CallBlock { callee, arguments, caller: Arc::new(caller) })
            }
            _ => Err(Error::new("expected a call after the tag call").at(call.line)),
        }
    }

    /// Parameters, what `before_body` parses, and the body.
    fn macro_of<T>(
        &mut self,
        name: String,
        end: &str,
        before_body: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<(Macro, T), Error> {
        let outer = std::mem::take(&mut self.reads);
        let parameters = if self.is_sign("(") { self.parameters()? } else { Vec::new() };
        let before = before_body(self)?;
        let body = self.body(&[end])?.0;
        let reads = std::mem::replace(&mut self.reads, outer);
        let takes = |name: &str| reads.iter().any(|read| read == name);
        let (takes_varargs, takes_kwargs, takes_caller) = (takes("varargs"), takes("kwargs"), takes("caller"));
        Ok((Macro { name, parameters, body, takes_varargs, takes_kwargs, takes_caller }, before))
    }

    fn parameters(&mut self) -> Result<Vec<(String, Option<Expr>)>, Error> {
        self.expect_sign("(")?;
        let mut parameters: Vec<(String, Option<Expr>)> = Vec::new();
        while !self.is_sign(")") {
            if !parameters.is_empty() {
                self.expect_sign(",")?;
            }
            let name = self.expect_name("the name of a parameter")?;
            let default = self.take_sign("=").then(|| self.expression()).transpose()?;
            if default.is_none() && parameters.last().is_some_and(|(_, default)| default.is_some()) {
                return Err(Error::new(format!("parameter {name} without a default follows one that has one")));
            }
            parameters.push((name, default));
        }
        self.expect_sign(")")?;
        Ok(parameters)
    }

    /// The filters of a block: the first one without `|`.
    fn filters(&mut self) -> Result<Vec<Applied>, Error> {
        let mut filters = Vec::new();
        loop {
            filters.push(self.applied_filter()?);
            if !self.take_sign("|") {
                return Ok(filters);
            }
        }
    }

    fn target(&mut self) -> Result<Target, Error> {
        let first = self.single_target()?;
        if !self.is_sign(",") {
            return Ok(first);
        }
        let mut targets = vec![first];
        while self.take_sign(",") && !self.is_name("in") && !self.is_sign("=") {
            targets.push(self.single_target()?);
        }
        Ok(Target::Tuple(targets))
    }

    fn single_target(&mut self) -> Result<Target, Error> {
        if self.take_sign("(") {
            let target = self.nested(|parser| parser.target())?;
            self.expect_sign(")")?;
            return Ok(target);
        }
        let name = self.expect_name("a name to assign to")?;
        if ["true", "false", "none", "True", "False", "None"].contains(&name.as_str()) {
            return Err(Error::new(format!("{name} cannot be assigned to")));
        }
        match self.take_sign(".") {
            true => Ok(Target::Attribute(name, self.expect_name("an attribute")?)),
            false => Ok(Target::Name(name)),
        }
    }
}
