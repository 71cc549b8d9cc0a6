//! Rejects ill-formed programs before buffers are allocated; errors name the instruction and its values.
//!
//! Rules:
//! - VERIFY-1 every id refers to a value of the program;
//! - VERIFY-2 no value, and no column of one, is read before it is written (state, views of it, constants and inputs are
//!   there from the start);
//! - VERIFY-3 a value, or each column of one, is written once; of the values there from the start, only parameters, optimizer
//!   state and caches are written;
//! - VERIFY-4 operands and results have the number, shapes and element types of the operation;
//! - VERIFY-5 the sequence numbers of each stream count from 0, every started collective is awaited once, and until
//!   then its results are not touched and its operands not written;
//! - VERIFY-6 every output that the host reads is written;
//! - VERIFY-7 a view has the bytes of a parameter that no instruction writes, or of an activation, or is the first part of a split
//!   weight that only updates and embeddings access; VERIFY-2 and VERIFY-5 hold for the viewed value when the view is used.

use crate::program::op::signature::Signature;
use crate::program::{Collective, Columns, DType, Instr, Kind, MatMul, Op, Program, Stream, Value, ValueId, op};
use std::collections::BTreeMap;

/// Why a program cannot run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// An instruction breaks a rule.
    #[error("instruction {index} `{instr}`: {problem}")]
    Instr {
        /// Position in the program.
        index: usize,
        /// The instruction with its values.
        instr: String,
        /// What is wrong, and what was expected.
        problem: String,
    },
    /// A view has other bytes than a parameter or an activation, or those of a parameter that is written; or it is part of a split weight
    /// that something else than an update or an embedding reads.
    #[error(
        "`{value}` must view a frozen parameter or an activation of equal size, or the first part of a split weight"
    )]
    View {
        /// The value.
        value: String,
    },
    /// An output is never written.
    #[error("output `{value}` is never written")]
    Unwritten {
        /// The value.
        value: String,
    },
}

/// Checks rules VERIFY-1 to VERIFY-7.
///
/// # Errors
/// The first instruction that breaks one.
pub fn verify(program: &Program) -> Result<(), VerifyError> {
    views(program)?;
    let mut state = State {
        program,
        written: program.values.iter().map(|v| v.kind.is_given()).collect(),
        columns: BTreeMap::new(),
        in_flight: BTreeMap::new(),
        next: BTreeMap::new(),
    };
    for (index, instr) in program.instrs.iter().enumerate() {
        state.step(instr).map_err(|problem| VerifyError::Instr {
            index,
            instr: program.describe_instr(instr),
            problem,
        })?;
    }
    if let Some(flight) = state.in_flight.values().next() {
        let last = program.instrs.len().saturating_sub(1);
        return Err(VerifyError::Instr {
            index: last,
            instr: program.instrs.last().map(|i| program.describe_instr(i)).unwrap_or_default(),
            problem: format!("{} is never awaited", flight.collective),
        });
    }
    let is_incomplete = |v: ValueId| !state.written[v.0 as usize] || state.columns.contains_key(&v);
    match program.bindings.iter().find(|b| is_incomplete(b.value)) {
        Some(b) => Err(VerifyError::Unwritten { value: program.describe_value(b.value) }),
        None => Ok(()),
    }
}

fn views(program: &Program) -> Result<(), VerifyError> {
    let n = program.values.len();
    let (mut is_written, mut has_others) = (vec![false; n], vec![false; n]);
    let mark = |of: &mut Vec<bool>, v: &ValueId| of.get_mut(v.0 as usize).into_iter().for_each(|marked| *marked = true);
    for instr in &program.instrs {
        instr.writes.iter().for_each(|v| mark(&mut is_written, v));
        let others = instr.reads.iter().enumerate().filter(|(i, _)| !instr.op.operation().reads_split(*i));
        others.for_each(|(_, v)| mark(&mut has_others, v));
    }
    for (index, value) in program.values.iter().enumerate() {
        let Kind::View(of) = value.kind else { continue };
        let at = of.0 as usize;
        let is_part = |whole: &Value| {
            let types = (whole.dtype, value.dtype) == (DType::F32, DType::Bf16);
            types && whole.shape == value.shape && !has_others[at]
        };
        let fits = |whole: &Value| match whole.kind {
            Kind::Parameter if whole.is_split => is_part(whole),
            Kind::Parameter | Kind::OffloadedState => whole.size_bytes() == value.size_bytes() && !is_written[at],
            kind => kind == Kind::Activation && whole.size_bytes() == value.size_bytes(),
        };
        if !program.values.get(at).is_some_and(fits) {
            return Err(VerifyError::View { value: program.describe_value(ValueId(index as u32)) });
        }
    }
    Ok(())
}

struct State<'a> {
    program: &'a Program,
    written: Vec<bool>,
    /// For each value that is not complete, the columns that instructions have written.
    columns: BTreeMap<ValueId, Vec<Columns>>,
    /// Collectives that were started and not yet awaited.
    in_flight: BTreeMap<(Stream, u32), Flight<'a>>,
    next: BTreeMap<Stream, u32>,
}

struct Flight<'a> {
    collective: Collective,
    operands: &'a [ValueId],
    results: &'a [ValueId],
}

impl<'a> State<'a> {
    fn step(&mut self, instr: &'a Instr) -> Result<(), String> {
        let p = self.program;
        if let Some(v) = instr.reads.iter().chain(&instr.writes).find(|v| v.0 as usize >= p.values.len()) {
            return Err(format!("{} does not exist", p.describe_value(*v)));
        }
        if let Some(v) = instr.reads.iter().find(|v| !self.written[p.storage(**v).0 as usize]) {
            return Err(format!("`{}` is read before it is written", p.describe_value(*v)));
        }
        // A product that replaces columns of its residual needs no others of it.
        let replaced = usize::from(matches!(instr.op, Op::MatMul(MatMul { replaces: true, .. })));
        let n_whole = instr.reads.len().saturating_sub(replaced);
        if let Some(v) = instr.reads[..n_whole].iter().find(|v| self.columns.contains_key(&p.storage(**v))) {
            return Err(format!("columns of `{}` are read before they are written", p.describe_value(*v)));
        }
        if !self.in_flight.is_empty() && !matches!(instr.op, Op::Await(_)) {
            self.untouched(instr)?;
        }
        check(p, instr)?;
        self.write_columns(instr)?;
        self.collective(instr)?;
        for v in &instr.writes {
            self.write(instr, *v)?;
        }
        Ok(())
    }

    fn untouched(&self, instr: &Instr) -> Result<(), String> {
        for flight in self.in_flight.values() {
            let busy = |v: &&ValueId| flight.results.contains(&self.program.storage(**v));
            if let Some(v) = instr.reads.iter().chain(&instr.writes).find(busy) {
                return Err(format!("`{}` is used before its collective is awaited", self.program.describe_value(*v)));
            }
            if let Some(v) = instr
                .writes
                .iter()
                .find(|v| flight.operands.iter().any(|operand| self.program.storage(*operand) == **v))
            {
                return Err(format!(
                    "`{}` is written while {} reads it",
                    self.program.describe_value(*v),
                    flight.collective
                ));
            }
        }
        Ok(())
    }

    fn write(&mut self, instr: &Instr, v: ValueId) -> Result<(), String> {
        let value = self.program.value(v);
        let updates = value.kind.is_updated() && instr.reads.contains(&v);
        let written = std::mem::replace(&mut self.written[v.0 as usize], true);
        if written && !updates {
            return Err(format!("`{}` is written a second time", self.program.describe_value(v)));
        }
        Ok(())
    }

    /// Records the columns that an instruction writes, if it leaves others of its result unwritten.
    fn write_columns(&mut self, instr: &Instr) -> Result<(), String> {
        let Op::MatMul(MatMul { c_columns: Some(here), residual, .. }) = instr.op else { return Ok(()) };
        let before = instr.reads.last().filter(|_| residual).map(|residual| self.columns.get(residual));
        let mut written = match before {
            // Of a whole residual.
            Some(None) => return Ok(()),
            Some(Some(columns)) => columns.clone(),
            None => Vec::new(),
        };
        if written.iter().any(|c| c.start < here.start + here.len && here.start < c.start + c.len) {
            return Err(format!("columns {}..{} are written a second time", here.start, here.start + here.len));
        }
        written.push(here);
        let y = instr.writes[0];
        if written.iter().map(|c| c.len).sum::<usize>() < self.program.value(y).n_columns() {
            self.columns.insert(y, written);
        }
        Ok(())
    }

    fn collective(&mut self, instr: &'a Instr) -> Result<(), String> {
        match instr.op {
            Op::Start(op::Start(c)) => {
                let next = self.next.entry(c.stream()).or_default();
                if c.sequence != *next {
                    return Err(format!("{c} is out of sequence, expected #{next}"));
                }
                *next += 1;
                let flight = Flight { collective: c, operands: &instr.reads, results: &instr.writes };
                self.in_flight.insert((c.stream(), c.sequence), flight);
                Ok(())
            }
            Op::Await(op::Await(c)) => match self.in_flight.remove(&(c.stream(), c.sequence)) {
                Some(f) if f.results == instr.reads && f.collective == c => Ok(()),
                Some(f) => Err(format!("{} was started with other results", f.collective)),
                None => Err(format!("{c} is not in flight")),
            },
            _ => Ok(()),
        }
    }
}

/// Checks operands and results against the signature of the operation.
fn check(program: &Program, instr: &Instr) -> Result<(), String> {
    let reads: Vec<&Value> = instr.reads.iter().map(|v| program.value(*v)).collect();
    let writes: Vec<&Value> = instr.writes.iter().map(|v| program.value(*v)).collect();
    let signature = Signature { reads: &reads, writes: &writes, mesh_rank: &program.mesh_rank };
    instr.op.operation().check(&signature)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Axis, Group};
    use crate::program::{CollectiveKind, DType, MatMul, Phase, Site};

    const SITE: Site = Site { phase: Phase::Forward, block: None, microbatch: 0 };

    fn product(k_of_weight: usize) -> Program {
        let mut p = Program::default();
        let x = p.add_value("x", &[4, 8], DType::F32, Kind::Input);
        let w = p.add_value("w", &[3, k_of_weight], DType::F32, Kind::Parameter);
        let y = p.add_value("y", &[4, 3], DType::F32, Kind::Activation);
        p.push(Op::MatMul(MatMul::nt()), vec![x, w], vec![y], SITE);
        p
    }

    #[test]
    fn error_for_unequal_inner_dims_names_the_instruction() {
        assert_eq!(verify(&product(8)), Ok(()));
        let err = verify(&product(7)).unwrap_err().to_string();
        assert!(err.contains("%2 y f32[4, 3] = matmul(%0 x f32[4, 8], %1 w f32[3, 7])"), "{err}");
        assert!(err.contains("inner dims"), "{err}");
    }

    // VERIFY-7
    #[test]
    fn view_of_other_bytes_or_of_a_parameter_that_is_written_is_refused() {
        let mut p = product(8);
        let w = ValueId(1);
        let view = p.add_value("w as bf16", &[3, 16], DType::Bf16, Kind::View(w));
        assert_eq!(verify(&p), Ok(()));

        let view_of = |p: &Program, kind| {
            let mut p = p.clone();
            p.values[view.0 as usize].kind = kind;
            verify(&p).map_err(|error| error.to_string())
        };
        let refused =
            Err("`%3 w as bf16 bf16[3, 16]` must view a frozen parameter or an activation of equal size, or the first part of a split weight".into());
        assert_eq!(view_of(&p, Kind::View(ValueId(0))), refused, "an input");
        assert_eq!(view_of(&p, Kind::View(view)), refused, "itself");
        p.values[view.0 as usize].shape = vec![3, 15];
        assert_eq!(view_of(&p, Kind::View(w)), refused.clone().map_err(|e: String| e.replace("16]", "15]")));
        p.values[view.0 as usize].shape = vec![3, 16];
        p.push(Op::Add(op::Add), vec![w, w], vec![w], SITE);
        assert_eq!(view_of(&p, Kind::View(w)), refused, "a parameter that is updated");
    }

    // VERIFY-7
    #[test]
    fn part_of_a_weight_that_something_else_than_an_update_or_an_embedding_reads_is_refused() {
        let mut p = product(8);
        let w = ValueId(1);
        let view = p.split(w);
        assert!(verify(&p).is_err(), "a product reads the weight");

        p.instrs[0].reads[1] = view;
        assert_eq!(verify(&p), Ok(()));

        let sum = p.add_value("sum", &[3, 8], DType::F32, Kind::Activation);
        p.push(Op::Add(op::Add), vec![w, w], vec![sum], SITE);
        assert!(verify(&p).is_err(), "a sum reads it");
    }

    // VERIFY-7
    #[test]
    fn view_of_an_activation_is_refused_before_the_activation_is_there() {
        let gather = Collective::new(CollectiveKind::AllGather, Group::over(&[Axis::DpShard]));
        let with = |ops: &[Op]| {
            let mut p = Program::default();
            let part = p.add_value("part", &[3, 4], DType::I32, Kind::Parameter);
            let whole = p.add_value("whole", &[3, 4], DType::I32, Kind::Activation);
            let view = p.add_value("whole as bf16", &[3, 8], DType::Bf16, Kind::View(whole));
            let x = p.add_value("x", &[4, 8], DType::F32, Kind::Input);
            let y = p.add_value("y", &[4, 3], DType::F32, Kind::Activation);
            for op in ops {
                let (reads, writes) = match op {
                    Op::Start(_) => (vec![part], vec![whole]),
                    Op::Await(_) => (vec![whole], vec![]),
                    _ => (vec![x, view], vec![y]),
                };
                p.push(op.clone(), reads, writes, SITE);
            }
            verify(&p).map_err(|error| error.to_string())
        };
        let [start, product, wait] =
            [Op::Start(op::Start(gather)), Op::MatMul(MatMul::nt()), Op::Await(op::Await(gather))];

        assert_eq!(with(&[start.clone(), wait.clone(), product.clone()]), Ok(()));
        let early = with(&[product.clone(), start.clone(), wait.clone()]).unwrap_err();
        assert!(early.contains("is read before it is written"), "{early}");
        let in_flight = with(&[start, product, wait]).unwrap_err();
        assert!(in_flight.contains("is used before its collective is awaited"), "{in_flight}");
    }

    #[test]
    fn reading_before_writing_is_refused() {
        let mut p = product(8);
        p.instrs.insert(0, p.instrs[0].clone());
        p.instrs[0].reads[0] = ValueId(2);
        let err = verify(&p).unwrap_err().to_string();
        assert!(err.contains("read before it is written"), "{err}");
    }

    #[test]
    fn writing_twice_is_refused() {
        let mut p = product(8);
        p.instrs.push(p.instrs[0].clone());
        let err = verify(&p).unwrap_err().to_string();
        assert!(err.contains("instruction 1") && err.contains("written a second time"), "{err}");
    }

    // VERIFY-2, VERIFY-3
    #[test]
    fn products_write_columns_of_a_result_once_and_all_of_them_before_it_is_read() {
        let product_into = |first: usize, replaces: bool| {
            Op::MatMul(MatMul {
                residual: replaces,
                c_columns: Some(Columns { start: first, len: 3 }),
                replaces,
                ..MatMul::nt()
            })
        };
        let joined = |second: usize, reads_early: bool| {
            let mut p = product(8);
            let (x, w) = (ValueId(0), ValueId(1));
            let [left, both, sum] =
                ["left", "both", "sum"].map(|n| p.add_value(n, &[4, 6], DType::F32, Kind::Activation));
            p.push(product_into(0, false), vec![x, w], vec![left], SITE);
            p.push(product_into(second, true), vec![x, w, left], vec![both], SITE);
            let read = if reads_early { left } else { both };
            p.push(Op::Add(op::Add), vec![read, read], vec![sum], SITE);
            verify(&p).map_err(|error| error.to_string())
        };

        assert_eq!(joined(3, false), Ok(()));
        let early = joined(3, true).unwrap_err();
        assert!(early.contains("columns of `%3 left f32[4, 6]` are read before they are written"), "{early}");
        let twice = joined(2, false).unwrap_err();
        assert!(twice.contains("columns 2..5 are written a second time"), "{twice}");
    }

    #[test]
    fn value_that_does_not_exist_is_refused() {
        let mut p = product(8);
        p.instrs[0].reads[1] = ValueId(99);
        assert!(verify(&p).unwrap_err().to_string().contains("%99"), "names the id");
    }

    #[test]
    fn collective_result_may_not_be_read_before_its_await() {
        let mut p = product(8);
        let sum = p.add_value("sum", &[4, 3], DType::F32, Kind::Activation);
        let twice = p.add_value("twice", &[4, 3], DType::F32, Kind::Activation);
        let start = Collective::new(CollectiveKind::AllReduce, Group::over(&[Axis::Tp]));
        p.push(Op::Start(op::Start(start)), vec![ValueId(2)], vec![sum], SITE);
        let wait = Op::Await(op::Await(start));
        let mut good = p.clone();
        good.push(wait.clone(), vec![sum], vec![], SITE);
        good.push(Op::Add(op::Add), vec![sum, sum], vec![twice], SITE);
        p.push(Op::Add(op::Add), vec![sum, sum], vec![twice], SITE);
        p.push(wait, vec![sum], vec![], SITE);

        assert_eq!(verify(&good), Ok(()));
        assert!(verify(&p).unwrap_err().to_string().contains("before its collective is awaited"));
    }

    #[test]
    fn collective_that_is_never_awaited_is_refused() {
        let mut p = product(8);
        let sum = p.add_value("sum", &[4, 3], DType::F32, Kind::Activation);
        let start = Collective::new(CollectiveKind::AllReduce, Group::over(&[Axis::Tp]));
        p.push(Op::Start(op::Start(start)), vec![ValueId(2)], vec![sum], SITE);
        assert!(verify(&p).unwrap_err().to_string().contains("never awaited"));
    }
}
