//! The CUDA driver.

use super::CudaVersion;
use super::binding::functions;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUlaunchConfig, CUmodule, CUstream,
};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// `CUresult`: an integer, since newer drivers return codes that no header of today knows.
pub(crate) type Code = u32;

functions! {
    /// Functions of libcuda.
    Driver {
        fn cuInit(c_uint) -> Code;
        fn cuDriverGetVersion(*mut c_int) -> Code;
        fn cuGetErrorName(Code, *mut *const c_char) -> Code;
        fn cuDeviceGetCount(*mut c_int) -> Code;
        fn cuDeviceGet(*mut CUdevice, c_int) -> Code;
        fn cuDeviceGetName(*mut c_char, c_int, CUdevice) -> Code;
        fn cuDeviceGetAttribute(*mut c_int, c_uint, CUdevice) -> Code;
        fn cuDeviceTotalMem_v2(*mut usize, CUdevice) -> Code;
        fn cuDeviceGetUuid(*mut [u8; 16], CUdevice) -> Code;
        fn cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice) -> Code;
        fn cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice) -> Code;
        fn cuCtxSetCurrent(CUcontext) -> Code;
        fn cuMemGetInfo_v2(*mut usize, *mut usize) -> Code;
        fn cuMemAlloc_v2(*mut CUdeviceptr, usize) -> Code;
        fn cuMemFree_v2(CUdeviceptr) -> Code;
        fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> Code;
        fn cuMemFreeHost(*mut c_void) -> Code;
        // Infers the direction, since offloaded state is host memory that kernels access.
        fn cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream) -> Code;
        fn cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream) -> Code;
        fn cuMemsetD32Async(CUdeviceptr, c_uint, usize, CUstream) -> Code;
        fn cuModuleLoadData(*mut CUmodule, *const c_void) -> Code;
        fn cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char) -> Code;
        fn cuFuncSetAttribute(CUfunction, c_uint, c_int) -> Code;
        fn cuLaunchKernel(CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void) -> Code;
        fn cuStreamCreate(*mut CUstream, c_uint) -> Code;
        fn cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int) -> Code;
        fn cuStreamSynchronize(CUstream) -> Code;
        fn cuStreamBeginCapture_v2(CUstream, c_uint) -> Code;
        fn cuStreamEndCapture(CUstream, *mut CUgraph) -> Code;
        fn cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, u64) -> Code;
        fn cuGraphLaunch(CUgraphExec, CUstream) -> Code;
        fn cuGraphDestroy(CUgraph) -> Code;
        fn cuGraphExecDestroy(CUgraphExec) -> Code;
        fn cuStreamQuery(CUstream) -> Code;
        fn cuEventCreate(*mut CUevent, c_uint) -> Code;
        fn cuEventDestroy_v2(CUevent) -> Code;
        fn cuEventRecord(CUevent, CUstream) -> Code;
        fn cuEventQuery(CUevent) -> Code;
        fn cuEventSynchronize(CUevent) -> Code;
        fn cuStreamWaitEvent(CUstream, CUevent, c_uint) -> Code;
        fn cuEventElapsedTime(*mut f32, CUevent, CUevent) -> Code;
        fn cuStreamWriteValue32_v2(CUstream, CUdeviceptr, u32, c_uint) -> Code;
    }
    optional {
        // The UUID of a part of a GPU (MIG), where the process uses one.
        fn cuDeviceGetUuid_v2(*mut [u8; 16], CUdevice) -> Code;
        // Launches with attributes.
        fn cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void) -> Code;
    }
}

impl Driver {
    /// The newest version of CUDA that it supports; 0 if it gives none.
    pub(crate) fn version(&self) -> CudaVersion {
        let mut version = 0;
        // SAFETY: a pointer to a local.
        let code = unsafe { (self.cuDriverGetVersion)(&raw mut version) };
        CudaVersion(if code == 0 { version } else { 0 })
    }

    /// Name of an error code.
    pub(crate) fn text(&self, code: Code) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the driver writes a pointer to a string of its own, or null.
        unsafe { (self.cuGetErrorName)(code, &raw mut name) };
        if name.is_null() {
            return "an unknown error".to_owned();
        }
        // SAFETY: a null-terminated string that lives as long as the library.
        unsafe { std::ffi::CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}
