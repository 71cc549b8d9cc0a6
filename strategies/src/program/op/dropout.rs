//! Dropout.

use super::adjoints::{Adjoints, NoAdjoint};
use super::operation::Operation;
use super::recomputation::Recomputation;
use super::shares::Reading;
use super::signature::Signature;
use super::width::Width;
use crate::program::{DType, Instr, ValueId};

/// `[x [N, C], keys N] -> [y]`: zeros some elements and scales the others. Its own adjoint. Source: Srivastava et al. 2014, Dropout (JMLR 15).
///
/// The draw of an element is a function of the key of its token, of the stream and of its column, so every rank, replay and
/// recomputation draws the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability with which an element is zeroed, below 1; the others are divided by 1 less it.
    pub rate: f32,
    /// Tells the draws of different instructions apart.
    pub stream: u32,
    /// Column of the whole matrix with which the operand begins, on a rank that has some of its columns.
    pub first_column: usize,
}

impl Dropout {
    /// Draws below this number zero their element.
    pub fn threshold(&self) -> u32 {
        (f64::from(self.rate) * 2f64.powi(32)) as u32
    }

    /// Factor of the other elements.
    pub fn factor(&self) -> f32 {
        1.0 / (1.0 - self.rate)
    }

    /// The draws of a token; [`Dropout::draw`] takes them and a column.
    pub const fn of_token(&self, key: i32) -> u32 {
        mix(mix(key as u32) ^ self.stream.wrapping_mul(0x9e37_79b9))
    }

    /// The draw of an element, by its column in the operand.
    pub const fn draw(&self, of_token: u32, column: usize) -> u32 {
        mix(of_token.wrapping_add((self.first_column + column) as u32).wrapping_mul(0x85eb_ca6b) ^ of_token)
    }
}

/// Source: Appleby 2011, the finaliser of MurmurHash3, which maps 32 bits one to one.
const fn mix(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
    x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}

impl Operation for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(2, 1)?;
        let (n, _) = s.matrix(s.reads[0])?;
        s.shape(s.reads[1], &[n], Some(DType::I32))?;
        s.like(s.writes[0], s.reads[0])
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        adjoints.simple(*self, instr.reads[0], vec![dy, instr.reads[1]]);
        Ok(())
    }

    fn width(&self) -> Width {
        Width::OfOperands
    }

    fn of_some_columns(&self) -> Option<Reading> {
        Some(Reading::ByColumn)
    }

    fn recomputation(&self) -> Recomputation {
        Recomputation::Cheap
    }
}
