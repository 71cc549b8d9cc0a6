//! From text to statements: nothing here knows what an instruction does.

mod lexer;
mod parser;
mod statement;

pub(crate) use parser::parse;

use crate::types::{Space, Ty};
use std::collections::BTreeMap;

/// A parsed module.
#[derive(Debug, Default)]
pub(crate) struct Module {
    pub(crate) functions: Vec<Function>,
    /// Variables at module scope.
    pub(crate) vars: Vec<Var>,
    /// Names of source files by the numbers that `.loc` uses.
    pub(crate) files: BTreeMap<u32, String>,
    /// Source places; instructions name them by index. Place 0 is "unknown".
    pub(crate) locs: Vec<Loc>,
}

/// A kernel or a device function.
#[derive(Debug, Default)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) is_kernel: bool,
    pub(crate) has_body: bool,
    pub(crate) line: u32,
    pub(crate) returns: Vec<Var>,
    pub(crate) params: Vec<Var>,
    pub(crate) vars: Vec<Var>,
    pub(crate) regs: Vec<RegDecl>,
    pub(crate) labels: Vec<(ScopeId, String, usize)>,
    /// Lists of labels for `brx.idx`.
    pub(crate) branch_targets: Vec<(ScopeId, String, Vec<String>)>,
    pub(crate) body: Vec<RawInstr>,
    /// The enclosing scope of each scope; scope 0 is the function.
    pub(crate) scopes: Vec<ScopeId>,
    /// Product of `.maxntid` or `.reqntid`.
    pub(crate) threads_max: Option<u64>,
}

pub(crate) type ScopeId = usize;

/// `.reg .f32 %f<44>;` or `.reg .pred p;`.
#[derive(Debug)]
pub(crate) struct RegDecl {
    pub(crate) scope: ScopeId,
    pub(crate) name: String,
    pub(crate) ty: Ty,
    /// With a count, the names are `name0`, `name1`, ….
    pub(crate) count: Option<u32>,
}

/// A variable or parameter.
#[derive(Clone, Debug)]
pub(crate) struct Var {
    pub(crate) scope: ScopeId,
    pub(crate) name: String,
    pub(crate) space: Space,
    pub(crate) align: usize,
    /// Size; `None` for the array of dynamic size (`extern __shared__`).
    pub(crate) bytes: Option<usize>,
    pub(crate) init: Vec<u8>,
}

/// A place in the CUDA source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Loc {
    pub(crate) file: u32,
    pub(crate) line: u32,
    /// File and line of the call, where the code was inlined.
    pub(crate) inlined_at: Option<(u32, u32)>,
}

/// An instruction with its operands, uninterpreted.
#[derive(Clone, Debug)]
pub(crate) struct RawInstr {
    pub(crate) scope: ScopeId,
    pub(crate) line: u32,
    pub(crate) loc: u32,
    /// The guard predicate and whether it is negated.
    pub(crate) guard: Option<(String, bool)>,
    pub(crate) opcode: String,
    pub(crate) operands: Vec<Operand>,
}

/// An operand as written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    Name(String),
    /// `!p`
    Not(String),
    /// An integer, sign-extended, or the bits of a floating-point literal.
    Literal(u64),
    /// `[base + offset]`, or `[base + offset, coordinates]` of a tensor.
    Address {
        base: Option<String>,
        offset: i64,
        coordinates: Vec<Operand>,
    },
    /// `{a, b}` or `(a, b)`.
    List(Vec<Operand>),
    /// `a|b`
    Pair(String, String),
}
