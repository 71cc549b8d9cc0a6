//! Tests of [`super`]: every format gives the records that were written, and no file makes it read without a limit.

use super::*;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The records of a file with their numbers.
fn read(path: &Path, format: FileFormat) -> Result<Vec<(u64, Value)>, ReadError> {
    let (mut file, mut records) =
        (RecordFile::open(&DataFile::open(path)?, format, &["messages".to_owned()])?, Vec::new());
    loop {
        let batch = file.next_batch()?;
        if batch.is_empty() {
            assert_eq!(file.done_bytes(), path.metadata().unwrap().len(), "progress ends at the end");
            return Ok(records);
        }
        for numbered in batch {
            records.push((numbered.line, numbered.into_value(path)?));
        }
    }
}

fn written(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

fn error(name: &str, format: FileFormat, bytes: &[u8]) -> String {
    let (_dir, path) = written(name, bytes);
    read(&path, format).unwrap_err().to_string()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// The records of `tests/reference/make_data.py`; bytes are no JSON, so their column is left out.
fn reference() -> Vec<(u64, Value)> {
    let turns = |turns: &[(&str, Value)]| {
        turns.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect::<Value>()
    };
    let records = [
        json!({ "text": "one", "large": "a", "label": "no", "count": 1, "score": 0.5, "good": true,
            "input_ids": [1, 2], "messages": turns(&[("user", "Hi".into()), ("assistant", "Ho".into())]) }),
        json!({ "text": "zwei, \"drei\"", "large": "b", "label": "yes", "count": -2, "score": -1.25, "good": false,
            "input_ids": [], "messages": [] }),
        json!({ "text": "語\nline", "large": "c", "label": "no", "count": null, "score": 3.0, "good": null,
            "input_ids": null, "messages": null }),
        json!({ "text": null, "large": "d", "label": null, "count": 1_u64 << 40, "score": null, "good": true,
            "input_ids": [3], "messages": turns(&[("user", Value::Null)]) }),
    ];
    let days = ["1970-01-01", "1970-01-02", "1970-01-03", "1970-01-04"];
    let with_day = |(mut record, day): (Value, &str)| {
        record["day"] = day.into();
        record
    };
    (1..).zip(records.into_iter().zip(days).map(with_day)).collect()
}

/// Files that another library wrote.
#[test]
fn columns_of_every_type_become_the_fields_that_were_written() {
    let mut files = ["records", "snappy", "brotli", "lz4", "gzip"]
        .map(|name| (format!("{name}.parquet"), FileFormat::Parquet))
        .to_vec();
    files.extend(["stream.arrow", "file.arrow"].map(|name| (name.to_owned(), FileFormat::Arrow)));
    for (name, format) in files {
        let mut records = read(&phalanx_needs::reference(&format!("data/{name}")), format).unwrap();

        // Bytes without a value are null in every type.
        for (_, record) in &mut records {
            record.as_object_mut().unwrap().shift_remove("image");
        }
        assert_eq!(records, reference(), "{name}");
    }
}

#[test]
fn truncated_column_files_are_refused_by_name() {
    for (name, format) in [("records.parquet", FileFormat::Parquet), ("stream.arrow", FileFormat::Arrow)] {
        let whole = std::fs::read(phalanx_needs::reference(&format!("data/{name}"))).unwrap();

        let error = error(name, format, &whole[..whole.len() / 2]);

        assert!(error.contains(&format!("{name} is not a valid")), "{error}");
    }
}

#[test]
fn columns_with_compressed_buffers_are_refused() {
    let compressed = std::fs::read(phalanx_needs::reference("data/compressed.arrow")).unwrap();

    let error = error("compressed.arrow", FileFormat::Arrow, &compressed);

    assert!(error.contains("compressed.arrow is not a valid Arrow file"), "{error}");
}

#[test]
fn first_line_names_the_fields_of_separated_values() {
    let (_dir, csv) = written("a.csv", "\u{feff}text,n\n\"a, \"\"b\"\"\nc\",1\nd,\n".as_bytes());
    let (_dir, tsv) = written("a.tsv", b"text\tn\r\na, b\t1\r\n");

    let csv = read(&csv, FileFormat::Csv).unwrap();
    let tsv = read(&tsv, FileFormat::Tsv).unwrap();

    assert_eq!(csv, [(2, json!({ "text": "a, \"b\"\nc", "n": "1" })), (4, json!({ "text": "d", "n": null }))]);
    assert_eq!(tsv, [(2, json!({ "text": "a, b", "n": "1" }))]);
}

#[test]
fn separated_values_that_do_not_fit_are_named_by_line() {
    let uneven = error("a.csv", FileFormat::Csv, b"text,n\na,1\nb\n");
    let twice = error("a.csv", FileFormat::Csv, b"text,text\na,1\n");
    let latin = error("a.csv", FileFormat::Csv, b"n,text\n1,\xe9\n");

    assert!(uneven.ends_with("a.csv:3: this is not valid CSV: the first line names 2 fields, but this record has 1"));
    assert!(twice.ends_with("a.csv:1: this is not valid CSV: two columns have the name \"text\""), "{twice}");
    assert!(latin.ends_with("a.csv:2: this is not valid CSV: field \"text\" is not UTF-8 text"), "{latin}");
}

#[test]
fn compressed_records_are_those_of_the_plain_file() {
    let lines = b"{\"text\":\"a\"}\n{\"text\":\"b\"}\n";
    // Two streams after each other, as `cat` joins them.
    let streams = [gzip(&lines[..13]), gzip(&lines[13..])].concat();
    let (_dir, gz) = written("a.jsonl.gz", &streams);
    let (_dir, zst) = written("a.jsonl.zst", &zstd::encode_all(&lines[..], 1).unwrap());
    let wanted = [(1, json!({ "text": "a" })), (2, json!({ "text": "b" }))];

    assert_eq!(read(&gz, FileFormat::Json).unwrap(), wanted);
    assert_eq!(read(&zst, FileFormat::Json).unwrap(), wanted);
    assert!(error("a.gz", FileFormat::Json, lines).contains("cannot read"));
    assert!(error("a.gz", FileFormat::Json, &streams[..20]).contains("cannot read"));
}

/// A file of some kilobytes that expands to more than a record may have.
#[test]
fn record_that_never_ends_is_refused_before_it_fills_the_memory() {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.write_all(b"text\n\"").unwrap();
    // Not so regular that the expansion alone is refused.
    for n in 0..=(RECORD_BYTES_MAX + (1 << 20)) / 2048 {
        encoder.write_all(format!("{:a<2048}", n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).as_bytes()).unwrap();
    }
    let bytes = encoder.finish().unwrap();

    let quoted = error("a.csv.zst", FileFormat::Csv, &bytes);
    let line = error("a.jsonl.zst", FileFormat::Json, &bytes);

    assert!(bytes.len() < 16 << 20, "{} bytes", bytes.len());
    assert!(quoted.contains("a.csv.zst:2: this record is larger than 256 MiB"), "{quoted}");
    assert!(line.contains("a.jsonl.zst:2: this record is larger than 256 MiB"), "{line}");
}

#[test]
fn compressed_text_that_expands_like_no_text_is_refused() {
    let (dir, path) = written("a.txt.gz", &gzip(&vec![b'a'; 4 << 20]));
    let (_dir, short) = written("b.txt.gz", &gzip(b"Once upon a time."));
    let (_dir, zeros) = written("c.txt.zst", &zstd::encode_all(&vec![b'a'; 4 << 20][..], 1).unwrap());

    let copy = |path: &Path| plain_copy(&DataFile::open(path).unwrap(), dir.path(), || ());
    let whole = copy(&path).unwrap();
    let text = std::io::read_to_string(copy(&short).unwrap());
    let refused = copy(&zeros).unwrap_err();

    assert_eq!(whole.metadata().unwrap().len(), 4 << 20);
    assert_eq!(text.unwrap(), "Once upon a time.");
    assert!(refused.to_string().contains("expands to more than 1000 times its size"), "{refused}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "copies have no names");
}

#[test]
fn list_is_divided_into_its_items_without_parsing_them() {
    let text = "\n[ {\"a\": \"],[\\\"\"},\n\n {\"b\": [1, {\"c\": [2]}]} , 3\n]\n ";
    let (_dir, path) = written("a.json", text.as_bytes());

    let records = read(&path, FileFormat::Json).unwrap();

    assert_eq!(records, [(1, json!({ "a": "],[\"" })), (2, json!({ "b": [1, { "c": [2] }] })), (3, json!(3))]);
    let (_dir, empty) = written("a.json", b" [ ]");
    assert_eq!(read(&empty, FileFormat::Json), Ok(Vec::new()));
}

#[test]
fn list_that_is_not_json_is_refused_by_the_line_of_the_file() {
    let refused = |text: &str| error("a.json", FileFormat::Json, text.as_bytes());

    assert!(refused("[1,\n2").ends_with("a.json:2: this is not valid JSON: the list is not closed"));
    assert!(refused("[1,\n,2]").ends_with("a.json:2: this is not valid JSON: expected a value between commas"));
    assert!(refused("[1,]").ends_with("a.json:1: this is not valid JSON: expected a value between commas"));
    assert!(refused("[1]\n[2]").ends_with("there is more after the end of the list"));
    assert!(refused("[1,\n{\"a\":\n x}]").contains("a.json:3: this is not valid JSON: expected value at column 2"));
}

/// Small files that would fill the memory.
#[test]
fn size_in_memory_is_what_a_batch_and_a_record_are_bounded_by() {
    let list = format!("[{}1]", "1,".repeat(1 << 20));
    let (_dir, list) = written("a.json", list.as_bytes());
    let (_dir, empty) = written("e.csv", format!("text,b\n{}", ",\n".repeat(1 << 20)).as_bytes());
    let longest_batch = |path: &Path, format| {
        let mut file = RecordFile::open(&DataFile::open(path).unwrap(), format, &[]).unwrap();
        std::iter::from_fn(|| Some(file.next_batch().unwrap().len()).filter(|n| *n > 0)).max().unwrap()
    };

    assert!(longest_batch(&list, FileFormat::Json) <= BATCH_BYTES / size_of::<Numbered>() + 1);
    assert!(longest_batch(&empty, FileFormat::Csv) <= BATCH_BYTES / size_of::<Numbered>() + 1);
    let digits = format!("{{\"a\": [{}1]}}", "1,".repeat((DECODED_BYTES_MAX / VALUE_BYTES) as usize + 1));
    assert!(error("a.jsonl", FileFormat::Json, digits.as_bytes()).contains("larger than 1024 MiB"));
    let header: Vec<String> = (0..=1 << 14).map(|n| n.to_string()).collect();
    assert!(error("a.csv", FileFormat::Csv, header.join(",").as_bytes()).contains("names 16385 fields"));
    let cells = zstd::encode_all(format!("text,b\n{}", ",\n".repeat(5 << 20)).as_bytes(), 1).unwrap();
    let (_dir, cells) = written("e.csv.zst", &cells);
    let mut file = RecordFile::open(&DataFile::open(&cells).unwrap(), FileFormat::Csv, &[]).unwrap();
    let refused = std::iter::repeat_with(|| file.next_batch().map(|batch| batch.len())).find(|n| !matches!(n, Ok(1..)));
    assert!(refused.unwrap().unwrap_err().to_string().contains("expands to more than 1000 times"));
    let blanks = zstd::encode_all(&vec![b' '; 65 << 20][..], 1).unwrap();
    assert!(error("a.jsonl.zst", FileFormat::Json, &blanks).contains("expands to more than 1000 times"));
}
