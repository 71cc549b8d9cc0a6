//! The head in chunks: logits of some tokens at a time, for targets that ask ([`crate::target::Target::head_chunk_tokens`]).
//!
//! Legend: `N` tokens, `C` model width, `V` vocabulary; `n` tokens of a chunk. The head computes `logits = h W^T [N, V]`, the
//! loss, `dlogits [N, V]`, `dW = dlogits^T h` and `dh = dlogits W`. With a large vocabulary, logits are the largest value of a
//! step. This pass repeats all of it for each chunk of tokens, so that only `n V` logits exist at once. Losses and `dW`
//! continue those of the chunk before, and each part of `dh` replaces the rows of `h` that it no longer needs. Everything is
//! as in the whole head, up to the order of the sums of `dW` and of the loss.
//!
//! A chunk is cut by tokens of a microbatch only, so the sums have the same order on every mesh: reproducible runs stay so.
//! Each chunk reads and writes `dW` once, which is the price. The products of the backward pass run in the forward pass, so a
//! stage with several microbatches in flight keeps `dh` of each instead of its `dlogits`.
//!
//! Source: Hsu et al. 2024, Liger Kernel, fused linear cross-entropy (arXiv:2410.10989). We differ in that the chunks are plain
//! instructions of the program, so they work with every mesh and device.

use crate::program::{Instr, Kind, MatMul, Op, Program, Site, ValueId, op};
use std::ops::Range;

/// Cuts the head of a program into chunks of about `tokens` tokens. A head whose logits or input have other uses stays whole.
///
/// # Panics
/// If `tokens` is 0.
pub fn head_chunks(program: &mut Program, tokens: usize) {
    let Some(head) = Head::find(program) else { return };
    let n_tokens = program.value(head.input).n_rows();
    let n_chunks = n_tokens.div_ceil(tokens);
    if n_chunks < 2 {
        return;
    }
    let len = n_tokens.div_ceil(n_chunks);
    let (loss, site) = (head.carried_loss(program), program.instrs[head.loss].site);
    let mut chunks = Chunks { input: head.input, loss, weight_grad: None, site, out: Vec::new() };
    for i in 0..n_chunks {
        let tokens = (i * len).min(n_tokens)..((i + 1) * len).min(n_tokens);
        chunks.chunk(program, &head, tokens, i + 1 == n_chunks);
    }
    let replaced = head.instrs();
    for (i, instr) in std::mem::take(&mut program.instrs).into_iter().enumerate() {
        if i == head.loss {
            program.instrs.append(&mut chunks.out);
        } else if !replaced.contains(&i) {
            program.instrs.push(instr);
        }
    }
}

/// Positions of the instructions of a head.
struct Head {
    input: ValueId,
    logits: usize,
    /// Statistics of the logits, the start of their gathering, its await: on tensor-parallel ranks.
    statistics: Vec<usize>,
    loss: usize,
    weight_grad: Option<usize>,
    input_grad: Option<usize>,
}

impl Head {
    /// The head of a program, if nothing but the instructions of a head uses its input and its logits.
    fn find(program: &Program) -> Option<Head> {
        let instrs = &program.instrs;
        let loss = instrs.iter().position(|i| matches!(i.op, Op::CrossEntropy(_)))?;
        let logits_value = instrs[loss].reads[0];
        let logits = instrs.iter().position(|i| i.writes.contains(&logits_value))?;
        let is_plain =
            |m: &MatMul| !(m.trans_a || m.bias || m.residual) && m.a_columns.or(m.b_columns).or(m.c_columns).is_none();
        let Op::MatMul(product) = &instrs[logits].op else { return None };
        let input = instrs[logits].reads[0];
        let readers =
            |v: ValueId| -> Vec<usize> { (0..instrs.len()).filter(|i| instrs[*i].reads.contains(&v)).collect() };
        let statistics: Vec<usize> = match instrs[loss].op {
            Op::CrossEntropy(op::CrossEntropy { vocab: Some(_), .. }) => {
                let gathered = instrs[loss].reads[3];
                let start = instrs.iter().position(|i| i.writes.contains(&gathered))?;
                let own = instrs.iter().position(|i| i.writes.contains(&instrs[start].reads[0]))?;
                let end = readers(gathered).into_iter().find(|i| matches!(instrs[*i].op, Op::Await(_)))?;
                vec![own, start, end]
            }
            _ => Vec::new(),
        };
        let mut head = Head { input, logits, statistics, loss, weight_grad: None, input_grad: None };
        if let Some(dlogits) = instrs[loss].writes.get(1) {
            for i in readers(*dlogits) {
                let is_weight_grad = instrs[i].reads[..2].contains(&input);
                let grad = if is_weight_grad { &mut head.weight_grad } else { &mut head.input_grad };
                if grad.replace(i).is_some() || !matches!(instrs[i].op, Op::MatMul(_)) {
                    return None;
                }
            }
        }
        let own = head.instrs();
        // The await of a gathered input comes before the head.
        let is_own = |i: &usize| own.contains(i) || matches!(instrs[*i].op, Op::Await(_));
        let only_here = |v: ValueId| readers(v).iter().all(is_own) && program.bindings.iter().all(|b| b.value != v);
        let adds_to_other = head.input_grad.is_some_and(|i| instrs[i].reads.len() > 2);
        let fits = is_plain(product) && !adds_to_other && program.value(input).kind == Kind::Activation;
        (fits && only_here(input) && only_here(logits_value)).then_some(head)
    }

    fn instrs(&self) -> Vec<usize> {
        let all = [self.logits, self.loss].into_iter().chain(self.statistics.iter().copied());
        all.chain(self.weight_grad).chain(self.input_grad).collect()
    }

    /// The loss of an earlier microbatch, which this one continues.
    fn carried_loss(&self, program: &Program) -> Option<ValueId> {
        let loss = &program.instrs[self.loss];
        matches!(loss.op, Op::CrossEntropy(op::CrossEntropy { residual: true, .. }))
            .then(|| loss.reads[loss.reads.len() - 1])
    }
}

/// The chunks so far.
struct Chunks {
    /// The head's input, whose first rows are those of its gradient.
    input: ValueId,
    loss: Option<ValueId>,
    weight_grad: Option<ValueId>,
    site: Site,
    out: Vec<Instr>,
}

impl Chunks {
    fn chunk(&mut self, program: &mut Program, head: &Head, tokens: Range<usize>, is_last: bool) {
        let whole = |i: usize| program.instrs[i].clone();
        let (product, loss) = (whole(head.logits), whole(head.loss));
        let (weight_grad, input_grad) = (head.weight_grad.map(whole), head.input_grad.map(whole));
        let statistics: Vec<Instr> = head.statistics.iter().copied().map(whole).collect();
        let x = self.rows(program, self.input, &tokens);
        let labels = self.rows(program, loss.reads[1], &tokens);
        let logits = of_tokens(program, product.writes[0], &tokens);
        self.push(product.op, vec![x, product.reads[1]], vec![logits]);
        let mut reads = vec![logits, labels, loss.reads[2]];
        reads.extend(self.statistics(program, &statistics, logits, labels, &tokens));
        let Op::CrossEntropy(op::CrossEntropy { gradient, vocab, .. }) = loss.op else {
            unreachable!("it is the loss")
        };
        reads.extend(self.loss);
        let op = Op::CrossEntropy(op::CrossEntropy { residual: self.loss.is_some(), gradient, vocab });
        let sum = if is_last { loss.writes[0] } else { of_chunk(program, loss.writes[0]) };
        let dlogits = loss.writes.get(1).map(|whole| of_tokens(program, *whole, &tokens));
        self.loss = Some(sum);
        self.push(op, reads, [sum].into_iter().chain(dlogits).collect());
        let Some(dlogits) = dlogits else { return };
        if let Some(whole) = weight_grad {
            self.weight_grad(program, whole, |v| if v == loss.writes[1] { dlogits } else { x }, is_last);
        }
        if let Some(whole) = input_grad {
            let dx = of_tokens(program, whole.writes[0], &tokens);
            self.push(whole.op, vec![dlogits, whole.reads[1]], vec![dx]);
            let pasted = if is_last { whole.writes[0] } else { of_chunk(program, whole.writes[0]) };
            let start = tokens.start * program.value(pasted).n_columns();
            self.push(Op::Paste(op::Paste { start }), vec![self.input, dx], vec![pasted]);
            self.input = pasted;
        }
    }

    /// Each chunk adds to the sum of the chunks before it, the first one to that of earlier microbatches.
    fn weight_grad(&mut self, program: &mut Program, whole: Instr, part: impl Fn(ValueId) -> ValueId, is_last: bool) {
        let Op::MatMul(m) = whole.op else { unreachable!("it is a product") };
        let carried = self.weight_grad.or(whole.reads.get(2).copied());
        let sum = if is_last { whole.writes[0] } else { of_chunk(program, whole.writes[0]) };
        let reads = whole.reads[..2].iter().map(|v| part(*v)).chain(carried).collect();
        self.push(Op::MatMul(MatMul { residual: carried.is_some(), ..m }), reads, vec![sum]);
        self.weight_grad = Some(sum);
    }

    /// Statistics of a chunk's logits on all tensor-parallel ranks.
    fn statistics(
        &mut self,
        program: &mut Program,
        whole: &[Instr],
        logits: ValueId,
        labels: ValueId,
        tokens: &Range<usize>,
    ) -> Option<ValueId> {
        let [statistics, start, end] = whole else { return None };
        let (Op::Start(op::Start(mut c)), own) = (start.op.clone(), statistics.writes[0]) else {
            unreachable!("statistics are gathered")
        };
        // The part of a rank: its statistics of each token.
        c.unit = 3 * tokens.len();
        let n_shards = program.value(end.reads[0]).shape[0];
        let [own, all] = [(own, 1), (end.reads[0], n_shards)].map(|(whole, n_shards)| {
            let value = program.value(whole).clone();
            program.add_value(value.name, &[n_shards, tokens.len(), 3], value.dtype, value.kind)
        });
        self.push(statistics.op.clone(), vec![logits, labels], vec![own]);
        self.push(Op::Start(op::Start(c)), vec![own], vec![all]);
        self.push(Op::Await(op::Await(c)), vec![all], vec![]);
        Some(all)
    }

    /// A copy of some rows of a value.
    fn rows(&mut self, program: &mut Program, whole: ValueId, tokens: &Range<usize>) -> ValueId {
        let rows = of_tokens(program, whole, tokens);
        let start = tokens.start * program.value(rows).n_elements() / tokens.len();
        self.push(Op::Slice(op::Slice { start }), vec![whole], vec![rows]);
        rows
    }

    /// Appends an instruction at the site of the loss.
    fn push(&mut self, op: Op, reads: Vec<ValueId>, writes: Vec<ValueId>) {
        self.out.push(Instr { op, reads, writes, site: self.site });
    }
}

/// A new value for some rows of a value.
fn of_tokens(program: &mut Program, whole: ValueId, tokens: &Range<usize>) -> ValueId {
    let value = program.value(whole).clone();
    let shape: Vec<usize> = std::iter::once(tokens.len()).chain(value.shape[1..].iter().copied()).collect();
    let kind = if value.kind == Kind::Input { Kind::Activation } else { value.kind };
    program.add_value(value.name, &shape, value.dtype, kind)
}

/// A new value like one that only the last chunk writes.
fn of_chunk(program: &mut Program, last: ValueId) -> ValueId {
    let value = program.value(last).clone();
    let kind = if value.kind == Kind::Output { Kind::Activation } else { value.kind };
    program.add_value(value.name, &value.shape, value.dtype, kind)
}
