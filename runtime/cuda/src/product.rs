//! Matrix products through cuBLASLt.
//!
//! cuBLASLt stores matrices by columns; a row-major matrix is a column-major one transposed, so `C = A B` is passed as
//! `C^T = B^T A^T`.

use crate::algorithms::{Algorithms, Kind};
use crate::alike::arithmetic_of;
use crate::error::CudaError;
use crate::gpu::{Event, Gpu, Stream};
use cudarc::cublaslt::sys::{
    cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreference_t, cublasLtMatrixLayout_t,
};
use phalanx_strategies::program::DType;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// Algorithms that are tried for a product. On an H100 the library proposes no more, even if asked for 48.
const N_TRIED: usize = 8;
/// Timed runs of each that is not far behind the fastest in its first.
const N_RUNS: u32 = 3;
/// One that takes more than this times the least time in its first run is not run again.
const FAR_BEHIND: f64 = 1.1;
/// An algorithm is preferred to an earlier one if it takes less than this part of its time: the library's own order is kept
/// within the noise of a measurement.
const GAIN: f64 = 0.98;

/// [`Products::has_fp8`] asks the library for a product of square matrices with this edge, and with scales at this address. The library
/// does not read them, but refuses an address of zero.
const FP8_PROBE: usize = 4096;
const FP8_PROBE_SCALES: u64 = 256;

/// Working space of a product: twice what cuBLAS itself takes on Hopper, so that it can propose algorithms that split sums. Whether
/// they gain has not been measured apart.
pub(crate) const WORKSPACE_BYTES: usize = 64 << 20;

/// `CUBLAS_COMPUTE_32F`: f32 sums, and no tf32.
const COMPUTE_F32: u32 = 68;
const R_32F: u32 = 0;
const R_16F: u32 = 2;
const R_16BF: u32 = 14;
const R_8F_E4M3: u32 = 28;
/// `CUBLASLT_MATMUL_DESC_TRANSA`, `…_TRANSB`.
const TRANS_A: u32 = 3;
const TRANS_B: u32 = 4;
/// `CUBLASLT_MATMUL_DESC_EPILOGUE`, `…_BIAS_POINTER`, and `CUBLASLT_EPILOGUE_BIAS`.
const EPILOGUE: u32 = 7;
const BIAS_POINTER: u32 = 8;
const EPILOGUE_BIAS: u32 = 4;
/// `CUBLASLT_MATMUL_DESC_{A,B}_SCALE_POINTER`, `…_SCALE_MODE`, `CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F`: one f32 for each row of
/// op(A) and each column of op(B).
const SCALE_POINTERS: [u32; 2] = [17, 18];
const SCALE_MODES: [u32; 2] = [31, 32];
const OF_ROWS: i32 = 3;
/// `CUBLASLT_MATMUL_DESC_FAST_ACCUM`: sums stay in the matrix unit, whose registers keep fewer bits of them than f32; without it, products
/// in FP8 with scales of rows are little faster than those in bf16 (pytorch/ao, `torchao/float8/config.py`).
const FAST_ACCUM: u32 = 25;
/// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`, `…_REDUCTION_SCHEME_MASK`.
const MAX_WORKSPACE: u32 = 1;
const REDUCTION_SCHEMES: u32 = 3;
/// `CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{A,B,C,D}_BYTES`. Without them, the library assumes [`ALIGNMENT_MAX`].
const MIN_ALIGNMENTS: [u32; 4] = [5, 6, 7, 8];
const ALIGNMENT_MAX: u32 = 256;
/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`: partial sums in the workspace, added in a fixed order; never atomics.
const FIXED_ORDER: u32 = 2;

/// A row-major matrix in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Matrix {
    pub(crate) address: u64,
    /// Elements from one row to the next, as stored.
    pub(crate) stride: usize,
    pub(crate) dtype: DType,
    /// The product uses the transpose.
    pub(crate) is_transposed: bool,
}

impl Matrix {
    /// The power of two that divides the addresses of all rows. A run of columns may begin anywhere.
    fn alignment(self) -> u32 {
        let row_bytes = (self.stride * self.dtype.size_bytes()) as u64;
        1 << (self.address | row_bytes | u64::from(ALIGNMENT_MAX)).trailing_zeros()
    }
}

/// `c [m, n] = (added) + alpha op(a) [m, k] op(b) [k, n] + (bias [n])`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: Matrix,
    pub(crate) b: Matrix,
    /// Addresses of an f32 for each row of op(a), and of one for each column of op(b), which multiply it; of e4m3 operands.
    pub(crate) scales: Option<[u64; 2]>,
    pub(crate) c: Matrix,
    pub(crate) alpha: f32,
    /// What is added: a matrix stored as `c`, or `c` itself.
    pub(crate) added: Option<u64>,
    /// A row of f32 that is added to every row; then `c` is f32 too.
    pub(crate) bias: Option<u64>,
    /// [`WORKSPACE_BYTES`] of scratch.
    pub(crate) workspace: u64,
}

/// The handle of cuBLASLt. It lives as long as the process.
#[derive(Debug)]
pub(crate) struct Products {
    handle: cublasLtHandle_t,
    fastest: Algorithms,
    /// The first that the library proposes, which takes it a while. Layers have the same products.
    first: Algorithms,
    /// Whether the library multiplies e4m3 numbers, once it was asked.
    has_fp8: OnceLock<bool>,
}

/// Which of the library's algorithms a product uses. All have a fixed order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The first that the library proposes: the same at all ranks that `alike` admits to a world, and after every restart.
    First,
    /// The fastest of the first few, if it is known; otherwise the first.
    Known,
    /// The fastest of the first few; if it is not known, they are run. Another process may find another one the fastest.
    Fastest,
}

// SAFETY: cuBLASLt's handle may be used from several threads.
unsafe impl Send for Products {}
// SAFETY: as above.
unsafe impl Sync for Products {}

/// A product with its descriptors and its algorithm.
#[derive(Debug)]
pub(crate) struct PlannedProduct {
    gpu: Arc<Gpu>,
    handle: cublasLtHandle_t,
    product: Product,
    desc: cublasLtMatmulDesc_t,
    /// Of op(b), op(a) and c.
    layouts: [cublasLtMatrixLayout_t; 3],
    algorithm: cublasLtMatmulAlgo_t,
}

// SAFETY: descriptors are plain memory of the library.
unsafe impl Send for PlannedProduct {}

const fn type_code(dtype: DType) -> u32 {
    match dtype {
        DType::Bf16 => R_16BF,
        DType::F16 => R_16F,
        DType::E4m3 => R_8F_E4M3,
        DType::F32 | DType::F64 | DType::I32 => R_32F,
    }
}

impl Products {
    /// Opens cuBLASLt on a GPU. The fastest algorithms are kept in the folder `cache`, which only this user may write.
    ///
    /// # Errors
    /// When the library fails.
    pub(crate) fn open(gpu: &Gpu, cache: Option<PathBuf>) -> Result<Products, CudaError> {
        let mut handle: cublasLtHandle_t = std::ptr::null_mut();
        // SAFETY: a pointer to a local; the context is current.
        check(gpu, "cublasLtCreate", unsafe { (gpu.libraries.blas.cublasLtCreate)(&raw mut handle) })?;
        let (fastest, first) = (Algorithms::new(cache, arithmetic_of(gpu, None)), Algorithms::new(None, String::new()));
        Ok(Products { handle, fastest, first, has_fp8: OnceLock::new() })
    }

    /// Whether the library multiplies e4m3 numbers with a scale for each row, into f32 and into bf16; a line tells once if not.
    pub(crate) fn has_fp8(&self, gpu: &Arc<Gpu>) -> bool {
        let matrix = |address, dtype, is_transposed| Matrix { address, stride: FP8_PROBE, dtype, is_transposed };
        let plans = |dtype: DType| {
            let (m, n, k, alpha, workspace) = (FP8_PROBE, FP8_PROBE, FP8_PROBE, 1.0, 0);
            let (a, b) = (matrix(0, DType::E4m3, false), matrix(0, DType::E4m3, true));
            let c = matrix(0, dtype, false);
            self.planned(
                gpu,
                Product {
                    m,
                    n,
                    k,
                    a,
                    b,
                    scales: Some([FP8_PROBE_SCALES; 2]),
                    c,
                    alpha,
                    added: None,
                    bias: None,
                    workspace,
                },
            )
        };
        let asked = || gpu.bind().and_then(|()| plans(DType::F32)).and_then(|_| plans(DType::Bf16));
        *self.has_fp8.get_or_init(|| match asked() {
            Ok(_) => true,
            Err(error) => {
                let device = &gpu.name;
                tracing::warn!(%error, "`fp8` computes in bf16 on {device}: cuBLASLt has no products of FP8 with scales of rows here");
                false
            }
        })
    }

    /// Plans a product with an algorithm of a fixed order of sums.
    ///
    /// # Errors
    /// When the library has no algorithm, or the GPU has failed.
    ///
    /// # Safety
    /// For [`Choice::Fastest`], the matrices and the workspace are this GPU's, nothing else accesses the result, and its contents are
    /// not needed.
    pub(crate) unsafe fn plan(
        &self,
        gpu: &Arc<Gpu>,
        product: Product,
        choice: Choice,
    ) -> Result<PlannedProduct, CudaError> {
        let (kind, mut planned) = (product.kind(), self.planned(gpu, product)?);
        if choice == Choice::First {
            return Ok(planned);
        }
        if let Some(algorithm) = self.fastest.get(&kind, |algorithm| planned.accepts(algorithm)) {
            planned.algorithm = algorithm;
        } else if choice == Choice::Fastest {
            let algorithms = self.algorithms(gpu, planned.desc, planned.layouts, product.alignments(), N_TRIED)?;
            if algorithms.len() > 1 {
                // SAFETY: the caller's contract.
                planned.algorithm = unsafe { planned.fastest(&algorithms) }?;
                self.fastest.put(kind, planned.algorithm);
            }
        }
        Ok(planned)
    }

    /// A product with its descriptors, and the first algorithm that the library proposes.
    fn planned(&self, gpu: &Arc<Gpu>, product: Product) -> Result<PlannedProduct, CudaError> {
        let blas = gpu.libraries.blas;
        let Product { m, n, k, a, b, c, .. } = product;
        let mut desc: cublasLtMatmulDesc_t = std::ptr::null_mut();
        let mut layouts: [cublasLtMatrixLayout_t; 3] = [std::ptr::null_mut(); 3];
        let stored = |rows, cols, transposed| if transposed { (cols, rows) } else { (rows, cols) };
        let (b_shape, a_shape) = (stored(n, k, b.is_transposed), stored(k, m, a.is_transposed));
        let shapes = [(b_shape, b), (a_shape, a), ((n, m), c)];
        // SAFETY: pointers to locals; the library copies attributes.
        unsafe {
            check(gpu, "cublasLtMatmulDescCreate", (blas.cublasLtMatmulDescCreate)(&raw mut desc, COMPUTE_F32, R_32F))?;
            for (which, matrix) in [(TRANS_A, b), (TRANS_B, a)] {
                let is_transposed = i32::from(matrix.is_transposed);
                let code = (blas.cublasLtMatmulDescSetAttribute)(desc, which, (&raw const is_transposed).cast(), 4);
                check(gpu, "cublasLtMatmulDescSetAttribute", code)?;
            }
            if let Some(bias) = product.bias {
                let (set, epilogue) = (blas.cublasLtMatmulDescSetAttribute, EPILOGUE_BIAS);
                let code = set(desc, EPILOGUE, (&raw const epilogue).cast(), size_of::<u32>());
                check(gpu, "cublasLtMatmulDescSetAttribute", code)?;
                let code = set(desc, BIAS_POINTER, (&raw const bias).cast(), size_of::<u64>());
                check(gpu, "cublasLtMatmulDescSetAttribute", code)?;
            }
            if let Some([of_a, of_b]) = product.scales {
                let (set, is_fast, of_rows) = (blas.cublasLtMatmulDescSetAttribute, 1i8, OF_ROWS);
                let code = set(desc, FAST_ACCUM, (&raw const is_fast).cast(), size_of::<i8>());
                check(gpu, "cublasLtMatmulDescSetAttribute", code)?;
                for ((pointer, mode), scales) in SCALE_POINTERS.into_iter().zip(SCALE_MODES).zip([of_b, of_a]) {
                    let code = set(desc, mode, (&raw const of_rows).cast(), size_of::<i32>());
                    check(gpu, "cublasLtMatmulDescSetAttribute", code)?;
                    let code = set(desc, pointer, (&raw const scales).cast(), size_of::<u64>());
                    check(gpu, "cublasLtMatmulDescSetAttribute", code)?;
                }
            }
            for (layout, ((rows, cols), matrix)) in layouts.iter_mut().zip(shapes) {
                let code = (blas.cublasLtMatrixLayoutCreate)(
                    &raw mut *layout,
                    type_code(matrix.dtype),
                    rows as u64,
                    cols as u64,
                    matrix.stride as i64,
                );
                check(gpu, "cublasLtMatrixLayoutCreate", code)?;
            }
        }
        let kind = product.kind();
        let algorithm = match self.first.get(&kind, |_| true) {
            Some(algorithm) => algorithm,
            None => {
                let algorithm = self.algorithms(gpu, desc, layouts, product.alignments(), 1)?[0];
                self.first.put(kind, algorithm);
                algorithm
            }
        };
        Ok(PlannedProduct { gpu: gpu.clone(), handle: self.handle, product, desc, layouts, algorithm })
    }

    fn algorithms(
        &self,
        gpu: &Gpu,
        desc: cublasLtMatmulDesc_t,
        [a, b, c]: [cublasLtMatrixLayout_t; 3],
        alignments: [u32; 4],
        n_max: usize,
    ) -> Result<Vec<cublasLtMatmulAlgo_t>, CudaError> {
        let blas = gpu.libraries.blas;
        let mut preference: cublasLtMatmulPreference_t = std::ptr::null_mut();
        // SAFETY: a struct of integers, for which zeros are valid.
        let mut found: [cublasLtMatmulHeuristicResult_t; N_TRIED] = unsafe { std::mem::zeroed() };
        let mut n_found = 0;
        let (workspace, schemes) = (WORKSPACE_BYTES, FIXED_ORDER);
        // SAFETY: pointers to locals; the library copies attributes.
        unsafe {
            let code = (blas.cublasLtMatmulPreferenceCreate)(&raw mut preference);
            check(gpu, "cublasLtMatmulPreferenceCreate", code)?;
            let set = blas.cublasLtMatmulPreferenceSetAttribute;
            let code = set(preference, MAX_WORKSPACE, (&raw const workspace).cast(), size_of::<usize>());
            check(gpu, "cublasLtMatmulPreferenceSetAttribute", code)?;
            let code = set(preference, REDUCTION_SCHEMES, (&raw const schemes).cast(), size_of::<u32>());
            check(gpu, "cublasLtMatmulPreferenceSetAttribute", code)?;
            for (which, alignment) in MIN_ALIGNMENTS.into_iter().zip(alignments) {
                let code = set(preference, which, (&raw const alignment).cast(), size_of::<u32>());
                check(gpu, "cublasLtMatmulPreferenceSetAttribute", code)?;
            }
            let code = (blas.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                desc,
                a,
                b,
                c,
                c,
                preference,
                n_max.min(N_TRIED) as i32,
                found.as_mut_ptr(),
                &raw mut n_found,
            );
            (blas.cublasLtMatmulPreferenceDestroy)(preference);
            check(gpu, "cublasLtMatmulAlgoGetHeuristic", code)?;
        }
        assert!(n_found > 0, "the library reports success only with an algorithm");
        Ok(found[..n_found as usize].iter().map(|found| found.algo).collect())
    }
}

impl Product {
    /// Alignments of op(b), op(a), what is added, and c.
    fn alignments(&self) -> [u32; 4] {
        let added = Matrix { address: self.added.unwrap_or(self.c.address), ..self.c };
        [self.b, self.a, added, self.c].map(Matrix::alignment)
    }

    /// What its fastest algorithm depends on.
    pub(crate) fn kind(&self) -> Kind {
        let Product { m, n, k, a, b, c, added, bias, .. } = *self;
        let flags = [a.is_transposed, b.is_transposed, added.is_some(), added == Some(c.address), bias.is_some()];
        let matrices = [a, b, c];
        let (strides, dtypes) = (matrices.map(|m| m.stride), matrices.map(|m| m.dtype));
        Kind { shape: [m, n, k], strides, dtypes, flags, alignments: self.alignments() }
    }
}

impl PlannedProduct {
    /// Whether the library accepts an algorithm, which may come from a file, for this product.
    fn accepts(&self, algorithm: &cublasLtMatmulAlgo_t) -> bool {
        let [a, b, c] = self.layouts;
        // SAFETY: a struct of integers, for which zeros are valid.
        let mut needs: cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let check = self.gpu.libraries.blas.cublasLtMatmulAlgoCheck;
        // SAFETY: descriptors are alive; pointers to locals.
        let code = unsafe { check(self.handle, self.desc, a, b, c, c, algorithm, &raw mut needs) };
        code == 0 && needs.workspaceSize <= WORKSPACE_BYTES
    }

    /// The fastest of these algorithms on the compute stream.
    ///
    /// # Errors
    /// When the GPU has failed.
    ///
    /// # Safety
    /// As [`Products::plan`].
    unsafe fn fastest(&mut self, algorithms: &[cublasLtMatmulAlgo_t]) -> Result<cublasLtMatmulAlgo_t, CudaError> {
        let (mut best, mut least) = (0, f64::INFINITY);
        for (i, algorithm) in algorithms.iter().enumerate() {
            self.algorithm = *algorithm;
            // The first run loads the algorithm. One that the library refuses is not chosen.
            // SAFETY: the caller's contract.
            if unsafe { self.enqueue(self.gpu.compute) }.is_err() {
                continue;
            }
            // SAFETY: the caller's contract.
            let mut seconds = unsafe { self.seconds(1) }?;
            if seconds < FAR_BEHIND * least {
                // SAFETY: the caller's contract.
                seconds = unsafe { self.seconds(N_RUNS) }?;
            }
            if seconds < GAIN * least {
                (best, least) = (i, seconds);
            }
        }
        let Product { m, n, k, .. } = self.product;
        tracing::debug!(m, n, k, n_tried = algorithms.len(), best, least, "the fastest algorithm of a product");
        Ok(algorithms[best])
    }

    /// The mean time of `n` runs on the compute stream, in seconds.
    ///
    /// # Errors
    /// When the library or the GPU fails.
    ///
    /// # Safety
    /// As [`Products::plan`].
    unsafe fn seconds(&self, n: u32) -> Result<f64, CudaError> {
        let stream = self.gpu.compute;
        let [begin, end] = [Event::new(&self.gpu)?, Event::new(&self.gpu)?];
        begin.record(stream)?;
        for _ in 0..n {
            // SAFETY: the caller's contract.
            unsafe { self.enqueue(stream) }?;
        }
        end.record(stream)?;
        end.wait()?;
        Ok(end.since(&begin)?.as_secs_f64() / f64::from(n))
    }

    /// Enqueues the product.
    ///
    /// # Errors
    /// When the library or the GPU fails.
    ///
    /// # Safety
    /// The matrices and the workspace are this GPU's, and only work of the stream accesses them meanwhile.
    pub(crate) unsafe fn enqueue(&self, stream: Stream) -> Result<(), CudaError> {
        let (gpu, product) = (&*self.gpu, &self.product);
        let beta: f32 = if product.added.is_some() { 1.0 } else { 0.0 };
        let [a, b, c] = self.layouts;
        // SAFETY: the caller's contract; the scalars are read before the call returns.
        let code = unsafe {
            (gpu.libraries.blas.cublasLtMatmul)(
                self.handle,
                self.desc,
                (&raw const product.alpha).cast(),
                product.b.address as *const _,
                a,
                product.a.address as *const _,
                b,
                (&raw const beta).cast(),
                product.added.unwrap_or(product.c.address) as *const _,
                c,
                product.c.address as *mut _,
                c,
                &raw const self.algorithm,
                product.workspace as *mut _,
                WORKSPACE_BYTES,
                stream.0,
            )
        };
        check(gpu, "cublasLtMatmul", code)
    }
}

impl Drop for PlannedProduct {
    fn drop(&mut self) {
        let blas = self.gpu.libraries.blas;
        // SAFETY: created once by this library, and destroyed once.
        unsafe {
            (blas.cublasLtMatmulDescDestroy)(self.desc);
            for layout in self.layouts {
                (blas.cublasLtMatrixLayoutDestroy)(layout);
            }
        }
    }
}

/// Names of cuBLAS's status codes.
fn check(gpu: &Gpu, call: &'static str, code: u32) -> Result<(), CudaError> {
    let text = match code {
        0 => return Ok(()),
        1 => "CUBLAS_STATUS_NOT_INITIALIZED",
        3 => "CUBLAS_STATUS_ALLOC_FAILED",
        7 => "CUBLAS_STATUS_INVALID_VALUE",
        8 => "CUBLAS_STATUS_ARCH_MISMATCH",
        13 => "CUBLAS_STATUS_EXECUTION_FAILED",
        14 => "CUBLAS_STATUS_INTERNAL_ERROR",
        15 => "CUBLAS_STATUS_NOT_SUPPORTED",
        _ => "an unknown status",
    };
    Err(CudaError { call, device: gpu.name.clone(), code, text: text.to_owned() })
}
