//! The executable of rank processes, opened once.
//!
//! A job starts rank processes for as long as it runs. An upgrade may replace or remove the file meanwhile: ranks of two
//! versions would not understand each other, and without a file no rank could be replaced. An open descriptor keeps the file
//! that was there at first.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// An open file, from which processes start even after its name is gone.
#[derive(Clone, Debug)]
pub struct Executable {
    path: PathBuf,
    /// None if the file cannot be opened, or is a script: its interpreter opens it by its path.
    file: Option<Arc<File>>,
}

impl Executable {
    /// The file at this path now. If it cannot be opened, a start reports the reason.
    pub fn at(path: impl Into<PathBuf>) -> Executable {
        let path = path.into();
        let file = open(&path);
        Executable { path, file }
    }

    /// The executable of this process, even if its file has been replaced or removed since the start.
    pub fn running() -> Executable {
        Executable { path: std::env::current_exe().unwrap_or_default(), file: open(Path::new("/proc/self/exe")) }
    }

    /// The path, for messages and process listings.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A command that runs the executable. It must be run with a `pre_exec` closure, as [`super::slots::Slots`] does: the
    /// descriptor is that of the child, which a fork has copied.
    pub fn command(&self) -> Command {
        let Some(file) = &self.file else { return Command::new(&self.path) };
        let mut command = Command::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
        command.arg0(&self.path);
        command
    }
}

/// Two are equal if they have one path.
impl PartialEq for Executable {
    fn eq(&self, other: &Executable) -> bool {
        self.path == other.path
    }
}

impl Eq for Executable {}

fn open(path: &Path) -> Option<Arc<File>> {
    let mut file = File::open(path).ok()?;
    let mut begin = [0; 2];
    // The descriptor is closed when a program starts, so an interpreter could not read a script through it.
    let is_script = file.read_exact(&mut begin).is_ok() && begin == *b"#!";
    (!is_script).then(|| Arc::new(file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::failure::Ending;
    use crate::launch::slots::{SlotEvent, Slots};
    use std::time::Duration;

    /// The lines of a process of this executable in a slot, and how it ended.
    fn run(executable: &Executable, args: &[&str]) -> (Vec<String>, Ending) {
        let mut slots = Slots::new(1);
        let started = slots.start(0, &[], |_, _| {
            let mut command = executable.command();
            command.args(args);
            command
        });
        started.unwrap();
        let mut lines = Vec::new();
        loop {
            match slots.next_event(Some(Duration::from_secs(60))).unwrap().expect("the process ends") {
                SlotEvent::Line { text, .. } => lines.push(text),
                SlotEvent::Exited { ending, .. } => return (lines, ending),
                _ => {}
            }
        }
    }

    /// A copy of the shell in a folder.
    fn shell(dir: &Path) -> PathBuf {
        let path = dir.join("shell");
        std::fs::copy("/bin/sh", &path).unwrap();
        path
    }

    const SAY: [&str; 2] = ["-c", "echo here >&2"];

    #[test]
    fn executable_runs_after_its_file_was_replaced_or_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = shell(dir.path());
        let executable = Executable::at(&path);

        std::fs::write(dir.path().join("new"), "not a program").unwrap();
        std::fs::rename(dir.path().join("new"), &path).unwrap();
        let replaced = run(&executable, &SAY);
        std::fs::remove_file(&path).unwrap();
        let removed = run(&executable, &SAY);

        let expected = (vec!["here".to_owned()], Ending::Code(0));
        assert_eq!((&replaced, &removed), (&expected, &expected));
    }

    #[test]
    fn process_listings_show_the_path_of_the_executable() {
        let dir = tempfile::tempdir().unwrap();
        let executable = Executable::at(shell(dir.path()));

        let (lines, _) = run(&executable, &["-c", "tr '\\0' ' ' < /proc/$$/cmdline >&2; echo >&2"]);

        assert!(lines[0].starts_with(executable.path().to_str().unwrap()), "{lines:?}");
    }

    #[test]
    fn script_runs_by_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("script");
        std::fs::copy("/bin/sh", &path).unwrap(); // takes over the mode
        std::fs::write(&path, "#!/bin/sh\necho here >&2\n").unwrap();

        assert_eq!(run(&Executable::at(&path), &[]), (vec!["here".to_owned()], Ending::Code(0)));
    }
}
