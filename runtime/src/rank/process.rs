//! A rank process: the rank actor on its control thread receives desired states and sends heartbeats; the device thread
//! computes.

use crate::config::JobConfig;
use crate::control::Control;
use crate::data::prepare::Prepared;
use crate::data::tokenizer::Tokenizer;
use crate::error::JobError;
use crate::launch::channel;
use crate::launch::channel::FrameReceiver;
use crate::launch::error::LaunchError;
use crate::launch::liveness;
use crate::rank::beginning::{begin, listen, model_of, planted, receive_desired_states, start_actor, tcp_config};
use crate::rank::cpu_limit;
use crate::rank::device::Device;
use crate::rank::device_watch::DeviceWatch;
use crate::rank::failure_report::FailureReport;
use crate::rank::opening::Opening;
use crate::rank::port::{Outbox, Port};
use crate::rank::rank_messages::{Begin, FromRank};
use crate::rank::warm::Warm;
use crate::train::output_lock::RankLock;
use crate::train::plan;
use crate::train::plan::{MakeModel, ModelPlan};
use crate::train::preparation::{extras, prepare_ahead, prepare_data};
use crate::train::recorded_generation::RecordedGeneration;
use crate::train::run_plan;
use crate::train::run_plan::RunPlan;
use phalanx_device::progress_counter::ProgressCounter;
use phalanx_strategies::elastic::dispute::Memory;
use phalanx_strategies::elastic::identity::Step;
use phalanx_strategies::elastic::member::{Member, Schedule};
use phalanx_strategies::elastic::progress::Patience;
use phalanx_strategies::elastic::timing::Timing;
use std::collections::BTreeMap;
use std::net::SocketAddr;
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
    let _lock = RankLock::share(&config.output.folder());
    let (tokenizer, model, data) = prepared(opening, &begin, config, make)?;
    let (run, sampler) = run_plan::run_over(config, &data.train)?;
    let listener = listen(&begin)?;
    let member = member_of(&begin, begin.listen.map(|_| listener.local_addr()), &run);
    let (control, progress_counter) = (Arc::new(Control::default()), ProgressCounter::new());
    let device_watch = DeviceWatch::new(Arc::clone(&model.device), progress_counter.clone());
    let (extras, evaluates) = (extras(config, &model, &tokenizer, &begin.inputs)?, config.data.evaluates());
    // Before the first status report, because other members may wait for this rank after it.
    let (warm, memories) = Warm::new(&begin, &fd_channel, &model, evaluates, config.output.seed)?;
    start_watch(&model, &device_watch, &begin.timing)?;
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

/// The tokenizer, the model and the data of the job.
fn prepared(
    opening: Opening,
    begin: &Begin,
    config: &JobConfig,
    make: Option<&MakeModel>,
) -> Result<(Tokenizer, ModelPlan, Prepared), JobError> {
    let tokenizer = plan::tokenizer(config)?;
    let model = model_of(begin.user_model.as_deref(), config, &tokenizer, make, || opening.device())?;
    let data = prepare_data(config, &model, &tokenizer, &|| false, &mut |_| {})?;
    prepare_ahead(&data)?;
    Ok((tokenizer, model, data))
}

fn member_of(begin: &Begin, address: Option<SocketAddr>, run: &RunPlan) -> Member {
    let schedule = Schedule { save_steps: run.save_steps.unwrap_or(0), last_step: Some(Step(run.total_steps)) };
    Member::new(begin.job, begin.worker, address, schedule).with_pid(std::process::id())
}

/// Watches a device that tells what it does.
fn start_watch(model: &ModelPlan, watch: &DeviceWatch, timing: &Timing) -> Result<(), JobError> {
    if model.device.activity().is_none() {
        return Ok(());
    }
    let Timing { suspicion, first_step, .. } = *timing;
    watch.clone().start(Patience { first_step, stuck: suspicion })
}
