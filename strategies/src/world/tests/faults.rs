//! One fault each, and its error text.

use super::*;

fn error(groups: &[&[u32]], traces: Vec<Vec<Step>>) -> String {
    world(groups, traces).verify().unwrap_err().to_string()
}

#[test]
fn ranks_that_agree_pass() {
    let trace = both(all_reduce(0, 0, 8)).to_vec();

    assert_eq!(world(&[&[0, 1]], vec![trace.clone(), trace]).verify(), Ok(()));
}

#[test]
fn different_kinds_are_named_with_both_ranks() {
    let kinds = [Kind::AllReduce, Kind::AllReduce, Kind::AllGather];
    let traces = kinds.map(|kind| both(on(0, 0, kind, 8)).to_vec()).to_vec();

    let expected =
        "group [0, 1, 2], collective #0: rank 0 has all_reduce #0 of 8 f32, but rank 2 has all_gather #0 of 8 f32";
    assert_eq!(error(&[&[0, 1, 2]], traces), expected);
}

#[test]
fn different_sizes_are_named_with_both_descriptors() {
    let traces = vec![both(all_reduce(0, 0, 8)).to_vec(), both(all_reduce(0, 0, 9)).to_vec()];

    assert!(
        error(&[&[0, 1]], traces).ends_with("rank 0 has all_reduce #0 of 8 f32, but rank 1 has all_reduce #0 of 9 f32")
    );
}

#[test]
fn missing_collective_is_named() {
    let twice = [both(all_reduce(0, 0, 8)), both(all_reduce(0, 1, 4))].concat();
    let traces = vec![twice, both(all_reduce(0, 0, 8)).to_vec()];

    let expected = "group [0, 1], collective #1: rank 0 has all_reduce #1 of 4 f32, but rank 1 has nothing";
    assert_eq!(error(&[&[0, 1]], traces), expected);
}

#[test]
fn send_without_its_receive_is_named() {
    let traces = vec![both(on(0, 0, Kind::Send { to: 1, channel: 0 }, 8)).to_vec(), vec![]];

    let expected =
        "group [0, 1], collective #0: rank 0 has send to member 1 by channel 0 #0 of 8 f32, but rank 1 has nothing";
    assert_eq!(error(&[&[0, 1]], traces), expected);
}

#[test]
fn transfer_of_a_rank_with_itself_is_rejected() {
    let traces = vec![both(on(0, 0, Kind::Send { to: 0, channel: 0 }, 8)).to_vec(), vec![]];

    assert_eq!(
        error(&[&[0, 1]], traces),
        "rank 0, step 0: send to member 0 by channel 0 #0 must name another member of group [0, 1]"
    );
}

#[test]
fn skipped_sequence_number_is_rejected() {
    let trace = both(all_reduce(0, 1, 8)).to_vec();

    assert_eq!(
        error(&[&[0, 1]], vec![trace.clone(), trace]),
        "rank 0, step 0: starts all_reduce #1, expected #0 on its stream"
    );
}

#[test]
fn start_or_await_without_its_counterpart_is_rejected() {
    let [start, end] = both(all_reduce(0, 0, 8));
    let fails = |steps: &[Step]| error(&[&[0, 1]], vec![steps.to_vec(), steps.to_vec()]);

    assert_eq!(fails(std::slice::from_ref(&start)), "rank 0, step 0: starts all_reduce #0 and never awaits it");
    assert_eq!(fails(&[end.clone(), start.clone()]), "rank 0, step 0: awaits all_reduce #0, which is not in flight");
    assert_eq!(fails(&[start, end.clone(), end]), "rank 0, step 2: awaits all_reduce #0, which is not in flight");
}

#[test]
fn group_that_a_rank_does_not_bind_is_rejected() {
    let trace = both(all_reduce(1, 0, 8)).to_vec();

    assert_eq!(
        error(&[&[0, 1]], vec![trace.clone(), trace]),
        "rank 0, step 0: all_reduce #0 is on group slot 1, expected a slot below 1"
    );
}

#[test]
fn group_of_other_or_unknown_ranks_is_rejected() {
    let mut foreign = WorldTraces::new();
    let (trace, group) = (foreign.trace(vec![]), foreign.group(vec![Rank(1)]));
    foreign.rank(trace, vec![group]);
    foreign.rank(trace, vec![group]);
    let mut absent = WorldTraces::new();
    let (trace, group) = (absent.trace(vec![]), absent.group(vec![Rank(0), Rank(7)]));
    absent.rank(trace, vec![group]);

    let expected = "rank 0 binds group [1] and has 0 positions in it, expected 1";
    assert_eq!(foreign.verify().unwrap_err().to_string(), expected);
    assert_eq!(absent.verify().unwrap_err().to_string(), "group [0, 7] names rank 7, but the world has 1 ranks");
}

#[test]
fn deadlock_error_names_the_cycle() {
    let (wide, narrow) = (both(all_reduce(0, 0, 8)), both(all_reduce(1, 0, 4)));
    let traces = vec![[wide.clone(), narrow.clone()].concat(), [narrow, wide.clone()].concat(), wide.to_vec()];

    let error = world(&[&[0, 1, 2], &[0, 1]], traces).verify().unwrap_err();

    let WorldError::Deadlock { cycle } = &error else { panic!("{error}") };
    let around: Vec<(u32, usize, u32)> = cycle.iter().map(|w| (w.rank.0, w.step, w.waits_for.0)).collect();
    assert_eq!(around, [(0, 1, 1), (1, 1, 0)]);
    let expected = "deadlock: rank 0 at step 1 awaits all_reduce #0 of group [0, 1, 2], which rank 1 has not started; \
                rank 1 at step 1 awaits all_reduce #0 of group [0, 1], which rank 0 has not started";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn starting_both_before_awaiting_either_breaks_the_cycle() {
    let (wide, narrow) = (both(all_reduce(0, 0, 8)), both(all_reduce(1, 0, 4)));
    let [a, await_a] = wide.clone();
    let [b, await_b] = narrow;
    let first = vec![a.clone(), b.clone(), await_a.clone(), await_b.clone()];
    let second = vec![b, a, await_b, await_a];

    assert_eq!(world(&[&[0, 1, 2], &[0, 1]], vec![first, second, wide.to_vec()]).verify(), Ok(()));
}

#[test]
fn two_ranks_that_send_to_each_other_first_deadlock() {
    let exchange = |peer| {
        [
            both(on(0, 0, Kind::Send { to: peer, channel: 0 }, 1)),
            both(on(0, 0, Kind::Recv { from: peer, channel: 0 }, 1)),
        ]
        .concat()
    };

    let error = world(&[&[0, 1]], vec![exchange(1), exchange(0)]).verify().unwrap_err();

    assert!(matches!(&error, WorldError::Deadlock { cycle } if cycle.len() == 2), "{error}");
}

#[test]
fn starts_of_two_groups_in_contrary_orders_are_named_with_their_ranks() {
    let (small, large) = (all_reduce(0, 0, 8), all_reduce(1, 0, 64));
    let awaits = [Step::Await(small.collective), Step::Await(large.collective)];
    let first = [Step::Start(small), Step::Start(large)];
    let mut second = first.clone();
    second.swap(0, 1);
    let rank = |starts: &[Step]| [starts, &awaits].concat();
    let (all, pair): (&[u32], &[u32]) = (&[0, 1, 2], &[0, 1]);
    let third = vec![first[0].clone(), awaits[0].clone()];

    let good = world(&[all, pair], vec![rank(&first), rank(&first), third.clone()]);
    let bad = world(&[all, pair], vec![rank(&first), rank(&second), third]);

    assert_eq!((good.verify(), good.verify_launches(), bad.verify()), (Ok(()), Ok(()), Ok(())));
    let error = bad.verify_launches().unwrap_err().to_string();
    let expected = "no common order of starts: \
        rank 1 at step 0 starts all_reduce #0 of group [0, 1] before all_reduce #0 of group [0, 1, 2], which rank 0 \
        starts at step 0; rank 0 at step 0 starts all_reduce #0 of group [0, 1, 2] before all_reduce #0 of group [0, 1], \
        which rank 1 starts at step 0";
    assert_eq!(error, expected);
}

// Each rank posts the send before the receive and awaits both later: hosts finish, communicators in order of starts do not.
#[test]
fn two_ranks_that_start_to_send_to_each_other_first_have_no_common_order() {
    let exchange = |peer, sends_first: bool| {
        let mut posts = [Kind::Send { to: peer, channel: 0 }, Kind::Recv { from: peer, channel: 0 }];
        if !sends_first {
            posts.reverse();
        }
        let starts = posts.map(|kind| Step::Start(on(0, 0, kind, 1)));
        [starts, posts.map(|kind| Step::Await(on(0, 0, kind, 1).collective))].concat()
    };

    let contrary = world(&[&[0, 1]], vec![exchange(1, true), exchange(0, true)]);
    let common = world(&[&[0, 1]], vec![exchange(1, true), exchange(0, false)]);

    assert_eq!((contrary.verify(), common.verify_launches()), (Ok(()), Ok(())));
    let error = contrary.verify_launches().unwrap_err();
    assert!(matches!(&error, WorldError::LaunchOrder { cycle } if cycle.len() == 2), "{error}");
}

// Every rank sends to its right-hand neighbour over overlapping groups: all ranks are of one class.
#[test]
fn ring_of_equal_ranks_deadlocks_with_all_of_them_in_the_cycle() {
    let n = 6;
    let mut ring = WorldTraces::new();
    let pairs: Vec<GroupId> = (0..n).map(|i| ring.group(vec![Rank(i), Rank((i + 1) % n)])).collect();
    let (send, receive) =
        (on(0, 0, Kind::Send { to: 1, channel: 0 }, 1), on(1, 0, Kind::Recv { from: 0, channel: 0 }, 1));
    let blocking = ring.trace([both(send.clone()), both(receive.clone())].concat());
    let (sent, received) = (send.collective, receive.collective);
    let exchanging =
        ring.trace(vec![Step::Start(send), Step::Start(receive), Step::Await(sent), Step::Await(received)]);
    let mut fine = ring.clone();
    for i in 0..n as usize {
        let bound = vec![pairs[i], pairs[(i + n as usize - 1) % n as usize]];
        ring.rank(blocking, bound.clone());
        fine.rank(exchanging, bound);
    }

    let error = ring.verify().unwrap_err();

    assert!(matches!(&error, WorldError::Deadlock { cycle } if cycle.len() == n as usize), "{error}");
    assert_eq!(fine.verify(), Ok(()));
}
