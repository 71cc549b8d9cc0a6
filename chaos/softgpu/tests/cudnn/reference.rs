//! Attention in f64, and numbers for it.
//!
//! Legend: `N` tokens of all sequences, `H` query heads, `K` key heads, `D` width of a head, `C = (H + 2K) D` columns.

/// A shape of attention. Sequence `i` begins at token `starts[i]` and has `lengths[i]` tokens.
#[derive(Clone, Debug)]
pub struct Shape {
    pub heads: usize,
    pub key_heads: usize,
    pub width: usize,
    /// Most tokens of a sequence.
    pub tokens: usize,
    pub starts: Vec<usize>,
    pub lengths: Vec<usize>,
    pub is_causal: bool,
    /// How many tokens a query sees, itself included.
    pub window: Option<usize>,
}

/// What attention gives: `o [N, H D]`, `statistics [N, H]`, `dqkv [N, C]`.
pub struct Answers {
    pub o: Vec<f64>,
    pub statistics: Vec<f64>,
    pub dqkv: Vec<f64>,
}

impl Shape {
    pub fn columns(&self) -> usize {
        (self.heads + 2 * self.key_heads) * self.width
    }

    /// Tokens of all sequences, gaps among them.
    pub fn n(&self) -> usize {
        *self.starts.last().unwrap()
    }

    /// Whether sequences follow each other at distances that differ.
    pub fn is_ragged(&self) -> bool {
        self.starts.iter().enumerate().any(|(i, start)| *start != i * self.tokens)
    }

    /// Whether some sequence is shorter than the longest may be.
    pub fn has_lengths(&self) -> bool {
        self.is_ragged() || self.lengths.iter().any(|length| *length != self.tokens)
    }

    pub fn sequences(&self) -> usize {
        self.lengths.len()
    }

    /// Columns of q, k and v of a query head.
    fn columns_of(&self, head: usize) -> [usize; 3] {
        let key_head = head / (self.heads / self.key_heads);
        [head, self.heads + key_head, self.heads + self.key_heads + key_head].map(|c| c * self.width)
    }

    fn sees(&self, query: usize, key: usize) -> bool {
        (!self.is_causal || key <= query) && self.window.is_none_or(|w| key + w > query)
    }

    pub fn attend(&self, qkv: &[f32], d_o: &[f32]) -> Answers {
        let (columns, width) = (self.columns(), self.width);
        let mut answers = Answers {
            o: vec![0.0; self.n() * self.heads * width],
            statistics: vec![0.0; self.n() * self.heads],
            dqkv: vec![0.0; self.n() * columns],
        };
        for (start, length) in self.starts.iter().zip(&self.lengths) {
            for head in 0..self.heads {
                for query in 0..*length {
                    self.attend_query(*start, *length, head, query, qkv, d_o, &mut answers);
                }
            }
        }
        answers
    }

    fn attend_query(
        &self,
        start: usize,
        length: usize,
        head: usize,
        query: usize,
        qkv: &[f32],
        d_o: &[f32],
        to: &mut Answers,
    ) {
        let (columns, width) = (self.columns(), self.width);
        let [q, k, v] = self.columns_of(head);
        let scale = 1.0 / (width as f64).sqrt();
        let row = |token: usize, column: usize| (start + token) * columns + column;
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let part = |token: usize, column: usize| &qkv[row(token, column)..][..width];
        let keys: Vec<usize> = (0..length).filter(|key| self.sees(query, *key)).collect();
        let scores: Vec<f64> = keys.iter().map(|key| dot(part(query, q), part(*key, k)) * scale).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        to.statistics[(start + query) * self.heads + head] = max + sum.ln();
        let p: Vec<f64> = scores.iter().map(|s| (s - max).exp() / sum).collect();
        let o = ((start + query) * self.heads + head) * width;
        for (key, p) in keys.iter().zip(&p) {
            part(*key, v).iter().enumerate().for_each(|(i, v)| to.o[o + i] += p * f64::from(*v));
        }
        let d_o = &d_o[o..][..width];
        let dp: Vec<f64> = keys.iter().map(|key| dot(d_o, part(*key, v))).collect();
        let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
        for ((key, p), dp) in keys.iter().zip(&p).zip(&dp) {
            let ds = p * (dp - mean) * scale;
            for i in 0..width {
                to.dqkv[row(*key, v) + i] += p * f64::from(d_o[i]);
                to.dqkv[row(query, q) + i] += ds * f64::from(part(*key, k)[i]);
                to.dqkv[row(*key, k) + i] += ds * f64::from(part(query, q)[i]);
            }
        }
    }
}

/// Numbers from -1 to 1 that bf16 has, hence f16 too: multiples of 1/128.
pub fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % 257) as f32 / 128.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

pub fn to_bf16(values: &[f32]) -> Vec<u16> {
    values.iter().map(|v| (v.to_bits() >> 16) as u16).collect()
}

pub fn of_bf16(values: &[u16]) -> Vec<f32> {
    values.iter().map(|v| f32::from_bits(u32::from(*v) << 16)).collect()
}
