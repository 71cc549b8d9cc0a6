//! Tests that hold for every job.

use super::*;
use crate::error::plan::PlanError;
use crate::events::Event;

fn runtime() -> Runtime {
    Runtime { program: RankProgram::at("/nowhere"), jobs: Arc::default() }
}

fn is_shared<T: Send + Sync + Clone + 'static>() {}
fn moves<F: Future + Send>(_: F) {}

#[tokio::test]
async fn handles_and_their_futures_move_between_threads() {
    is_shared::<Runtime>();
    is_shared::<RunningJob>();
    let runtime = runtime();
    let fails = |_: &mut dyn FnMut(Option<&str>), _: &Control, _: &Feed| Err(JobError::JobFailed("at once".into()));
    let launched = runtime.launch(Path::new("/a"), Box::new(fails));
    moves(runtime.shutdown());
    moves(async {
        let job = launched.await?;
        job.save().await.ok();
        job.resize(Default::default()).await.ok();
        job.events().next().await;
        job.wait().await
    });
}

// EMBED-3
#[tokio::test]
async fn panic_ends_only_its_own_job() {
    let runtime = runtime();
    let (go_on, other) = std::sync::mpsc::channel::<()>();
    let waits = move |under_way: &mut dyn FnMut(Option<&str>), _: &Control, _: &Feed| {
        under_way(None);
        let _ = other.recv();
        Err(JobError::JobFailed("on request".into()))
    };
    let bystander = runtime.launch(Path::new("/a"), Box::new(waits)).await.unwrap();

    let panics = |under_way: &mut dyn FnMut(Option<&str>), _: &Control, feed: &Feed| {
        under_way(None);
        feed.push(Event::Note("so far".into()));
        panic!("no rank {}", 7)
    };
    let job = runtime.launch(Path::new("/b"), Box::new(panics)).await.unwrap();
    let error = job.wait().await.unwrap_err();

    assert_eq!(error.to_string(), "a thread of the job panicked: no rank 7");
    let mut events = job.events();
    assert_eq!(events.next().await, Some(Ok(Event::Note("so far".into()))));
    assert_eq!(events.next().await, None);
    assert!(bystander.outcome().is_none());
    drop(go_on);
    assert_eq!(bystander.wait().await.unwrap_err().to_string(), "the job has failed: on request");
}

#[tokio::test]
async fn job_that_fails_its_checks_does_not_start() {
    let fails = |_: &mut dyn FnMut(Option<&str>), _: &Control, _: &Feed| Err(PlanError::UserDefinedElsewhere.into());

    let error = runtime().launch(Path::new("/a"), Box::new(fails)).await.unwrap_err();

    assert!(matches!(*error, JobError::Plan(PlanError::UserDefinedElsewhere)), "{error}");
    assert!(error.is_input());
}

// EMBED-2
#[tokio::test]
async fn second_job_in_a_folder_is_refused() {
    let runtime = runtime();
    let waits = |under_way: &mut dyn FnMut(Option<&str>), control: &Control, _: &Feed| {
        under_way(None);
        while !control.stops() {
            std::thread::yield_now();
        }
        Err(JobError::JobFailed("stopped".into()))
    };

    let first = runtime.launch(Path::new("/a"), Box::new(waits)).await.unwrap();
    let second = runtime.launch(Path::new("/a"), Box::new(waits)).await;
    let other = runtime.launch(Path::new("/b"), Box::new(waits)).await.unwrap();

    assert!(matches!(&*second.unwrap_err(), JobError::InUse { path } if path == Path::new("/a")));
    assert_eq!(runtime.jobs().len(), 2);
    runtime.shutdown().await;
    assert!(first.outcome().is_some() && other.outcome().is_some() && runtime.jobs().is_empty());
    assert!(runtime.launch(Path::new("/a"), Box::new(|_, _, _| panic!("begins"))).await.is_err());
}
