//! The streams of a trace: the collectives of each of its groups, in order.

use super::{Collective, GroupSlot, Kind, Post, Step};
use std::collections::BTreeMap;

/// A sequence of collectives within a group, from a member's view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stream {
    /// Of the whole group.
    All,
    /// Transfers to a member, by a channel.
    To(u32, u32),
    /// Transfers from a member, by a channel.
    From(u32, u32),
}

/// A collective of a trace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posted {
    /// Position of its start in the trace.
    pub start: usize,
    /// Position of its await.
    pub end: usize,
}

/// The streams of a trace.
#[derive(Debug, Default)]
pub(super) struct Projection {
    /// Collectives of each stream, in order.
    pub streams: BTreeMap<(GroupSlot, Stream), Vec<Posted>>,
    /// For each step that starts or awaits: stream (index in the order of `streams`) and number on it.
    pub names: Vec<Option<(u32, u32)>>,
}

/// A fault of a single trace.
pub(super) enum Fault {
    Sequence { step: usize, collective: Collective, expected: u32 },
    NotInFlight { step: usize, collective: Collective },
    NeverAwaited { step: usize, collective: Collective },
}

impl Stream {
    pub(super) const fn of(kind: Kind) -> Stream {
        match kind {
            Kind::Send { to, channel } => Stream::To(to, channel),
            Kind::Recv { from, channel } => Stream::From(from, channel),
            _ => Stream::All,
        }
    }
}

impl Projection {
    /// Extracts the streams and checks everything that a single trace shows.
    pub(super) fn of(steps: &[Step]) -> Result<Projection, Fault> {
        let mut streams: BTreeMap<(GroupSlot, Stream), Vec<Posted>> = BTreeMap::new();
        for (step, s) in steps.iter().enumerate() {
            match s {
                Step::Compute { .. } => {}
                Step::Start(Post { collective, .. }) => {
                    let posted = streams.entry(key(collective)).or_default();
                    let expected = posted.len() as u32;
                    if collective.sequence != expected {
                        return Err(Fault::Sequence { step, collective: *collective, expected });
                    }
                    posted.push(Posted { start: step, end: usize::MAX });
                }
                Step::Await(collective) => {
                    let posted =
                        streams.get_mut(&key(collective)).and_then(|p| p.get_mut(collective.sequence as usize));
                    let fault = Fault::NotInFlight { step, collective: *collective };
                    let Some(posted) = posted else { return Err(fault) };
                    if posted.end != usize::MAX || post(steps, posted).collective != *collective {
                        return Err(fault);
                    }
                    posted.end = step;
                }
            }
        }
        if let Some(left) = streams.values().flatten().find(|p| p.end == usize::MAX) {
            return Err(Fault::NeverAwaited { step: left.start, collective: post(steps, left).collective });
        }
        let mut names = vec![None; steps.len()];
        for (stream, posted) in streams.values().enumerate() {
            for (number, p) in posted.iter().enumerate() {
                let name = Some((stream as u32, number as u32));
                (names[p.start], names[p.end]) = (name, name);
            }
        }
        Ok(Projection { streams, names })
    }

    /// The collectives of one stream.
    pub(super) fn stream(&self, slot: GroupSlot, stream: Stream) -> &[Posted] {
        self.streams.get(&(slot, stream)).map_or(&[], Vec::as_slice)
    }

    /// The streams of one group.
    pub(super) fn streams_of(&self, slot: GroupSlot) -> impl Iterator<Item = (Stream, &[Posted])> {
        let all = (slot, Stream::All)..=(slot, Stream::From(u32::MAX, u32::MAX));
        self.streams.range(all).map(|((_, stream), posted)| (*stream, posted.as_slice()))
    }

    /// Whether the trace has transfers within a group, so that positions in it matter.
    pub(super) fn has_transfers(&self, slot: GroupSlot) -> bool {
        self.streams_of(slot).any(|(stream, _)| stream != Stream::All)
    }
}

/// The post of a start.
pub(super) fn post<'a>(steps: &'a [Step], posted: &Posted) -> &'a Post {
    match &steps[posted.start] {
        Step::Start(post) => post,
        _ => unreachable!("`Posted::start` is the position of a start"),
    }
}

fn key(collective: &Collective) -> (GroupSlot, Stream) {
    (collective.group, Stream::of(collective.kind))
}
