//! Frozen weights in fewer bits.

use super::operation::Operation;
use super::signature::Signature;
use crate::program::{DType, Packing};

/// `[words [R, W]] -> [w [R, C]]`: the weights that are packed in the words.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unpack(pub Packing);

impl Operation for Unpack {
    fn name(&self) -> &'static str {
        "unpack"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let Unpack(packing) = self;
        s.count(1, 1)?;
        let (rows, words) = s.matrix(s.reads[0])?;
        if !words.is_multiple_of(packing.n_words()) {
            return Err(format!("{words} words are not blocks of {}", packing.n_words()));
        }
        s.shape(s.reads[0], &[rows, words], Some(DType::I32))?;
        s.shape(s.writes[0], &[rows, packing.weights(words)], None)
    }
}
