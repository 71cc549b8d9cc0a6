//! Parameters and optimizer state as the tensors of a model file: names, shapes, and their bytes in the machine.

use super::grown_rows::Grown;
use super::packed_weights;
use super::row_lengths::{self, Weights};
use crate::frontend::UserParam;
use phalanx_device::Machine;
use phalanx_device::span::SpanRef;
use phalanx_storage::hf::adapter::peft_name;
use phalanx_storage::hf::error::HfError;
use phalanx_storage::hf::source::TensorSource;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::mesh::Axis;
use phalanx_strategies::model::{ModelConfig, SCORE};
use phalanx_strategies::passes::memory::BufferLocation;
use phalanx_strategies::passes::reference::file_name;
use phalanx_strategies::program::held::StateBoxes;
use phalanx_strategies::program::held_box::HeldBox;
use phalanx_strategies::program::packing::E4M3_WEIGHT_MAX;
use phalanx_strategies::program::{DType, Init, Kind, Param, ValueId};
use phalanx_strategies::rng::CounterRng;
use rayon::prelude::*;
use std::borrow::Cow;
use std::convert::Infallible;
use std::ops::Range;

/// A rank's box of a tensor of a model file; the whole tensor on a single rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    /// Name in the file.
    pub(crate) name: String,
    /// Shape of the whole tensor.
    pub(crate) shape: Vec<usize>,
    /// The value that holds it, and the range of that value's elements.
    pub(crate) value: ValueId,
    pub(crate) elements: Range<usize>,
    pub(crate) trainable: bool,
    /// The box of the tensor.
    pub(crate) held: HeldBox,
}

impl Tensor {
    /// The box's elements as runs: index of the first one in the whole tensor, and range within `elements`.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let start = self.elements.start;
        self.held.runs().map(move |(index, at)| (index, at.start - start..at.end - start))
    }
}

/// This rank's boxes of all parameters, in table order.
pub(crate) fn parameters(c: &Compiled) -> Vec<Tensor> {
    c.program.params.iter().flat_map(|p| tensors(p, &p.held, 0)).collect()
}

/// The boxes of parameters that this rank saves; one of the ranks that hold the same box saves it.
pub(crate) fn saved_parameters(c: &Compiled) -> Vec<Tensor> {
    let saved = |p: &&Param| is_saved_here(c, p);
    let own = |p: &Param| tensors(p, &p.updated, p.updated.start - p.held.start);
    c.program.params.iter().filter(saved).flat_map(own).filter(|t| t.held.owned).collect()
}

/// The optimizer's state on this rank, named `exp_avg.<weight>`.
pub(crate) fn optimizer_state(c: &Compiled) -> Vec<Tensor> {
    state_of(c, |_| true)
}

/// The state that this rank's updates change, which recovery must restore. Its other state comes from the base model, or
/// from other ranks' updates.
pub(crate) fn updated_state(c: &Compiled) -> Vec<Tensor> {
    let own = |p: &Param| tensors(p, &p.updated, p.updated.start - p.held.start);
    let trained = c.program.params.iter().filter(|p| p.trainable).flat_map(own);
    trained.chain(state_of(c, |_| true)).collect()
}

/// The state that outlasts a step, its locations, and whether it is split: equal for ranks that can use each other's memory as it is.
pub(crate) fn lasting(c: &Compiled) -> Vec<(Tensor, BufferLocation, bool)> {
    let placed = |tensor: Tensor| {
        let location = c.layout.locations[tensor.value.0 as usize].expect("the memory pass places lasting state");
        // Value ids differ between programs.
        let is_split = c.program.is_split(tensor.value);
        (Tensor { value: ValueId(0), ..tensor }, location, is_split)
    };
    parameters(c).into_iter().chain(optimizer_state(c)).map(placed).collect()
}

/// The optimizer state that this rank saves.
pub(crate) fn saved_optimizer_state(c: &Compiled) -> Vec<Tensor> {
    let mut tensors = state_of(c, |p| is_saved_here(c, p));
    tensors.retain(|t| t.held.owned);
    tensors
}

fn is_saved_here(c: &Compiled, param: &Param) -> bool {
    param.owned && c.program.mesh_rank.on(Axis::DpReplicate) == 0
}

fn state_of(c: &Compiled, wanted: impl Fn(&Param) -> bool) -> Vec<Tensor> {
    let state = c.program.optimizer_state().into_iter().filter(|state| wanted(state.param));
    let of = |state: StateBoxes<'_>| {
        let (value, trainable) = (state.value, state.param.trainable);
        state.boxes.into_iter().map(move |held| tensor(held, value, trainable))
    };
    state.flat_map(of).collect()
}

/// The tensors of a run of a parameter's elements, which its value holds from element `first` on.
pub(super) fn tensors(param: &Param, run: &Range<usize>, first: usize) -> Vec<Tensor> {
    let behind = |held: HeldBox| HeldBox { start: held.start + first, ..held };
    param.boxes(run).into_iter().map(|held| tensor(behind(held), param.value, param.trainable)).collect()
}

fn tensor(held: HeldBox, value: ValueId, trainable: bool) -> Tensor {
    let (name, shape, elements) = (held.name.clone(), held.shape.clone(), held.span());
    Tensor { name, shape, value, elements, trainable, held }
}

/// Sources of the initial values of parameters.
pub(crate) struct FirstValues<'a> {
    /// The model, if it is of a known family.
    pub(crate) model: Option<&'a ModelConfig>,
    /// Parameters of a user-defined model.
    pub(crate) params: &'a [UserParam],
    /// The directory of a model; adapters, which it does not contain, are drawn.
    pub(crate) source: Option<TensorSource>,
    /// Rows that embeddings have more than those of that directory.
    pub(crate) grown: Option<Grown>,
    /// Adapters with which the run begins, and the modules that are trained whole beside them, as PEFT names them.
    pub(crate) adapter: Option<TensorSource>,
    /// Seed of drawn values.
    pub(crate) seed: u64,
}

/// Fills the `wanted` parameters with their initial values, and all constants.
///
/// # Errors
/// When a tensor is missing, has another shape, or is not finite.
pub(crate) fn initialise(
    machine: &mut dyn Machine,
    c: &Compiled,
    first: &FirstValues<'_>,
    wanted: impl Fn(&Param) -> bool,
) -> Result<(), HfError> {
    let FirstValues { model, params, source, grown, adapter, seed } = first;
    let rng = CounterRng::new(*seed).fork_named("init");
    let prefix = model.map_or("", |m| m.family.prefix);
    if let (Some(model), Some(source), 0) = (model, source, c.program.mesh_rank.rank) {
        check_tied(model, source)?;
    }
    for param in c.program.params.iter().filter(|p| wanted(p)) {
        let is_adapter = param.parts.iter().all(|p| p.name.contains(".lora_"));
        // A user's parameter is one tensor.
        let user = params.iter().find(|user| user.name == param.parts[0].name);
        match (user, adapter.as_ref().filter(|_| param.trainable), source) {
            (Some(user), ..) => {
                let held = tensors(param, &param.held, 0);
                held.iter().for_each(|tensor| unpack_from_whole(machine, c, tensor, &user.values));
            }
            (None, Some(adapter), _) => load(machine, c, param, adapter, None, peft_name)?,
            (None, None, source) if let Init::RowLengths(of) = param.init => {
                row_lengths::fill(machine, c, param, of, Weights { source: source.as_ref(), prefix, rng })?;
            }
            (None, None, Some(source)) if !is_adapter && !is_new_head(param, source) => {
                let grown = grown.map(|grown| (grown, rng));
                load(machine, c, param, source, grown, |name| name_in(source, name, prefix).into())?;
            }
            _ => draw(machine, c, param, rng),
        }
    }
    fill_constants(machine, c, *model);
    if let Some(source) = source {
        tracing::debug!(rank = c.program.mesh_rank.rank, bytes = source.bytes_read(), "weights read");
    }
    Ok(())
}

/// Whether a model of scores begins with a language model, whose files have another head.
fn is_new_head(param: &Param, source: &TensorSource) -> bool {
    param.parts[0].name == SCORE && !source.contains(SCORE)
}

/// The names of embeddings, without the prefix of the family.
const EMBEDDINGS: [&str; 2] = ["embed_tokens.weight", "wte.weight"];

/// Checks that files with a head of their own agree with a configuration that takes the embedding for it: transformers then
/// trusts the files.
fn check_tied(model: &ModelConfig, source: &TensorSource) -> Result<(), HfError> {
    let head = "lm_head.weight";
    if !model.tie_embeddings || !source.contains(head) {
        return Ok(());
    }
    let prefix = model.family.prefix;
    let names = EMBEDDINGS.map(|name| format!("{prefix}{name}"));
    let found = names.iter().map(|name| name_in(source, name, prefix)).find(|name| source.contains(name));
    match found {
        Some(embedding) if source.digest(embedding)? != source.digest(head)? => {
            Err(HfError::Untied { dir: source.dir().to_owned(), embedding: embedding.to_owned() })
        }
        _ => Ok(()),
    }
}

/// Fills the model's tables.
pub(crate) fn fill_constants(machine: &mut dyn Machine, c: &Compiled, model: Option<&ModelConfig>) {
    for (i, value) in c.program.values.iter().enumerate().filter(|(_, v)| v.kind == Kind::Constant) {
        let contents = model.and_then(|m| m.constant(&value.name, &value.shape));
        if let Some(contents) = contents {
            machine.write(c, ValueId(i as u32), 0, &contents);
        }
    }
}

/// Reads only the elements that the parameter holds: one run of the file for each run that is contiguous in memory.
fn load(
    machine: &mut dyn Machine,
    c: &Compiled,
    param: &Param,
    source: &TensorSource,
    grown: Option<(Grown, CounterRng)>,
    name_in_file: impl Fn(&str) -> String,
) -> Result<(), HfError> {
    for tensor in tensors(param, &param.held, 0) {
        let name = &name_in_file(&tensor.name);
        let shape = shape_of_weights(param, &tensor);
        let grown = match grown {
            Some((grown, rng)) if grown.concerns(source.shape(name)?, &shape) => {
                Some(grown.rows(source, name, param.init, rng.fork_named(file_name(&tensor.name)))?)
            }
            _ => source.check_shape(name, &shape).map(|()| None)?,
        };
        let mut largest = 0.0f32;
        let read_all = |runs: Vec<(usize, Range<usize>)>, out: &mut [f32]| {
            let Some(grown) = &grown else { return source.read_runs_into(name, runs, out) };
            let (old, new): (Vec<_>, Vec<_>) =
                runs.into_iter().map(|(index, at)| grown.split(index, at).into()).unzip();
            source.read_runs_into(name, old, out)?;
            new.into_iter().for_each(|(index, at): (usize, Range<usize>)| grown.fill(index, &mut out[at]));
            Ok(())
        };
        let mut read = |runs: Vec<(usize, Range<usize>)>, out: &mut [f32]| {
            read_all(runs, out)?;
            if param.in_fp8 {
                largest = largest.max(out.par_iter().with_min_len(4096).map(|x| x.abs()).reduce(|| 0.0, f32::max));
            }
            Ok(())
        };
        if let Some(packing) = param.packing {
            let mut read = |index: usize, out: &mut [f32]| read(vec![(index, 0..out.len())], out);
            packed_weights::fill(machine, c, &tensor, packing, &mut read)?;
        } else {
            let runs: Vec<(usize, Range<usize>)> = tensor.runs().collect();
            machine.try_edit(c, tensor.value, tensor.elements.clone(), |first, out| {
                read(within(&runs, first..first + out.len()).collect(), out)
            })?;
        }
        if largest > E4M3_WEIGHT_MAX {
            let (dir, tensor) = (source.dir().to_owned(), name.clone());
            let [found, largest] = [largest, E4M3_WEIGHT_MAX].map(|x| x.to_string());
            return Err(HfError::BeyondFp8 { dir, tensor, found, largest });
        }
    }
    Ok(())
}

/// The shape of a whole tensor, counted in weights.
fn shape_of_weights(param: &Param, tensor: &Tensor) -> Vec<usize> {
    let mut shape = tensor.shape.clone();
    if let (Some(packing), Some(n_columns)) = (param.packing, shape.last_mut()) {
        *n_columns = packing.weights(*n_columns);
    }
    shape
}

/// The parts of these runs within a piece of a tensor's elements, with ranges relative to the piece.
pub(super) fn within(
    runs: &[(usize, Range<usize>)],
    piece: Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    runs.iter().filter_map(move |(index, at)| {
        let (start, end) = (at.start.max(piece.start), at.end.min(piece.end));
        (start < end).then(|| (index + start - at.start, start - piece.start..end - piece.start))
    })
}

/// Fills a box run by run with `of`, which gets the index of each run's first element in the whole tensor.
fn fill(machine: &mut dyn Machine, c: &Compiled, tensor: &Tensor, of: impl Fn(usize, &mut [f32])) {
    for (index, at) in tensor.held.runs() {
        machine.fill(c, tensor.value, at, |from, run| of(index + from, run));
    }
}

/// Passes all of a box to `see`, in row-major order.
pub(crate) fn visit(machine: &dyn Machine, c: &Compiled, tensor: &Tensor, mut see: impl FnMut(&[f32])) {
    for (_, at) in tensor.held.runs() {
        let seen: Result<(), Infallible> = machine.visit(c, tensor.value, at, |run| {
            see(run);
            Ok(())
        });
        seen.unwrap_or_else(|never| match never {});
    }
}

/// The runs of a box in memory, in row-major order.
pub(crate) fn sources<'a>(
    machine: &'a dyn Machine,
    c: &Compiled,
    tensor: &Tensor,
) -> impl Iterator<Item = SpanRef<'a>> {
    tensor.held.runs().map(|(_, at)| machine.source(c, tensor.value, at))
}

/// Names in files of a model without its head, such as GPT-2 on the hub, have no family prefix.
pub(super) fn name_in<'a>(source: &TensorSource, name: &'a str, prefix: &str) -> &'a str {
    let name = file_name(name);
    let short = name.strip_prefix(prefix).filter(|short| source.contains(short));
    if source.contains(name) { name } else { short.unwrap_or(name) }
}

/// Element `i` of a tensor depends only on the seed, the tensor's name and `i` in the whole tensor: not on the number of
/// threads, nor on how projections are stacked or split between ranks.
fn draw(machine: &mut dyn Machine, c: &Compiled, param: &Param, rng: CounterRng) {
    for tensor in tensors(param, &param.held, 0) {
        let stream = rng.fork_named(file_name(&tensor.name));
        if let Some(packing) = param.packing {
            let drawn: Result<(), Infallible> =
                packed_weights::fill(machine, c, &tensor, packing, &mut |index: usize, run: &mut [f32]| {
                    draw_run(param.init, stream, index, run);
                    Ok(())
                });
            drawn.unwrap_or_else(|never| match never {});
        } else {
            fill(machine, c, &tensor, |index, run| draw_run(param.init, stream, index, run));
        }
    }
}

pub(super) fn draw_run(init: Init, stream: CounterRng, index: usize, run: &mut [f32]) {
    match init {
        Init::Zeros => run.fill(0.0),
        Init::Ones => run.fill(1.0),
        Init::RowLengths(_) => unreachable!("lengths are those of another parameter"),
        Init::Normal { std } => run.par_iter_mut().enumerate().with_min_len(4096).for_each(|(i, x)| {
            *x = std * stream.normal((index + i) as u64) as f32;
        }),
    }
}

/// Elements of one tensor, row after row.
pub(crate) fn packed<'a>(machine: &'a dyn Machine, c: &Compiled, tensor: &Tensor) -> Cow<'a, [f32]> {
    if tensor.elements.len() == tensor.held.n_elements() {
        return elements(machine, c, tensor);
    }
    let mut packed = Vec::with_capacity(tensor.held.n_elements());
    visit(machine, c, tensor, |run| packed.extend_from_slice(run));
    Cow::Owned(packed)
}

/// Copies a box from the whole tensor.
pub(crate) fn unpack_from_whole(machine: &mut dyn Machine, c: &Compiled, tensor: &Tensor, whole: &[f32]) {
    fill(machine, c, tensor, |index, run| run.copy_from_slice(&whole[index..index + run.len()]));
}

/// Elements of one tensor, including gaps between its rows.
pub(crate) fn elements<'a>(machine: &'a dyn Machine, c: &Compiled, tensor: &Tensor) -> Cow<'a, [f32]> {
    machine.elements(c, tensor.value, tensor.elements.clone())
}

/// The first parameter that holds a NaN or an infinity. Packed weights are not looked at: they were finite when they were packed.
pub(crate) fn first_non_finite(machine: &dyn Machine, c: &Compiled) -> Option<String> {
    let is_finite = |run: &[f32]| if run.par_iter().all(|x| x.is_finite()) { Ok(()) } else { Err(()) };
    let bad = |t: &Tensor| machine.visit(c, t.value, t.elements.clone(), is_finite).is_err();
    let is_packed = |t: &Tensor| c.program.value(t.value).dtype == DType::I32;
    parameters(c).into_iter().filter(|t| !is_packed(t)).find(bad).map(|t| t.name)
}

#[cfg(test)]
#[path = "weights_tests.rs"]
mod tests;
