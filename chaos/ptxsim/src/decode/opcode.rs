//! An opcode and its modifiers. Decoders take what they know; what is left over is not supported.

use crate::alu::Rounding;
use crate::error::PtxError;
use crate::syntax::RawInstr;
use crate::types::{Space, Ty};

pub(super) struct Opcode<'m> {
    pub(super) head: &'m str,
    raw: &'m RawInstr,
    modifiers: Vec<&'m str>,
}

impl<'m> Opcode<'m> {
    pub(super) fn new(raw: &'m RawInstr) -> Opcode<'m> {
        let mut words = raw.opcode.split('.');
        let head = words.next().unwrap_or_default();
        Opcode { head, raw, modifiers: words.collect() }
    }

    /// Removes a modifier and tells whether it was there.
    pub(super) fn take(&mut self, modifier: &str) -> bool {
        match self.modifiers.iter().position(|m| *m == modifier) {
            Some(at) => {
                self.modifiers.remove(at);
                true
            }
            None => false,
        }
    }

    /// Removes all of these modifiers, which make no difference to the interpreter.
    pub(super) fn ignore(&mut self, modifiers: &[&str]) {
        self.modifiers.retain(|m| !modifiers.contains(m));
    }

    /// Removes all modifiers that start so.
    pub(super) fn ignore_prefix(&mut self, prefix: &str) {
        self.modifiers.retain(|m| !m.starts_with(prefix));
    }

    /// Removes the first modifier that `find` maps to something.
    pub(super) fn take_map<T>(&mut self, find: impl Fn(&'m str) -> Option<T>) -> Option<T> {
        let (at, found) = self.modifiers.iter().enumerate().find_map(|(at, m)| find(m).map(|found| (at, found)))?;
        self.modifiers.remove(at);
        Some(found)
    }

    pub(super) fn take_first(&mut self) -> Option<&'m str> {
        (!self.modifiers.is_empty()).then(|| self.modifiers.remove(0))
    }

    pub(super) fn take_type(&mut self) -> Option<Ty> {
        self.take_map(Ty::parse)
    }

    pub(super) fn need_type(&mut self) -> Result<Ty, PtxError> {
        self.take_type().ok_or_else(|| self.unsupported("the type is missing"))
    }

    pub(super) fn take_space(&mut self) -> Option<Space> {
        self.take_map(Space::parse)
    }

    pub(super) fn take_rounding(&mut self) -> Option<(Rounding, bool)> {
        self.take_map(Rounding::parse)
    }

    pub(super) fn unsupported(&self, reason: &str) -> PtxError {
        PtxError::Unsupported { line: self.raw.line, instruction: self.raw.opcode.clone(), reason: reason.to_owned() }
    }

    /// Rejects the instruction if any modifier is left.
    pub(super) fn finish(&self) -> Result<(), PtxError> {
        match self.modifiers.first() {
            None => Ok(()),
            Some(modifier) => Err(self.unsupported(&format!("modifier `.{modifier}`"))),
        }
    }
}
