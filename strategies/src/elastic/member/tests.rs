//! One member, event by event.

use super::*;
use crate::elastic::commit::Vote;
use crate::elastic::identity::{Incarnation, MemberId, NodeId, Term};
use crate::elastic::recovery::{Source, from_disk};
use crate::elastic::shadow::place;
use crate::mesh::Mesh;

fn worker(slot: u32) -> Worker {
    Worker { member: MemberId { node: NodeId(slot), slot: 0 }, incarnation: Incarnation(1) }
}

fn desired_state(generation: u64, stage: Stage, world_plan: Option<&Arc<WorldPlan>>) -> DesiredState {
    let id = DesiredStateId { term: Term(1), generation: Generation(generation), stage, revision: 0 };
    let requests = Requests::default();
    DesiredState {
        job: JobId(1),
        id,
        world_plan: world_plan.cloned(),
        evict: vec![],
        requests,
        release: None,
        refused: None,
    }
}

/// Two shards on two nodes, loaded from the initial weights.
fn world_plan(generation: u64, assignments: [Worker; 2]) -> Arc<WorldPlan> {
    let mesh = Mesh { dp_shard: 2, ..Mesh::ONE };
    let holds = place(&mesh, &assignments, true);
    Arc::new(WorldPlan {
        generation: Generation(generation),
        mesh,
        assignments: assignments.to_vec(),
        catching_up: vec![],
        guests: vec![],
        addresses: vec![None; 2],
        base: Version { lineage: Generation(generation), step: Step(0) },
        voted_in: Generation(generation),
        transfers: from_disk(&holds, Checkpoint::default()),
        holds,
        n_saves: 0,
        rests: false,
        disputed: vec![],
    })
}

fn running(world_plan: &Arc<WorldPlan>) -> Member {
    running_with(world_plan, Schedule::default())
}

fn running_with(world_plan: &Arc<WorldPlan>, schedule: Schedule) -> Member {
    let mut member = Member::new(JobId(1), worker(0), None, schedule);
    let generation = world_plan.generation;
    member.handle_desired_state(&desired_state(generation.0, Stage::Form, Some(world_plan))).unwrap();
    member.handle_joined(generation).unwrap();
    for transfer in &world_plan.transfers[0] {
        member.handle_fetched(generation, *transfer).unwrap();
    }
    member.handle_desired_state(&desired_state(generation.0, Stage::Run, Some(world_plan))).unwrap();
    while member.poll_command().is_some() {}
    member
}

// MEMBER-1
#[test]
fn stopped_member_rejects_messages_of_the_old_generation() {
    let mut member = running(&world_plan(1, [worker(0), worker(1)]));
    member.handle_computed(Generation(1), Step(1)).unwrap();
    member.handle_desired_state(&desired_state(2, Stage::Stop, None)).unwrap();

    assert!(member.handle_committed(Generation(1), Step(1), Requests::default()).is_err());
    assert!(member.handle_entered(Generation(1), Step(2)).is_err());
    assert!(
        member
            .handle_desired_state(&desired_state(1, Stage::Run, Some(&world_plan(1, [worker(0), worker(1)]))))
            .is_err()
    );
    let vote = Vote { generation: Generation(1), step: Step(1) };
    assert_eq!(member.report().commit_state.voted, Some(vote), "the vote stands until the outcome is decided");
}

// MEMBER-2
#[test]
fn member_without_a_rank_keeps_its_state_until_the_next_world_runs() {
    let mut member = running(&world_plan(1, [worker(0), worker(1)]));
    let held = member.report().holds;
    let base = member.report().commit_state.applied.unwrap();
    let next =
        Arc::new(WorldPlan { base, voted_in: Generation(1), ..(*world_plan(2, [worker(1), worker(2)])).clone() });

    member.handle_desired_state(&desired_state(2, Stage::Form, Some(&next))).unwrap();
    assert!(member.can_send(base, held[0]));
    member.handle_desired_state(&desired_state(2, Stage::Run, Some(&next))).unwrap();

    assert_eq!(member.report().holds, []);
}

#[test]
fn member_keeps_the_plan_under_which_it_took_its_rank() {
    let formed = world_plan(1, [worker(0), worker(1)]);
    let mut member = Member::new(JobId(1), worker(0), None, Schedule::default());
    member.handle_desired_state(&desired_state(1, Stage::Form, Some(&formed))).unwrap();
    member.handle_joined(Generation(1)).unwrap();
    for transfer in &formed.transfers[0] {
        member.handle_fetched(Generation(1), *transfer).unwrap();
    }
    let base = Version { step: Step(7), ..formed.base };
    let other = Arc::new(WorldPlan { base, assignments: vec![], holds: vec![], ..(*formed).clone() });

    member.handle_desired_state(&desired_state(1, Stage::Run, Some(&other))).unwrap();

    let commands: Vec<Command> = std::iter::from_fn(|| member.poll_command()).collect();
    assert_eq!(commands.last(), Some(&Command::Compute { generation: Generation(1), step: Step(1) }));
    assert!(member.handle_computed(Generation(1), Step(1)).is_ok());
}

// MEMBER-2
#[test]
fn member_that_left_a_broken_world_keeps_its_state() {
    let world_plan = world_plan(1, [worker(0), worker(1)]);
    let mut member = running(&world_plan);
    let held = member.report().holds;
    let mut request = desired_state(1, Stage::Run, Some(&world_plan));
    (request.requests.save, request.id.revision) = (1, 1);

    member.handle_broken(Generation(1), None, "a connection broke").unwrap();
    member.handle_desired_state(&request).unwrap();

    let report = member.report();
    assert_eq!((report.phase, report.holds.len()), (MemberPhase::Stopped, held.len()));
    assert_eq!(report.broken.unwrap().reason, "a connection broke");
    member.handle_desired_state(&desired_state(2, Stage::Stop, None)).unwrap();
    assert_eq!(member.report().broken, None, "the failure ends with its world");
}

// MEMBER-3
#[test]
fn member_without_all_its_state_does_not_run() {
    let world_plan = world_plan(1, [worker(0), worker(1)]);
    let mut member = Member::new(JobId(1), worker(0), None, Schedule::default());
    member.handle_desired_state(&desired_state(1, Stage::Form, Some(&world_plan))).unwrap();
    member.handle_joined(Generation(1)).unwrap();
    let first = world_plan.transfers[0][0];
    assert!(matches!(first.source, Source::Disk(_)));
    member.handle_fetched(Generation(1), first).unwrap();

    member.handle_desired_state(&desired_state(1, Stage::Run, Some(&world_plan))).unwrap();

    assert_eq!(member.report().phase, MemberPhase::Healing);
}

// MEMBER-7
#[test]
fn member_with_all_its_state_is_not_ready_before_its_device_joins_the_world() {
    let before = world_plan(1, [worker(0), worker(1)]);
    let mut member = running(&before);
    let transfers = vec![vec![]; 2];
    let (base, voted_in) = (before.base, Generation(1));
    let next = WorldPlan { base, voted_in, transfers, ..(*world_plan(2, [worker(0), worker(1)])).clone() };

    member.handle_desired_state(&desired_state(2, Stage::Form, Some(&Arc::new(next)))).unwrap();
    assert!(commands(&mut member).contains(&Command::Join(Generation(2))));
    before.transfers[0].iter().for_each(|transfer| member.handle_fetched(Generation(2), *transfer).unwrap());
    assert_eq!(member.report().phase, MemberPhase::Healing);
    assert!(member.handle_joined(Generation(1)).is_err());
    member.handle_joined(Generation(2)).unwrap();

    assert_eq!(member.report().phase, MemberPhase::Ready);
}

fn commands(member: &mut Member) -> Vec<Command> {
    std::iter::from_fn(|| member.poll_command()).collect()
}

#[test]
fn guest_reports_its_phase_until_the_world_runs() {
    let mut member = running(&world_plan(1, [worker(0), worker(1)]));
    let base = member.report().commit_state.applied.unwrap();
    let next = WorldPlan { base, voted_in: Generation(1), ..(*world_plan(2, [worker(1), worker(2)])).clone() };
    let next = Arc::new(WorldPlan { guests: vec![worker(0)], addresses: vec![None; 3], ..next });

    member.handle_desired_state(&desired_state(2, Stage::Form, Some(&next))).unwrap();
    assert_eq!(member.report().phase, MemberPhase::Guest);
    member.handle_desired_state(&desired_state(2, Stage::Run, Some(&next))).unwrap();

    assert_eq!((member.report().phase, member.report().holds), (MemberPhase::Stopped, vec![]));
}

// MEMBER-4
#[test]
fn request_takes_effect_only_after_all_votes_are_counted() {
    let world_plan = world_plan(1, [worker(0), worker(1)]);
    let mut member = running(&world_plan);
    let requests = Requests { save: 1, ..Requests::default() };
    let mut request = desired_state(1, Stage::Run, Some(&world_plan));
    (request.requests, request.id.revision) = (requests, requests.revision());

    member.handle_desired_state(&request).unwrap();
    assert_eq!(commands(&mut member), []);
    member.handle_computed(Generation(1), Step(1)).unwrap();
    let vote = Vote { generation: Generation(1), step: Step(1) };
    assert_eq!(commands(&mut member), [Command::Vote(vote, requests)]);
    member.handle_committed(Generation(1), Step(1), requests).unwrap();
    assert!(commands(&mut member).iter().any(|command| matches!(command, Command::Save(_))));
    member.handle_computed(Generation(1), Step(2)).unwrap();
    member.handle_committed(Generation(1), Step(2), requests).unwrap();

    assert!(
        !commands(&mut member).iter().any(|command| matches!(command, Command::Save(_))),
        "one request, one checkpoint"
    );
}

// MEMBER-6
#[test]
fn member_pauses_behind_an_unsaved_step_and_keeps_its_state() {
    let world_plan = world_plan(1, [worker(0), worker(1)]);
    let mut member = running(&world_plan);
    let requests = Requests { save: 1, pause: Generation(1), ..Requests::default() };
    for step in 1..=2 {
        assert_eq!(member.report().phase, MemberPhase::Running);
        member.handle_computed(Generation(1), Step(step)).unwrap();
        member.handle_committed(Generation(1), Step(step), requests).unwrap();
    }

    let report = member.report();
    assert_eq!((report.phase, report.holds.len()), (MemberPhase::Paused, 2));
    assert_eq!(report.commit_state.applied.map(|version| version.step), Some(Step(2)));
    assert!(member.handle_computed(Generation(1), Step(3)).is_err());
    let mut later = desired_state(1, Stage::Run, Some(&world_plan));
    (later.requests, later.id.revision) = (requests, requests.revision());
    member.handle_desired_state(&later).unwrap();
    assert_eq!(member.report().holds.len(), 2, "the next world needs the state");
}

// MEMBER-6
#[test]
fn member_that_saves_at_every_step_pauses_instead() {
    let schedule = Schedule { save_steps: 1, ..Schedule::default() };
    let mut member = running_with(&world_plan(1, [worker(0), worker(1)]), schedule);
    let pause = Requests { pause: Generation(1), ..Requests::default() };
    for (step, requests) in [(1, Requests::default()), (2, pause)] {
        assert_eq!(member.report().phase, MemberPhase::Running);
        member.handle_computed(Generation(1), Step(step)).unwrap();
        member.handle_committed(Generation(1), Step(step), requests).unwrap();
    }

    let saved = commands(&mut member).into_iter().filter_map(|command| match command {
        Command::Save(part) => Some(part.of.step),
        _ => None,
    });
    assert_eq!(saved.collect::<Vec<_>>(), [Step(1)]);
    assert_eq!(member.report().phase, MemberPhase::Paused);
}

// MEMBER-4
#[test]
fn members_that_agree_to_stop_after_a_committed_step_save_it_once() {
    let schedule = Schedule { save_steps: 2, ..Schedule::default() };
    for due in [1, 2] {
        let mut member = running_with(&world_plan(1, [worker(0), worker(1)]), schedule);
        for step in 1..=due {
            member.handle_computed(Generation(1), Step(step)).unwrap();
            member.handle_committed(Generation(1), Step(step), Requests::default()).unwrap();
        }

        member.handle_stopped(Generation(1), Step(due)).unwrap();

        let saved = commands(&mut member).into_iter().filter_map(|command| match command {
            Command::Save(part) => Some(part),
            _ => None,
        });
        let saved: Vec<Part> = saved.collect();
        assert_eq!(saved.iter().map(|part| part.of.step).collect::<Vec<_>>(), [Step(due)]);
        assert_eq!(member.report().phase, MemberPhase::Saving);
        member.handle_saved(saved[0]);
        assert!(commands(&mut member).contains(&Command::Finish(Generation(1))));
    }
}

// MEMBER-5
#[test]
fn member_is_done_when_its_parts_are_durable_and_the_shell_has_finished() {
    let mut member = running(&world_plan(1, [worker(0), worker(1)]));
    let stop = Requests { stop: true, ..Requests::default() };
    member.handle_computed(Generation(1), Step(1)).unwrap();
    member.handle_committed(Generation(1), Step(1), stop).unwrap();

    let finish = Command::Finish(Generation(1));
    let before = commands(&mut member);
    let part = before.iter().find_map(|command| if let Command::Save(part) = command { Some(*part) } else { None });
    assert!(!before.contains(&finish) && member.report().phase == MemberPhase::Saving);
    assert!(!before.iter().any(|command| matches!(command, Command::Compute { .. })));
    member.handle_saved(part.unwrap());
    assert!(commands(&mut member).contains(&finish));
    member.handle_finished(Generation(1)).unwrap();

    assert_eq!(member.report().phase, MemberPhase::Done);
}

// MEMBER-5
#[test]
fn member_does_not_wait_for_an_older_part_that_failed() {
    let mut member = running(&world_plan(1, [worker(0), worker(1)]));
    let requests = [Requests { save: 1, ..Requests::default() }, Requests { stop: true, ..Requests::default() }];
    for (step, requests) in (1..).zip(requests) {
        member.handle_computed(Generation(1), Step(step)).unwrap();
        member.handle_committed(Generation(1), Step(step), requests).unwrap();
    }
    let all = commands(&mut member);
    let parts: Vec<Part> =
        all.iter().filter_map(|c| if let Command::Save(part) = c { Some(*part) } else { None }).collect();

    member.handle_saved(parts[1]);

    assert_eq!(parts.len(), 2);
    assert!(commands(&mut member).contains(&Command::Finish(Generation(1))));
}

#[test]
fn older_part_that_becomes_durable_late_does_not_replace_the_newest() {
    let world_plan = world_plan(1, [worker(0), worker(1)]);
    let mut member = running(&world_plan);
    let part =
        |step| Part { of: Checkpoint { generation: Generation(1), step: Step(step) }, shard: world_plan.holds[0][0] };

    member.handle_saved(part(20));
    member.handle_saved(part(10));

    assert_eq!(member.report().saved, Some(part(20)));
}
