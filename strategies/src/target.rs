//! What the compiler needs to know about the device for which it compiles.

use crate::program::{Instr, Program};

/// Minimum alignment of every buffer: a cache line, and the width of a vector register.
pub const ALIGN_BYTES: usize = 64;

/// Properties of a device that affect the locations and extents of buffers, not the computation.
pub trait Target {
    /// Bytes of working space that an instruction of this program needs.
    fn scratch_bytes(&self, program: &Program, instr: &Instr) -> usize;

    /// Alignment of every buffer: a power of two, at least [`ALIGN_BYTES`].
    fn align(&self) -> usize {
        ALIGN_BYTES
    }

    /// Whether products in half width read half-width copies of f32 values, since the device cannot round while it multiplies, and
    /// write logits in half width.
    fn half_copies(&self) -> bool {
        false
    }

    /// Whether weights that only products in bf16 read are stored as bf16 numbers and a rest, so that nothing has to be converted.
    fn split_weights(&self) -> bool {
        false
    }

    /// Whether products in f32 read operands that are stored in bf16, since the device widens while it reads.
    fn widens_operands(&self) -> bool {
        false
    }

    /// Tokens whose logits exist at once; `None` for those of a whole microbatch.
    fn head_chunk_tokens(&self) -> Option<usize> {
        None
    }
}

/// A target without a device, for programs that are measured or checked but never run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nowhere {
    /// Working space of every instruction, in bytes.
    pub scratch_bytes: usize,
    /// See [`Target::half_copies`].
    pub half_copies: bool,
    /// See [`Target::split_weights`].
    pub split_weights: bool,
    /// See [`Target::head_chunk_tokens`].
    pub head_chunk_tokens: Option<usize>,
}

impl Target for Nowhere {
    fn scratch_bytes(&self, _: &Program, _: &Instr) -> usize {
        self.scratch_bytes
    }

    fn half_copies(&self) -> bool {
        self.half_copies
    }

    fn split_weights(&self) -> bool {
        self.split_weights
    }

    fn head_chunk_tokens(&self) -> Option<usize> {
        self.head_chunk_tokens
    }
}
