//! Norms over the rows of a matrix.

use super::Op;
use super::adjoints::{Adjoints, NoAdjoint};
use super::operation::Operation;
use super::recomputation::Recomputation;
use super::signature::Signature;
use super::width::Width;
use crate::program::{DType, Instr, ValueId};

/// Normalisation over the last dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// `x / rms(x) * gain`. Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    Rms,
    /// `(x - mean) / std * gain + bias`. Source: Ba et al. 2016 (arXiv:1607.06450).
    Layer,
}

impl NormKind {
    /// Parameters: the gain, and the bias of a layer norm. There are as many statistics of each row.
    const fn n_params(self) -> usize {
        match self {
            NormKind::Rms => 1,
            NormKind::Layer => 2,
        }
    }
}

/// RMS: `[x [N, C], gain] -> [y, rstd N]`; layer: `[x, gain, bias] -> [y, rstd N, mean N]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// The norm.
    pub kind: NormKind,
    /// Added to the variance.
    pub eps: f32,
}

impl Operation for Norm {
    fn name(&self) -> &'static str {
        "norm"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let n_params = self.kind.n_params();
        s.count(1 + n_params, 1 + n_params)?;
        let (n, c) = s.matrix(s.reads[0])?;
        s.reads[1..].iter().try_for_each(|g| s.shape(g, &[c], Some(DType::F32)))?;
        s.shape(s.writes[0], &[n, c], None)?;
        s.writes[1..].iter().try_for_each(|v| s.shape(v, &[n], Some(DType::F32)))
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        let (x, params, stats) = (instr.reads[0], &instr.reads[1..], &instr.writes[1..]);
        let dx0 = adjoints.take(x);
        let dparams0: Vec<ValueId> = params.iter().filter_map(|p| adjoints.take(*p)).collect();
        let (residual_x, residual_params) = (dx0.is_some(), !dparams0.is_empty());
        let op = NormBackward { kind: self.kind, residual_x, residual_params, again: false, narrow: false };
        let head = [x, params[0]].into_iter().chain(stats.iter().copied()).chain([dy]);
        let reads = head.chain(dx0).chain(dparams0).collect();
        let writes: Vec<ValueId> = [x].iter().chain(params).map(|v| adjoints.grad_of(*v)).collect();
        adjoints.emit(op, reads, &writes);
        adjoints.give_all(params, &writes[1..]);
        adjoints.give(x, writes[0]);
        Ok(())
    }

    fn width(&self) -> Width {
        Width::Half
    }

    fn recomputation(&self) -> Recomputation {
        Recomputation::Cheap
    }

    fn is_written_again(&self) -> bool {
        true
    }
}

/// RMS: `[x, gain, rstd, dy, (dx0), (dgain0)] -> [dx, dgain]`; layer:
/// `[x, gain, rstd, mean, dy, (dx0), (dgain0, dbias0), (bias)] -> [dx, dgain, dbias]`. With `again`, the last result is
/// the norm's own `y`, in the element type of `dy`; only then the layer norm reads its bias. With `narrow`, `dx` in the
/// element type of `dy` follows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormBackward {
    /// The norm.
    pub kind: NormKind,
    /// A previous gradient is added to `dx`.
    pub residual_x: bool,
    /// Previous gradients are added to those of the parameters.
    pub residual_params: bool,
    /// The result of the norm is written again, with the same bits.
    pub again: bool,
    /// `dx` is also written for products in half width.
    pub narrow: bool,
}

impl Operation for NormBackward {
    fn name(&self) -> &'static str {
        "norm_backward"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let NormBackward { kind, residual_x, residual_params, again, narrow } = *self;
        let (n_params, layer) = (kind.n_params(), kind.n_params() - 1);
        let n_reads = 4 + layer + usize::from(residual_x) + n_params * usize::from(residual_params);
        s.count(n_reads + layer * usize::from(again), 1 + n_params + usize::from(again) + usize::from(narrow))?;
        let (n, c) = s.matrix(s.reads[0])?;
        s.shape(s.reads[1], &[c], Some(DType::F32))?;
        s.reads[2..3 + layer].iter().try_for_each(|v| s.shape(v, &[n], Some(DType::F32)))?;
        let dy = s.reads[3 + layer];
        s.shape(dy, &[n, c], None)?;
        s.shape(s.writes[0], &[n, c], None)?;
        if residual_x {
            s.shape(s.reads[4 + layer], &[n, c], Some(s.writes[0].dtype))?;
        }
        if again {
            s.shape(s.writes[1 + n_params], &[n, c], Some(dy.dtype))?;
        }
        if narrow {
            s.shape(s.writes[s.writes.len() - 1], &[n, c], Some(dy.dtype))?;
        }
        s.writes[1..1 + n_params].iter().try_for_each(|g| s.shape(g, &[c], Some(DType::F32)))?;
        let first = 4 + layer + usize::from(residual_x);
        s.reads[first..].iter().try_for_each(|g| s.shape(g, &[c], Some(DType::F32)))
    }

    // A row of `dy` is reduced before the row of `dx` is written, but `dy` may be narrower; `y` has its type.
    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        let n_params = self.kind.n_params();
        let first = 3 + n_params;
        let x = self.residual_x.then_some((first, 0));
        let first = first + usize::from(self.residual_x);
        let params = (0..n_params).map(|i| (first + i, 1 + i)).filter(|_| self.residual_params);
        let y = self.again.then_some((2 + n_params, 1 + n_params));
        x.into_iter().chain(params).chain(y).collect()
    }

    fn writing_again(&self, adjoint: &Instr, recomputed: &Instr) -> Option<(ValueId, Op)> {
        let Op::Norm(Norm { kind, .. }) = recomputed.op else { return None };
        let is_same = kind == self.kind && adjoint.reads[..2] == recomputed.reads[..2];
        (is_same && !self.again)
            .then(|| (adjoint.reads[2 + kind.n_params()], NormBackward { again: true, ..*self }.into()))
    }
}
