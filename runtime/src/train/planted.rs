//! Planted faults, for tests: single bits of a rank's memory that flip at a planned moment, as a defective memory flips them.
//!
//! A rank process reads the environment variable [`VARIABLE`] when it starts: a list, separated by commas, of
//! `GENERATION:STEP:RANK:WHERE:SEED`. After the update to `STEP` in the world of `GENERATION` (0: the first world in which the
//! process makes this step), rank `RANK` flips one bit of its `weights`, of its `optimizer` state, of a `shadow`, or of the copy
//! for the next `checkpoint`; `gradient` flips a bit of a summed gradient before the update. The seed chooses tensor, element
//! and bit. `wire` damages a bit of the next tensor that the rank sends to another machine; `compute` makes a weight
//! infinite while the rank computes `STEP`. Nothing is planted without the variable.

use super::fingerprints::boxes;
use super::weights::Tensor;
use phalanx_device::Machine;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::passes::shadow::log;
use phalanx_strategies::program::ValueId;
use phalanx_strategies::rng::CounterRng;
use std::collections::BTreeSet;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The environment variable with the plan.
pub(crate) const VARIABLE: &str = "PHALANX_FLIP_BITS";

/// Where a bit flips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Where {
    Weights,
    Optimizer,
    Shadow,
    Gradient,
    Checkpoint,
    Wire,
    Compute,
}

/// One bit that flips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Flip {
    generation: u64,
    step: u64,
    rank: usize,
    place: Where,
    seed: u64,
}

/// The bits that are still to flip in this process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Planted {
    flips: Vec<Flip>,
    /// Whether the next tensor for another machine is damaged.
    pub(crate) damages_next: Arc<AtomicBool>,
}

impl FromStr for Planted {
    type Err = String;

    fn from_str(plan: &str) -> Result<Planted, String> {
        let flips = plan.split(',').filter(|flip| !flip.is_empty()).map(|flip| {
            let why = || format!("{VARIABLE}: `{flip}` is not GENERATION:STEP:RANK:WHERE:SEED");
            let [generation, step, rank, place, seed] =
                <[&str; 5]>::try_from(flip.split(':').collect::<Vec<_>>()).map_err(|_| why())?;
            let number = |text: &str| text.parse::<u64>().map_err(|_| why());
            let place = match place {
                "weights" => Where::Weights,
                "optimizer" => Where::Optimizer,
                "shadow" => Where::Shadow,
                "gradient" => Where::Gradient,
                "checkpoint" => Where::Checkpoint,
                "wire" => Where::Wire,
                "compute" => Where::Compute,
                _ => return Err(why()),
            };
            let (generation, step, rank, seed) = (number(generation)?, number(step)?, number(rank)?, number(seed)?);
            Ok(Flip { generation, step, rank: rank as usize, place, seed })
        });
        Ok(Planted { flips: flips.collect::<Result<_, String>>()?, ..Planted::default() })
    }
}

impl Planted {
    /// The seed of a bit that flips here and now.
    pub(crate) fn take(&mut self, place: Where, generation: u64, step: u64, rank: usize) -> Option<u64> {
        let is_it = |flip: &Flip| {
            let here = (flip.place, flip.step, flip.rank) == (place, step, rank);
            here && (flip.generation == 0 || flip.generation == generation)
        };
        let at = self.flips.iter().position(is_it)?;
        Some(self.flips.swap_remove(at).seed)
    }

    /// Damages the next tensor for another machine, if that is planned.
    pub(crate) fn damage_wire(&mut self, generation: u64, step: u64, rank: usize) {
        if self.take(Where::Wire, generation, step, rank).is_some() {
            self.damages_next.store(true, Ordering::Relaxed);
        }
    }
}

/// Flips a bit of the trained weights or of the optimizer's state, and describes it.
pub(crate) fn flip_state(machine: &mut dyn Machine, c: &Compiled, place: Where, seed: u64) -> Option<String> {
    let weights = c.program.params.iter().map(|param| param.value).collect::<Vec<_>>();
    let is_there = |tensor: &&Tensor| match place {
        Where::Weights => tensor.trainable && weights.contains(&tensor.value),
        Where::Optimizer => !weights.contains(&tensor.value),
        _ => tensor.trainable,
    };
    let boxes = boxes(c);
    let tensors: Vec<&Tensor> = boxes.values().filter(is_there).collect();
    let rng = CounterRng::new(seed);
    let tensor = tensors.get(rng.bits(0) as usize % tensors.len().max(1))?;
    let at = rng.bits(1) as usize % tensor.held.n_elements();
    let (index, element) = tensor.held.runs().flat_map(|(index, run)| (index..).zip(run)).nth(at)?;
    let bit = flip_value(machine, c, tensor.value, element, rng.bits(2));
    Some(format!("bit {bit} of element {index} of {}", tensor.name))
}

/// Replaces the bits of an element of a trained weight; returns the earlier ones.
pub(crate) fn replace_weight(machine: &mut dyn Machine, c: &Compiled, seed: u64, bits: u32) -> Option<u32> {
    let weights: BTreeSet<ValueId> = c.program.params.iter().map(|param| param.value).collect();
    let boxes = boxes(c);
    let tensors: Vec<&Tensor> =
        boxes.values().filter(|tensor| tensor.trainable && weights.contains(&tensor.value)).collect();
    let rng = CounterRng::new(seed);
    let tensor = tensors.get(rng.bits(0) as usize % tensors.len().max(1))?;
    let at = rng.bits(1) as usize % tensor.held.n_elements();
    let element = tensor.held.runs().flat_map(|(_, run)| run).nth(at)?;
    let before = machine.elements::<u32>(c, tensor.value, element..element + 1)[0];
    machine.write(c, tensor.value, element, &[bits]);
    Some(before)
}

/// Flips a bit of a summed gradient, and describes it.
pub(crate) fn flip_gradient(machine: &mut dyn Machine, c: &Compiled, seed: u64) -> Option<String> {
    let gradients = log(&c.program, &c.phases);
    let rng = CounterRng::new(seed);
    let value = *gradients.get(rng.bits(0) as usize % gradients.len().max(1))?;
    let at = rng.bits(1) as usize % c.program.value(value).n_elements();
    let bit = flip_value(machine, c, value, at, rng.bits(2));
    Some(format!("bit {bit} of element {at} of {}", c.program.value(value).name))
}

/// Flips a bit of a copy of the state.
pub(crate) fn flip_bit(bytes: &mut [u8], seed: u64) {
    let rng = CounterRng::new(seed);
    let n = bytes.len().max(1) as u64;
    if let Some(byte) = bytes.get_mut((rng.bits(0) % n) as usize) {
        *byte ^= 1 << (rng.bits(1) % 8);
    }
}

fn flip_value(machine: &mut dyn Machine, c: &Compiled, value: ValueId, at: usize, bits: u64) -> u64 {
    let bit = bits % 32;
    let word = machine.elements::<u32>(c, value, at..at + 1)[0];
    machine.write(c, value, at, &[word ^ 1 << bit]);
    bit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planned_flip_happens_once_at_its_step_and_rank() {
        let mut planted: Planted = "2:7:1:weights:5,0:8:0:checkpoint:6".parse().unwrap();

        assert_eq!(planted.take(Where::Weights, 1, 7, 1), None);
        assert_eq!(planted.take(Where::Weights, 2, 7, 0), None);
        assert_eq!(planted.take(Where::Weights, 2, 7, 1), Some(5));
        assert_eq!(planted.take(Where::Weights, 2, 7, 1), None);
        assert_eq!(planted.take(Where::Checkpoint, 9, 8, 0), Some(6));
    }

    #[test]
    fn plan_that_cannot_be_read_is_refused_with_its_form() {
        for plan in ["x", "1:2:3:weights", "1:2:3:heaven:4", "1:2:-1:weights:4"] {
            let refused = plan.parse::<Planted>().unwrap_err();
            assert!(refused.contains("GENERATION:STEP:RANK:WHERE:SEED"), "{refused}");
        }
    }
}
