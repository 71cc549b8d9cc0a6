//! cuBLASLt, matrix products.

use super::binding::functions;
use cudarc::cublaslt::sys::{
    cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreference_t, cublasLtMatrixLayout_t,
};
use cudarc::driver::sys::CUstream;
use std::ffi::{c_int, c_void};

functions! {
    /// Functions of libcublasLt.
    Blas {
        fn cublasLtGetVersion() -> usize;
        fn cublasLtCreate(*mut cublasLtHandle_t) -> u32;
        fn cublasLtMatmulDescCreate(*mut cublasLtMatmulDesc_t, u32, u32) -> u32;
        fn cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, u32, *const c_void, usize) -> u32;
        fn cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t) -> u32;
        fn cublasLtMatrixLayoutCreate(*mut cublasLtMatrixLayout_t, u32, u64, u64, i64) -> u32;
        fn cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t) -> u32;
        fn cublasLtMatmulPreferenceCreate(*mut cublasLtMatmulPreference_t) -> u32;
        fn cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, u32, *const c_void, usize) -> u32;
        fn cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t) -> u32;
        fn cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, c_int, *mut cublasLtMatmulHeuristicResult_t, *mut c_int) -> u32;
        fn cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, *const cublasLtMatmulAlgo_t, *mut cublasLtMatmulHeuristicResult_t) -> u32;
        fn cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, *const c_void, *const c_void, cublasLtMatrixLayout_t, *const c_void, cublasLtMatrixLayout_t, *const c_void, *const c_void, cublasLtMatrixLayout_t, *mut c_void, cublasLtMatrixLayout_t, *const cublasLtMatmulAlgo_t, *mut c_void, usize, CUstream) -> u32;
    }
}
