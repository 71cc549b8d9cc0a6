//! Planned world changes, and members that catch up before they have a rank.

use super::*;

/// Ticks from a newcomer's first report until a job with two of `wanted` members trains with it.
fn ticks_to_join(wanted: usize) -> u64 {
    let mut job = Job::start(shards(wanted), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    job.start_node(2);
    job.run_until("a newcomer", |job| job.members.keys().any(|worker| worker.member.node == NodeId(2)));

    let began = job.n_ticks;
    job.run_until("growth", |job| job.running(shards(3)));
    job.n_ticks - began
}

#[test]
fn growth_does_not_wait_when_all_wanted_members_are_present() {
    let pause = (Timing::default().heartbeat.as_millis() / 3 / TICK.as_millis()) as u64;

    let (last_one, not_the_last) = (ticks_to_join(3), ticks_to_join(4));

    assert!(last_one < pause, "{last_one} ticks");
    assert!(not_the_last >= pause, "others may still join, but the world grew after {not_the_last} ticks");
}

// COORDINATOR-10
#[test]
fn world_grows_between_two_steps() {
    let mut job = Job::start(shards(3), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));

    job.start_node(2);
    job.run_until("growth", |job| job.running(shards(3)));

    let incident = last_incident(&job);
    assert_eq!(incident.cause, Cause { culprit: Culprit::Job, why: Why::Grows });
    assert_eq!(
        job.paused_behind,
        BTreeSet::from([incident.step]),
        "all members pause behind the base step of the next world"
    );
}

const ONE: Mesh = Mesh::ONE;
const TWO: Mesh = Mesh { dp_replicate: 2, ..Mesh::ONE };

/// One replica trains, and a second one joins with too much missing state to wait for.
fn replica_and_a_newcomer() -> Job {
    let mut job = Job::start(TWO, 1, Schedule::default());
    job.coordinator.policy.rest_bytes_max = 0;
    job.run_until("one replica", |job| job.running(ONE));
    job.start_node(2);
    job
}

// CATCH-UP-1, CATCH-UP-3
#[test]
fn newcomer_with_much_missing_state_catches_up_while_the_others_train_and_then_gets_its_rank() {
    let mut job = replica_and_a_newcomer();
    let newcomer = |job: &Job| job.members.values().find(|m| m.worker().member.node == NodeId(2)).map(Member::report);
    job.run_until("catching up", |job| {
        newcomer(job).is_some_and(|status_report| status_report.phase == MemberPhase::CatchingUp)
    });

    let began = job.committed;
    assert!(job.running(ONE) && newcomer(&job).unwrap().holds.is_empty());
    job.run_until("the newcomer's rank", |job| job.running(TWO));

    assert!(job.committed >= Step(began.0 + 4), "the others trained meanwhile");
    let world_plan = job.coordinator.record().world_plan.clone().unwrap();
    assert_eq!(world_plan.transfers, [vec![], vec![]], "no member waits for state");
    assert_eq!((world_plan.catching_up.len(), world_plan.base.lineage), (0, Generation(1)));
}

// CATCH-UP-3, MEMBER-8
#[test]
fn death_during_catch_up_loses_no_step_and_the_successor_starts_over() {
    let mut job = replica_and_a_newcomer();
    let catch_up =
        |job: &Job| job.members.values().find(|m| m.report().phase == MemberPhase::CatchingUp).map(Member::worker);
    job.run_until("catching up", |job| catch_up(job).is_some());
    let (first, before) = (catch_up(&job).unwrap(), job.committed);

    job.kill(first);
    job.run_until("another world", |job| job.running(ONE) && catch_up(job).is_some_and(|worker| worker != first));
    assert!(job.committed >= before);
    job.run_until("the rank of the successor", |job| job.running(TWO));

    assert_eq!(job.coordinator.record().world_plan.as_ref().unwrap().base.lineage, Generation(1), "no step was lost");
}

#[test]
fn catching_up_rank_with_a_stuck_device_is_replaced_while_the_others_train() {
    let mut job = replica_and_a_newcomer();
    let catch_up = |job: &Job| job.members.values().find(|m| m.report().phase == MemberPhase::CatchingUp).cloned();
    let computes = |m: Member| m.report().progress.at == At::Computes;
    job.run_until("a catching-up member that computes", |job| catch_up(job).is_some_and(computes));

    job.frozen = catch_up(&job).map(|member| member.worker());
    // A first step may take this long.
    job.run_for(60_000);
    job.run_until("the rank of its successor", |job| job.running(TWO));

    assert!(job.frozen.is_some_and(|frozen| !job.members.contains_key(&frozen)));
    assert_eq!(job.coordinator.record().world_plan.as_ref().unwrap().base.lineage, Generation(1), "no step was lost");
}
