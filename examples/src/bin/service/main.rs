//! Training as a service: an axum server that starts jobs, follows them and stops them over HTTP.
//!
//! `cargo run --release -p phalanx-examples --bin service -- examples` serves the YAML files of a folder:
//!
//! ```text
//! curl -d '{"config": "four-ranks.yaml"}' -H 'content-type: application/json' localhost:8080/jobs
//! curl localhost:8080/jobs/1
//! curl -N localhost:8080/jobs/1/events
//! curl -X POST localhost:8080/jobs/1/stop
//! ```
//!
//! Any client may start jobs, so the service listens only on the loopback address.

mod refusal;
mod routes;
mod service;

use anyhow::Context;
use phalanx::{Runtime, rank_process};
use service::Service;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::TcpListener;

fn main() -> anyhow::Result<()> {
    // Must come first: this executable is also the program of the ranks, and a rank process never returns from here.
    let program = rank_process();
    let mut args = std::env::args_os().skip(1);
    let configs = PathBuf::from(args.next().context("usage: service <folder of YAML files> [port]")?);
    let port = match args.next() {
        Some(port) => port.to_str().and_then(|port| port.parse().ok()).context("port must be a number below 65536")?,
        None => 8080,
    };
    let service = Arc::new(Service::new(Runtime::new(program)?, configs));
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(serve(service, port))
}

async fn serve(service: Arc<Service>, port: u16) -> anyhow::Result<()> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
    println!("listening on http://{}", listener.local_addr()?);
    let router = routes::router(Arc::clone(&service));
    tokio::select! {
        served = axum::serve(listener, router) => served?,
        interrupted = tokio::signal::ctrl_c() => interrupted?,
    }
    println!("saving and stopping all jobs");
    service.runtime.shutdown().await;
    Ok(())
}
