//! Parameter updates, each in one pass over memory. [`update`] dispatches to the arithmetic of each rule
//! ([`phalanx_strategies::optimizer`]); [`sums`] serves rules that need sums over whole tensors.

mod adafactor;
mod adamw_8bit;

use super::parallel::CHUNK;
use super::simd::simd;
use crate::tasks::{Cut, Tasks};
use phalanx_strategies::optimizer::{AdamW, Lion, N_SCALARS, OptimizerSpec, Sgd};
use phalanx_strategies::program::Blocks;
use phalanx_strategies::program::tiles::Tiles;

/// Scalars of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Learning rate.
    pub lr: f64,
    /// Scalars of the rule: [`OptimizerSpec::scalars`].
    pub scalars: [f64; N_SCALARS],
    /// Factor of the gradient: clipping and loss scale.
    pub grad_scale: f64,
}

/// The tensors to which the elements belong.
#[derive(Clone, Copy, Debug)]
pub struct Whole<'a> {
    /// Rows and columns of the elements; empty for rules that work element by element.
    pub tiles: &'a Tiles,
    /// How the state is stored, if in blocks.
    pub blocks: &'a Blocks,
    /// Sums over whole tensors, in the order of [`OptimizerSpec::sums`].
    pub sums: &'a [&'a [f32]],
}

/// The local part of the next round of sums over whole tensors: the sums over this rank's elements.
///
/// # Shapes
/// `p`, `g`: equal; `state`, `whole.sums` and `out`: as defined by the rule.
///
/// # Panics
/// If the rule has no further round of sums.
pub fn sums(
    rule: &OptimizerSpec,
    p: &[f32],
    state: &[&[f32]],
    g: &[f32],
    whole: &Whole<'_>,
    step: &Step,
    out: &mut [&mut [f32]],
) {
    assert_eq!(g.len(), p.len());
    match (rule, whole.sums, out) {
        (OptimizerSpec::Adafactor(_), [], out) => adafactor::squares(p, g, whole, step, out),
        (OptimizerSpec::Adafactor(rule), _, [out]) => adafactor::squares_of_updates(state, g, rule, whole, step, out),
        (_, sums, _) => unreachable!("{} has no sums after {}", rule.name(), sums.len()),
    }
}

/// Updates `p` and the state by the rule. A `grad_scale` that is not finite (the gradient overflowed) leaves both
/// unchanged.
///
/// # Shapes
/// `p`, `g`: equal; each of `state`: equal to them, or as defined by the rule; words of blocks are the bits of their numbers.
///
/// # Panics
/// If shapes differ, or the rule has another number of state tensors.
pub fn update(
    rule: &OptimizerSpec,
    p: &mut [f32],
    state: &mut [&mut [f32]],
    g: &[f32],
    whole: &Whole<'_>,
    step: &Step,
) {
    let by_element = whole.tiles.tensors.is_empty() && whole.blocks.runs.is_empty();
    assert!(g.len() == p.len() && (!by_element || state.iter().all(|s| s.len() == p.len())));
    if !step.grad_scale.is_finite() {
        return;
    }
    match (rule, state) {
        (OptimizerSpec::AdamW(rule), [m, v]) => adamw(p, m, v, g, rule, step),
        (OptimizerSpec::AdamW8bit(rule), [m, v]) => {
            adamw_8bit::update(p, [&mut m[..], &mut v[..]], g, whole.blocks, &rule.0, step);
        }
        (OptimizerSpec::Sgd(rule), [buffer]) => sgd(p, buffer, g, rule, step),
        (OptimizerSpec::Lion(rule), [m]) => lion(p, m, g, rule, step),
        (OptimizerSpec::Adafactor(rule), averages) => adafactor::update(p, averages, g, rule, whole, step),
        (_, state) => unreachable!("{} with {} tensors of state", rule.name(), state.len()),
    }
}

/// With `g' = grad_scale g`: `m = beta1 m + (1 - beta1) g'`, `v = beta2 v + (1 - beta2) g'²`,
/// `p = p (1 - lr weight_decay) - lr / bc1 m / (sqrt(v / bc2) + eps)`.
/// Source: Loshchilov and Hutter 2019 (arXiv:1711.05101).
fn adamw(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], rule: &AdamW, step: &Step) {
    let state = m.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK));
    let tasks = p.par_chunks_mut(CHUNK).zip(g.par_chunks(CHUNK)).zip(state);
    tasks.for_each(|((p, g), (m, v))| adamw_chunk(p, m, v, g, rule, step));
}

/// With `g' = grad_scale g + weight_decay p`: `buffer = momentum buffer + g'`, `p = p - lr buffer`.
/// Source: Sutskever et al. 2013, in PyTorch's form: a zero buffer gives PyTorch's first step.
fn sgd(p: &mut [f32], buffer: &mut [f32], g: &[f32], rule: &Sgd, step: &Step) {
    let tasks = p.par_chunks_mut(CHUNK).zip(g.par_chunks(CHUNK)).zip(buffer.par_chunks_mut(CHUNK));
    tasks.for_each(|((p, g), buffer)| sgd_chunk(p, buffer, g, rule, step));
}

/// With `g' = grad_scale g`: `p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g')`,
/// `m = beta2 m + (1 - beta2) g'`, where the sign of 0 is 0.
/// Source: Chen et al. 2023, algorithm 2 (arXiv:2302.06675).
fn lion(p: &mut [f32], m: &mut [f32], g: &[f32], rule: &Lion, step: &Step) {
    let tasks = p.par_chunks_mut(CHUNK).zip(g.par_chunks(CHUNK)).zip(m.par_chunks_mut(CHUNK));
    tasks.for_each(|((p, g), m)| lion_chunk(p, m, g, rule, step));
}

simd! {
    fn adamw_chunk(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], rule: &AdamW, step: &Step) {
        let AdamW { beta1, beta2, eps, weight_decay } = *rule;
        let Step { lr, scalars: [bias_correction1, bias_correction2], grad_scale } = *step;
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
    fn sgd_chunk(p: &mut [f32], buffer: &mut [f32], g: &[f32], rule: &Sgd, step: &Step) {
        let (lr, momentum) = (step.lr as f32, rule.momentum as f32);
        let (decay, scale) = (rule.weight_decay as f32, step.grad_scale as f32);
        for ((p, buffer), g) in p.iter_mut().zip(buffer).zip(g) {
            let g = g * scale + decay * *p;
            *buffer = momentum * *buffer + g;
            *p -= lr * *buffer;
        }
    }
}

simd! {
    fn lion_chunk(p: &mut [f32], m: &mut [f32], g: &[f32], rule: &Lion, step: &Step) {
        let Lion { beta1, beta2, weight_decay } = *rule;
        let (keep1, take1, keep2, take2) = (beta1 as f32, (1.0 - beta1) as f32, beta2 as f32, (1.0 - beta2) as f32);
        let (lr, scale, decay) = (step.lr as f32, step.grad_scale as f32, (1.0 - step.lr * weight_decay) as f32);
        for ((p, m), g) in p.iter_mut().zip(m).zip(g) {
            let g = g * scale;
            let direction = keep1 * *m + take1 * g;
            let change = if direction == 0.0 { 0.0 } else { lr.copysign(direction) };
            *p = *p * decay - change;
            *m = keep2 * *m + take2 * g;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{close, random, wide};
    use super::*;
    use phalanx_strategies::program::{Init, Param, ParamPart, ValueId};

    const N: usize = 1000;
    const WHOLE: Whole<'_> = Whole {
        tiles: &Tiles { tensors: Vec::new(), tiles: Vec::new() },
        blocks: &Blocks { runs: Vec::new() },
        sums: &[],
    };

    fn step(lr: f64, rule: &OptimizerSpec, t: u64) -> Step {
        Step { lr, scalars: rule.scalars(t), grad_scale: 0.5 }
    }

    #[test]
    fn adamw_follows_its_definition_for_several_steps() {
        let rule = OptimizerSpec::AdamW(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
        let (mut p, mut m, mut v) = (random(N, 1), vec![0.0; N], vec![0.0; N]);
        let (mut expected, mut em, mut ev) = (wide(&p), vec![0.0; N], vec![0.0; N]);

        for t in 1..=5 {
            let g = random(N, 10 + t);
            let bias_corrections = (1.0 - 0.9f64.powi(t as i32), 1.0 - 0.95f64.powi(t as i32));
            update(&rule, &mut p, &mut [&mut m, &mut v], &g, &WHOLE, &step(1e-2, &rule, t));
            for (i, g) in wide(&g).iter().map(|g| 0.5 * g).enumerate() {
                em[i] = 0.9 * em[i] + 0.1 * g;
                ev[i] = 0.95 * ev[i] + 0.05 * g * g;
                let root = (ev[i] / bias_corrections.1).sqrt() + 1e-8;
                expected[i] = expected[i] * (1.0 - 1e-2 * 0.1) - 1e-2 * em[i] / bias_corrections.0 / root;
            }
        }

        close(&p, &expected, 1e-6);
        close(&m, &em, 1e-6);
        close(&v, &ev, 1e-6);
    }

    #[test]
    fn sgd_follows_its_definition_for_several_steps() {
        let rule = OptimizerSpec::Sgd(Sgd { momentum: 0.9, weight_decay: 0.01 });
        let (mut p, mut buffer) = (random(N, 1), vec![0.0; N]);
        let (mut expected, mut expected_buffer) = (wide(&p), vec![0.0; N]);

        for t in 1..=4 {
            let g = random(N, 20 + t);
            update(&rule, &mut p, &mut [&mut buffer], &g, &WHOLE, &step(0.1, &rule, t));
            for (i, g) in wide(&g).iter().enumerate() {
                let g = 0.5 * g + 0.01 * expected[i];
                expected_buffer[i] = 0.9 * expected_buffer[i] + g;
                expected[i] -= 0.1 * expected_buffer[i];
            }
        }

        close(&p, &expected, 1e-6);
        close(&buffer, &expected_buffer, 1e-6);
    }

    #[test]
    fn lion_follows_its_definition_and_leaves_momentum_zero_without_gradients() {
        let rule = OptimizerSpec::Lion(Lion { beta1: 0.8, beta2: 0.95, weight_decay: 0.1 });
        let (mut p, mut m) = (random(N, 1), vec![0.0; N]);
        let (mut expected, mut em) = (wide(&p), vec![0.0f64; N]);

        for t in 1..=5 {
            let mut g = random(N, 30 + t);
            g[7] = 0.0;
            update(&rule, &mut p, &mut [&mut m], &g, &WHOLE, &step(1e-2, &rule, t));
            for (i, g) in wide(&g).iter().map(|g| 0.5 * g).enumerate() {
                let direction = 0.8 * em[i] + 0.2 * g;
                let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
                expected[i] = expected[i] * (1.0 - 1e-2 * 0.1) - 1e-2 * sign;
                em[i] = 0.95 * em[i] + 0.05 * g;
            }
        }

        close(&p, &expected, 1e-6);
        close(&m, &em, 1e-6);
        assert_eq!(m[7], 0.0);
    }

    #[test]
    fn overflowed_gradients_change_neither_parameters_nor_state() {
        let before = random(N, 2);
        let param = Param::whole(ValueId(0), &[N], vec![ParamPart::whole("w", &[N])], Init::Zeros);
        let (tiles, blocks) = (Tiles::of(&param, &(0..N)), param.blocks().unwrap());
        for rule in OptimizerSpec::all() {
            let mut p = before.clone();
            let mut state = vec![before.clone(); rule.state(1).len()];
            let mut slices: Vec<&mut [f32]> = state.iter_mut().map(Vec::as_mut_slice).collect();
            let sums: Vec<&[f32]> = rule.sums(1).iter().flat_map(|round| round.iter().map(|_| &before[..])).collect();
            let whole = Whole { tiles: &tiles, blocks: &blocks, sums: &sums };
            let step = Step { grad_scale: f64::NAN, ..step(0.1, &rule, 1) };

            update(&rule, &mut p, &mut slices, &before, &whole, &step);

            assert!(p == before && state.iter().all(|s| *s == before), "{}", rule.name());
        }
    }
}
