//! Attention of a part of the queries to a part of the keys, merged part by part into attention over whole rows.
//! Source: Liu et al. 2023, Ring Attention (arXiv:2310.01889); the merge follows Dao 2023, FlashAttention-2
//! (arXiv:2307.08691), §2.3.1: an average over a part of the keys and its `lse` suffice to merge the part.
//!
//! Every token has its index within the whole row, so any placement of tokens is possible. Runs of ascending indexes
//! are fast: a tile that no query sees costs one scan of its indexes, and a tile that all queries see needs no mask.
//!
//! Legend: `B` rows of the batch; `Nq = B n_queries` local queries and `Nk = B n_keys` local keys.

use super::Heads;
use super::attention_backward::{Gradients, Known, backward};
use super::attention_operands::{Index, Operands, columns_of};
use super::attention_shape::PartShape;
use super::parallel::Shared;
use super::{attention_backward, attention_forward};
use phalanx_device::float::Float;

/// Indexes of the local tokens in their rows, and the starts of their documents.
#[derive(Clone, Copy, Debug)]
pub struct Indexes<'a> {
    /// Index of each query, `[Nq]`.
    pub queries: &'a [i32],
    /// Index of each key, `[Nk]`.
    pub keys: &'a [i32],
    /// Index of the first token of each query's document, `[Nq]`.
    pub doc_start: &'a [i32],
}

/// Length of the scratch of [`attention_part`] for `n_threads` threads.
pub fn attention_part_scratch_len(shape: &PartShape, n_threads: usize) -> usize {
    n_threads.max(1) * attention_forward::slot_len(shape)
}

/// Length of the scratch of [`attention_part_backward`] for `n_threads` threads.
pub fn attention_part_backward_scratch_len(shape: &PartShape, n_threads: usize) -> usize {
    n_threads.max(1) * attention_backward::slot_len(shape)
}

/// [`super::attention::attention`] of the local queries to the local keys: query `t` sees the keys `j` of its row with
/// `max(doc_start[t], index[t] - window + 1) <= index[j] <= index[t]`.
///
/// With `carry`, `o` and `lse` hold the result over other keys, and become the result over both. A query without any
/// visible key has an output of 0 and an `lse` of minus infinity.
///
/// # Shapes
/// `q: [Nq, H D or wider]` (queries are the first columns: packed qkv, or queries alone), `kv: [Nk, 2 K D or wider]`
/// (keys and values are the last columns: packed qkv, or keys and values alone), `o: [Nq, H D]`, `lse: [Nq, H]`,
/// `scratch: [attention_part_scratch_len]`: its length bounds the number of threads.
///
/// # Panics
/// If a shape differs from the shapes above, or the scratch is too short for one thread.
pub fn attention_part<T: Float>(
    shape: &PartShape,
    q: &[T],
    kv: &[T],
    indexes: Indexes,
    carry: bool,
    o: &mut [f32],
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    attention_forward::forward(&operands(shape, q, kv, indexes), o, lse, carry, scratch);
}

/// Adds the gradients of the local queries and keys to `dq` and `dkv`. `o` and `lse` are the results over all keys of
/// the row; the sum over all parts is the gradient of the whole row.
///
/// # Shapes
/// `q, kv` as in [`attention_part`], `o, dout: [Nq, H D]`, `lse: [Nq, H]`, `dq: [Nq, H D or wider]` (adds to the first
/// columns), `dkv: [Nk, 2 K D or wider]` (adds to the last columns), `scratch: [attention_part_backward_scratch_len]`:
/// its length bounds the number of threads.
///
/// # Panics
/// If a shape differs from the shapes above, or the scratch is too short for one thread.
pub fn attention_part_backward<T: Float>(
    shape: &PartShape,
    q: &[T],
    kv: &[T],
    indexes: Indexes,
    (o, lse, dout): (&[f32], &[f32], &[f32]),
    dq: &mut [f32],
    dkv: &mut [f32],
    scratch: &mut [f32],
) {
    let Heads { n_heads, n_kv_heads, head_dim } = shape.heads;
    let gradients = Gradients {
        dq_columns: columns_of(dq.len(), indexes.queries.len(), n_heads * head_dim),
        dkv_columns: columns_of(dkv.len(), indexes.keys.len(), 2 * n_kv_heads * head_dim),
        dq: Shared::new(dq),
        dkv: Shared::new(dkv),
        accumulate: true,
    };
    backward(&operands(shape, q, kv, indexes), &Known { o, lse, dout }, &gradients, scratch);
}

fn operands<'a, T: Float>(shape: &PartShape, q: &'a [T], kv: &'a [T], indexes: Indexes<'a>) -> Operands<'a, T> {
    let Indexes { queries, keys, doc_start } = indexes;
    Operands::new(*shape, q, kv, (Index::Given(queries), Index::Given(keys)), doc_start)
}

#[cfg(test)]
mod tests {
    use super::super::attention::attention_scratch_len;
    use super::super::attention::{attention, attention_backward, attention_backward_scratch_len};
    use super::super::testing::{bits, close, random, same_on_every_number_of_threads, stored, wide};
    use super::*;
    use crate::kernels::attention_shape::Shape;
    use crate::matmul::fast_bf16;
    use half::bf16;
    use proptest::prelude::*;

    /// Rows whose tokens are divided among parts.
    struct Case {
        shape: Shape,
        qkv: Vec<f32>,
        doc_start: Vec<i32>,
        dout: Vec<f32>,
        /// Indexes of the tokens of each part, the same in every row.
        parts: Vec<Vec<usize>>,
    }

    const ROWS: usize = 2;

    impl Case {
        fn new(heads: Heads, seq_len: usize, window: Option<usize>, parts: Vec<Vec<usize>>, seed: u64) -> Case {
            let shape = Shape { heads, seq_len, window, scale: 1.0 / (heads.head_dim as f32).sqrt() };
            let n = ROWS * seq_len;
            let document = 1 + seed as usize % (2 * seq_len);
            Case {
                qkv: random(n * heads.columns(), seed).iter().map(|x| 3.0 * x).collect(),
                doc_start: (0..n).map(|i| (i % seq_len / document * document) as i32).collect(),
                dout: random(n * heads.n_heads * heads.head_dim, seed ^ 1),
                shape,
                parts,
            }
        }

        /// Attention of whole rows: `o`, `lse`, `dqkv`.
        fn whole(&self) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
            let (shape, n, h) = (&self.shape, self.doc_start.len(), self.shape.heads.n_heads);
            let (mut o, mut lse) = (vec![f32::NAN; self.dout.len()], vec![f32::NAN; n * h]);
            let mut dqkv = vec![f32::NAN; self.qkv.len()];
            let mut scratch = vec![f32::NAN; attention_scratch_len(shape, 1)];
            attention(shape, &self.qkv, &self.doc_start, &mut o, &mut lse, &mut scratch);
            let mut scratch = vec![f32::NAN; attention_backward_scratch_len(shape, 1)];
            let (qkv, doc_start) = (&self.qkv, &self.doc_start);
            attention_backward(shape, qkv, doc_start, &o, &lse, &self.dout, &mut dqkv, &mut scratch);
            (o, lse, dqkv)
        }

        /// The rows of a matrix for the tokens of a part.
        fn take<T: Copy>(&self, matrix: &[T], part: &[usize]) -> Vec<T> {
            let columns = matrix.len() / (ROWS * self.shape.seq_len);
            let tokens = (0..ROWS).flat_map(|row| part.iter().map(move |t| row * self.shape.seq_len + t));
            tokens.flat_map(|token| matrix[token * columns..(token + 1) * columns].to_vec()).collect()
        }

        fn put(&self, from: &[f32], part: &[usize], to: &mut [f32]) {
            let columns = to.len() / (ROWS * self.shape.seq_len);
            let tokens = (0..ROWS).flat_map(|row| part.iter().map(move |t| row * self.shape.seq_len + t));
            for (token, from) in tokens.zip(from.chunks(columns)) {
                to[token * columns..(token + 1) * columns].copy_from_slice(from);
            }
        }

        fn part_shape(&self, queries: &[usize], keys: &[usize]) -> PartShape {
            PartShape { n_queries: queries.len(), n_keys: keys.len(), ..self.shape.as_part() }
        }

        /// The computation of all ranks of a ring: attention of each part's queries to the keys of each part, its own
        /// first.
        fn ring<T: Float>(&self) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
            let (n, n_parts, heads) = (self.doc_start.len(), self.parts.len(), self.shape.heads);
            let (mut o, mut lse) = (vec![f32::NAN; self.dout.len()], vec![f32::NAN; n * heads.n_heads]);
            let mut dqkv = vec![f32::NAN; self.qkv.len()];
            let packed: Vec<Vec<T>> = self.parts.iter().map(|part| stored(&self.take(&self.qkv, part))).collect();
            let index: Vec<Vec<i32>> = self.parts.iter().map(|part| self.indexes(part)).collect();
            let mut dparts: Vec<Vec<f32>> = packed.iter().map(|qkv| vec![0.0; qkv.len()]).collect();
            for (i, part) in self.parts.iter().enumerate() {
                let doc_start = self.take(&self.doc_start, part);
                let mut o_part = vec![f32::NAN; ROWS * part.len() * heads.n_heads * heads.head_dim];
                let mut lse_part = vec![f32::NAN; ROWS * part.len() * heads.n_heads];
                let keys_of = |step: usize| (i + n_parts - step) % n_parts;
                let indexes = |j: usize| Indexes { queries: &index[i], keys: &index[j], doc_start: &doc_start };
                for step in 0..n_parts {
                    let j = keys_of(step);
                    let shape = self.part_shape(part, &self.parts[j]);
                    let mut scratch = vec![f32::NAN; attention_part_scratch_len(&shape, 2)];
                    let (q, kv, o, lse) = (&packed[i], &packed[j], &mut o_part, &mut lse_part);
                    attention_part(&shape, q, kv, indexes(j), step > 0, o, lse, &mut scratch);
                }
                let dout = self.take(&self.dout, part);
                for j in (0..n_parts).map(keys_of) {
                    let shape = self.part_shape(part, &self.parts[j]);
                    let mut scratch = vec![f32::NAN; attention_part_backward_scratch_len(&shape, 2)];
                    let mut dq = vec![0.0; o_part.len()];
                    let known = (&o_part[..], &lse_part[..], &dout[..]);
                    let (q, kv) = (&packed[i], &packed[j]);
                    attention_part_backward(&shape, q, kv, indexes(j), known, &mut dq, &mut dparts[j], &mut scratch);
                    add_columns(&dq, heads.n_heads * heads.head_dim, &mut dparts[i], heads.columns());
                }
                self.put(&o_part, part, &mut o);
                self.put(&lse_part, part, &mut lse);
            }
            for (part, dpart) in self.parts.iter().zip(&dparts) {
                self.put(dpart, part, &mut dqkv);
            }
            (o, lse, dqkv)
        }

        fn indexes(&self, part: &[usize]) -> Vec<i32> {
            (0..ROWS).flat_map(|_| part.iter().map(|t| *t as i32)).collect()
        }
    }

    /// Adds rows of `from_columns` to the first columns of rows of `to_columns`.
    fn add_columns(from: &[f32], from_columns: usize, to: &mut [f32], to_columns: usize) {
        for (from, to) in from.chunks(from_columns).zip(to.chunks_mut(to_columns)) {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    }

    /// Chunks `i` and `2 n - 1 - i` of `2 n` go to part `i`.
    fn zigzag(seq_len: usize, n: usize) -> Vec<Vec<usize>> {
        let chunk = |i: usize| i * seq_len / (2 * n)..(i + 1) * seq_len / (2 * n);
        (0..n).map(|i| chunk(i).chain(chunk(2 * n - 1 - i)).collect()).collect()
    }

    /// Each token goes to any part, in any order.
    fn scattered(seq_len: usize, n: usize, seed: u64) -> Vec<Vec<usize>> {
        let keys = random(2 * seq_len, seed);
        let mut order: Vec<usize> = (0..seq_len).collect();
        order.sort_by(|a, b| keys[*a].total_cmp(&keys[*b]));
        let part_of = |t: &usize| (keys[seq_len + t].abs() * n as f32) as usize;
        (0..n).map(|part| order.iter().copied().filter(|t| part_of(t) == part).collect()).collect()
    }

    // Rounding of f32 at scores of size up to 50, as in the kernel for whole rows.
    const ROUNDING: f64 = 5e-6;

    fn ring_agrees_with_the_whole(case: &Case) {
        let (o, lse, dqkv) = case.ring::<f32>();

        let (whole_o, whole_lse, whole_dqkv) = case.whole();
        close(&o, &wide(&whole_o), ROUNDING);
        close(&lse, &wide(&whole_lse), ROUNDING);
        close(&dqkv, &wide(&whole_dqkv), 4.0 * ROUNDING);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn parts_in_any_order_merge_to_the_whole(
            group in 1usize..4, n_kv_heads in 1usize..3, head_dim in 1usize..40,
            s in prop_oneof![1usize..12, 1usize..260], n in 1usize..5,
            in_zigzag in any::<bool>(), window in proptest::option::of(1usize..150), seed in any::<u64>(),
        ) {
            let heads = Heads { n_heads: group * n_kv_heads, n_kv_heads, head_dim };
            let parts = if in_zigzag { zigzag(s, n) } else { scattered(s, n, seed) };

            ring_agrees_with_the_whole(&Case::new(heads, s, window, parts, seed));
        }
    }

    #[test]
    fn parts_without_tokens_merge_to_the_whole() {
        let heads = Heads { n_heads: 2, n_kv_heads: 1, head_dim: 8 };
        let parts = vec![vec![], (0..5).collect(), vec![], (5..70).collect()];

        ring_agrees_with_the_whole(&Case::new(heads, 70, None, parts, 1234));
    }

    #[test]
    fn long_rows_in_zigzag_merge_to_the_whole() {
        let heads = Heads { n_heads: 2, n_kv_heads: 1, head_dim: 64 };
        for (seed, window) in [(1_000_000, None), (700, None), (1_000_000, Some(300))] {
            ring_agrees_with_the_whole(&Case::new(heads, 1024, window, zigzag(1024, 4), seed));
        }
    }

    #[test]
    fn half_width_operands_differ_by_the_rounding_of_products_only() {
        let heads = Heads { n_heads: 4, n_kv_heads: 2, head_dim: 32 };
        let mut case = Case::new(heads, 200, None, zigzag(200, 2), 150);
        case.qkv = case.qkv.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();

        let (narrow, full) = (case.ring::<bf16>(), case.ring::<f32>());

        // The error of a sum of 200 rounded weights or gradients of scores grows with the root of 200.
        let rounding = if fast_bf16() { 1.0 / 256.0 } else { 0.0 };
        close(&narrow.0, &wide(&full.0), rounding);
        close(&narrow.1, &wide(&full.1), ROUNDING);
        close(&narrow.2, &wide(&full.2), 4.0 * rounding);
    }

    /// Attention of the queries of part 0 to the keys of part 1, bare (`[Nk, 2 K D]`) or packed.
    fn first_sees_second(case: &Case, bare: bool, carry: bool) -> [Vec<f32>; 4] {
        let Heads { n_heads: h, n_kv_heads: kv, head_dim: d } = case.shape.heads;
        let (part, keys) = (&case.parts[0], &case.parts[1]);
        let shape = case.part_shape(part, keys);
        let mut packed = case.take(&case.qkv, keys);
        if bare {
            packed = packed.chunks(case.shape.heads.columns()).flat_map(|row| row[h * d..].to_vec()).collect();
        }
        let (index, key_index, doc_start) = (case.indexes(part), case.indexes(keys), case.take(&case.doc_start, part));
        let indexes = Indexes { queries: &index, keys: &key_index, doc_start: &doc_start };
        let (mut o, mut lse) = (vec![0.25; index.len() * h * d], vec![0.5; index.len() * h]);
        let (mut dq, mut dkv) = (vec![0.75; o.len()], vec![1.25; packed.len()]);
        let q = case.take(&case.qkv, part);
        let mut scratch = vec![f32::NAN; attention_part_scratch_len(&shape, 1)];
        attention_part(&shape, &q, &packed, indexes, carry, &mut o, &mut lse, &mut scratch);
        let (dout, mut scratch) =
            (case.take(&case.dout, part), vec![f32::NAN; attention_part_backward_scratch_len(&shape, 1)]);
        attention_part_backward(&shape, &q, &packed, indexes, (&o, &lse, &dout), &mut dq, &mut dkv, &mut scratch);
        let dkv = dkv.chunks(dkv.len() / key_index.len()).flat_map(|row| row[row.len() - 2 * kv * d..].to_vec());
        [o, lse, dq, dkv.collect()]
    }

    #[test]
    fn packed_and_bare_keys_give_the_same_bits() {
        let heads = Heads { n_heads: 4, n_kv_heads: 2, head_dim: 24 };
        let case = Case::new(heads, 150, Some(90), zigzag(150, 2), 1234);

        let (packed, bare) = (first_sees_second(&case, false, true), first_sees_second(&case, true, true));

        assert_eq!(packed.map(|x| bits(&x)), bare.map(|x| bits(&x)));
    }

    #[test]
    fn keys_that_no_query_sees_change_nothing() {
        let heads = Heads { n_heads: 2, n_kv_heads: 1, head_dim: 24 };
        let parts = vec![(0..70).collect(), (70..150).collect()];
        let case = Case::new(heads, 150, None, parts, 1234);

        let [o, lse, dq, dkv] = first_sees_second(&case, false, true);
        let [alone_o, alone_lse, ..] = first_sees_second(&case, false, false);

        assert!(o.iter().all(|x| *x == 0.25) && lse.iter().all(|x| *x == 0.5));
        assert!(dq.iter().all(|x| *x == 0.75) && dkv.iter().all(|x| *x == 1.25));
        assert!(alone_o.iter().all(|x| *x == 0.0) && alone_lse.iter().all(|x| *x == f32::NEG_INFINITY));
    }

    #[test]
    fn bits_do_not_depend_on_the_number_of_threads() {
        let heads = Heads { n_heads: 4, n_kv_heads: 2, head_dim: 24 };
        let case = Case::new(heads, 300, Some(90), zigzag(300, 2), 200);

        same_on_every_number_of_threads(|| {
            let (o, lse, dqkv) = case.ring::<f32>();
            (bits(&o), bits(&lse), bits(&dqkv))
        });
    }
}
