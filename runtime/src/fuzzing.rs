//! Access for fuzz targets to private decoders. The assertions are in the targets.

use crate::data::document::Sample;
use crate::data::record::RecordReader;
use crate::data::token_cache::TokenFile;
use crate::node::bootstrap::JobBootstrap;
use crate::rank::rank_messages::{FromRank, ToRank};
use crate::train::architecture::Architecture;
use crate::train::saving::TrainerState;
use phalanx_actors::events;
use phalanx_collective::shm::control::Control;
use phalanx_device::world::World;
use phalanx_device::world_id::WorldId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::File;

pub use crate::rank::heal::fuzzing::{Pieces, asked_for, offered};
pub use phalanx_collective::tcp::fuzzing::{HEADER_BYTES, announcement, header_again, header_of};

/// A world of two ranks in one group.
pub const WORLD: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };

/// Decodes JSON as each type that processes of a job exchange or store; returns the re-encoded JSON of each success.
pub fn json_again(json: &[u8]) -> Vec<(&'static str, String)> {
    fn again<T: DeserializeOwned + Serialize>(json: &[u8]) -> Option<String> {
        let value: T = serde_json::from_slice(json).ok()?;
        Some(serde_json::to_string(&value).expect("it has string keys only"))
    }
    let all = [
        ("to a rank", again::<ToRank>(json)),
        ("from a rank", again::<FromRank>(json)),
        ("bootstrap", again::<JobBootstrap>(json)),
        ("trainer.json", again::<TrainerState>(json)),
        ("event", again::<events::Event>(json)),
    ];
    all.into_iter().filter_map(|(what, again)| Some((what, again?))).collect()
}

/// Reads the control memory of a world of two ranks after a peer has written these bytes at `at`.
pub fn read_control_memory(at: usize, bytes: &[u8]) -> Option<String> {
    let world = World::of_one_group(WORLD, 2).expect("a world");
    let control = Control::create(&world).expect("a little memory");
    control.scribble(at, bytes);
    let fd = control.memory().fd().try_clone_to_owned().expect("a descriptor");
    let control = Control::attach(fd, &world).ok()?;
    let ranks = (0..3).map(|rank| (control.progress(rank), control.waiting(rank)));
    Some(format!("{:?} {:?}", control.aborted(), ranks.collect::<Vec<_>>()))
}

/// Checks a token file with this key; returns its numbers of tokens and documents, and the total length of its documents.
pub fn token_file(map: &[u8], key: &[u8; 32]) -> Option<(usize, usize, usize)> {
    TokenFile::measure(map, key)
}

/// The token file with these tokens and document ends.
pub fn token_file_of(key: &[u8; 32], tokens: &[u32], ends: &[u64]) -> Vec<u8> {
    TokenFile::bytes_of(key, tokens, ends)
}

/// Reads a record of a data file as each type of dataset; returns the texts with their trained ranges. Samples that are read as
/// segments or as tokens are read and left out: they have no such ranges.
pub fn documents(record: &serde_json::Value) -> Vec<(String, Vec<std::ops::Range<usize>>)> {
    let all = RecordReader::of_all_types();
    let samples = all.iter().filter_map(|reader| reader.samples(record).ok()).flatten();
    let texts = samples.filter_map(|sample| match sample {
        Sample::Text(document) | Sample::Answer { document, .. } => Some((document.text, document.trained)),
        Sample::Segments(_) | Sample::Tokens(_) | Sample::Empty => None,
    });
    texts.collect()
}

/// Reads the body of a request to `phalanx serve`, as a completion, as a chat and as texts to score: its number of prompts, of
/// continuations of each, and of stop texts, or the answer that refuses it.
pub fn served(body: &[u8]) -> [Result<[usize; 3], serde_json::Value>; 3] {
    crate::serve::read_requests(body)
}

/// The part of `metrics.jsonl` that a run resumed after `last_step` keeps: its length and its last step.
///
/// # Errors
/// When the file cannot be read.
pub fn kept_metrics(file: &File, last_step: u64) -> std::io::Result<(u64, u64)> {
    crate::train::metrics::kept(file, last_step).map(|(kept, last)| (kept, last.step))
}

/// Keys whose values differ between the configuration of a checkpoint and the current one.
pub fn changed_keys(then: &[u8], now: &[u8]) -> Vec<String> {
    crate::train::same_run::changes(then, now).notable
}

/// Reads `config.json`; returns its vocabulary size.
pub fn architecture(config: &serde_json::Value) -> Option<usize> {
    Architecture::parse(config, "config.json").ok().map(|architecture| architecture.vocab_size())
}
