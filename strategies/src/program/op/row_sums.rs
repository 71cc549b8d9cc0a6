//! Sums over the tokens of each row of a microbatch.

use super::adjoints::{Adjoints, NoAdjoint};
use super::operation::Operation;
use super::signature::Signature;
use crate::program::{DType, Instr, Value, ValueId};
use std::ops::Range;

/// `[x N or [N, 1], labels N, (weights N)] -> [sums [2, R]]`, f64: for each row, the sum over its tokens that have a label, and their number. With
/// weights, each token counts as much as its weight says in both. `N` is a multiple of `R`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSums;

impl Operation for RowSums {
    fn name(&self) -> &'static str {
        "row_sums"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(s.reads.len().clamp(2, 3), 1)?;
        let n = check_tokens(s, s.reads[0])?;
        check_rows(s, n, &s.reads[1..], s.writes[0])
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        let reads = [dy].into_iter().chain(instr.reads[1..].iter().copied()).collect();
        adjoints.simple(RowSumsBackward, instr.reads[0], reads);
        Ok(())
    }

    fn wide_operands(&self, _is_wide: bool, n_reads: usize) -> Range<usize> {
        0..n_reads
    }
}

/// `[d [2, R], labels N, (weights N)] -> [dx N or [N, 1]]`: the derivative of a row's sum for each of its tokens that has a label, times its
/// weight, otherwise zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSumsBackward;

impl Operation for RowSumsBackward {
    fn name(&self) -> &'static str {
        "row_sums_backward"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(s.reads.len().clamp(2, 3), 1)?;
        let n = check_tokens(s, s.writes[0])?;
        check_rows(s, n, &s.reads[1..], s.reads[0])
    }
}

/// One number for each token; their number.
fn check_tokens(s: &Signature<'_>, x: &Value) -> Result<usize, String> {
    let shape = [x.n_elements(), 1];
    s.shape(x, &shape[..x.shape.len().clamp(1, 2)], Some(DType::F32))?;
    Ok(shape[0])
}

/// Labels, and weights if there are any; sums of rows.
fn check_rows(s: &Signature<'_>, n: usize, of_tokens: &[&Value], sums: &Value) -> Result<(), String> {
    for (value, dtype) in of_tokens.iter().zip([DType::I32, DType::F32]) {
        s.shape(value, &[n], Some(dtype))?;
    }
    let rows = sums.n_columns();
    s.shape(sums, &[2, rows], Some(DType::F64))?;
    if rows == 0 || !n.is_multiple_of(rows) {
        return Err(format!("{n} tokens cannot be {rows} rows of one length"));
    }
    Ok(())
}
