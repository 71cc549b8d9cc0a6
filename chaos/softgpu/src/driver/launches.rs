//! Launches of kernels.

use super::{Outcome, P, call_in_context};
use crate::codes::{Code, INVALID_VALUE, NOT_SUPPORTED, refuse};
use crate::engine::{Op, engine};
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

/// `CUlaunchConfig`.
#[repr(C)]
pub struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    dynamic: c_uint,
    stream: P,
    attributes: *const Attribute,
    n_attributes: c_uint,
}

/// `CUlaunchAttribute`.
#[repr(C)]
pub struct Attribute {
    id: c_uint,
    _pad: c_uint,
    value: [u32; 16],
}

const IGNORE: c_uint = 0;
const ACCESS_POLICY: c_uint = 1;
const CLUSTER: c_uint = 4;
const PROGRAMMATIC_SERIALIZATION: c_uint = 6;
const PRIORITY: c_uint = 8;

fn launch(device: u32, f: P, config: &Config, params: *mut P, extra: *mut P) -> Outcome {
    if !extra.is_null() {
        return Err(refuse(NOT_SUPPORTED, format_args!("a launch with `extra`")));
    }
    super::streams::check_of_device(config.stream, device)?;
    let kernel = super::functions::kernel(f, device)?;
    // SAFETY: see `driver`.
    let launch = unsafe { kernel.launch(config.grid, config.block, config.dynamic, params.cast::<*const u8>())? };
    engine().enqueue(config.stream as u64, Op::Kernel(Arc::new(launch)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel(
    f: P,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    dynamic: c_uint,
    stream: P,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Code {
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    let config = Config { grid, block, dynamic, stream, attributes: std::ptr::null(), n_attributes: 0 };
    call_in_context(|device| launch(device, f, &config, params, extra))
}

/// Clusters of one block, priorities, cache policies and early starts (kernels start in order) change nothing; other attributes are refused.
#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernelEx(config: *const Config, f: P, params: *mut P, extra: *mut P) -> Code {
    call_in_context(|device| {
        // SAFETY: see `driver`.
        let config = unsafe { config.as_ref() }.ok_or(INVALID_VALUE)?;
        for i in 0..config.n_attributes as usize {
            // SAFETY: `attributes` has `n_attributes` entries.
            let a = unsafe { &*config.attributes.add(i) };
            let is_known = matches!(a.id, IGNORE | ACCESS_POLICY | PROGRAMMATIC_SERIALIZATION | PRIORITY)
                || (a.id == CLUSTER && a.value[..3] == [1; 3]);
            if !is_known {
                return Err(refuse(NOT_SUPPORTED, format_args!("a launch with attribute {}", a.id)));
            }
        }
        launch(device, f, config, params, extra)
    })
}
