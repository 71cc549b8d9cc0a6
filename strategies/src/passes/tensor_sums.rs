//! Sums over whole tensors, for optimizers whose update of an element depends on other elements: on those of its row and
//! column, or on its whole tensor.
//!
//! Each rank sums the elements that it updates, and one collective for many tensors adds the sums of the ranks that share
//! them: the ranks of `dp_shard x cp`, and of `tp` where it cuts the parameter. The sums are made in the compute phase,
//! before the vote, so the update needs no other rank; a shadow receives them with the gradients ([`super::shadow`]). For a
//! matrix of `R x C` elements, Adafactor adds `R + C + 2` numbers; its gradient has `R C`.
//!
//! In reproducible runs no sum may depend on where shards end, so the ranks of `dp_shard x cp` gather the gradients (and
//! weights, where those are sharded) bucket by bucket, and each rank sums all elements in the same order. This moves
//! up to 8 bytes for each element in every step, and takes memory for one bucket.
//!
//! Source: Shazeer and Stern 2018, Adafactor, §3 and §6 (arXiv:1804.04235), for what is summed.

use super::buckets::buckets;
use super::data_parallel::like;
use super::fully_sharded::GROUP as SHARDS;
use crate::mesh::{Axis, Group};
use crate::optimizer::Extent;
use crate::program::tiles::{Tiles, is_shared};
use crate::program::{Collective, CollectiveKind, DType, Kind, Op, Phase, Program, Site, Update, ValueId, op};
use std::collections::BTreeMap;

/// Maximum number of tensors in one collective.
const TENSORS_MAX: usize = 256;

/// How ranks that share a tensor obtain its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// They add the sums of their elements.
    Sums,
    /// They gather the elements, so the sums have the same bits for every division of the elements among ranks.
    Elements {
        /// Every shard begins at a multiple of this number of elements.
        unit: usize,
        /// Elements that are gathered together, in bytes.
        bucket_bytes: usize,
        /// Whether weights are sharded, not only their updates.
        weights: bool,
    },
}

/// Appends the sums that the updates need, round by round, and records them in the updates.
pub(super) fn tensor_sums(program: &mut Program, updates: &mut [Pending], scalars: [ValueId; 2], exchange: &Exchange) {
    let with_sums: Vec<usize> = (0..updates.len()).filter(|i| updates[*i].update.n_rounds > 0).collect();
    let n_shards = program.mesh_rank.group_size(SHARDS);
    let buckets = match exchange {
        Exchange::Elements { bucket_bytes, .. } if n_shards > 1 => {
            buckets(program, &with_sums, |i| updates[i].param, *bucket_bytes)
        }
        _ => vec![with_sums],
    };
    for bucket in buckets {
        let sources: Vec<Source> = match exchange {
            Exchange::Elements { unit, weights, .. } if n_shards > 1 => {
                gather(program, updates, &bucket, *unit, *weights)
            }
            _ => bucket.iter().map(|i| Source::own(&updates[*i])).collect(),
        };
        let n_rounds = bucket.iter().map(|i| updates[*i].update.n_rounds).max().unwrap_or(0);
        for round in 0..n_rounds {
            let mut partial: BTreeMap<Group, Vec<ValueId>> = BTreeMap::new();
            let mut summed: Vec<(usize, ValueId)> = Vec::new();
            for (i, source) in bucket.iter().zip(&sources).filter(|(i, _)| round < updates[**i].update.n_rounds) {
                let of_elements = sums_of_elements(program, &updates[*i], source, round, scalars);
                partial.entry(group(program, updates[*i].param, source)).or_default().extend(&of_elements);
                summed.extend(of_elements.into_iter().map(|sum| (*i, sum)));
            }
            let totals: BTreeMap<ValueId, ValueId> =
                partial.into_iter().flat_map(|(group, sums)| add_up(program, group, sums)).collect();
            summed.into_iter().for_each(|(i, sum)| updates[i].sums.push(totals[&sum]));
        }
    }
}

/// The elements that a rank sums.
struct Source {
    param: ValueId,
    grad: ValueId,
    update: Update,
    /// Whether it has the elements of all ranks of `dp_shard x cp`.
    is_gathered: bool,
}

impl Source {
    /// The elements that the rank updates.
    fn own(pending: &Pending) -> Source {
        let Pending { update, state, grad, .. } = pending;
        Source { param: state[0], grad: *grad, update: update.clone(), is_gathered: false }
    }
}

/// All elements of a bucket of parameters.
fn gather(program: &mut Program, updates: &[Pending], bucket: &[usize], unit: usize, weights: bool) -> Vec<Source> {
    let (mut shards, mut wholes, mut sources) = (Vec::new(), Vec::new(), Vec::new());
    for pending in bucket.iter().map(|i| &updates[*i]) {
        let param = program.params[pending.param].clone();
        let n_elements = param.shape.iter().product();
        let mut whole = |program: &mut Program, shard: ValueId, kind: Kind| {
            let name = program.value(shard).name.clone();
            let whole = program.add_value(name, &param.shape, DType::F32, kind);
            shards.push(shard);
            wholes.push(whole);
            whole
        };
        let grad = whole(program, pending.grad, Kind::Gradient);
        let weight = if weights { whole(program, param.value, Kind::Activation) } else { param.value };
        let tiles = Tiles::of(&param, &(0..n_elements));
        let update = Update { first: 0, tiles, ..pending.update.clone() };
        sources.push(Source { param: weight, grad, update, is_gathered: true });
    }
    let c = Collective { unit, ..Collective::new(CollectiveKind::AllGather, SHARDS) };
    for (shards, wholes) in shards.chunks(TENSORS_MAX).zip(wholes.chunks(TENSORS_MAX)) {
        program.push(Op::Start(op::Start(c)), shards.to_vec(), wholes.to_vec(), SITE);
        program.push(Op::Await(op::Await(c)), wholes.to_vec(), vec![], SITE);
    }
    sources
}

/// Appends one round of the sums of a source's elements.
fn sums_of_elements(
    program: &mut Program,
    pending: &Pending,
    source: &Source,
    round: usize,
    scalars: [ValueId; 2],
) -> Vec<ValueId> {
    let update = Update { n_rounds: round, ..source.update.clone() };
    let extents: &[Extent] = update.rule.sums(update.n_dims)[round];
    let sums: Vec<ValueId> = extents
        .iter()
        .map(|extent| {
            let n_values = update.tiles.n_values(*extent);
            program.add_value("tensor_sums", &[n_values], DType::F32, Kind::Activation)
        })
        .collect();
    let state = std::iter::once(source.param).chain(pending.state[1..].iter().copied());
    let reads = state.chain([source.grad]).chain(pending.sums.iter().copied()).chain(scalars).collect();
    program.push(Op::UpdateSums(op::UpdateSums(update)), reads, sums.clone(), SITE);
    sums
}

/// The ranks that have the other elements of a parameter's tensors.
fn group(program: &Program, param: usize, source: &Source) -> Group {
    let mesh = program.mesh_rank.mesh;
    match (is_shared(&program.params[param]), source.is_gathered) {
        (false, true) => Group::over(&[]),
        (false, false) => SHARDS,
        (true, true) => Group::over(&[Axis::Tp]),
        (true, false) => {
            let sharing = SHARDS.axes.iter().chain([Axis::Tp]).filter(|axis| mesh.axis(*axis) > 1);
            Group::over(&sharing.collect::<Vec<Axis>>())
        }
    }
}

/// Adds the sums of the ranks of a group; a single rank has nothing to add.
fn add_up(program: &mut Program, group: Group, sums: Vec<ValueId>) -> Vec<(ValueId, ValueId)> {
    if program.mesh_rank.group_size(group) == 1 {
        return sums.into_iter().map(|sum| (sum, sum)).collect();
    }
    let totals: Vec<ValueId> = sums.iter().map(|sum| like(program, *sum)).collect();
    let c = Collective::new(CollectiveKind::AllReduce, group);
    for (sums, totals) in sums.chunks(TENSORS_MAX).zip(totals.chunks(TENSORS_MAX)) {
        program.push(Op::Start(op::Start(c)), sums.to_vec(), totals.to_vec(), SITE);
        program.push(Op::Await(op::Await(c)), totals.to_vec(), vec![], SITE);
    }
    sums.into_iter().zip(totals).collect()
}

/// An update whose sums are not yet appended.
pub(super) struct Pending {
    /// Index of the parameter.
    pub(super) param: usize,
    pub(super) update: Update,
    /// The parameter and the optimizer's state.
    pub(super) state: Vec<ValueId>,
    pub(super) grad: ValueId,
    /// Sums over whole tensors appended so far.
    pub(super) sums: Vec<ValueId>,
}

pub(super) const SITE: Site = Site { phase: Phase::Optimizer, block: None, microbatch: 0 };
