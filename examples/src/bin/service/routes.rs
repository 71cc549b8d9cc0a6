//! The HTTP routes.

use super::refusal::Refusal;
use super::service::Service;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::response::Sse;
use axum::response::sse::{Event as SseEvent, KeepAlive};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::{Stream, StreamExt};
use phalanx::{Event, RequestError, RunningJob};
use serde::Deserialize;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;

/// Limit of a request's body.
const BODY_BYTES_MAX: usize = 4096;

pub(crate) fn router(service: Arc<Service>) -> Router {
    Router::new()
        .route("/jobs", get(list).post(start))
        .route("/jobs/{id}", get(show))
        .route("/jobs/{id}/events", get(events))
        .route("/jobs/{id}/save", post(save))
        .route("/jobs/{id}/stop", post(stop))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(service)
}

/// Body of a request to start a job.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Start {
    /// Name of a file in the folder of the service.
    config: String,
}

type Answer = Result<(StatusCode, Json<Value>), Refusal>;

async fn start(State(service): State<Arc<Service>>, Json(start): Json<Start>) -> Answer {
    let id = service.start(&start.config).await?;
    Ok((StatusCode::CREATED, Json(json!({ "id": id }))))
}

async fn list(State(service): State<Arc<Service>>) -> Json<Value> {
    let jobs = service.jobs();
    Json(
        jobs.iter().map(|(id, job)| json!({ "id": id, "output_dir": job.output_dir(), "state": state(job) })).collect(),
    )
}

async fn show(State(service): State<Arc<Service>>, Path(id): Path<u64>) -> Answer {
    let job = service.job(id)?;
    let status = match job.status().await {
        Ok(status) => Some(status),
        Err(RequestError::NotYet | RequestError::Ended) => None,
        Err(error) => return Err(error.into()),
    };
    let (report, error) = match job.outcome() {
        Some(Ok(report)) => (Some(report), None),
        Some(Err(error)) => (None, Some(error.to_string())),
        None => (None, None),
    };
    let shown = json!({
        "id": id,
        "output_dir": job.output_dir(),
        "state": state(&job),
        "status": status,
        "report": report,
        "error": error,
    });
    Ok((StatusCode::OK, Json(shown)))
}

async fn save(State(service): State<Arc<Service>>, Path(id): Path<u64>) -> Answer {
    service.job(id)?.save().await?;
    Ok((StatusCode::ACCEPTED, Json(json!({ "id": id }))))
}

async fn stop(State(service): State<Arc<Service>>, Path(id): Path<u64>) -> Answer {
    service.job(id)?.stop();
    Ok((StatusCode::ACCEPTED, Json(json!({ "id": id }))))
}

/// Server-sent events until the end of the job; a client that reads too slowly gets the number of missed events.
async fn events(
    State(service): State<Arc<Service>>,
    Path(id): Path<u64>,
) -> Result<Sse<impl Stream<Item = Result<SseEvent, Infallible>>>, Refusal> {
    let events = service.job(id)?.events().map(|event| {
        let (name, data) = match event {
            Ok(Event::Preparing { path, done_bytes, total_bytes }) => {
                ("preparing", json!({ "path": path, "done_bytes": done_bytes, "total_bytes": total_bytes }))
            }
            Ok(Event::Reference { done, total }) => ("reference", json!({ "done": done, "total": total })),
            Ok(Event::Started(started)) => ("started", json!(started)),
            Ok(Event::Step(metrics)) => ("step", json!(metrics)),
            Ok(Event::Eval(metrics)) => ("eval", json!(metrics)),
            Ok(Event::Saved { step, path }) => ("saved", json!({ "step": step, "path": path })),
            Ok(Event::NotSaved { step, reason }) => ("not_saved", json!({ "step": step, "reason": reason })),
            Ok(Event::Note(text)) => ("note", json!(text)),
            Err(missed) => ("missed", json!(missed.0)),
        };
        Ok(SseEvent::default().event(name).data(data.to_string()))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

fn state(job: &RunningJob) -> &'static str {
    match job.outcome() {
        None => "runs",
        Some(Ok(report)) if report.finished => "finished",
        Some(Ok(_)) => "stopped",
        Some(Err(_)) => "failed",
    }
}
