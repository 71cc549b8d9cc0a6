//! Reads the tokens of a checked file while a job trains.
//!
//! The file is read, not mapped: if another program truncates it, a read returns an error, whereas an access to a map ends the
//! process by SIGBUS.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::token_cache::{DocumentEnd, TRAINED, TokenCacheError};

/// Tokens that are counted at a time.
const TOKENS_AT_A_TIME: usize = 1024;

/// The tokens of one data file. Reads allocate nothing.
#[derive(Debug)]
pub(crate) struct TokenReader {
    pub(super) file: File,
    pub(super) path: PathBuf,
    /// Where tokens and document ends begin in the file.
    pub(super) tokens_at: u64,
    pub(super) documents_at: u64,
}

impl TokenReader {
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

    /// Reads tokens with their [`TRAINED`] bits, from the `first` of the file on.
    ///
    /// # Shapes
    /// `tokens`: any number of tokens that the file has.
    pub(crate) fn read(&self, first: u64, tokens: &mut [i32]) -> Result<(), TokenCacheError> {
        self.read_bytes(bytemuck::cast_slice_mut(tokens), self.tokens_at + first * size_of::<i32>() as u64)
    }

    /// The number of predicted tokens of a document: the trained ones, except the first, which has no context.
    pub(crate) fn count_predicted(&self, document: Range<u64>) -> Result<usize, TokenCacheError> {
        let (mut n_predicted, mut tokens) = (0, [0; TOKENS_AT_A_TIME]);
        let mut first = document.start + 1;
        while first < document.end {
            let n = TOKENS_AT_A_TIME.min((document.end - first) as usize);
            self.read(first, &mut tokens[..n])?;
            n_predicted += tokens[..n].iter().filter(|token| is_trained(**token)).count();
            first += n as u64;
        }
        Ok(n_predicted)
    }

    fn read_bytes(&self, bytes: &mut [u8], at: u64) -> Result<(), TokenCacheError> {
        self.file.read_exact_at(bytes, at).map_err(|error| TokenCacheError::Io {
            action: "read",
            path: self.path.clone(),
            reason: error.to_string(),
        })
    }
}

/// Whether the model is trained to predict a token as [`TokenReader::read`] returns it.
pub(crate) const fn is_trained(token: i32) -> bool {
    token as u32 & TRAINED != 0
}

/// The id of a token as [`TokenReader::read`] returns it.
pub(crate) const fn id_of(token: i32) -> i32 {
    (token as u32 & !TRAINED) as i32
}
