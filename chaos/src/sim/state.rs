//! A stand-in for weights: a chain of hashes over the updates, in pieces that are cut and moved like tensors.

use phalanx_strategies::elastic::identity::Step;
use phalanx_strategies::elastic::shadow::Shard;
use std::ops::Range;

/// The chain of the initial weights.
pub const INITIAL: u64 = 0x1234_5678_9abc_def0;

/// The chain after an update.
pub fn advance(chain: u64, digest: u64) -> u64 {
    mix(chain ^ digest.rotate_left(17))
}

/// The update of a step when nothing goes wrong.
pub fn golden_digest(step: Step) -> u64 {
    mix(step.0.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// A piece of the state, whose chain can be read off only if its name is known.
pub fn value(chain: u64, atom: u64) -> u64 {
    chain ^ mix(atom)
}

/// The piece after an update.
pub fn update(value: u64, atom: u64, digest: u64) -> u64 {
    advance(value ^ mix(atom), digest) ^ mix(atom)
}

/// Pieces of a shard when each stage and tensor shard has `n_atoms`.
pub fn atoms(shard: Shard, n_atoms: u64) -> Range<u64> {
    let first = (u64::from(shard.stage) << 40) + (u64::from(shard.tensor) << 20);
    let cut = |part: u32| first + u64::from(part) * n_atoms / u64::from(shard.n_parts);
    cut(shard.part)..cut(shard.part + 1)
}

/// The finaliser of SplitMix64.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
