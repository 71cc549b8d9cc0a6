//! Checkpoints of earlier builds load: format 1 (one writer, everything in the manifest) and four times larger hash
//! chunks.

use std::fs;

use super::*;
use crate::checkpoint::commit::Commit;
use crate::checkpoint::index::Index;
use crate::checkpoint::manifest::Manifest;
use crate::checkpoint::reader::Checkpoint;

/// Rewrites a checkpoint as format 1 stored the same state.
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
fn format_1_checkpoint_loads_and_its_damage_is_detected() {
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

#[test]
fn checkpoint_with_larger_hash_chunks_loads_and_its_damage_is_detected() {
    const EARLIER_BYTES: usize = 4 << 20;
    let root = tempfile::tempdir().unwrap();
    let content: Vec<u8> = (0..9u32 << 20).map(|i| (i % 251) as u8).collect();
    let piece = Piece::whole("t", Dtype::U8, &[9 << 20], &content);
    let id = quick_writer(root.path()).save(&meta(1), &[piece], &[]).unwrap();
    let at = |name: &str| id.path.join(name);
    let mut index = Index::decode(&fs::read(at("rank-00000-index.json")).unwrap()).unwrap();
    let hash = |bytes: &[u8]| blake3::hash(bytes).to_hex().to_string();
    for (name, file) in &mut index.files {
        file.blake3 = fs::read(at(name)).unwrap().chunks(EARLIER_BYTES).map(hash).collect();
    }
    let mut manifest = Manifest::decode(&fs::read(at("MANIFEST")).unwrap()).unwrap();
    manifest.hash_chunk_bytes = EARLIER_BYTES as u64;
    manifest.indexes[0].len = index.encode().len() as u64;
    manifest.indexes[0].blake3 = hash(&index.encode());
    let commit = Commit { step: 1, generation: id.generation, writers: 1, manifest_blake3: hash(&manifest.encode()) };
    fs::write(at("rank-00000-index.json"), index.encode()).unwrap();
    fs::write(at("MANIFEST"), manifest.encode()).unwrap();
    fs::write(at("COMMIT"), commit.encode()).unwrap();

    let mut found = vec![0; 9 << 20];
    Checkpoint::open(&id.path).unwrap().read_whole_into("t", &mut found).unwrap();
    assert!(found == content);

    let mut bytes = fs::read(at("rank-00000-0000.safetensors")).unwrap();
    bytes[5 << 20] ^= 1;
    fs::write(at("rank-00000-0000.safetensors"), bytes).unwrap();
    let error = Checkpoint::open(&id.path).unwrap_err();
    assert!(
        matches!(error, CheckpointError::FileHash { start, end, .. } if (start, end) == (4 << 20, 8 << 20)),
        "{error}"
    );
}
