//! A rank process: the rank actor on its control thread receives desired states and sends heartbeats; the device thread
//! computes.

use crate::config::JobConfig;
use crate::control::Control;
use crate::data::tokenizer::Tokenizer;
use crate::devices::Chosen;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::error::peer::PeerError;
use crate::frontend::UserModel;
use crate::launch::channel;
use crate::launch::channel::FrameReceiver;
use crate::launch::error::LaunchError;
use crate::launch::liveness;
use crate::rank::cpu_limit;
use crate::rank::device::Device;
use crate::rank::device_watch::DeviceWatch;
use crate::rank::failure_report::FailureReport;
use crate::rank::opening::Opening;
use crate::rank::port::{Outbox, Port};
use crate::rank::rank_messages::{Begin, FromRank, ToRank};
use crate::rank::warm::Warm;
use crate::train::output_lock::RankLock;
use crate::train::plan;
use crate::train::plan::{MakeModel, ModelPlan};
use crate::train::planted::{self, Planted};
use crate::train::preparation::{extras, prepare_ahead, prepare_data};
use crate::train::recorded_generation::RecordedGeneration;
use phalanx_actors::control::block_on;
use phalanx_actors::rank::{Handle, Life};
use phalanx_collective::tcp::connect::TcpConfig;
use phalanx_collective::tcp::listener::Listener;
use phalanx_device::ThreadError;
use phalanx_device::progress_counter::ProgressCounter;
use phalanx_strategies::elastic::dispute::Memory;
use phalanx_strategies::elastic::identity::Step;
use phalanx_strategies::elastic::member::{Member, Schedule};
use phalanx_strategies::elastic::progress::Patience;
use phalanx_strategies::elastic::timing::Timing;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Runs a rank whose node is at the other ends of these inherited descriptors; returns the exit code. `make` makes
/// user-defined models.
///
/// # Errors
/// When the descriptors are not sockets to a node, so that no failure report can be sent.
pub(crate) fn run(channel: RawFd, fd_channel: RawFd, make: Option<&MakeModel>) -> Result<i32, LaunchError> {
    #[allow(unsafe_code)] // Taking descriptors by their numbers.
    // SAFETY: the node opened both for this process and names them in its arguments. This runs first in the process, so
    // the descriptors are unowned; duplicate numbers are rejected.
    let ((sender, mut receiver), fd_channel) = unsafe {
        if channel == fd_channel {
            return Err(LaunchError::NoChannel { fd: fd_channel });
        }
        (channel::adopt(channel)?, channel::adopt_fd_channel(fd_channel)?)
    };
    cpu_limit::watch();
    if let Err(error) = liveness::hold() {
        tracing::debug!(%error, "the launcher learns of the end of this process only when the system has released it");
    }
    let outbox = Outbox::new(sender);
    let begin = match begin(&mut receiver) {
        Ok(begin) => begin,
        Err(error) => {
            outbox.send(&FromRank::Failed(FailureReport::from(&error.into())));
            return Ok(1);
        }
    };
    let (worker, is_successor) = (begin.worker, begin.is_successor);
    let Err(error) = serve(begin, make, &outbox, receiver, fd_channel) else { return Ok(0) };
    tracing::warn!(%worker, "a rank process could not start");
    // An earlier process of this node has trained with this input and this memory, so a later one may again.
    let is_input = error.is_input() && !is_successor;
    outbox.send(&FromRank::Failed(FailureReport { is_input, ..FailureReport::from(&error) }));
    Ok(if is_input { 2 } else { 1 })
}

/// Runs the rank until the node ends it. Failures after its start are reported by its device thread.
///
/// # Errors
/// When the rank cannot start; nothing has been reported then.
fn serve(
    begin: Begin,
    make: Option<&MakeModel>,
    outbox: &Outbox,
    receiver: FrameReceiver,
    fd_channel: UnixStream,
) -> Result<(), JobError> {
    let config = JobConfig::from_yaml_str(&begin.yaml, &[])?;
    std::thread::scope(|scope| {
        let opening = Opening::begin(scope, &config.precision)?;
        serve_on(opening, begin, &config, make, outbox, receiver, fd_channel)
    })
}

/// As [`serve`], on a device that is opening.
fn serve_on(
    opening: Opening,
    begin: Begin,
    config: &JobConfig,
    make: Option<&MakeModel>,
    outbox: &Outbox,
    receiver: FrameReceiver,
    fd_channel: UnixStream,
) -> Result<(), JobError> {
    let tokenizer = plan::tokenizer(config)?;
    let _lock = RankLock::share(&config.output.folder());
    let model = model_of(begin.user_model.as_deref(), config, &tokenizer, make, || opening.device())?;
    let data = prepare_data(config, &model, &tokenizer, &|| false, &mut |_| {})?;
    prepare_ahead(&data)?;
    let (run, sampler) = plan::run_over(config, &data.train)?;
    let listener = listen(&begin)?;
    let address = begin.listen.map(|_| listener.local_addr());
    let schedule = Schedule { save_steps: run.save_steps.unwrap_or(0), last_step: Some(Step(run.total_steps)) };
    let member = Member::new(begin.job, begin.worker, address, schedule).with_pid(std::process::id());
    let (control, progress_counter) = (Arc::new(Control::default()), ProgressCounter::new());
    let device_watch = DeviceWatch::new(Arc::clone(&model.device), progress_counter.clone());
    let (extras, evaluates) = (extras(config, &model, &tokenizer, &begin.inputs)?, config.data.evaluates());
    // Before the first status report, because other members may wait for this rank after it.
    let (warm, memories) = Warm::new(&begin, &fd_channel, &model, evaluates, config.output.seed)?;
    if model.device.activity().is_some() {
        let Timing { suspicion, first_step, .. } = begin.timing;
        device_watch.clone().start(Patience { first_step, stuck: suspicion })?;
    }
    model.device.on_device_thread(begin.n_threads, || {
        let (counter, watch) = (progress_counter.clone(), device_watch.clone());
        let (port, tasks) = Port::new(begin.worker, outbox.clone(), Arc::clone(&control), counter, watch);
        let (fault, planted, rank) = (port.fault.clone(), planted()?, start_actor(&begin, member, port)?);
        receive_desired_states(rank.clone(), receiver)?;
        let mut device = Device {
            rank,
            tasks,
            outbox: outbox.clone(),
            fault,
            control,
            job: begin.job,
            worker: begin.worker,
            evaluates,
            extras,
            config,
            recorded: RecordedGeneration::of(&config.output, &begin.timing, begin.claim),
            model: &model,
            run,
            sampler,
            data: &data,
            n_threads: begin.n_threads,
            fd_channel,
            listener,
            tcp: tcp_config(&begin, &planted),
            progress_counter,
            device_watch,
            peak_flops: begin.peak_flops,
            start_from: begin.start_from.clone(),
            plans: BTreeMap::new(),
            memories,
            spare: None,
            warm: Some(warm),
            instances: Vec::new(),
            memory: Memory::default(),
            saved_elsewhere: None,
            planted,
        };
        device.run();
        Ok::<(), JobError>(())
    })?
}

/// Faults that a test plants in this process.
fn planted() -> Result<Planted, JobError> {
    let plan = std::env::var(planted::VARIABLE).unwrap_or_default();
    plan.parse().map_err(|reason: String| CommandError::Planted(reason).into())
}

/// Listens for other ranks.
fn listen(begin: &Begin) -> Result<Listener, JobError> {
    let here = begin.listen.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let bind = |source| JobError::Io { action: "listen at", path: "a port for other nodes".into(), source };
    Listener::bind(SocketAddr::new(here, 0), &begin.secret).map_err(bind)
}

/// The model, which must be the job's: `expected` is its digest if the user wrote it.
fn model_of(
    expected: Option<&str>,
    config: &JobConfig,
    tokenizer: &Tokenizer,
    make: Option<&MakeModel>,
    device: impl FnOnce() -> Result<Chosen, JobError>,
) -> Result<ModelPlan, JobError> {
    let model = plan::rank_plan(config, tokenizer, make, device)?;
    if model.model.user().map(UserModel::digest).as_deref() == expected {
        return Ok(model);
    }
    Err(PeerError::OtherModel.into())
}

fn start_actor(begin: &Begin, member: Member, port: Port) -> Result<Handle, JobError> {
    // A missing peer is named well before it counts as lost.
    let life = Life { interval: begin.timing.life, patience: begin.timing.suspicion / 4 };
    let refused = |source| JobError::Thread(ThreadError::Spawn(source));
    block_on(Handle::start(member, Box::new(port), life)).and_then(|rank| rank).map_err(refused)
}

fn begin(receiver: &mut FrameReceiver) -> Result<Begin, PeerError> {
    let frame = receiver.receive().map_err(PeerError::StartFrame)?;
    let frame = frame.ok_or(PeerError::NoStart)?;
    match serde_json::from_slice(&frame) {
        Ok(ToRank::Begin(begin)) => Ok(*begin),
        Ok(ToRank::DesiredState(_)) => Err(PeerError::StartOrder),
        Err(error) => Err(PeerError::StartMessage(error)),
    }
}

/// An unreachable machine is reported early enough that the coordinator, which first waits for another report of every
/// node, acts on it as soon as on a silent one.
fn tcp_config(begin: &Begin, planted: &Planted) -> TcpConfig {
    let lost_after = begin.timing.detection_time.saturating_sub(begin.timing.heartbeat);
    let damages_next = planted.damages_next.clone();
    TcpConfig { unacknowledged_max: lost_after, unanswered_max: lost_after, damages_next, ..TcpConfig::default() }
}

/// Passes desired states to the actor until the node closes the channel.
fn receive_desired_states(rank: Handle, mut receiver: FrameReceiver) -> Result<(), JobError> {
    on_own_thread("desired-states", move || {
        while let Ok(Some(frame)) = receiver.receive() {
            match serde_json::from_slice(&frame) {
                Ok(ToRank::DesiredState(desired_state)) => rank.apply_desired_state(desired_state),
                Ok(ToRank::Begin(_)) | Err(_) => tracing::warn!("ignored an invalid message from the node"),
            }
        }
    })
}

fn on_own_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), JobError> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(work);
    spawned.map(drop).map_err(|e| JobError::Thread(ThreadError::Spawn(e)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices;
    use crate::frontend::UserParam;
    use phalanx_device::ThreadError;

    /// A model of one tensor that is never run.
    fn user(first_value: f32) -> UserModel {
        let values = vec![first_value, 0.5];
        let param = UserParam { name: "w".into(), shape: vec![2], trainable: true, values };
        let never = |_| Err(ThreadError::Spawn(std::io::Error::other("not run here")));
        UserModel::new(264, vec![param], Box::new(never)).unwrap()
    }

    #[test]
    fn rank_with_another_model_than_the_job_is_rejected() {
        let yaml = "tokenizer: bytes\nmodel: {model_type: user_defined}\ndatasets: [{path: text.txt, type: completion}]\n\
                    sequence_len: 8\nmax_steps: 1\nlearning_rate: 0.1\noutput_dir: out\n";
        let config = JobConfig::from_yaml_str(yaml, &[]).unwrap();
        let tokenizer = plan::tokenizer(&config).unwrap();
        let of_job = user(0.25).digest();
        let made = |first_value: f32| {
            let make = move |_: &JobConfig| Ok(user(first_value));
            model_of(Some(&of_job), &config, &tokenizer, Some(&make), || unreachable!("its model runs on the host"))
        };

        assert!(made(0.25).is_ok());
        assert!(matches!(made(0.75), Err(JobError::Peer(PeerError::OtherModel))));
        assert!(model_of(Some(&of_job), &config, &tokenizer, None, || Ok((devices::host(), None))).is_err());
    }
}
