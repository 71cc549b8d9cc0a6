//! Guarantees of a checkpoint: any box of the state loads, damage is detected, a crash loses nothing committed.

mod background;
mod catalog;
mod crash;
mod damage;
mod faulty_disk;
mod faulty_objects;
mod format_1;
mod lazy;
mod many_writers;
mod many_writers_crash;
mod objects;
mod replaced_worlds;
mod round_trip;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::catalog::{latest_valid, latest_valid_in};
use super::checkpoint_id::CheckpointId;
use super::checkpoint_meta::CheckpointMeta;
use super::disk::Disk;
use super::error::CheckpointError;
use super::piece::Piece;
use super::store::Store;
use super::writer::CheckpointWriter;
use crate::checkpoint::location;
use crate::hf::dtype::Dtype;

/// A writer that does not wait for the disk: most tests are about content, and `crash` covers durability.
fn quick_writer(root: &Path) -> CheckpointWriter {
    CheckpointWriter::on(Arc::new(Disk::on(Arc::new(faulty_disk::FaultyDisk::default()))), root)
}

fn meta(step: u64) -> CheckpointMeta {
    let mesh = BTreeMap::from([("dp_shard".into(), 1)]);
    CheckpointMeta { job: "test".into(), step, generation: 3, mesh, verified: false, compared: true }
}

/// Saves a small state that depends on the step: two tensors and an extra.
fn save_state(writer: &CheckpointWriter, step: u64) -> Result<CheckpointId, CheckpointError> {
    let weights: Vec<f32> = (0..24).map(|x| x as f32 + step as f32).collect();
    let counts = [step; 3];
    let pieces = [
        Piece::whole("counts", Dtype::U64, &[3], bytemuck::cast_slice(&counts)),
        Piece::whole("model.weight", Dtype::F32, &[4, 6], bytemuck::cast_slice(&weights)),
    ];
    writer.save(&meta(step), &pieces, &[("trainer.json", format!("{{\"step\":{step}}}").as_bytes())])
}

/// The step of the newest valid checkpoint below `root`, after checking that its content is that step's state.
fn loaded_step(root: &Path) -> Option<u64> {
    loaded_step_in(&location::at(root).unwrap(), root)
}

fn loaded_step_in(store: &Arc<dyn Store>, root: &Path) -> Option<u64> {
    let checkpoint = latest_valid_in(store, root).unwrap().0?;
    let step = checkpoint.id().step;
    let mut weights = [0f32; 24];
    let mut counts = [0u64; 3];

    checkpoint.read_whole_into("model.weight", bytemuck::cast_slice_mut(&mut weights)).unwrap();
    checkpoint.read_whole_into("counts", bytemuck::cast_slice_mut(&mut counts)).unwrap();

    assert_eq!(counts, [step; 3]);
    assert!(weights.iter().enumerate().all(|(i, &x)| x == i as f32 + step as f32));
    assert_eq!(checkpoint.extra("trainer.json").unwrap(), format!("{{\"step\":{step}}}").as_bytes());
    Some(step)
}
