//! Frames of QUIC streams and datagrams, and files that are frames: every kind of message.

use super::{Target, honest};
use phalanx_actors::fuzzing::{KINDS, frame_again, private_frames};
use phalanx_actors::operator::{Answer, Request};
use phalanx_actors::trust::credential::Grant;
use phalanx_actors::wire;
use phalanx_strategies::elastic::identity::NodeId;
use phalanx_strategies::mesh::Mesh;

pub(super) const TARGET: Target = Target { name: "wire", run, seeds };

/// A frame has one kind, is at least half as long as its canonical encoding, and is unchanged when encoded again. A canonical
/// encoding may be longer: it turns excess nanoseconds of a duration into seconds.
fn run(bytes: &[u8]) {
    for kind in KINDS {
        let Some(again) = frame_again(kind, bytes) else { continue };
        assert_eq!(bytes[3], kind as u8, "a frame of another kind was decoded as {kind}");
        assert!(bytes.len() <= kind.limit() && again.len() <= 2 * bytes.len(), "{kind} grew to {} bytes", again.len());
        assert_eq!(frame_again(kind, &again).as_ref(), Some(&again), "{kind} changed when encoded again");
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let honest = honest::job();
    let reports = honest.reports.iter().map(wire::encode);
    let status_reports = honest.reports.iter().flat_map(|report| &report.members).map(wire::encode);
    let desired_states = honest.desired_states.iter().map(wire::encode);
    let requests = [Request::Status, Request::Drain(NodeId(3)), Request::Resize(Mesh::ONE), Request::Save];
    let answers = [Answer::Status(Box::new(honest.status)), Answer::Done, Answer::Refused("why".into())];
    let grant = Grant { certificate: vec![0x30; 60], authority: vec![0x31; 60], bootstrap: vec![0x32; 9] };
    let public = reports
        .chain(status_reports)
        .chain(desired_states)
        .chain(requests.iter().map(wire::encode))
        .chain(answers.iter().map(wire::encode))
        .chain([wire::encode(&grant)]);
    public.map(|frame| frame.expect("the message is short")).chain(private_frames()).collect()
}
