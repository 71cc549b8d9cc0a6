//! The shells of coordinator and supervisors drive their machines: a job starts, survives faults, carries out requests, and
//! ends.

mod job;

use job::{Job, shards, simulate};
use phalanx_actors::coordinator::{Drain, GetStatus, RequestError, Resize, Save, Stop};
use phalanx_actors::events::What;
use phalanx_actors::store::memory::Memory;
use phalanx_actors::store::{Store, StoreError};
use phalanx_actors::supervisor::DrainNode;
use phalanx_strategies::elastic::checkpoint::Checkpoint;
use phalanx_strategies::elastic::coordinator::Activity;
use phalanx_strategies::elastic::coordinator::outlook::Outlook;
use phalanx_strategies::elastic::identity::{Generation, NodeId, Step, Term};
use phalanx_strategies::elastic::incident::Why;
use phalanx_strategies::elastic::member::Schedule;
use phalanx_strategies::elastic::message::{Ending, Record};
use phalanx_strategies::elastic::succession::Lease;
use phalanx_strategies::mesh::Mesh;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn until(step: u64) -> Schedule {
    Schedule { save_steps: 0, last_step: Some(Step(step)) }
}

#[test]
fn death_of_a_process_is_one_incident_with_its_phases_and_training_resumes() {
    simulate(async {
        let job = Job::start(shards(2), 2, Schedule::default()).await;
        let before = job.until_running(shards(2), Step(10)).await;

        let dead = job.kill_worker_on(1).await;
        job.until("another world", |status| status.generation > before.generation).await;
        let after = job.until_running(shards(2), before.step).await;

        let incidents = job.incidents();
        assert_eq!(incidents.iter().map(|line| line.why).collect::<Vec<_>>(), [Why::Started, Why::Died]);
        let line = &incidents[1];
        assert_eq!((line.worker, line.generation), (Some(dead), after.generation));
        assert!(line.phases_ms.heal > 0.0 && line.total_ms < 300.0, "{line:?}");
        assert!(line.first_step > before.step, "no committed step was lost");
        let worlds = job.plane.borrow().events.iter().filter(|event| matches!(event.what, What::World(_))).count();
        assert_eq!(worlds, 2);
    });
}

/// A store that cannot write records until it is repaired.
#[derive(Debug, Default)]
struct Broken {
    memory: Memory,
    is_repaired: AtomicBool,
}

impl Store for Broken {
    fn read_lease(&self) -> Result<Lease, StoreError> {
        self.memory.read_lease()
    }

    fn replace_lease(&self, old: Lease, new: Lease) -> Result<Result<Lease, Lease>, StoreError> {
        self.memory.replace_lease(old, new)
    }

    fn read_record(&self) -> Result<Record, StoreError> {
        self.memory.read_record()
    }

    fn write_record(&self, record: &Record) -> Result<bool, StoreError> {
        if self.is_repaired.load(Ordering::SeqCst) {
            return self.memory.write_record(record);
        }
        Err(StoreError::Io { path: "record".into(), action: "written", message: "the disk is full".into() })
    }
}

// COORDINATOR-ACTOR-2
#[test]
fn only_a_job_whose_nodes_end_with_its_coordinator_trains_before_its_record_is_durable() {
    for is_alone in [true, false] {
        simulate(async move {
            let store = Arc::new(Broken::default());
            let job = Job::start_on(store.clone(), is_alone, shards(2), 2, until(1_000)).await;
            if is_alone {
                job.until_running(shards(2), Step(10)).await;
                let before = job.until_running(shards(2), Step(10)).await;
                job.kill_worker_on(1).await;
                job.until("another world", |status| status.generation > before.generation).await;
                job.until_running(shards(2), before.step).await;
            } else {
                tokio::time::sleep(std::time::Duration::from_secs(5)).await;
                assert_eq!(job.status().await.unwrap().mesh, None, "no world may form");
            }
            job.coordinators[0].do_send(Stop);
            tokio::time::sleep(std::time::Duration::from_secs(5)).await;
            assert_eq!(store.read_record().unwrap(), Record::default());
            assert!(!job.happened(&What::Ended { ending: Ending::Finished }), "the end must be durable");

            store.is_repaired.store(true, Ordering::SeqCst);
            job.until_happened(What::NodesNotified).await;

            let record = store.read_record().unwrap();
            assert_eq!(record.ending, Some(Ending::Finished));
            assert!(!is_alone || record.generation >= Generation(2), "later records replaced earlier ones: {record:?}");
        });
    }
}

// COORDINATOR-ACTOR-3
#[test]
fn end_of_a_job_waits_for_a_store_that_is_gone_only_as_long_as_it_may() {
    simulate(async move {
        let (store, patience) = (Arc::new(Broken::default()), std::time::Duration::from_secs(20));
        let job = Job::start_with(store.clone(), true, Some(patience), shards(2), 2, until(1_000)).await;
        job.until_running(shards(2), Step(10)).await;

        let begin = tokio::time::Instant::now();
        job.coordinators[0].do_send(Stop);
        job.until_happened(What::NodesNotified).await;

        let waited = begin.elapsed();
        assert!(waited >= patience && waited < 2 * patience, "{waited:?}");
        let status = job.status().await.unwrap();
        let Some(Ending::Failed(why)) = status.ending else { panic!("{status:?}") };
        assert!(why.contains("cannot be recorded") && why.contains("the disk is full"), "{why}");
    });
}

#[test]
fn standby_takes_over_from_the_store_and_the_world_keeps_training() {
    simulate(async {
        let mut job = Job::start(shards(2), 2, Schedule::default()).await;
        let before = job.until_running(shards(2), Step(10)).await;
        job.add_candidate();
        let refused = job.coordinators[1].send(GetStatus).await.unwrap();
        assert_eq!(refused, Err(RequestError::NotLeading));

        job.kill_coordinator(0).await;
        let after = job.until("a successor", |status| status.activity == Activity::Running).await;

        assert_eq!((before.term, after.term), (Term(1), Term(2)));
        assert_eq!(after.generation, before.generation, "the world outlives its coordinator");
        assert!(after.step > before.step, "members trained meanwhile");
        assert_eq!(job.store.read_record().unwrap().term, Term(1), "no durable state has changed");
        let dead = job.kill_worker_on(0).await;
        job.until("another world", |status| status.generation > before.generation).await;
        job.until_running(shards(2), after.step).await;
        assert_eq!(job.incidents().last().unwrap().worker, Some(dead));
        assert_eq!(job.store.read_record().unwrap().term, Term(2));
    });
}

#[test]
fn requested_checkpoint_is_written_and_reported() {
    simulate(async {
        let job = Job::start(shards(2), 2, Schedule::default()).await;
        job.until_running(shards(2), Step(10)).await;

        job.coordinators[0].send(Save).await.unwrap().unwrap();
        let saved = job.until("a checkpoint", |status| status.checkpoint.step > Step(0)).await;

        job.until_happened(What::Checkpoint(saved.checkpoint)).await;
        assert!(saved.checkpoint.step >= Step(10));
        assert_eq!(saved.requests.save, 1);
    });
}

#[test]
fn stopped_job_ends_on_all_nodes_and_for_a_successor() {
    simulate(async {
        let mut job = Job::start(shards(2), 3, Schedule::default()).await;
        job.until_running(shards(2), Step(10)).await;

        job.coordinators[0].send(Stop).await.unwrap().unwrap();
        job.until_happened(What::NodesNotified).await;

        assert!(job.happened(&What::Ended { ending: Ending::Finished }));
        job.until("the end of all nodes", |_| job.plane.borrow().down.len() == 3).await;
        let record = job.store.read_record().unwrap();
        assert!(record.checkpoint.step >= Step(10), "the last step is saved");
        job.kill_coordinator(0).await;
        job.add_candidate();
        let status = job.until("a successor", |status| status.term == Term(2)).await;
        assert_eq!(status.activity, Activity::Finished);
    });
}

#[test]
fn request_to_a_job_that_is_over_is_answered() {
    simulate(async {
        let job = Job::start(shards(2), 2, until(30)).await;
        job.until_happened(What::Ended { ending: Ending::Finished }).await;

        let asked = job.coordinators[0].send(Stop);
        let answer = tokio::time::timeout(std::time::Duration::from_secs(60), asked).await;

        let over = Outlook::NoEffect("the job is over".into());
        assert_eq!(answer.expect("an answer").unwrap(), Ok(over));
    });
}

#[test]
fn job_ends_after_its_last_step() {
    simulate(async {
        let job = Job::start(shards(2), 2, until(30)).await;

        job.until_happened(What::NodesNotified).await;

        assert_eq!(job.store.read_record().unwrap().checkpoint.step, Step(30));
        assert_eq!(job.incidents().len(), 1, "the start is the only incident");
    });
}

#[test]
fn drained_node_ends_and_the_others_train_on_with_its_state() {
    simulate(async {
        let job = Job::start(shards(3), 3, Schedule::default()).await;
        let before = job.until_running(shards(3), Step(10)).await;

        job.coordinators[0].send(Drain(NodeId(2))).await.unwrap().unwrap();
        let after = job.until_running(shards(2), before.step).await;
        job.until("the end of the node", |_| job.plane.borrow().down.contains(&NodeId(2))).await;

        assert_eq!(after.checkpoint.step, Step(0), "no state was read from a checkpoint");
        assert_eq!(job.incidents().last().unwrap().why, Why::Drains);
    });
}

#[test]
fn draining_node_is_replaced_by_a_spare_and_ends() {
    simulate(async {
        let job = Job::start(shards(2), 3, Schedule::default()).await;
        let before = job.until_running(shards(2), Step(10)).await;

        job.supervisor(0).send(DrainNode).await.unwrap();
        job.until("the end of the node", |_| job.plane.borrow().down.contains(&NodeId(0))).await;
        let after = job.until_running(shards(2), before.step).await;

        let assigned = after.nodes.iter().flat_map(|node| &node.ranks).filter(|worker| worker.rank.is_some());
        assert_eq!(assigned.map(|worker| worker.member.node).collect::<Vec<_>>(), [NodeId(1), NodeId(2)]);
    });
}

#[test]
fn requested_mesh_is_formed_when_enough_nodes_are_present_and_an_invalid_one_is_refused() {
    simulate(async {
        let mut job = Job::start(shards(2), 2, Schedule::default()).await;
        job.until_running(shards(2), Step(10)).await;

        let refused = job.coordinators[0].send(Resize(Mesh { tp: 0, ..Mesh::ONE })).await.unwrap();
        assert!(matches!(refused, Err(RequestError::Resize(_))), "{refused:?}");
        job.coordinators[0].send(Resize(shards(3))).await.unwrap().unwrap();
        let waiting = job.until("a reason", |status| status.blocked.is_some()).await;
        assert_eq!(waiting.blocked.unwrap(), "the requested mesh needs 3 members, 2 are present");
        job.add_node(NodeId(2));
        job.until_running(shards(3), waiting.step).await;

        assert_eq!(job.incidents().last().unwrap().why, Why::Resized);
    });
}

// COORDINATOR-ACTOR-4
#[test]
fn world_begins_from_the_checkpoint_that_its_store_has_once_the_store_answers() {
    simulate(async {
        let job = Job::start(shards(1), 1, Schedule::default()).await;
        let before = job.until_running(shards(1), Step(10)).await;
        let found = Checkpoint { generation: before.generation, step: Step(1_000) };
        *job.on_disk.lock().unwrap() = vec![Ok(found), Err("the bucket does not answer".into())];

        job.kill_worker_on(0).await;
        job.until_happened(What::Checkpoint(found)).await;
        job.until_running(shards(1), Step(1_001)).await;

        assert_eq!(job.store.read_record().unwrap().checkpoint, found);
    });
}
