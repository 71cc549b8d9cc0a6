//! Configuration of a simulation: size and duration of the job, and machine parameters.

use crate::dice::Dice;
use crate::mutation::Mutation;
use crate::plan::has_spare_nodes;
use phalanx_strategies::elastic::member::Schedule;
use phalanx_strategies::elastic::mesh_choice::Policy;
use phalanx_strategies::elastic::timing::Timing;
use phalanx_strategies::mesh::Mesh;
use std::time::Duration;

/// A job to simulate.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Seed of all random numbers.
    pub seed: u64,
    /// Machines.
    pub n_nodes: u32,
    /// Slots of each machine.
    pub n_slots: u32,
    /// The mesh and its allowed changes.
    pub policy: Policy,
    /// Timeouts of the machines.
    pub timing: Timing,
    /// Whether updates have the same bits in every world.
    pub reproducible: bool,
    /// Steps between checkpoints.
    pub save_steps: u64,
    /// Steps between comparisons of copies, in plans with flipped bits.
    pub verify_steps: u64,
    /// Time to compute a step.
    pub step_ms: u64,
    /// From the start of a process to its first status report.
    pub spawn_ms: u64,
    /// Pieces of the state of each column of a layer.
    pub n_atoms: u64,
    /// Steps over which a catching-up member receives the state.
    pub n_catch_up_parts: u32,
    /// Longest transfer time of the messages to a catching-up member.
    pub catch_up_part_us: u64,
    /// End of the safety phase.
    pub safety_ms: u64,
    /// Time after the safety phase, and after the longest quarantine of a node, in which the whole mesh must train again.
    pub liveness_ms: u64,
    /// The rule to break deliberately.
    pub mutation: Option<Mutation>,
}

impl Config {
    /// A small job whose shape is drawn from the seed.
    pub fn small(seed: u64) -> Config {
        let mut dice = Dice::new(seed, "config");
        let meshes =
            [(1, 2, 1), (1, 3, 1), (1, 4, 1), (2, 1, 1), (2, 2, 1), (3, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 2)];
        let (dp_replicate, dp_shard, tp) = meshes[dice.pick(0..meshes.len() as u64) as usize];
        let pp = if dice.percent(20) { 2 } else { 1 };
        let wanted = Mesh { pp, dp_replicate, dp_shard, cp: 1, tp };
        let n_nodes = dice.pick(2..5) as u32;
        let n_spares = dice.pick(0..3) as u32;
        let n_slots = (wanted.size() as u32 + n_spares).div_ceil(n_nodes);
        let config = Config { n_nodes, n_slots, ..Config::of(seed, wanted, &mut dice) };
        if !has_spare_nodes(seed) {
            return config;
        }
        // Enough of them for the smallest world, and time to notice that a world is lost.
        let n_smallest = config.policy.smallest(None) as u32;
        Config { n_nodes: n_nodes + n_smallest.div_ceil(n_slots), safety_ms: 16_000, ..config }
    }

    /// A job of `n_ranks` ranks on nodes of up to eight, with spare nodes for one rank in a hundred.
    pub fn with_ranks(seed: u64, n_ranks: u32) -> Config {
        let mut dice = Dice::new(seed, "config");
        let n_slots = if n_ranks <= 16 { 2 } else { 8 };
        let dp_shard = (1..=8).rev().find(|n| n_ranks.is_multiple_of(*n)).unwrap_or(1);
        let wanted = Mesh { dp_shard: dp_shard as usize, dp_replicate: (n_ranks / dp_shard) as usize, ..Mesh::ONE };
        let n_nodes = (n_ranks + n_ranks / 100).div_ceil(n_slots) + 1;
        Config { n_nodes, n_slots, ..Config::of(seed, wanted, &mut dice) }
    }

    /// The members' schedule: the job runs until it is stopped.
    pub fn schedule(&self) -> Schedule {
        Schedule { save_steps: self.save_steps, last_step: None }
    }

    fn of(seed: u64, wanted: Mesh, dice: &mut Dice) -> Config {
        let timing = Timing::default();
        let mut of_catch_up = Dice::new(seed, "learners");
        let policy = Policy {
            wanted,
            dp_replicate_min: 1,
            dp_shard_min: 1,
            replace_patience: Duration::from_millis(dice.pick(0..1_500)),
            n_microbatches: (wanted.data_ranks() * dice.pick(1..3) as usize).max(4),
            uneven: true,
            evict_stragglers: dice.percent(70),
            shadows: true,
            // Plans have many faults; the tests of the machine cover the incident limit.
            incidents_max: 1_000,
            one_model: false,
            state_bytes: 1_000,
            rest_bytes_max: if of_catch_up.percent(50) { 0 } else { u64::MAX },
        };
        Config {
            seed,
            n_nodes: 0,
            n_slots: 0,
            policy,
            timing,
            reproducible: dice.percent(60),
            save_steps: dice.pick(3..20),
            verify_steps: Dice::new(seed, "verification").pick(1..9),
            step_ms: dice.pick(20..120),
            spawn_ms: dice.pick(50..600),
            n_atoms: 15,
            n_catch_up_parts: of_catch_up.pick(1..30) as u32,
            catch_up_part_us: if of_catch_up.percent(20) { of_catch_up.pick(20_000..300_000) } else { 8_000 },
            safety_ms: 8_000,
            liveness_ms: 40_000,
            mutation: None,
        }
    }
}
