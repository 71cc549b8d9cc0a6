//! Bounds of one rendering: a template of a downloaded model may loop, print or double without end.

use std::cell::Cell;

use super::error::Error;

/// Evaluated expressions, statements and visited items. A conversation of a thousand turns takes less than a million.
const STEPS_MAX: u64 = 10_000_000;
/// Bytes of all texts that a rendering makes, of which the last is its result.
const MADE_BYTES_MAX: u64 = 2 << 30;
/// Bytes of one text.
pub(super) const TEXT_BYTES_MAX: usize = 256 << 20;
/// Items of one list.
const ITEMS_MAX: usize = 1 << 20;
/// Expressions, statements and calls within each other: what fits a thread's stack.
const DEPTH_MAX: u32 = 400;

/// What a rendering may still do.
#[derive(Debug, Default)]
pub(super) struct Budget {
    steps: Cell<u64>,
    made_bytes: Cell<u64>,
    depth: Cell<u32>,
}

impl Budget {
    /// Counts `n` steps.
    pub(super) fn step(&self, n: usize) -> Result<(), Error> {
        self.steps.set(self.steps.get().saturating_add(n as u64));
        match self.steps.get() > STEPS_MAX {
            true => Err(Error::new(format!("it takes more than {STEPS_MAX} steps, so it may never end"))),
            false => Ok(()),
        }
    }

    /// Counts a text of `bytes` before it is made.
    pub(super) fn text(&self, bytes: usize) -> Result<(), Error> {
        if bytes > TEXT_BYTES_MAX {
            return Err(Error::new(format!("it makes a text of more than {} MiB", TEXT_BYTES_MAX >> 20)));
        }
        self.made_bytes.set(self.made_bytes.get().saturating_add(bytes as u64));
        if self.made_bytes.get() > MADE_BYTES_MAX {
            return Err(Error::new(format!("its texts take more than {} MiB", MADE_BYTES_MAX >> 20)));
        }
        self.step(bytes / 256)
    }

    /// Counts a list of `n` items before it is made.
    pub(super) fn items(&self, n: usize) -> Result<(), Error> {
        match n > ITEMS_MAX {
            true => Err(Error::new(format!("it makes a list of more than {ITEMS_MAX} items"))),
            false => self.step(n),
        }
    }

    /// Runs `inner` one level deeper.
    pub(super) fn nested<T>(&self, inner: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        if self.depth.get() >= DEPTH_MAX {
            return Err(Error::new(format!("it is nested more than {DEPTH_MAX} levels deep")));
        }
        self.depth.set(self.depth.get() + 1);
        let result = inner();
        self.depth.set(self.depth.get() - 1);
        result
    }
}
