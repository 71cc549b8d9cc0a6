//! Where NVIDIA's libraries are: a named folder, the packages of a Python installation, the system's folders.

use super::LibraryError;
use std::path::{Path, PathBuf};

/// Folders of NVIDIA's libraries, in the order in which they are searched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// Folders that are searched instead of those of packages; also instead of the system's, except for the driver, which
    /// no package brings.
    named: Vec<PathBuf>,
    /// `site-packages` folders of Python installations.
    site_packages: Vec<PathBuf>,
}

/// Major versions of CUDA whose libraries are used, the newest first.
const MAJORS: [i32; 2] = [13, 12];

/// A version of CUDA, as its driver numbers it: 12040 is 12.4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaVersion(pub i32);

impl CudaVersion {
    /// Newer than any.
    pub(super) const NEWEST: CudaVersion = CudaVersion(i32::MAX);

    pub(super) const fn major(self) -> i32 {
        self.0 / 1000
    }
}

impl std::fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// Folders where distributions and NVIDIA's installers put libraries.
const SYSTEM: [&str; 8] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/cuda/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
    "/opt/cuda/lib64",
];

impl Search {
    /// Searches these folders; for the driver, then those of the system.
    pub fn only(folders: Vec<PathBuf>) -> Search {
        Search { named: folders, site_packages: Vec::new() }
    }

    /// Searches the folders in a `PHALANX_CUDA_LIBS` value, separated by colons. Without a value, searches the packages of the Python
    /// installation that has this program, those of the installations with a folder in `PATH`, and the system's folders.
    pub fn new(cuda_libs: Option<&std::ffi::OsStr>, program: Option<&Path>, path: Option<&std::ffi::OsStr>) -> Search {
        if let Some(folders) = cuda_libs.filter(|value| !value.is_empty()) {
            return Search::only(std::env::split_paths(folders).collect());
        }
        let mut site_packages = Vec::new();
        let own = program.and_then(Path::parent).map(Path::to_owned);
        let of_path = path.map(|path| std::env::split_paths(path).collect::<Vec<_>>()).unwrap_or_default();
        for bin in own.into_iter().chain(of_path) {
            for lib in ["lib", "lib64", "local/lib"] {
                let Some(lib) = bin.parent().map(|root| root.join(lib)) else { continue };
                let pythons = entries(&lib).into_iter().filter(|entry| name_of(entry).starts_with("python3"));
                for python in pythons {
                    site_packages.extend(["site-packages", "dist-packages"].map(|folder| python.join(folder)));
                }
            }
        }
        site_packages.retain(|folder| folder.is_dir());
        site_packages.dedup();
        Search { named: Vec::new(), site_packages }
    }

    pub(super) fn driver(&self) -> Result<PathBuf, LibraryError> {
        let folders = self.named.iter().cloned().chain(system()).collect();
        find("the NVIDIA driver", &["libcuda.so.1"], folders)
    }

    /// Part of the driver.
    pub(super) fn nvml(&self) -> Result<PathBuf, LibraryError> {
        let folders = self.named.iter().cloned().chain(system()).collect();
        find("NVML", &["libnvidia-ml.so.1"], folders)
    }

    /// For a driver that supports this version of CUDA.
    pub(super) fn nvrtc(&self, driver: CudaVersion) -> Result<PathBuf, LibraryError> {
        self.find_for(driver, "NVRTC", "libnvrtc.so", &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"])
    }

    /// Libraries that NVRTC loads by name: beside it.
    pub(super) fn nvrtc_builtins(nvrtc: &Path) -> Vec<PathBuf> {
        let Some(folder) = nvrtc.parent() else { return Vec::new() };
        let is_builtins = |name: &str| name.starts_with("libnvrtc-builtins.so") && !name.contains(".alt.");
        entries(folder).into_iter().filter(|entry| is_builtins(&name_of(entry))).collect()
    }

    /// For a driver that supports this version of CUDA.
    pub(super) fn cublas_lt(&self, driver: CudaVersion) -> Result<PathBuf, LibraryError> {
        self.find_for(driver, "cuBLASLt", "libcublasLt.so", &["nvidia/cu13/lib", "nvidia/cublas/lib"])
    }

    /// The newest library that the driver runs: its major version is at most the driver's.
    fn find_for(
        &self,
        driver: CudaVersion,
        library: &'static str,
        name: &str,
        packages: &[&str],
    ) -> Result<PathBuf, LibraryError> {
        let named = |major: &i32| format!("{name}.{major}");
        let (fits, newer): (Vec<i32>, Vec<i32>) = MAJORS.into_iter().partition(|major| *major <= driver.major());
        let names = |majors: &[i32]| majors.iter().map(named).collect::<Vec<String>>();
        let found = self.find(library, &names(&fits).iter().map(String::as_str).collect::<Vec<_>>(), packages);
        let too_new = |major: &i32| Some((*major, self.find(library, &[&named(major)], packages).ok()?));
        match (found, newer.iter().find_map(too_new)) {
            (Err(LibraryError::Missing { .. }), Some((major, path))) => {
                Err(LibraryError::TooNew { library, path, major, driver })
            }
            (found, _) => found,
        }
    }

    pub(crate) fn nccl(&self) -> Result<PathBuf, LibraryError> {
        self.find("NCCL", &["libnccl.so.2"], &["nvidia/nccl/lib"])
    }

    pub(crate) fn cudnn(&self) -> Result<PathBuf, LibraryError> {
        self.find("cuDNN", &["libcudnn.so.9"], &["nvidia/cudnn/lib"])
    }

    /// Parts of cuDNN that it loads by name, each after those that it needs: beside it.
    pub(super) fn cudnn_parts(&self) -> Vec<PathBuf> {
        const PARTS: [&str; 5] = ["graph", "ops", "heuristic", "engines_precompiled", "engines_runtime_compiled"];
        let Some(folder) = self.cudnn().ok().and_then(|path| path.parent().map(Path::to_owned)) else {
            return Vec::new();
        };
        let paths = PARTS.map(|part| folder.join(format!("libcudnn_{part}.so.9")));
        paths.into_iter().filter(|path| path.exists()).collect()
    }

    /// `packages` are folders below `site-packages`.
    fn find(&self, library: &'static str, names: &[&str], packages: &[&str]) -> Result<PathBuf, LibraryError> {
        let of_packages = self.site_packages.iter().flat_map(|site| packages.iter().map(|package| site.join(package)));
        let of_packages = of_packages.filter(|folder| folder.is_dir());
        let folders = if self.named.is_empty() { of_packages.chain(system()).collect() } else { self.named.clone() };
        find(library, names, folders)
    }
}

/// The first of the files in the first folder that has one.
fn find(library: &'static str, names: &[&str], searched: Vec<PathBuf>) -> Result<PathBuf, LibraryError> {
    if cfg!(target_feature = "crt-static") {
        return Err(LibraryError::Static);
    }
    let mut candidates = searched.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
    let found = candidates.find(|path| path.exists());
    found.ok_or_else(|| LibraryError::Missing { library, names: names.join(", "), searched })
}

fn system() -> impl Iterator<Item = PathBuf> {
    SYSTEM.into_iter().map(PathBuf::from).filter(|folder| folder.is_dir())
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    const NEW: CudaVersion = CudaVersion(13_000);

    #[test]
    fn library_of_a_newer_cuda_than_the_drivers_is_passed_over_and_named_if_there_is_no_other() {
        let root = tempfile::tempdir().unwrap();
        let newer = touch(root.path(), "a/libnvrtc.so.13");
        let search = Search::only(["a", "b"].map(|folder| root.path().join(folder)).into());

        let alone = search.nvrtc(CudaVersion(12_040)).unwrap_err().to_string();
        let older = touch(root.path(), "b/libnvrtc.so.12");

        assert_eq!(
            alone,
            format!(
                "NVRTC is there for CUDA 13 only ({}), and the NVIDIA driver supports CUDA 12.4: install the library for \
                 CUDA 12, or update the driver",
                newer.display()
            )
        );
        assert_eq!(search.nvrtc(CudaVersion(12_040)), Ok(older));
        assert_eq!(search.nvrtc(NEW), Ok(newer));
    }

    /// An empty file at `path` below `root`.
    fn touch(root: &Path, path: &str) -> PathBuf {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "").unwrap();
        path
    }

    #[test]
    fn libraries_of_python_packages_are_found_beside_any_python_of_the_path() {
        let root = tempfile::tempdir().unwrap();
        let site = "env/lib/python3.12/site-packages";
        let nvrtc = touch(root.path(), &format!("{site}/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"));
        let blas = touch(root.path(), &format!("{site}/nvidia/cu13/lib/libcublasLt.so.13"));
        touch(root.path(), "env/bin/python3");
        let path = root.path().join("env/bin");

        let search = Search::new(None, None, Some(path.as_os_str()));

        assert_eq!((search.nvrtc(NEW), search.cublas_lt(NEW)), (Ok(nvrtc), Ok(blas)));
    }

    #[test]
    fn libraries_of_the_environment_that_has_the_program_precede_those_of_the_path() {
        let root = tempfile::tempdir().unwrap();
        let own = touch(root.path(), "own/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
        touch(root.path(), "other/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
        let (program, path) = (root.path().join("own/bin/phalanx"), root.path().join("other/bin"));

        let search = Search::new(None, Some(&program), Some(path.as_os_str()));

        assert_eq!(search.nvrtc(NEW), Ok(own));
    }

    #[test]
    fn named_folders_are_searched_instead_of_packages_in_their_order() {
        let root = tempfile::tempdir().unwrap();
        touch(root.path(), "env/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
        let second = touch(root.path(), "b/libnvrtc.so.13");
        let folders = format!("{0}/a:{0}/b", root.path().display());
        let path = root.path().join("env/bin");

        let search = Search::new(Some(OsStr::new(&folders)), None, Some(path.as_os_str()));

        assert_eq!(search.nvrtc(NEW), Ok(second));
    }

    #[test]
    fn missing_library_is_named_with_its_files_and_the_searched_folders() {
        let search = Search::only(vec!["/nowhere".into(), "/nothing".into()]);

        let error = search.cublas_lt(NEW).unwrap_err().to_string();

        let expected = "cuBLASLt (libcublasLt.so.13, libcublasLt.so.12) was not found in /nowhere, /nothing; install it, or \
                        name its folder in PHALANX_CUDA_LIBS";
        assert_eq!(error, expected);
    }

    #[test]
    fn built_in_functions_of_nvrtc_are_those_beside_it() {
        let root = tempfile::tempdir().unwrap();
        let nvrtc = touch(root.path(), "libnvrtc.so.13");
        touch(root.path(), "libnvrtc.alt.so.13");
        touch(root.path(), "libnvrtc-builtins.alt.so.13.0");
        let builtins = touch(root.path(), "libnvrtc-builtins.so.13.0");

        assert_eq!(Search::nvrtc_builtins(&nvrtc), [builtins]);
    }
}
