//! Data with records that cannot be used: what is named, what is left out, and what ends a run in any case.

use super::*;
use crate::config::datasets::DatasetType;
use crate::config::pair_form::PairForm;
use crate::config::split::Split;
use crate::data::config::{DataConfig, DatasetConfig};
use crate::data::prepare::{PrepareError, Prepared, Summary, prepare};
use crate::data::rows::Rows;
use crate::data::tokenizer::Tokenizer;
use crate::data::{chat_template::CHATML, columns::Columns};
use arrow_array::{ArrayRef, BinaryArray, RecordBatch, StringArray};
use phalanx_strategies::model::BatchShape;
use phalanx_strategies::objective::SecondRow;
use phalanx_strategies::program::Column;
use phalanx_strategies::rng::CounterRng;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

const ROW: usize = 256;

/// A folder with files of data and of tokens.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new(files: &[(&str, &[u8])]) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        files.iter().for_each(|(name, content)| folder.write(name, content));
        folder
    }

    fn write(&self, name: &str, content: &[u8]) {
        std::fs::write(self.path(name), content).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn dataset(&self, name: &str, kind: DatasetType) -> DatasetConfig {
        let mut dataset = DatasetConfig::new(self.path(name), kind);
        if kind.has_messages() {
            dataset.template.jinja = Some(CHATML.to_owned());
            dataset.template.choice = crate::config::chat_template::ChatTemplateChoice::Jinja;
        }
        dataset
    }

    fn config(&self, kind: DatasetType, names: &[&str]) -> DataConfig {
        let datasets = names.iter().map(|name| self.dataset(name, kind)).collect();
        DataConfig { skip_bad_records: true, shuffle: false, ..DataConfig::new(datasets, ROW) }
    }

    fn prepare(&self, config: &DataConfig) -> Result<Prepared, PrepareError> {
        prepare(config, &Tokenizer::bytes(), &self.path("prepared"), 264, &|_| Ok(()))
    }
}

/// The lines of the list of a file.
fn listed(summary: &Summary) -> Vec<Value> {
    let text = std::fs::read_to_string(summary.skipped_list.as_ref().expect("something is left out")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The text of each row.
fn texts(rows: &Rows) -> Vec<String> {
    let text = |row| {
        let mut batch = Columns::new([Column::Ids], BatchShape { n_rows: rows.n_batch_rows(), seq_len: ROW });
        rows.fill(&[row], CounterRng::new(0), &mut batch).unwrap();
        let ids: Vec<u32> = batch.of(Column::Ids).iter().map(|id| *id as u32).collect();
        let text = Tokenizer::bytes().decode(&ids, false).unwrap();
        ["<|bos|>", "<|eos|>", "<|pad|>"].iter().fold(text, |text, special| text.replace(special, ""))
    };
    (0..rows.len() as u64).map(text).collect()
}

fn lines(records: &[Value]) -> Vec<u8> {
    records.iter().map(|record| format!("{record}\n")).collect::<String>().into_bytes()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut encoder, bytes).unwrap();
    encoder.finish().unwrap()
}

/// A file and its type, with the lines of its bad records and a part of the sentence about each.
type Case = (&'static str, DatasetType, Vec<u8>, Vec<(u64, &'static str)>);

/// Files of every type.
fn files_of_types() -> Vec<Case> {
    use DatasetType as T;
    let answer = json!({"instruction": "a", "output": "b"});
    let turn = |role: &str| json!({"role": role, "content": "a"});
    let chat = json!({"messages": [turn("user"), turn("assistant")]});
    let pair = json!({"prompt": "a", "chosen": "b", "rejected": "c"});
    let ids = json!({"input_ids": [104, 105]});
    let segments = json!({"segments": [{"label": true, "text": "a"}, {"label": true, "text": "b"}]});
    vec![
        (
            "answers.jsonl",
            T::Alpaca,
            lines(&[answer.clone(), json!({"instruction": "a", "output": [1]}), answer]),
            vec![(2, "field \"output\" must be text, found a list")],
        ),
        (
            "chats.jsonl",
            T::ChatTemplate,
            lines(&[
                chat.clone(),
                json!({"messages": [turn("stranger")]}),
                json!({"messages": "hi"}),
                chat.clone(),
                chat,
            ]),
            vec![(2, "a message has the role \"stranger\""), (3, "field \"messages\" must be")],
        ),
        (
            "pairs.jsonl",
            T::Preference(PairForm::Columns),
            lines(&[pair.clone(), json!({"prompt": "a", "chosen": "b"}), pair]),
            vec![(2, "field \"rejected\" is missing")],
        ),
        (
            "ids.jsonl",
            T::Tokenized,
            lines(&[ids.clone(), json!({"input_ids": [104, 105], "labels": [104]}), ids]),
            vec![(2, "labels has 1 numbers, but input_ids has 2")],
        ),
        (
            "segments.jsonl",
            T::InputOutput,
            lines(&[segments.clone(), json!({"segments": [{"label": true, "text": 4}]}), segments]),
            vec![(2, "must be")],
        ),
    ]
}

/// Files of every format.
fn files_of_formats() -> Vec<Case> {
    use DatasetType as T;
    let texts = "{\"text\": \"a\"}\n{\"text\": \n\n[\"b\"]\n{\"body\": \"c\"}\n{\"text\": 4}\n\
                 {\"text\": \"d\"}\n{\"text\": \"e\"}\n{\"text\": \"f\"}\n{\"text\": \"\x1b[2J\"}x\u{1b}\n{\"text\": \"g\"}\n{\"text\": \"h\"}";
    let list = json!([{"text": "a"}, {"text": null, "b": 1}, 3, {"text": "b"}, {"text": "c"}]);
    vec![
        (
            "texts.jsonl",
            T::Completion,
            texts.into(),
            vec![
                (2, "this is not valid JSON: EOF while parsing a value"),
                (4, "a record must be a JSON object with named fields, found a list"),
                (5, "field \"text\" is missing; the record has body"),
                (6, "field \"text\" must be text, found a number"),
                (10, "this is not valid JSON: control character"),
            ],
        ),
        ("list.json", T::Completion, list.to_string().into(), vec![(3, "found a number")]),
        (
            "table.csv",
            T::Completion,
            b"n,text\n1,a\n2\n3,b\n4,\xe9\n5,\"c\nd\"\n6,e\n".to_vec(),
            vec![
                (3, "this is not valid CSV: the first line names 2 fields, but this record has 1"),
                (5, "this is not valid CSV: field \"text\" is not UTF-8 text"),
            ],
        ),
        ("texts.jsonl.gz", T::Completion, gzip(b"{\"text\": \"a\"}\n{}\n"), vec![(2, "field \"text\" is missing")]),
        (
            "pairs.arrow",
            T::Preference(PairForm::Columns),
            pairs_with_a_binary_prompt(),
            vec![(2, "field \"prompt\" of a message has the type binary, which is not read")],
        ),
    ]
}

/// Three pairs. Only the second one has a prompt of bytes.
fn pairs_with_a_binary_prompt() -> Vec<u8> {
    let prompts: ArrayRef = Arc::new(BinaryArray::from(vec![None, Some(&b"p"[..]), None]));
    let answers = |letter: &str| -> ArrayRef { Arc::new(StringArray::from(vec![letter; 3])) };
    let columns = [("prompt", prompts), ("chosen", answers("b")), ("rejected", answers("c"))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = arrow_ipc::writer::StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.into_inner().unwrap()
}

fn of_kind(folder: &Folder, kind: DatasetType, name: &str) -> DataConfig {
    let config = folder.config(kind, &[name]);
    let is_pair = matches!(kind, DatasetType::Preference(_));
    DataConfig { second_row: is_pair.then_some(SecondRow::Rejected), ..config }
}

#[test]
fn bad_record_of_each_kind_is_left_out_counted_and_listed_with_its_line_and_sentence() {
    for (name, kind, content, bad) in files_of_types().into_iter().chain(files_of_formats()) {
        let folder = Folder::new(&[(name, &content)]);
        let config = of_kind(&folder, kind, name);

        let prepared = folder.prepare(&config).unwrap_or_else(|error| panic!("{name}: {error}"));

        let summary = &prepared.summaries[0];
        assert_eq!(summary.n_skipped, bad.len(), "{name}");
        let listed = listed(summary);
        assert_eq!(listed.len(), bad.len(), "{name}");
        for (found, (line, sentence)) in listed.iter().zip(&bad) {
            assert_eq!((&found["path"], &found["line"]), (&json!(folder.path(name)), &json!(line)), "{name}");
            assert!(found["error"].as_str().unwrap().contains(sentence), "{name}: {found}");
            assert!(!found["error"].as_str().unwrap().contains(name), "the path has a field of its own: {found}");
        }
        let strict = folder.prepare(&DataConfig { skip_bad_records: false, ..config }).unwrap_err().to_string();
        assert!(bad.iter().all(|(_, sentence)| strict.contains(sentence)), "{name}: {strict}");
    }
}

#[test]
fn rows_are_those_of_the_same_file_without_its_bad_records() {
    let (good, bad) = (json!({"text": "good"}), json!({"text": 1}));
    let records = [json!({"text": "first"}), bad.clone(), good.clone(), bad, json!({"text": "last"})];
    let folder = Folder::new(&[("a.jsonl", &lines(&records))]);

    let prepared = folder.prepare(&folder.config(DatasetType::Completion, &["a.jsonl"])).unwrap();

    assert_eq!(texts(&prepared.train), ["first", "good", "last"]);
    let summary = &prepared.summaries[0];
    assert_eq!((summary.n_records, summary.n_skipped, summary.n_documents), (5, 2, 3));
}

#[test]
fn splits_count_records_that_are_left_out() {
    let folder = Folder::new(&[("a.csv", b"n,text\n1,a\n2\n3,c\n4,d\n")]);
    let mut config = folder.config(DatasetType::Completion, &["a.csv"]);
    for (split, kept) in [("train[1:]", &["c", "d"][..]), ("train[:2]", &["a"]), ("train[-1:]", &["d"])] {
        config.datasets[0].split = Some(Split::parse(split).unwrap());

        let prepared = folder.prepare(&config).unwrap();

        assert_eq!(texts(&prepared.train), kept, "{split}");
    }
}

#[test]
fn tokens_from_the_cache_tell_what_was_left_out_and_a_lost_list_is_written_again() {
    let folder = Folder::new(&[("a.jsonl", b"{\"text\": \"a\"}\n{}\n{\"text\": \"b\"}\n")]);
    let config = folder.config(DatasetType::Completion, &["a.jsonl"]);
    let first = folder.prepare(&config).unwrap();
    let before = listed(&first.summaries[0]);
    std::fs::remove_file(first.summaries[0].skipped_list.as_ref().unwrap()).unwrap();

    let second = folder.prepare(&config).unwrap();
    std::fs::rename(folder.path("a.jsonl"), folder.path("b.jsonl")).unwrap();
    let renamed = folder.prepare(&folder.config(DatasetType::Completion, &["b.jsonl"])).unwrap();

    let summary = &second.summaries[0];
    assert!(!first.summaries[0].from_cache && summary.from_cache && renamed.summaries[0].from_cache);
    assert_eq!((summary.n_records, summary.n_skipped), (3, 1));
    assert_eq!((before.len(), listed(summary)), (1, before));
    assert_eq!(listed(&renamed.summaries[0])[0]["path"], json!(folder.path("b.jsonl")));
    assert_eq!(second.digests, first.digests);
}

#[test]
fn key_that_is_switched_finds_no_tokens_of_the_other_setting() {
    let folder = Folder::new(&[("a.jsonl", b"{\"text\": \"a\"}\n{}\n"), ("b.jsonl", b"{\"text\": \"b\"}\n")]);
    let skipping = folder.config(DatasetType::Completion, &["a.jsonl", "b.jsonl"]);
    let strict = DataConfig { skip_bad_records: false, ..skipping.clone() };
    folder.prepare(&skipping).unwrap();

    let error = folder.prepare(&strict).unwrap_err().to_string();
    let again = folder.prepare(&skipping).unwrap();

    assert!(error.contains("a.jsonl:2: field \"text\" is missing"), "{error}");
    assert!(again.summaries.iter().all(|summary| summary.from_cache));
    assert_eq!(again.summaries.iter().map(|summary| summary.n_skipped).collect::<Vec<_>>(), [1, 0]);
    assert_eq!(again.summaries[1].skipped_list, None);
}

#[test]
fn digest_tells_which_records_were_left_out() {
    let folder = Folder::new(&[]);
    let digest = |content: &[u8]| {
        folder.write("a.jsonl", content);
        folder.prepare(&folder.config(DatasetType::Completion, &["a.jsonl"])).unwrap().digests
    };
    let (first, last) = (b"{}\n{\"text\": \"a\"}\n", b"{\"text\": \"a\"}\n{}\n");

    assert_ne!(digest(first), digest(last));
    assert_eq!(digest(last), digest(b"{\"text\": \"a\"}\nnot JSON\n"));
}

#[test]
fn file_of_which_more_than_half_is_bad_ends_the_run_and_half_does_not() {
    let (good, bad) = ("{\"text\": \"a\"}\n", "{\"body\": \"a\"}\n");
    let folder = Folder::new(&[]);
    let prepared = |n_good: usize, n_bad: usize| {
        folder.write("a.jsonl", (good.repeat(n_good) + &bad.repeat(n_bad)).as_bytes());
        folder.prepare(&folder.config(DatasetType::Completion, &["a.jsonl"]))
    };

    assert_eq!(prepared(20, 20).unwrap().summaries[0].n_skipped, 20);
    for (n_good, n_bad) in [(20, 21), (0, 1), (1, 2)] {
        let error = prepared(n_good, n_bad).unwrap_err().to_string();

        let counts = format!("a.jsonl: {n_bad} of {} records cannot be used, more than half", n_good + n_bad);
        assert!(error.contains(&counts) && error.contains("`skip_bad_records`"), "{error}");
        assert!(error.contains(&format!("a.jsonl:{}: field \"text\" is missing", n_good + 1)), "{error}");
        assert!(error.lines().count() <= 11, "{error}");
    }
}

#[test]
fn damaged_and_unreadable_files_end_the_run_although_records_are_left_out() {
    let folder = Folder::new(&[]);
    let compressed = gzip(&b"{\"text\": \"a\"}\n".repeat(1000));
    let parquet = std::fs::read(phalanx_needs::reference("data/records.parquet")).unwrap();
    for (name, content, named) in [
        ("a.jsonl.gz", &compressed[..compressed.len() - 9], "cannot read"),
        ("a.parquet", &parquet[..parquet.len() / 2], "is not a valid Parquet file"),
        ("a.json", b"[{\"text\": \"a\"}, {\"text\": \"b\"}", "the list is not closed"),
        ("a.csv", b"text,text\na,b\n", "two columns have the name"),
    ] {
        folder.write(name, content);

        let error = folder.prepare(&folder.config(DatasetType::Completion, &[name])).unwrap_err().to_string();

        assert!(error.contains(name) && error.contains(named), "{error}");
    }
    let absent = folder.prepare(&folder.config(DatasetType::Completion, &["absent.jsonl"]));
    assert!(absent.unwrap_err().to_string().contains("absent.jsonl"));
}

#[test]
fn data_of_which_nothing_is_left_ends_the_run_and_counts_what_was_left_out() {
    let folder = Folder::new(&[("a.jsonl", b"{\"text\": \"\"}\n{\"text\": null}\n{}\n")]);

    let error = folder.prepare(&folder.config(DatasetType::Completion, &["a.jsonl"])).unwrap_err().to_string();

    assert!(error.contains("has nothing to train on") && error.contains("; 1 records that cannot be used"), "{error}");
}

#[test]
fn records_of_test_datasets_and_of_later_files_of_a_stream_are_left_out_and_listed() {
    let folder = Folder::new(&[
        ("a.jsonl", b"{\"text\": \"a\"}\n"),
        ("b.jsonl", b"{\"text\": \"b\"}\n{}\n"),
        ("c.jsonl", b"{}\n{\"text\": \"c\"}\n"),
    ]);
    let mut config = folder.config(DatasetType::Completion, &["a.jsonl", "b.jsonl"]);
    config.stream_rows = Some(2);
    config.test_datasets = vec![folder.dataset("c.jsonl", DatasetType::Completion)];

    let prepared = folder.prepare(&config).unwrap();
    let stream = prepared.train.stream().unwrap();
    stream.prepare_now(&|_| Ok(())).unwrap();

    assert_eq!(texts(&prepared.train), ["a", "b"]);
    assert_eq!(texts(prepared.validation.as_ref().unwrap()), ["c"]);
    assert_eq!(listed(&prepared.summaries[1])[0]["line"], 1);
    let of_stream = stream.with_skipped();
    assert_eq!((of_stream.len(), &listed(&of_stream[0])[0]["line"]), (1, &json!(2)));
}

#[test]
fn bad_records_of_all_files_of_a_data_set_are_named_in_one_error_and_those_beyond_ten_counted() {
    let folder = Folder::new(&[
        ("a.jsonl", b"{\"text\": \"a\"}\n{}\n"),
        ("b.jsonl", b"{\"text\": \"b\"}\n"),
        ("c.csv", b"n,text\n1\n2,c\n3\n"),
        ("d.jsonl", "{\"text\": 1}\n".repeat(30).as_bytes()),
    ]);
    let strict = |names: &[&str]| {
        let config = folder.config(DatasetType::Completion, names);
        folder.prepare(&DataConfig { skip_bad_records: false, ..config }).unwrap_err().to_string()
    };

    let few = strict(&["a.jsonl", "b.jsonl", "c.csv"]);
    let many = strict(&["a.jsonl", "b.jsonl", "c.csv", "d.jsonl"]);

    assert!(few.starts_with("3 records cannot be used:\n"), "{few}");
    for named in ["a.jsonl:2: field \"text\" is missing", "c.csv:2: this is not", "c.csv:4: this is not"] {
        assert!(few.contains(named), "{few}");
    }
    assert!(few.ends_with("`skip_bad_records: true` leaves such records out"), "{few}");
    assert!(many.starts_with("33 records cannot be used:\n") && many.contains("\n  and 23 more\n"), "{many}");
    assert_eq!(many.matches("d.jsonl:").count(), 7, "{many}");
}

#[test]
fn search_for_more_bad_records_ends_where_it_takes_long() {
    let folder = Folder::new(&[("a.jsonl", b"{}\n{}\n"), ("b.jsonl", b""), ("c.jsonl", b"{}\n")]);
    let config = folder.config(DatasetType::Completion, &["a.jsonl", "b.jsonl", "c.jsonl"]);
    // It has no bytes on the disk; who reads it finds a line of zeros.
    std::fs::File::options().write(true).open(folder.path("b.jsonl")).unwrap().set_len(FILES_BYTES_MAX + 1).unwrap();

    let error = folder.prepare(&DataConfig { skip_bad_records: false, ..config }).unwrap_err().to_string();

    assert!(error.starts_with("at least 2 records cannot be used:\n"), "{error}");
    let mut bad = BadRecords::default();
    assert!(!bad.is_enough(u64::MAX), "nothing was met");
    bad.add(TokenizeError::Record { path: "a".into(), line: 1, reason: RecordError::Margin });
    assert!(!bad.is_enough(10) && !bad.is_enough(10 + FILE_BYTES_MAX) && bad.is_enough(11 + FILE_BYTES_MAX));
}

#[test]
fn sentence_is_short_and_has_no_escape_codes_or_ends_of_lines() {
    assert_eq!(excerpt("a\u{1b}[2J\nb\u{202e}c"), "a\\u{1b}[2J b\\u{202e}c");
    assert_eq!(excerpt(&"é".repeat(300)), "é".repeat(300));
    assert_eq!(excerpt(&"é".repeat(4000)), "é".repeat(300) + "…");
}

/// As an attacker packs them: the file has a few hundred bytes.
#[test]
fn search_for_bad_records_ends_in_a_small_file_that_expands_to_many() {
    const N: usize = 500_000;
    let list = format!("[{}1]", "1,".repeat(N));
    let folder = Folder::new(&[("many.json.gz", &gzip(list.as_bytes())), ("one.jsonl", b"1\n")]);
    let strict = |names: &[&str]| {
        let config = DataConfig { skip_bad_records: false, ..folder.config(DatasetType::Completion, names) };
        folder.prepare(&config).unwrap_err().to_string()
    };

    let refused = strict(&["many.json.gz", "one.jsonl"]);

    let n: usize = refused.strip_prefix("at least ").unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!((COUNTED_MAX as usize..N / 2).contains(&n), "{n}");
    assert!(refused.contains("many.json.gz:10: a record must be a JSON object"), "{refused}");
}
