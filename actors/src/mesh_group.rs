//! One group of ranks of a world, seen from one of them: the actor that owns its communicator's controls for one generation.
//!
//! The device thread drives the collectives of the group; a message for each would be two changes of threads.
//! Operations that must not wait for the device are done here: aborting the group, and reporting which ranks have not
//! entered a collective.

use actix::{Actor, Context, Handler, Message, MessageResult};
use phalanx_strategies::mesh::Axes;
use std::fmt;

/// How far a member is in the collectives of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watermark {
    /// Collectives that it has entered.
    pub entered: u64,
    /// Collectives that it has finished.
    pub finished: u64,
}

/// What can be done with a communicator while its device is anywhere.
pub trait GroupControl: Send {
    /// Over which axes its members lie; none for the group of all ranks.
    fn axes(&self) -> Axes;

    /// The rank of this member.
    fn rank(&self) -> u32;

    /// The ranks of all members, by position.
    fn members(&self) -> &[u32];

    /// How far each member is, by position; nothing of members whose memory cannot be seen from here.
    fn watermarks(&self) -> Vec<Option<Watermark>>;

    /// Aborts the group: every wait in it returns at once, here and at all members that share its memory or
    /// connections.
    fn abort(&self, reason: &str);
}

/// See the [module](self).
pub struct MeshGroup(Box<dyn GroupControl>);

/// Abort the group.
#[derive(Clone, Debug)]
pub struct Abort(pub String);

/// Asks which ranks have not entered the collective that this rank entered last.
#[derive(Clone, Copy, Debug)]
pub struct WhoIsMissing;

/// A collective that some members have not entered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Of the group over these axes.
    pub axes: Axes,
    /// Its number, counted from 0 in each generation.
    pub number: u64,
    /// The ranks that have not entered it.
    pub ranks: Vec<u32>,
}

impl Message for Abort {
    type Result = ();
}

impl Message for WhoIsMissing {
    type Result = Option<Missing>;
}

impl MeshGroup {
    /// The actor of this communicator.
    pub fn new(group_control: Box<dyn GroupControl>) -> MeshGroup {
        MeshGroup(group_control)
    }

    fn missing(&self) -> Option<Missing> {
        let group = &*self.0;
        let watermarks = group.watermarks();
        let by_rank = || group.members().iter().copied().zip(&watermarks);
        let (_, own) = by_rank().find(|(rank, _)| *rank == group.rank())?;
        let entered = (*own)?.entered;
        let behind = by_rank().filter(|(_, mark)| mark.is_some_and(|mark| mark.entered < entered));
        let ranks: Vec<u32> = behind.map(|(rank, _)| rank).collect();
        (!ranks.is_empty()).then(|| Missing { axes: group.axes(), number: entered - 1, ranks })
    }
}

impl Actor for MeshGroup {
    type Context = Context<Self>;
}

impl Handler<Abort> for MeshGroup {
    type Result = ();

    fn handle(&mut self, Abort(reason): Abort, _: &mut Context<Self>) {
        self.0.abort(&reason);
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
        let ranks: Vec<String> = self.ranks.iter().map(u32::to_string).collect();
        let (noun, verb) = if ranks.len() == 1 { ("rank", "has") } else { ("ranks", "have") };
        let ranks = ranks.join(", ");
        write!(f, "{noun} {ranks} {verb} not entered ")?;
        if self.axes == Axes::NONE {
            return write!(f, "the vote #{} of all ranks", self.number);
        }
        write!(f, "collective #{} on {}", self.number, self.axes)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use phalanx_strategies::mesh::Axis;
    use std::sync::{Arc, Mutex};

    /// A group over dp_shard whose watermarks the test sets and whose abort it observes.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Fake {
        pub(crate) rank: u32,
        pub(crate) members: Vec<u32>,
        pub(crate) entered: Arc<Mutex<Vec<Option<u64>>>>,
        pub(crate) aborted: Arc<Mutex<Vec<String>>>,
    }

    impl GroupControl for Fake {
        fn axes(&self) -> Axes {
            Axes::of(&[Axis::DpShard])
        }

        fn rank(&self) -> u32 {
            self.rank
        }

        fn members(&self) -> &[u32] {
            &self.members
        }

        fn watermarks(&self) -> Vec<Option<Watermark>> {
            let mark = |entered: &Option<u64>| entered.map(|entered| Watermark { entered, finished: 0 });
            self.entered.lock().unwrap().iter().map(mark).collect()
        }

        fn abort(&self, reason: &str) {
            self.aborted.lock().unwrap().push(reason.to_owned());
        }
    }

    fn missing(entered: &[Option<u64>]) -> Option<String> {
        let entered = Arc::new(Mutex::new(entered.to_vec()));
        let group = Fake { rank: 6, members: vec![4, 5, 6, 7], entered, ..Fake::default() };
        MeshGroup::new(Box::new(group)).missing().map(|missing| missing.to_string())
    }

    #[test]
    fn ranks_behind_are_named_and_invisible_ranks_are_not() {
        assert_eq!(
            missing(&[Some(15), Some(14), Some(15), Some(15)]).unwrap(),
            "rank 5 has not entered collective #14 on dp_shard"
        );
        assert_eq!(
            missing(&[Some(0), None, Some(1), Some(0)]).unwrap(),
            "ranks 4, 7 have not entered collective #0 on dp_shard"
        );
        assert_eq!(missing(&[Some(15), None, Some(15), Some(16)]), None);
        assert_eq!(
            missing(&[Some(15), Some(15), None, Some(15)]),
            None,
            "a rank that does not see itself knows nothing"
        );
        assert_eq!(missing(&[Some(0), Some(0), Some(0), Some(0)]), None);
    }
}
