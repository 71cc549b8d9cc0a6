//! DoRA's magnitudes at the start: the lengths of the rows of the weights that adapters adapt, as these are stored.

use super::packed_weights;
use super::weights::{draw_run, name_in, tensors, unpack_from_whole};
use phalanx_device::Machine;
use phalanx_storage::hf::error::HfError;
use phalanx_storage::hf::source::TensorSource;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::{Init, Measured, Param};
use phalanx_strategies::rng::CounterRng;
use rayon::prelude::*;

/// What the magnitudes of a module are called, behind its path.
pub(super) const MAGNITUDE: &str = ".lora_magnitude_vector";

/// Where weights come from: a directory of a model, whose tensors may lack the prefix, or they are drawn.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    pub(super) source: Option<&'a TensorSource>,
    pub(super) prefix: &'a str,
    pub(super) rng: CounterRng,
}

/// Fills the magnitudes of a parameter. A rank reads the whole weight.
///
/// # Errors
/// When the weight cannot be read.
pub(super) fn fill(
    machine: &mut dyn Machine,
    c: &Compiled,
    param: &Param,
    of: Measured,
    from: Weights<'_>,
) -> Result<(), HfError> {
    for tensor in tensors(param, &param.held, 0) {
        let name = format!("{}.weight", tensor.name.trim_end_matches(MAGNITUDE));
        let n_out = tensor.shape[0];
        let whole = weight(&name, of, n_out, from)?;
        let lengths = if of.of_columns { columns(&whole, n_out) } else { rows(&whole, n_out) };
        unpack_from_whole(machine, c, &tensor, &lengths);
    }
    Ok(())
}

/// A whole weight, rounded as it is stored.
fn weight(name: &str, of: Measured, n_out: usize, from: Weights<'_>) -> Result<Vec<f32>, HfError> {
    let mut read = |index: usize, out: &mut [f32]| match from.source {
        Some(source) => source.read_runs_into(name_in(source, name, from.prefix), vec![(index, 0..out.len())], out),
        None => {
            draw_run(Init::Normal { std: of.std }, from.rng.fork_named(name), index, out);
            Ok(())
        }
    };
    match of.packing {
        Some(packing) => packed_weights::rounded(packing, of.shape(n_out), &mut read),
        None => {
            let mut whole = vec![0.0; of.n_in * n_out];
            read(0, &mut whole)?;
            Ok(whole)
        }
    }
}

fn rows(whole: &[f32], n_out: usize) -> Vec<f32> {
    let length = |row: &[f32]| row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32;
    whole.par_chunks(whole.len() / n_out.max(1)).map(length).collect()
}

fn columns(whole: &[f32], n_out: usize) -> Vec<f32> {
    let mut squares = vec![0f64; n_out];
    for row in whole.chunks(n_out.max(1)) {
        squares.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x).powi(2));
    }
    squares.into_iter().map(|squares| squares.sqrt() as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_rows_and_of_columns_are_those_of_the_same_matrix() {
        assert_eq!(rows(&[3.0, 4.0, 0.0, -2.0], 2), [5.0, 2.0]);
        assert_eq!(columns(&[3.0, 0.0, 4.0, -2.0], 2), [5.0, 2.0]);
    }
}
