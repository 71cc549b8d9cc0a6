use super::*;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A world of this generation in a job whose record is shared.
fn world(generation: u64, recorded: &Arc<AtomicU64>) -> Fence {
    let recorded = Arc::clone(recorded);
    Fence::new(generation, move || Some(recorded.load(Ordering::Relaxed)))
}

fn all(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.len())
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

fn names(folder: &Path) -> Vec<OsString> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect()
}

// TAKEN-OVER-1
#[test]
fn reader_of_a_file_that_is_taken_over_reads_its_old_lines_to_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    fs::write(&path, "one\ntwo\nthr").unwrap();
    let mut reader = File::open(&path).unwrap();

    let mut file = take_over(&path, None, |_| Ok(4)).unwrap();
    file.write_all(b"2\n").unwrap();

    let mut read = String::new();
    reader.read_to_string(&mut read).unwrap();
    assert_eq!((read.as_str(), text(&path).as_str()), ("one\ntwo\nthr", "one\n2\n"));
    assert_eq!(names(dir.path()), ["log"]);
}

// TAKEN-OVER-2
#[test]
fn earlier_world_appends_nothing_after_a_later_one_has_taken_the_file_over() {
    let dir = tempfile::tempdir().unwrap();
    let (path, recorded) = (dir.path().join("log"), Arc::new(AtomicU64::new(1)));
    let mut earlier = take_over(&path, Some(&world(1, &recorded)), all).unwrap();
    earlier.write_all(b"1 of 1\n").unwrap();

    recorded.store(2, Ordering::Relaxed);
    let mut later = take_over(&path, Some(&world(2, &recorded)), all).unwrap();
    earlier.write_all(b"2 of 1\n").unwrap();
    later.write_all(b"2 of 2\n").unwrap();
    let refused = take_over(&path, Some(&world(1, &recorded)), all).unwrap_err();

    assert!(refused.to_string().contains("generation 2 has replaced this world"), "{refused}");
    assert_eq!(text(&path), "1 of 1\n2 of 2\n");
    assert_eq!(names(dir.path()), ["log"]);
}

/// Lets a later world take the file over when the earlier one reads the record, or when it has read the old file.
fn suspended(at_record: bool) -> (String, String) {
    let dir = tempfile::tempdir().unwrap();
    let (path, recorded) = (dir.path().join("log"), Arc::new(AtomicU64::new(1)));
    fs::write(&path, "1\n").unwrap();
    let later = {
        let (path, recorded) = (path.clone(), Arc::clone(&recorded));
        move || {
            recorded.store(2, Ordering::Relaxed);
            let mut file = take_over(&path, Some(&world(2, &recorded)), all).unwrap();
            file.write_all(b"2 of 2\n").unwrap();
        }
    };

    let earlier = if at_record {
        // It has read the record, and is suspended before it uses the answer.
        let is_first = AtomicU64::new(0);
        let record = Arc::clone(&recorded);
        let fence = Fence::new(1, move || {
            let answer = record.load(Ordering::Relaxed);
            if is_first.fetch_add(1, Ordering::Relaxed) == 0 {
                later();
            }
            Some(answer)
        });
        take_over(&path, Some(&fence), all)
    } else {
        let kept = |file: &File| {
            later();
            all(file)
        };
        take_over(&path, Some(&world(1, &recorded)), kept)
    };

    assert_eq!(names(dir.path()), ["log"]);
    (earlier.unwrap_err().to_string(), text(&path))
}

// TAKEN-OVER-2
#[test]
fn earlier_world_that_is_suspended_while_it_takes_over_does_not_finish() {
    for at_record in [true, false] {
        let (refused, text) = suspended(at_record);

        assert!(refused.contains("generation 2 has replaced this world"), "{refused}");
        assert_eq!(text, "1\n2 of 2\n", "{at_record}");
    }
}

// TAKEN-OVER-3
#[test]
fn file_that_cannot_be_copied_is_cut_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    fs::write(&path, "one\ntwo\n").unwrap();
    // A folder in the place of the new file, which no user can write to.
    fs::create_dir(dir.path().join(".log.g0.new")).unwrap();

    let mut file = take_over(&path, None, |_| Ok(4)).unwrap();
    file.write_all(b"2\n").unwrap();

    assert_eq!(text(&path), "one\n2\n");
}

#[test]
fn file_behind_a_link_is_taken_over_where_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let (link, path) = (dir.path().join("log"), dir.path().join("elsewhere"));
    fs::write(&path, "one\n").unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();

    take_over(&link, None, all).unwrap().write_all(b"two\n").unwrap();

    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(text(&path), "one\ntwo\n");
}

#[test]
fn lines_are_read_from_the_end_whatever_their_lengths() {
    for torn in ["", "torn"] {
        let mut file = tempfile::tempfile().unwrap();
        let mut lines: Vec<String> = (0..50).map(|n| "x".repeat((n * n * 37) % 40_000) + "\n").collect();
        lines.extend((!torn.is_empty()).then(|| torn.to_owned()));
        file.write_all(lines.concat().as_bytes()).unwrap();

        let mut found = Vec::new();
        let mut from_end = LinesFromEnd::of(&file).unwrap();
        while let Some(line) = from_end.next().unwrap() {
            found.push((line.end, String::from_utf8(line.bytes).unwrap()));
        }

        let ends = lines.iter().scan(0, |end, line| {
            *end += line.len() as u64;
            Some(*end)
        });
        let mut expected: Vec<(u64, String)> = ends.zip(lines.iter().cloned()).collect();
        expected.reverse();
        assert!(found == expected, "{} lines of {}", found.len(), expected.len());
    }
}

#[test]
fn line_beyond_the_limit_is_an_error() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![b'x'; 3 << 20]).unwrap();

    let error = LinesFromEnd::of(&file).unwrap().next().err().unwrap();

    assert_eq!(error.kind(), ErrorKind::InvalidData);
}
