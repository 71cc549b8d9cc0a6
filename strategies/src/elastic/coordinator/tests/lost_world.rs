//! Worlds whose members do not return, nodes that are declared gone, and records from a backup (`COORDINATOR-19`,
//! `COORDINATOR-20`).

use super::super::outlook::{Asked, Outlook};
use super::*;

const SAVES: Schedule = Schedule { save_steps: 50, last_step: None };

impl Job {
    /// Two nodes with a rank, and a third one that is ready; trains until it is past a checkpoint.
    fn start_with_a_spare_node(replace_patience: Duration) -> Job {
        Job::start_with_spare_nodes(1, replace_patience)
    }

    fn start_with_spare_nodes(n_spare: u32, replace_patience: Duration) -> Job {
        let mut job = Job::start(Mesh { dp_replicate: 2, ..Mesh::ONE }, 2 + n_spare, SAVES);
        job.coordinator.policy.replace_patience = replace_patience;
        job.policy.replace_patience = replace_patience;
        job.run_until("a checkpoint", |job| job.coordinator.record().checkpoint.step >= Step(50));
        job.run_until("steps after it", |job| job.step() > job.coordinator.record().checkpoint.step);
        job
    }

    /// Machines lose their power: no report ever says so.
    fn lose(&mut self, nodes: &[u32]) {
        self.nodes.retain(|node, _| !nodes.contains(&node.0));
        self.members.retain(|worker, _| !nodes.contains(&worker.member.node.0));
    }

    fn nodes_of_world(&self) -> Vec<u32> {
        let world_plan = self.coordinator.record().world_plan.clone().unwrap();
        world_plan.assignments.iter().map(|worker| worker.member.node.0).collect()
    }
}

// COORDINATOR-19, QUORUM-3
#[test]
fn job_whose_members_are_all_lost_goes_on_from_its_checkpoint_and_counts_the_repeated_steps() {
    for succeeded in [false, true] {
        let mut job = Job::start_with_a_spare_node(Duration::from_secs(2));
        let (saved, committed) = (job.coordinator.record().checkpoint.step, job.step());
        let lost = job.nodes_of_world();
        job.lose(&lost);
        if succeeded {
            job.succeed();
        }

        job.run_until("training", |job| job.running(Mesh::ONE) && job.step() > committed);

        let timeline = job.coordinator.timelines.back().unwrap().clone();
        let world_plan = job.coordinator.record().world_plan.clone().unwrap();
        assert_eq!((world_plan.base.step, world_plan.base.lineage), (saved, world_plan.generation));
        if !succeeded {
            assert_eq!(timeline.n_repeated, committed.0 - saved.0);
            assert!(timeline.to_string().contains("repeating"), "{timeline}");
        }
        assert!(timeline.total() >= job.coordinator.lost_patience(), "{timeline}");
    }
}

// QUORUM-3
#[test]
fn members_of_an_abandoned_world_that_return_bring_no_state_and_no_checkpoint_of_it() {
    let mut job = Job::start_with_a_spare_node(Duration::from_secs(2));
    let lost = job.nodes_of_world();
    let away: Vec<(NodeId, Supervisor)> = job.nodes.extract_if(.., |node, _| lost.contains(&node.0)).collect();
    let old = job.coordinator.record().generation;
    job.run_until("another world", |job| job.running(Mesh::ONE));
    let (next, base) = {
        let record = job.coordinator.record();
        (record.generation, record.world_plan.clone().unwrap().base)
    };

    // They have trained on, and saved, where the coordinator did not hear them.
    job.nodes.extend(away);
    let saved = job.coordinator.record().checkpoint;
    job.run_until("the whole mesh", |job| job.running(Mesh { dp_replicate: 2, ..Mesh::ONE }));

    let world_plan = job.coordinator.record().world_plan.clone().unwrap();
    assert!(next > old && world_plan.base.lineage == base.lineage && base.lineage == next);
    assert!(job.coordinator.record().checkpoint.generation >= next || job.coordinator.record().checkpoint == saved);
}

// COORDINATOR-19
#[test]
fn job_with_endless_patience_waits_for_lost_members_until_their_nodes_are_declared_gone() {
    let mut job = Job::start_with_spare_nodes(2, crate::elastic::quorum::FOREVER);
    let lost = job.nodes_of_world();
    job.lose(&lost);
    job.run_for(1_500);

    let blocked = job.coordinator.blocked().unwrap().to_string();
    assert!(blocked.contains("drain --gone"), "{blocked}");
    assert_eq!(job.coordinator.outlook(Asked::Change), Outlook::NoEffect(blocked));
    job.coordinator.handle_gone(job.now, NodeId(lost[0])).unwrap();
    job.run_for(100);
    assert_ne!(job.coordinator.activity(), Activity::Running, "one of two may still train");
    job.coordinator.handle_gone(job.now, NodeId(lost[1])).unwrap();

    job.run_for(100);
    assert!(job.running(Mesh { dp_replicate: 2, ..Mesh::ONE }), "at once: {:?}", job.coordinator.status(job.now));
}

// QUORUM-4
#[test]
fn node_that_is_declared_gone_is_not_waited_for() {
    for patience in [Duration::from_secs(600), crate::elastic::quorum::FOREVER] {
        let mut job = Job::start(shards(2), 2, SAVES);
        job.coordinator.policy.replace_patience = patience;
        job.run_until("training", |job| job.step() >= Step(5));
        job.lose(&[1]);
        job.run_until("a wait", |job| matches!(job.coordinator.blocked(), Some(Blocked::Replacements { .. })));
        let waiting = job.coordinator.blocked().unwrap().to_string();

        job.coordinator.handle_gone(job.now, NodeId(1)).unwrap();

        job.run_for(100);
        assert!(job.running(shards(1)), "at once: {:?}", job.coordinator.status(job.now));
        assert!(waiting.contains("drain --gone") || waiting.contains(" s for replacements"), "{waiting}");
    }
}

// QUORUM-4
#[test]
fn node_that_was_declared_gone_is_refused_when_it_returns_and_takes_part_after_a_new_start() {
    let mut job = Job::start_with_a_spare_node(Duration::from_secs(2));
    let gone = job.nodes_of_world()[0];
    let away: Vec<(NodeId, Supervisor)> = job.nodes.extract_if(.., |node, _| node.0 == gone).collect();
    job.run_until("silence", |job| job.coordinator.membership.is_silent(NodeId(gone)));

    job.coordinator.handle_gone(job.now, NodeId(gone)).unwrap();
    job.run_until("the record", |job| job.coordinator.record().gone.contains_key(&NodeId(gone)));
    job.run_until("the whole mesh", |job| job.running(Mesh { dp_replicate: 2, ..Mesh::ONE }));
    job.succeed();
    job.nodes.extend(away);
    job.run_until("the refusal", |job| !job.nodes.contains_key(&NodeId(gone)));
    assert!(job.refused[0].1.contains("declared node"), "{:?}", job.refused);
    job.members.retain(|worker, _| worker.member.node.0 != gone);
    job.now += Duration::from_secs(100);
    job.run_for(200);
    let boot = Incarnation(job.coordinator.record().gone[&NodeId(gone)].0 + 1);
    let again = Supervisor::new(job.now, JobId(1), NodeId(gone), boot, 1, Timing::default());
    job.nodes.insert(NodeId(gone), again);
    job.run_for(200);

    assert!(job.nodes.contains_key(&NodeId(gone)), "a new start takes part");
    assert!(job.coordinator.candidates().iter().any(|worker| worker.member.node.0 == gone));
}

#[test]
fn node_that_reports_cannot_be_declared_gone_and_silent_ones_cannot_be_drained() {
    let mut job = Job::start_with_a_spare_node(Duration::from_secs(2));
    let before = job.coordinator.record().clone();

    let reports = job.coordinator.handle_gone(job.now, NodeId(0)).unwrap_err().to_string();
    let unknown = job.coordinator.handle_gone(job.now, NodeId(9)).unwrap_err().to_string();
    assert!(reports.contains("node 0 reports") && unknown.contains("never taken part"), "{reports} {unknown}");
    assert!(job.coordinator.handle_drain(job.now, NodeId(9)).is_err());
    assert_eq!(*job.coordinator.record(), before, "nothing has changed");

    let lost = job.nodes_of_world();
    job.lose(&lost);
    job.run_until("silence", |job| job.coordinator.membership.is_silent(NodeId(lost[0])));
    let silent = job.coordinator.handle_drain(job.now, NodeId(lost[0])).unwrap_err().to_string();
    assert!(silent.contains("does not report") && silent.contains("--gone"), "{silent}");
}

// COORDINATOR-19
#[test]
fn stopped_job_whose_state_does_not_return_ends_and_names_its_checkpoint() {
    stop_without_state(Job::start(shards(2), 2, SAVES), &[0]);
}

#[test]
fn stopped_job_with_endless_patience_does_not_wait_for_its_state_for_ever() {
    let mut job = Job::start(shards(2), 2, SAVES);
    job.coordinator.policy.replace_patience = crate::elastic::quorum::FOREVER;
    // Nobody is left, so the world may not be followed either.
    stop_without_state(job, &[0, 1]);
}

fn stop_without_state(mut job: Job, lost: &[u32]) {
    job.coordinator.policy.dp_shard_min = 2;
    job.coordinator.policy.shadows = false;
    job.run_until("a checkpoint", |job| job.coordinator.record().checkpoint.step >= Step(50));
    job.run_until("steps after it", |job| job.step() > job.coordinator.record().checkpoint.step);
    job.lose(lost);
    job.run_until("a wait", |job| job.coordinator.blocked().is_some());

    job.coordinator.handle_stop(job.now);
    while job.deliver() {}
    let Outlook::Later(text) = job.coordinator.outlook(Asked::Stop) else { panic!("{:?}", job.coordinator.blocked()) };
    assert!(text.contains("the job ends within"), "{text}");
    job.run_until("the end", |job| job.ended.is_some());

    let Some(Ending::Failed(reason)) = &job.ended else { panic!("{:?}", job.ended) };
    assert!(reason.contains("the newest checkpoint is that of step"), "{reason}");
}

#[test]
fn drain_of_a_node_that_the_mesh_needs_tells_what_happens() {
    let mut job = Job::start(Mesh { tp: 2, ..Mesh::ONE }, 2, SAVES);
    job.run_until("training", |job| job.step() >= Step(3));

    job.coordinator.handle_drain(job.now, NodeId(1)).unwrap();

    let Outlook::Later(text) = job.coordinator.outlook(Asked::Drain(NodeId(1))) else { panic!("no word") };
    assert!(text.contains("needs 2 ranks, and without node 1 there are 1"), "{text}");
}

#[test]
fn status_names_the_last_committed_step_while_no_world_trains() {
    let mut job = Job::start_with_a_spare_node(Duration::from_secs(60));
    let before = job.step();
    let lost = job.nodes_of_world();
    job.lose(&lost);

    job.run_until("a wait", |job| job.coordinator.blocked().is_some());

    assert!(job.step() >= before && before > Step(0), "{} after {before}", job.step());
}

// COORDINATOR-20
#[test]
fn coordinator_with_a_record_from_a_backup_goes_on_from_the_state_of_its_members() {
    let mut job = Job::start(Mesh { dp_replicate: 2, ..Mesh::ONE }, 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(3));
    let backup = job.coordinator.record().clone();
    for _ in 0..2 {
        let (worker, step) = (job.worker_on(0), job.committed);
        job.kill(worker);
        job.run_until("steps", |job| job.committed > Step(step.0 + 3));
    }
    let (latest, committed) = (job.coordinator.record().generation, job.committed);

    // Also with the term of the backup: the store has lost the later ones.
    job.coordinator = Coordinator::new(job.now, JobId(1), Term(2), backup, job.policy, Timing::default());
    job.run_until("another world", |job| job.coordinator.record().generation > latest);
    job.run_until("training", |job| job.running(Mesh { dp_replicate: 2, ..Mesh::ONE }));

    let world_plan = job.coordinator.record().world_plan.clone().unwrap();
    assert!(world_plan.generation > latest, "{} after {latest}", world_plan.generation);
    assert!(world_plan.base.step >= committed, "no step is lost: {} after {committed}", world_plan.base.step);
    let timeline = job.coordinator.timelines.back().unwrap().to_string();
    assert!(timeline.contains("restored from a backup"), "{timeline}");
}

// COORDINATOR-20
#[test]
fn coordinator_whose_term_is_behind_that_of_its_nodes_asks_for_a_later_one() {
    let mut job = Job::start(Mesh { dp_replicate: 2, ..Mesh::ONE }, 2, Schedule::default());
    let backup = job.coordinator.record().clone();
    job.succeed();
    job.succeed();
    job.run_until("training", |job| job.step() >= Step(3));
    let theirs = job.coordinator.record().term;

    let mut late = Coordinator::new(job.now, JobId(1), Term(1), backup, job.policy, Timing::default());
    let supervisor = job.nodes.get_mut(&NodeId(0)).unwrap();
    supervisor.handle_timeout(job.now + Timing::default().heartbeat);
    while let Some(command) = supervisor.poll_command() {
        if let supervisor::Command::Send(report) = command {
            late.handle_report(job.now, &report).unwrap();
        }
    }

    let commands: Vec<Command> = std::iter::from_fn(|| late.poll_command()).collect();
    assert!(commands.contains(&Command::Outrun(theirs)), "{commands:?}");
}

// COORDINATOR-21
#[test]
fn storm_of_crashes_within_seconds_does_not_end_a_job() {
    let mut job = Job::start(shards(2), 2, SAVES);
    job.run_until("a checkpoint", |job| job.coordinator.record().checkpoint.step >= Step(50));

    job.crashing = Some(NodeId(0));
    job.run_for(1_000);
    let n_crashes = job.coordinator.record().n_crashes;
    job.crashing = None;
    let committed = job.committed;
    job.run_until("training", |job| job.committed > committed);

    assert_eq!(job.ended, None);
    assert!((4..12).contains(&n_crashes), "pauses grow: {n_crashes} crashes in ten seconds");
}

// COORDINATOR-6
#[test]
fn requested_checkpoint_that_cannot_be_saved_is_answered_once_and_a_later_one_ends_the_fault() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    job.disk_is_full = true;

    job.coordinator.handle_save(job.now);
    job.run_until("an answer", |job| job.coordinator.status(job.now).n_unsaved == 1);

    let status = job.coordinator.status(job.now);
    assert_eq!((status.requests.save, status.n_saves, job.unsaved.len()), (1, 0, 1));
    assert!(status.faults[0].contains("was not saved: no space left"), "{:?}", status.faults);
    job.disk_is_full = false;
    job.coordinator.handle_save(job.now);
    job.run_until("a checkpoint", |job| job.coordinator.record().n_saves == 2);
    assert_eq!(job.coordinator.status(job.now).unsaved, None);
}

// COORDINATOR-7
#[test]
fn job_whose_store_is_gone_for_good_ends_at_once_and_tells_its_nodes() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));

    job.coordinator.handle_store_lost(job.now, "its folder was removed".into());
    job.run_until("the end", |job| job.nodes.is_empty());

    assert_eq!(job.ended, Some(Ending::Failed("its folder was removed".into())));
    assert!(job.coordinator.all_notified());
}
