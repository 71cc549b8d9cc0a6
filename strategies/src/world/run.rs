//! Runs all ranks (`WORLD-1`, `WORLD-2`), one of each class, in virtual time.
//!
//! A rank has a compute stream, which its trace occupies, and a communication stream, which its collectives occupy one
//! at a time. A collective begins as soon as all members have started it and their communication streams are free; of
//! several waiting collectives, the one that was ready first. Events are handled in the order of time, and no event
//! causes an earlier one, so no decision has to be revised.
//!
//! Where ranks move the bytes themselves ([`Mover::Ranks`]) there is no communication stream: a rank does its share of a
//! collective when it waits for it, once all members have started. A receiver copies, a sender does nothing. (In
//! reality, it also waits for the slowest member's share; members of a group have equal shares.)
//!
//! Whether all ranks finish does not depend on any duration: a start never blocks, so progress is monotone.
//! The check for deadlocks is a run with zero durations.

use super::deadlock::cycle;
use super::projection::{Projection, Stream};
use super::span::{Span, What};
use super::symmetry::Classes;
use super::timeline::{RankTimes, Timeline};
use super::{Collective, Kind, Post, Rank, Step, WorldError, WorldTraces};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

/// Who moves the bytes of collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mover {
    /// Links, while ranks compute.
    #[default]
    Links,
    /// Ranks, while they wait.
    Ranks,
}

/// What the time of a collective depends on.
pub struct Links<'a> {
    /// Who moves the bytes.
    pub mover: Mover,
    /// Node of a rank.
    pub node: &'a dyn Fn(u32) -> u32,
    /// Time of a collective, given the nodes of all members; for a transfer, those of sender and receiver.
    pub duration: &'a dyn Fn(&Post, &[u32]) -> Duration,
}

/// The members of a stream: all members of a group class, or two of them that have transfers.
struct Party {
    classes: Vec<u32>,
    nodes: Vec<u32>,
}

/// One collective of a party.
#[derive(Clone)]
struct Instance<'a> {
    party: u32,
    /// Number of classes that have not started it.
    n_missing: u32,
    /// When the last class started it.
    ready: u64,
    end: Option<u64>,
    post: Option<&'a Post>,
}

/// One class of ranks and its progress through its trace. Times are nanoseconds.
struct Runner<'a> {
    steps: &'a [Step],
    projection: &'a Projection,
    /// First instance of each of the projection's streams.
    bases: Vec<u32>,
    pc: usize,
    clock: u64,
    link_free: u64,
    blocked_on: Option<u32>,
    times: RankTimes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Begin(u32),
    Resume(u32),
}

struct Run<'a> {
    parties: Vec<Party>,
    instances: Vec<Instance<'a>>,
    runners: Vec<Runner<'a>>,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    links: &'a Links<'a>,
    spans: bool,
}

pub(super) fn run<'a>(
    world: &'a WorldTraces,
    projections: &'a [Projection],
    classes: &Classes,
    links: &'a Links<'a>,
    spans: bool,
) -> Result<Timeline, WorldError> {
    let mut run = Run::new(world, projections, classes, links, spans);
    for class in 0..run.runners.len() {
        run.events.push(Reverse((0, Event::Resume(class as u32))));
    }
    while let Some(Reverse((now, event))) = run.events.pop() {
        match event {
            Event::Resume(class) => run.advance(class),
            Event::Begin(instance) => run.begin(instance, now),
        }
    }
    if run.runners.iter().any(|r| r.pc < r.steps.len()) {
        let reached: Vec<usize> = run.runners.iter().map(|r| r.pc).collect();
        return Err(WorldError::Deadlock { cycle: cycle(world, projections, classes, &reached) });
    }
    let makespan = run.runners.iter().map(|r| r.times.finish).max().unwrap_or_default();
    let times = run.runners.into_iter().map(|r| r.times).collect();
    let (class_of, representatives) = (classes.of_rank.clone(), classes.ranks.clone());
    Ok(Timeline { makespan, classes: times, class_of, representatives })
}

impl<'a> Run<'a> {
    fn new(
        world: &'a WorldTraces,
        projections: &'a [Projection],
        classes: &Classes,
        links: &'a Links<'a>,
        spans: bool,
    ) -> Run<'a> {
        let runner = |rank: &Rank| {
            let trace = world.binding(*rank).trace;
            let projection = &projections[trace.0 as usize];
            let bases = vec![0; projection.streams.len()];
            let (steps, times) = (world.steps(trace), RankTimes::default());
            Runner { steps, projection, bases, pc: 0, clock: 0, link_free: 0, blocked_on: None, times }
        };
        let runners = classes.ranks.iter().map(runner).collect();
        let mut run =
            Run { parties: Vec::new(), instances: Vec::new(), runners, events: BinaryHeap::new(), links, spans };
        for group in 0..classes.groups.len() {
            run.add_group(world, classes, group);
        }
        run
    }

    /// Adds the instances of one class of groups.
    fn add_group(&mut self, world: &WorldTraces, classes: &Classes, group: usize) {
        let id = classes.groups[group];
        let members = world.members(id);
        let class = |position: usize| classes.of_rank[members[position].0 as usize];
        // Where the instances of a stream begin; transfers are named by sender, receiver and channel.
        let mut bases: BTreeMap<Option<(u32, u32, u32)>, u32> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        for position in (0..members.len()).filter(|position| seen.insert(class(*position))) {
            let slot = world.binding(members[position]).groups.iter().position(|g| *g == id);
            let projection = self.runners[class(position) as usize].projection;
            for (index, ((known_as, stream), posted)) in projection.streams.iter().enumerate() {
                if Some(known_as.0 as usize) != slot {
                    continue;
                }
                let own = position as u32;
                let (name, parts) = match *stream {
                    Stream::All => (None, (0..members.len()).collect()),
                    Stream::To(to, channel) => (Some((own, to, channel)), vec![position, to as usize]),
                    Stream::From(from, channel) => (Some((from, own, channel)), vec![from as usize, position]),
                };
                let base = *bases.entry(name).or_insert_with(|| {
                    let nodes = parts.iter().map(|p| (self.links.node)(members[*p].0)).collect();
                    let classes: BTreeSet<u32> = parts.iter().map(|p| class(*p)).collect();
                    self.add_party(Party { classes: classes.into_iter().collect(), nodes }, posted.len())
                });
                self.runners[class(position) as usize].bases[index] = base;
            }
        }
    }

    fn add_party(&mut self, party: Party, n_instances: usize) -> u32 {
        let base = self.instances.len();
        let (index, n_missing) = (self.parties.len() as u32, party.classes.len() as u32);
        let instance = Instance { party: index, n_missing, ready: 0, end: None, post: None };
        self.instances.resize(base + n_instances, instance);
        self.parties.push(party);
        base as u32
    }

    /// Runs a class until it has to wait.
    fn advance(&mut self, class: u32) {
        let runner = &mut self.runners[class as usize];
        runner.blocked_on = None;
        while let Some(step) = runner.steps.get(runner.pc) {
            match step {
                Step::Compute { name, microbatch, cost } => {
                    let start = runner.clock;
                    runner.clock += cost.as_nanos() as u64;
                    runner.times.compute += *cost;
                    if self.spans {
                        let what = What::Compute { name, microbatch: *microbatch };
                        runner.times.spans.push(span(what, start, runner.clock));
                    }
                }
                Step::Start(post) => {
                    let id = runner.instance();
                    let instance = &mut self.instances[id as usize];
                    instance.post = Some(post);
                    instance.n_missing -= 1;
                    instance.ready = instance.ready.max(runner.clock);
                    if instance.n_missing == 0 {
                        self.events.push(Reverse((instance.ready, Event::Begin(id))));
                    }
                }
                Step::Await(collective) => {
                    let id = runner.instance();
                    let Some(end) = self.instances[id as usize].end else {
                        runner.blocked_on = Some(id);
                        return;
                    };
                    let began = runner.clock;
                    runner.clock = runner.clock.max(end);
                    if self.links.mover == Mover::Ranks {
                        let party = &self.parties[self.instances[id as usize].party as usize];
                        let post = self.instances[id as usize].post.expect("all members have started it");
                        let share = match collective.kind {
                            Kind::Send { .. } => Duration::ZERO,
                            _ => (self.links.duration)(post, &party.nodes),
                        };
                        runner.clock += share.as_nanos() as u64;
                        runner.times.communication += share;
                        if self.spans {
                            let what = party.carries(*collective, post);
                            runner.times.spans.push(span(what, began, runner.clock));
                        }
                    }
                    runner.times.exposed += Duration::from_nanos(runner.clock - began);
                }
            }
            runner.pc += 1;
        }
        runner.times.finish = Duration::from_nanos(runner.clock);
    }

    /// Begins a collective that all members have started: it occupies their communication streams.
    fn begin(&mut self, id: u32, now: u64) {
        let instance = &mut self.instances[id as usize];
        let party = &self.parties[instance.party as usize];
        let post = instance.post.expect("a collective begins after its members have started it");
        if self.links.mover == Mover::Ranks {
            instance.end = Some(now);
            let waiting = party.classes.iter().filter(|c| self.runners[**c as usize].blocked_on == Some(id));
            self.events.extend(waiting.map(|class| Reverse((now, Event::Resume(*class)))));
            return;
        }
        let free = party.classes.iter().map(|c| self.runners[*c as usize].link_free).max().unwrap_or(0);
        let start = now.max(free);
        let duration = (self.links.duration)(post, &party.nodes);
        let end = start + duration.as_nanos() as u64;
        instance.end = Some(end);
        for class in &party.classes {
            let runner = &mut self.runners[*class as usize];
            runner.link_free = end;
            runner.times.communication += duration;
            if runner.blocked_on == Some(id) {
                self.events.push(Reverse((end.max(runner.clock), Event::Resume(*class))));
            }
            if self.spans {
                runner.times.spans.push(span(party.carries(post.collective, post), start, end));
            }
        }
    }
}

impl Party {
    /// A collective of the party, for a span.
    fn carries(&self, collective: Collective, post: &Post) -> What {
        What::Collective { collective, n_members: self.nodes.len(), size_bytes: post.size_bytes() }
    }
}

impl Runner<'_> {
    /// The collective that the current step starts or awaits.
    fn instance(&self) -> u32 {
        let (stream, number) = self.projection.names[self.pc].expect("the step is a start or an await");
        self.bases[stream as usize] + number
    }
}

fn span(what: What, start: u64, end: u64) -> Span {
    Span { what, start: Duration::from_nanos(start), end: Duration::from_nanos(end) }
}
