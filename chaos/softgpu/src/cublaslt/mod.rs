//! libcublasLt: products of f32, bf16, f16 and e4m3 matrices with f32 sums in a fixed order.
//!
//! SAFETY, for all functions here: arguments are what cublasLt.h asks for.

mod algorithm;
mod attributes;
pub mod element;
pub mod problem;
pub mod product;

use crate::codes::ILLEGAL_ADDRESS;
use crate::engine::{Op, engine};
use crate::memory;
use crate::stats::{self, Stat, count};
use crate::{driver, environment};
use algorithm::{Algorithm, Found};
use attributes::{Attributes, Description, Layout, Preference};
use element::Element;
use problem::Problem;
use product::Product;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// A `cublasStatus_t`.
type Status = u32;
type P = *mut c_void;
type Outcome = Result<(), Status>;

const OK: Status = 0;
const NOT_INITIALIZED: Status = 1;
const INVALID_VALUE: Status = 7;
const EXECUTION_FAILED: Status = 13;
const NOT_SUPPORTED: Status = 15;

fn refuse(status: Status, what: std::fmt::Arguments<'_>) -> Status {
    crate::codes::refuse(status, format_args!("cuBLASLt: {what}"))
}

fn status(outcome: Outcome) -> Status {
    outcome.err().unwrap_or(OK)
}

fn create<T>(at: *mut P, value: T) -> Status {
    if at.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: see the module.
    unsafe { at.write(Box::into_raw(Box::new(value)).cast()) };
    OK
}

fn destroy<T>(at: P) -> Status {
    if at.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: see the module; `create` made it.
    drop(unsafe { Box::from_raw(at.cast::<T>()) });
    OK
}

fn get<'a, T>(at: P) -> Result<&'a T, Status> {
    // SAFETY: see the module.
    unsafe { at.cast::<T>().as_ref() }.ok_or(INVALID_VALUE)
}

fn set_attribute<T: Attributes>(at: P, attribute: u32, value: *const u8, bytes: usize) -> Status {
    if at.is_null() || value.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: see the module.
    let (of, value) = unsafe { (&mut *at.cast::<T>(), std::slice::from_raw_parts(value, bytes)) };
    status(of.set(attribute, value))
}

fn get_attribute<T: Attributes>(at: P, attribute: u32, to: *mut u8, bytes: usize, written: *mut usize) -> Status {
    let Some(value) = get::<T>(at).ok().and_then(|of| of.get(attribute)) else {
        return refuse(INVALID_VALUE, format_args!("unknown attribute {attribute}"));
    };
    if !written.is_null() {
        // SAFETY: see the module.
        unsafe { written.write(value.len()) };
    }
    if bytes == 0 && !written.is_null() {
        return OK;
    }
    if to.is_null() || bytes < value.len() {
        return INVALID_VALUE;
    }
    // SAFETY: see the module.
    unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), to, value.len()) };
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtCreate(at: *mut P) -> Status {
    // The libraries are those of CUDA 13.
    match driver::current_device().filter(|_| environment::number("SOFTGPU_DRIVER_VERSION") >= 13_000) {
        Some(device) => create(at, device),
        None => NOT_INITIALIZED,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtDestroy(handle: P) -> Status {
    if handle.is_null() { NOT_INITIALIZED } else { destroy::<u32>(handle) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    130_000
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescCreate(at: *mut P, compute: u32, scale: u32) -> Status {
    match Description::new(compute, scale) {
        Ok(d) => create(at, d),
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescSetAttribute(d: P, attribute: u32, value: *const u8, bytes: usize) -> Status {
    set_attribute::<Description>(d, attribute, value, bytes)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescGetAttribute(
    d: P,
    attribute: u32,
    to: *mut u8,
    bytes: usize,
    n: *mut usize,
) -> Status {
    get_attribute::<Description>(d, attribute, to, bytes, n)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescDestroy(d: P) -> Status {
    destroy::<Description>(d)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutCreate(at: *mut P, dtype: u32, rows: u64, cols: u64, ld: i64) -> Status {
    match Layout::new(dtype, rows, cols, ld) {
        Ok(layout) => create(at, layout),
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutSetAttribute(l: P, attribute: u32, value: *const u8, bytes: usize) -> Status {
    set_attribute::<Layout>(l, attribute, value, bytes)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutGetAttribute(
    l: P,
    attribute: u32,
    to: *mut u8,
    bytes: usize,
    n: *mut usize,
) -> Status {
    get_attribute::<Layout>(l, attribute, to, bytes, n)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutDestroy(l: P) -> Status {
    destroy::<Layout>(l)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceCreate(at: *mut P) -> Status {
    create(at, Preference::default())
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceSetAttribute(p: P, attribute: u32, value: *const u8, bytes: usize) -> Status {
    set_attribute::<Preference>(p, attribute, value, bytes)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceGetAttribute(
    p: P,
    attribute: u32,
    to: *mut u8,
    bytes: usize,
    n: *mut usize,
) -> Status {
    get_attribute::<Preference>(p, attribute, to, bytes, n)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceDestroy(p: P) -> Status {
    destroy::<Preference>(p)
}

/// The problem that descriptors describe.
fn problem(d: P, a: P, b: P, c: P, to: P) -> Result<Problem, Status> {
    Problem::new(get(d)?, [get(a)?, get(b)?, get(c)?, get(to)?])
}

/// At most `room` algorithms, the fastest first.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    handle: P,
    d: P,
    a: P,
    b: P,
    c: P,
    to: P,
    preference: P,
    room: c_int,
    results: *mut Found,
    n: *mut c_int,
) -> Status {
    let find = || {
        if handle.is_null() || results.is_null() || n.is_null() || room < 1 {
            return Err(INVALID_VALUE);
        }
        let default = Preference::default();
        let preference = if preference.is_null() { &default } else { get(preference)? };
        let found = algorithm::find(&problem(d, a, b, c, to)?, preference);
        let found = &found[..found.len().min(room as usize)];
        // SAFETY: `results` has room for `room` entries.
        unsafe {
            std::ptr::copy_nonoverlapping(found.as_ptr(), results, found.len());
            n.write(found.len() as c_int);
        }
        if found.is_empty() { Err(NOT_SUPPORTED) } else { Ok(()) }
    };
    status(find())
}

/// Checks that an algorithm fits, and returns the workspace that it needs.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulAlgoCheck(
    handle: P,
    d: P,
    a: P,
    b: P,
    c: P,
    to: P,
    algorithm: *const Algorithm,
    result: *mut Found,
) -> Status {
    let check = || {
        if handle.is_null() || algorithm.is_null() || result.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: see the module.
        let algorithm = unsafe { *algorithm };
        algorithm.check(&problem(d, a, b, c, to)?)?;
        // SAFETY: see the module.
        unsafe { result.write(Found::of(algorithm)) };
        Ok(())
    };
    status(check())
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulAlgoConfigGetAttribute(
    algorithm: *const Algorithm,
    attribute: u32,
    to: *mut u32,
    bytes: usize,
    written: *mut usize,
) -> Status {
    // SAFETY: see the module.
    let Some(value) = (unsafe { algorithm.as_ref() }).and_then(|a| a.config(attribute)) else {
        return refuse(INVALID_VALUE, format_args!("cublasLtMatmulAlgoConfigGetAttribute: attribute {attribute}"));
    };
    // SAFETY: see the module.
    unsafe {
        if !written.is_null() {
            written.write(4);
        }
        if bytes < 4 || to.is_null() {
            return INVALID_VALUE;
        }
        to.write(value);
    }
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmul(
    handle: P,
    d: P,
    alpha: *const c_void,
    a: P,
    a_layout: P,
    b: P,
    b_layout: P,
    beta: *const c_void,
    c: P,
    c_layout: P,
    to: P,
    to_layout: P,
    algorithm: *const Algorithm,
    workspace: P,
    workspace_bytes: usize,
    stream: P,
) -> Status {
    let launch = || {
        if handle.is_null() || alpha.is_null() || beta.is_null() {
            return Err(INVALID_VALUE);
        }
        let problem = problem(d, a_layout, b_layout, c_layout, to_layout)?;
        let pointers = [a, b, c, to].map(|p| p as usize);
        // SAFETY: see the module.
        let (alpha, beta, algorithm) =
            unsafe { (problem.scalar(alpha), problem.scalar(beta), algorithm.as_ref().copied()) };
        let algorithm = match algorithm {
            Some(algorithm) => algorithm,
            None => {
                algorithm::find(&problem, &Preference::for_pointers(pointers, workspace_bytes))
                    .first()
                    .ok_or(NOT_SUPPORTED)?
                    .algorithm
            }
        };
        algorithm.check(&problem)?;
        stats::load(format!("product {:?} {algorithm:?}", problem.views.map(|view| view.element)));
        let workspace = workspace as usize;
        let check = move || {
            algorithm.check_call(pointers, workspace, workspace_bytes)?;
            problem.check_pointers(pointers, beta != 0.0)
        };
        // The library does not look at memory, and what is captured may never run.
        let is_captured = engine().lock().capture_status(stream as u64).map_err(|_| EXECUTION_FAILED)? != 0;
        if !is_captured {
            check()?;
        }
        let product = Product { problem, alpha, beta, pointers, split: algorithm.split(), workspace };
        let run = move || {
            if is_captured {
                check().map_err(|_| ILLEGAL_ADDRESS)?;
            }
            count(Stat::Products);
            product.run();
            Ok(())
        };
        let op = Op::Work { name: c"a cuBLASLt product", run: Arc::new(run) };
        engine().enqueue(stream as u64, op).map_err(|_| EXECUTION_FAILED)
    };
    status(launch())
}

/// Whether a range is memory that a device can reach.
fn is_reachable(at: usize, bytes: usize) -> bool {
    memory::is_device_accessible(at, bytes)
}
