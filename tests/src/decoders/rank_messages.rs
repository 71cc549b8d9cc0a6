//! Messages between processes of a job outside of QUIC, and their JSON files: frames of the channel between a node and its
//! ranks, events, requests for state and their answers, the trainer's state.

use super::{Target, honest};
use phalanx::fuzzing::{Pieces, asked_for, json_again, offered};
use phalanx::launch::frame::{FRAME_BYTES_MAX, FrameCutter, encode};
use serde_json::json;

pub(super) const TARGET: Target = Target { name: "rank_messages", run, seeds };

/// Frames do not depend on how the stream is split; JSON survives writing and reading; a member sends and accepts only elements
/// that it holds.
fn run(bytes: &[u8]) {
    let whole = frames(bytes, bytes.len().max(1));
    assert_eq!(whole, frames(bytes, 3), "frames depend on how their stream is split");
    for json in whole.iter().map(Vec::as_slice).chain([bytes]) {
        for (what, again) in json_again(json) {
            let twice = json_again(again.as_bytes());
            assert!(twice.iter().any(|(other, twice)| (*other, twice) == (what, &again)), "{what} changes: {again}");
        }
        for Pieces { n_held, runs } in asked_for(json).into_iter().chain(offered(json)) {
            assert!(runs.iter().all(|run| run.start < run.end && run.end <= n_held), "{runs:?} of {n_held} elements");
        }
    }
}

fn frames(bytes: &[u8], n: usize) -> Vec<Vec<u8>> {
    let (mut cutter, mut frames) = (FrameCutter::default(), Vec::new());
    for part in bytes.chunks(n) {
        cutter.push(part);
        loop {
            match cutter.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                // No frames follow an error.
                Err(_) => return frames,
            }
        }
        assert!(cutter.missing().is_none_or(|missing| missing <= FRAME_BYTES_MAX + 4));
    }
    frames
}

fn seeds() -> Vec<Vec<u8>> {
    let honest = honest::job();
    let desired_state = honest
        .desired_states
        .iter()
        .rfind(|desired_state| desired_state.world_plan.is_some())
        .expect("the job has a world");
    let piece = |(offset, extent): ([usize; 2], [usize; 2])| json!({"tensor": 0, "region": {"offset": offset, "shape": extent}});
    let (whole, part, beside) = (([1, 0], [2, 6]), ([2, 3], [1, 2]), ([2, 0], [1, 3]));
    let state =
        json!({"step": 7, "n_updates": 7, "loss_scale": {"scale": 1.0, "good_steps": 0, "window": null, "min": 1.0}});
    let scalar = json!({"tensor": 1, "region": {"offset": [], "shape": []}});
    let wanted = json!([{"name": "w", "piece": piece(whole)}, {"name": "b", "piece": scalar}]);
    let ask = |part, n_parts| json!({"wanted": wanted, "share": {"part": part, "n_parts": n_parts}});
    let values = [
        json!({"DesiredState": desired_state}),
        json!({"Done": null}),
        json!({"yaml": "a: 1", "secret": [1, 2, 3], "start_from": [5, "checkpoints/step"]}),
        ask(0, 1),
        ask(1, 3),
        json!({"state": state, "pieces": [piece(whole)]}),
        json!({"state": state, "pieces": [piece(part), piece(beside)]}),
        // Never sent by an honest member: shares that do not exist, and a box that is only partly missing.
        ask(0, 0),
        ask(3, 3),
        json!({"state": state, "pieces": [piece(([0, 0], [4, 6]))]}),
        state.clone(),
        json!({"unix_ms": 1, "term": 1, "event": "checkpoint", "generation": 1, "step": 2}),
        json!({"unix_ms": 1, "term": 1, "event": "ended", "ending": {"failed": "why"}}),
    ];
    let framed = values.iter().map(|value| encode(value).expect("the message is short"));
    values.iter().map(|value| value.to_string().into_bytes()).chain(framed).collect()
}
