//! Tests of [`super`] on folders as other tools write them.

use super::*;
use crate::config::JobConfig;
use crate::train::data_plan::data_config;
use std::ops::Range;

/// A folder of files with records `{"text": "FILE N"}`, as many as is said.
fn folder(files: &[(&str, usize)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, n) in files {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let line = |i| format!("{{\"text\": \"{name} {i}\"}}\n");
        std::fs::write(path, (0..*n).map(line).collect::<String>()).unwrap();
    }
    dir
}

fn dataset(dir: &tempfile::TempDir, split: Option<&str>) -> DatasetConfig {
    let split = split.map(|text| Split::parse(text).unwrap());
    DatasetConfig { split, ..DatasetConfig::new(dir.path(), DatasetType::Completion) }
}

/// The names of the files inside `dir`, and the first and last record that is read of each, of records below 1000.
fn read(dir: &tempfile::TempDir, files: Vec<SourceFile>) -> Vec<(String, Range<u64>)> {
    let name = |file: &SourceFile| file.path.strip_prefix(dir.path()).unwrap().display().to_string();
    let range = |file: &SourceFile| {
        let chosen: Vec<u64> = (0..1000).filter(|&record| file.choice.has(record)).collect();
        chosen.first().map_or(0..0, |&first| first..chosen.len() as u64 + first)
    };
    files.iter().map(|file| (name(file), range(file))).collect()
}

fn of(dir: &tempfile::TempDir, split: Option<&str>) -> Result<Vec<(String, Range<u64>)>, SourceError> {
    files_of(&dataset(dir, split), Purpose::Training, 42).map(|files| read(dir, files))
}

fn names(found: Vec<(String, Range<u64>)>) -> Vec<String> {
    found.into_iter().map(|(name, _)| name).collect()
}

const ALL: Range<u64> = 0..1000;

#[test]
fn folder_of_the_hub_is_read_by_the_names_of_its_files() {
    let sharded = folder(&[
        ("README.md", 1),
        ("data/train-00000-of-00002.jsonl", 3),
        ("data/train-00001-of-00002.jsonl", 4),
        ("data/test_sft-00000-of-00001-3d2.jsonl", 2),
    ]);
    let folders = folder(&[("train/a.jsonl", 1), ("dev/b.jsonl", 1), ("test.jsonl", 1)]);
    let files = folder(&[("my-train.jsonl", 1), ("val_1.jsonl", 1), ("other.jsonl", 1)]);
    let plain = folder(&[("a.jsonl", 1), ("b.json", 1), ("notes.txt", 1), (".git/c.jsonl", 1), ("state.json", 0)]);

    let shards = ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"];
    assert_eq!(names(of(&sharded, None).unwrap()), shards);
    assert_eq!(names(of(&sharded, Some("test_sft")).unwrap()), ["data/test_sft-00000-of-00001-3d2.jsonl"]);
    assert_eq!(names(of(&folders, None).unwrap()), ["train/a.jsonl"]);
    assert_eq!(names(of(&folders, Some("validation")).unwrap()), ["dev/b.jsonl"]);
    assert_eq!(names(of(&files, None).unwrap()), ["my-train.jsonl"]);
    assert_eq!(names(of(&files, Some("validation")).unwrap()), ["val_1.jsonl"]);
    let state = std::fs::remove_file(plain.path().join("state.json"));
    state.unwrap();
    assert_eq!(names(of(&plain, None).unwrap()), ["a.jsonl", "b.json"]);
}

#[test]
fn configs_of_a_readme_name_the_files_of_each_part() {
    let dir = folder(&[("en/a-1.jsonl", 2), ("en/a-2.jsonl", 2), ("de/x.jsonl", 1), ("de/y.jsonl", 1)]);
    let card = "---\nconfigs:\n- config_name: en\n  data_files: en/a-*.jsonl\n- config_name: de\n  data_files:\n  \
                - split: train\n    path: de/x.jsonl\n  - split: test\n    path: de/y.jsonl\n---\n# Data\n";
    std::fs::write(dir.path().join("README.md"), card).unwrap();
    let named = |name: Option<&str>, split| {
        let dataset = DatasetConfig { name: name.map(str::to_owned), ..dataset(&dir, split) };
        files_of(&dataset, Purpose::Training, 42).map(|files| names(read(&dir, files)))
    };

    assert_eq!(named(Some("en"), None).unwrap(), ["en/a-1.jsonl", "en/a-2.jsonl"]);
    assert_eq!(named(Some("de"), Some("test")).unwrap(), ["de/y.jsonl"]);
    assert!(matches!(named(None, None), Err(SourceError::SeveralNames { present, .. }) if present == ["en", "de"]));
    assert!(matches!(named(Some("fr"), None), Err(SourceError::NoName { .. })));
}

#[test]
fn folder_that_datasets_saved_is_read_by_its_description() {
    let dir = folder(&[("train/data-00000-of-00001.arrow", 0), ("train/cache-1.arrow", 0), ("test/x.arrow", 0)]);
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    write("dataset_dict.json", r#"{"splits": ["train", "test"]}"#);
    write("train/state.json", r#"{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}"#);
    write("test/state.json", r#"{"_data_files": [{"filename": "../../secret.arrow"}]}"#);

    let outside = of(&dir, Some("train"));
    assert!(matches!(outside, Err(SourceError::Description { .. })), "{outside:?}");
    write("test/state.json", r#"{"_data_files": [{"filename": "x.arrow"}]}"#);
    assert_eq!(names(of(&dir, None).unwrap()), ["train/data-00000-of-00001.arrow"]);
    assert!(matches!(of(&dir, Some("dev")), Err(SourceError::NoSplit { .. })));
}

#[test]
fn slice_counts_the_records_of_all_files_of_its_split() {
    let dir = folder(&[("data/train-00000-of-00002.jsonl", 30), ("data/train-00001-of-00002.jsonl", 70)]);
    let [first, second] = ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"].map(str::to_owned);

    assert_eq!(of(&dir, Some("train[20:50]")).unwrap(), [(first.clone(), 20..30), (second.clone(), 0..20)]);
    assert_eq!(of(&dir, Some("train[-10%:]")).unwrap(), [(second.clone(), 60..70)]);
    assert_eq!(of(&dir, Some("train[:5]+train[95:]")).unwrap(), [(first.clone(), 0..5), (second.clone(), 65..70)]);
    assert_eq!(of(&dir, None).unwrap(), [(first, ALL), (second, ALL)]);
    let none = of(&dir, Some("train[100:200]")).unwrap_err().to_string();
    assert!(none.ends_with("split train[100:200] has no record; there are 100"), "{none}");
}

#[test]
fn shards_of_several_files_share_all_records() {
    let dir = folder(&[("data/train-00000-of-00002.jsonl", 30), ("data/train-00001-of-00002.jsonl", 71)]);
    let shard = |index| {
        let dataset = DatasetConfig { shards: Some((4, index)), ..dataset(&dir, None) };
        files_of(&dataset, Purpose::Training, 42).unwrap()
    };
    let chosen = |files: Vec<SourceFile>| {
        let of_file = |file: &SourceFile| (0..100).filter(|&i| file.choice.has(i)).count();
        files.iter().map(of_file).sum::<usize>()
    };

    assert_eq!((0..4).map(shard).map(chosen).collect::<Vec<_>>(), [25, 25, 25, 26]);
}

#[test]
fn named_files_are_the_split_train() {
    let dir = folder(&[("a.jsonl", 1), ("sub/b.jsonl", 1), ("sub/c.jsonl", 1)]);
    let with = |files: &[&str], split| {
        let data_files = files.iter().map(|file| (*file).to_owned()).collect();
        files_of(&DatasetConfig { data_files, ..dataset(&dir, split) }, Purpose::Training, 42)
    };

    assert_eq!(
        names(read(&dir, with(&["sub/*.jsonl", "a.jsonl"], None).unwrap())),
        ["sub/b.jsonl", "sub/c.jsonl", "a.jsonl"]
    );
    assert!(matches!(with(&["d.jsonl"], None), Err(SourceError::NoMatch { .. })));
    assert!(matches!(with(&["a.jsonl"], Some("test")), Err(SourceError::SplitOfFiles { .. })));
}

#[test]
fn slice_of_a_pattern_is_of_all_its_files_together() {
    let dir = folder(&[("a.jsonl", 10), ("b.jsonl", 10), ("c.jsonl", 10)]);
    let with = |keys: &str| {
        let path = dir.path().join("*.jsonl");
        let entry = format!("[{{path: '{}', type: completion, {keys}}}]", path.display());
        let job = JobConfig::from_yaml_str(&format!("base_model: m\ndatasets: {entry}"), &[]).unwrap();
        let datasets = data_config(&job).unwrap().datasets;
        let files = datasets.iter().map(|dataset| files_of(dataset, Purpose::Training, 42));
        files.collect::<Result<Vec<_>, _>>().map(|files| files.concat())
    };
    let read = |split: &str| with(&format!("split: '{split}'")).map(|files| read(&dir, files));

    assert_eq!(read("train[:10]").unwrap(), [("a.jsonl".to_owned(), 0..10)]);
    assert_eq!(read("train[-12:]").unwrap(), [("b.jsonl".to_owned(), 8..10), ("c.jsonl".to_owned(), 0..10)]);
    assert_eq!(names(read("train").unwrap()), ["a.jsonl", "b.jsonl", "c.jsonl"]);
    assert!(matches!(read("test"), Err(SourceError::SplitOfFiles { .. })));
    assert!(matches!(with("name: en"), Err(SourceError::KeyOfFile { key: "name", .. })));
    let shard = with("shards: 15, shards_idx: 3").unwrap();
    let n_chosen = |file: &SourceFile| (0..10).filter(|&i| file.choice.has(i)).count();
    assert_eq!(shard.iter().map(n_chosen).sum::<usize>(), 2);
}

#[test]
fn test_data_of_a_folder_are_its_split_test() {
    let dir = folder(&[("train.jsonl", 1), ("test.jsonl", 1)]);
    let file = DatasetConfig::new(dir.path().join("train.jsonl"), DatasetType::Completion);

    let evaluated = |dataset: &DatasetConfig| names(read(&dir, files_of(dataset, Purpose::Evaluation, 42).unwrap()));

    assert_eq!(evaluated(&dataset(&dir, None)), ["test.jsonl"]);
    assert_eq!(evaluated(&file), ["train.jsonl"]);
}

#[test]
fn data_set_that_is_elsewhere_is_refused_with_a_command() {
    let of = |path: &str| files_of(&DatasetConfig::new(path, DatasetType::Completion), Purpose::Training, 42);

    let error = |path: &str| of(path).unwrap_err().to_string();
    assert!(error("https://host/data.jsonl").contains("`curl -LO https://host/data.jsonl`"));
    assert!(error("s3://bucket/data").contains("aws s3 cp"));
}

#[test]
fn part_of_a_plain_text_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.txt"), "text").unwrap();
    let file = DatasetConfig::new(dir.path().join("a.txt"), DatasetType::Completion);
    let of = |dataset: DatasetConfig| files_of(&dataset, Purpose::Training, 42).unwrap_err();

    let slice = DatasetConfig { split: Some(Split::parse("train[:5]").unwrap()), ..file.clone() };
    assert!(matches!(of(slice), SourceError::PartOfText { key: "split", .. }));
    assert!(matches!(
        of(DatasetConfig { shards: Some((2, 0)), ..file }),
        SourceError::PartOfText { key: "shards", .. }
    ));
}
