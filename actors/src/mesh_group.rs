//! One process group of a world at one rank: the actor that owns the group's communicator for one generation.
//!
//! The device thread starts and finishes the group's collectives through memory shared with this actor (the runtime's
//! `group_handle`): a message per collective would cost two thread switches. Through the same memory the actor reads the
//! device's progress, stops the device, aborts the group at all members, and finds the members that are behind this rank, on
//! any machine.

use actix::{Actor, AsyncContext, Context, Handler, Message, MessageResult, Recipient};
use phalanx_strategies::elastic::identity::Generation;
use phalanx_strategies::mesh::Axes;
use std::fmt;
use std::time::Duration;

/// Progress of a member in the collectives of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watermark {
    /// Collectives that the member has entered.
    pub entered: u64,
    /// Collectives that the member has finished.
    pub finished: u64,
}

/// The operation that members of a group have not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// Entering a collective of the whole group.
    Collective,
    /// Sending a message to this member.
    Send,
    /// Receiving a message from this member.
    Receive,
}

/// Members that have not started an operation that this member has started or waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Behind {
    /// The operation that they have not started.
    pub awaited: Awaited,
    /// Number of the collective or message, counted from 0 in each generation.
    pub number: u64,
    /// Their ranks.
    pub ranks: Vec<u32>,
}

/// The owner's side of a communicator. No method waits for the device or for a member.
pub trait OwnedGroup: Send {
    /// The mesh axes that the group spans; none for the group of all ranks and for pairs that exchange state.
    fn axes(&self) -> Axes;

    /// Progress of this rank's device in the group.
    fn watermark(&self) -> Watermark;

    /// The members that are behind this one.
    fn behind(&self) -> Vec<Behind>;

    /// Errors that the device's library has noticed by itself, while no call of the device's thread returns.
    ///
    /// # Errors
    /// The library's error, as a clause.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    /// Ends the group at all its members: every wait in the group returns at once, and the device starts no further operation
    /// in it. Other groups continue.
    fn abort(&self, reason: &str);
}

/// Checks one communicator at intervals, and tells the rank when it has failed.
pub struct MeshGroup {
    group: Box<dyn OwnedGroup>,
    generation: Generation,
    /// The rank, which ends the world when the group fails.
    rank: Recipient<GroupFailed>,
    /// Interval of checks for failures.
    interval: Duration,
}

/// Aborts the group, for this reason.
#[derive(Clone, Debug)]
pub struct Abort(pub String);

/// Tells the rank that a group of this world has failed at this rank, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupFailed {
    /// The world.
    pub generation: Generation,
    /// The failure.
    pub reason: String,
}

/// Requests the ranks that are behind this rank.
#[derive(Clone, Copy, Debug)]
pub struct WhoIsMissing;

/// Ranks that are behind in a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// The axes of the group.
    pub axes: Axes,
    /// Progress of the asking rank in the group.
    pub watermark: Watermark,
    /// The ranks, and the operation that they have not started.
    pub behind: Behind,
}

impl Message for Abort {
    type Result = ();
}

impl Message for GroupFailed {
    type Result = ();
}

impl Message for WhoIsMissing {
    type Result = Vec<Missing>;
}

impl MeshGroup {
    /// The actor that owns this group of a world. It checks the group at this interval, and reports a failure to `rank`.
    pub fn new(
        group: Box<dyn OwnedGroup>,
        generation: Generation,
        rank: Recipient<GroupFailed>,
        interval: Duration,
    ) -> MeshGroup {
        MeshGroup { group, generation, rank, interval }
    }

    fn missing(&self) -> Vec<Missing> {
        let (axes, watermark) = (self.group.axes(), self.group.watermark());
        self.group.behind().into_iter().map(|behind| Missing { axes, watermark, behind }).collect()
    }

    /// Reports a failure until the world ends: the rank ignores further reports, and a full mailbox only delays them.
    fn check(&mut self, _: &mut Context<Self>) {
        if let Err(reason) = self.group.check() {
            let _ = self.rank.try_send(GroupFailed { generation: self.generation, reason });
        }
    }
}

impl Actor for MeshGroup {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        ctx.run_interval(self.interval, MeshGroup::check);
    }
}

impl Handler<Abort> for MeshGroup {
    type Result = ();

    fn handle(&mut self, Abort(reason): Abort, _: &mut Context<Self>) {
        self.group.abort(&reason);
    }
}

impl Handler<WhoIsMissing> for MeshGroup {
    type Result = MessageResult<WhoIsMissing>;

    fn handle(&mut self, _: WhoIsMissing, _: &mut Context<Self>) -> Self::Result {
        MessageResult(self.missing())
    }
}

/// For people: `rank 3 has not entered collective #14 on dp_shard`.
impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Behind { awaited, number, ranks } = &self.behind;
        let (noun, verb) = if ranks.len() == 1 { ("rank", "has") } else { ("ranks", "have") };
        let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
        write!(f, "{noun} {} {verb} not ", ranks.join(", "))?;
        let all = self.axes == Axes::NONE;
        match awaited {
            Awaited::Collective if all => return write!(f, "entered the vote #{number} of all ranks"),
            Awaited::Collective => write!(f, "entered collective #{number}")?,
            Awaited::Send => write!(f, "sent message #{number}")?,
            Awaited::Receive => write!(f, "received message #{number}")?,
        }
        if all { Ok(()) } else { write!(f, " on {}", self.axes) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use phalanx_strategies::mesh::Axis;
    use std::sync::{Arc, Mutex};

    /// A group over dp_shard. The test sets the members behind and observes the abort.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Fake {
        pub(crate) behind: Arc<Mutex<Vec<Behind>>>,
        pub(crate) aborted: Arc<Mutex<Vec<String>>>,
        pub(crate) failure: Arc<Mutex<Option<String>>>,
    }

    impl OwnedGroup for Fake {
        fn axes(&self) -> Axes {
            Axes::of(&[Axis::DpShard])
        }

        fn watermark(&self) -> Watermark {
            Watermark { entered: 15, finished: 14 }
        }

        fn behind(&self) -> Vec<Behind> {
            self.behind.lock().unwrap().clone()
        }

        fn check(&self) -> Result<(), String> {
            self.failure.lock().unwrap().clone().map_or(Ok(()), Err)
        }

        fn abort(&self, reason: &str) {
            self.aborted.lock().unwrap().push(reason.to_owned());
        }
    }

    #[test]
    fn missing_names_the_ranks_and_the_operation_they_have_not_started() {
        let text = |axes, awaited, ranks: &[u32]| {
            let behind = Behind { awaited, number: 14, ranks: ranks.to_vec() };
            Missing { axes, watermark: Watermark::default(), behind }.to_string()
        };
        let dp_shard = Axes::of(&[Axis::DpShard]);

        assert_eq!(text(dp_shard, Awaited::Collective, &[5]), "rank 5 has not entered collective #14 on dp_shard");
        assert_eq!(
            text(Axes::NONE, Awaited::Collective, &[4, 7]),
            "ranks 4, 7 have not entered the vote #14 of all ranks"
        );
        assert_eq!(text(Axes::of(&[Axis::Pp]), Awaited::Send, &[1]), "rank 1 has not sent message #14 on pp");
        assert_eq!(text(Axes::NONE, Awaited::Receive, &[2]), "rank 2 has not received message #14");
    }
}
