//! From CUDA C++ to a shared library: preprocess, rewrite, compile, keep.

use super::options::Options;
use super::rewrite;
use crate::environment;
use crate::module::ARCH_SYMBOL;
use crate::stats::{Stat, count};
use std::ffi::CString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{fs, io};

/// The headers that stand for the GPU.
const SHIM: [(&str, &str); 9] = [
    ("softgpu.h", include_str!("../../shim/softgpu.h")),
    ("preprocess.h", include_str!("../../shim/preprocess.h")),
    ("types.h", include_str!("../../shim/types.h")),
    ("block.h", include_str!("../../shim/block.h")),
    ("warp.h", include_str!("../../shim/warp.h")),
    ("launch.h", include_str!("../../shim/launch.h")),
    ("atomics.h", include_str!("../../shim/atomics.h")),
    ("arithmetic.h", include_str!("../../shim/arithmetic.h")),
    ("prelude.h", include_str!("../../shim/prelude.h")),
];

/// A misaligned access stops the kernel, as on a GPU; a fiber's stack has no guard page, so large frames are errors.
const FLAGS: [&str; 13] = [
    "-O2",
    "-march=native",
    "-fPIC",
    "-shared",
    "-s",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-fno-exceptions",
    "-fno-strict-aliasing",
    "-fcf-protection=none",
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
    "-Werror=frame-larger-than=40960",
];

/// What a program consists of.
#[derive(Default, Hash)]
pub struct Source {
    pub text: String,
    pub name: String,
    pub headers: Vec<(String, String)>,
    /// Expressions that name kernels, such as instances of templates.
    pub names: Vec<String>,
}

/// A built library.
pub struct Compiled {
    pub path: PathBuf,
    pub image: Vec<u8>,
}

/// The name by which the kernel of the n-th name expression is found.
pub fn lowered_name(n: usize) -> CString {
    CString::new(format!("softgpu_named_{n}")).expect("no NUL")
}

/// Builds a program, unless the cache has it.
///
/// # Errors
/// The compiler's messages.
pub fn compile(source: &Source, options: &Options) -> Result<Compiled, String> {
    let mut hasher = DefaultHasher::new();
    (SHIM, FLAGS, source, options, processor(), environment::text("SOFTGPU_CXX")).hash(&mut hasher);
    let (dir, key) = (cache_dir(), format!("{:016x}", hasher.finish()));
    fs::create_dir_all(&dir).map_err(|e| explain(&dir, &e))?;
    let path = dir.join(format!("{key}.so"));
    // Processes that want the same program at once build it once.
    let _lock = lock(&dir.join(format!("{key}.lock")))?;
    if let Ok(image) = fs::read(&path) {
        count(Stat::CacheHits);
        return Ok(Compiled { path, image });
    }
    count(Stat::Compilations);
    let work = dir.join(format!("{key}.{}", std::process::id()));
    let built = build(source, options, &work);
    let image = built.and_then(|so| {
        fs::rename(&so, &path).map_err(|e| explain(&path, &e))?;
        fs::read(&path).map_err(|e| explain(&path, &e))
    });
    let _ = fs::remove_dir_all(&work);
    Ok(Compiled { path, image: image? })
}

fn build(source: &Source, options: &Options, work: &Path) -> Result<PathBuf, String> {
    let shim = work.join("shim");
    let given = work.join("headers");
    for (dir, name, text) in SHIM
        .iter()
        .map(|(name, text)| (&shim, *name, *text))
        .chain(source.headers.iter().map(|(name, text)| (&given, name.as_str(), text.as_str())))
    {
        let path = dir.join(name);
        let parent = path.parent().expect("a file has a folder");
        fs::create_dir_all(parent).and_then(|()| fs::write(&path, text)).map_err(|e| explain(&path, &e))?;
    }
    let preprocessed = preprocess(source, options, &shim, &given)?;
    let names = source.names.iter().enumerate();
    let named = names.map(|(i, n)| format!("SOFTGPU_KERNEL(softgpu_named_{i}, ({n}))\n")).collect::<String>();
    let arch = format!(
        "extern \"C\" __attribute__((visibility(\"default\"), used)) const char {}[] = \"{}\";\n",
        ARCH_SYMBOL.to_string_lossy(),
        options.arch
    );
    let text = format!("#include \"softgpu.h\"\n{arch}{}\n{named}", rewrite::rewrite(&preprocessed));
    let (cpp, so) = (work.join("kernels.cpp"), work.join("kernels.so"));
    fs::write(&cpp, text).map_err(|e| explain(&cpp, &e))?;
    let contract = if options.fmad { "-ffp-contract=fast" } else { "-ffp-contract=off" };
    let mut command = compiler(options);
    command.args(FLAGS).arg(contract).arg("-I").arg(&shim).arg("-o").arg(&so).arg(&cpp);
    if options.preprocessor.iter().any(|o| o.starts_with("-DNDEBUG")) {
        command.arg("-DNDEBUG");
    }
    run(command, "")?;
    Ok(so)
}

/// With the program's own macros expanded, so that kernels and shared variables can be found wherever they come from.
fn preprocess(source: &Source, options: &Options, shim: &Path, given: &Path) -> Result<String, String> {
    let number: u32 = options.arch.trim_end_matches(char::is_alphabetic).parse().expect("checked with the options");
    let mut command = compiler(options);
    command.args(["-E", "-x", "c++", "-nostdinc", "-w"]).arg(format!("-D__CUDA_ARCH__={}", number * 10));
    command.arg("-include").arg(shim.join("preprocess.h")).args(&options.preprocessor).arg("-I").arg(given).arg("-");
    let name = source.name.replace(['"', '\\', '\n'], "_");
    run(command, &format!("#line 1 \"{name}\"\n{}", source.text))
}

fn compiler(options: &Options) -> Command {
    let mut command = Command::new(environment::text("SOFTGPU_CXX"));
    command.arg(format!("-std={}", options.standard)).env("LC_ALL", "C");
    command
}

/// What it writes to stdout.
fn run(mut command: Command, input: &str) -> Result<String, String> {
    let start = |e: io::Error| format!("cannot run the host compiler: {e}");
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(start)?;
    let mut stdin = child.stdin.take().expect("it is a pipe");
    let input = input.to_owned();
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().map_err(start)?;
    let _ = writer.join();
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

fn cache_dir() -> PathBuf {
    match environment::text("SOFTGPU_CACHE").as_str() {
        "" => std::env::temp_dir().join("softgpu-cache"),
        dir => dir.into(),
    }
}

/// Libraries are built for this processor.
fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.lines().find(|l| l.starts_with("flags")).unwrap_or("").to_owned()
}

fn lock(path: &Path) -> Result<fs::File, String> {
    let file = fs::File::create(path).map_err(|e| explain(path, &e))?;
    // SAFETY: the descriptor is open; the lock ends with it.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) };
    Ok(file)
}

fn explain(path: &Path, error: &io::Error) -> String {
    format!("{}: {error}", path.display())
}
