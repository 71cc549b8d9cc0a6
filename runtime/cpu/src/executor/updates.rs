//! Updates of parameters.

use super::buffer::Buffer;
use super::operands::{Kernel, Operands};
use crate::kernels::optimizer;
use phalanx_strategies::program::op::{self, UpdateOperands};
use phalanx_strategies::program::{Hyper, Update};

/// Most state tensors of an optimizer per parameter.
const MAX_STATE: usize = 4;
/// Most sums over whole tensors that an update reads.
const MAX_SUMS: usize = 8;

impl Kernel for op::UpdateSums {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::UpdateSums(update) = self;
            o.update_sums(update);
        }
    }
}

impl Kernel for op::Update {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            o.update(self);
        }
    }
}

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
    unsafe fn update_sums(&mut self, update: &Update) {
        let UpdateOperands { param, state, grad, sums, hyper, coefficient } = update.operands(self.reads);
        // SAFETY: no results or operands overlap (`Op::in_place_pairs` names no pair).
        unsafe {
            let (g, p) = (grad.slice(), param.slice());
            let mut of_state: [&[f32]; MAX_STATE] = Default::default();
            state.iter().zip(&mut of_state).for_each(|(r, s)| *s = r.slice());
            let mut of_sums: [&[f32]; MAX_SUMS] = Default::default();
            sums.iter().zip(&mut of_sums).for_each(|(r, s)| *s = r.slice());
            let mut out: [&mut [f32]; MAX_SUMS] = Default::default();
            self.writes.iter().zip(&mut out).for_each(|(w, s)| *s = w.slice_mut());
            let p = &p[update.first..update.first + g.len()];
            let whole = whole(update, &of_sums[..sums.len()]);
            let (state, out) = (&of_state[..state.len()], &mut out[..self.writes.len()]);
            optimizer::sums(&update.rule, p, state, g, &whole, &step_of(update, hyper, coefficient), out);
        }
    }

    unsafe fn update(&mut self, update: &Update) {
        let UpdateOperands { state, grad, sums, hyper, coefficient, .. } = update.operands(self.reads);
        // SAFETY: this function makes one slice of the parameter and one of each state tensor. The memory plan keeps the
        // gradient, the sums and the scalars in other buffers.
        unsafe {
            let (g, p) = (grad.slice(), self.writes[0].slice_mut());
            let mut of_state: [&mut [f32]; MAX_STATE] = Default::default();
            self.writes[1..].iter().zip(&mut of_state).for_each(|(w, s)| *s = w.slice_mut());
            let mut of_sums: [&[f32]; MAX_SUMS] = Default::default();
            sums.iter().zip(&mut of_sums).for_each(|(r, s)| *s = r.slice());
            let p = &mut p[update.first..update.first + g.len()];
            let whole = whole(update, &of_sums[..sums.len()]);
            let state = &mut of_state[..state.len()];
            optimizer::update(&update.rule, p, state, g, &whole, &step_of(update, hyper, coefficient));
        }
    }
}

/// What the elements of an update belong to.
fn whole<'a>(update: &'a Update, sums: &'a [&'a [f32]]) -> optimizer::Whole<'a> {
    optimizer::Whole { tiles: &update.tiles, blocks: &update.blocks, sums }
}

/// The scalars of an update.
///
/// # Safety
/// The operands are not written meanwhile.
unsafe fn step_of(update: &Update, hyper: &Buffer, coefficient: &Buffer) -> optimizer::Step {
    // SAFETY: the caller's contract.
    unsafe {
        let hyper = hyper.slice::<f64>();
        optimizer::Step {
            lr: hyper[update.rate],
            scalars: std::array::from_fn(|i| hyper[Hyper::RULE + i]),
            grad_scale: coefficient.slice::<f64>()[0],
        }
    }
}
