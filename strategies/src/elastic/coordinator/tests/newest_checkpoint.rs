//! Checkpoints that no report has shown (`COORDINATOR-22`).

use super::*;

const SAVES: Schedule = Schedule { save_steps: 100, last_step: None };

impl Job {
    /// The only rank dies as soon as its first checkpoint is committed.
    fn start_that_dies_saved() -> Job {
        let mut job = Job::start(Mesh::ONE, 1, SAVES);
        job.dies_saved = true;
        job.run_until("a checkpoint", |job| job.on_disk.is_some());
        assert_eq!(job.coordinator.record().checkpoint.step, Step(0), "nobody has reported it");
        job.dies_saved = false;
        job
    }

    fn base(&self) -> Version {
        self.coordinator.record().world_plan.as_ref().unwrap().base
    }

    pub(super) fn persist(&mut self, record: &Record) {
        if (self.refuses_record)(record) {
            return;
        }
        if let Some(world_plan) = record.world_plan.as_ref().filter(|plan| plan.generation == record.generation)
            && self.coordinator.record().generation == record.generation
            && self.coordinator.record().world_plan != record.world_plan
        {
            self.parts.begin(world_plan);
        }
        self.coordinator.handle_persisted(self.now, true);
    }

    /// The store answers all listings.
    pub(super) fn list_checkpoints(&mut self) {
        for listing in std::mem::take(&mut self.listings) {
            let counts = |found: &Checkpoint| found.generation >= listing.first && found.step > listing.after;
            self.coordinator.handle_listed(self.now, listing, self.on_disk.filter(counts));
        }
    }
}

// COORDINATOR-22
#[test]
fn job_goes_on_from_a_checkpoint_whose_only_member_died_before_it_reported_it() {
    for is_succeeded in [false, true] {
        let mut job = Job::start_that_dies_saved();
        if is_succeeded {
            job.succeed();
        }

        job.run_until("another world", |job| job.running(Mesh::ONE));

        assert_eq!((job.base().step, job.coordinator.record().checkpoint), (Step(100), job.on_disk.unwrap()));
        assert_eq!(job.coordinator.timelines.back().unwrap().n_repeated, 0);
    }
}

// COORDINATOR-22
#[test]
fn world_that_would_begin_from_a_checkpoint_waits_until_the_store_answers() {
    let mut job = Job::start_that_dies_saved();
    job.disk_is_silent = true;

    job.run_for(2_000);
    let blocked = job.coordinator.blocked();
    job.disk_is_silent = false;
    job.run_until("another world", |job| job.running(Mesh::ONE));

    assert_eq!(blocked, Some(Blocked::Listing));
    assert_eq!(job.base().step, Step(100));
}

// COORDINATOR-22
#[test]
fn stopped_job_whose_last_steps_are_in_a_checkpoint_ends_well() {
    let mut job = Job::start_that_dies_saved();

    job.coordinator.handle_stop(job.now);
    job.run_until("the end", |job| job.ended.is_some());

    assert_eq!((job.ended, job.coordinator.record().checkpoint.step), (Some(Ending::Finished), Step(100)));
}

// COORDINATOR-22
#[test]
fn stopped_job_ends_although_the_store_does_not_answer() {
    let mut job = Job::start_that_dies_saved();
    job.disk_is_silent = true;

    job.coordinator.handle_stop(job.now);
    job.run_until("the end", |job| job.ended.is_some());

    assert!(matches!(job.ended, Some(Ending::Failed(_))), "{:?}", job.ended);
}

// COORDINATOR-22
#[test]
fn checkpoint_of_an_earlier_run_in_the_same_folder_does_not_count() {
    let mut job = Job::start(Mesh::ONE, 1, SAVES);
    job.run_until("training", |job| job.step() >= Step(5));
    let lineage = job.base().lineage;
    job.on_disk = Some(Checkpoint { generation: Generation(lineage.0 - 1), step: Step(900) });

    let worker = job.worker_on(0);
    job.kill(worker);
    job.run_until("another world", |job| job.running(Mesh::ONE) && job.base().lineage > lineage);

    assert_eq!(job.base().step, Step(0));
}

// COORDINATOR-20, COORDINATOR-22
#[test]
fn job_whose_record_is_older_than_its_checkpoints_finds_those_of_this_run() {
    let mut job = Job::start(Mesh::ONE, 1, SAVES);
    job.run_until("training", |job| job.step() >= Step(5));
    let backup = Record { began: Generation(0), ..job.coordinator.record().clone() };
    let first = job.worker_on(0);
    job.kill(first);
    let later = backup.generation.next();
    job.run_until("a checkpoint of a later world", |job| job.on_disk.is_some_and(|found| found.generation == later));

    let term = job.coordinator.record().term.next();
    job.coordinator = Coordinator::new(job.now, JobId(1), term, backup, job.policy, Timing::default());
    job.run_until("a world that is not on record", |job| job.coordinator.record().unrecorded);
    let second = job.worker_on(0);
    job.kill(second);
    job.run_until("another world", |job| job.running(Mesh::ONE));

    assert!(job.base().step >= Step(100), "{:?}", job.base());
}
