//! Sums over the tokens of each row of a microbatch.

use super::adjoints::{Adjoints, NoAdjoint};
use super::operation::Operation;
use super::signature::Signature;
use crate::program::{DType, Instr, Value, ValueId};
use std::ops::Range;

/// `[x N or [N, 1], labels N] -> [sums [2, R]]`, f64: for each row, the sum over its tokens that have a label, and their number. `N` is a multiple
/// of `R`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSums;

impl Operation for RowSums {
    fn name(&self) -> &'static str {
        "row_sums"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(2, 1)?;
        let n = check_tokens(s, s.reads[0])?;
        check_rows(s, n, s.reads[1], s.writes[0])
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        adjoints.simple(RowSumsBackward, instr.reads[0], vec![dy, instr.reads[1]]);
        Ok(())
    }

    fn wide_operands(&self, _is_wide: bool, n_reads: usize) -> Range<usize> {
        0..n_reads
    }
}

/// `[d [2, R], labels N] -> [dx N or [N, 1]]`: the derivative of a row's sum for each of its tokens that has a label, otherwise zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSumsBackward;

impl Operation for RowSumsBackward {
    fn name(&self) -> &'static str {
        "row_sums_backward"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(2, 1)?;
        let n = check_tokens(s, s.writes[0])?;
        check_rows(s, n, s.reads[1], s.reads[0])
    }
}

/// One number for each token; their number.
fn check_tokens(s: &Signature<'_>, x: &Value) -> Result<usize, String> {
    let shape = [x.n_elements(), 1];
    s.shape(x, &shape[..x.shape.len().clamp(1, 2)], Some(DType::F32))?;
    Ok(shape[0])
}

fn check_rows(s: &Signature<'_>, n: usize, labels: &Value, sums: &Value) -> Result<(), String> {
    s.shape(labels, &[n], Some(DType::I32))?;
    let rows = sums.n_columns();
    s.shape(sums, &[2, rows], Some(DType::F64))?;
    if rows == 0 || !n.is_multiple_of(rows) {
        return Err(format!("{n} tokens cannot be {rows} rows of one length"));
    }
    Ok(())
}
