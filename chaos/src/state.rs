//! A stand-in for weights: a chain of hashes over the updates, in pieces that are sharded and transferred like tensors.

use phalanx_strategies::elastic::identity::Step;
use phalanx_strategies::elastic::recovery::{Share, Transfer};
use phalanx_strategies::elastic::shadow::{Cut, Shard};
use std::ops::Range;

/// The chain of the initial weights.
pub const INITIAL: u64 = 0x1234_5678_9abc_def0;

/// The chain after an update.
pub fn advance(chain: u64, digest: u64) -> u64 {
    mix(chain ^ digest.rotate_left(17))
}

/// The update of a step in the golden run.
pub fn golden_digest(step: Step) -> u64 {
    mix(step.0.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// A piece of the state: the chain mixed with the piece's name.
pub fn value(chain: u64, atom: u64) -> u64 {
    chain ^ mix(atom)
}

/// The chain of a piece.
pub fn chain(value: u64, atom: u64) -> u64 {
    value ^ mix(atom)
}

/// The piece after an update.
pub fn update(value: u64, atom: u64, digest: u64) -> u64 {
    advance(chain(value, atom), digest) ^ mix(atom)
}

/// Layers, and columns per layer: the most stages and tensor shards of a simulated mesh.
const GRID: [u32; 2] = [2, 2];

/// The runs of pieces of a shard; each column of a layer has `n_atoms` pieces. As in programs, a tensor shard's columns are
/// cut into parts together, so part boundaries depend on the number of tensor shards.
pub fn atoms(shard: Shard, n_atoms: u64) -> Vec<Range<u64>> {
    let Cut { n_stages, n_tensors, n_parts } = shard.cut;
    let own = |i: u32, n: u32, all: u32| (i * all / n)..((i + 1) * all / n);
    let columns = own(shard.tensor, n_tensors, GRID[1]);
    let n_here = u64::from(columns.end - columns.start) * n_atoms;
    let cut = |part: u32| u64::from(part) * n_here / u64::from(n_parts);
    let part = cut(shard.part)..cut(shard.part + 1);
    let mut runs = Vec::new();
    for layer in own(shard.stage, n_stages, GRID[0]) {
        for (i, column) in (0..).zip(columns.clone()) {
            let first = (u64::from(layer) << 40) + (u64::from(column) << 20);
            let here = i * n_atoms..(i + 1) * n_atoms;
            let (from, to) = (part.start.max(here.start), part.end.min(here.end));
            if from < to {
                runs.push(first + from - here.start..first + to - here.start);
            }
        }
    }
    runs
}

/// The intersection of two lists of runs.
pub fn common(a: &[Range<u64>], b: &[Range<u64>]) -> Vec<Range<u64>> {
    let meet = |a: &Range<u64>, b: &Range<u64>| a.start.max(b.start)..a.end.min(b.end);
    let all = a.iter().flat_map(|a| b.iter().map(move |b| meet(a, b)));
    all.filter(|run| !run.is_empty()).collect()
}

/// One source's share of a list of runs, if several sources have all of it.
pub fn share(runs: &[Range<u64>], share: Share) -> Vec<Range<u64>> {
    let n: u64 = runs.iter().map(|run| run.end - run.start).sum();
    let edge = |part: u32| n * u64::from(part) / u64::from(share.n_parts);
    let (from, to) = (edge(share.part), edge(share.part + 1));
    let mut before = 0;
    let mut part = Vec::new();
    for run in runs {
        let at = |i: u64| run.start + i.clamp(before, before + run.end - run.start) - before;
        part.push(at(from)..at(to));
        before += run.end - run.start;
    }
    part.retain(|run| !run.is_empty());
    part
}

/// The runs to fetch from a source.
pub fn asked(transfer: Transfer, of: Share, n_atoms: u64) -> Vec<Range<u64>> {
    let wanted = atoms(transfer.shard, n_atoms);
    match transfer.source.sender(transfer.shard) {
        Some((_, held)) => share(&common(&wanted, &atoms(held, n_atoms)), of),
        None => share(&wanted, of),
    }
}

/// The finaliser of SplitMix64.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
