//! Fingerprints of the state in a rank's memory, by box.

use super::state_copy::StateCopy;
use super::weights::{self, Tensor};
use crate::devices;
use crate::error::JobError;
use phalanx_device::{CollectiveError, Machine};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::elastic::copies::name;
use std::collections::BTreeMap;
use std::convert::Infallible;

/// The boxes of a program's state by name: what its updates change, and frozen parameters. Weights that another rank updates
/// are replaced after every step, so that an error in them does not last.
pub(crate) fn boxes(c: &Compiled) -> BTreeMap<u64, Tensor> {
    let frozen = weights::parameters(c).into_iter().filter(|tensor| !tensor.trainable);
    let all = frozen.chain(weights::updated_state(c));
    all.map(|tensor| (name(&tensor.name, &tensor.held.region), tensor)).collect()
}

/// The fingerprints of these boxes, in their order.
///
/// # Errors
/// When the device fails.
pub(crate) fn of_boxes(machine: &dyn Machine, c: &Compiled, boxes: &[&Tensor]) -> Result<Vec<u64>, JobError> {
    if machine.memory().is_some() {
        return of_device(machine, c, boxes);
    }
    let mut sums = vec![0u64; boxes.len()];
    for (tensor, sum) in boxes.iter().zip(&mut sums) {
        for (index, at) in tensor.held.runs() {
            let seen: Result<(), Infallible> = machine.visit(c, tensor.value, at, |words: &[u32]| {
                *sum = sum.wrapping_add(devices::fingerprint(index as u64, words));
                Ok(())
            });
            seen.unwrap_or_else(|never| match never {});
        }
    }
    Ok(sums)
}

/// As [`of_boxes`], for boxes in the memory of a device, which come through a few slots of host memory.
#[allow(unsafe_code)] // The copy reads memory that only updates change.
fn of_device(machine: &dyn Machine, c: &Compiled, boxes: &[&Tensor]) -> Result<Vec<u64>, JobError> {
    let mut sums = vec![0u64; boxes.len()];
    let (mut runs, mut spans) = (Vec::new(), Vec::new());
    for (i, tensor) in boxes.iter().enumerate() {
        spans.extend(weights::sources(machine, c, tensor).map(|run| run.span()));
        runs.extend(tensor.held.runs().map(|(index, at)| (i, index as u64, at.len())));
    }
    // SAFETY: the copy ends in this function, which borrows the machine.
    let copy = unsafe { StateCopy::begin(spans) }.map_err(CollectiveError::from)?;
    let mut runs = runs.into_iter();
    let mut run = runs.next();
    let see = |bytes: &[u8]| {
        let mut words: &[u32] = bytemuck::cast_slice(bytes);
        while let (Some((i, index, len)), false) = (run, words.is_empty()) {
            let (here, rest) = words.split_at(words.len().min(len));
            sums[i] = sums[i].wrapping_add(devices::fingerprint(index, here));
            let is_over = here.len() == len;
            run = if is_over { runs.next() } else { Some((i, index + here.len() as u64, len - here.len())) };
            words = rest;
        }
    };
    copy.finish(see).map_err(CollectiveError::from)?;
    Ok(sums)
}
