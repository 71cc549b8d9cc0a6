//! The simulator finds no violation in correct machines, and detects deliberately broken ones.

use phalanx_chaos::dice::Dice;
use phalanx_chaos::environment::{EnvironmentFault, Machine, N_CANDIDATES, Outage, RATES, StoreName};
use phalanx_chaos::help::FAULTS;
use phalanx_chaos::mutation::Mutation;
use phalanx_chaos::plan::{Fault, Plan, Planned};
use phalanx_chaos::shrink::shrink;
use phalanx_chaos::sim::{Config, Outcome, run};
use phalanx_strategies::elastic::coordinator::Activity;
use phalanx_strategies::elastic::identity::{MemberId, NodeId};
use phalanx_strategies::elastic::incident::{Culprit, Why};
use phalanx_strategies::elastic::timing::CLOCK_RATIO_MAX;
use std::collections::BTreeSet;
use std::ops::Range;
use std::time::{Duration, Instant};

fn drawn(config: &Config) -> Plan {
    Plan::random(config.seed, config.n_nodes, config.n_slots, config.safety_ms)
}

/// The name of a fault in plans.
fn kind(fault: &Fault) -> String {
    serde_json::to_value(fault).unwrap()["kind"].as_str().unwrap().to_owned()
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
    assert!(began.elapsed() < Duration::from_secs(600), "took {:?}", began.elapsed());
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
    // Injected faults of the environment must have met something.
    let kinds: BTreeSet<String> =
        outcomes.iter().flat_map(|o| &o.injected).map(|(_, planned)| kind(&planned.fault)).collect();
    for expected in [
        "starve_rank",
        "fail_store",
        "skew_clock",
        "set_clock",
        "suspend",
        "wrong_data",
        "strangers",
        "flip_bit",
        "lose_world",
        "isolate_world",
    ] {
        assert!(kinds.contains(expected), "no {expected} in {kinds:?}");
    }
    let n_repeated = outcomes.iter().flat_map(|o| &o.incidents).filter(|(_, i)| i.n_repeated > 0).count();
    assert!(n_repeated > 100, "{n_repeated} incidents after which steps were repeated");
    let n_failed_operations: u64 = outcomes.iter().map(|o| o.n_failed_operations).sum();
    let n_refused: u64 = outcomes.iter().map(|o| o.n_refused).sum();
    let n_strangers: u64 = outcomes.iter().map(|o| o.n_strangers).sum();
    assert!(
        n_failed_operations > 1_000 && n_refused > 100 && n_strangers > 1_000,
        "{n_failed_operations} failed operations of stores, {n_refused} refused nodes, {n_strangers} messages of strangers"
    );
    let n_flips: u64 = outcomes.iter().map(|o| o.n_flips).sum();
    let n_differences: u64 = outcomes.iter().map(|o| o.n_differences).sum();
    let n_named: u64 = outcomes.iter().map(|o| o.n_named).sum();
    assert!(
        n_flips > 500 && n_differences > 400 && n_named > 200,
        "{n_flips} flipped bits, {n_differences} differences, {n_named} ranks named"
    );
}

/// Each seed was the only one of many thousands that found its bug, before plans had faults of the environment.
#[test]
fn regression_seeds_violate_no_invariant() {
    for seed in
        SPREADING.into_iter().chain([3_146_866, 3_834_153, 4_144_776, 4_897_618, 6_009_038, 6_035_724, 7_477_998])
    {
        let config = Config::small(seed);
        assert_eq!(run(config, &drawn(&config)).violation, None, "seed {seed}");
    }
    for seed in [
        9_674, 19_089, 19_929, 26_943, 54_628, 59_395, 92_820, 92_851, 24_147, 27_048, 27_649, 107_052, 155_525,
        175_592,
    ] {
        let config = Config::small(seed);
        let mut plan = drawn(&config);
        plan.0.retain(|planned| !matches!(planned.fault, Fault::Environment(_)));

        assert_eq!(run(config, &plan).violation, None, "seed {seed}");
    }
}

/// A plan of faults of the environment only, which give nobody a reason to be blamed.
fn undisturbing(seed: u64, store: bool) -> Plan {
    let nodes = (0..2).map(|node| Machine::Node(NodeId(node)));
    let machines = nodes.chain((0..N_CANDIDATES).map(Machine::Candidate));
    let mut faults = vec![EnvironmentFault::Strangers { n_messages: 40, for_ms: 6_000 }];
    for (i, machine) in (seed..).zip(machines) {
        let percent = if i % 2 == 0 { RATES.start } else { RATES.end - 1 };
        faults.push(EnvironmentFault::SkewClock { machine, percent, for_ms: 6_000 });
        faults.push(EnvironmentFault::SetClock { machine, by_s: if i % 3 == 0 { 3_600 } else { -3_600 } });
    }
    let how = [Outage::Refuses, Outage::Hangs, Outage::LosesAnswers][seed as usize % 3];
    if store {
        faults.extend([StoreName::Coordinators, StoreName::Checkpoints].map(|store| EnvironmentFault::FailStore {
            store,
            how,
            for_ms: 2_000,
        }));
    }
    let planned = |fault| Planned { at_ms: 1_500, during: None, fault: Fault::Environment(fault) };
    Plan(faults.into_iter().map(planned).collect())
}

#[test]
fn clocks_and_strangers_end_no_world_and_no_term_and_a_failing_store_ends_no_world() {
    assert!((RATES.end - 1) as f64 / RATES.start as f64 <= CLOCK_RATIO_MAX);
    for seed in 0..60 {
        let config = Config::small(seed);

        for store in [false, true] {
            let outcome = run(config, &undisturbing(seed, store));

            assert_eq!(outcome.violation, None, "seed {seed}");
            let causes: Vec<Why> = outcome.incidents.iter().map(|(_, incident)| incident.cause.why).collect();
            assert!(causes.iter().all(|why| matches!(why, Why::Started | Why::Grows)), "seed {seed}: {causes:?}");
            assert!(outcome.n_strangers == 40 && (outcome.n_failed_operations > 0) == store, "seed {seed}");
            assert!(store || outcome.n_terms == 1, "seed {seed}: {} terms", outcome.n_terms);
        }
    }
}

// SUPERVISOR-12
#[test]
fn rank_without_a_processor_ends_no_world_and_a_stopped_one_does() {
    let mut n_stopped = 0;
    for seed in 0..60 {
        let config = Config::small(seed);
        let causes = |fault| {
            let outcome = run(config, &Plan(vec![Planned { at_ms: 3_000, during: None, fault }]));
            assert_eq!(outcome.violation, None, "seed {seed}");
            outcome.incidents.iter().map(|(_, incident)| incident.cause.why).collect::<BTreeSet<Why>>()
        };
        let (member, for_ms) = (MemberId { node: NodeId(0), slot: 0 }, 2_500);

        let starved = causes(Fault::StarveRank { member, for_ms });
        let stopped = causes(Fault::HangRank { member, for_ms });

        assert!(starved.iter().all(|why| matches!(why, Why::Started | Why::Grows)), "seed {seed}: {starved:?}");
        n_stopped += u32::from(stopped.contains(&Why::Hangs));
    }
    // The others have no rank in that slot.
    assert!(n_stopped > 40, "{n_stopped} stopped ranks were found");
}

#[test]
fn flipped_bits_without_other_faults_are_all_found_and_their_ranks_named() {
    let (mut n_flips, mut n_named) = (0, 0);
    for seed in 0..150 {
        let config = Config { reproducible: true, ..Config::small(seed) };
        let mut dice = Dice::new(seed, "two flips");
        let planned = [2_000, 5_000].map(|at_ms| {
            let fault = EnvironmentFault::random_flip(&mut dice, config.n_nodes, config.n_slots);
            Planned { at_ms, during: None, fault: Fault::Environment(fault) }
        });

        let outcome = run(config, &Plan(planned.to_vec()));

        assert_eq!(outcome.violation, None, "seed {seed}");
        assert_eq!(outcome.n_differences, outcome.n_flips, "seed {seed}");
        (n_flips, n_named) = (n_flips + outcome.n_flips, n_named + outcome.n_named);
    }
    assert!(n_flips > 150 && 20 * n_named >= 19 * n_flips, "{n_named} of {n_flips} flips are named");
}

#[test]
fn help_names_every_kind_of_fault() {
    let drawn = |seed| drawn(&Config::small(seed)).0;
    let kinds: BTreeSet<String> = (0..3_000).flat_map(drawn).map(|planned| kind(&planned.fault)).collect();

    let lines = FAULTS.lines().filter_map(|line| line.strip_prefix("  "));
    let named: BTreeSet<String> = lines.filter_map(|line| Some(line.split(' ').next()?.to_owned())).collect();

    assert_eq!(named, kinds);
}

#[test]
fn failing_plan_is_shrunk_to_the_fault_of_the_environment_that_it_needs() {
    let mutated = |seed| Config { mutation: Some(Mutation::BelieveStrangers), ..Config::small(seed) };
    let has_more = |seed: &u64| drawn(&mutated(*seed)).0.len() > 2;
    let fails = |seed: &u64| run(mutated(*seed), &drawn(&mutated(*seed))).violation.is_some();
    let seed = (0..1_000).filter(has_more).find(fails).unwrap();

    let small = shrink(mutated(seed), &drawn(&mutated(seed)));

    assert!(small.0.len() < drawn(&mutated(seed)).0.len());
    assert!(small.0.iter().any(|planned| kind(&planned.fault) == "strangers"), "{small:?}");
}

#[test]
fn equal_seeds_have_equal_traces_and_different_seeds_have_different_ones() {
    let traces = |seeds| run_seeds(seeds).iter().map(|o| o.trace_hash).collect::<Vec<u64>>();

    assert_eq!(traces(0..50), traces(0..50));
    let distinct: BTreeSet<u64> = traces(0..50).into_iter().collect();
    assert_eq!(distinct.len(), 50);
}

/// One seed in twenty thousand lets a flipped bit spread to other ranks before copies are compared.
const SPREADING: [u64; 3] = [6_023_553, 6_035_713, 6_056_804];

#[test]
fn each_broken_rule_is_caught() {
    for mutation in Mutation::ALL {
        let caught = (0..4_000).chain(SPREADING).find_map(|seed| {
            let config = Config { mutation: Some(mutation), ..Config::small(seed) };
            run(config, &drawn(&config)).violation
        });

        assert!(caught.is_some(), "{mutation:?} violates no invariant in 4,003 seeds");
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

    let began = processor_time();
    let outcome = run(config, &Plan::mass_failure(config.seed, config.n_nodes, config.n_slots, 100));
    let took = processor_time() - began;

    assert_eq!(outcome.violation, None);
    assert_eq!((outcome.injected.len(), outcome.n_rollbacks), (100, 0));
    let (_, incident) = outcome.incidents.last().unwrap();
    assert!(matches!(incident.cause.culprit, Culprit::Worker(_)) && incident.cause.why == Why::Died);
    assert!(incident.total() <= Duration::from_secs(1), "{incident}");
    assert!(took <= Duration::from_secs(60), "took {took:?}");
}

/// Time that this thread has run on a processor: a busy machine does not slow it.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
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
    let written = r#"[{"at_ms": 900, "fault": {"kind": "set_clock", "machine": {"node": 1}, "by_s": -3600}}]"#;
    let fault = EnvironmentFault::SetClock { machine: Machine::Node(NodeId(1)), by_s: -3_600 };
    let expected = Planned { at_ms: 900, during: None, fault: Fault::Environment(fault) };
    assert_eq!(serde_json::from_str::<Plan>(written).unwrap(), Plan(vec![expected]));
}
