//! Deliberately broken shells around the machines: what the simulator must catch, or it tests nothing.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// One rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Mutation {
    /// What ranks are told of an old generation is passed off as of their own.
    AcceptStaleGeneration,
    /// A step is called committed when more than half of the members have voted.
    CommitOnMajority,
    /// The store and the nodes do not compare terms.
    ForgetFencing,
    /// A shadow lives where the rank lives that it stands for.
    ShadowsAtHome,
    /// Reports do not tell of votes.
    ForgetVotes,
    /// The coordinator takes a record for durable that it has only begun to write.
    TrustUnsyncedWrites,
    /// State is freed when a new seat is taken, not when the new world runs.
    FreeStateEarly,
    /// A rank acts on what it has been told that the operator wants, whatever the others have been told.
    ActOnHearsay,
    /// Ranks start at the first row of the global batch.
    SameRowsForAll,
    /// Of several sources that share a piece of state, the last one is taken to have had nothing.
    SkipTheLastShare,
    /// A member is taken to be in its world as soon as it is told of it.
    ReadyOnTheWay,
    /// A learner says that it has caught up before the last part of the state has come.
    LearntTooSoon,
    /// What a learner has is not updated before the rest has come.
    SkipALesson,
    /// Nobody waits until learners have the gradients of a step.
    LeaveLearnersBehind,
}

impl Mutation {
    /// All of them.
    pub const ALL: [Mutation; 14] = [
        Mutation::AcceptStaleGeneration,
        Mutation::CommitOnMajority,
        Mutation::ForgetFencing,
        Mutation::ShadowsAtHome,
        Mutation::ForgetVotes,
        Mutation::TrustUnsyncedWrites,
        Mutation::FreeStateEarly,
        Mutation::ActOnHearsay,
        Mutation::SameRowsForAll,
        Mutation::SkipTheLastShare,
        Mutation::ReadyOnTheWay,
        Mutation::LearntTooSoon,
        Mutation::SkipALesson,
        Mutation::LeaveLearnersBehind,
    ];
}
