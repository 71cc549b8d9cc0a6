//! Random worlds: worlds made from one global order pass, one change on one rank is found, and a run of classes gives the
//! times of a run of single ranks.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// A world as a list of traces, easy to change in one place.
#[derive(Clone, Debug)]
struct Draft {
    groups: Vec<Vec<u32>>,
    traces: Vec<Vec<Step>>,
}

/// One collective of the global order. Each member awaits it after starting `lag` more of its own.
#[derive(Clone, Debug)]
struct Issue {
    group: usize,
    kind: u8,
    n_elements: u64,
    from: usize,
    to: usize,
    lag: usize,
}

fn issues() -> impl Strategy<Value = (u32, Vec<Vec<u32>>, Vec<Issue>)> {
    let issue = (0usize..64, 0u8..8, 1u64..5, 0usize..64, 0usize..64, 0usize..4);
    let issue =
        issue.prop_map(|(group, kind, n_elements, from, to, lag)| Issue { group, kind, n_elements, from, to, lag });
    let masks = proptest::collection::vec(1u32..256, 1..5);
    (2u32..9, masks, proptest::collection::vec(issue, 1..40)).prop_map(|(n, masks, issues)| {
        let members = |mask: u32| (0..n).filter(|r| mask >> r & 1 == 1).collect::<Vec<u32>>();
        let mut groups: Vec<Vec<u32>> = masks.into_iter().map(members).filter(|g| g.len() > 1).collect();
        groups.push((0..n).collect());
        groups.sort();
        groups.dedup();
        (n, groups, issues)
    })
}

/// The kind of an issue for the member at `position`; `None` for a transfer between other members.
fn kind_of(issue: &Issue, position: usize, size: usize) -> Option<Kind> {
    let (from, to) = (issue.from % size, issue.to % size);
    Some(match issue.kind {
        0 => Kind::AllReduce,
        1 => Kind::ReduceScatter,
        2 => Kind::AllGather,
        3 => Kind::AllToAll,
        4 => Kind::Broadcast { root: from as u32 },
        5 => Kind::Shift { by: issue.lag as i32 - 1 },
        _ if from == to => return None,
        _ if position == from => Kind::Send { to: to as u32, channel: 0 },
        _ if position == to => Kind::Recv { from: from as u32, channel: 0 },
        _ => return None,
    })
}

/// Every rank starts its collectives in the order of `issues` and awaits each after `lag` more of its own: never a
/// deadlock, since the earliest unfinished collective has been started by all.
fn draft(n: u32, groups: &[Vec<u32>], issues: &[Issue]) -> Draft {
    let mut traces = Vec::new();
    for rank in 0..n {
        let mut steps = Vec::new();
        let mut in_flight: Vec<(usize, Collective)> = Vec::new();
        let mut numbers: BTreeMap<(u32, Option<Kind>), u32> = BTreeMap::new();
        for issue in issues {
            let group = issue.group % groups.len();
            let Some(position) = groups[group].iter().position(|r| *r == rank) else { continue };
            let Some(kind) = kind_of(issue, position, groups[group].len()) else { continue };
            let slot = groups[..group].iter().filter(|g| g.contains(&rank)).count() as u32;
            let is_transfer = matches!(kind, Kind::Send { .. } | Kind::Recv { .. });
            let number = numbers.entry((slot, is_transfer.then_some(kind))).or_default();
            let post = on(slot, *number, kind, issue.n_elements);
            *number += 1;
            steps.push(compute(MICRO * issue.n_elements as u32));
            in_flight.push((issue.lag, post.collective));
            steps.push(Step::Start(post));
            for (lag, collective) in std::mem::take(&mut in_flight) {
                match lag.checked_sub(1) {
                    Some(lag) => in_flight.push((lag, collective)),
                    None => steps.push(Step::Await(collective)),
                }
            }
        }
        steps.extend(in_flight.into_iter().map(|(_, collective)| Step::Await(collective)));
        traces.push(steps);
    }
    Draft { groups: groups.to_vec(), traces }
}

impl Draft {
    fn world(&self) -> WorldTraces {
        let groups: Vec<&[u32]> = self.groups.iter().map(Vec::as_slice).collect();
        world(&groups, self.traces.clone())
    }

    /// Positions of the starts of one rank.
    fn starts(&self, rank: usize) -> Vec<usize> {
        let steps = self.traces[rank].iter().enumerate();
        steps.filter(|(_, s)| matches!(s, Step::Start(_))).map(|(i, _)| i).collect()
    }

    fn post(&mut self, rank: usize, step: usize) -> &mut Post {
        match &mut self.traces[rank][step] {
            Step::Start(post) => post,
            other => panic!("{other:?} is not a start"),
        }
    }

    /// Changes what a start posts, and its await with it.
    fn change(&mut self, rank: usize, step: usize, change: impl Fn(&mut Post)) {
        let before = self.post(rank, step).collective;
        change(self.post(rank, step));
        let after = self.post(rank, step).collective;
        for s in &mut self.traces[rank] {
            if *s == Step::Await(before) {
                *s = Step::Await(after);
            }
        }
    }

    /// Takes a collective out of one rank's trace and closes the gap in the numbers of its stream.
    fn drop_collective(&mut self, rank: usize, step: usize) {
        let gone = self.post(rank, step).collective;
        self.traces[rank].retain(|s| !matches!(s, Step::Start(p) if p.collective == gone) && *s != Step::Await(gone));
        let is_transfer = |k: Kind| matches!(k, Kind::Send { .. } | Kind::Recv { .. });
        let later = |c: &Collective| {
            let stream = if is_transfer(gone.kind) { c.kind == gone.kind } else { !is_transfer(c.kind) };
            c.group == gone.group && stream && c.sequence > gone.sequence
        };
        for step in &mut self.traces[rank] {
            match step {
                Step::Start(Post { collective, .. }) | Step::Await(collective) if later(collective) => {
                    collective.sequence -= 1;
                }
                _ => {}
            }
        }
    }

    /// Whether all ranks finish, if they run until none can advance.
    fn finishes(&self) -> bool {
        let name = |rank: usize, c: &Collective| {
            let bound: Vec<&Vec<u32>> = self.groups.iter().filter(|g| g.contains(&(rank as u32))).collect();
            let group = bound[c.group.0 as usize];
            let own = group.iter().position(|r| *r == rank as u32).unwrap() as u32;
            let (pair, n_parties) = match c.kind {
                Kind::Send { to, .. } => (Some((own, to)), 2),
                Kind::Recv { from, .. } => (Some((from, own)), 2),
                _ => (None, group.len()),
            };
            ((group.clone(), pair, c.sequence), n_parties)
        };
        let mut started: BTreeMap<_, usize> = BTreeMap::new();
        let mut reached = vec![0; self.traces.len()];
        let mut moved = true;
        while moved {
            moved = false;
            for (rank, trace) in self.traces.iter().enumerate() {
                while let Some(step) = trace.get(reached[rank]) {
                    match step {
                        Step::Compute { .. } => {}
                        Step::Start(post) => *started.entry(name(rank, &post.collective).0).or_default() += 1,
                        Step::Await(collective) => {
                            let (name, n_parties) = name(rank, collective);
                            if started.get(&name) != Some(&n_parties) {
                                break;
                            }
                        }
                    }
                    reached[rank] += 1;
                    moved = true;
                }
            }
        }
        self.traces.iter().zip(&reached).all(|(trace, reached)| trace.len() == *reached)
    }
}

fn drafts() -> impl Strategy<Value = Draft> {
    issues().prop_map(|(n, groups, issues)| draft(n, &groups, &issues))
}

/// A draft, and one of its starts as `(rank, step)`, if it has any.
fn with_a_start() -> impl Strategy<Value = (Draft, Option<(usize, usize)>)> {
    (drafts(), any::<prop::sample::Index>()).prop_map(|(draft, index)| {
        let starts = |rank: usize| draft.starts(rank).into_iter().map(move |step| (rank, step));
        let all: Vec<(usize, usize)> = (0..draft.traces.len()).flat_map(starts).collect();
        let one = (!all.is_empty()).then(|| *index.get(&all));
        (draft, one)
    })
}

/// Durations that depend on the size, the number of members and their nodes.
fn links(f: impl FnOnce(&Links<'_>) -> Timeline) -> Timeline {
    let node = |rank: u32| rank / 3;
    let duration = |post: &Post, nodes: &[u32]| {
        let far = nodes.iter().any(|n| *n != nodes[0]);
        MICRO * (post.size_bytes() as u32 + nodes.len() as u32) * if far { 3 } else { 1 }
    };
    f(&Links { mover: Mover::Links, node: &node, duration: &duration })
}

proptest! {
    #[test]
    fn ranks_with_one_collective_order_pass_verification(draft in drafts()) {
        prop_assert_eq!(draft.world().verify(), Ok(()));
    }

    #[test]
    fn changed_size_is_caught((mut draft, start) in with_a_start()) {
        if let Some((rank, step)) = start {
            draft.change(rank, step, |post| post.tensors[0].n_elements += 1);
            prop_assert!(matches!(draft.world().verify(), Err(WorldError::Differ(_))));
        }
    }

    #[test]
    fn changed_element_type_or_unit_is_caught((draft, start) in with_a_start()) {
        if let Some((rank, step)) = start {
            let (mut typed, mut cut) = (draft.clone(), draft);
            typed.change(rank, step, |post| post.tensors[0].dtype = DType::Bf16);
            cut.change(rank, step, |post| post.collective.unit = 2);
            prop_assert!(matches!(typed.world().verify(), Err(WorldError::Differ(_))));
            prop_assert!(matches!(cut.world().verify(), Err(WorldError::Differ(_))));
        }
    }

    #[test]
    fn dropped_collective_is_caught((mut draft, start) in with_a_start()) {
        if let Some((rank, step)) = start {
            draft.drop_collective(rank, step);
            prop_assert!(matches!(draft.world().verify(), Err(WorldError::Differ(_))));
        }
    }

    #[test]
    fn two_swapped_collectives_are_caught((mut draft, start) in with_a_start(), next in 1usize..4) {
        let Some((rank, step)) = start else { return Ok(()) };
        let first = draft.post(rank, step).clone();
        let same_stream = |p: &Post| p.collective.group == first.collective.group
            && p.collective.kind.peer_kind() == first.collective.kind.peer_kind();
        let starts = draft.starts(rank);
        let others = starts.iter().filter(|s| **s > step).filter(|s| same_stream(draft.clone().post(rank, **s)));
        let Some(other) = others.copied().nth(next - 1) else { return Ok(()) };
        let second = draft.post(rank, other).clone();
        let exchanged = |post: &Post, number: u32| Post {
            collective: Collective { sequence: number, ..post.collective },
            tensors: post.tensors.clone(),
        };
        let differ = exchanged(&first, 0) != exchanged(&second, 0);

        draft.change(rank, step, |post| *post = exchanged(&second, first.collective.sequence));
        draft.change(rank, other, |post| *post = exchanged(&first, second.collective.sequence));

        prop_assert_eq!(matches!(draft.world().verify(), Err(WorldError::Differ(_))), differ);
    }

    #[test]
    fn send_that_became_a_receive_is_caught((mut draft, start) in with_a_start()) {
        let Some((rank, step)) = start else { return Ok(()) };
        let turned = match draft.post(rank, step).collective.kind {
            Kind::Send { to, .. } => Kind::Recv { from: to, channel: 0 },
            Kind::Recv { from, .. } => Kind::Send { to: from, channel: 0 },
            _ => return Ok(()),
        };
        draft.change(rank, step, |post| post.collective.kind = turned);

        // If the stream has further collectives, the number is wrong already.
        let error = draft.world().verify();
        prop_assert!(
            matches!(error, Err(WorldError::Differ(_) | WorldError::Sequence { .. } | WorldError::NotInFlight { .. })),
            "{:?}", error
        );
    }

    // Awaits moved to anywhere behind their starts, starts in any order that keeps streams: some deadlock, some do not.
    #[test]
    fn deadlocks_are_found_exactly_where_ranks_get_stuck((n, groups, issues) in issues(), seed: u64) {
        let mut draft = draft(n, &groups, &issues);
        let mut state = seed | 1;
        let mut random = |n: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        };
        for trace in &mut draft.traces {
            for _ in 0..2 * trace.len() {
                let i = random(trace.len());
                if i > 0 && may_exchange(&trace[i - 1], &trace[i]) {
                    trace.swap(i - 1, i);
                }
            }
        }

        match draft.world().verify() {
            Ok(()) => prop_assert!(draft.finishes()),
            Err(WorldError::Deadlock { cycle }) => {
                prop_assert!(!draft.finishes());
                let next = cycle.iter().cycle().skip(1);
                prop_assert!(cycle.iter().zip(next).all(|(wait, next)| wait.waits_for == next.rank));
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    // A step without duration that distinguishes all ranks must change no time.
    #[test]
    fn times_stay_the_same_when_each_rank_is_its_own_class(draft in drafts(), copies in 1u32..4) {
        let mut alike = draft.clone();
        let n = draft.traces.len() as u32;
        alike.groups = (0..copies).flat_map(|c| {
            draft.groups.iter().map(move |g| g.iter().map(|r| r + c * n).collect())
        }).collect();
        alike.traces = (0..copies).flat_map(|_| draft.traces.clone()).collect();
        let mut apart = alike.clone();
        for (rank, trace) in apart.traces.iter_mut().enumerate() {
            trace.push(Step::Compute { name: "mark", microbatch: Some(rank as u32), cost: Duration::ZERO });
        }
        let by_copy = |rank: u32| rank % n / 3;
        let simulate = |draft: &Draft| links(|l| {
            draft.world().simulate(&Links { node: &by_copy, ..*l }, false).unwrap()
        });

        let (alike, apart) = (simulate(&alike), simulate(&apart));

        prop_assert_eq!(apart.representatives().len() as u32, n * copies);
        prop_assert_eq!(alike.makespan, apart.makespan);
        for rank in (0..n * copies).map(Rank) {
            prop_assert_eq!(alike.rank(rank), apart.rank(rank));
        }
    }
}

impl Kind {
    /// The kind that all transfers of one stream share; `None` for collectives of the group.
    fn peer_kind(self) -> Option<Kind> {
        matches!(self, Kind::Send { .. } | Kind::Recv { .. }).then_some(self)
    }
}

/// Whether two neighbouring steps can be swapped without a change of any stream.
fn may_exchange(a: &Step, b: &Step) -> bool {
    match (a, b) {
        (Step::Start(a), Step::Start(b)) => {
            a.collective.group != b.collective.group || a.collective.kind.peer_kind() != b.collective.kind.peer_kind()
        }
        (Step::Start(a), Step::Await(b)) => a.collective != *b,
        _ => true,
    }
}
