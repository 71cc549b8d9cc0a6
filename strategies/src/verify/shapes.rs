//! Operands and results of each operation: how many, which shapes, which element types.

use crate::mesh::MeshRank;
use crate::optimizer::Extent;
use crate::program::op::UpdateOperands;
use crate::program::{
    ActivationFn, AdaptedRows, Attention, AttentionPart, CachedAttention, Collective, CollectiveKind, Columns, Compute,
    DType, Hyper, Instr, MatMul, NormKind, Op, Packing, Program, QkColumns, QkNorm, Update, Value, VocabShard,
};

/// Checks one instruction against the signature of its operation.
pub(super) fn check(program: &Program, instr: &Instr) -> Result<(), String> {
    let reads: Vec<&Value> = instr.reads.iter().map(|v| program.value(*v)).collect();
    let writes: Vec<&Value> = instr.writes.iter().map(|v| program.value(*v)).collect();
    let s = Signature { reads: &reads, writes: &writes };
    match &instr.op {
        Op::Embedding { residual, .. } => s.embedding(*residual),
        Op::EmbeddingBackward { residual, .. } => s.embedding_backward(*residual),
        Op::MatMul(m) => s.matmul(m),
        Op::ColumnSum { residual, columns } => s.column_sum(*residual, *columns),
        Op::Norm { kind, .. } => s.norm(*kind),
        Op::NormBackward { kind, residual_x, residual_params, again, narrow } => {
            s.norm_backward(*kind, *residual_x, *residual_params, *again, *narrow)
        }
        Op::HeadNorm { heads, .. } => s.head_norm(heads),
        Op::HeadNormBackward { heads, residual } => s.head_norm_backward(heads, *residual),
        Op::QkSquares(_) | Op::QkSquaresBackward { .. } | Op::QkNorm(_) | Op::QkNormBackward { .. } => s.qk(&instr.op),
        Op::Rotary { heads, .. } => s.rotary(heads),
        Op::Attention(a) => s.attention(a),
        Op::AttentionBackward(a) => s.attention_backward(a),
        Op::CacheWrite(a) | Op::CachedAttention(a) => s.cache(a, matches!(instr.op, Op::CacheWrite(_))),
        Op::Activation(f) => s.activation(*f),
        Op::ActivationBackward { function, again } => s.activation_backward(*function, *again),
        Op::Add => s.count(2, 1).and_then(|()| s.same_shape(&[reads[0], reads[1], writes[0]])),
        Op::Cast | Op::Enter { .. } => s.count(1, 1).and_then(|()| s.same_shape(&[reads[0], writes[0]])),
        Op::Unpack(packing) => s.unpack(*packing),
        Op::CrossEntropy { residual, gradient, vocab } => s.cross_entropy(*residual, *gradient, *vocab),
        Op::CrossEntropyStats(_) => s.cross_entropy_stats(),
        Op::SplitColumns => s.split(reads.first(), &writes),
        Op::JoinColumns => s.join(&reads),
        Op::AttentionPart(part) => s.attention_part(part),
        Op::AttentionPartBackward { part, carried_q, carried_kv } => {
            s.attention_part_backward(part, *carried_q, *carried_kv)
        }
        Op::Scale { .. } | Op::Dropout(_) => s.scale(matches!(instr.op, Op::Dropout(_))),
        Op::AddBias => s.add_bias(),
        Op::RowLengths(rows) => s.row_lengths(rows),
        Op::Magnitude(c) => s.magnitude(*c, false, false),
        Op::MagnitudeBackward { columns, residual } => s.magnitude(*columns, true, *residual),
        Op::Slice { start } | Op::Paste { start } => s.slice(*start, matches!(instr.op, Op::Paste { .. })),
        Op::Sum => {
            s.count(reads.len(), 1)?;
            reads.iter().try_for_each(|v| s.shape(v, &v.shape, Some(DType::F64)))?;
            s.scalar(writes[0])
        }
        Op::Assemble { places } => s.assemble(places),
        Op::TreeSum { n_ranks, .. } => {
            s.count(reads.len().max(1), 1)?;
            let part = writes[0].n_elements();
            reads.iter().try_for_each(|v| s.shape(v, &[n_ranks * part], Some(DType::F32)))
        }
        Op::SumSquaresBlocks { block } => {
            s.count(1, 1)?;
            s.shape(writes[0], &[reads[0].n_elements().div_ceil(*block)], Some(DType::F64))
        }
        Op::Opaque { n_inputs, n_params, residual, gradient, .. } => {
            s.opaque(*n_inputs, *n_params, *residual, *gradient)
        }
        Op::SumSquares { elements } => {
            s.count(1, 1)?;
            let (first, len) = elements.unwrap_or((0, reads[0].n_elements()));
            s.run(reads[0], first, len)?;
            s.scalar(writes[0])
        }
        Op::ClipCoefficient { .. } => s.clip(),
        Op::UpdateSums(update) => s.update_sums(update),
        Op::Update(update) => s.update(update),
        Op::Start(c) => s.collective(c, &program.mesh_rank),
        Op::Await(_) => s.count(reads.len(), 0),
    }
}

struct Signature<'a> {
    reads: &'a [&'a Value],
    writes: &'a [&'a Value],
}

impl Signature<'_> {
    /// Scalars at places of a vector.
    fn assemble(&self, places: &[usize]) -> Result<(), String> {
        let vector = self.writes.first().ok_or("an assembled vector is written")?;
        self.count(places.len(), 1)?;
        self.shape(vector, &[vector.n_elements()], Some(DType::F64))?;
        match places.iter().find(|at| **at >= vector.n_elements()) {
            Some(at) => Err(format!("position {at} is outside a vector of {}", vector.n_elements())),
            None => self.reads.iter().try_for_each(|v| self.scalar(v)),
        }
    }

    fn count(&self, n_reads: usize, n_writes: usize) -> Result<(), String> {
        if self.reads.len() == n_reads && self.writes.len() == n_writes {
            return Ok(());
        }
        let found = (self.reads.len(), self.writes.len());
        Err(format!("found {} operands and {} results, expected {n_reads} and {n_writes}", found.0, found.1))
    }

    fn shape(&self, value: &Value, shape: &[usize], dtype: Option<DType>) -> Result<(), String> {
        let dtype_fits = dtype.map_or(value.dtype.is_activation(), |d| d == value.dtype);
        if value.shape == shape && dtype_fits {
            return Ok(());
        }
        let expected = dtype.map_or("f32, bf16 or f16 ".into(), |d| d.to_string());
        Err(format!("`{}` is {}{:?}, expected {expected}{shape:?}", value.name, value.dtype, value.shape))
    }

    fn scalar(&self, value: &Value) -> Result<(), String> {
        self.shape(value, &[], Some(DType::F64))
    }

    fn hyper(&self, value: &Value) -> Result<(), String> {
        self.shape(value, &[Hyper::LEN], Some(DType::F64))
    }

    fn same_shape(&self, values: &[&Value]) -> Result<(), String> {
        values.iter().try_for_each(|v| self.shape(v, &values[0].shape, None))
    }

    fn matrix(&self, value: &Value) -> Result<(usize, usize), String> {
        match value.shape[..] {
            [rows, columns] => Ok((rows, columns)),
            _ => Err(format!("`{}` has shape {:?}, expected a matrix", value.name, value.shape)),
        }
    }

    fn embedding(&self, residual: bool) -> Result<(), String> {
        self.count(2 + usize::from(residual), 1)?;
        let (_, stored) = self.matrix(self.reads[1])?;
        // A frozen table may be packed as bf16.
        let c = if self.reads[1].dtype == DType::I32 { Packing::Bf16.weights(stored) } else { stored };
        let n = self.reads[0].n_elements();
        self.shape(self.reads[0], &[n], Some(DType::I32))?;
        self.shape(self.writes[0], &[n, c], None)?;
        self.reads.get(2).map_or(Ok(()), |r| self.shape(r, &[n, c], None))
    }

    fn embedding_backward(&self, residual: bool) -> Result<(), String> {
        self.count(2 + usize::from(residual), 1)?;
        let (n, c) = self.matrix(self.reads[1])?;
        self.shape(self.reads[0], &[n], Some(DType::I32))?;
        let (v, _) = self.matrix(self.writes[0])?;
        self.shape(self.writes[0], &[v, c], Some(DType::F32))?;
        self.reads.get(2).map_or(Ok(()), |r| self.shape(r, &[v, c], Some(DType::F32)))
    }

    fn matmul(&self, m: &MatMul) -> Result<(), String> {
        self.count(2 + usize::from(m.bias) + usize::from(m.residual), 1)?;
        let (a_rows, a_stored) = self.matrix(self.reads[0])?;
        let a_columns = columns(m.a_columns, a_stored)?;
        let (rows, k) = if m.trans_a { (a_columns, a_rows) } else { (a_rows, a_columns) };
        let (b_rows, b_stored) = self.matrix(self.reads[1])?;
        let b_columns = columns(m.b_columns, b_stored)?;
        let (k_b, n) = if m.trans_b { (b_columns, b_rows) } else { (b_rows, b_columns) };
        if k != k_b {
            return Err(format!("inner dims {k} and {k_b} differ"));
        }
        let (c_rows, c_stored) = self.matrix(self.writes[0])?;
        let c_columns = columns(m.c_columns, c_stored)?;
        if (c_rows, c_columns) != (rows, n) {
            return Err(format!("the product is [{rows}, {n}], its result [{c_rows}, {c_columns}]"));
        }
        self.fp8(m, [k, n])?;
        if m.replaces && !(m.residual && m.c_columns.is_some()) {
            return Err("nothing to replace: replaces needs a residual and c_columns".into());
        }
        if m.bias {
            self.shape(self.reads[2], &[n], Some(DType::F32))?;
        }
        if m.residual {
            self.shape(self.reads[self.reads.len() - 1], &self.writes[0].shape, Some(self.writes[0].dtype))?;
        }
        Ok(())
    }

    /// Sizes and types of a product in FP8, and that no other one reads e4m3.
    fn fp8(&self, m: &MatMul, [k, n]: [usize; 2]) -> Result<(), String> {
        let is_e4m3 = self.reads[1].dtype == DType::E4m3;
        match m.compute {
            Compute::Fp8 if m.trans_a || m.b_columns.is_some() => {
                Err("operands of FP8 are not transposed or cut".into())
            }
            Compute::Fp8 if !(k.is_multiple_of(Compute::FP8_VECTOR) && n.is_multiple_of(Compute::FP8_VECTOR)) => {
                Err(format!("a product in FP8 of [{k}, {n}] weights, expected multiples of {}", Compute::FP8_VECTOR))
            }
            Compute::F32 | Compute::Bf16 if is_e4m3 => {
                Err(format!("`{}` is read as {:?}", self.reads[1].name, m.compute))
            }
            _ => Ok(()),
        }
    }

    fn unpack(&self, packing: Packing) -> Result<(), String> {
        self.count(1, 1)?;
        let (rows, words) = self.matrix(self.reads[0])?;
        if !words.is_multiple_of(packing.n_words()) {
            return Err(format!("{words} words are not blocks of {}", packing.n_words()));
        }
        self.shape(self.reads[0], &[rows, words], Some(DType::I32))?;
        self.shape(self.writes[0], &[rows, packing.weights(words)], None)
    }

    fn row_lengths(&self, rows: &AdaptedRows) -> Result<(), String> {
        self.count(3, 1)?;
        let stored = self.matrix(self.reads[0])?;
        let (n_out, n_in) = if rows.trans_b { stored } else { (stored.1, stored.0) };
        let n = columns(Some(rows.columns), n_out)?;
        let (rank, _) = self.matrix(self.reads[1])?;
        let shapes = [vec![stored.0, stored.1], vec![rank, n_in], vec![n, rank]];
        self.reads.iter().zip(shapes).try_for_each(|(v, shape)| self.shape(v, &shape, Some(DType::F32)))?;
        self.shape(self.writes[0], &[n], Some(DType::F32))
    }

    fn magnitude(&self, cols: Columns, is_adjoint: bool, residual: bool) -> Result<(), String> {
        let (n_reads, n_writes) = if is_adjoint { (4 + usize::from(residual), 2) } else { (3, 1) };
        self.count(n_reads, n_writes)?;
        let (_, stored) = self.matrix(self.reads[0])?;
        let n = columns(Some(cols), stored)?;
        let vectors = self.reads[1..3].iter().chain(self.reads.get(4)).chain(self.writes.get(1));
        vectors.into_iter().try_for_each(|v| self.shape(v, &[n], Some(DType::F32)))?;
        let others = self.reads.get(3).copied().unwrap_or(self.reads[0]);
        [others, self.writes[0]].iter().try_for_each(|v| self.shape(v, &self.reads[0].shape, Some(self.reads[0].dtype)))
    }

    fn column_sum(&self, residual: bool, cols: Option<Columns>) -> Result<(), String> {
        self.count(1 + usize::from(residual), 1)?;
        let (_, stored) = self.matrix(self.reads[0])?;
        let c = columns(cols, stored)?;
        self.shape(self.writes[0], &[c], Some(DType::F32))?;
        self.reads.get(1).map_or(Ok(()), |r| self.shape(r, &[c], Some(DType::F32)))
    }

    fn norm(&self, kind: NormKind) -> Result<(), String> {
        let layer = usize::from(kind == NormKind::Layer);
        self.count(2 + layer, 2 + layer)?;
        let (n, c) = self.matrix(self.reads[0])?;
        self.reads[1..].iter().try_for_each(|g| self.shape(g, &[c], Some(DType::F32)))?;
        self.shape(self.writes[0], &[n, c], None)?;
        self.writes[1..].iter().try_for_each(|s| self.shape(s, &[n], Some(DType::F32)))
    }

    fn norm_backward(
        &self,
        kind: NormKind,
        residual_x: bool,
        residual_params: bool,
        again: bool,
        narrow: bool,
    ) -> Result<(), String> {
        let layer = usize::from(kind == NormKind::Layer);
        let n_params = 1 + layer;
        let n_reads = 4 + layer + usize::from(residual_x) + n_params * usize::from(residual_params);
        self.count(n_reads + layer * usize::from(again), 1 + n_params + usize::from(again) + usize::from(narrow))?;
        let (n, c) = self.matrix(self.reads[0])?;
        self.shape(self.reads[1], &[c], Some(DType::F32))?;
        self.reads[2..3 + layer].iter().try_for_each(|s| self.shape(s, &[n], Some(DType::F32)))?;
        self.shape(self.reads[3 + layer], &[n, c], None)?;
        self.shape(self.writes[0], &[n, c], None)?;
        if residual_x {
            self.shape(self.reads[4 + layer], &[n, c], Some(self.writes[0].dtype))?;
        }
        if again {
            self.shape(self.writes[1 + n_params], &[n, c], Some(self.reads[3 + layer].dtype))?;
        }
        if narrow {
            self.shape(self.writes[self.writes.len() - 1], &[n, c], Some(self.reads[3 + layer].dtype))?;
        }
        self.writes[1..1 + n_params].iter().try_for_each(|g| self.shape(g, &[c], Some(DType::F32)))?;
        let first = 4 + layer + usize::from(residual_x);
        self.reads[first..].iter().try_for_each(|g| self.shape(g, &[c], Some(DType::F32)))
    }

    fn qkv(&self, value: &Value, heads: &Attention) -> Result<usize, String> {
        let n = value.n_rows();
        if heads.seq_len == 0 || !n.is_multiple_of(heads.seq_len) {
            return Err(format!("{n} tokens are not a multiple of seq_len {}", heads.seq_len));
        }
        if heads.n_kv_heads == 0 || !heads.n_heads.is_multiple_of(heads.n_kv_heads) {
            return Err(format!("{} heads are not a multiple of {} kv heads", heads.n_heads, heads.n_kv_heads));
        }
        self.shape(value, &[n, heads.qkv_columns()], None).map(|()| n)
    }

    fn head_norm(&self, heads: &Attention) -> Result<(), String> {
        self.count(3, 2)?;
        let n = self.qkv(self.reads[0], heads)?;
        self.reads[1..].iter().try_for_each(|g| self.shape(g, &[heads.head_dim], Some(DType::F32)))?;
        self.same_shape(&[self.reads[0], self.writes[0]])?;
        self.shape(self.writes[1], &[n, heads.n_heads + heads.n_kv_heads], Some(DType::F32))
    }

    fn head_norm_backward(&self, heads: &Attention, residual: bool) -> Result<(), String> {
        self.count(5 + 2 * usize::from(residual), 3)?;
        let n = self.qkv(self.reads[0], heads)?;
        let gains = [&self.reads[1..3], &self.reads[5..], &self.writes[1..]].concat();
        gains.iter().try_for_each(|g| self.shape(g, &[heads.head_dim], Some(DType::F32)))?;
        self.shape(self.reads[3], &[n, heads.n_heads + heads.n_kv_heads], Some(DType::F32))?;
        self.same_shape(&[self.reads[0], self.reads[4], self.writes[0]])
    }

    fn qk(&self, op: &Op) -> Result<(), String> {
        match op {
            Op::QkSquares(columns) => self.qk_squares(columns),
            Op::QkSquaresBackward { columns, residual } => self.qk_squares_backward(columns, *residual),
            Op::QkNorm(norm) => self.qk_norm(norm),
            Op::QkNormBackward { norm, residual } => self.qk_norm_backward(norm, *residual),
            other => Err(format!("{} is not a norm of queries and keys", other.name())),
        }
    }

    /// Tokens of packed qkv whose columns are these.
    fn qk_tokens(&self, columns: &QkColumns) -> Result<usize, String> {
        let (n, c) = self.matrix(self.reads[0])?;
        if c == columns.q + 2 * columns.k {
            return Ok(n);
        }
        Err(format!("{c} columns are not {} of queries and {} each of keys and values", columns.q, columns.k))
    }

    fn qk_squares(&self, columns: &QkColumns) -> Result<(), String> {
        self.count(1, 1)?;
        let n = self.qk_tokens(columns)?;
        self.shape(self.writes[0], &[n, 2], Some(DType::F32))
    }

    fn qk_squares_backward(&self, columns: &QkColumns, residual: bool) -> Result<(), String> {
        self.count(2 + usize::from(residual), 1)?;
        let n = self.qk_tokens(columns)?;
        self.shape(self.reads[1], &[n, 2], Some(DType::F32))?;
        let dtype = Some(self.reads[0].dtype);
        let gradients = self.reads[2..].iter().chain(self.writes);
        gradients.into_iter().try_for_each(|v| self.shape(v, &self.reads[0].shape, dtype))
    }

    fn qk_norm(&self, norm: &QkNorm) -> Result<(), String> {
        self.count(4, 1)?;
        let n = self.qk_tokens(&norm.columns)?;
        self.gains(norm, &[self.reads[1], self.reads[2]])?;
        self.shape(self.reads[3], &[n, 2], Some(DType::F32))?;
        self.shape(self.writes[0], &self.reads[0].shape, Some(self.reads[0].dtype))
    }

    fn qk_norm_backward(&self, norm: &QkNorm, residual: bool) -> Result<(), String> {
        self.count(5 + 2 * usize::from(residual), 4)?;
        let n = self.qk_tokens(&norm.columns)?;
        for gains in [&self.reads[1..3], &self.reads[5..], &self.writes[2..]] {
            self.gains(norm, gains)?;
        }
        self.shape(self.reads[3], &[n, 2], Some(DType::F32))?;
        self.shape(self.writes[1], &[n, 2], Some(DType::F32))?;
        let (shape, dtype) = (&self.reads[0].shape, Some(self.reads[0].dtype));
        self.shape(self.reads[4], shape, dtype).and_then(|()| self.shape(self.writes[0], shape, dtype))
    }

    /// Gains of queries and of keys, or their gradients.
    fn gains(&self, norm: &QkNorm, gains: &[&Value]) -> Result<(), String> {
        let extents = [norm.columns.q, norm.columns.k];
        gains.iter().zip(extents).try_for_each(|(g, extent)| self.shape(g, &[extent], Some(DType::F32)))
    }

    fn rotary(&self, heads: &Attention) -> Result<(), String> {
        self.count(3, 1)?;
        let n = self.qkv(self.reads[0], heads)?;
        self.shape(self.reads[1], &[n], Some(DType::I32))?;
        let positions = self.reads[2].shape.get(1).copied().unwrap_or(0);
        self.shape(self.reads[2], &[2, positions, heads.head_dim / 2], Some(DType::F32))?;
        self.same_shape(&[self.reads[0], self.writes[0]])
    }

    fn attention(&self, a: &Attention) -> Result<(), String> {
        self.count(2, 2)?;
        let n = self.qkv(self.reads[0], a)?;
        self.shape(self.reads[1], &[n], Some(DType::I32))?;
        self.shape(self.writes[0], &[n, a.n_heads * a.head_dim], Some(self.reads[0].dtype))?;
        self.shape(self.writes[1], &[n, a.n_heads], Some(DType::F32))
    }

    fn attention_backward(&self, a: &Attention) -> Result<(), String> {
        self.count(5, 1)?;
        let n = self.qkv(self.reads[0], a)?;
        let dtype = Some(self.reads[0].dtype);
        self.shape(self.reads[1], &[n], Some(DType::I32))?;
        self.shape(self.reads[2], &[n, a.n_heads * a.head_dim], dtype)?;
        self.shape(self.reads[3], &[n, a.n_heads], Some(DType::F32))?;
        self.shape(self.reads[4], &[n, a.n_heads * a.head_dim], dtype)?;
        self.shape(self.writes[0], &[n, a.qkv_columns()], dtype)
    }

    fn cache(&self, a: &CachedAttention, is_write: bool) -> Result<(), String> {
        self.count(3, if is_write { 1 } else { 2 })?;
        let n = self.qkv(self.reads[0], &a.heads)?;
        self.shape(self.reads[1], &[n], Some(DType::I32))?;
        let (shape, dtype) = ([n / a.heads.seq_len * a.capacity, a.cache_columns()], Some(self.reads[0].dtype));
        self.shape(self.reads[2], &shape, dtype)?;
        if is_write {
            return self.shape(self.writes[0], &shape, dtype);
        }
        self.shape(self.writes[0], &[n, a.heads.n_heads * a.heads.head_dim], dtype)?;
        self.shape(self.writes[1], &[n, a.heads.n_heads], Some(DType::F32))
    }

    fn activation(&self, f: ActivationFn) -> Result<(), String> {
        self.count(1, 1)?;
        self.shape(self.writes[0], &self.activated(f)?, None)
    }

    fn activation_backward(&self, f: ActivationFn, again: bool) -> Result<(), String> {
        self.count(2, 1 + usize::from(again))?;
        let narrow = self.activated(f)?;
        self.shape(self.reads[1], &narrow, None)?;
        self.shape(self.writes[0], &self.reads[0].shape, None)?;
        self.writes.get(1).map_or(Ok(()), |y| self.shape(y, &narrow, Some(self.reads[1].dtype)))
    }

    /// Shape of the result of an activation of the first operand.
    fn activated(&self, f: ActivationFn) -> Result<[usize; 2], String> {
        let (n, c) = self.matrix(self.reads[0])?;
        match f {
            ActivationFn::GeluTanh => Ok([n, c]),
            ActivationFn::SwiGlu if c % 2 == 0 => Ok([n, c / 2]),
            ActivationFn::SwiGlu => Err(format!("gate and up need an even number of columns, found {c}")),
        }
    }

    fn cross_entropy(&self, residual: bool, gradient: bool, vocab: Option<VocabShard>) -> Result<(), String> {
        let stats = usize::from(vocab.is_some());
        self.count(3 + stats + usize::from(residual), 1 + usize::from(gradient))?;
        let (n, v) = self.matrix(self.reads[0])?;
        self.shape(self.reads[1], &[n], Some(DType::I32))?;
        self.hyper(self.reads[2])?;
        if let Some(vocab) = vocab {
            self.shape(self.reads[3], &[vocab.n_shards, n, 3], Some(DType::F32))?;
        }
        self.reads[3 + stats..].iter().try_for_each(|l| self.scalar(l))?;
        self.scalar(self.writes[0])?;
        self.writes[1..].iter().try_for_each(|d| self.shape(d, &[n, v], Some(self.reads[0].dtype)))
    }

    fn cross_entropy_stats(&self) -> Result<(), String> {
        self.count(2, 1)?;
        let (n, _) = self.matrix(self.reads[0])?;
        self.shape(self.reads[1], &[n], Some(DType::I32))?;
        self.shape(self.writes[0], &[1, n, 3], Some(DType::F32))
    }

    fn split(&self, whole: Option<&&Value>, parts: &[&Value]) -> Result<(), String> {
        let (Some(whole), [left, right]) = (whole, parts) else {
            return Err("expected a matrix and its left and right columns".into());
        };
        let (n, c) = self.matrix(whole)?;
        let (_, a) = self.matrix(left)?;
        self.shape(left, &[n, a], None)?;
        self.shape(right, &[n, c.saturating_sub(a)], None)
    }

    /// Gradients of attention parts, which are f32.
    fn join(&self, parts: &[&Value]) -> Result<(), String> {
        self.split(self.writes.first(), parts)?;
        parts.iter().try_for_each(|part| self.shape(part, &part.shape, Some(DType::F32)))
    }

    /// Shapes of queries, keys and values of a part.
    fn part_operands(&self, part: &AttentionPart) -> Result<usize, String> {
        let a = &part.heads;
        let (n, _) = self.matrix(self.reads[0])?;
        if a.seq_len == 0 || !n.is_multiple_of(a.seq_len) {
            return Err(format!("{n} tokens are not a multiple of seq_len {}", a.seq_len));
        }
        if part.q_rank >= part.n_ranks || part.kv_rank + part.n_kv_ranks > part.n_ranks {
            return Err(format!("there are {} context-parallel ranks", part.n_ranks));
        }
        self.shape(self.reads[0], &[n, a.n_heads * a.head_dim], None)?;
        self.shape(self.reads[1], &[part.n_kv_ranks * n, 2 * a.n_kv_heads * a.head_dim], None)?;
        self.shape(self.reads[2], &[n], Some(DType::I32))?;
        Ok(n)
    }

    fn attention_part(&self, part: &AttentionPart) -> Result<(), String> {
        self.count(3 + 2 * usize::from(part.carried), 2)?;
        let n = self.part_operands(part)?;
        let (o, lse) = ([n, part.heads.n_heads * part.heads.head_dim], [n, part.heads.n_heads]);
        let pairs = [self.writes, &self.reads[3..]].concat();
        pairs.chunks(2).try_for_each(|pair| {
            self.shape(pair[0], &o, Some(DType::F32))?;
            self.shape(pair[1], &lse, Some(DType::F32))
        })
    }

    fn attention_part_backward(&self, part: &AttentionPart, q: bool, kv: bool) -> Result<(), String> {
        self.count(6 + usize::from(q) + usize::from(kv), 2)?;
        let n = self.part_operands(part)?;
        let o = [n, part.heads.n_heads * part.heads.head_dim];
        self.shape(self.reads[3], &o, Some(DType::F32))?;
        self.shape(self.reads[4], &[n, part.heads.n_heads], Some(DType::F32))?;
        self.shape(self.reads[5], &o, Some(DType::F32))?;
        let dq = self.reads[6..].iter().take(usize::from(q)).chain(&self.writes[..1]);
        dq.into_iter().try_for_each(|v| self.shape(v, &o, Some(DType::F32)))?;
        let dkv = self.reads[6 + usize::from(q)..].iter().chain(&self.writes[1..]);
        dkv.into_iter().try_for_each(|v| self.shape(v, &self.reads[1].shape, Some(DType::F32)))
    }

    fn scale(&self, keys: bool) -> Result<(), String> {
        self.count(1 + usize::from(keys), 1)?;
        if keys {
            let (n, _) = self.matrix(self.reads[0])?;
            self.shape(self.reads[1], &[n], Some(DType::I32))?;
        }
        self.shape(self.writes[0], &self.reads[0].shape, Some(self.reads[0].dtype))
    }

    fn add_bias(&self) -> Result<(), String> {
        self.count(2, 1)?;
        let (_, c) = self.matrix(self.reads[0])?;
        self.shape(self.reads[1], &[c], Some(DType::F32))?;
        self.same_shape(&[self.reads[0], self.writes[0]])
    }

    fn run(&self, value: &Value, start: usize, len: usize) -> Result<(), String> {
        if start + len <= value.n_elements() {
            return Ok(());
        }
        Err(format!("elements {start}..{} of `{}`, which has {}", start + len, value.name, value.n_elements()))
    }

    fn slice(&self, start: usize, paste: bool) -> Result<(), String> {
        self.count(1 + usize::from(paste), 1)?;
        let part = if paste { self.reads[1] } else { self.writes[0] };
        self.run(self.reads[0], start, part.n_elements())?;
        self.shape(part, &part.shape, Some(self.reads[0].dtype))?;
        if paste { self.same_shape(&[self.reads[0], self.writes[0]]) } else { Ok(()) }
    }

    fn opaque(&self, n_inputs: usize, n_params: usize, residual: bool, gradient: bool) -> Result<(), String> {
        let fixed = n_inputs + n_params + 1;
        let n_grads = if gradient { n_params } else { 0 };
        self.count(fixed + usize::from(residual) * (1 + n_grads), 1 + n_grads)?;
        self.hyper(self.reads[fixed - 1])?;
        self.scalar(self.writes[0])?;
        let params = &self.reads[n_inputs..fixed - 1];
        let same = |g: &Value, p: &Value| self.shape(g, &p.shape, Some(DType::F32));
        params.iter().zip(&self.writes[1..]).try_for_each(|(p, g)| same(g, p))?;
        if residual {
            self.scalar(self.reads[fixed])?;
            params.iter().zip(&self.reads[fixed + 1..]).try_for_each(|(p, g)| same(g, p))?;
        }
        Ok(())
    }

    fn clip(&self) -> Result<(), String> {
        self.count(self.reads.len().max(1), 2)?;
        let (hyper, sums) = self.reads.split_last().ok_or("no operands")?;
        self.hyper(hyper)?;
        sums.iter().try_for_each(|s| self.shape(s, &s.shape, Some(DType::F64)))?;
        self.writes.iter().try_for_each(|s| self.scalar(s))
    }

    fn update(&self, update: &Update) -> Result<(), String> {
        let all = update.rule.sums(update.n_dims).len();
        if update.n_rounds != all {
            return Err(format!("found {} rounds of sums, expected {all}", update.n_rounds));
        }
        self.count(update.n_reads(), 1 + update.n_state())?;
        self.update_operands(update)?;
        self.writes.iter().zip(self.reads).try_for_each(|(w, r)| self.shape(w, &r.shape, Some(r.dtype)))
    }

    fn update_sums(&self, update: &Update) -> Result<(), String> {
        let rounds = update.rule.sums(update.n_dims);
        let Some(next) = rounds.get(update.n_rounds) else {
            return Err(format!("no sums follow {} rounds", update.n_rounds));
        };
        self.count(update.n_reads(), next.len())?;
        self.update_operands(update)?;
        self.values(update, self.writes, next.iter().copied())
    }

    fn update_operands(&self, update: &Update) -> Result<(), String> {
        let UpdateOperands { param, state, grad, sums, hyper, coefficient } = update.operands(self.reads);
        let n = grad.n_elements();
        self.run(param, update.first, n)?;
        for v in [param, grad] {
            self.shape(v, &v.shape, Some(DType::F32))?;
        }
        for tile in &update.tiles.tiles {
            let stack = update.tiles.tensors.get(tile.tensor).ok_or("a tile refers to a missing tensor")?;
            let is_inside = tile.matrix < stack.n_matrices
                && tile.row + tile.n_rows <= stack.n_rows
                && tile.column + tile.n_columns <= stack.n_columns
                && (tile.n_rows == 0 || tile.row_at(tile.n_rows - 1).end <= n);
            if !is_inside {
                return Err(format!("{tile:?} does not lie in {n} elements of {stack:?}"));
            }
        }
        let n_in_blocks = if update.rule.has_blocks() { n } else { 0 };
        if update.blocks.n_elements() != n_in_blocks {
            return Err(format!("blocks of {} elements, expected {n_in_blocks}", update.blocks.n_elements()));
        }
        self.values(update, state, update.rule.state(update.n_dims).iter().map(|tensor| tensor.extent))?;
        let rounds = update.rule.sums(update.n_dims)[..update.n_rounds].iter();
        self.values(update, sums, rounds.flat_map(|round| round.iter().copied()))?;
        self.hyper(hyper)?;
        self.scalar(coefficient)
    }

    /// Values of an optimizer, one for each of these extents.
    fn values(&self, update: &Update, values: &[&Value], extents: impl Iterator<Item = Extent>) -> Result<(), String> {
        let UpdateOperands { grad, .. } = update.operands(self.reads);
        for (v, extent) in values.iter().zip(extents) {
            let (n, dtype) = match extent {
                Extent::Elements => (grad.n_elements(), DType::F32),
                Extent::Blocks => (update.blocks.n_words(), DType::I32),
                extent => (update.tiles.n_values(extent), DType::F32),
            };
            self.shape(v, &v.shape, Some(dtype))?;
            if v.n_elements() != n {
                return Err(format!("`{}` has {} elements, expected {n}", v.name, v.n_elements()));
            }
        }
        Ok(())
    }

    fn collective(&self, c: &Collective, mesh_rank: &MeshRank) -> Result<(), String> {
        let (size, position) = (mesh_rank.group_size(c.group), mesh_rank.position(c.group));
        let part = |n: usize| c.part(n, size, position).len();
        let (n_in, n_out) = match c.kind {
            CollectiveKind::Send { .. } => (self.reads.len(), 0),
            CollectiveKind::Recv { .. } => (0, self.writes.len()),
            _ => (self.reads.len().max(1), self.reads.len().max(1)),
        };
        self.count(n_in, n_out)?;
        let pairs = || self.reads.iter().zip(self.writes);
        let sized = |v: &Value, n: usize| match v.n_elements() == n {
            true => Ok(()),
            false => Err(format!(
                "`{}` has {} elements, expected {n} at position {position} of {size}",
                v.name,
                v.n_elements()
            )),
        };
        if let Some((a, b)) = pairs().find(|(a, b)| a.dtype != b.dtype) {
            return Err(format!("`{}` is {} and `{}` is {}", a.name, a.dtype, b.name, b.dtype));
        }
        match c.kind {
            CollectiveKind::ReduceScatter => pairs().try_for_each(|(a, b)| sized(b, part(a.n_elements()))),
            CollectiveKind::AllToAll => pairs().try_for_each(|(a, b)| sized(b, size * part(a.n_elements()))),
            CollectiveKind::AllGather => pairs().try_for_each(|(a, b)| match std::ptr::eq(*a, *b) {
                true => Ok(()),
                false => sized(a, part(b.n_elements())),
            }),
            CollectiveKind::Send { to: peer, .. } | CollectiveKind::Recv { from: peer, .. } => match peer as usize {
                peer if peer < size && peer != position => Ok(()),
                peer => Err(format!("position {peer} is not another member of a group of {size}")),
            },
            _ => pairs().try_for_each(|(a, b)| sized(b, a.n_elements())),
        }
    }
}

fn columns(part: Option<Columns>, stored: usize) -> Result<usize, String> {
    match part {
        None => Ok(stored),
        Some(c) if c.start.checked_add(c.len).is_some_and(|end| end <= stored) => Ok(c.len),
        Some(c) => Err(format!("columns {}..{} of a matrix with {stored}", c.start, c.start.saturating_add(c.len))),
    }
}
