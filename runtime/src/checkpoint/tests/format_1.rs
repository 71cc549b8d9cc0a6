//! Checkpoints of format 1, one writer and everything in the manifest, are still read.

use std::fs;

use super::*;
use crate::checkpoint::commit::Commit;
use crate::checkpoint::reader::Checkpoint;

/// Turns a checkpoint into the one that format 1 would have written of the same state.
fn rewrite_as_format_1(dir: &Path) {
    let mut contents = Checkpoint::open(dir).unwrap().contents().clone();
    contents.format = 1;
    let names = [
        ("rank-00000-0000.safetensors", "shard-0-0.safetensors"),
        ("rank-00000-extra-trainer.json", "extra-trainer.json"),
    ];
    for (now, then) in names {
        fs::rename(dir.join(now), dir.join(then)).unwrap();
        let file = contents.files.remove(now).unwrap();
        contents.files.insert(then.into(), file);
    }
    contents.tensors.values_mut().flat_map(|t| &mut t.chunks).for_each(|chunk| chunk.file = names[0].1.into());
    contents.extras.values_mut().for_each(|file| *file = names[1].1.into());
    fs::remove_file(dir.join("rank-00000-index.json")).unwrap();
    let encoded = serde_json::to_vec_pretty(&contents).unwrap();
    let (step, generation) = (contents.step, contents.generation);
    let manifest_blake3 = blake3::hash(&encoded).to_hex().to_string();
    fs::write(dir.join("MANIFEST"), encoded).unwrap();
    fs::write(dir.join("COMMIT"), Commit { step, generation, writers: 1, manifest_blake3 }.encode()).unwrap();
}

#[test]
fn a_checkpoint_of_format_1_is_loaded_and_its_damage_is_seen() {
    let root = tempfile::tempdir().unwrap();
    let older = save_state(&quick_writer(root.path()), 1).unwrap();
    let newer = save_state(&quick_writer(root.path()), 2).unwrap();
    rewrite_as_format_1(&older.path);
    rewrite_as_format_1(&newer.path);
    assert_eq!(loaded_step(root.path()), Some(2));

    let mut bytes = fs::read(newer.path.join("shard-0-0.safetensors")).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(newer.path.join("shard-0-0.safetensors"), bytes).unwrap();

    assert_eq!(loaded_step(root.path()), Some(1));
}
