//! What a rank process needs before its device thread runs: its model, its port for other ranks, its actor, and what the node sends.

use crate::config::JobConfig;
use crate::data::tokenizer::Tokenizer;
use crate::devices::Chosen;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::error::peer::PeerError;
use crate::frontend::UserModel;
use crate::launch::channel::FrameReceiver;
use crate::rank::port::Port;
use crate::rank::rank_messages::{Begin, ToRank};
use crate::train::plan::{MakeModel, ModelPlan};
use crate::train::planted::Planted;
use crate::train::{plan, planted};
use phalanx_actors::control::block_on;
use phalanx_actors::rank::{Handle, Life};
use phalanx_collective::tcp::connect::TcpConfig;
use phalanx_collective::tcp::listener::Listener;
use phalanx_device::ThreadError;
use phalanx_strategies::elastic::member::Member;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Faults that a test plants in this process.
pub(super) fn planted() -> Result<Planted, JobError> {
    let plan = std::env::var(planted::VARIABLE).unwrap_or_default();
    plan.parse().map_err(|reason: String| CommandError::Planted(reason).into())
}

/// Listens for other ranks.
pub(super) fn listen(begin: &Begin) -> Result<Listener, JobError> {
    let here = begin.listen.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let bind = |source| JobError::Io { action: "listen at", path: "a port for other nodes".into(), source };
    Listener::bind(SocketAddr::new(here, 0), &begin.secret).map_err(bind)
}

/// The model, which must be the job's: `expected` is its digest if the user wrote it.
pub(super) fn model_of(
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

pub(super) fn start_actor(begin: &Begin, member: Member, port: Port) -> Result<Handle, JobError> {
    // A missing peer is named well before it counts as lost.
    let life = Life { interval: begin.timing.life, patience: begin.timing.suspicion / 4 };
    let refused = |source| JobError::Thread(ThreadError::Spawn(source));
    block_on(Handle::start(member, Box::new(port), life)).and_then(|rank| rank).map_err(refused)
}

pub(super) fn begin(receiver: &mut FrameReceiver) -> Result<Begin, PeerError> {
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
pub(super) fn tcp_config(begin: &Begin, planted: &Planted) -> TcpConfig {
    let lost_after = begin.timing.detection_time.saturating_sub(begin.timing.heartbeat);
    let damages_next = planted.damages_next.clone();
    TcpConfig { unacknowledged_max: lost_after, unanswered_max: lost_after, damages_next, ..TcpConfig::default() }
}

/// Passes desired states to the actor until the node closes the channel.
pub(super) fn receive_desired_states(rank: Handle, mut receiver: FrameReceiver) -> Result<(), JobError> {
    on_own_thread("desired-states", move || {
        while let Ok(Some(frame)) = receiver.receive() {
            match serde_json::from_slice(&frame) {
                Ok(ToRank::DesiredState(desired_state)) => rank.apply_desired_state(desired_state),
                Ok(ToRank::Begin(_)) | Err(_) => tracing::warn!("ignored an invalid message from the node"),
            }
        }
    })
}

pub(super) fn on_own_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), JobError> {
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
