//! A folder of libraries under the names that programs look for.
//!
//! The implementation is one shared library. Each library of an installation is empty, carries the soname of NVIDIA's
//! library, and names the implementation as a dependency: `dlsym` on its handle finds the implementation's functions,
//! and all of them share one engine, however many are loaded.

use std::ffi::{CStr, CString, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::{fmt, fs, io};

/// The sonames of a complete installation.
pub const LIBRARIES: [&str; 6] =
    ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13", "libnccl.so.2", "libnvidia-ml.so.1", "libcudnn.so.9"];

const IMPLEMENTATION: &str = "libphalanx_softgpu.so";

/// A folder that holds the software GPU's libraries. Programs that load them are configured by environment variables: see
/// [`SETTINGS`](crate::SETTINGS) and README.md. The folder lies beside the built library and is shared by all processes, so
/// dropping an `Installation` removes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installation {
    dir: PathBuf,
    libraries: Vec<&'static str>,
}

/// Why there is no installation.
#[derive(Debug)]
pub enum InstallError {
    /// The shared library is in none of the folders searched.
    NotBuilt {
        /// Where it was looked for.
        searched: Vec<PathBuf>,
    },
    /// A file operation failed.
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The C compiler could not be started or refused to link.
    Link {
        /// The library that it was to build.
        library: &'static str,
        /// Its message.
        log: String,
    },
    /// The shared library does not load.
    Load {
        /// The loader's message.
        log: String,
    },
    /// The software GPU has no such setting, or not this value.
    Setting {
        /// Name and value.
        setting: String,
    },
    /// The name given to [`Installation::without`] is none of [`LIBRARIES`].
    UnknownLibrary {
        /// The name.
        name: String,
    },
}

impl Installation {
    /// A complete installation.
    ///
    /// # Errors
    /// When the shared library was not built beside the current executable, or no C compiler can link the thin libraries.
    pub fn new() -> Result<Installation, InstallError> {
        Installation::of(LIBRARIES.to_vec())
    }

    /// The same installation without one library, for tests of what a program reports when it is missing.
    ///
    /// # Errors
    /// As [`Installation::new`]; [`InstallError::UnknownLibrary`] when `name` is none of [`LIBRARIES`].
    pub fn without(&self, name: &str) -> Result<Installation, InstallError> {
        if !LIBRARIES.contains(&name) {
            return Err(InstallError::UnknownLibrary { name: name.into() });
        }
        Installation::of(self.libraries.iter().copied().filter(|l| *l != name).collect())
    }

    /// The folder, as an absolute path.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Path of one library; the file is absent if the installation was made without it.
    #[must_use]
    pub fn library(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Changes a setting of this process's software GPU, such as `SOFTGPU_SEED`. All installations of a process share it.
    ///
    /// # Errors
    /// [`InstallError::Load`] when the library does not load; [`InstallError::Setting`] when the name or the value is unknown.
    pub fn set(&self, name: &str, value: &str) -> Result<(), InstallError> {
        let refused = || InstallError::Setting { setting: format!("{name}={value}") };
        let text = |text: &str| CString::new(text).map_err(|_| refused());
        let (name, value) = (text(name)?, text(value)?);
        // SAFETY: the function has this signature.
        let code = unsafe {
            let set: unsafe extern "C" fn(*const c_char, *const c_char) -> u32 =
                std::mem::transmute(self.function(c"softgpu_set")?);
            set(name.as_ptr(), value.as_ptr())
        };
        if code == 0 { Ok(()) } else { Err(refused()) }
    }

    /// A counter of this process's software GPU, such as `products`; `u64::MAX` if there is none of this name.
    ///
    /// # Errors
    /// [`InstallError::Load`].
    pub fn stat(&self, name: &CStr) -> Result<u64, InstallError> {
        // SAFETY: the function has this signature.
        unsafe {
            let stat: unsafe extern "C" fn(*const c_char) -> u64 = std::mem::transmute(self.function(c"softgpu_stat")?);
            Ok(stat(name.as_ptr()))
        }
    }

    /// A function of the library that programs load, which has settings and counters of its own: those of this crate's copy do not
    /// count.
    fn function(&self, name: &CStr) -> Result<*mut c_void, InstallError> {
        let path = CString::new(self.dir.join(IMPLEMENTATION).into_os_string().into_vec()).expect("it names a file");
        // SAFETY: loading the library runs nothing, and it stays loaded.
        unsafe {
            let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            let function = if library.is_null() { library } else { libc::dlsym(library, name.as_ptr()) };
            if function.is_null() {
                return Err(InstallError::Load { log: CStr::from_ptr(libc::dlerror()).to_string_lossy().into_owned() });
            }
            Ok(function)
        }
    }

    fn of(libraries: Vec<&'static str>) -> Result<Installation, InstallError> {
        let built = find_implementation()?;
        let present: String = LIBRARIES.iter().map(|l| if libraries.contains(l) { '1' } else { '0' }).collect();
        let parent = built.parent().expect("a file has a folder");
        let dir = parent.join(format!("softgpu-libs-{present}"));
        if !dir.is_dir() {
            build(&dir, &libraries)?;
        }
        Ok(Installation { dir, libraries })
    }
}

/// The shared library, in the folder of the current executable or up to two folders above. `deps` comes first: cargo brings
/// the copy beside it up to date only when this package itself is built.
fn find_implementation() -> Result<PathBuf, InstallError> {
    let exe = std::env::current_exe().map_err(|e| io_error(Path::new("current executable"), e))?;
    let searched: Vec<PathBuf> = exe.ancestors().skip(1).take(3).flat_map(|d| [d.join("deps"), d.to_owned()]).collect();
    let found = searched.iter().map(|d| d.join(IMPLEMENTATION)).find(|p| p.is_file());
    found.ok_or(InstallError::NotBuilt { searched })
}

/// Builds in a folder of its own and renames it, so that processes that start together see nothing unfinished.
fn build(dir: &Path, libraries: &[&'static str]) -> Result<(), InstallError> {
    static BUILDS: AtomicUsize = AtomicUsize::new(0);
    let unfinished = dir.with_extension(format!("{}-{}", std::process::id(), BUILDS.fetch_add(1, Relaxed)));
    fs::create_dir_all(&unfinished).map_err(|e| io_error(&unfinished, e))?;
    let link = unfinished.join(IMPLEMENTATION);
    std::os::unix::fs::symlink(Path::new("..").join(IMPLEMENTATION), &link).map_err(|e| io_error(&link, e))?;
    for library in libraries {
        link_thin(&unfinished, library)?;
    }
    match fs::rename(&unfinished, dir) {
        Err(_) if dir.is_dir() => fs::remove_dir_all(&unfinished).map_err(|e| io_error(&unfinished, e)),
        Err(e) => Err(io_error(dir, e)),
        Ok(()) => Ok(()),
    }
}

/// An empty library that needs the implementation, which lies in the same folder.
fn link_thin(dir: &Path, library: &'static str) -> Result<(), InstallError> {
    let soname = format!("-Wl,-soname,{library}");
    // An old-style rpath precedes LD_LIBRARY_PATH, where Cargo has folders with builds of other times.
    let rpath = ["-Wl,--no-as-needed", "-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN"];
    let fixed = ["-shared", "-nostdlib", "-x", "c", "/dev/null"];
    let args =
        fixed.into_iter().chain(rpath).map(OsStr::new).chain([OsStr::new(&soname), OsStr::new("-L"), dir.as_os_str()]);
    let ran = Command::new("cc").args(args).args(["-lphalanx_softgpu", "-o"]).arg(dir.join(library)).output();
    let ran = ran.map_err(|e| InstallError::Link { library, log: format!("cannot start cc: {e}") })?;
    if ran.status.success() {
        return Ok(());
    }
    Err(InstallError::Link { library, log: String::from_utf8_lossy(&ran.stderr).into_owned() })
}

fn io_error(path: &Path, source: io::Error) -> InstallError {
    InstallError::Io { path: path.to_owned(), source }
}

impl fmt::Display for InstallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InstallError::NotBuilt { searched } => write!(f, "{IMPLEMENTATION} is in none of {searched:?}"),
            InstallError::Io { path, source } => write!(f, "{}: {source}", path.display()),
            InstallError::Link { library, log } => write!(f, "cannot link {library}: {log}"),
            InstallError::Load { log } => write!(f, "cannot load {IMPLEMENTATION}: {log}"),
            InstallError::Setting { setting } => write!(f, "the software GPU refuses {setting}"),
            InstallError::UnknownLibrary { name } => write!(f, "{name} is none of {LIBRARIES:?}"),
        }
    }
}

impl std::error::Error for InstallError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        if let InstallError::Io { source, .. } = self { Some(source) } else { None }
    }
}
