//! The end of a rank's process.
#![allow(unsafe_code)] // The standard library runs destructors.

use std::io::Write;

/// Ends this process without the destructors of C libraries. A driver may block in them without a limit, and threads may
/// still free communicators beside them. The system frees what the process holds, on GPUs too.
pub(crate) fn end_with(code: i32) -> ! {
    // What is buffered for a closed stream has no reader.
    let _ = std::io::stdout().flush();
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// The file that a destructor writes, in the process of the test.
    const WRITTEN: &str = "PHALANX_TEST_DESTRUCTOR";

    extern "C" fn destructor() {
        std::fs::write(std::env::var_os(WRITTEN).unwrap(), "").unwrap();
    }

    #[test]
    fn end_of_a_process_runs_no_destructors_of_libraries() {
        if std::env::var_os(WRITTEN).is_some() {
            // SAFETY: the function has the signature that `atexit` asks for.
            assert_eq!(unsafe { libc::atexit(destructor) }, 0);
            end_with(3);
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("written");
        let mut own = Command::new(std::env::current_exe().unwrap());
        own.args(["process_end::tests::end_of_a_process_runs_no_destructors_of_libraries", "--exact"]);

        let ended = own.env(WRITTEN, &file).output().unwrap();

        assert_eq!((ended.status.code(), file.exists()), (Some(3), false));
    }
}
