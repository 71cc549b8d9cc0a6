//! Files of a checkpoint, hashed while they are written: one pass over the bytes, no second copy.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use super::error::CheckpointError;
use super::index::{Chunk, FileEntry, file_prefix};
use super::manifest::HASH_CHUNK_BYTES;
use super::piece::Piece;
use super::store::{NewFile, Store};
use crate::hf::layout::encode_header;
use phalanx_strategies::boxes::TensorBox;

/// The payload of a shard starts at a page boundary, so that it can be read around the page cache.
const PAYLOAD_ALIGN: usize = 4096;
/// Bytes that are hashed and then written while they are still in cache.
const BLOCK_BYTES: usize = 256 << 10;

/// The result of writing one writer's shards.
#[derive(Debug, Default)]
pub(super) struct Written {
    pub(super) files: BTreeMap<String, FileEntry>,
    /// The location of every piece, in the order given; `None` for empty pieces.
    pub(super) chunks: Vec<Option<Chunk>>,
}

/// Writes the pieces into shards of at most `shard_bytes_max` (a larger piece gets its own). The files are then durable;
/// their names are once the caller has synced the directory.
pub(super) fn write_shards(
    store: &dyn Store,
    dir: &Path,
    writer: u32,
    pieces: &[Piece<'_>],
    shard_bytes_max: u64,
) -> Result<Written, CheckpointError> {
    let mut written = Written { files: BTreeMap::new(), chunks: vec![None; pieces.len()] };
    // Wide elements first, as in safetensors, so that every tensor is aligned to its element size.
    let mut order: Vec<usize> = (0..pieces.len()).filter(|&i| !pieces[i].bytes.is_empty()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(pieces[i].dtype.bytes()));
    let mut rest = order.as_slice();
    while !rest.is_empty() {
        let mut bytes = 0u64;
        let fits = |&&i: &&usize| {
            bytes = bytes.saturating_add(pieces[i].bytes.len() as u64);
            bytes <= shard_bytes_max
        };
        let n = rest.iter().take_while(fits).count().max(1);
        let file_name = format!("{}{:04}.safetensors", file_prefix(writer), written.files.len());
        let entry = write_shard(store, dir, &file_name, pieces, &rest[..n], &mut written.chunks)?;
        written.files.insert(file_name, entry);
        rest = &rest[n..];
    }
    Ok(written)
}

fn write_shard(
    store: &dyn Store,
    dir: &Path,
    file_name: &str,
    pieces: &[Piece<'_>],
    order: &[usize],
    chunks: &mut [Option<Chunk>],
) -> Result<FileEntry, CheckpointError> {
    let names = distinct_names(pieces, order);
    let described: Vec<_> =
        order.iter().zip(&names).map(|(&i, name)| (name.as_str(), pieces[i].dtype, pieces[i].shape)).collect();
    let header = encode_header(&described, &BTreeMap::from([("format", "pt")]), PAYLOAD_ALIGN);
    let mut byte_offset = header.len() as u64;
    for &i in order {
        let byte_len = pieces[i].bytes.len() as u64;
        let region = TensorBox { offset: pieces[i].offset.to_vec(), extent: pieces[i].shape.to_vec() };
        chunks[i] = Some(Chunk { region, file: file_name.to_owned(), byte_offset, byte_len });
        byte_offset += byte_len;
    }
    write_file(store, dir, file_name, |file| {
        file.write(&header)?;
        order.iter().try_for_each(|&i| file.write(pieces[i].bytes))
    })
}

/// Names within one file: the tensor's, with a number for each further box of the same tensor.
fn distinct_names(pieces: &[Piece<'_>], order: &[usize]) -> Vec<String> {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    let name = |&i: &usize| {
        let n = seen.entry(pieces[i].name).or_default();
        *n += 1;
        // Tensor names have no `#`, so a numbered name cannot collide with another tensor's.
        if *n == 1 { pieces[i].name.to_owned() } else { format!("{}#{n}", pieces[i].name) }
    };
    order.iter().map(name).collect()
}

/// Writes a file, which gets its name once its content is durable.
pub(super) fn write_file(
    store: &dyn Store,
    dir: &Path,
    name: &str,
    content: impl FnOnce(&mut HashingFile) -> io::Result<()>,
) -> Result<FileEntry, CheckpointError> {
    let path = dir.join(name);
    let written = store.create(&path).and_then(|file| {
        let mut file = HashingFile::new(file);
        content(&mut file)?;
        file.finish()
    });
    written.map_err(|error| CheckpointError::io("write", &path, &error))
}

/// A file that hashes its chunks as they are written.
pub(super) struct HashingFile {
    file: BufWriter<Box<dyn NewFile>>,
    hasher: blake3::Hasher,
    len: u64,
    blake3: Vec<String>,
}

impl HashingFile {
    fn new(file: Box<dyn NewFile>) -> Self {
        // The buffer collects small tensors; blocks of its size pass through without a copy.
        let file = BufWriter::with_capacity(BLOCK_BYTES, file);
        Self { file, hasher: blake3::Hasher::new(), len: 0, blake3: Vec::new() }
    }

    /// Appends bytes.
    pub(super) fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let chunk_left = HASH_CHUNK_BYTES - self.len % HASH_CHUNK_BYTES;
            let (block, rest) = bytes.split_at(bytes.len().min(BLOCK_BYTES).min(chunk_left as usize));
            self.hasher.update(block);
            self.file.write_all(block)?;
            self.len += block.len() as u64;
            if self.len.is_multiple_of(HASH_CHUNK_BYTES) {
                self.end_chunk();
            }
            bytes = rest;
        }
        Ok(())
    }

    fn end_chunk(&mut self) {
        self.blake3.push(self.hasher.finalize().to_hex().to_string());
        self.hasher.reset();
    }

    fn finish(mut self) -> io::Result<FileEntry> {
        if !self.len.is_multiple_of(HASH_CHUNK_BYTES) {
            self.end_chunk();
        }
        self.file.into_inner().map_err(io::IntoInnerError::into_error)?.finish()?;
        Ok(FileEntry { len: self.len, blake3: self.blake3 })
    }
}
