//! libnvidia-ml of the software GPU, through its C functions.
#![allow(unsafe_code)]

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW, Symbol};
use phalanx_softgpu::Installation;
use std::ffi::{CStr, c_char, c_void};
use std::io::Write;

type P = *mut c_void;

fn library(name: &str) -> Library {
    // SAFETY: the libraries' constructors do nothing.
    unsafe { Library::open(Some(Installation::new().unwrap().library(name)), RTLD_NOW | RTLD_LOCAL) }.unwrap()
}

/// Calls a function with arguments of these types.
macro_rules! call {
    ($library:expr, $name:expr, ($($type:ty),*), $($arg:expr),*) => {{
        // SAFETY: signatures are those of nvml.h, and arguments are valid.
        unsafe {
            let function: Symbol<unsafe extern "C" fn($($type),*) -> u32> = $library.get($name).unwrap();
            function($($arg),*)
        }
    }};
}

fn first_device(nvml: &Library) -> P {
    let mut device = std::ptr::null_mut();
    assert_eq!(call!(nvml, b"nvmlInit_v2", (),), 0);
    assert_eq!(call!(nvml, b"nvmlDeviceGetHandleByIndex_v2", (u32, *mut P), 0, &raw mut device), 0);
    device
}

#[test]
fn device_is_found_by_the_uuid_that_it_reports() {
    let nvml = library("libnvidia-ml.so.1");
    let device = first_device(&nvml);
    let (mut uuid, mut found) = ([0 as c_char; 96], std::ptr::null_mut());

    assert_eq!(call!(nvml, b"nvmlDeviceGetUUID", (P, *mut c_char, u32), device, uuid.as_mut_ptr(), 96), 0);
    let by = call!(nvml, b"nvmlDeviceGetHandleByUUID", (*const c_char, *mut P), uuid.as_ptr(), &raw mut found);

    // SAFETY: the library has written a string.
    let text = unsafe { CStr::from_ptr(uuid.as_ptr()) }.to_str().unwrap();
    assert_eq!((by, found), (0, device));
    assert!(text.starts_with("GPU-") && text.len() == 40, "{text}");
    assert_eq!(call!(nvml, b"nvmlDeviceGetUUID", (P, *mut c_char, u32), device, uuid.as_mut_ptr(), 8), 7);
}

#[test]
fn facts_of_a_device_have_plausible_values() {
    let nvml = library("libnvidia-ml.so.1");
    let device = first_device(&nvml);
    let (mut memory, mut celsius, mut reasons, mut errors) = ([0u64; 3], 0u32, 1u64, 1u64);

    assert_eq!(call!(nvml, b"nvmlDeviceGetMemoryInfo", (P, *mut [u64; 3]), device, &raw mut memory), 0);
    assert_eq!(call!(nvml, b"nvmlDeviceGetTemperature", (P, i32, *mut u32), device, 0, &raw mut celsius), 0);
    let name = b"nvmlDeviceGetCurrentClocksEventReasons";
    assert_eq!(call!(nvml, name, (P, *mut u64), device, &raw mut reasons), 0);
    let name = b"nvmlDeviceGetTotalEccErrors";
    assert_eq!(call!(nvml, name, (P, i32, i32, *mut u64), device, 1, 0, &raw mut errors), 0);

    assert_eq!(memory[0], memory[1] + memory[2]);
    assert!((20..90).contains(&celsius));
    assert_eq!((reasons, errors), (0, 0));
}

/// Changes a setting of this process.
fn set(name: &CStr, value: &str) {
    let value = std::ffi::CString::new(value).unwrap();
    let cuda = library("libcuda.so.1");
    assert_eq!(call!(cuda, b"softgpu_set", (*const c_char, *const c_char), name.as_ptr(), value.as_ptr()), 0);
}

#[test]
fn line_of_the_control_file_is_an_event_of_its_device() {
    let nvml = library("libnvidia-ml.so.1");
    let device = first_device(&nvml);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    set(c"SOFTGPU_NVML_XID_FILE", file.path().to_str().unwrap());
    let (mut events, mut event) = (std::ptr::null_mut(), [0u64; 4]);
    assert_eq!(call!(nvml, b"nvmlEventSetCreate", (*mut P), &raw mut events), 0);
    assert_eq!(call!(nvml, b"nvmlDeviceRegisterEvents", (P, u64, P), device, 8, events), 0);
    let mut wait = |ms| {
        let code = call!(nvml, b"nvmlEventSetWait_v2", (P, *mut [u64; 4], u32), events, &raw mut event, ms);
        (code, event)
    };

    assert_eq!(wait(20).0, 10, "a wait without events times out");
    writeln!(file, "79 1").unwrap();
    writeln!(file, "48 0").unwrap();
    let (code, found) = wait(5000);

    assert_eq!((code, found[0], found[1], found[2]), (0, device as u64, 8, 48), "events of other devices are ignored");
    assert_eq!(wait(20).0, 10, "each line is one event");
    set(c"SOFTGPU_NVML_XID", "31@50");
    let (code, found) = wait(5000);
    assert_eq!((code, found[2]), (0, 31), "planned by a setting");
    assert_eq!(call!(nvml, b"nvmlEventSetFree", (P), events), 0);
}

#[test]
fn planted_processes_and_modes_are_those_of_every_device() {
    let nvml = library("libnvidia-ml.so.1");
    let device = first_device(&nvml);
    set(c"SOFTGPU_NVML_PROCESSES", "7:100,8:200");
    set(c"SOFTGPU_NVML_COMPUTE_MODE", "3");
    let (mut mode, mut room, mut found) = (0u32, 4u32, [[0u64; 3]; 4]);
    let name = b"nvmlDeviceGetComputeRunningProcesses_v3";

    assert_eq!(call!(nvml, b"nvmlDeviceGetComputeMode", (P, *mut u32), device, &raw mut mode), 0);
    assert_eq!(call!(nvml, name, (P, *mut u32, *mut [[u64; 3]; 4]), device, &raw mut room, &raw mut found), 0);

    assert_eq!((mode, room), (3, 2));
    assert_eq!([found[0][0] as u32, found[1][0] as u32], [7, 8]);
    assert_eq!([found[0][1], found[1][1]], [100, 200]);
    room = 1;
    assert_eq!(call!(nvml, name, (P, *mut u32, *mut [[u64; 3]; 4]), device, &raw mut room, &raw mut found), 7);
    assert_eq!(room, 2, "the room that is needed");
}
