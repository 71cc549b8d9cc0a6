//! Writing to a cache of keys and values, and attention to it. Rows of the cache that no token may see are NaN.

use super::attention::tolerance;
use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{Attention, CachedAttention, DType, Op, op};

/// Geometry of a case: `seq_len` new tokens of each sequence.
#[derive(Clone, Copy, Debug)]
struct Shape {
    cached: CachedAttention,
    sequences: usize,
    /// Position of the last new token of the first sequence; those of the others are three positions earlier each.
    last: usize,
}

const fn shape(head_dim: usize, (n_heads, n_kv_heads): (usize, usize), seq_len: usize, last: usize) -> Shape {
    let heads = Attention { n_heads, n_kv_heads, head_dim, seq_len, window: None, scale: 0.3 };
    Shape { cached: CachedAttention { heads, capacity: last + 2 }, sequences: 1, last }
}

impl Shape {
    fn windowed(mut self, window: usize) -> Shape {
        self.cached.heads.window = Some(window);
        self
    }

    fn of_capacity(mut self, capacity: usize) -> Shape {
        self.cached.capacity = capacity;
        self
    }

    fn sequences(self, sequences: usize) -> Shape {
        Shape { sequences, ..self }
    }

    fn name(&self) -> String {
        let CachedAttention { heads, capacity } = self.cached;
        let Attention { n_heads, n_kv_heads, head_dim, seq_len, window, .. } = heads;
        let window = window.map_or_else(String::new, |w| format!(", window {w}"));
        let tokens = format!("{} x {seq_len} tokens up to {} of {capacity}", self.sequences, self.last);
        format!("{n_heads}/{n_kv_heads} heads of {head_dim}, {tokens}{window}")
    }

    fn cases(&self, dtype: DType) -> [Case; 2] {
        let CachedAttention { heads: a, capacity } = self.cached;
        let (n, columns) = (self.sequences * a.seq_len, self.cached.cache_columns());
        let end = |sequence: usize| self.last + 1 - 3 * sequence;
        let positions = (0..self.sequences).flat_map(|sequence| end(sequence) - a.seq_len..end(sequence));
        let positions = Operand::of(&[n], DType::I32, positions.map(|position| position as f64).collect());
        let qkv = Operand::random(&[n, a.qkv_columns()], dtype, 1);
        let cache = |first_unseen: &dyn Fn(usize) -> usize| {
            let mut cache = Operand::random(&[self.sequences * capacity, columns], dtype, 2);
            for (sequence, rows) in cache.elements.chunks_mut(capacity * columns).enumerate() {
                rows[first_unseen(sequence) * columns..].fill(f64::NAN);
            }
            cache
        };
        let unwritten = cache(&|sequence| end(sequence) - a.seq_len);
        let written = cache(&end);
        let name = format!("{dtype}, {}", self.name());
        let write = vec![qkv.clone(), positions.clone(), unwritten];
        [
            Case::new(
                format!("cache write {name}"),
                Op::CacheWrite(op::CacheWrite(self.cached)),
                write,
                Tolerance::EXACT,
            )
            .updating(2),
            Case::new(
                format!("cached attention {name}"),
                Op::CachedAttention(self.cached),
                vec![qkv, positions, written],
                tolerance(dtype, false),
            )
            .writing(&[n, a.n_heads * a.head_dim], dtype)
            .writing(&[n, a.n_heads], DType::F32),
        ]
    }
}

/// One span of keys and several, ragged ends, spans before the window, more query heads of a key head than a block has.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in super::TYPES {
        for shape in [
            shape(64, (4, 2), 1, 130),
            shape(20, (3, 1), 2, 299).sequences(2),
            shape(64, (11, 1), 1, 515).windowed(130).of_capacity(900),
            shape(8, (2, 2), 1, 0),
        ] {
            cases.extend(shape.cases(dtype));
        }
    }
    cases
}

/// Every usual head width and type.
pub(super) fn widths() -> Vec<Case> {
    let shapes = super::HEAD_WIDTHS.map(|head_dim| shape(head_dim, (6, 2), 3, 257).windowed(90).sequences(2));
    shapes.iter().flat_map(|shape| super::TYPES.map(|dtype| shape.cases(dtype))).flatten().collect()
}
