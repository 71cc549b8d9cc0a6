//! The fastest algorithms of products: found once, and kept between processes in the folder of compiled kernels, so that a rank that
//! replaces another one does not look for them again.

use crate::kernels::keep;
use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use phalanx_strategies::program::DType;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// What the fastest algorithm of a product depends on, on one model of GPU and with one version of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Kind {
    /// Rows and columns of the result, terms of its sums.
    pub(crate) shape: [usize; 3],
    /// Elements from one row of `a`, `b` and `c` to the next.
    pub(crate) strides: [usize; 3],
    /// Types of `a`, `b` and `c`.
    pub(crate) dtypes: [DType; 3],
    /// Whether `a` and `b` are transposed, something is added, it is `c` itself, and there is a bias.
    pub(crate) flags: [bool; 5],
    /// Alignments of op(b), op(a), what is added, and c, in bytes.
    pub(crate) alignments: [u32; 4],
}

#[derive(Debug)]
pub(crate) struct Algorithms {
    /// Where they are kept, if anywhere; its owner must be able to trust its contents.
    folder: Option<PathBuf>,
    /// The model of the GPU, and the version of the library.
    arithmetic: String,
    known: Mutex<BTreeMap<Kind, Algorithm>>,
}

/// The library's description, which is opaque.
#[derive(Clone, Copy, Debug)]
struct Algorithm(cublasLtMatmulAlgo_t);

// SAFETY: plain memory.
unsafe impl Send for Algorithm {}

impl Algorithms {
    /// None yet, or those in the folder that were found with this arithmetic.
    pub(crate) fn new(folder: Option<PathBuf>, arithmetic: String) -> Algorithms {
        Algorithms { folder, arithmetic, known: Mutex::default() }
    }

    /// The fastest algorithm of products of a kind. One from the folder must be `accepted`.
    pub(crate) fn get(
        &self,
        kind: &Kind,
        accepted: impl FnOnce(&cublasLtMatmulAlgo_t) -> bool,
    ) -> Option<cublasLtMatmulAlgo_t> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Algorithm(algorithm)) = known.get(kind) {
            return Some(*algorithm);
        }
        let bytes = std::fs::read(self.path(kind)?).ok()?;
        let words: &[[u8; 8]; 8] = bytes.as_chunks().0.try_into().ok()?;
        let algorithm = cublasLtMatmulAlgo_t { data: words.map(u64::from_le_bytes) };
        if !accepted(&algorithm) {
            return None;
        }
        known.insert(*kind, Algorithm(algorithm));
        Some(algorithm)
    }

    /// Keeps the fastest algorithm.
    pub(crate) fn put(&self, kind: Kind, algorithm: cublasLtMatmulAlgo_t) {
        if let Some(path) = self.path(&kind) {
            let bytes: Vec<u8> = algorithm.data.iter().flat_map(|word| word.to_le_bytes()).collect();
            if let Err(error) = keep(&path, &bytes) {
                tracing::warn!(%error, path = %path.display(), "cannot keep the algorithm of a product");
            }
        }
        self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(kind, Algorithm(algorithm));
    }

    fn path(&self, kind: &Kind) -> Option<PathBuf> {
        let mut hasher = DefaultHasher::new();
        (&self.arithmetic, format!("{kind:?}")).hash(&mut hasher);
        let [m, n, k] = kind.shape;
        Some(self.folder.as_ref()?.join(format!("product-{m}x{n}x{k}-{:016x}.algorithm", hasher.finish())))
    }
}
