//! Mutations: deliberately broken shells around the state machines, which the simulator must detect.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// One broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Mutation {
    /// Messages of an old generation are delivered as messages of the current one.
    AcceptStaleGeneration,
    /// A step counts as committed when more than half of the members have voted.
    CommitOnMajority,
    /// The store and the nodes do not compare terms.
    ForgetFencing,
    /// A shadow is placed on the node of the rank that it copies.
    ShadowsAtHome,
    /// Reports omit votes.
    ForgetVotes,
    /// The coordinator treats a record as durable before the write has finished.
    TrustUnsyncedWrites,
    /// State is freed when a member takes its new rank, not when the new world runs.
    FreeStateEarly,
    /// A rank acts on an operator request without the agreement of the other ranks.
    ActOnHearsay,
    /// Ranks start at the first row of the global batch.
    SameRowsForAll,
    /// The share of the last of several sources is skipped.
    SkipTheLastShare,
    /// A member counts as joined as soon as the world is announced to it.
    ReadyOnTheWay,
    /// A member reports that it has caught up before the last part of the state has arrived.
    CaughtUpTooSoon,
    /// A catching-up member does not update the received part of the state.
    SkipACatchUpPart,
    /// The vote does not wait until catching-up members have the gradients.
    LeaveCatchingUpBehind,
    /// The supervisor never hears of a process that could not be started.
    ForgetFailedStarts,
    /// The store replaces a record whichever record its writer has read.
    ForgetConditions,
    /// A coordinator that cannot read the record begins without one.
    BeginWithoutRecord,
    /// A part of a checkpoint counts as saved although the store has refused it.
    TrustFailedSaves,
    /// A rank that cannot read a checkpoint begins with the initial weights.
    RestartIfUnreadable,
    /// The machines' timers use the time of day.
    TrustTimeOfDay,
    /// Nodes do not report what they train on.
    ForgetInputs,
    /// The record does not keep what the job trains on.
    ForgetDecisions,
    /// Receivers do not compare jobs.
    BelieveStrangers,
    /// Receivers do not compare the numbers of reports.
    BelieveReplays,
    /// Ranks whose copies differ report a broken world, so that the next one uses their memory.
    KeepCorruptMemory,
    /// Copies are not compared before a checkpoint.
    SaveWithoutComparison,
    /// Shadows are not compared.
    CompareOwnShardsOnly,
    /// The first holder of a disputed box is named.
    BlameTheFirstHolder,
    /// Coordinators wait for members that do not return.
    WaitForTheLost,
    /// State that came from another rank counts as a copy of its own.
    CountReceivedCopies,
    /// Coordinators do not look for checkpoints that no report has shown.
    BelieveTheRecord,
}

impl Mutation {
    /// All mutations.
    pub const ALL: [Mutation; 31] = [
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
        Mutation::CaughtUpTooSoon,
        Mutation::SkipACatchUpPart,
        Mutation::LeaveCatchingUpBehind,
        Mutation::ForgetFailedStarts,
        Mutation::ForgetConditions,
        Mutation::BeginWithoutRecord,
        Mutation::TrustFailedSaves,
        Mutation::RestartIfUnreadable,
        Mutation::TrustTimeOfDay,
        Mutation::ForgetInputs,
        Mutation::ForgetDecisions,
        Mutation::BelieveStrangers,
        Mutation::BelieveReplays,
        Mutation::KeepCorruptMemory,
        Mutation::SaveWithoutComparison,
        Mutation::CompareOwnShardsOnly,
        Mutation::BlameTheFirstHolder,
        Mutation::CountReceivedCopies,
        Mutation::WaitForTheLost,
        Mutation::BelieveTheRecord,
    ];
}
