//! libnvrtc: the host compiler, behind headers that stand for the GPU.
//!
//! SAFETY, for all functions here: arguments are what nvrtc.h asks for.

mod compile;
mod options;
mod rewrite;

use crate::module::PTX_PREFIX;
use compile::Source;
use options::Options;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};

type P = *mut c_void;

const OK: u32 = 0;
const INVALID_INPUT: u32 = 3;
const INVALID_PROGRAM: u32 = 4;
const INVALID_OPTION: u32 = 5;
const COMPILATION: u32 = 6;
const NAMES_AFTER_COMPILATION: u32 = 8;
const NAMES_BEFORE_COMPILATION: u32 = 9;
const NAME_NOT_VALID: u32 = 10;

const ARCHITECTURES: [c_int; 9] = [75, 80, 86, 87, 89, 90, 100, 103, 120];

#[derive(Default)]
struct Program {
    source: Source,
    log: String,
    cubin: Vec<u8>,
    ptx: Vec<u8>,
    lowered: BTreeMap<String, CString>,
    is_compiled: bool,
}

fn put<T>(at: *mut T, value: T) -> u32 {
    if at.is_null() {
        return INVALID_INPUT;
    }
    // SAFETY: see the module.
    unsafe { at.write(value) };
    OK
}

fn with(program: P, f: impl FnOnce(&mut Program) -> u32) -> u32 {
    // SAFETY: see the module.
    unsafe { program.cast::<Program>().as_mut() }.map_or(INVALID_PROGRAM, f)
}

unsafe fn text(at: *const c_char) -> String {
    // SAFETY: by the caller.
    unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
}

fn put_bytes(at: *mut u8, bytes: &[u8]) -> u32 {
    if bytes.is_empty() {
        return INVALID_PROGRAM;
    }
    // SAFETY: the caller asked for the size before.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> u32 {
    put(major, 13).max(put(minor, 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetNumSupportedArchs(n: *mut c_int) -> u32 {
    put(n, ARCHITECTURES.len() as c_int)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetSupportedArchs(at: *mut c_int) -> u32 {
    // SAFETY: see the module.
    unsafe { std::ptr::copy_nonoverlapping(ARCHITECTURES.as_ptr(), at, ARCHITECTURES.len()) };
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetErrorString(code: u32) -> *const c_char {
    let name = match code {
        OK => c"NVRTC_SUCCESS",
        INVALID_INPUT => c"NVRTC_ERROR_INVALID_INPUT",
        INVALID_PROGRAM => c"NVRTC_ERROR_INVALID_PROGRAM",
        INVALID_OPTION => c"NVRTC_ERROR_INVALID_OPTION",
        COMPILATION => c"NVRTC_ERROR_COMPILATION",
        NAMES_AFTER_COMPILATION => c"NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
        NAMES_BEFORE_COMPILATION => c"NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
        NAME_NOT_VALID => c"NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
        _ => c"NVRTC_ERROR unknown",
    };
    name.as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCreateProgram(
    at: *mut P,
    source: *const c_char,
    name: *const c_char,
    n_headers: c_int,
    headers: *const *const c_char,
    include_names: *const *const c_char,
) -> u32 {
    if source.is_null() {
        return INVALID_INPUT;
    }
    // SAFETY: see the module.
    let source = unsafe {
        let header = |i: usize| (text(*include_names.add(i)), text(*headers.add(i)));
        Source {
            text: text(source),
            name: if name.is_null() { "default_program".into() } else { text(name) },
            headers: (0..n_headers as usize).map(header).collect(),
            names: Vec::new(),
        }
    };
    put(at, Box::into_raw(Box::new(Program { source, ..Program::default() })).cast())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcDestroyProgram(program: *mut P) -> u32 {
    // SAFETY: see the module.
    unsafe {
        if program.is_null() || (*program).is_null() {
            return INVALID_PROGRAM;
        }
        drop(Box::from_raw((*program).cast::<Program>()));
        program.write(std::ptr::null_mut());
    }
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcAddNameExpression(program: P, expression: *const c_char) -> u32 {
    // SAFETY: see the module.
    let expression = unsafe { text(expression) };
    with(program, |p| {
        if p.is_compiled {
            return NAMES_AFTER_COMPILATION;
        }
        p.source.names.push(expression);
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetLoweredName(program: P, expression: *const c_char, at: *mut *const c_char) -> u32 {
    // SAFETY: see the module.
    let expression = unsafe { text(expression) };
    with(program, |p| match p.lowered.get(&expression) {
        _ if !p.is_compiled => NAMES_BEFORE_COMPILATION,
        Some(name) => put(at, name.as_ptr()),
        None => NAME_NOT_VALID,
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCompileProgram(program: P, n: c_int, options: *const *const c_char) -> u32 {
    // SAFETY: see the module.
    let options: Vec<String> = (0..n as usize).map(|i| unsafe { text(*options.add(i)) }).collect();
    with(program, |p| {
        p.is_compiled = true;
        let options = match Options::parse(&options) {
            Ok(options) => options,
            Err(log) => {
                eprintln!("softgpu: {log}");
                p.log = log;
                return INVALID_OPTION;
            }
        };
        match compile::compile(&p.source, &options) {
            Ok(compiled) => {
                p.ptx = format!("{PTX_PREFIX}{}\n// {}\n\0", options.arch, compiled.path.display()).into_bytes();
                p.cubin = if options.is_virtual { Vec::new() } else { compiled.image };
                let lowered = |(i, name): (usize, &String)| (name.clone(), compile::lowered_name(i));
                p.lowered = p.source.names.iter().enumerate().map(lowered).collect();
                OK
            }
            Err(log) => {
                p.log = log;
                COMPILATION
            }
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetProgramLogSize(program: P, n: *mut usize) -> u32 {
    with(program, |p| put(n, p.log.len() + 1))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetProgramLog(program: P, at: *mut u8) -> u32 {
    with(program, |p| put_bytes(at, format!("{}\0", p.log.replace('\0', " ")).as_bytes()))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetPTXSize(program: P, n: *mut usize) -> u32 {
    with(program, |p| put(n, p.ptx.len()))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetPTX(program: P, at: *mut u8) -> u32 {
    with(program, |p| put_bytes(at, &p.ptx))
}

/// 0 where the program was compiled for a virtual architecture (`compute_90`).
#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetCUBINSize(program: P, n: *mut usize) -> u32 {
    with(program, |p| put(n, p.cubin.len()))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetCUBIN(program: P, at: *mut u8) -> u32 {
    with(program, |p| put_bytes(at, &p.cubin))
}
