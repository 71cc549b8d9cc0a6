//! Models that the tests of the front end train.

use super::{Batch, Loss, Tape, ops};
use dfdx::nn::tensor_collection::{ModuleVisitor, TensorCollection, TensorOptions};
use dfdx::prelude::*;

/// Ids of the byte tokenizer.
pub(super) const VOCAB: usize = 264;
/// Width of the transformer.
const C: usize = 16;
/// Its feed-forward width.
const F: usize = 24;

/// A network of dfdx's own layers that predicts each byte from the one before.
pub(super) type Mlp = (Embedding<VOCAB, 16>, Linear<16, 32>, Tanh, Linear<32, VOCAB>);

/// The module that [`Mlp`] describes.
pub(super) type MlpModule = <Mlp as BuildOnDevice<Cpu, f32>>::Built;

/// Its loss in plain dfdx: one-hot labels, dfdx's mean over rows times their number.
pub(super) fn mlp_loss(net: &MlpModule, batch: &Batch<'_>, tape: Tape) -> Loss {
    let device = net.0.weight.device().clone();
    let n = batch.ids.len();
    let ids = device.tensor_from_vec(batch.ids.iter().map(|id| *id as usize).collect(), (n,));
    let wanted = one_hot(&device, batch.labels);
    cross_entropy_with_logits_loss(net.forward(ids.put_tape(tape)), wanted) * n as f32
}

fn one_hot(device: &Cpu, labels: &[i32]) -> Tensor<(usize, Const<VOCAB>), f32, Cpu> {
    let mut wanted = vec![0.0; labels.len() * VOCAB];
    for (row, label) in labels.iter().enumerate().filter(|(_, label)| **label >= 0) {
        wanted[row * VOCAB + *label as usize] = 1.0;
    }
    device.tensor_from_vec(wanted, (labels.len(), Const))
}

/// A transformer of one block with one head.
#[derive(Clone)]
pub(super) struct Transformer {
    table: Tensor<Rank2<VOCAB, C>, f32, Cpu>,
    gain: Tensor<Rank1<C>, f32, Cpu>,
    qkv: Tensor<Rank2<{ 3 * C }, C>, f32, Cpu>,
    qkv_bias: Tensor<Rank1<{ 3 * C }>, f32, Cpu>,
    gate_up: Tensor<Rank2<{ 2 * F }, C>, f32, Cpu>,
    down: Tensor<Rank2<C, F>, f32, Cpu>,
}

impl Transformer {
    pub(super) fn new(seed: u64) -> Transformer {
        let device = Cpu::seed_from_u64(seed);
        let mut model = Transformer {
            table: device.sample_normal(),
            gain: device.ones(),
            qkv: device.sample_normal(),
            qkv_bias: device.sample_normal(),
            gate_up: device.sample_normal(),
            down: device.sample_normal(),
        };
        model.table = model.table * 0.3;
        (model.qkv, model.qkv_bias) = (model.qkv * 0.2, model.qkv_bias * 0.2);
        (model.gate_up, model.down) = (model.gate_up * 0.2, model.down * 0.2);
        model
    }

    /// The summed loss with our fused operations.
    pub(super) fn fused(&self, batch: &Batch<'_>, tape: Tape) -> Loss {
        let x = ops::embedding(&self.table, batch.ids, tape);
        let attention = ops::CausalAttention::new(1, 1, C, batch.seq_len);
        let qkv = ops::linear(ops::rms_norm(x.with_empty_tape(), &self.gain, 1e-5), &self.qkv, Some(&self.qkv_bias));
        let x = x + attention.forward(qkv, Const::<C>, batch.positions, batch.doc_start);
        let gate_up = ops::linear(ops::rms_norm(x.with_empty_tape(), &self.gain, 1e-5), &self.gate_up, None);
        let x = x + ops::linear(ops::swiglu(gate_up, Const::<F>), &self.down, None);
        ops::cross_entropy(ops::linear(x, &self.table, None), batch.labels)
    }

    /// The same loss with dfdx's own operations.
    pub(super) fn stock(&self, batch: &Batch<'_>, tape: Tape) -> Loss {
        let (device, n, s) = (self.table.device().clone(), batch.ids.len(), batch.seq_len);
        let ids: Tensor<(usize,), usize, Cpu> =
            device.tensor_from_vec(batch.ids.iter().map(|id| *id as usize).collect(), (n,));
        let x: Tensor<(usize, Const<C>), f32, Cpu, Tape> = self.table.clone().put_tape(tape).gather(ids);
        let h = self.stock_norm(x.with_empty_tape());
        let split = |first: usize| {
            let selected = |i: usize| f32::from(u8::from(i / C == first + i % C));
            let columns = (0..3 * C * C).map(selected).collect();
            let columns: Tensor<Rank2<{ 3 * C }, C>, f32, Cpu> = device.tensor_from_vec(columns, (Const, Const));
            let weight = self.qkv.retaped::<Tape>().permute::<Rank2<C, { 3 * C }>, _>();
            let bias = self.qkv_bias.retaped::<Tape>().broadcast_like::<_, Axis<0>>(&(n, Const::<{ 3 * C }>));
            let part = (h.with_empty_tape().matmul(weight) + bias).matmul(columns);
            part.reshape_like(&(batch.n_rows, s, Const::<C>))
        };
        let (q, k, v) = (split(0), split(C), split(2 * C));
        let hidden = (0..batch.n_rows * s * s).map(|i| if i % s > i / s % s { -1e9 } else { 0.0 }).collect();
        let mask: Tensor<(usize, usize, usize), f32, Cpu> = device.tensor_from_vec(hidden, (batch.n_rows, s, s));
        let scores = q.matmul(k.permute::<(usize, Const<C>, usize), Axes3<0, 2, 1>>()) * (1.0 / (C as f32).sqrt());
        let o = (scores + mask).softmax::<Axis<2>>().matmul(v).reshape_like(&(n, Const::<C>));
        // `h` records the norm of the first half; it is read above through empty tapes and joins here.
        let (_, tape) = h.split_tape();
        let x = x + (o + device.zeros_like(&(n, Const::<C>)).put_tape(tape));
        let h = self.stock_norm(x.with_empty_tape());
        let gate_up = h.matmul(self.gate_up.retaped::<Tape>().permute::<Rank2<C, { 2 * F }>, _>());
        let half = |first: usize| -> Tensor<Rank2<{ 2 * F }, F>, f32, Cpu> {
            let selected = |i: usize| f32::from(u8::from(i / F == first + i % F));
            device.tensor_from_vec((0..2 * F * F).map(selected).collect(), (Const, Const))
        };
        let gate = gate_up.with_empty_tape().matmul(half(0));
        let act = gate.with_empty_tape() * gate.sigmoid() * gate_up.matmul(half(F));
        let x = x + act.matmul(self.down.retaped::<Tape>().permute::<Rank2<F, C>, _>());
        let logits = x.matmul(self.table.retaped::<Tape>().permute::<Rank2<C, VOCAB>, _>());
        cross_entropy_with_logits_loss(logits, one_hot(&device, batch.labels)) * n as f32
    }

    fn stock_norm(&self, x: Tensor<(usize, Const<C>), f32, Cpu, Tape>) -> Tensor<(usize, Const<C>), f32, Cpu, Tape> {
        let shape = *x.shape();
        let rms = (x.with_empty_tape().square().mean::<(usize,), Axis<1>>() + 1e-5).sqrt();
        let gain = self.gain.retaped::<Tape>().broadcast_like::<_, Axis<0>>(&shape);
        x / rms.broadcast_like::<_, Axis<1>>(&shape) * gain
    }
}

impl TensorCollection<f32, Cpu> for Transformer {
    // It is visited only, never converted to another device or element type.
    type To<E: Dtype, D: Device<E>> = ();

    fn iter_tensors<V: ModuleVisitor<Self, f32, Cpu>>(visitor: &mut V) -> Result<Option<()>, V::Err> {
        visitor.visit_fields(
            (
                Self::tensor("table", |m| &m.table, |m| &mut m.table, TensorOptions::reset_to_zeros()),
                Self::tensor("gain", |m| &m.gain, |m| &mut m.gain, TensorOptions::reset_to_ones()),
                Self::tensor("qkv", |m| &m.qkv, |m| &mut m.qkv, TensorOptions::reset_to_zeros()),
                Self::tensor("qkv_bias", |m| &m.qkv_bias, |m| &mut m.qkv_bias, TensorOptions::reset_to_zeros()),
                Self::tensor("gate_up", |m| &m.gate_up, |m| &mut m.gate_up, TensorOptions::reset_to_zeros()),
                Self::tensor("down", |m| &m.down, |m| &mut m.down, TensorOptions::reset_to_zeros()),
            ),
            |_| (),
        )
    }
}
