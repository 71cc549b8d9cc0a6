//! Operands and results of each operation: how many, which shapes, which element types.

use crate::program::{
    ActivationFn, Attention, CollectiveKind, Columns, DType, Hyper, Instr, MatMul, NormKind, Op, Program, Value,
};

/// Checks one instruction against the signature of its operation.
pub(super) fn check(program: &Program, instr: &Instr) -> Result<(), String> {
    let reads: Vec<&Value> = instr.reads.iter().map(|v| program.value(*v)).collect();
    let writes: Vec<&Value> = instr.writes.iter().map(|v| program.value(*v)).collect();
    let s = Signature { reads: &reads, writes: &writes };
    match &instr.op {
        Op::Embedding { residual } => s.embedding(*residual),
        Op::EmbeddingBackward { residual } => s.embedding_backward(*residual),
        Op::MatMul(m) => s.matmul(m),
        Op::ColumnSum { residual, columns } => s.column_sum(*residual, *columns),
        Op::Norm { kind, .. } => s.norm(*kind),
        Op::NormBackward { kind, residual_x, residual_params } => s.norm_backward(*kind, *residual_x, *residual_params),
        Op::HeadNorm { heads, .. } => s.head_norm(heads),
        Op::HeadNormBackward { heads, residual } => s.head_norm_backward(heads, *residual),
        Op::Rotary { heads, .. } => s.rotary(heads),
        Op::Attention(a) => s.attention(a),
        Op::AttentionBackward(a) => s.attention_backward(a),
        Op::Activation(f) => s.activation(*f, false),
        Op::ActivationBackward(f) => s.activation(*f, true),
        Op::Add => s.count(2, 1).and_then(|()| s.same_shape(&[reads[0], reads[1], writes[0]])),
        Op::Cast => s.count(1, 1).and_then(|()| s.same_shape(&[reads[0], writes[0]])),
        Op::CrossEntropy { residual, gradient } => s.cross_entropy(*residual, *gradient),
        Op::Opaque { n_inputs, n_params, residual, gradient, .. } => {
            s.opaque(*n_inputs, *n_params, *residual, *gradient)
        }
        Op::SumSquares => s.count(1, 1).and_then(|()| s.scalar(writes[0])),
        Op::ClipCoefficient { .. } => s.clip(),
        Op::AdamW { .. } => s.update(3),
        Op::Sgd { .. } => s.update(2),
        Op::Start(c) => s.collective(c.kind),
        Op::Await { .. } => s.count(1, 0),
    }
}

struct Signature<'a> {
    reads: &'a [&'a Value],
    writes: &'a [&'a Value],
}

impl Signature<'_> {
    fn count(&self, n_reads: usize, n_writes: usize) -> Result<(), String> {
        if self.reads.len() == n_reads && self.writes.len() == n_writes {
            return Ok(());
        }
        let found = (self.reads.len(), self.writes.len());
        Err(format!("{} operands and {} results found, {n_reads} and {n_writes} fit", found.0, found.1))
    }

    fn shape(&self, value: &Value, shape: &[usize], dtype: Option<DType>) -> Result<(), String> {
        let dtype_fits = dtype.map_or(value.dtype.is_activation(), |d| d == value.dtype);
        if value.shape == shape && dtype_fits {
            return Ok(());
        }
        let wanted = dtype.map_or("f32, bf16 or f16 ".into(), |d| d.to_string());
        Err(format!("`{}` is {}{:?}, {wanted}{shape:?} fits", value.name, value.dtype, value.shape))
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
            _ => Err(format!("`{}` has shape {:?}, a matrix fits", value.name, value.shape)),
        }
    }

    fn embedding(&self, residual: bool) -> Result<(), String> {
        self.count(2 + usize::from(residual), 1)?;
        let (_, c) = self.matrix(self.reads[1])?;
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
        let (b_rows, b_columns) = self.matrix(self.reads[1])?;
        let (k_b, n) = if m.trans_b { (b_columns, b_rows) } else { (b_rows, b_columns) };
        if k != k_b {
            return Err(format!("inner dims {k} and {k_b} differ"));
        }
        let (c_rows, c_stored) = self.matrix(self.writes[0])?;
        let c_columns = columns(m.c_columns, c_stored)?;
        if (c_rows, c_columns) != (rows, n) {
            return Err(format!("the product is [{rows}, {n}], its place [{c_rows}, {c_columns}]"));
        }
        if m.c_columns.is_some() && !m.residual {
            return Err("some columns of the result are never written: c_columns needs a residual".into());
        }
        if m.bias {
            self.shape(self.reads[2], &[n], Some(DType::F32))?;
        }
        if m.residual {
            self.shape(self.reads[self.reads.len() - 1], &self.writes[0].shape, Some(self.writes[0].dtype))?;
        }
        Ok(())
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

    fn norm_backward(&self, kind: NormKind, residual_x: bool, residual_params: bool) -> Result<(), String> {
        let layer = usize::from(kind == NormKind::Layer);
        let n_params = 1 + layer;
        let n_reads = 4 + layer + usize::from(residual_x) + n_params * usize::from(residual_params);
        self.count(n_reads, 1 + n_params)?;
        let (n, c) = self.matrix(self.reads[0])?;
        self.shape(self.reads[1], &[c], Some(DType::F32))?;
        self.reads[2..3 + layer].iter().try_for_each(|s| self.shape(s, &[n], Some(DType::F32)))?;
        self.shape(self.reads[3 + layer], &[n, c], None)?;
        self.shape(self.writes[0], &[n, c], None)?;
        if residual_x {
            self.shape(self.reads[4 + layer], &[n, c], Some(self.writes[0].dtype))?;
        }
        self.writes[1..].iter().try_for_each(|g| self.shape(g, &[c], Some(DType::F32)))?;
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

    fn activation(&self, f: ActivationFn, backward: bool) -> Result<(), String> {
        self.count(1 + usize::from(backward), 1)?;
        let (n, c) = self.matrix(self.reads[0])?;
        let narrow = if f == ActivationFn::SwiGlu { c / 2 } else { c };
        if f == ActivationFn::SwiGlu && c % 2 != 0 {
            return Err(format!("gate and up need an even number of columns, found {c}"));
        }
        if backward {
            self.shape(self.reads[1], &[n, narrow], None)?;
            return self.shape(self.writes[0], &[n, c], None);
        }
        self.shape(self.writes[0], &[n, narrow], None)
    }

    fn cross_entropy(&self, residual: bool, gradient: bool) -> Result<(), String> {
        self.count(3 + usize::from(residual), 1 + usize::from(gradient))?;
        let (n, v) = self.matrix(self.reads[0])?;
        self.shape(self.reads[0], &[n, v], Some(DType::F32))?;
        self.shape(self.reads[1], &[n], Some(DType::I32))?;
        self.hyper(self.reads[2])?;
        self.reads[3..].iter().try_for_each(|l| self.scalar(l))?;
        self.scalar(self.writes[0])?;
        self.writes[1..].iter().try_for_each(|d| self.shape(d, &[n, v], Some(DType::F32)))
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
        sums.iter().chain(self.writes).try_for_each(|s| self.scalar(s))
    }

    fn update(&self, n_state: usize) -> Result<(), String> {
        self.count(n_state + 3, n_state)?;
        let shape = &self.reads[0].shape;
        self.reads[..=n_state].iter().try_for_each(|v| self.shape(v, shape, Some(DType::F32)))?;
        self.hyper(self.reads[n_state + 1])?;
        self.scalar(self.reads[n_state + 2])?;
        self.writes.iter().try_for_each(|v| self.shape(v, shape, Some(DType::F32)))
    }

    fn collective(&self, kind: CollectiveKind) -> Result<(), String> {
        let n_reads = usize::from(!matches!(kind, CollectiveKind::Recv { .. }));
        self.count(n_reads, 1)?;
        match kind {
            CollectiveKind::AllReduce | CollectiveKind::AllToAll | CollectiveKind::Broadcast { .. } => {
                self.same_shape(&[self.reads[0], self.writes[0]])
            }
            _ => Ok(()),
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
