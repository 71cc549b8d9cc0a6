//! The syntax tree of a template.

use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Expr {
    pub(super) line: u32,
    pub(super) kind: ExprKind,
}

#[derive(Debug)]
pub(super) enum ExprKind {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    Name(String),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    /// `a.b`
    Attribute(Box<Expr>, String),
    /// `a[b]`
    Item(Box<Expr>, Box<Expr>),
    /// `a[start:stop:step]`
    Slice(Box<Expr>, Box<[Option<Expr>; 3]>),
    Call(Box<Expr>, Arguments),
    /// `a | name(…)`
    Filter(Box<Expr>, Applied),
    /// `a is name(…)`
    Test(Box<Expr>, Applied),
    Not(Box<Expr>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Binary(Binary, Box<Expr>, Box<Expr>),
    /// `a ~ b ~ c`
    Concat(Vec<Expr>),
    /// `a < b <= c`
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
    /// `then if test else otherwise`
    Condition {
        test: Box<Expr>,
        then: Box<Expr>,
        otherwise: Option<Box<Expr>>,
    },
}

/// A filter or test with its arguments.
#[derive(Debug)]
pub(super) struct Applied {
    pub(super) name: String,
    pub(super) arguments: Arguments,
}

#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Expr>,
    pub(super) named: Vec<(String, Expr)>,
    /// `*a`
    pub(super) rest: Option<Box<Expr>>,
    /// `**a`
    pub(super) named_rest: Option<Box<Expr>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

impl Binary {
    pub(super) fn sign(self) -> &'static str {
        match self {
            Self::Add => "+",
            Self::Sub => "-",
            Self::Mul => "*",
            Self::Div => "/",
            Self::FloorDiv => "//",
            Self::Mod => "%",
            Self::Pow => "** or pow()",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

#[derive(Debug)]
pub(super) struct Statement {
    pub(super) line: u32,
    pub(super) kind: StatementKind,
}

#[derive(Debug)]
pub(super) enum StatementKind {
    Data(Arc<str>),
    Print(Expr),
    For(Arc<ForLoop>),
    If {
        branches: Vec<(Expr, Vec<Statement>)>,
        otherwise: Vec<Statement>,
    },
    Set(Target, Expr),
    /// `{% set a | filter %}…{% endset %}`
    SetBlock(Target, Vec<Applied>, Vec<Statement>),
    Macro(Arc<Macro>),
    /// `{% call(parameters) callee(…) %}…{% endcall %}`
    CallBlock {
        callee: Box<Expr>,
        arguments: Arguments,
        caller: Arc<Macro>,
    },
    FilterBlock(Vec<Applied>, Vec<Statement>),
    With(Vec<(Target, Expr)>, Vec<Statement>),
    /// The block of transformers around what an assistant answers.
    Generation(Vec<Statement>),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct ForLoop {
    pub(super) target: Target,
    pub(super) over: Expr,
    pub(super) test: Option<Expr>,
    pub(super) is_recursive: bool,
    pub(super) body: Vec<Statement>,
    pub(super) otherwise: Vec<Statement>,
}

#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: String,
    pub(super) parameters: Vec<(String, Option<Expr>)>,
    pub(super) body: Vec<Statement>,
    /// Whether the body reads `varargs`, `kwargs` and `caller`, which it then takes.
    pub(super) takes_varargs: bool,
    pub(super) takes_kwargs: bool,
    pub(super) takes_caller: bool,
}

/// What is assigned to.
#[derive(Debug)]
pub(super) enum Target {
    Name(String),
    Tuple(Vec<Target>),
    /// Of a namespace.
    Attribute(String, String),
}
