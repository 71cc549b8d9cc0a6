//! Checkpoints: marker, manifest, indexes, and tensors read through damaged indexes and manifests.

use super::Target;
use phalanx_storage::checkpoint::checkpoint_meta::CheckpointMeta;
use phalanx_storage::checkpoint::commit::Commit;
use phalanx_storage::checkpoint::contents::Contents;
use phalanx_storage::checkpoint::error::CheckpointError;
use phalanx_storage::checkpoint::index::Index;
use phalanx_storage::checkpoint::manifest::{IndexEntry, Manifest};
use phalanx_storage::checkpoint::piece::Piece;
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_storage::checkpoint::store::{NewFile, Store, StoredFile};
use phalanx_storage::checkpoint::writer::CheckpointWriter;
use phalanx_storage::hf::dtype::Dtype;
use phalanx_strategies::boxes::TensorBox;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

pub(super) const TARGET: Target = Target { name: "checkpoint", run, seeds };

/// Largest tensor that is read.
const READ_BYTES_MAX: u64 = 1 << 16;
const DIR: &str = "root/step-0000000007.g0003";

/// Marker, manifest and index survive writing and reading. A checkpoint with such an index or a manifest of format 1 is
/// refused, or its tensors are the saved ones.
fn run(bytes: &[u8]) {
    if let Some(commit) = Commit::decode(bytes) {
        assert_eq!(commit.encode().as_bytes(), bytes);
    }
    if let Ok(manifest) = Manifest::decode(bytes) {
        assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
    }
    if let Ok(contents) = Contents::decode_format_1(bytes) {
        assert_eq!(contents.validate(), Ok(()));
        read_all(bytes, None, contents.writers);
    }
    if let Ok(index) = Index::decode(bytes) {
        assert_eq!(Index::decode(&index.encode()), Ok(index.clone()));
        let entry = IndexEntry { len: bytes.len() as u64, blake3: hash(bytes) };
        let manifest = Manifest { indexes: vec![entry], ..saved().manifest.clone() };
        read_all(&manifest.encode(), Some(bytes), 1);
    }
}

/// Opens the checkpoint with this manifest and index, and reads every tensor and extra, and a part of each tensor.
fn read_all(manifest: &[u8], index: Option<&[u8]>, writers: u32) {
    let commit = Commit { step: 7, generation: 3, writers, manifest_blake3: hash(manifest) };
    let mut files = saved().files.clone();
    files.insert("COMMIT".into(), commit.encode().into_bytes().into());
    files.insert("MANIFEST".into(), manifest.into());
    if let Some(index) = index {
        files.insert("rank-00000-index.json".into(), index.into());
    }
    let store: Arc<dyn Store> = Arc::new(Files(files));
    let Ok(checkpoint) = Checkpoint::open_lazily_in(&store, Path::new(DIR)) else { return };
    for name in checkpoint.contents().tensors.keys() {
        let tensor = checkpoint.tensor(name).expect("the name comes from the checkpoint");
        let Some(n_bytes) = tensor.dtype.bytes_of(&tensor.shape).filter(|n| *n <= READ_BYTES_MAX) else { continue };
        let mut whole = vec![0; n_bytes as usize];
        let read = checkpoint.read_whole_into(name, &mut whole);
        let half =
            TensorBox { offset: tensor.shape.iter().map(|n| n / 3).collect(), extent: shape_of_half(&tensor.shape) };
        let mut part = vec![0; tensor.dtype.bytes_of(&half.extent).expect("less than the whole") as usize];
        let read_part = checkpoint.read_into(name, &half, &mut part);
        if read.is_ok() && read_part.is_ok() && tensor.shape.len() == 1 && !part.is_empty() {
            let at = tensor.shape[0] / 3 * tensor.dtype.bytes();
            assert_eq!(part, &whole[at..at + part.len()], "a part of {name} is not a part of the whole");
        }
    }
    for name in checkpoint.extras() {
        let _ = checkpoint.extra(name);
    }
}

fn shape_of_half(shape: &[usize]) -> Vec<usize> {
    shape.iter().map(|n| (n / 2).min(n - n / 3)).collect()
}

fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// A valid checkpoint of two tensors in three boxes, and an extra.
struct Saved {
    manifest: Manifest,
    files: BTreeMap<String, Arc<[u8]>>,
}

fn saved() -> &'static Saved {
    static SAVED: OnceLock<Saved> = OnceLock::new();
    SAVED.get_or_init(|| {
        let root = tempfile::tempdir().expect("a temporary folder");
        let mesh = [("dp_shard".into(), 1)].into();
        let meta = CheckpointMeta { job: "test".into(), step: 7, generation: 3, mesh, verified: false, compared: true };
        let weights: Vec<u8> = (0..96).collect();
        let (global, upper, lower) = ([4, 6], [0, 0], [1, 0]);
        let box_of =
            |offset, shape, bytes| Piece { offset, shape, bytes, ..Piece::whole("w", Dtype::F32, &global, bytes) };
        let pieces = [
            Piece::whole("counts", Dtype::U64, &[3], &weights[..24]),
            box_of(&upper, &[1, 6], &weights[..24]),
            box_of(&lower, &[3, 6], &weights[24..]),
        ];
        let extras = [("trainer.json", &b"{}"[..])];
        let id = CheckpointWriter::at(root.path())
            .expect("a folder")
            .save(&meta, &pieces, &extras)
            .expect("saving succeeds");
        let entries = std::fs::read_dir(&id.path).expect("the folder was saved").map(|entry| entry.expect("an entry"));
        let read = |entry: std::fs::DirEntry| {
            let content: Arc<[u8]> = std::fs::read(entry.path()).expect("a saved file").into();
            (entry.file_name().to_string_lossy().into_owned(), content)
        };
        let files: BTreeMap<String, Arc<[u8]>> = entries.map(read).collect();
        Saved { manifest: Manifest::decode(&files["MANIFEST"]).expect("the manifest was saved"), files }
    })
}

fn seeds() -> Vec<Vec<u8>> {
    let Saved { manifest, files } = saved();
    let index = Index::decode(&files["rank-00000-index.json"]).expect("the index was saved");
    let contents = Contents::join(manifest, vec![index]).expect("manifest and index belong together");
    let format_1 = serde_json::to_vec(&Contents { format: 1, ..contents }).expect("contents are JSON");
    let small = |name: &&String| !name.ends_with(".safetensors");
    files.keys().filter(small).map(|name| files[name].to_vec()).chain([format_1]).collect()
}

/// Read-only files in memory.
#[derive(Debug)]
struct Files(BTreeMap<String, Arc<[u8]>>);

#[derive(Debug)]
struct Content(Arc<[u8]>);

impl StoredFile for Content {
    fn n_bytes(&self) -> u64 {
        self.0.len() as u64
    }
    fn identity(&self) -> &str {
        "the same"
    }
    fn read_exact_at(&self, out: &mut [u8], start: u64) -> io::Result<()> {
        let content = self.0.get(start as usize..).and_then(|rest| rest.get(..out.len()));
        out.copy_from_slice(content.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl Store for Files {
    fn open(&self, path: &Path) -> Result<Option<Arc<dyn StoredFile>>, CheckpointError> {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        assert_eq!(path, Path::new(DIR).join(&name), "a name leaves the directory");
        Ok(self.0.get(&name).map(|content| Arc::new(Content(content.clone())) as Arc<dyn StoredFile>))
    }
    fn claim(&self, _: &Path) -> Result<bool, CheckpointError> {
        Ok(false)
    }
    fn create(&self, _: &Path) -> io::Result<Box<dyn NewFile>> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
    fn sync_dir(&self, _: &Path) -> Result<(), CheckpointError> {
        Ok(())
    }
    fn list(&self, _: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
        Ok(vec![])
    }
    fn remove(&self, _: &Path) -> Result<(), CheckpointError> {
        Ok(())
    }
    fn seal(&self, _: &Path, _: u64) -> Result<(), CheckpointError> {
        Ok(())
    }
    fn sweep(&self, _: &Path) -> Result<(), CheckpointError> {
        Ok(())
    }
}
