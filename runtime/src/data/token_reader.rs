//! Reads the tokens of a checked file while a job trains.
//!
//! The file is read, not mapped: if another program truncates it, a read returns an error, whereas an access to a map ends the
//! process by SIGBUS.

use crate::data::loss_weights::counted;
use crate::data::token_cache_format::{DocumentEnd, MARKS, TRAINED, TokenCacheError, UNDESIRABLE};
use phalanx_strategies::objective::WEIGHT_ONE;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

/// Tokens that are counted at a time.
const TOKENS_AT_A_TIME: usize = 1024;

/// The tokens of one data file. Reads allocate nothing while the file is open.
#[derive(Debug)]
pub(crate) struct TokenReader {
    file: Handle,
    pub(super) path: PathBuf,
    /// Where tokens, their weights if not all of them count once, and document ends begin in the file.
    tokens_at: u64,
    weights_at: Option<u64>,
    documents_at: u64,
}

/// How the file is reached.
#[derive(Debug)]
enum Handle {
    Open(File),
    /// Opened for each read, as a process may open only so many files: device and inode of the one that was checked.
    Closed(Option<(u64, u64)>),
}

impl TokenReader {
    /// The tokens of a file that is checked.
    pub(super) const fn new(
        file: File,
        path: PathBuf,
        tokens_at: u64,
        weights_at: Option<u64>,
        documents_at: u64,
    ) -> Self {
        Self { file: Handle::Open(file), path, tokens_at, weights_at, documents_at }
    }

    /// The file, if it stays open.
    #[cfg(test)]
    pub(super) const fn file(&self) -> Option<&File> {
        match &self.file {
            Handle::Open(file) => Some(file),
            Handle::Closed(_) => None,
        }
    }

    /// Closes the file between reads.
    pub(super) fn close(&mut self) {
        if let Handle::Open(file) = &self.file {
            self.file = Handle::Closed(identity(file).ok());
        }
    }

    /// The tokens of document `number`, at most `max` of them.
    pub(crate) fn document(&self, number: u32, max: usize) -> Result<Range<u64>, TokenCacheError> {
        const BYTES: u64 = size_of::<DocumentEnd>() as u64;
        // The end of a document is the start of the next.
        let mut ends = [DocumentEnd { end: 0, line: 0 }; 2];
        let (first, before) = (u64::from(number).saturating_sub(1), usize::from(number == 0));
        self.read_bytes(bytemuck::cast_slice_mut(&mut ends[before..]), self.documents_at + first * BYTES)?;
        let start = ends[0].end;
        Ok(start..ends[1].end.min(start.saturating_add(max as u64)))
    }

    /// Reads tokens with their [`MARKS`], from the `first` of the file on.
    ///
    /// # Shapes
    /// `tokens`: any number of tokens that the file has.
    pub(crate) fn read(&self, first: u64, tokens: &mut [i32]) -> Result<(), TokenCacheError> {
        self.read_bytes(bytemuck::cast_slice_mut(tokens), self.tokens_at + first * size_of::<i32>() as u64)
    }

    /// Reads how much tokens count as labels, from the `first` of the file on.
    ///
    /// # Shapes
    /// `weights`: as `tokens` of [`TokenReader::read`].
    pub(crate) fn read_weights(&self, first: u64, weights: &mut [f32]) -> Result<(), TokenCacheError> {
        let Some(at) = self.weights_at else {
            weights.fill(1.0);
            return Ok(());
        };
        self.read_bytes(bytemuck::cast_slice_mut(weights), at + first * size_of::<f32>() as u64)
    }

    /// Adds up the weights of a document's `n_predicted` predicted tokens; [`WEIGHT_ONE`] stands for a weight of 1.
    pub(crate) fn weight(&self, document: Range<u64>, n_predicted: u64) -> Result<u64, TokenCacheError> {
        if self.weights_at.is_none() {
            return Ok(n_predicted.saturating_mul(WEIGHT_ONE));
        }
        let (mut tokens, mut weights) = ([0; TOKENS_AT_A_TIME], [0.0; TOKENS_AT_A_TIME]);
        let (mut first, mut sum) = (document.start + 1, 0u64);
        while first < document.end {
            let n = TOKENS_AT_A_TIME.min((document.end - first) as usize);
            self.read(first, &mut tokens[..n])?;
            self.read_weights(first, &mut weights[..n])?;
            let trained = tokens[..n].iter().zip(&weights).filter(|(token, _)| is_trained(**token));
            sum = trained.fold(sum, |sum, (_, weight)| sum.saturating_add(counted(*weight)));
            first += n as u64;
        }
        Ok(sum)
    }

    /// What is in a document.
    pub(crate) fn counted(&self, document: Range<u64>) -> Result<Counted, TokenCacheError> {
        let (mut counted, mut tokens) = (Counted::default(), [0; TOKENS_AT_A_TIME]);
        let mut first = document.start + 1;
        while first < document.end {
            let n = TOKENS_AT_A_TIME.min((document.end - first) as usize);
            self.read(first, &mut tokens[..n])?;
            counted.n_predicted += tokens[..n].iter().filter(|token| is_trained(**token)).count();
            counted.is_undesirable |= tokens[..n].iter().any(|token| is_undesirable(*token));
            first += n as u64;
        }
        Ok(counted)
    }

    fn read_bytes(&self, bytes: &mut [u8], at: u64) -> Result<(), TokenCacheError> {
        let read = match &self.file {
            Handle::Open(file) => file.read_exact_at(bytes, at),
            Handle::Closed(checked) => File::open(&self.path).and_then(|file| match identity(&file)? {
                found if Some(found) == *checked => file.read_exact_at(bytes, at),
                _ => Err(io::Error::other("it was replaced while it was used")),
            }),
        };
        read.map_err(|error| TokenCacheError::Io { action: "read", path: self.path.clone(), reason: error.to_string() })
    }
}

/// Device and inode of a file.
fn identity(file: &File) -> io::Result<(u64, u64)> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Whether the model is trained to predict a token as [`TokenReader::read`] returns it.
pub(crate) const fn is_trained(token: i32) -> bool {
    token as u32 & TRAINED != 0
}

/// The id of a token as [`TokenReader::read`] returns it.
pub(crate) const fn id_of(token: i32) -> i32 {
    (token as u32 & !MARKS) as i32
}

/// Whether a token as [`TokenReader::read`] returns it is of an answer that is labelled undesirable.
pub(crate) const fn is_undesirable(token: i32) -> bool {
    token as u32 & UNDESIRABLE != 0
}

/// What is in a document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counted {
    /// Predicted tokens: the trained ones, except the first, which has no context.
    pub(crate) n_predicted: usize,
    /// Whether its answer is labelled undesirable.
    pub(crate) is_undesirable: bool,
}
