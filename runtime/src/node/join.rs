//! A node of a job: its supervisor, and the loop that starts and watches rank processes.

use crate::config::JobConfig;
use crate::control_place::ControlPlace;
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use crate::events::Event;
use crate::launch::executable::Executable;
use crate::node::bootstrap::JobBootstrap;
use crate::node::folder::NodeFolder;
use crate::node::leave::Leave;
use crate::node::node_loop::Outcome;
use crate::node::part::Part;
use crate::node::shared_folder;
use crate::train::inputs::RunInputs;
use crate::train::plan;
use crate::train::preparation::prepare_data;
use phalanx_actors::control::ControlThread;
use phalanx_actors::quic::link::{Link, LinkConfig};
use phalanx_actors::trust::credential::Credential;
use phalanx_actors::trust::join::JoinString;
use phalanx_actors::trust::name::{Name, Role};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;

/// Settings of a node.
pub(crate) struct JoinAs {
    pub(crate) join: JoinString,
    /// The credential from [`enter`](crate::node::enrolment::enter).
    pub(crate) credential: Credential,
    /// Folder of the node's key and certificate, locked until the node ends.
    pub(crate) folder: NodeFolder,
    /// Number of rank processes.
    pub(crate) n_slots: u32,
    /// Address at which ranks of other nodes reach the ranks of this one; detected if absent.
    pub(crate) advertise: Option<IpAddr>,
    /// The rank program.
    pub(crate) program: Executable,
}

/// Queue size for desired states.
const DESIRED_STATES_MAX: usize = 64;

/// Takes part in a job that another machine coordinates, until the job ends or this node is released.
pub(crate) fn join(
    how: JoinAs,
    leaves: &dyn Fn() -> Leave,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Outcome, JobError> {
    let credential = how.credential;
    let Name { job, role: Role::Node { node, boot } } = credential.certified().name else {
        return Err(ControlPlaneError::NotANode.into());
    };
    let bootstrap: JobBootstrap = serde_json::from_slice(credential.bootstrap()).map_err(ControlPlaneError::Decode)?;
    let config = JobConfig::from_yaml_str(&bootstrap.yaml, &[])?;
    shared_folder::check(&config.output, job, bootstrap.claim)?;
    let timing = config.elastic.timing();
    let tokenizer = plan::tokenizer(&config)?;
    let model = plan::model_plan(&config, &tokenizer)?;
    // Whether the memory suffices depends on the ranks that this node gets.
    model.device.fits(0, how.n_slots, 0).unwrap_or(Ok(())).map_err(JobError::NoRoomOnGpu)?;
    for note in model.device_notes(how.n_slots)? {
        on_event(&Event::Note(note));
    }
    let data = match prepare_data(&config, &model, &tokenizer, &|| leaves() != Leave::Stay, on_event) {
        // It has no ranks yet.
        Err(stopped) if stopped.is_stop() => return Ok(Outcome::default()),
        prepared => prepared?,
    };
    let inputs = RunInputs::of(&config, &model, &tokenizer, &data)?;
    drop(data);
    on_event(&Event::Note(format!("{node} of {job} ({boot}) with {} ranks", how.n_slots)));
    let listen = how.advertise.or_else(|| towards(&how.join)).ok_or(ControlPlaneError::NoAddress)?;
    let settings = LinkConfig {
        addresses: how.join.addresses.clone(),
        published: Some(ControlPlace::of(&config.output.output_dir, &timing)?.published(job)),
        dir: how.folder.path().to_owned(),
        timing,
        n_desired_states_max: DESIRED_STATES_MAX,
    };
    let (link, desired_states) = Link::start(settings, credential).map_err(ControlPlaneError::from)?;
    let part = Part {
        job,
        node,
        boot,
        bootstrap,
        n_slots: how.n_slots,
        n_threads: config
            .precision
            .threads
            .unwrap_or_else(|| (model.device.available_threads() / how.n_slots as usize).max(1)),
        inputs,
        listen: Some(listen),
        program: how.program,
        uplink: Arc::new(link),
        desired_states,
    };
    let thread =
        ControlThread::start("phalanx-control").map_err(ControlPlaneError::cannot("start the control thread"))?;
    let outcome = part.take(&config, model, &thread, leaves, on_event);
    thread.stop();
    outcome
}

/// The address of this machine on its route to the coordinator.
pub(crate) fn towards(join: &JoinString) -> Option<IpAddr> {
    join.addresses.iter().find_map(|address| {
        let target = (address.host.as_str(), address.port).to_socket_addrs().ok()?.next()?;
        let any: SocketAddr = if target.is_ipv4() { "0.0.0.0:0".parse().ok()? } else { "[::]:0".parse().ok()? };
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(target).ok()?;
        Some(socket.local_addr().ok()?.ip())
    })
}
