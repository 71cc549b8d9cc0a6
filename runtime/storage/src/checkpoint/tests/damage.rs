//! CHECKPOINT-3 and CHECKPOINT-6: every damaged bit is detected, the previous checkpoint is used, and a hostile manifest
//! is refused.

use std::path::PathBuf;
use std::{fs, io};

use proptest::prelude::*;

use super::*;
use crate::checkpoint::commit::Commit;
use crate::checkpoint::error::ReadFailure;
use crate::checkpoint::format::ManifestError;
use crate::checkpoint::index::{Index, TensorEntry};
use crate::checkpoint::manifest::Manifest;

/// Saves two checkpoints; returns the directory of the newer one.
fn two_checkpoints() -> (tempfile::TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let writer = quick_writer(root.path());
    save_state(&writer, 1).unwrap();
    let newer = save_state(&writer, 2).unwrap().path;
    (root, newer)
}

/// Why the newer checkpoint is skipped, after checking that the older one is used.
fn reason(root: &Path) -> CheckpointError {
    assert_eq!(loaded_step(root), Some(1));
    let (_, mut skipped) = latest_valid(root).unwrap();
    assert_eq!(skipped.len(), 1);
    skipped.remove(0).reason
}

const INDEX: &str = "rank-00000-index.json";
const FILES: [&str; 5] = ["COMMIT", "MANIFEST", INDEX, "rank-00000-0000.safetensors", "rank-00000-extra-trainer.json"];

proptest! {
    #[test]
    fn flipped_bit_in_any_file_is_detected_and_the_previous_checkpoint_used(file in 0usize..5, at: prop::sample::Index, bit in 0u8..8) {
        let (root, newer) = two_checkpoints();
        let path = newer.join(FILES[file]);
        let mut bytes = fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        fs::write(&path, bytes).unwrap();

        let reason = reason(root.path());

        let fits = match FILES[file] {
            "COMMIT" => matches!(reason, CheckpointError::BadCommit { .. } | CheckpointError::ManifestHash { .. } | CheckpointError::BadManifest { .. }),
            "MANIFEST" | INDEX => matches!(&reason, CheckpointError::ManifestHash { path: damaged, .. } if *damaged == path),
            _ => matches!(&reason, CheckpointError::FileHash { path: damaged, .. } if *damaged == path),
        };
        prop_assert!(fits, "{} gave {reason}", FILES[file]);
    }

    #[test]
    fn file_of_another_length_is_detected(file in 0usize..5, cut: prop::sample::Index, longer: bool) {
        let (root, newer) = two_checkpoints();
        let path = newer.join(FILES[file]);
        let mut bytes = fs::read(&path).unwrap();
        if longer { bytes.push(0) } else { bytes.truncate(cut.index(bytes.len())) }
        fs::write(&path, &bytes).unwrap();

        let reason = reason(root.path());

        if file >= 3 {
            let is_length = matches!(reason, CheckpointError::FileLength { found, .. } if found == bytes.len() as u64);
            prop_assert!(is_length, "{reason}");
        }
    }
}

#[test]
fn missing_file_is_named() {
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

/// Why the newest checkpoint cannot be judged, after checking that no older one is used in its place.
fn refusal(root: &Path) -> CheckpointError {
    let refused = latest_valid(root).unwrap_err();
    assert_eq!(refused.read_failure(), ReadFailure::Unreadable, "{refused}");
    refused
}

#[test]
fn file_that_cannot_be_read_is_an_error_instead_of_a_fallback_to_an_older_checkpoint() {
    for file in FILES {
        let (root, newer) = two_checkpoints();
        let path = newer.join(file);
        fs::rename(&path, newer.join("away")).unwrap();
        // Root ignores permissions, so a directory stands for a file that refuses to be read.
        fs::create_dir(&path).unwrap();

        assert_eq!(refusal(root.path()), CheckpointError::NotAFile { path });
    }
}

#[test]
fn failed_system_call_is_no_damage() {
    for kind in [io::ErrorKind::PermissionDenied, io::ErrorKind::StaleNetworkFileHandle, io::ErrorKind::Other] {
        let error = CheckpointError::io("read", "COMMIT", &kind.into());

        assert_eq!(error.read_failure(), ReadFailure::Unreadable, "{error}");
    }
}

#[test]
fn linked_checkpoint_is_used_and_one_on_a_disk_that_is_not_there_is_no_reason_to_start_again() {
    let (root, newer) = two_checkpoints();
    let elsewhere = tempfile::tempdir().unwrap();
    let moved = elsewhere.path().join("moved");
    fs::rename(&newer, &moved).unwrap();
    std::os::unix::fs::symlink(&moved, &newer).unwrap();

    assert_eq!(loaded_step(root.path()), Some(2));

    fs::rename(&moved, elsewhere.path().join("away")).unwrap();
    assert!(matches!(refusal(root.path()), CheckpointError::Io { path, .. } if path == newer));
    fs::rename(elsewhere.path().join("away"), &moved).unwrap();
    let writer = quick_writer(root.path());
    save_state(&writer, 3).unwrap();
    writer.retain(1, &latest_valid(root.path()).unwrap().0.unwrap().id().clone()).unwrap();
    assert_eq!((loaded_step(root.path()), newer.exists()), (Some(3), false));
    assert!(moved.join("COMMIT").exists(), "what a link names belongs to others");
}

#[test]
fn link_in_place_of_a_file_is_not_followed() {
    let (root, newer) = two_checkpoints();
    let path = newer.join("rank-00000-0000.safetensors");
    fs::rename(&path, root.path().join("elsewhere")).unwrap();
    std::os::unix::fs::symlink(root.path().join("elsewhere"), &path).unwrap();

    assert_eq!(refusal(root.path()), CheckpointError::NotAFile { path });
}

#[test]
fn checkpoint_under_the_name_of_another_step_is_not_loaded() {
    let (root, newer) = two_checkpoints();
    fs::rename(newer, root.path().join("step-0000000009.g0003")).unwrap();

    assert!(matches!(reason(root.path()), CheckpointError::BadManifest { reason: ManifestError::Identity, .. }));
}

/// Replaces the newer checkpoint's manifest and its marker consistently, as a hostile writer could.
fn forge(change: impl FnOnce(&Path, &mut Manifest)) -> ManifestError {
    let (root, newer) = two_checkpoints();
    let mut manifest = Manifest::decode(&fs::read(newer.join("MANIFEST")).unwrap()).unwrap();
    change(&newer, &mut manifest);
    let encoded = manifest.encode();
    let manifest_blake3 = blake3::hash(&encoded).to_hex().to_string();
    let Manifest { step, generation, .. } = manifest;
    fs::write(newer.join("MANIFEST"), encoded).unwrap();
    fs::write(newer.join("COMMIT"), Commit { step, generation, writers: 1, manifest_blake3 }.encode()).unwrap();
    let refused = match latest_valid(root.path()) {
        // A later build may have written it.
        Err(_) => refusal(root.path()),
        Ok(_) => reason(root.path()),
    };
    match refused {
        CheckpointError::BadManifest { reason, .. } => reason,
        other => panic!("expected a refused manifest, got {other}"),
    }
}

/// Replaces the newer checkpoint's index and the manifest's entry for it.
fn forge_index(change: impl FnOnce(&mut Index)) -> ManifestError {
    forge(|dir, manifest| {
        let mut index = Index::decode(&fs::read(dir.join(INDEX)).unwrap()).unwrap();
        change(&mut index);
        let encoded = index.encode();
        manifest.indexes[0].len = encoded.len() as u64;
        manifest.indexes[0].blake3 = blake3::hash(&encoded).to_hex().to_string();
        fs::write(dir.join(INDEX), encoded).unwrap();
    })
}

#[test]
fn forged_manifests_are_refused() {
    assert!(matches!(forge(|_, m| m.format = 3), ManifestError::Format(3)));
    let later_build = ManifestError::Format(3);
    let later_build = CheckpointError::BadManifest { path: "MANIFEST".into(), reason: later_build };
    assert_eq!(later_build.read_failure(), ReadFailure::Unreadable);
    assert!(matches!(forge(|_, m| m.step = 7), ManifestError::Identity));
    assert!(matches!(forge(|_, m| m.job = "other".into()), ManifestError::Identity));
    assert!(matches!(forge(|_, m| m.hash_chunk_bytes = 0), ManifestError::Number(_)));
    assert!(matches!(forge(|_, m| m.mesh = BTreeMap::from([("tp".into(), 0)])), ManifestError::Number(_)));
    assert!(matches!(forge(|_, m| m.indexes.clear()), ManifestError::Number(_)));
    assert!(matches!(forge(|_, m| m.indexes[0].len = u64::MAX), ManifestError::Number(_)));
    assert!(matches!(forge(|_, m| m.indexes[0].blake3 = "x".repeat(64)), ManifestError::Hashes(_)));
    let crowd = forge(|_, m| m.indexes = vec![m.indexes[0].clone(); (1 << 16) + 1]);
    assert!(matches!(crowd, ManifestError::TooMany { what: "writers", .. }));
}

#[test]
fn forged_indexes_are_refused() {
    let forge_weight =
        |change: &dyn Fn(&mut TensorEntry)| forge_index(|i| change(i.tensors.get_mut("model.weight").unwrap()));
    assert!(matches!(forge_index(|i| i.format = 1), ManifestError::Format(1)));
    assert!(matches!(forge_index(|i| i.step = 7), ManifestError::Identity));
    assert!(matches!(forge_index(|i| i.generation = 7), ManifestError::Identity));
    assert!(matches!(forge_weight(&|t| t.shape[0] = 5), ManifestError::Tiling(_)));
    assert!(matches!(forge_weight(&|t| t.shape = vec![usize::MAX, usize::MAX]), ManifestError::Tiling(_)));
    assert!(matches!(forge_weight(&|t| t.shape = vec![1; 9]), ManifestError::TooMany { what: "dims", .. }));
    assert!(matches!(forge_weight(&|t| t.chunks.push(t.chunks[0].clone())), ManifestError::Tiling(_)));
    assert!(matches!(forge_weight(&|t| t.chunks[0].region.offset[0] = usize::MAX), ManifestError::Tiling(_)));
    assert!(matches!(forge_weight(&|t| t.chunks[0].region.offset.clear()), ManifestError::Tiling(_)));
    assert!(matches!(forge_weight(&|t| t.chunks[0].byte_offset = u64::MAX), ManifestError::Bytes(_)));
    assert!(matches!(forge_weight(&|t| t.chunks[0].byte_offset += 4096), ManifestError::Bytes(_)));
    assert!(matches!(forge_weight(&|t| t.chunks[0].byte_len -= 4), ManifestError::Bytes(_)));
    assert!(matches!(forge_weight(&|t| t.dtype = Dtype::F64), ManifestError::Bytes(_)));
    assert!(matches!(forge_weight(&|t| t.chunks[0].file = "../x".into()), ManifestError::NoFile { .. }));
    let forge_file = |name: &str| {
        forge_index(|i| {
            let file = i.files["rank-00000-extra-trainer.json"].clone();
            i.files.insert(name.into(), file);
        })
    };
    for name in ["../outside", "/etc/passwd", "rank-00000-a/b", "..", "", ".hidden", "a\0b", &"x".repeat(129)] {
        let refused = forge_file(name);
        assert!(matches!(refused, ManifestError::Name(_)), "{name:?} gave {refused}");
    }
    assert!(matches!(forge_file("rank-00001-0000.safetensors"), ManifestError::Foreign { writer: 0, .. }));
    assert!(matches!(forge_index(|i| i.files.values_mut().for_each(|f| f.blake3.clear())), ManifestError::Hashes(_)));
    assert!(matches!(forge_index(|i| drop(i.extras.insert("x".into(), "no".into()))), ManifestError::NoFile { .. }));
}
