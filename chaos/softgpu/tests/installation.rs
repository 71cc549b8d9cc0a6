//! An installation has the libraries that programs look for, and one engine behind them.
#![allow(unsafe_code)]

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use phalanx_softgpu::{InstallError, Installation, LIBRARIES};

fn open(path: &std::path::Path) -> Library {
    // SAFETY: the libraries' constructors do nothing.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.unwrap()
}

#[test]
fn each_library_gives_the_functions_of_its_original() {
    let installation = Installation::new().unwrap();

    for (library, symbol) in LIBRARIES.iter().zip([
        "cuInit",
        "nvrtcVersion",
        "cublasLtCreate",
        "ncclGetVersion",
        "nvmlInit_v2",
        "cudnnCreate",
    ]) {
        let library = open(&installation.library(library));

        // SAFETY: the address is only compared.
        let found = unsafe { library.get::<*const ()>(symbol.as_bytes()) };

        assert!(found.is_ok(), "{symbol}");
    }
}

#[test]
fn all_libraries_share_one_engine() {
    let installation = Installation::new().unwrap();
    let (cuda, nccl) = (open(&installation.library("libcuda.so.1")), open(&installation.library("libnccl.so.2")));

    // SAFETY: the addresses are only compared.
    let addresses = unsafe { [&cuda, &nccl].map(|l| *l.get::<*const ()>(b"cuInit").unwrap()) };

    assert_eq!(addresses[0], addresses[1]);
}

#[test]
fn library_left_out_is_absent_and_the_others_are_there() {
    let installation = Installation::new().unwrap().without("libnccl.so.2").unwrap();

    let present = LIBRARIES.map(|l| installation.library(l).is_file());

    assert_eq!(present, [true, true, true, false, true, true]);
}

#[test]
fn unknown_library_cannot_be_left_out() {
    let refused = Installation::new().unwrap().without("libfoo.so").unwrap_err();

    assert!(matches!(refused, InstallError::UnknownLibrary { name } if name == "libfoo.so"));
}
