//! Simulated times, compared with times computed by hand.

use super::*;

const NODE: &dyn Fn(u32) -> u32 = &|_| 0;
/// One microsecond per element.
const DURATION: &dyn Fn(&Post, &[u32]) -> Duration = &|post, _| MICRO * (post.size_bytes() / 4) as u32;

fn simulate(groups: &[&[u32]], traces: Vec<Vec<Step>>) -> Timeline {
    moved_by(Mover::Links, groups, traces)
}

fn moved_by(mover: Mover, groups: &[&[u32]], traces: Vec<Vec<Step>>) -> Timeline {
    world(groups, traces).simulate(&Links { mover, node: NODE, duration: DURATION }, true).unwrap()
}

#[test]
fn computation_hides_communication() {
    let [start, end] = both(all_reduce(0, 0, 5));
    let trace = vec![compute(MICRO * 10), start, compute(MICRO * 3), end, compute(MICRO)];

    let timeline = simulate(&[&[0, 1]], vec![trace.clone(), trace]);

    let times = timeline.rank(Rank(1));
    assert_eq!(timeline.makespan, MICRO * 16);
    assert_eq!((times.compute, times.communication, times.exposed), (MICRO * 14, MICRO * 5, MICRO * 2));
    assert_eq!(timeline.idle(Rank(1)), MICRO * 2);
    assert_eq!(timeline.mean_exposed(), MICRO * 2);
}

#[test]
fn ranks_that_move_the_bytes_do_so_while_they_wait() {
    let [start, end] = both(all_reduce(0, 0, 5));
    let trace = vec![compute(MICRO * 10), start, compute(MICRO * 3), end, compute(MICRO)];

    let timeline = moved_by(Mover::Ranks, &[&[0, 1]], vec![trace.clone(), trace]);

    let times = timeline.rank(Rank(1));
    assert_eq!(timeline.makespan, MICRO * 19, "no communication is hidden");
    assert_eq!((times.compute, times.communication, times.exposed), (MICRO * 14, MICRO * 5, MICRO * 5));
    assert_eq!((times.spans[2].start, times.spans[2].end), (MICRO * 13, MICRO * 18));
}

#[test]
fn receiver_copies_and_its_sender_does_nothing() {
    let [send, sent] = both(on(0, 0, Kind::Send { to: 1, channel: 0 }, 5));
    let [receive, received] = both(on(0, 0, Kind::Recv { from: 0, channel: 0 }, 5));
    let sender = vec![compute(MICRO * 2), send, compute(MICRO * 4), sent];
    let receiver = vec![receive, received, compute(MICRO)];

    let timeline = moved_by(Mover::Ranks, &[&[0, 1]], vec![sender, receiver]);

    assert_eq!([0, 1].map(|rank| timeline.rank(Rank(rank)).finish), [MICRO * 6, MICRO * 8]);
    assert_eq!([0, 1].map(|rank| timeline.rank(Rank(rank)).exposed), [Duration::ZERO, MICRO * 7]);
}

#[test]
fn slow_rank_makes_the_others_wait() {
    let slow = [vec![compute(MICRO * 9)], both(all_reduce(0, 0, 1)).to_vec()].concat();
    let fast = [vec![compute(MICRO * 2)], both(all_reduce(0, 0, 1)).to_vec()].concat();

    let timeline = simulate(&[&[0, 1]], vec![slow, fast]);

    assert_eq!(timeline.rank(Rank(0)).exposed, MICRO);
    assert_eq!(timeline.rank(Rank(1)).exposed, MICRO * 8);
}

#[test]
fn collectives_of_one_rank_follow_each_other() {
    let [a, await_a] = both(all_reduce(0, 0, 5));
    let [b, await_b] = both(all_reduce(1, 0, 7));
    let shared = vec![a.clone(), b, await_a.clone(), await_b];
    let [b, await_b] = both(all_reduce(0, 0, 7));

    let timeline = simulate(&[&[0, 1], &[0, 2]], vec![shared, vec![a, await_a], vec![b, await_b]]);

    assert_eq!(timeline.rank(Rank(1)).finish, MICRO * 5);
    assert_eq!(timeline.rank(Rank(2)).finish, MICRO * 12);
}

#[test]
fn collective_that_is_ready_first_begins_first() {
    // Rank 0 starts the collective with rank 1 first, but rank 1 comes late.
    let [a, await_a] = both(all_reduce(0, 0, 5));
    let [b, await_b] = both(all_reduce(1, 0, 7));
    let shared = vec![a.clone(), b, await_a.clone(), await_b];
    let late = vec![compute(MICRO * 2), a, await_a];
    let [b, await_b] = both(all_reduce(0, 0, 7));

    let timeline = simulate(&[&[0, 1], &[0, 2]], vec![shared, late, vec![b, await_b]]);

    assert_eq!(timeline.rank(Rank(2)).finish, MICRO * 7);
    assert_eq!(timeline.rank(Rank(1)).finish, MICRO * 12);
}

#[test]
fn durations_depend_on_the_nodes_of_the_members() {
    let trace = both(all_reduce(0, 0, 1)).to_vec();
    let groups: &[&[u32]] = &[&[0, 1], &[2, 3], &[4, 5]];
    let node = |rank: u32| if rank < 3 { 0 } else { 1 };
    let duration = |_: &Post, nodes: &[u32]| if nodes[0] == nodes[1] { MICRO } else { MICRO * 10 };

    let timeline = world(groups, vec![trace; 6])
        .simulate(&Links { mover: Mover::Links, node: &node, duration: &duration }, false)
        .unwrap();

    let finish = |rank| timeline.rank(Rank(rank)).finish;
    assert_eq!([0, 2, 4].map(finish), [MICRO, MICRO * 10, MICRO]);
    assert_eq!(timeline.representatives(), [Rank(0), Rank(2)]);
}

// Neighbours on a ring of overlapping groups do the same, and yet each takes part in two transfers.
#[test]
fn rank_on_a_ring_spends_time_on_both_of_its_transfers() {
    let n = 6;
    let mut ring = WorldTraces::new();
    let pairs: Vec<GroupId> = (0..n).map(|i| ring.group(vec![Rank(i), Rank((i + 1) % n)])).collect();
    let [send, sent] = both(on(0, 0, Kind::Send { to: 1, channel: 0 }, 1));
    let [receive, received] = both(on(1, 0, Kind::Recv { from: 0, channel: 0 }, 1));
    let trace = ring.trace(vec![send, receive, sent, received]);
    for i in 0..n as usize {
        ring.rank(trace, vec![pairs[i], pairs[(i + n as usize - 1) % n as usize]]);
    }

    let timeline = ring.simulate(&Links { mover: Mover::Links, node: NODE, duration: DURATION }, false).unwrap();

    assert!((0..n).all(|rank| timeline.rank(Rank(rank)).communication == MICRO * 2));
}

#[test]
fn ranks_with_one_trace_that_send_to_the_same_member_take_turns() {
    let sender = both(on(0, 0, Kind::Send { to: 2, channel: 0 }, 5)).to_vec();
    let [first, second] = [0, 1].map(|from| both(on(0, 0, Kind::Recv { from, channel: 0 }, 5)));

    let timeline = simulate(&[&[0, 1, 2]], vec![sender.clone(), sender, [first, second].concat()]);

    assert_eq!([0, 1, 2].map(|rank| timeline.rank(Rank(rank)).finish), [MICRO * 5, MICRO * 10, MICRO * 10]);
}

#[test]
fn trace_viewer_json_has_a_process_for_each_rank() {
    let [start, end] = both(all_reduce(0, 0, 5));
    let named = Step::Compute { name: "say \"x\"", microbatch: Some(3), cost: MICRO * 2 };
    let trace = vec![named, start, end];
    let timeline = simulate(&[&[0, 1]], vec![trace.clone(), trace]);

    let track = |r| chrome::Track { rank: Rank(r), spans: &timeline.rank(Rank(r)).spans };
    let written = chrome::document([0, 1].map(track));

    let read: serde_json::Value = serde_json::from_str(&written).unwrap();
    let spans: Vec<_> = read["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X").collect();
    assert_eq!(spans.len(), 4);
    assert_eq!((&spans[0]["name"], &spans[0]["args"]["microbatch"]), (&"say \"x\"".into(), &3.into()));
    assert_eq!((spans[3]["pid"].as_u64(), spans[3]["tid"].as_u64()), (Some(1), Some(1)));
    assert_eq!((spans[3]["ts"].as_f64(), spans[3]["dur"].as_f64()), (Some(2.0), Some(5.0)));
}
