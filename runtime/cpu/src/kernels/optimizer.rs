//! Parameter updates, each in one pass over memory.

use super::parallel::CHUNK;
use super::simd::simd;
use rayon::prelude::*;

/// Scalars of one AdamW update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// `1 - beta1^t`.
    pub bias_correction1: f64,
    /// `1 - beta2^t`.
    pub bias_correction2: f64,
    /// Factor of the gradient: clipping and loss scale.
    pub grad_scale: f64,
}

/// Scalars of one SGD update, in PyTorch's form.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the momentum buffer.
    pub momentum: f64,
    /// L2 penalty: `weight_decay p` is added to the gradient.
    pub weight_decay: f64,
    /// Look ahead: the step is `g + momentum * buffer`.
    pub nesterov: bool,
    /// Factor of the gradient: clipping and loss scale.
    pub grad_scale: f64,
}

/// With `g' = grad_scale g`: `m = beta1 m + (1 - beta1) g'`, `v = beta2 v + (1 - beta2) g'²`,
/// `p = p (1 - lr weight_decay) - lr / bc1 m / (sqrt(v / bc2) + eps)`.
/// Source: Loshchilov and Hutter 2019 (arXiv:1711.05101).
///
/// A `grad_scale` that is not finite (the gradient overflowed) leaves everything as it is.
///
/// # Shapes
/// `p, m, v, g`: equal.
pub fn adamw(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], update: &AdamW) {
    assert!(p.len() == m.len() && p.len() == v.len() && p.len() == g.len());
    if !update.grad_scale.is_finite() {
        return;
    }
    let state = m.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK));
    let tasks = p.par_chunks_mut(CHUNK).zip(g.par_chunks(CHUNK)).zip(state);
    tasks.for_each(|((p, g), (m, v))| adamw_chunk(p, m, v, g, update));
}

/// With `g' = grad_scale g + weight_decay p`: `buffer = momentum buffer + g'`, `p = p - lr buffer`.
/// Source: Sutskever et al. 2013, in PyTorch's form: a zero buffer gives PyTorch's first step.
///
/// A `grad_scale` that is not finite leaves everything as it is.
///
/// # Shapes
/// `p, buffer, g`: equal.
pub fn sgd(p: &mut [f32], buffer: &mut [f32], g: &[f32], update: &Sgd) {
    assert!(p.len() == buffer.len() && p.len() == g.len());
    if !update.grad_scale.is_finite() {
        return;
    }
    let tasks = p.par_chunks_mut(CHUNK).zip(g.par_chunks(CHUNK)).zip(buffer.par_chunks_mut(CHUNK));
    tasks.for_each(|((p, g), buffer)| sgd_chunk(p, buffer, g, update));
}

simd! {
    fn adamw_chunk(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], update: &AdamW) {
        let AdamW { lr, beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2, grad_scale } = *update;
        let (keep1, take1, keep2, take2) = (beta1 as f32, (1.0 - beta1) as f32, beta2 as f32, (1.0 - beta2) as f32);
        let (scale, decay, eps) = (grad_scale as f32, (1.0 - lr * weight_decay) as f32, eps as f32);
        let (step, inverse_root) = ((lr / bias_correction1) as f32, (1.0 / bias_correction2.sqrt()) as f32);
        for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(g) {
            let g = g * scale;
            *m = keep1 * *m + take1 * g;
            *v = keep2 * *v + take2 * g * g;
            *p = *p * decay - step * *m / (v.sqrt() * inverse_root + eps);
        }
    }
}

simd! {
    fn sgd_chunk(p: &mut [f32], buffer: &mut [f32], g: &[f32], update: &Sgd) {
        let (lr, momentum) = (update.lr as f32, update.momentum as f32);
        let (decay, scale) = (update.weight_decay as f32, update.grad_scale as f32);
        let (of_gradient, of_buffer) = if update.nesterov { (1.0, momentum) } else { (0.0, 1.0) };
        for ((p, buffer), g) in p.iter_mut().zip(buffer).zip(g) {
            let g = g * scale + decay * *p;
            *buffer = momentum * *buffer + g;
            *p -= lr * (of_gradient * g + of_buffer * *buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{close, random, wide};
    use super::*;

    const N: usize = 1000;

    #[test]
    fn adamw_follows_its_definition_for_several_steps() {
        let (mut p, mut m, mut v) = (random(N, 1), vec![0.0; N], vec![0.0; N]);
        let (mut expected, mut em, mut ev) = (wide(&p), vec![0.0; N], vec![0.0; N]);

        for t in 1..=5 {
            let g = random(N, 10 + t as u64);
            let (bias_correction1, bias_correction2) = (1.0 - 0.9f64.powi(t), 1.0 - 0.95f64.powi(t));
            let update = AdamW {
                lr: 1e-2,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.1,
                bias_correction1,
                bias_correction2,
                grad_scale: 0.5,
            };
            adamw(&mut p, &mut m, &mut v, &g, &update);
            for (i, g) in wide(&g).iter().map(|g| 0.5 * g).enumerate() {
                em[i] = 0.9 * em[i] + 0.1 * g;
                ev[i] = 0.95 * ev[i] + 0.05 * g * g;
                let root = (ev[i] / bias_correction2).sqrt() + 1e-8;
                expected[i] = expected[i] * (1.0 - 1e-2 * 0.1) - 1e-2 * em[i] / bias_correction1 / root;
            }
        }

        close(&p, &expected, 1e-6);
        close(&m, &em, 1e-6);
        close(&v, &ev, 1e-6);
    }

    #[test]
    fn sgd_follows_its_definition_for_several_steps() {
        for nesterov in [false, true] {
            let (mut p, mut buffer) = (random(N, 1), vec![0.0; N]);
            let (mut expected, mut expected_buffer) = (wide(&p), vec![0.0; N]);
            let update = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01, nesterov, grad_scale: 0.5 };

            for t in 0..4 {
                let g = random(N, 20 + t);
                sgd(&mut p, &mut buffer, &g, &update);
                for (i, g) in wide(&g).iter().enumerate() {
                    let g = 0.5 * g + 0.01 * expected[i];
                    expected_buffer[i] = 0.9 * expected_buffer[i] + g;
                    let step = if nesterov { g + 0.9 * expected_buffer[i] } else { expected_buffer[i] };
                    expected[i] -= 0.1 * step;
                }
            }

            close(&p, &expected, 1e-6);
            close(&buffer, &expected_buffer, 1e-6);
        }
    }

    #[test]
    fn overflowed_gradients_leave_everything_as_it_is() {
        let before = random(N, 2);
        let (mut p, mut m, mut v) = (before.clone(), before.clone(), before.clone());
        let sgd_update = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01, nesterov: false, grad_scale: f64::NAN };
        let update = AdamW {
            lr: 0.1,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
            weight_decay: 0.1,
            bias_correction1: 1.0,
            bias_correction2: 1.0,
            grad_scale: f64::NAN,
        };

        adamw(&mut p, &mut m, &mut v, &before, &update);
        sgd(&mut p, &mut m, &before, &sgd_update);

        assert!(p == before && m == before && v == before);
    }
}
