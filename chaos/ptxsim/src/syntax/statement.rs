//! Bodies of functions: scopes, labels, instructions and their operands.

use super::lexer::Token;
use super::parser::Parser;
use super::{Function, Operand, RawInstr, ScopeId};
use crate::error::PtxError;

impl Parser<'_> {
    /// The body of a function, after its opening brace.
    pub(super) fn body(&mut self, function: &mut Function) -> Result<(), PtxError> {
        let mut open: Vec<ScopeId> = vec![0];
        while let Some(&scope) = open.last() {
            match self.peek() {
                Token::Punct('{') => {
                    self.at += 1;
                    function.scopes.push(scope);
                    open.push(function.scopes.len() - 1);
                }
                Token::Punct('}') => {
                    self.at += 1;
                    open.pop();
                }
                Token::Punct(';') => self.at += 1,
                Token::Word(word) if word.starts_with('.') => {
                    self.at += 1;
                    self.body_directive(word, function, scope)?;
                }
                Token::Word(word) if self.tokens[self.at + 1].0 == Token::Punct(':') => {
                    self.at += 2;
                    self.label(word, function, scope)?;
                }
                Token::Word(_) | Token::Punct('@') => {
                    let instr = self.instruction(scope)?;
                    function.body.push(instr);
                }
                _ => return Err(self.error("an instruction")),
            }
        }
        Ok(())
    }

    fn body_directive(&mut self, word: &str, function: &mut Function, scope: ScopeId) -> Result<(), PtxError> {
        match word {
            ".reg" => self.registers(function, scope),
            ".loc" => self.location(),
            ".local" | ".shared" | ".param" | ".global" | ".const" => {
                let var = self.var(word, scope)?;
                function.vars.push(var);
                self.expect(';')
            }
            ".pragma" => self.skip_to_semicolon(),
            other => Err(self.error_before("a directive of a function", other)),
        }
    }

    fn label(&mut self, name: &str, function: &mut Function, scope: ScopeId) -> Result<(), PtxError> {
        match self.peek() {
            Token::Word(".branchtargets") => {
                self.at += 1;
                let mut targets = Vec::new();
                while !self.take(';') {
                    targets.push(self.word("a label")?.to_owned());
                    self.take(',');
                }
                function.branch_targets.push((scope, name.to_owned(), targets));
            }
            Token::Word(".callprototype" | ".calltargets") => self.skip_to_semicolon()?,
            _ => function.labels.push((scope, name.to_owned(), function.body.len())),
        }
        Ok(())
    }

    fn instruction(&mut self, scope: ScopeId) -> Result<RawInstr, PtxError> {
        let mut guard = None;
        if self.take('@') {
            let negated = self.take('!');
            guard = Some((self.word("a predicate")?.to_owned(), negated));
        }
        let line = self.line();
        let opcode = self.word("an opcode")?.to_owned();
        let mut operands = Vec::new();
        while !self.take(';') {
            operands.push(self.operand()?);
            if !self.take(',') && self.peek() != Token::Punct(';') {
                return Err(self.error("`,` or `;`"));
            }
        }
        Ok(RawInstr { scope, line, loc: self.loc, guard, opcode, operands })
    }

    pub(super) fn operand(&mut self) -> Result<Operand, PtxError> {
        match self.next() {
            Token::Punct('!') => Ok(Operand::Not(self.word("a predicate")?.to_owned())),
            Token::Punct('-') => {
                let word = self.word("a number")?;
                Ok(Operand::Literal(self.number(word)?.wrapping_neg()))
            }
            Token::Punct('[') => self.address(),
            Token::Punct('{') => self.list('}'),
            Token::Punct('(') => self.list(')'),
            Token::Word(word) if word.starts_with(|c: char| c.is_ascii_digit()) => {
                Ok(Operand::Literal(self.number(word)?))
            }
            Token::Word(word) if self.take('|') => {
                Ok(Operand::Pair(word.to_owned(), self.word("a register")?.to_owned()))
            }
            Token::Word(word) => self.name_with_offset(word),
            _ => {
                self.at -= 1;
                Err(self.error("an operand"))
            }
        }
    }

    /// A name, or `name+4`: an address that `mov` takes.
    fn name_with_offset(&mut self, word: &str) -> Result<Operand, PtxError> {
        if self.peek() != Token::Punct('+') {
            return Ok(Operand::Name(word.to_owned()));
        }
        let offset = self.offset()?;
        Ok(Operand::Address { base: Some(word.to_owned()), offset, coordinates: Vec::new() })
    }

    fn offset(&mut self) -> Result<i64, PtxError> {
        let mut offset = 0i64;
        loop {
            let negative = match self.peek() {
                Token::Punct('+') => self.take('+') && self.take('-'),
                Token::Punct('-') => self.take('-'),
                _ => return Ok(offset),
            };
            let value = self.integer()? as i64;
            offset += if negative { -value } else { value };
        }
    }

    fn address(&mut self) -> Result<Operand, PtxError> {
        let mut base = None;
        let mut offset = 0;
        match self.next() {
            Token::Word(word) if word.starts_with(|c: char| c.is_ascii_digit()) => offset = self.number(word)? as i64,
            Token::Word(word) => base = Some(word.to_owned()),
            _ => return Err(self.error_before("an address", "something else")),
        }
        offset += self.offset()?;
        let mut coordinates = Vec::new();
        if self.take(',') {
            let Operand::List(list) = self.operand()? else { return Err(self.error_before("coordinates", "a name")) };
            coordinates = list;
        }
        self.expect(']')?;
        Ok(Operand::Address { base, offset, coordinates })
    }

    fn list(&mut self, close: char) -> Result<Operand, PtxError> {
        let mut list = Vec::new();
        while !self.take(close) {
            list.push(self.operand()?);
            if !self.take(',') && self.peek() != Token::Punct(close) {
                return Err(self.error("`,` or the end of the list"));
            }
        }
        Ok(Operand::List(list))
    }

    /// `12`, `0x1F`, `0b101`, `0f3F800000`, `0d3FF0000000000000`, with or without a final `U`.
    fn number(&self, word: &str) -> Result<u64, PtxError> {
        let digits = word.strip_suffix('U').unwrap_or(word);
        let radix = |prefix: usize, radix| u64::from_str_radix(&digits[prefix..], radix);
        let value = match digits.get(..2) {
            Some("0x" | "0X" | "0f" | "0F" | "0d" | "0D") => radix(2, 16),
            Some("0b" | "0B") => radix(2, 2),
            Some(_) if digits.starts_with('0') => radix(1, 8),
            _ => radix(0, 10),
        };
        value.map_err(|_| self.error_before("a number", word))
    }
}
