//! The real NVRTC, which compiles CUDA C++ to PTX and to machine code and needs no GPU.
#![allow(unsafe_code)]

use libloading::{Library, Symbol};
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

/// Environment variable with the folder of libnvrtc.
pub const VARIABLE: &str = "PHALANX_NVRTC";

/// Why a source was not compiled.
#[derive(Debug, thiserror::Error)]
pub enum NvrtcError {
    /// The folder has no library of this name.
    #[error("no file {name}* in {}", folder.display())]
    Missing {
        /// The folder that was searched.
        folder: PathBuf,
        /// Start of the name of the library.
        name: &'static str,
    },
    /// The folder cannot be read.
    #[error("cannot read {}: {source}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The loader rejects the library, or the library lacks a function.
    #[error("cannot load NVRTC: {0}")]
    Load(#[from] libloading::Error),
    /// The source does not compile.
    #[error("compilation failed with code {code}:\n{log}")]
    Compile {
        /// NVRTC's result.
        code: i32,
        /// What the compiler printed.
        log: String,
    },
    /// NVRTC rejects a call.
    #[error("{call} failed with code {code}")]
    Call {
        /// The function.
        call: &'static str,
        /// NVRTC's result.
        code: i32,
    },
    /// A source or an option has a zero byte.
    #[error("the source or an option has a zero byte")]
    ZeroByte,
}

/// The compiler.
pub struct Nvrtc {
    library: Library,
    /// Holds the built-ins, which the compiler finds by name because they are loaded.
    _builtins: Library,
}

/// What the compiler made of a source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compiled {
    /// PTX, if the options name a virtual architecture (`compute_80`) or a real one.
    pub ptx: String,
    /// Machine code, if the options name a real architecture (`sm_80`).
    pub cubin: Vec<u8>,
    /// Warnings, and the report of `--ptxas-options=-v`.
    pub log: String,
}

type Program = *mut c_void;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Get = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;

impl Nvrtc {
    /// Loads the compiler from a folder.
    ///
    /// # Errors
    /// When the folder does not hold libnvrtc and its built-ins, or the loader rejects them.
    pub fn load(folder: &Path) -> Result<Nvrtc, NvrtcError> {
        let builtins = find(folder, "libnvrtc-builtins.so")?;
        let compiler = find(folder, "libnvrtc.so")?;
        // SAFETY: loading runs the initialisers of NVIDIA's libraries, which the caller trusts by naming the folder. The
        // built-ins come first, since the compiler looks for them by name among the loaded libraries.
        let (builtins, library) = unsafe { (Library::new(builtins)?, Library::new(compiler)?) };
        Ok(Nvrtc { library, _builtins: builtins })
    }

    /// Compiles a source, which reports call `name`.
    ///
    /// # Errors
    /// [`NvrtcError::Compile`] with the compiler's messages when the source or an option is wrong.
    pub fn compile(&self, name: &str, source: &str, options: &[&str]) -> Result<Compiled, NvrtcError> {
        let text = |text: &str| CString::new(text).map_err(|_| NvrtcError::ZeroByte);
        let (source, name) = (text(source)?, text(name)?);
        let options = options.iter().map(|o| text(o)).collect::<Result<Vec<CString>, NvrtcError>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: the functions have NVRTC's documented signatures; all strings end with zero and outlive the calls; no headers
        // are passed.
        let code = unsafe {
            let create: Symbol<Create> = self.library.get(b"nvrtcCreateProgram\0")?;
            create(&raw mut program, source.as_ptr(), name.as_ptr(), 0, std::ptr::null(), std::ptr::null())
        };
        if code != 0 {
            return Err(NvrtcError::Call { call: "nvrtcCreateProgram", code });
        }
        // SAFETY: as above; `program` was just created.
        let code = unsafe {
            let compile: Symbol<Compile> = self.library.get(b"nvrtcCompileProgram\0")?;
            compile(program, pointers.len() as c_int, pointers.as_ptr())
        };
        let result = self.outcome(program, code);
        // SAFETY: `program` was created above and is not used afterwards.
        unsafe {
            let destroy: Symbol<Destroy> = self.library.get(b"nvrtcDestroyProgram\0")?;
            destroy(&raw mut program);
        }
        result
    }

    fn outcome(&self, program: Program, code: i32) -> Result<Compiled, NvrtcError> {
        let log = self.text(program, b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0")?;
        if code != 0 {
            return Err(NvrtcError::Compile { code, log });
        }
        let ptx = self.text(program, b"nvrtcGetPTXSize\0", b"nvrtcGetPTX\0")?;
        let cubin = self.bytes(program, b"nvrtcGetCUBINSize\0", b"nvrtcGetCUBIN\0").unwrap_or_default();
        Ok(Compiled { ptx, cubin, log })
    }

    fn text(&self, program: Program, size: &[u8], get: &[u8]) -> Result<String, NvrtcError> {
        let bytes = self.bytes(program, size, get)?;
        Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned())
    }

    fn bytes(&self, program: Program, size: &[u8], get: &[u8]) -> Result<Vec<u8>, NvrtcError> {
        let mut n = 0usize;
        // SAFETY: both functions have NVRTC's documented signatures, `program` is alive, and the buffer has the size that the
        // first one reports.
        unsafe {
            let size: Symbol<Size> = self.library.get(size)?;
            let code = size(program, &raw mut n);
            if code != 0 {
                return Err(NvrtcError::Call { call: "the size of a result", code });
            }
            let mut bytes = vec![0u8; n];
            let get: Symbol<Get> = self.library.get(get)?;
            let code = get(program, bytes.as_mut_ptr().cast());
            if code != 0 {
                return Err(NvrtcError::Call { call: "the bytes of a result", code });
            }
            Ok(bytes)
        }
    }
}

/// The file of a folder whose name starts so; `.alt` variants are not asked for.
fn find(folder: &Path, name: &'static str) -> Result<PathBuf, NvrtcError> {
    let list = std::fs::read_dir(folder).map_err(|source| NvrtcError::Folder { folder: folder.to_owned(), source })?;
    let mut files: Vec<PathBuf> = list.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.file_name().is_some_and(|f| f.to_string_lossy().starts_with(name)));
    files.sort();
    files.into_iter().next().ok_or_else(|| NvrtcError::Missing { folder: folder.to_owned(), name })
}
