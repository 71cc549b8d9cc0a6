//! C-3 and C-6: every damaged bit is seen, the previous checkpoint is used, and a hostile manifest is refused.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::checkpoint::commit::Commit;
use crate::checkpoint::manifest::{Manifest, ManifestError, TensorEntry};
use crate::checkpoint::reader::Checkpoint;

/// Two checkpoints; the directory of the newer one.
fn two_checkpoints() -> (tempfile::TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let writer = quick_writer(root.path());
    save_state(&writer, 1).unwrap();
    let newer = save_state(&writer, 2).unwrap().path;
    (root, newer)
}

/// The reason for which the newer checkpoint is passed over, after checking that the older one is used.
fn reason(root: &Path) -> CheckpointError {
    assert_eq!(loaded_step(root), Some(1));
    let (_, mut skipped) = latest_valid(root).unwrap();
    assert_eq!(skipped.len(), 1);
    skipped.remove(0).reason
}

const FILES: [&str; 4] = ["COMMIT", "MANIFEST", "shard-0-0.safetensors", "extra-trainer.json"];

proptest! {
    #[test]
    fn any_flipped_bit_of_any_file_is_seen_and_the_previous_checkpoint_used(file in 0usize..4, at: prop::sample::Index, bit in 0u8..8) {
        let (root, newer) = two_checkpoints();
        let path = newer.join(FILES[file]);
        let mut bytes = fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        fs::write(&path, bytes).unwrap();

        let reason = reason(root.path());

        let fits = match FILES[file] {
            "COMMIT" => matches!(reason, CheckpointError::BadCommit { .. } | CheckpointError::ManifestHash { .. } | CheckpointError::BadManifest { .. }),
            "MANIFEST" => matches!(reason, CheckpointError::ManifestHash { .. }),
            _ => matches!(&reason, CheckpointError::FileHash { path: damaged, .. } if *damaged == path),
        };
        prop_assert!(fits, "{} gave {reason}", FILES[file]);
    }

    #[test]
    fn a_file_of_any_other_length_is_seen(file in 0usize..4, cut: prop::sample::Index, longer: bool) {
        let (root, newer) = two_checkpoints();
        let path = newer.join(FILES[file]);
        let mut bytes = fs::read(&path).unwrap();
        if longer { bytes.push(0) } else { bytes.truncate(cut.index(bytes.len())) }
        fs::write(&path, &bytes).unwrap();

        let reason = reason(root.path());

        if file >= 2 {
            let is_length = matches!(reason, CheckpointError::FileLength { found, .. } if found == bytes.len() as u64);
            prop_assert!(is_length, "{reason}");
        }
    }
}

#[test]
fn a_missing_file_is_named() {
    for file in FILES {
        let (root, newer) = two_checkpoints();
        fs::remove_file(newer.join(file)).unwrap();

        let reason = reason(root.path());

        match file {
            "COMMIT" => assert_eq!(reason, CheckpointError::Uncommitted { path: newer }),
            _ => assert!(reason.to_string().contains(file), "{reason}"),
        }
    }
}

#[test]
fn a_link_in_place_of_a_file_is_not_followed() {
    let (root, newer) = two_checkpoints();
    let path = newer.join("shard-0-0.safetensors");
    fs::rename(&path, root.path().join("elsewhere")).unwrap();
    std::os::unix::fs::symlink(root.path().join("elsewhere"), &path).unwrap();

    assert_eq!(reason(root.path()), CheckpointError::NotAFile { path });
}

#[test]
fn a_checkpoint_under_the_name_of_another_step_is_not_loaded() {
    let (root, newer) = two_checkpoints();
    fs::rename(newer, root.path().join("step-0000000009.g0003")).unwrap();

    assert!(matches!(reason(root.path()), CheckpointError::BadManifest { reason: ManifestError::Identity, .. }));
}

/// Rewrites the manifest of the newer checkpoint, with a marker that fits it: what a hostile writer could do.
fn forge(change: impl FnOnce(&mut Manifest)) -> ManifestError {
    let (root, newer) = two_checkpoints();
    let mut manifest = Checkpoint::open(&newer).unwrap().manifest().clone();
    change(&mut manifest);
    let encoded = manifest.encode();
    let manifest_blake3 = blake3::hash(&encoded).to_hex().to_string();
    let Manifest { step, generation, writers, .. } = manifest;
    fs::write(newer.join("MANIFEST"), encoded).unwrap();
    fs::write(newer.join("COMMIT"), Commit { step, generation, writers, manifest_blake3 }.encode()).unwrap();
    match reason(root.path()) {
        CheckpointError::BadManifest { reason, .. } => reason,
        other => panic!("expected a refused manifest, got {other}"),
    }
}

#[test]
fn forged_manifests_are_refused() {
    let forge_weight =
        |change: &dyn Fn(&mut TensorEntry)| forge(|m| change(m.tensors.get_mut("model.weight").unwrap()));
    assert!(matches!(forge(|m| m.format = 2), ManifestError::Format(2)));
    assert!(matches!(forge(|m| m.step = 7), ManifestError::Identity));
    assert!(matches!(forge(|m| m.hash_chunk_bytes = 0), ManifestError::Number(_)));
    assert!(matches!(forge_weight(&|t| t.shape[0] = 5), ManifestError::Tiling(_)));
    assert!(matches!(forge_weight(&|t| t.shape = vec![u64::MAX, u64::MAX]), ManifestError::Tiling(_)));
    assert!(matches!(forge_weight(&|t| t.shape = vec![1; 9]), ManifestError::TooMany { what: "dims", .. }));
    assert!(matches!(forge_weight(&|t| t.chunks.push(t.chunks[0].clone())), ManifestError::Tiling(_)));
    assert!(matches!(forge_weight(&|t| t.chunks[0].region.offset[0] = u64::MAX), ManifestError::Tiling(_)));
    assert!(matches!(forge_weight(&|t| t.chunks[0].byte_offset = u64::MAX), ManifestError::Bytes(_)));
    assert!(matches!(forge_weight(&|t| t.chunks[0].byte_offset += 4096), ManifestError::Bytes(_)));
    assert!(matches!(forge_weight(&|t| t.chunks[0].byte_len -= 4), ManifestError::Bytes(_)));
    assert!(matches!(forge_weight(&|t| t.dtype = Dtype::F64), ManifestError::Bytes(_)));
    assert!(matches!(forge_weight(&|t| t.chunks[0].file = "../x".into()), ManifestError::NoFile { .. }));
    for name in ["../outside", "/etc/passwd", "a/b", "..", "", ".hidden", "a\0b", &"x".repeat(129)] {
        let refused = forge(|m| {
            let file = m.files["extra-trainer.json"].clone();
            m.files.insert(name.into(), file);
        });
        assert!(matches!(refused, ManifestError::Name(_)), "{name:?} gave {refused}");
    }
    assert!(matches!(forge(|m| m.files.values_mut().for_each(|f| f.blake3.clear())), ManifestError::Hashes(_)));
    assert!(matches!(forge(|m| drop(m.extras.insert("x".into(), "no".into()))), ManifestError::NoFile { .. }));
}
