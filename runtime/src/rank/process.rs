//! A rank process: the rank actor on its control thread takes orders and gives signs of life, the device thread computes.

use crate::config::JobConfig;
use crate::config::datasets::ValSetSize;
use crate::control::Control;
use crate::error::JobError;
use crate::launch::channel;
use crate::launch::channel::{FrameReceiver, FrameSender};
use crate::launch::error::LaunchError;
use crate::rank::cell::Cell;
use crate::rank::device::Device;
use crate::rank::excuse::Excuse;
use crate::rank::warm::Warm;
use crate::rank::words::{Begin, FromRank, ToRank};
use crate::train::plan;
use crate::train::preparation::{extras, prepare_data};
use phalanx_actors::control::block_on;
use phalanx_actors::rank::{Handle, Life};
use phalanx_collective::tcp::connect::TcpConfig;
use phalanx_device::ThreadError;
use phalanx_device::pulse::Pulse;
use phalanx_strategies::elastic::identity::Step;
use phalanx_strategies::elastic::member::{Member, Schedule};
use phalanx_strategies::sampler::Sampler;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Runs the rank whose node is at the other ends of these inherited descriptors; returns its exit code.
///
/// # Errors
/// When there is no node at their other ends, so that nobody could be told.
pub(crate) fn run(channel: RawFd, passage: RawFd) -> Result<i32, LaunchError> {
    #[allow(unsafe_code)] // Taking descriptors by their numbers.
    // SAFETY: the node opened both for this process and names them in its arguments. This is the first thing that the process
    // does, so nobody has taken them; a number that is the same twice is refused.
    let ((mut sender, mut receiver), passage) = unsafe {
        if channel == passage {
            return Err(LaunchError::NoChannel { fd: passage });
        }
        (channel::adopt(channel)?, channel::adopt_passage(passage)?)
    };
    let begin = match begin(&mut receiver) {
        Ok(begin) => begin,
        Err(error) => {
            FromRank::Failed(Excuse::from(&error)).deliver(&mut sender);
            return Ok(1);
        }
    };
    let worker = begin.worker;
    let (sender, excuse) = match serve(begin, sender, receiver, passage) {
        Ok(()) => return Ok(0),
        Err(failed) => failed,
    };
    // It never became a member; as one it would say so with its reports.
    let Some(mut sender) = sender else { return Ok(1) };
    tracing::warn!(%worker, "a rank could not begin");
    let code = if excuse.is_input { 2 } else { 1 };
    FromRank::Failed(excuse).deliver(&mut sender);
    Ok(code)
}

type Failed = (Option<FrameSender>, Excuse);

fn serve(begin: Begin, sender: FrameSender, receiver: FrameReceiver, passage: UnixStream) -> Result<(), Failed> {
    let mut sender = Some(sender);
    let serve = || -> Result<(), JobError> {
        let config = JobConfig::from_yaml_str(&begin.yaml, &[])?;
        let tokenizer = plan::tokenizer(&config)?;
        let model = plan::model_plan(&config, &tokenizer)?;
        let data = prepare_data(&config, &model, &tokenizer, &mut |_| {})?;
        let n_rows = data.train.len() as u64;
        let run = plan::run_plan(&config, n_rows);
        let batch_rows = config.sequences_per_step() as u64;
        let sampler = Sampler::new(config.output.seed, n_rows, batch_rows, config.data.shuffle)?;
        let bind = |source| JobError::Io { action: "listen at", path: "a port for other nodes".into(), source };
        let here = begin.listen.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let listener = TcpListener::bind(SocketAddr::new(here, 0)).map_err(bind)?;
        let address = begin.listen.map(|_| listener.local_addr()).transpose().map_err(bind)?;
        let schedule =
            Schedule { save_steps: config.output.save_steps.unwrap_or(0), last_step: Some(Step(run.total_steps)) };
        let member = Member::new(begin.job, begin.worker, address, schedule).with_pid(std::process::id());
        let control = Arc::new(Control::default());
        let sender = sender.take().expect("it is taken once");
        let pulse = Pulse::new();
        let cell = Arc::new(Cell::new(member, sender, Arc::clone(&control), pulse.clone()));
        let extras = extras(&config, &model, &tokenizer)?;
        let evaluates = config.data.val_set_size != ValSetSize::Nothing;
        // Before it says its first word: then others may wait for it.
        let (warm, memories) = Warm::new(&begin, &passage, &model, evaluates, config.output.seed)?;
        model.device.on_device_thread(begin.n_threads, || {
            let mut device = Device {
                cell: Arc::clone(&cell),
                control,
                job: begin.job,
                worker: begin.worker,
                evaluates,
                extras,
                config: &config,
                model: &model,
                run,
                sampler,
                data: &data,
                n_threads: begin.n_threads,
                passage,
                listener,
                tcp: tcp_config(&begin),
                pulse,
                peak_flops: begin.peak_flops,
                start_from: begin.start_from.clone(),
                plans: BTreeMap::new(),
                memories,
                spare: None,
                warm: Some(warm),
                seats: Vec::new(),
            };
            // Whoever is missing is named well before it counts as lost.
            let life = Life { interval: begin.timing.life, patience: begin.timing.suspicion / 4 };
            let refused = |source| JobError::Thread(ThreadError::Spawn(source));
            let rank = block_on(Handle::start(cell.clone(), life)).and_then(|rank| rank).map_err(refused)?;
            cell.belongs_to(rank.clone());
            obey(rank, receiver)?;
            device.run();
            Ok::<(), JobError>(())
        })?
    };
    let outcome = serve();
    outcome.map_err(|error| (sender, Excuse::from(&error)))
}

fn begin(receiver: &mut FrameReceiver) -> Result<Begin, JobError> {
    let unusable = |what: String| JobError::Unusable(format!("a rank was told nothing that it can run: {what}"));
    let frame = receiver.receive().map_err(|e| unusable(e.to_string()))?;
    let frame = frame.ok_or_else(|| unusable("its node has gone".into()))?;
    match serde_json::from_slice(&frame) {
        Ok(ToRank::Begin(begin)) => Ok(*begin),
        Ok(ToRank::Order(_)) => Err(unusable("an order came first".into())),
        Err(error) => Err(unusable(error.to_string())),
    }
}

/// A machine that does not answer is noticed so early that the coordinator, which hears all nodes once more before it believes
/// that, knows of it as soon as of one that says nothing.
fn tcp_config(begin: &Begin) -> TcpConfig {
    let lost_after = begin.timing.detection_time.saturating_sub(begin.timing.heartbeat);
    let config = TcpConfig::new(begin.secret.clone());
    TcpConfig { unacknowledged_max: lost_after, unanswered_max: lost_after, ..config }
}

/// Passes orders on as long as there is a node.
fn obey(rank: Handle, mut receiver: FrameReceiver) -> Result<(), JobError> {
    on_own_thread("orders", move || {
        while let Ok(Some(frame)) = receiver.receive() {
            match serde_json::from_slice(&frame) {
                Ok(ToRank::Order(order)) => rank.order(order),
                Ok(ToRank::Begin(_)) | Err(_) => tracing::warn!("an order that is none was ignored"),
            }
        }
    })
}

fn on_own_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), JobError> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(work);
    spawned.map(drop).map_err(|e| JobError::Thread(ThreadError::Spawn(e)))
}
