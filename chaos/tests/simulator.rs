//! The simulator finds no violation in correct machines, and detects deliberately broken ones.

use phalanx_chaos::mutation::Mutation;
use phalanx_chaos::plan::{Fault, Plan, Planned};
use phalanx_chaos::shrink::shrink;
use phalanx_chaos::sim::{Config, Outcome, run};
use phalanx_strategies::elastic::coordinator::Activity;
use phalanx_strategies::elastic::identity::NodeId;
use phalanx_strategies::elastic::incident::{Culprit, Why};
use std::collections::BTreeSet;
use std::ops::Range;
use std::time::{Duration, Instant};

fn drawn(config: &Config) -> Plan {
    Plan::random(config.seed, config.n_nodes, config.n_slots, config.safety_ms)
}

/// Runs seeds on two threads.
fn run_seeds(seeds: Range<u64>) -> Vec<Outcome> {
    let middle = (seeds.start + seeds.end) / 2;
    let work = |seeds: Range<u64>| -> Vec<Outcome> {
        let one = |seed| {
            let config = Config::small(seed);
            run(config, &drawn(&config))
        };
        seeds.map(one).collect()
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| work(middle..seeds.end));
        let mut outcomes = work(seeds.start..middle);
        outcomes.extend(other.join().unwrap());
        outcomes
    })
}

#[test]
fn six_thousand_seeds_violate_no_invariant_and_reach_rare_events() {
    let began = Instant::now();
    // Enough seeds to reach stuck members as well.
    let outcomes = run_seeds(0..6_000);

    let failed: Vec<_> = outcomes.iter().filter_map(|o| Some((o.seed, o.violation.as_ref()?))).collect();
    assert!(failed.is_empty(), "replay with `phalanx-chaos sim --seed S`: {failed:#?}");
    assert!(began.elapsed() < Duration::from_secs(120), "took {:?}", began.elapsed());
    // The seeds must reach rare events; otherwise the check above proves nothing.
    let causes: BTreeSet<Why> = outcomes.iter().flat_map(|o| &o.incidents).map(|(_, i)| i.cause.why).collect();
    use Why::{Died, Drains, Grows, Hangs, Silent, Started, Straggles, Stuck, Unreachable};
    for why in [Died, Silent, Hangs, Straggles, Stuck, Unreachable, Drains, Grows, Started] {
        assert!(causes.contains(&why), "no incident with cause {why:?}");
    }
    let phases: BTreeSet<Activity> = outcomes.iter().flat_map(|o| &o.injected).filter_map(|(_, p)| p.during).collect();
    for phase in [Activity::TakingOver, Activity::Stopping, Activity::Regrouping, Activity::Healing] {
        assert!(phases.contains(&phase), "no second failure while {phase:?}");
    }
    assert!(outcomes.iter().any(|o| o.n_rollbacks > 0), "no return to a checkpoint");
    assert!(outcomes.iter().any(|o| o.n_terms > 2), "no run with more than two terms");
    let n_catch_up_plans: u64 = outcomes.iter().map(|o| o.n_catch_up_plans).sum();
    let n_caught_up: u64 = outcomes.iter().map(|o| o.n_caught_up).sum();
    assert!(
        n_catch_up_plans > 1_000 && n_caught_up > 1_000,
        "{n_catch_up_plans} worlds with catching-up members, {n_caught_up} members caught up"
    );
}

/// Each seed was the only one of many thousands that found its bug.
#[test]
fn regression_seeds_violate_no_invariant() {
    for seed in [
        9_674, 19_089, 19_929, 26_943, 54_628, 59_395, 92_820, 92_851, 24_147, 27_048, 27_649, 107_052, 155_525,
        175_592,
    ] {
        let config = Config::small(seed);

        assert_eq!(run(config, &drawn(&config)).violation, None, "seed {seed}");
    }
}

#[test]
fn equal_seeds_have_equal_traces_and_different_seeds_have_different_ones() {
    let traces = |seeds| run_seeds(seeds).iter().map(|o| o.trace_hash).collect::<Vec<u64>>();

    assert_eq!(traces(0..50), traces(0..50));
    let distinct: BTreeSet<u64> = traces(0..50).into_iter().collect();
    assert_eq!(distinct.len(), 50);
}

#[test]
fn each_broken_rule_is_caught() {
    for mutation in Mutation::ALL {
        let caught = (0..4_000).find_map(|seed| {
            let config = Config { mutation: Some(mutation), ..Config::small(seed) };
            run(config, &drawn(&config)).violation
        });

        assert!(caught.is_some(), "{mutation:?} violates no invariant in 4,000 seeds");
    }
}

#[test]
fn failing_plan_is_shrunk_to_its_necessary_faults() {
    let fails = |seed: &u64| {
        let config = Config { mutation: Some(Mutation::ForgetVotes), ..Config::small(*seed) };
        run(config, &drawn(&config)).violation.is_some()
    };
    let seed = (0..4_000).filter(|seed| drawn(&Config::small(*seed)).0.len() > 3).find(fails).unwrap();
    let config = Config { mutation: Some(Mutation::ForgetVotes), ..Config::small(seed) };

    let small = shrink(config, &drawn(&config));

    assert!(small.0.len() < drawn(&config).0.len());
    assert!(run(config, &small).violation.is_some());
    for i in 0..small.0.len() {
        let mut smaller = small.clone();
        smaller.0.remove(i);
        let same = run(config, &smaller).violation.map(|v| v.invariant);
        assert_ne!(same, run(config, &small).violation.map(|v| v.invariant), "fault {i} is not needed");
    }
}

#[test]
fn ten_thousand_ranks_regroup_within_a_second_when_a_hundred_die() {
    let config = Config { step_ms: 200, safety_ms: 3_000, ..Config::with_ranks(1, 10_000) };

    let mut times = Vec::new();
    // The fastest of at most three runs, since a busy machine slows single runs.
    let outcome = loop {
        let began = Instant::now();
        let outcome = run(config, &Plan::mass_failure(config.seed, config.n_nodes, config.n_slots, 100));
        times.push(began.elapsed());
        if times.len() == 3 || times.iter().any(|time| *time <= Duration::from_secs(10)) {
            break outcome;
        }
    };

    assert_eq!(outcome.violation, None);
    assert_eq!((outcome.injected.len(), outcome.n_rollbacks), (100, 0));
    let (_, incident) = outcome.incidents.last().unwrap();
    assert!(matches!(incident.cause.culprit, Culprit::Worker(_)) && incident.cause.why == Why::Died);
    assert!(incident.total() <= Duration::from_secs(1), "{incident}");
    assert!(times.iter().any(|time| *time <= Duration::from_secs(10)), "took {times:?}");
}

// A durable world that was never announced has committed no step, whichever members are lost.
#[test]
fn no_step_is_lost_when_the_coordinator_and_a_node_die_while_a_smaller_mesh_forms() {
    let planned = |at_ms, during, fault| Planned { at_ms, during, fault };
    let plan = Plan(vec![
        planned(5_344, None, Fault::Reshape { pp: 1, dp_replicate: 1, dp_shard: 1, tp: 2 }),
        planned(5_344, Some(Activity::Regrouping), Fault::KillCoordinator { back_after_ms: 1_095 }),
        planned(6_645, None, Fault::KillNode { node: NodeId(0), back_after_ms: 2_426 }),
    ]);

    for seed in 0..1_000 {
        let outcome = run(Config::small(seed), &plan);
        assert_eq!(outcome.violation, None, "seed {seed}");
    }
}

#[test]
fn plan_round_trips_through_json() {
    let config = Config::small(3);
    let plan = drawn(&config);

    let read: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();

    assert_eq!(read, plan);
    let written =
        r#"[{"at_ms": 900, "during": "healing", "fault": {"kind": "kill_coordinator", "back_after_ms": 500}}]"#;
    let fault = Fault::KillCoordinator { back_after_ms: 500 };
    let expected = Planned { at_ms: 900, during: Some(Activity::Healing), fault };
    assert_eq!(serde_json::from_str::<Plan>(written).unwrap(), Plan(vec![expected]));
}
