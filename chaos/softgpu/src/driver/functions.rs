//! Modules and their functions.

use super::{P, call_in_context, put};
use crate::codes::{Code, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, refuse};
use crate::device;
use crate::module::{Kernel, Module};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

static MODULES: Mutex<BTreeMap<usize, Arc<Module>>> = Mutex::new(BTreeMap::new());
static KERNELS: Mutex<BTreeMap<usize, Arc<Kernel>>> = Mutex::new(BTreeMap::new());

/// Attributes of functions that programs may set.
const MAX_DYNAMIC_SHARED: c_int = 8;
const CARVEOUT: c_int = 9;

fn module(handle: P) -> Result<Arc<Module>, Code> {
    MODULES.lock().expect("nothing panics here").get(&(handle as usize)).cloned().ok_or(INVALID_HANDLE)
}

/// The kernel of a handle, in the context of its module.
pub fn kernel(handle: P, device: u32) -> Result<Arc<Kernel>, Code> {
    let kernel = KERNELS.lock().expect("nothing panics here").get(&(handle as usize)).cloned();
    kernel.filter(|k| k.device == device).ok_or(INVALID_HANDLE)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadData(at: *mut P, image: P) -> Code {
    call_in_context(|device| {
        if image.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: see `driver`.
        let module = unsafe { Module::load(image.cast(), device)? };
        let handle = Arc::as_ptr(&module) as usize;
        MODULES.lock().expect("nothing panics here").insert(handle, module);
        put(at, handle as P)
    })
}

/// Options concern the compilation of PTX, which has none here.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadDataEx(at: *mut P, image: P, n: c_uint, _: *mut c_int, _: *mut P) -> Code {
    match n {
        0 => cuModuleLoadData(at, image),
        _ => refuse(NOT_SUPPORTED, format_args!("cuModuleLoadDataEx with options")),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(handle: P) -> Code {
    call_in_context(|_| {
        let module = MODULES.lock().expect("nothing panics here").remove(&(handle as usize)).ok_or(INVALID_HANDLE)?;
        KERNELS.lock().expect("nothing panics here").retain(|_, k| !k.is_of(&module));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetFunction(at: *mut P, handle: P, name: *const c_char) -> Code {
    call_in_context(|_| {
        // SAFETY: see `driver`.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let kernel = module(handle)?.function(&name)?;
        let handle = Arc::as_ptr(&kernel) as usize;
        KERNELS.lock().expect("nothing panics here").insert(handle, kernel);
        put(at, handle as P)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetGlobal_v2(_: *mut u64, _: *mut usize, _: P, name: *const c_char) -> Code {
    call_in_context(|_| {
        // SAFETY: see `driver`.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        Err(refuse(NOT_FOUND, format_args!("cuModuleGetGlobal is not imitated (asked for `{name}`)")))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(function: P, attribute: c_int, value: c_int) -> Code {
    call_in_context(|device| {
        let kernel = kernel(function, device)?;
        match attribute {
            MAX_DYNAMIC_SHARED if value < 0 || value as usize > device::shared_bytes_optin() => Err(refuse(
                INVALID_VALUE,
                format_args!("{value} bytes of dynamic shared memory are more than the device has"),
            )),
            MAX_DYNAMIC_SHARED => {
                kernel.dynamic_most.store(value, Relaxed);
                Ok(())
            }
            CARVEOUT if (-1..=100).contains(&value) => Ok(()),
            _ => {
                Err(refuse(INVALID_VALUE, format_args!("cuFuncSetAttribute: attribute {attribute} cannot be {value}")))
            }
        }
    })
}

/// Registers and local memory depend on NVIDIA's compiler: always 32 and 0 here.
#[unsafe(no_mangle)]
pub extern "C" fn cuFuncGetAttribute(at: *mut c_int, attribute: c_int, function: P) -> Code {
    call_in_context(|device| {
        let kernel = kernel(function, device)?;
        let value = match attribute {
            0 => kernel.threads_most() as c_int,
            1 => kernel.static_seen.load(Relaxed),
            2 | 3 => 0,
            4 => 32,
            5 | 6 => device::capability() as c_int,
            7 => 0,
            MAX_DYNAMIC_SHARED => kernel.dynamic_most(),
            CARVEOUT => -1,
            _ => return Err(refuse(INVALID_VALUE, format_args!("cuFuncGetAttribute: unknown attribute {attribute}"))),
        };
        put(at, value)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncGetParamInfo(function: P, parameter: usize, offset: *mut usize, bytes: *mut usize) -> Code {
    call_in_context(|device| {
        let kernel = kernel(function, device)?;
        if !offset.is_null() {
            return Err(refuse(NOT_SUPPORTED, format_args!("cuFuncGetParamInfo of a parameter's offset")));
        }
        put(bytes, *kernel.sizes().get(parameter).ok_or(INVALID_VALUE)?)
    })
}
