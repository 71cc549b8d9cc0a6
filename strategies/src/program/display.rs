//! Programs as text: one line per instruction, for debugging and error messages.

use super::{Instr, Program, ValueId};
use std::fmt;

impl Program {
    /// `%7 qkv bf16[1024, 1536]`.
    pub fn describe_value(&self, id: ValueId) -> String {
        match self.values.get(id.0 as usize) {
            Some(v) => format!("%{} {} {}{:?}", id.0, v.name, v.dtype, v.shape),
            None => format!("%{} (no such value)", id.0),
        }
    }

    /// `%9 = matmul(%7 …, %2 …)`.
    pub fn describe_instr(&self, instr: &Instr) -> String {
        let list = |ids: &[ValueId]| ids.iter().map(|v| self.describe_value(*v)).collect::<Vec<_>>().join(", ");
        format!("{} = {}({})", list(&instr.writes), instr.op.name(), list(&instr.reads))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, instr) in self.instrs.iter().enumerate() {
            writeln!(f, "{i:5} {:?} {}", instr.site.phase, self.describe_instr(instr))?;
        }
        Ok(())
    }
}
