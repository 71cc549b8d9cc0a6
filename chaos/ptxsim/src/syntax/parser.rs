//! Directives and declarations: the module, its variables and its functions.

use super::lexer::{Token, tokens};
use super::{Function, Loc, Module, Operand, RegDecl, ScopeId, Var};
use crate::error::PtxError;
use crate::types::{Space, Ty};

/// Parses a PTX text.
pub(crate) fn parse(text: &str) -> Result<Module, PtxError> {
    let mut parser = Parser { tokens: tokens(text)?, at: 0, module: Module::default(), loc: 0 };
    parser.module.locs.push(Loc::default());
    while parser.peek() != Token::End {
        parser.module_item()?;
    }
    Ok(parser.module)
}

pub(super) struct Parser<'a> {
    pub(super) tokens: Vec<(Token<'a>, u32)>,
    pub(super) at: usize,
    pub(super) module: Module,
    /// The source place of the next instruction.
    pub(super) loc: u32,
}

impl<'a> Parser<'a> {
    fn module_item(&mut self) -> Result<(), PtxError> {
        let word = self.word("a directive")?;
        match word {
            ".version" | ".target" | ".address_size" => {
                let line = self.tokens[self.at - 1].1;
                while self.line() == line && self.peek() != Token::End {
                    self.at += 1;
                }
            }
            ".file" => self.file()?,
            ".section" => {
                self.word("a section name")?;
                self.skip_braces()?;
            }
            ".visible" | ".extern" | ".weak" | ".common" => {}
            ".entry" | ".func" => {
                let function = self.function(word == ".entry")?;
                self.module.functions.push(function);
            }
            ".pragma" | ".alias" => self.skip_to_semicolon()?,
            ".global" | ".const" | ".shared" => {
                let var = self.var(word, 0)?;
                self.expect(';')?;
                self.module.vars.push(var);
            }
            other => return Err(self.error_before("a directive of a module", other)),
        }
        Ok(())
    }

    /// `.file 1 "kernels.cu"`, possibly with a time stamp and a size.
    fn file(&mut self) -> Result<(), PtxError> {
        let number = self.integer()? as u32;
        let Token::Text(name) = self.next() else { return Err(self.error_before("a file name", "something else")) };
        self.module.files.insert(number, name.to_owned());
        while self.take(',') {
            self.integer()?;
        }
        Ok(())
    }

    fn function(&mut self, is_kernel: bool) -> Result<Function, PtxError> {
        let mut function = Function { is_kernel, scopes: vec![0], ..Function::default() };
        if !is_kernel && self.peek() == Token::Punct('(') {
            function.returns = self.params()?;
        }
        function.line = self.line();
        function.name = self.word("the name of a function")?.to_owned();
        if self.peek() == Token::Punct('(') {
            function.params = self.params()?;
        }
        loop {
            match self.peek() {
                Token::Punct(';') => {
                    self.at += 1;
                    return Ok(function);
                }
                Token::Punct('{') => {
                    function.has_body = true;
                    self.at += 1;
                    self.body(&mut function)?;
                    return Ok(function);
                }
                Token::Word(word) => {
                    self.at += 1;
                    let values = self.integers()?;
                    if matches!(word, ".maxntid" | ".reqntid") {
                        function.threads_max = Some(values.iter().product());
                    }
                }
                _ => return Err(self.error("the body of a function")),
            }
        }
    }

    fn params(&mut self) -> Result<Vec<Var>, PtxError> {
        let mut params = Vec::new();
        self.expect('(')?;
        while !self.take(')') {
            let word = self.word("a parameter")?;
            params.push(self.var(word, 0)?);
            self.take(',');
        }
        Ok(params)
    }

    /// A variable, after its state space: `.align 4 .b8 name[128] = {…}`.
    pub(super) fn var(&mut self, space: &str, scope: ScopeId) -> Result<Var, PtxError> {
        let space = Space::parse(&space[1..]).ok_or_else(|| self.error_before("a state space", space))?;
        let (mut align, mut element) = (None, None);
        let name = loop {
            match self.word("a declaration")? {
                ".align" if element.is_some() => {
                    // The alignment of what a `.ptr` parameter points to.
                    self.integer()?;
                }
                ".align" => align = Some(self.integer()? as usize),
                ".ptr" | ".global" | ".shared" | ".const" | ".local" | ".managed" => {}
                ".attribute" => {
                    while !self.take(')') {
                        self.at += 1;
                    }
                }
                word if word.starts_with('.') => {
                    let ty = match &word[1..] {
                        "v2" | "v4" | "texref" | "samplerref" | "surfref" => None,
                        name => Ty::parse(name),
                    };
                    element = Some(ty.ok_or_else(|| self.error_before("the type of a variable", word))?);
                }
                name => break name.to_owned(),
            }
        };
        let element = element.ok_or_else(|| self.error_before("the type of a variable", &name))?.bytes();
        let mut bytes = Some(element);
        while self.take('[') {
            if self.take(']') {
                bytes = None;
                continue;
            }
            let n = self.integer()? as usize;
            bytes = bytes.map(|b| b * n);
            self.expect(']')?;
        }
        let mut init = Vec::new();
        if self.take('=') {
            self.initial_value(element, &mut init)?;
        }
        Ok(Var { scope, name, space, align: align.unwrap_or(element).max(1), bytes, init })
    }

    fn initial_value(&mut self, element: usize, to: &mut Vec<u8>) -> Result<(), PtxError> {
        if !self.take('{') {
            let Operand::Literal(bits) = self.operand()? else {
                return Err(self.error_before("a number as the initial value", "a symbol"));
            };
            to.extend_from_slice(&bits.to_le_bytes()[..element]);
            return Ok(());
        }
        while !self.take('}') {
            self.initial_value(element, to)?;
            self.take(',');
        }
        Ok(())
    }

    /// `.reg .f32 %f<44>, %g;` after its first word.
    pub(super) fn registers(&mut self, function: &mut Function, scope: ScopeId) -> Result<(), PtxError> {
        let word = self.word("a type")?;
        let ty = Ty::parse(&word[1..]).ok_or_else(|| self.error_before("the type of a register", word))?;
        loop {
            let name = self.word("the name of a register")?.to_owned();
            let mut count = None;
            if self.take('<') {
                count = Some(self.integer()? as u32);
                self.expect('>')?;
            }
            function.regs.push(RegDecl { scope, name, ty, count });
            if !self.take(',') {
                return self.expect(';');
            }
        }
    }

    /// `.loc 1 25 5, function_name $L, inlined_at 1 43 5`.
    pub(super) fn location(&mut self) -> Result<(), PtxError> {
        let (file, line) = (self.integer()? as u32, self.integer()? as u32);
        self.integer()?;
        let mut inlined_at = None;
        while self.take(',') {
            match self.word("`function_name` or `inlined_at`")? {
                "function_name" => {
                    self.word("a label")?;
                    if self.take('+') {
                        self.integer()?;
                    }
                }
                "inlined_at" => {
                    inlined_at = Some((self.integer()? as u32, self.integer()? as u32));
                    self.integer()?;
                }
                other => return Err(self.error_before("`function_name` or `inlined_at`", other)),
            }
        }
        // Line 0 marks instructions that belong to no line; the place before it is the better answer.
        if line != 0 {
            self.loc = self.module.locs.len() as u32;
            self.module.locs.push(Loc { file, line, inlined_at });
        }
        Ok(())
    }

    fn skip_braces(&mut self) -> Result<(), PtxError> {
        self.expect('{')?;
        let mut depth = 1;
        while depth > 0 {
            match self.next() {
                Token::Punct('{') => depth += 1,
                Token::Punct('}') => depth -= 1,
                Token::End => return Err(self.error("`}`")),
                _ => {}
            }
        }
        Ok(())
    }

    pub(super) fn skip_to_semicolon(&mut self) -> Result<(), PtxError> {
        while !self.take(';') {
            if self.next() == Token::End {
                return Err(self.error("`;`"));
            }
        }
        Ok(())
    }

    pub(super) fn peek(&self) -> Token<'a> {
        self.tokens[self.at].0
    }

    pub(super) fn next(&mut self) -> Token<'a> {
        let token = self.peek();
        self.at = (self.at + 1).min(self.tokens.len() - 1);
        token
    }

    pub(super) fn line(&self) -> u32 {
        self.tokens[self.at].1
    }

    pub(super) fn take(&mut self, punct: char) -> bool {
        let found = self.peek() == Token::Punct(punct);
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect(&mut self, punct: char) -> Result<(), PtxError> {
        if self.take(punct) { Ok(()) } else { Err(self.error(&format!("`{punct}`"))) }
    }

    pub(super) fn word(&mut self, expected: &str) -> Result<&'a str, PtxError> {
        match self.peek() {
            Token::Word(word) => {
                self.at += 1;
                Ok(word)
            }
            _ => Err(self.error(expected)),
        }
    }

    pub(super) fn integer(&mut self) -> Result<u64, PtxError> {
        match self.operand()? {
            Operand::Literal(value) => Ok(value),
            _ => Err(self.error_before("an integer", "a name")),
        }
    }

    fn integers(&mut self) -> Result<Vec<u64>, PtxError> {
        let mut values = Vec::new();
        while let Token::Word(word) = self.peek()
            && word.starts_with(|c: char| c.is_ascii_digit())
        {
            values.push(self.integer()?);
            self.take(',');
        }
        Ok(values)
    }

    pub(super) fn error(&self, expected: &str) -> PtxError {
        let found = match self.peek() {
            Token::Word(word) => format!("`{word}`"),
            Token::Text(text) => format!("\"{text}\""),
            Token::Punct(c) => format!("`{c}`"),
            Token::End => "the end of the text".into(),
        };
        PtxError::Syntax { line: self.line(), expected: expected.into(), found }
    }

    /// An error about the token just consumed.
    pub(super) fn error_before(&self, expected: &str, found: &str) -> PtxError {
        let line = self.tokens[self.at.saturating_sub(1)].1;
        PtxError::Syntax { line, expected: expected.into(), found: format!("`{found}`") }
    }
}
