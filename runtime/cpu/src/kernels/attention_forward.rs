//! Attention of one block of queries of one head to its visible keys, without a matrix of scores.
//! Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691), algorithm 1.
//!
//! We differ in the layout: tiles of scores are transposed, `[keys, queries]`, so that the softmax of a query runs down
//! a column, with sixteen queries per register and no sum across a register, and keys and values are used as stored.
#![allow(unsafe_code)] // Tasks write disjoint columns of the output.

use super::Heads;
use super::attention_operands::{BLOCK, Cover, Operands, Visible};
use super::attention_shape::PartShape;
use super::math::exp;
use super::parallel::{Shared, for_each_task};
use super::simd::simd;
use super::strided::{Strided, VECTOR};
use super::tile::{Multiplier, pack};
use super::transpose::transpose;
use phalanx_device::float::Float;

// Queries (as stored, and transposed), keys, values, scores, output (transposed, and as stored); packed operands.
pub(super) fn slot_len(shape: &PartShape) -> usize {
    6 * BLOCK * shape.padded_dim() + BLOCK * BLOCK + shape.packed_len()
}

/// Attention of all queries, one task for each block of each head; merged with the values in `o` and `lse` if `carry`.
pub(super) fn forward<T: Float, O: Float>(
    operands: &Operands<T>,
    o: &mut [O],
    lse: &mut [f32],
    carry: bool,
    scratch: &mut [f32],
) {
    let PartShape { heads: Heads { n_heads: h, head_dim: d, .. }, n_queries, .. } = operands.shape;
    let n = operands.n_rows * n_queries;
    assert!(o.len() == n * h * d && lse.len() == n * h);
    let (n_heads_of_all_rows, n_blocks) = (operands.n_rows * h, n_queries.div_ceil(BLOCK));
    let (o, lse) = (Shared::new(o), Shared::new(lse));
    for_each_task(n_heads_of_all_rows * n_blocks, scratch, slot_len(&operands.shape), |task, slot| {
        // The last blocks see the most keys: starting them first leaves no long task for the end.
        let t0 = (n_blocks - 1 - task / n_heads_of_all_rows) * BLOCK;
        let (row, head) = (task % n_heads_of_all_rows / h, task % h);
        let block = Block { row, head, t0, n: BLOCK.min(n_queries - t0) };
        block.run(operands, &o, &lse, carry, slot);
    });
}

/// A block of queries of a head.
struct Block {
    row: usize,
    head: usize,
    t0: usize,
    n: usize,
}

/// The softmax so far: its reference, its sum relative to that, and the weighted values `[D, BLOCK]`.
struct Running<'a> {
    largest: [f32; BLOCK],
    total: [f32; BLOCK],
    o_t: &'a mut [f32],
    /// Whether `o_t` holds values.
    begun: bool,
}

impl Block {
    fn run<T: Float, O: Float>(
        &self,
        operands: &Operands<T>,
        o: &Shared<O>,
        lse: &Shared<f32>,
        carry: bool,
        slot: &mut [f32],
    ) {
        let shape = &operands.shape;
        let (d, dp, kv_head) = (shape.heads.head_dim, shape.padded_dim(), shape.kv_head(self.head));
        let width = self.n.next_multiple_of(VECTOR);
        let (tiles, rest) = slot.split_at_mut(6 * BLOCK * dp);
        let (scores, packed) = rest.split_at_mut(BLOCK * BLOCK);
        let mut multiplier = Multiplier::of::<T>(packed);
        let (on_queries, on_scores) = multiplier.split_factor(shape.scale);
        let mut tiles = tiles.chunks_exact_mut(BLOCK * dp);
        let mut tile = || tiles.next().expect("the slot has six tiles");
        let (rows, q_t, k, v, o_t, o_rows) = (tile(), tile(), tile(), tile(), tile(), tile());
        let mut running = Running { largest: [f32::NEG_INFINITY; BLOCK], total: [0.0; BLOCK], o_t, begun: false };

        let visible = operands.visible(self.row, self.t0, self.n);
        let (candidates, mut loaded) = (operands.candidates(&visible), false);
        for j0 in candidates.clone().step_by(BLOCK) {
            let n_keys = BLOCK.min(candidates.end - j0);
            let indexes = operands.key_indexes(self.row, j0, n_keys);
            let cover = visible.cover(&indexes[..n_keys]);
            if cover == Cover::Nothing {
                continue;
            }
            if !loaded {
                loaded = true;
                operands.pack_queries(self.row, self.head, self.t0, self.n, on_queries, rows);
                transpose(rows, dp, self.n, d, q_t, BLOCK);
                if carry {
                    self.resume(shape, o, lse, o_rows, &mut running);
                }
            }
            operands.pack_keys(self.row, kv_head, j0, n_keys, k, v);
            let (keys, queries) = (Strided::rows(k, dp), (&*q_t, BLOCK));
            multiplier.product((n_keys, width, d), on_scores, keys, queries, (scores, BLOCK), false);
            let mask = (cover == Cover::Some).then_some(&visible);
            let shrink =
                online_softmax(scores, &indexes[..n_keys], width, mask, &mut running.largest, &mut running.total);
            if running.begun {
                scale_columns(running.o_t, d, width, &shrink);
            }
            let (values, weights) = (Strided::transposed(v, dp), (&*scores, BLOCK));
            multiplier.product((d, width, n_keys), 1.0, values, weights, (running.o_t, BLOCK), running.begun);
            running.begun = true;
        }
        if loaded || !carry {
            self.finish(shape, running, o_rows, o, lse);
        }
    }

    /// Continues from the result over earlier parts: an average is a sum whose weights add up to 1.
    fn resume<O: Float>(
        &self,
        shape: &PartShape,
        o: &Shared<O>,
        lse: &Shared<f32>,
        o_rows: &mut [f32],
        running: &mut Running,
    ) {
        let (dp, d) = (shape.padded_dim(), shape.heads.head_dim);
        for i in 0..self.n {
            // SAFETY: only this task accesses the columns of this head in the rows of this block.
            let (o, lse) = unsafe { self.results_of(shape, i, o, lse) };
            pack(o, d, 1, d, 1.0, &mut o_rows[i * dp..(i + 1) * dp], dp);
            running.largest[i] = *lse;
            running.total[i] = if *lse == f32::NEG_INFINITY { 0.0 } else { 1.0 };
        }
        transpose(o_rows, dp, self.n, d, running.o_t, BLOCK);
        running.begun = true;
    }

    fn finish<O: Float>(
        &self,
        shape: &PartShape,
        running: Running,
        o_rows: &mut [f32],
        o: &Shared<O>,
        lse: &Shared<f32>,
    ) {
        let Running { largest, total, o_t, begun } = running;
        let (dp, d) = (shape.padded_dim(), shape.heads.head_dim);
        if begun {
            // A query without visible keys has a total of 0 and an output of 0.
            scale_columns(o_t, d, self.n, &total.map(|x| if x == 0.0 { 0.0 } else { 1.0 / x }));
            transpose(o_t, BLOCK, d, self.n, o_rows, dp);
        } else {
            o_rows.fill(0.0);
        }
        for i in 0..self.n {
            // SAFETY: only this task accesses the columns of this head in the rows of this block.
            let (o, lse) = unsafe { self.results_of(shape, i, o, lse) };
            narrow(&o_rows[i * dp..i * dp + d], o);
            *lse = largest[i] + total[i].ln();
        }
    }

    /// The result buffers of query `i`.
    ///
    /// # Safety
    /// While they live, no other reference to the columns of this head in this row of `o` and `lse` exists.
    #[allow(clippy::mut_from_ref)]
    unsafe fn results_of<'s, O>(
        &self,
        shape: &PartShape,
        i: usize,
        o: &'s Shared<O>,
        lse: &'s Shared<f32>,
    ) -> (&'s mut [O], &'s mut f32) {
        let Heads { n_heads: h, head_dim: d, .. } = shape.heads;
        let at = (self.row * shape.n_queries + self.t0 + i) * h + self.head;
        // SAFETY: the caller's promise, passed on.
        unsafe { (o.part(at * d, d), &mut lse.part(at, 1)[0]) }
    }
}

simd! {
    /// Rounds a row to its storage type.
    pub(super) fn narrow<T: Float>(from: &[f32], to: &mut [T]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = T::from_f32(*from);
        }
    }
}

simd! {
    /// Turns a tile of scores `[keys, queries]` into weights relative to the largest score so far, and returns the
    /// factor that rescales the earlier sums. A hidden key gets a weight of exactly 0; without a mask none is hidden.
    fn online_softmax(
        scores: &mut [f32],
        indexes: &[i32],
        width: usize,
        mask: Option<&Visible>,
        largest: &mut [f32; BLOCK],
        total: &mut [f32; BLOCK],
    ) -> [f32; BLOCK] {
        let width = width.min(BLOCK);
        let rows = &mut scores.as_chunks_mut::<BLOCK>().0[..indexes.len()];
        let mut reference = *largest;
        if let Some(Visible { from, to, .. }) = mask {
            for (index, row) in indexes.iter().zip(rows.iter_mut()) {
                for i in 0..width {
                    let seen = (from[i] <= *index) & (*index <= to[i]);
                    row[i] = if seen { row[i] } else { f32::NEG_INFINITY };
                }
            }
        }
        for row in rows.iter() {
            for i in 0..width {
                reference[i] = if row[i] > reference[i] { row[i] } else { reference[i] };
            }
        }
        let mut shrink = [1.0; BLOCK];
        for i in 0..width {
            let old = largest[i];
            largest[i] = reference[i];
            // A query that has seen no key yet: any finite reference makes its weights 0.
            reference[i] = if reference[i] == f32::NEG_INFINITY { 0.0 } else { reference[i] };
            shrink[i] = exp(old - reference[i]);
            total[i] *= shrink[i];
        }
        for row in rows.iter_mut() {
            for i in 0..width {
                row[i] = exp(row[i] - reference[i]);
                total[i] += row[i];
            }
        }
        shrink
    }
}

simd! {
    fn scale_columns(tile: &mut [f32], n_rows: usize, width: usize, factors: &[f32; BLOCK]) {
        for row in &mut tile.as_chunks_mut::<BLOCK>().0[..n_rows] {
            for i in 0..width.min(BLOCK) {
                row[i] *= factors[i];
            }
        }
    }
}
