//! Parses expressions. Each method is one level of precedence of `jinja2/parser.py`, loosest first.

use super::ast::{Applied, Arguments, Binary, Comparison, Expr, ExprKind};
use super::error::Error;
use super::lexer::Token;
use super::parser::Parser;

/// Operators of one kind in a row; each makes the tree one level deeper.
const CHAIN_MAX: usize = 100;

/// Makes an expression of an operator's two operands.
type Joined = fn(Box<Expr>, Box<Expr>) -> ExprKind;

impl Parser {
    /// An expression, or several with commas as a tuple.
    pub(super) fn tuple(&mut self, with_condition: bool) -> Result<Expr, Error> {
        let line = self.line();
        let item = |parser: &mut Self| match with_condition {
            true => parser.expression(),
            false => parser.nested(|parser| parser.or()),
        };
        let first = item(self)?;
        if !self.is_sign(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.take_sign(",") {
            let ends = matches!(self.peek(), Token::PrintEnd | Token::BlockEnd) || self.is_sign(")");
            if ends || self.is_name("recursive") {
                break;
            }
            items.push(item(self)?);
        }
        Ok(Expr { line, kind: ExprKind::Tuple(items) })
    }

    /// An expression with conditions: `a if b else c`.
    pub(super) fn expression(&mut self) -> Result<Expr, Error> {
        self.nested(|parser| {
            let line = parser.line();
            let mut value = parser.or()?;
            for _ in 0..CHAIN_MAX {
                if !parser.take_name("if") {
                    return Ok(value);
                }
                let test = Box::new(parser.or()?);
                let otherwise = parser.take_name("else").then(|| parser.expression()).transpose()?.map(Box::new);
                value = Expr { line, kind: ExprKind::Condition { test, then: Box::new(value), otherwise } };
            }
            Err(too_long(line))
        })
    }

    fn or(&mut self) -> Result<Expr, Error> {
        self.chain(Self::and, |parser| parser.take_name("or").then_some(ExprKind::Or as fn(_, _) -> _))
    }

    fn and(&mut self) -> Result<Expr, Error> {
        self.chain(Self::not, |parser| parser.take_name("and").then_some(ExprKind::And as fn(_, _) -> _))
    }

    /// Operands with operators between them, grouped from the left.
    fn chain(
        &mut self,
        operand: fn(&mut Self) -> Result<Expr, Error>,
        operator: impl Fn(&mut Self) -> Option<Joined>,
    ) -> Result<Expr, Error> {
        let line = self.line();
        let mut left = operand(self)?;
        for _ in 0..CHAIN_MAX {
            let Some(joined) = operator(self) else { return Ok(left) };
            let right = operand(self)?;
            left = Expr { line, kind: joined(Box::new(left), Box::new(right)) };
        }
        Err(too_long(line))
    }

    fn not(&mut self) -> Result<Expr, Error> {
        let line = self.line();
        match self.take_name("not") {
            true => self.nested(|parser| Ok(Expr { line, kind: ExprKind::Not(Box::new(parser.not()?)) })),
            false => self.comparison(),
        }
    }

    fn comparison(&mut self) -> Result<Expr, Error> {
        let line = self.line();
        let first = self.sum()?;
        let mut others = Vec::new();
        loop {
            let comparison = match self.peek() {
                Token::Sign("==") => Comparison::Eq,
                Token::Sign("!=") => Comparison::Ne,
                Token::Sign("<") => Comparison::Lt,
                Token::Sign("<=") => Comparison::Le,
                Token::Sign(">") => Comparison::Gt,
                Token::Sign(">=") => Comparison::Ge,
                Token::Name(name) if name == "in" => Comparison::In,
                Token::Name(name)
                    if name == "not" && matches!(self.peek_second(), Token::Name(name) if name == "in") =>
                {
                    self.next();
                    Comparison::NotIn
                }
                _ if others.is_empty() => return Ok(first),
                _ => return Ok(Expr { line, kind: ExprKind::Compare(Box::new(first), others) }),
            };
            self.next();
            others.push((comparison, self.sum()?));
        }
    }

    fn sum(&mut self) -> Result<Expr, Error> {
        self.chain(Self::concat, |parser| match parser.peek() {
            Token::Sign("+") => parser.binary(|a, b| ExprKind::Binary(Binary::Add, a, b)),
            Token::Sign("-") => parser.binary(|a, b| ExprKind::Binary(Binary::Sub, a, b)),
            _ => None,
        })
    }

    /// The constructor of an operator, whose sign is taken.
    #[allow(clippy::unnecessary_wraps, reason = "every caller returns it as an option")]
    fn binary(&mut self, operator: Joined) -> Option<Joined> {
        self.next();
        Some(operator)
    }

    fn concat(&mut self) -> Result<Expr, Error> {
        let line = self.line();
        let first = self.product()?;
        if !self.is_sign("~") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.take_sign("~") {
            items.push(self.product()?);
        }
        Ok(Expr { line, kind: ExprKind::Concat(items) })
    }

    fn product(&mut self) -> Result<Expr, Error> {
        self.chain(Self::power, |parser| match parser.peek() {
            Token::Sign("*") => parser.binary(|a, b| ExprKind::Binary(Binary::Mul, a, b)),
            Token::Sign("/") => parser.binary(|a, b| ExprKind::Binary(Binary::Div, a, b)),
            Token::Sign("//") => parser.binary(|a, b| ExprKind::Binary(Binary::FloorDiv, a, b)),
            Token::Sign("%") => parser.binary(|a, b| ExprKind::Binary(Binary::Mod, a, b)),
            _ => None,
        })
    }

    fn power(&mut self) -> Result<Expr, Error> {
        self.chain(Self::filtered, |parser| match parser.peek() {
            Token::Sign("**") => parser.binary(|a, b| ExprKind::Binary(Binary::Pow, a, b)),
            _ => None,
        })
    }

    /// An operand with its filters and tests.
    fn filtered(&mut self) -> Result<Expr, Error> {
        let mut value = self.unary()?;
        for _ in 0..CHAIN_MAX {
            let line = self.line();
            let kind = if self.take_sign("|") {
                ExprKind::Filter(Box::new(value), self.applied_filter()?)
            } else if self.is_name("is") {
                self.test(value)?
            } else if self.is_sign("(") {
                ExprKind::Call(Box::new(value), self.arguments()?)
            } else {
                return Ok(value);
            };
            value = Expr { line, kind };
        }
        Err(too_long(self.line()))
    }

    fn unary(&mut self) -> Result<Expr, Error> {
        let line = self.line();
        let sign = if self.take_sign("-") {
            ExprKind::Negative as fn(_) -> _
        } else if self.take_sign("+") {
            ExprKind::Positive as fn(_) -> _
        } else {
            let value = self.primary()?;
            return self.postfix(value);
        };
        let operand = self.nested(|parser| parser.unary())?;
        self.postfix(Expr { line, kind: sign(Box::new(operand)) })
    }

    fn primary(&mut self) -> Result<Expr, Error> {
        let line = self.line();
        let kind = match self.peek().clone() {
            Token::Name(name) => {
                self.next();
                match name.as_str() {
                    "true" | "True" => ExprKind::Bool(true),
                    "false" | "False" => ExprKind::Bool(false),
                    "none" | "None" => ExprKind::None,
                    _ => {
                        self.note_read(&name);
                        ExprKind::Name(name)
                    }
                }
            }
            Token::Str(mut text) => {
                self.next();
                while let Token::Str(more) = self.peek() {
                    text += more;
                    self.next();
                }
                ExprKind::Str(text.into())
            }
            Token::Int(number) => {
                self.next();
                ExprKind::Int(number)
            }
            Token::Float(number) => {
                self.next();
                ExprKind::Float(number)
            }
            Token::Sign("(") => {
                self.next();
                let value = match self.is_sign(")") {
                    true => Expr { line, kind: ExprKind::Tuple(Vec::new()) },
                    false => self.tuple(true)?,
                };
                self.expect_sign(")")?;
                return Ok(value);
            }
            Token::Sign("[") => ExprKind::List(self.items("[", "]", Self::expression)?),
            Token::Sign("{") => ExprKind::Dict(self.items("{", "}", |parser| {
                let key = parser.expression()?;
                parser.expect_sign(":")?;
                Ok((key, parser.expression()?))
            })?),
            _ => return Err(self.unexpected("an expression")),
        };
        Ok(Expr { line, kind })
    }

    /// Items with commas between brackets; the last comma may follow the last item.
    fn items<T>(
        &mut self,
        open: &str,
        close: &str,
        item: impl Fn(&mut Self) -> Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        self.expect_sign(open)?;
        let mut items = Vec::new();
        while !self.is_sign(close) {
            if !items.is_empty() {
                self.expect_sign(",")?;
                if self.is_sign(close) {
                    break;
                }
            }
            items.push(item(self)?);
        }
        self.expect_sign(close)?;
        Ok(items)
    }

    fn postfix(&mut self, mut value: Expr) -> Result<Expr, Error> {
        for _ in 0..CHAIN_MAX {
            let line = self.line();
            let kind = if self.take_sign(".") {
                match self.next() {
                    Token::Name(name) => ExprKind::Attribute(Box::new(value), name),
                    Token::Int(number) => {
                        ExprKind::Item(Box::new(value), Box::new(Expr { line, kind: ExprKind::Int(number) }))
                    }
                    _ => return Err(Error::new("expected a name or a number after the point").at(line)),
                }
            } else if self.is_sign("[") {
                self.subscript(value)?
            } else if self.is_sign("(") {
                ExprKind::Call(Box::new(value), self.arguments()?)
            } else {
                return Ok(value);
            };
            value = Expr { line, kind };
        }
        Err(too_long(self.line()))
    }

    fn subscript(&mut self, value: Expr) -> Result<ExprKind, Error> {
        let line = self.line();
        self.expect_sign("[")?;
        let mut bounds = [None, None, None];
        let mut n_colons = 0;
        while !self.is_sign("]") {
            if self.take_sign(":") {
                n_colons += 1;
                if n_colons > 2 {
                    return Err(self.unexpected("]"));
                }
            } else if bounds[n_colons].is_none() {
                bounds[n_colons] = Some(self.tuple(true)?);
            } else {
                return Err(self.unexpected("]"));
            }
        }
        self.expect_sign("]")?;
        match (n_colons, bounds) {
            (0, [Some(item), ..]) => Ok(ExprKind::Item(Box::new(value), Box::new(item))),
            (0, _) => Err(Error::new("expected an expression between the brackets").at(line)),
            (_, bounds) => Ok(ExprKind::Slice(Box::new(value), Box::new(bounds))),
        }
    }

    fn arguments(&mut self) -> Result<Arguments, Error> {
        let line = self.line();
        let mut arguments = Arguments::default();
        self.expect_sign("(")?;
        let mut is_first = true;
        while !self.is_sign(")") {
            if !std::mem::take(&mut is_first) {
                self.expect_sign(",")?;
                if self.is_sign(")") {
                    break;
                }
            }
            let misplaced = || Err(Error::new("the arguments of a call are in a wrong order").at(line));
            if self.take_sign("*") {
                arguments.rest = Some(Box::new(self.expression()?));
            } else if self.take_sign("**") {
                arguments.named_rest = Some(Box::new(self.expression()?));
            } else if matches!(self.peek(), Token::Name(_)) && *self.peek_second() == Token::Sign("=") {
                let name = self.expect_name("the name of an argument")?;
                self.expect_sign("=")?;
                arguments.named.push((name, self.expression()?));
            } else if arguments.rest.is_some() || arguments.named_rest.is_some() || !arguments.named.is_empty() {
                return misplaced();
            } else {
                arguments.positional.push(self.expression()?);
            }
        }
        self.expect_sign(")")?;
        Ok(arguments)
    }

    /// The name and arguments of a filter, after `|`.
    pub(super) fn applied_filter(&mut self) -> Result<Applied, Error> {
        let name = self.applied_name("the name of a filter")?;
        let arguments = if self.is_sign("(") { self.arguments()? } else { Arguments::default() };
        Ok(Applied { name, arguments })
    }

    fn applied_name(&mut self, what: &str) -> Result<String, Error> {
        let mut name = self.expect_name(what)?;
        while self.take_sign(".") {
            name = format!("{name}.{}", self.expect_name(what)?);
        }
        Ok(name)
    }

    fn test(&mut self, value: Expr) -> Result<ExprKind, Error> {
        let line = self.line();
        self.next();
        let is_negated = self.take_name("not");
        let name = self.applied_name("the name of a test")?;
        let takes_one = match self.peek() {
            Token::Name(name) if name == "is" => {
                return Err(Error::new("tests with is cannot follow each other").at(line));
            }
            Token::Name(name) => !matches!(name.as_str(), "else" | "or" | "and"),
            Token::Str(_) | Token::Int(_) | Token::Float(_) | Token::Sign("[" | "{") => true,
            _ => false,
        };
        let arguments = if self.is_sign("(") {
            self.arguments()?
        } else if takes_one {
            let argument = self.primary()?;
            Arguments { positional: vec![self.postfix(argument)?], ..Arguments::default() }
        } else {
            Arguments::default()
        };
        let kind = ExprKind::Test(Box::new(value), Applied { name, arguments });
        Ok(if is_negated { ExprKind::Not(Box::new(Expr { line, kind })) } else { kind })
    }
}

fn too_long(line: u32) -> Error {
    Error::new(format!("more than {CHAIN_MAX} operators follow each other")).at(line)
}
