//! `events.jsonl`: the history of a job, for users and programs.

use crate::journal::{self, Journal};
use phalanx_actors::events::Event;
use std::path::Path;

/// Writes one line for each event of the job; incidents have their phases.
pub(crate) struct EventLog {
    file: Journal,
    /// The fault when it was last asked for.
    fault: Option<String>,
}

impl EventLog {
    /// Opens the file in a job's folder. Lines are appended, so a resumed job keeps its history. A file that cannot be opened or
    /// written is written later; see [`EventLog::new_fault`].
    pub(crate) fn open(output_dir: &Path) -> EventLog {
        let file = Journal::new(output_dir.join("events.jsonl"), |path| Ok(Box::new(journal::open_lines(path)?)));
        EventLog { file, fault: None }
    }

    /// Adds a line.
    pub(crate) fn write(&mut self, event: &Event) {
        let mut line = serde_json::to_vec(event).unwrap_or_default();
        line.push(b'\n');
        self.file.append(&line);
    }

    /// Tries to write the lines that wait. Returns the fault if one has begun or ended since the last call.
    pub(crate) fn new_fault(&mut self) -> Option<Option<String>> {
        if self.fault.is_some() {
            self.file.retry();
        }
        let fault = self.file.fault();
        let is_new = fault.is_some() != self.fault.is_some();
        is_new.then(|| {
            self.fault.clone_from(&fault);
            fault
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_actors::events::What;
    use phalanx_strategies::elastic::identity::Term;

    #[test]
    fn line_that_a_crash_has_cut_off_spoils_no_later_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        std::fs::write(&path, "{\"unix_ms\":1,\"te").unwrap();
        let event = Event { unix_ms: 0, term: Term(1), what: What::Leads };

        EventLog::open(dir.path()).write(&event);

        let text = std::fs::read_to_string(path).unwrap();
        assert_eq!(text.lines().last().map(str::to_owned), Some(event.to_line()));
    }

    #[test]
    fn events_of_a_folder_that_cannot_be_written_are_written_when_it_can() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("later");
        let mut log = EventLog::open(&folder);

        (1..=3).for_each(|term| log.write(&Event { unix_ms: 0, term: Term(term), what: What::Leads }));
        let (begun, again) = (log.new_fault(), log.new_fault());
        std::fs::create_dir(&folder).unwrap();
        let ended = log.new_fault();

        assert!(begun.flatten().is_some_and(|fault| fault.contains("events.jsonl")));
        assert_eq!((again, ended), (None, Some(None)));
        let text = std::fs::read_to_string(folder.join("events.jsonl")).unwrap();
        assert_eq!(text.lines().count(), 3);
    }
}
