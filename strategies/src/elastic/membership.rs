//! The coordinator's view of nodes and their workers.
//!
//! Invariants:
//! - `MEMBERSHIP-1` Only the latest report of a node's latest boot counts; older reports are rejected and change nothing.
//! - `MEMBERSHIP-2` A node is lost exactly when it has not reported for the detection time.
//! - `MEMBERSHIP-3` Only a supervisor's report proves that a process is dead: the report names a successor, or no longer
//!   lists the process, or comes from a boot after its start. Silence proves nothing.
//! - `MEMBERSHIP-4` An evicted worker does not take part again; its successor may.
//! - `MEMBERSHIP-5` A suspension of the coordinator does not count as silence of the nodes: they get half the detection
//!   time again. Nor does a report that arrived meanwhile prove that a worker hangs: a newer one may be waiting behind it. A
//!   worker that still hangs is in every later report of its node.
//! - `MEMBERSHIP-6` A worker on a failed device is evicted, like a hung one.
//! - `MEMBERSHIP-7` A node that the operator has declared gone is forgotten, and its workers up to then count as dead (`QUORUM-4`).

use super::devices::DeviceHealth;
use super::identity::{Incarnation, MemberId, NodeId, Stale, Worker, refuse_older};
use super::incident::{Cause, Culprit, Why};
use super::message::{MemberReport, Report};
use super::timing::Timing;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// A change of the members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A worker can take part.
    Joined(Worker),
    /// A worker has acknowledged a newer generation.
    Acknowledged(Worker),
    /// A worker can no longer take part.
    Lost {
        /// The worker.
        worker: Worker,
        /// Why.
        cause: Cause,
        /// What the driver of its device complains about, if anything.
        complaint: Option<String>,
        /// When it was last known to be healthy.
        healthy: Instant,
    },
    /// A node is draining.
    Drains(NodeId),
    /// A node that was not draining has started again.
    Restarted {
        /// The node.
        node: NodeId,
        /// How long its earlier boot reported.
        lived: Duration,
    },
}

/// Status of one rank process.
#[derive(Clone, Copy, Debug)]
pub enum Status<'a> {
    /// It takes part.
    Alive(&'a MemberReport),
    /// The process is gone (`MEMBERSHIP-3`).
    Dead,
    /// Its node is silent, or it is evicted: it may be alive.
    Unheard,
}

/// The nodes and workers that the coordinator knows, by their latest reports.
#[derive(Clone, Debug)]
pub struct Membership {
    timing: Timing,
    nodes: BTreeMap<NodeId, Node>,
    deadlines: BTreeSet<(Instant, NodeId)>,
    /// Time of the last call. Calls are due as often as ranks send heartbeats, so that a longer gap shows a suspension.
    awake: Instant,
    /// From when on reports are believed that a worker hangs (`MEMBERSHIP-5`).
    hangs_from: Instant,
    /// Evicted workers that may be alive.
    evicted: BTreeSet<Worker>,
    /// The last incarnation of nodes that are declared gone.
    gone: BTreeMap<NodeId, Incarnation>,
    changes: VecDeque<Change>,
}

#[derive(Clone, Debug)]
struct Node {
    boot: Incarnation,
    number: u64,
    /// Times of the first and the latest report of this boot.
    since: Instant,
    heard: Instant,
    silent: bool,
    draining: bool,
    devices: Vec<DeviceHealth>,
    slots: BTreeMap<u32, MemberReport>,
    /// The latest process ever reported for each slot.
    latest: BTreeMap<u32, Incarnation>,
}

impl Membership {
    /// A view without nodes.
    pub fn new(now: Instant, timing: Timing) -> Membership {
        Membership {
            timing,
            nodes: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            awake: now,
            hangs_from: now,
            evicted: BTreeSet::new(),
            gone: BTreeMap::new(),
            changes: VecDeque::new(),
        }
    }

    /// Checks that a report is the latest of its node (`MEMBERSHIP-1`).
    ///
    /// # Errors
    /// When it is not.
    pub fn check(&self, report: &Report) -> Result<(), Stale> {
        self.nodes.get(&report.node).map_or(Ok(()), |node| check_latest(node, report))
    }

    /// Handles a node's report.
    ///
    /// # Errors
    /// When it is not the latest report of that node (`MEMBERSHIP-1`). Nothing has changed.
    pub fn handle_report(&mut self, now: Instant, report: &Report) -> Result<(), Stale> {
        self.handle_timeout(now);
        let mut node = match self.nodes.remove(&report.node) {
            Some(node) => match check_latest(&node, report) {
                Ok(()) => node,
                Err(stale) => {
                    self.nodes.insert(report.node, node);
                    return Err(stale);
                }
            },
            None => Node {
                boot: report.boot,
                number: 0,
                since: now,
                heard: now,
                silent: false,
                draining: false,
                devices: vec![],
                slots: BTreeMap::new(),
                latest: BTreeMap::new(),
            },
        };
        self.deadlines.remove(&(node.heard + self.timing.detection_time, report.node));
        self.deadlines.insert((now + self.timing.detection_time, report.node));
        let healthy = node.heard;
        let returns = std::mem::replace(&mut node.silent, false);
        if report.boot > node.boot {
            if !node.draining {
                let lived = healthy.saturating_duration_since(node.since);
                self.changes.push_back(Change::Restarted { node: report.node, lived });
            }
            node.since = now;
        }
        if report.draining && !node.draining {
            self.changes.push_back(Change::Drains(report.node));
        }
        (node.boot, node.number, node.heard, node.draining) = (report.boot, report.number, now, report.draining);
        node.devices.clone_from(&report.devices);
        let before = std::mem::take(&mut node.slots);
        for member in &report.members {
            node.slots.insert(member.worker.member.slot, member.clone());
            node.latest.insert(member.worker.member.slot, member.worker.incarnation);
        }
        for old in before.values() {
            let gone = node.slots.get(&old.worker.member.slot).is_none_or(|new| new.worker != old.worker);
            if gone && !self.evicted.remove(&old.worker) && !returns {
                self.lose(old.worker, Why::Died, complaint(&node.devices, old), healthy);
            }
        }
        for member in &report.members {
            let old = before.get(&member.worker.member.slot).filter(|old| old.worker == member.worker);
            self.compare(now, old, member, &node.devices, returns, healthy);
        }
        self.nodes.insert(report.node, node);
        Ok(())
    }

    /// Handles the report of a node that may not take part: its processes are evicted, and it proves as any other that earlier
    /// ones are dead (`MEMBERSHIP-3`).
    ///
    /// # Errors
    /// As [`Membership::handle_report`].
    pub fn handle_refused(&mut self, now: Instant, report: &Report) -> Result<(), Stale> {
        self.check(report)?;
        self.evicted.extend(report.members.iter().map(|member| member.worker));
        self.handle_report(now, report)
    }

    /// Forgets a node that is declared gone with all incarnations up to `last` (`MEMBERSHIP-7`).
    pub fn declare_gone(&mut self, node: NodeId, last: Incarnation) {
        self.gone.insert(node, last);
        if self.nodes.get(&node).is_none_or(|known| known.boot > last) {
            return;
        }
        let Some(known) = self.nodes.remove(&node) else { return };
        self.deadlines.remove(&(known.heard + self.timing.detection_time, node));
        self.evicted.retain(|worker| worker.member.node != node);
        let cause = Cause { culprit: Culprit::Node(node), why: Why::Silent };
        for member in known.slots.into_values() {
            let (worker, healthy) = (member.worker, known.heard);
            self.changes.push_back(Change::Lost { worker, cause, complaint: None, healthy });
        }
    }

    /// The last incarnation of a node that is known: of its supervisor, or of a process in a slot of it.
    pub fn last_incarnation(&self, node: NodeId) -> Option<Incarnation> {
        let known = self.nodes.get(&node)?;
        known.latest.values().copied().chain([known.boot]).max()
    }

    /// Gives up nodes that are silent for too long (`MEMBERSHIP-2`).
    pub fn handle_timeout(&mut self, now: Instant) {
        if now >= self.awake + self.timing.heartbeat * 3 / 2 {
            self.oversleep(now);
        }
        self.awake = now.max(self.awake);
        while let Some(&(deadline, id)) = self.deadlines.first() {
            if now < deadline {
                break;
            }
            self.deadlines.pop_first();
            let node = self.nodes.get_mut(&id).expect("a deadline belongs to a node");
            node.silent = true;
            let cause = Cause { culprit: Culprit::Node(id), why: Why::Silent };
            for member in node.slots.values().filter(|member| !self.evicted.contains(&member.worker)) {
                self.changes.push_back(Change::Lost {
                    worker: member.worker,
                    cause,
                    complaint: None,
                    healthy: node.heard,
                });
            }
        }
    }

    /// When to call [`Membership::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        let wake = self.awake + self.timing.heartbeat;
        Some(self.deadlines.first().map_or(wake, |(deadline, _)| wake.min(*deadline)))
    }

    /// The next change.
    pub fn poll_change(&mut self) -> Option<Change> {
        self.changes.pop_front()
    }

    /// Evicts a worker that is not known to be dead; its node is to kill it (`MEMBERSHIP-4`).
    pub fn evict(&mut self, worker: Worker) {
        if matches!(self.status(worker), Status::Alive(_)) {
            self.evicted.insert(worker);
        }
    }

    /// Workers of a node that are to be killed.
    pub fn evictions(&self, node: NodeId) -> Vec<Worker> {
        let slot = |slot| Worker { member: MemberId { node, slot }, incarnation: Incarnation(0) };
        let all = Worker { incarnation: Incarnation(u64::MAX), ..slot(u32::MAX) };
        self.evicted.range(slot(0)..=all).copied().collect()
    }

    /// Status of one rank process.
    pub fn status(&self, worker: Worker) -> Status<'_> {
        if self.gone.get(&worker.member.node).is_some_and(|last| worker.incarnation <= *last) {
            return Status::Dead;
        }
        let Some(node) = self.nodes.get(&worker.member.node) else { return Status::Unheard };
        match node.slots.get(&worker.member.slot) {
            Some(member) if member.worker == worker => {
                if node.silent || self.evicted.contains(&worker) {
                    Status::Unheard
                } else {
                    Status::Alive(member)
                }
            }
            // A delayed report may be older than the worker and then proves nothing.
            _ => {
                let seen = node.latest.get(&worker.member.slot).is_some_and(|latest| *latest >= worker.incarnation);
                if seen || node.boot > worker.incarnation { Status::Dead } else { Status::Unheard }
            }
        }
    }

    /// All workers that take part, including those of draining nodes.
    pub fn alive(&self) -> impl Iterator<Item = &MemberReport> {
        let heard = self.nodes.values().filter(|node| !node.silent);
        heard.flat_map(|node| node.slots.values()).filter(|member| !self.evicted.contains(&member.worker))
    }

    /// Whether a node is draining.
    pub fn drains(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_some_and(|node| node.draining)
    }

    /// Whether any known node is silent, other than nodes that have left.
    pub fn any_silent(&self) -> bool {
        self.nodes.values().any(|node| node.silent && !(node.draining && node.slots.is_empty()))
    }

    /// The latest reported incarnation of a node's supervisor.
    pub fn boot(&self, node: NodeId) -> Option<Incarnation> {
        self.nodes.get(&node).map(|node| node.boot)
    }

    /// Whether a node is silent or unknown.
    pub fn is_silent(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_none_or(|node| node.silent)
    }

    /// Time of a node's last report.
    pub fn heard(&self, node: NodeId) -> Option<Instant> {
        self.nodes.get(&node).map(|node| node.heard)
    }

    /// The workers in a node's last report, whether they take part or not.
    pub fn members(&self, node: NodeId) -> impl Iterator<Item = &MemberReport> {
        self.nodes.get(&node).into_iter().flat_map(|node| node.slots.values())
    }

    /// The devices of a node.
    pub fn devices(&self, node: NodeId) -> &[DeviceHealth] {
        self.nodes.get(&node).map_or(&[], |node| &node.devices)
    }

    /// What the driver of a worker's device complains about, if anything.
    pub fn complaint(&self, worker: Worker) -> Option<String> {
        let node = self.nodes.get(&worker.member.node)?;
        let member = node.slots.get(&worker.member.slot).filter(|member| member.worker == worker)?;
        complaint(&node.devices, member)
    }

    /// All nodes that have ever reported.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.nodes.keys().copied()
    }

    /// `MEMBERSHIP-5`
    fn oversleep(&mut self, now: Instant) {
        let detection_time = self.timing.detection_time;
        self.hangs_from = now + self.timing.heartbeat;
        for (id, node) in self.nodes.iter_mut().filter(|(_, node)| !node.silent) {
            self.deadlines.remove(&(node.heard + detection_time, *id));
            node.heard = node.heard.max(now - detection_time / 2);
            self.deadlines.insert((node.heard + detection_time, *id));
        }
    }

    fn compare(
        &mut self,
        now: Instant,
        old: Option<&MemberReport>,
        member: &MemberReport,
        devices: &[DeviceHealth],
        returns: bool,
        healthy: Instant,
    ) {
        if self.evicted.contains(&member.worker) {
            return;
        }
        if old.is_none() || returns {
            self.changes.push_back(Change::Joined(member.worker));
        }
        if old.is_none_or(|old| old.generation < member.generation) {
            self.changes.push_back(Change::Acknowledged(member.worker));
        }
        // MEMBERSHIP-6
        if device(devices, member).is_some_and(|device| device.fault.is_some()) {
            self.evicted.insert(member.worker);
            self.lose(member.worker, Why::DeviceFailed, complaint(devices, member), healthy);
        } else if member.hangs && now >= self.hangs_from {
            self.evicted.insert(member.worker);
            // The node has reported since, after waiting this long for the worker's heartbeat.
            let silent = now.checked_sub(self.timing.suspicion).unwrap_or(healthy);
            self.lose(member.worker, Why::Hangs, complaint(devices, member), healthy.min(silent));
        }
    }

    fn lose(&mut self, worker: Worker, why: Why, complaint: Option<String>, healthy: Instant) {
        let cause = Cause { culprit: Culprit::Worker(worker), why };
        self.changes.push_back(Change::Lost { worker, cause, complaint, healthy });
    }
}

fn device<'a>(devices: &'a [DeviceHealth], member: &MemberReport) -> Option<&'a DeviceHealth> {
    devices.get(member.device? as usize)
}

fn complaint(devices: &[DeviceHealth], member: &MemberReport) -> Option<String> {
    device(devices, member).and_then(DeviceHealth::complaint)
}

/// `MEMBERSHIP-1`
fn check_latest(node: &Node, report: &Report) -> Result<(), Stale> {
    refuse_older(report.boot, node.boot, |found, have| Stale::Incarnation { found, have })?;
    if report.boot == node.boot && report.number <= node.number {
        return Err(Stale::Overtaken { found: report.number, have: node.number });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::commit::CommitState;
    use crate::elastic::identity::{Generation, JobId};
    use crate::elastic::message::MemberPhase;
    use proptest::prelude::*;

    fn report(node: u32, boot: u64, number: u64, incarnations: &[u64]) -> Report {
        let member = |(slot, incarnation): (usize, &u64)| MemberReport {
            worker: worker(node, slot as u32, *incarnation),
            pid: None,
            address: None,
            device: None,
            hangs: false,
            generation: Generation(0),
            phase: MemberPhase::Stopped,
            entered: Default::default(),
            progress: Default::default(),
            broken: None,
            commit_state: CommitState::default(),
            holds: vec![],
            saved: None,
            unsaved: None,
            failure: None,
            settled: None,
            fault: None,
        };
        Report {
            job: JobId(1),
            node: NodeId(node),
            boot: Incarnation(boot),
            number,
            desired_state: Default::default(),
            draining: false,
            n_failed_starts: 0,
            inputs: vec![],
            devices: vec![],
            members: incarnations.iter().enumerate().map(member).collect(),
        }
    }

    fn worker(node: u32, slot: u32, incarnation: u64) -> Worker {
        Worker { member: MemberId { node: NodeId(node), slot }, incarnation: Incarnation(incarnation) }
    }

    fn lost(membership: &mut Membership) -> Vec<(Worker, Why)> {
        let changes = std::iter::from_fn(|| membership.poll_change());
        changes
            .filter_map(|c| if let Change::Lost { worker, cause, .. } = c { Some((worker, cause.why)) } else { None })
            .collect()
    }

    // MEMBERSHIP-2
    #[test]
    fn silent_node_is_lost_at_its_deadline_and_returns() {
        let start = Instant::now();
        let mut membership = Membership::new(start, Timing::default());
        membership.handle_report(start, &report(0, 1, 1, &[7])).unwrap();
        let deadline = start + Duration::from_secs(1);

        (1..10).for_each(|i| membership.handle_timeout(start + Duration::from_millis(i * 100)));
        assert_eq!(membership.poll_timeout(), Some(deadline));
        membership.handle_timeout(deadline - Duration::from_millis(1));
        assert_eq!(lost(&mut membership), []);
        membership.handle_timeout(deadline);
        assert_eq!(lost(&mut membership), [(worker(0, 0, 7), Why::Silent)]);
        assert!(matches!(membership.status(worker(0, 0, 7)), Status::Unheard));
        membership.handle_report(deadline, &report(0, 1, 2, &[7])).unwrap();

        assert!(matches!(membership.status(worker(0, 0, 7)), Status::Alive(_)));
    }

    // MEMBERSHIP-5
    #[test]
    fn delayed_coordinator_does_not_evict_members() {
        let start = Instant::now();
        let mut membership = Membership::new(start, Timing::default());
        membership.handle_report(start, &report(0, 1, 1, &[7])).unwrap();

        membership.handle_timeout(start + Duration::from_secs(5));
        assert_eq!(lost(&mut membership), []);
        (50..=55).for_each(|i| membership.handle_timeout(start + Duration::from_millis(i * 100)));

        assert_eq!(lost(&mut membership), [(worker(0, 0, 7), Why::Silent)]);
    }

    // MEMBERSHIP-3
    #[test]
    fn successor_or_a_new_boot_proves_death() {
        let start = Instant::now();
        let mut membership = Membership::new(start, Timing::default());
        membership.handle_report(start, &report(0, 1, 1, &[7, 7])).unwrap();
        membership.handle_report(start, &report(0, 1, 2, &[7, 8])).unwrap();

        assert_eq!(lost(&mut membership), [(worker(0, 1, 7), Why::Died)]);
        membership.handle_report(start, &report(0, 9, 1, &[])).unwrap();
        assert_eq!(lost(&mut membership), [(worker(0, 0, 7), Why::Died), (worker(0, 1, 8), Why::Died)]);
        assert!(matches!(membership.status(worker(0, 0, 7)), Status::Dead));
        assert!(matches!(membership.status(worker(0, 0, 9)), Status::Unheard), "it may be younger than the report");
        assert!(matches!(membership.status(worker(5, 0, 7)), Status::Unheard));
    }

    // MEMBERSHIP-4
    #[test]
    fn hung_worker_is_evicted_until_it_has_a_successor() {
        let timing = Timing::default();
        let start = Instant::now();
        let now = start + timing.suspicion / 2;
        let mut membership = Membership::new(start, timing);
        // The node keeps reporting while the worker is silent.
        membership.handle_report(start, &report(0, 1, 1, &[7])).unwrap();
        let mut hanging = report(0, 1, 2, &[7]);
        hanging.members[0].hangs = true;
        membership.handle_report(now, &hanging).unwrap();

        let changes: Vec<Change> = std::iter::from_fn(|| membership.poll_change()).collect();
        let of_it = |change: &Change| match change {
            Change::Lost { worker, cause, healthy, .. } => Some((*worker, cause.why, *healthy)),
            _ => None,
        };
        let expected = (worker(0, 0, 7), Why::Hangs, now - timing.suspicion);
        assert_eq!(changes.iter().filter_map(of_it).collect::<Vec<_>>(), [expected]);
        membership.handle_report(now, &report(0, 1, 3, &[7])).unwrap();
        assert_eq!(membership.evictions(NodeId(0)), [worker(0, 0, 7)]);
        assert_eq!(membership.alive().count(), 0);
        membership.handle_report(now, &report(0, 1, 4, &[8])).unwrap();
        assert_eq!(membership.evictions(NodeId(0)), []);
        assert_eq!(membership.alive().count(), 1);
    }

    // MEMBERSHIP-5
    #[test]
    fn report_that_waited_for_a_suspended_coordinator_evicts_no_worker_that_has_recovered() {
        let timing = Timing::default();
        let start = Instant::now();
        let hanging = |number| {
            let mut report = report(0, 1, number, &[7]);
            report.members[0].hangs = true;
            report
        };
        for hangs_on in [false, true] {
            let mut membership = Membership::new(start, timing);
            membership.handle_report(start, &report(0, 1, 1, &[7])).unwrap();
            let wakes = start + timing.detection_time;

            membership.handle_report(wakes, &hanging(2)).unwrap();
            let next = |number| if hangs_on { hanging(number) } else { report(0, 1, number, &[7]) };
            membership.handle_report(wakes, &next(3)).unwrap();
            assert_eq!(lost(&mut membership), []);

            membership.handle_report(wakes + timing.heartbeat, &next(4)).unwrap();
            assert_eq!(lost(&mut membership).len(), usize::from(hangs_on), "a worker that still hangs is evicted");
        }
    }

    // MEMBERSHIP-6
    #[test]
    fn worker_on_a_failed_device_is_evicted_with_the_complaint_of_the_driver() {
        let start = Instant::now();
        let mut membership = Membership::new(start, Timing::default());
        let on_devices = |number, incarnation, fault: Option<&str>| {
            let mut report = report(0, 1, number, &[7, incarnation]);
            let fault = fault.map(str::to_owned);
            report.devices = vec![DeviceHealth { name: "G".into(), id: "u".into(), fault, ..DeviceHealth::default() }];
            report.members[1].device = Some(0);
            report
        };
        membership.handle_report(start, &on_devices(1, 7, None)).unwrap();
        while membership.poll_change().is_some() {}

        membership.handle_report(start, &on_devices(2, 7, Some("Xid 79"))).unwrap();
        membership.handle_report(start, &on_devices(3, 7, Some("Xid 79"))).unwrap();

        let changes: Vec<Change> = std::iter::from_fn(|| membership.poll_change()).collect();
        let cause = Cause { culprit: Culprit::Worker(worker(0, 1, 7)), why: Why::DeviceFailed };
        let complaint = Some("G u: Xid 79".to_owned());
        assert_eq!(changes, [Change::Lost { worker: worker(0, 1, 7), cause, complaint, healthy: start }]);
        assert_eq!(membership.evictions(NodeId(0)), [worker(0, 1, 7)]);
    }

    proptest! {
        // MEMBERSHIP-1
        #[test]
        fn reports_out_of_order_change_nothing(order in prop::collection::vec((1u64..4, 1u64..6), 1..40)) {
            let start = Instant::now();
            let mut membership = Membership::new(start, Timing::default());
            let mut latest = (0, 0);
            for (boot, number) in order {
                let accepted = membership.handle_report(start, &report(0, boot, number, &[boot * 100 + number])).is_ok();

                prop_assert_eq!(accepted, (boot, number) > latest);
                latest = latest.max((boot, number));
                prop_assert!(matches!(membership.status(worker(0, 0, latest.0 * 100 + latest.1)), Status::Alive(_)));
            }
        }
    }
}
