//! Tests of [`super`], from files to filled batches; in their own file because of their length.

use super::*;
use crate::config::datasets::DatasetType;
use crate::config::datasets::ExcessLength;
use crate::config::split::Split;
use crate::data::columns::{Columns, IGNORED};
use crate::data::config::DatasetConfig;
use crate::data::rows::RowShape;
use crate::data::sources::SourceError;
use crate::data::token_cache::cache_path;
use crate::data::tokenize::Progress;
use crate::data::tokenize_error::{Stopped, TokenizeError};
use phalanx_strategies::model::BatchShape;
use phalanx_strategies::program::Column;
use phalanx_strategies::rng::CounterRng;
use std::cell::Cell;
use std::path::PathBuf;

struct Files {
    dir: tempfile::TempDir,
}

impl Files {
    fn new(files: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn cache(&self) -> PathBuf {
        self.path("cache")
    }

    fn config(&self, kind: DatasetType, names: &[&str], sequence_len: usize) -> DataConfig {
        DataConfig::new(names.iter().map(|name| DatasetConfig::new(self.path(name), kind)).collect(), sequence_len)
    }

    fn prepare(&self, config: &DataConfig) -> Result<Prepared, PrepareError> {
        prepare(config, &Tokenizer::bytes(), &self.cache(), 264, &|_| Ok(()))
    }
}

#[derive(Debug, PartialEq)]
struct Batch {
    ids: Vec<i32>,
    labels: Vec<i32>,
    doc_start: Vec<i32>,
    n_predicted: usize,
}

fn batch(rows: &Rows, wanted: std::ops::Range<u64>) -> Batch {
    let wanted: Vec<u64> = wanted.collect();
    const COLUMNS: [Column; 3] = [Column::Ids, Column::Labels, Column::DocStart];
    let mut batch = Columns::new(COLUMNS, BatchShape { n_rows: wanted.len(), seq_len: rows.row_len() });
    let n_predicted = rows.fill(&wanted, CounterRng::new(0), &mut batch).unwrap();
    let [ids, labels, doc_start] = COLUMNS.map(|column| batch.of(column).to_vec());
    Batch { ids, labels, doc_start, n_predicted }
}

fn text(ids: &[i32]) -> String {
    let ids: Vec<u32> = ids.iter().filter(|&&id| id >= 0).map(|&id| id as u32).collect();
    Tokenizer::bytes().decode(&ids, false).unwrap()
}

fn lines(texts: &[&str]) -> String {
    texts.iter().map(|text| format!("{}\n", serde_json::json!({ "text": text }))).collect()
}

#[test]
fn conversations_with_tools_have_the_template_for_tools_of_their_tokenizer() {
    let plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}";
    let with_tools = "{% for t in tools %}[{{ t['function']['name'] }}]{% endfor %}{% for m in messages %}{{ m['content'] }}{% endfor %}";
    let turns = r#""messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]"#;
    let tools = r#""tools": [{"type": "function", "function": {"name": "f"}}]"#;
    let data = format!("{{{turns}}}\n{{{turns}, {tools}}}\n{{{turns}, \"tools\": []}}\n{{{turns}, \"tools\": null}}\n");
    let files = Files::new(&[("chat.jsonl", &data)]);
    let in_list =
        serde_json::json!([{"name": "default", "template": plain}, {"name": "tool_use", "template": with_tools}]);
    for in_files in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        Tokenizer::bytes().write_files(dir.path()).unwrap();
        let path = dir.path().join("tokenizer_config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config["chat_template"] = in_list.clone();
        if in_files {
            config["chat_template"] = "{{ raise_exception('not this one') }}".into();
            std::fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
            std::fs::write(dir.path().join("additional_chat_templates/tool_use.jinja"), with_tools).unwrap();
            std::fs::write(dir.path().join("chat_template.jinja"), plain).unwrap();
        }
        std::fs::write(&path, config.to_string()).unwrap();
        let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
        let config = files.config(DatasetType::ChatTemplate, &["chat.jsonl"], 8);
        let config = DataConfig { shuffle: false, ..config };

        let rows = prepare(&config, &tokenizer, &files.cache(), 264, &|_| Ok(())).unwrap().train;

        let texts: Vec<String> =
            (0..4).map(|row| text(&batch(&rows, row..row + 1).ids).replace("<|pad|>", "")).collect();
        assert_eq!(texts, ["ab", "[f]ab", "ab", "ab"], "in files: {in_files}");
        let exported = tempfile::tempdir().unwrap();
        tokenizer.write_files(exported.path()).unwrap();
        assert_eq!(Tokenizer::from_dir(exported.path()).unwrap().tool_template(), Some(with_tools));
    }
}

// numbers/tiny-llama2.json, "batch_order": tokens of the whole file, BOS first, cut into rows of seq; step t takes rows
// t*batch to (t+1)*batch; batch*(seq-1) predictions.
#[test]
fn unshuffled_rows_follow_the_reference_batch_order() {
    let [model, data, reference] =
        ["models/tiny-llama2", "text.txt", "numbers/tiny-llama2.json"].map(phalanx_needs::reference);
    let reference: serde_json::Value = serde_json::from_slice(&std::fs::read(reference).unwrap()).unwrap();
    let seq = reference["hyperparameters"]["seq"].as_u64().unwrap() as usize;
    let n_rows = reference["hyperparameters"]["batch"].as_u64().unwrap();
    let tokenizer = Tokenizer::from_dir(&model).unwrap();
    let files = Files::new(&[]);
    let config =
        DataConfig { shuffle: false, ..DataConfig::new(vec![DatasetConfig::new(&data, DatasetType::Completion)], seq) };

    let train = prepare(&config, &tokenizer, &files.cache(), 512, &|_| Ok(())).unwrap().train;

    // The ids of the library, which adds BOS by the rule in the file.
    let library = tokenizers::Tokenizer::from_file(model.join("tokenizer.json")).unwrap();
    let whole = library.encode(std::fs::read_to_string(&data).unwrap(), true).unwrap();
    let whole: Vec<i32> = whole.get_ids().iter().map(|&id| id as i32).collect();
    assert_eq!(whole[0], 1);
    assert_eq!(train.len(), whole.len() / seq);
    for micro_batch in 0..3 {
        let first = micro_batch * n_rows;
        let got = batch(&train, first..first + n_rows);
        assert_eq!(got.ids, whole[first as usize * seq..][..n_rows as usize * seq]);
        assert_eq!(got.n_predicted, n_rows as usize * (seq - 1));
    }
    // The text contains the window of the reference logits.
    let window: Vec<i32> =
        reference["logits"]["input_ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect();
    let at = whole.windows(window.len()).position(|ids| ids == window);
    assert!(at.is_some(), "the text does not contain the prompt of the reference logits");
}

#[test]
fn packed_rows_hold_isolated_documents_without_losing_any() {
    let texts = ["aaaaaa", "bb", "cccc", "d"];
    let files = Files::new(&[("data.jsonl", &lines(&texts))]);
    let config = DataConfig { sample_packing: true, ..files.config(DatasetType::Completion, &["data.jsonl"], 10) };

    let train = files.prepare(&config).unwrap().train;

    assert_eq!(train.len(), 3);
    let all = batch(&train, 0..3);
    for t in 0..all.ids.len() {
        let (row, seen_from) = (t / 10 * 10, all.doc_start[t] as usize);
        let seen = text(&all.ids[row + seen_from..=t]);
        let letters: std::collections::BTreeSet<char> =
            seen.replace("<|bos|>", "").replace("<|eos|>", "").chars().filter(char::is_ascii_lowercase).collect();
        assert!(letters.len() <= 1 || seen.contains("<|pad|>"), "position {t} sees {seen}");
    }
    let trained = text(&all.labels);
    assert_eq!(all.n_predicted, texts.iter().map(|text| text.len() + 1).sum::<usize>());
    for text in texts {
        assert!(trained.contains(&format!("{text}<|eos|>")), "{trained}");
    }
}

#[test]
fn each_unpacked_document_has_its_own_row() {
    let files = Files::new(&[("data.jsonl", &lines(&["ab", "c"]))]);

    let train = files.prepare(&files.config(DatasetType::Completion, &["data.jsonl"], 6)).unwrap().train;

    let all = batch(&train, 0..2);
    assert_eq!(text(&all.ids), "<|bos|>ab<|eos|><|pad|><|pad|><|bos|>c<|eos|><|pad|><|pad|><|pad|>");
    assert_eq!(text(&all.labels), "ab<|eos|>c<|eos|>");
}

#[test]
fn seed_tasks_train_on_their_outputs() {
    let Some(data) = phalanx_needs::shared("data/alpaca_seed_tasks.jsonl") else { return };
    let files = Files::new(&[]);
    let config = DataConfig {
        sample_packing: true,
        excess_length_strategy: ExcessLength::Drop,
        ..DataConfig::new(vec![DatasetConfig::new(&data, DatasetType::Alpaca)], 2048)
    };

    let prepared = files.prepare(&config).unwrap();

    let summary = &prepared.summaries[0];
    assert_eq!(summary.n_documents, 175);
    let trained = text(&batch(&prepared.train, 0..prepared.train.len() as u64).labels);
    assert!(trained.contains("Yes, you can have 1 oatmeal banana protein shake and 4 strips of bacon."));
    assert!(!trained.contains("### Instruction:") && !trained.contains("Is there anything I can eat for a breakfast"));
    assert_eq!(trained.matches("<|eos|>").count(), 175 - summary.n_dropped);
}

#[test]
fn second_run_reads_the_cache_and_gives_the_same_rows() {
    let files = Files::new(&[("data.txt", "It was a dark and stormy night.")]);
    let config = files.config(DatasetType::Completion, &["data.txt"], 8);
    let first = files.prepare(&config).unwrap();

    let tokenised_again = Cell::new(false);
    let second = prepare(&config, &Tokenizer::bytes(), &files.cache(), 264, &|_| {
        tokenised_again.set(true);
        Ok(())
    })
    .unwrap();

    assert!(!tokenised_again.get() && second.summaries[0].from_cache && !first.summaries[0].from_cache);
    assert_eq!(batch(&second.train, 0..4), batch(&first.train, 0..4));
}

#[test]
fn changed_data_or_options_find_no_stale_tokens() {
    let files = Files::new(&[("data.jsonl", &lines(&["one", "two"]))]);
    let config = files.config(DatasetType::Completion, &["data.jsonl"], 8);
    files.prepare(&config).unwrap();
    std::fs::write(files.path("data.jsonl"), lines(&["six", "ten"])).unwrap();

    let changed = files.prepare(&config).unwrap();

    assert!(!changed.summaries[0].from_cache);
    assert_eq!(text(&batch(&changed.train, 0..2).labels), "six<|eos|>ten<|eos|>");
    let longer = DataConfig { sequence_len: 16, ..config };
    assert!(files.prepare(&longer).unwrap().summaries[0].from_cache, "rows of another length use the same tokens");
}

#[test]
fn another_tokenizer_or_mask_finds_no_stale_tokens() {
    let record = r#"{"instruction":"Add.","output":"3"}"#;
    let files = Files::new(&[("data.jsonl", record)]);
    let config = files.config(DatasetType::Alpaca, &["data.jsonl"], 256);
    let first = files.prepare(&config).unwrap();
    Tokenizer::bytes().write_files(files.dir.path()).unwrap();
    std::fs::write(files.path("tokenizer_config.json"), r#"{"eos_token": null}"#).unwrap();
    let other = Tokenizer::from_dir(files.dir.path()).unwrap();

    let without_eos = prepare(&config, &other, &files.cache(), 264, &|_| Ok(())).unwrap();
    let with_inputs = files.prepare(&DataConfig { train_on_inputs: true, ..config }).unwrap();

    assert_eq!(without_eos.summaries[0].n_tokens, first.summaries[0].n_tokens - 1);
    assert!(with_inputs.train.n_predicted(&[0]).unwrap() > first.train.n_predicted(&[0]).unwrap());
}

#[test]
fn damaged_cache_is_rebuilt() {
    let files = Files::new(&[("data.txt", "It was a dark and stormy night.")]);
    let config = files.config(DatasetType::Completion, &["data.txt"], 8);
    let good = batch(&files.prepare(&config).unwrap().train, 0..4);
    let cached = std::fs::read_dir(files.cache()).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&cached).unwrap();
    bytes[140] ^= 1;
    // A new file, like a damaged copy: the mapped one must not change.
    std::fs::remove_file(&cached).unwrap();
    std::fs::write(&cached, &bytes).unwrap();

    let rebuilt = files.prepare(&config).unwrap();

    assert!(!rebuilt.summaries[0].from_cache);
    assert_eq!(batch(&rebuilt.train, 0..4), good);
    assert!(files.prepare(&config).unwrap().summaries[0].from_cache);
    let key = blake3::Hash::from_hex(cached.file_stem().unwrap().to_str().unwrap()).unwrap();
    assert_eq!(cache_path(&files.cache(), key.as_bytes()), cached);
}

#[test]
fn validation_rows_are_disjoint_from_training_rows_and_depend_only_on_the_seed() {
    let texts: Vec<String> = (0..40).map(|n| format!("document {n:02}")).collect();
    let files = Files::new(&[("data.jsonl", &lines(&texts.iter().map(String::as_str).collect::<Vec<_>>()))]);
    let with = |val_set_size, seed| {
        let config = files.config(DatasetType::Completion, &["data.jsonl"], 16);
        let prepared = files.prepare(&DataConfig { val_set_size, seed, ..config }).unwrap();
        let validation = prepared.validation.unwrap();
        [&prepared.train, &validation]
            .map(|rows| (0..rows.len() as u64).map(|row| text(&batch(rows, row..row + 1).ids)).collect::<Vec<_>>())
    };

    let [train, validation] = with(0.25, 1);

    assert_eq!((train.len(), validation.len()), (30, 10));
    let mut all = [train.clone(), validation.clone()].concat();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 40);
    assert_eq!(with(10.0, 1), [train.clone(), validation]);
    assert_ne!(with(0.25, 2)[0], train);
}

#[test]
fn number_of_samples_held_out_is_that_number_however_many_a_packed_row_holds() {
    let texts: Vec<String> = (0..40).map(|n| format!("document {n:02}")).collect();
    let files = Files::new(&[("data.jsonl", &lines(&texts.iter().map(String::as_str).collect::<Vec<_>>()))]);
    let documents = |rows: &Rows| {
        let rows = batch(rows, 0..rows.len() as u64);
        let text = text(&rows.ids);
        texts.iter().filter(|wanted| text.contains(wanted.as_str())).cloned().collect::<Vec<String>>()
    };
    for sample_packing_sequentially in [false, true] {
        let config = DataConfig {
            val_set_size: 6.0,
            sample_packing: true,
            sample_packing_sequentially,
            ..files.config(DatasetType::Completion, &["data.jsonl"], 64)
        };

        let prepared = files.prepare(&config).unwrap();

        let validation = prepared.validation.unwrap();
        let sides = [&prepared.train, &validation].map(documents);
        assert_eq!(sides.each_ref().map(Vec::len), [34, 6]);
        let mut all = sides.concat();
        all.sort();
        assert_eq!(all, texts);
        let n_rows = prepared.train.len() + validation.len();
        assert!(n_rows < 15, "rows are packed: {n_rows}");
        assert_eq!(prepared.summaries[0].n_rows, n_rows);
    }
}

#[test]
fn texts_of_several_files_are_trained_on_to_their_ends_also_short_ones() {
    let files = Files::new(&[("a.txt", "abcdefghijkl"), ("b.txt", "mno"), ("c.txt", "")]);
    let config = files.config(DatasetType::Completion, &["a.txt", "b.txt", "c.txt"], 8);

    let prepared = files.prepare(&config).unwrap();

    let rows = batch(&prepared.train, 0..prepared.train.len() as u64);
    let text = text(&rows.ids);
    let tokens = text.replace("<|pad|>", "").replace("<|bos|>", "");
    assert_eq!(tokens, "abcdefghijklmno", "{text}");
}

#[test]
fn split_that_leaves_a_side_empty_is_refused() {
    let files = Files::new(&[("data.jsonl", &lines(&["a", "b"]))]);

    for val_set_size in [2.0, 5.0] {
        let config = files.config(DatasetType::Completion, &["data.jsonl"], 8);
        let error = files.prepare(&DataConfig { val_set_size, ..config }).unwrap_err();
        assert!(matches!(error, PrepareError::Split { n_samples: 2, .. }), "{error}");
    }
}

#[test]
fn share_of_few_rows_holds_out_at_least_one() {
    let files = Files::new(&[("data.jsonl", &lines(&["a", "b"]))]);
    let config = files.config(DatasetType::Completion, &["data.jsonl"], 8);

    let prepared = files.prepare(&DataConfig { val_set_size: 0.01, ..config }).unwrap();

    assert_eq!((prepared.train.len(), prepared.validation.map(|rows| rows.len())), (1, Some(1)));
}

#[test]
fn rows_follow_the_order_of_the_datasets() {
    let files = Files::new(&[("a.jsonl", &lines(&["ab"])), ("b.txt", "0123456789")]);

    let prepared = files.prepare(&files.config(DatasetType::Completion, &["b.txt", "a.jsonl"], 5)).unwrap();

    assert_eq!(text(&batch(&prepared.train, 0..3).ids), "<|bos|>012345678<|bos|>ab<|eos|><|pad|>");
}

#[test]
fn document_longer_than_a_row_is_refused_dropped_or_truncated() {
    let line = |text: &str| serde_json::json!({ "segments": [{ "text": text, "label": true }] }).to_string() + "\n";
    let files = Files::new(&[("data.jsonl", &[line("short"), line("much too long for a row")].concat())]);
    let with = |excess_length_strategy| {
        let config = files.config(DatasetType::InputOutput, &["data.jsonl"], 10);
        files.prepare(&DataConfig { excess_length_strategy, ..config })
    };

    let error = with(ExcessLength::Error).unwrap_err();

    assert!(matches!(error, PrepareError::TooLong { line: 2, len: 23, limit: 10, .. }), "{error}");
    assert!(error.to_string().contains("excess_length_strategy"), "{error}");
    assert_eq!(with(ExcessLength::Drop).unwrap().train.len(), 1);
    assert_eq!(files.config(DatasetType::Alpaca, &[], 10).excess_length_strategy, ExcessLength::Drop);
    let truncated = with(ExcessLength::Truncate).unwrap();
    assert_eq!(text(&batch(&truncated.train, 1..2).labels), "uch too l");
    assert_eq!(truncated.summaries[0].n_truncated, 1);
}

#[test]
fn long_text_is_cut_into_rows_and_short_documents_are_dropped() {
    let files = Files::new(&[("data.jsonl", &lines(&["a", "abcdefghijkl", "bcdefg"]))]);
    let config = DataConfig { min_sample_len: 4, ..files.config(DatasetType::Completion, &["data.jsonl"], 8) };

    let prepared = files.prepare(&config).unwrap();

    let summary = &prepared.summaries[0];
    assert_eq!((summary.n_cut, summary.n_short, summary.n_kept_tokens), (1, 1, 22));
    assert_eq!(text(&batch(&prepared.train, 0..2).ids), "<|bos|>abcdefghijkl<|eos|><|pad|><|pad|>");
    let in_order = DataConfig { sample_packing: true, sample_packing_sequentially: true, ..config };
    assert_eq!(files.prepare(&in_order).unwrap().train.len(), 3);
}

#[test]
fn records_without_a_template_become_the_tokens_that_they_say() {
    let rows = "{\"input_ids\":[104,105,33],\"labels\":[-100,105,33]}\n{\"input_ids\":[104],\"labels\":[104]}\n";
    let segments = "{\"segments\":[{\"text\":\"hi\",\"label\":false},{\"text\":\"!\",\"label\":true}]}\n";
    let files = Files::new(&[("rows.jsonl", rows), ("segments.jsonl", segments)]);

    let tokens = files.prepare(&files.config(DatasetType::Tokenized, &["rows.jsonl"], 4)).unwrap();
    let texts = files.prepare(&files.config(DatasetType::InputOutput, &["segments.jsonl"], 4)).unwrap();

    assert_eq!((text(&batch(&tokens.train, 0..1).labels), tokens.summaries[0].n_empty), ("i!".to_owned(), 1));
    assert_eq!(text(&batch(&texts.train, 0..1).ids), "hi!<|pad|>");
    assert_eq!(text(&batch(&texts.train, 0..1).labels), "!");
}

#[test]
fn null_answers_are_left_out_and_counted() {
    let rows = "{\"instruction\":\"a\",\"output\":null}\n{\"instruction\":\"a\",\"output\":\"b\"}\n";
    let files = Files::new(&[("data.jsonl", rows)]);

    let prepared = files.prepare(&files.config(DatasetType::Alpaca, &["data.jsonl"], 256)).unwrap();

    assert_eq!((prepared.train.len(), prepared.summaries[0].n_empty), (1, 1));
}

#[test]
fn document_without_trained_tokens_is_left_out() {
    let user = r#"{"messages":[{"role":"user","content":"Hi"}]}"#;
    let both = r#"{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Ho"}]}"#;
    let files = Files::new(&[("some.jsonl", &format!("{user}\n{both}\n")), ("none.jsonl", user)]);

    let some = files.prepare(&files.config(DatasetType::ChatTemplate, &["some.jsonl"], 64)).unwrap();
    let none = files.prepare(&files.config(DatasetType::ChatTemplate, &["none.jsonl"], 64));

    assert_eq!((some.train.len(), some.summaries[0].n_empty), (1, 1));
    assert!(batch(&some.train, 0..1).labels.iter().filter(|&&label| label != IGNORED).count() == 3);
    assert!(matches!(none, Err(PrepareError::Empty { n_documents: 1, n_empty: 1, .. })));
}

#[test]
fn error_for_a_missing_file_suggests_the_nearest_name() {
    let files = Files::new(&[("stories.jsonl", "{}"), ("other.txt", "")]);

    let error = files.prepare(&files.config(DatasetType::Completion, &["storeis.jsonl"], 8)).unwrap_err();

    assert!(error.to_string().ends_with("does not exist; did you mean stories.jsonl?"), "{error}");
}

#[test]
fn folder_stands_for_the_file_of_its_split() {
    let files = Files::new(&[("train.jsonl", &lines(&["t"])), ("extra.jsonl", &lines(&["e"]))]);
    let with = |split: Option<&str>| {
        let mut config = files.config(DatasetType::Completion, &["."], 4);
        config.datasets[0].split = split.map(|split| Split::parse(split).unwrap());
        files.prepare(&config).map(|prepared| text(&batch(&prepared.train, 0..1).labels))
    };

    assert_eq!(with(None).unwrap(), "t<|eos|>");
    assert_eq!(with(Some("extra")).unwrap(), "e<|eos|>");
    assert!(matches!(with(Some("test")), Err(PrepareError::Source(SourceError::NoSplit { .. }))));
}

#[test]
fn unsupported_and_empty_files_are_refused() {
    let files =
        Files::new(&[("a.zip", ""), ("a.parquet.gz", ""), ("a.txt", "text"), ("empty.txt", ""), ("empty.jsonl", "")]);
    let error = |kind, name| files.prepare(&files.config(kind, &[name], 8)).unwrap_err();

    assert!(matches!(error(DatasetType::Alpaca, "a.zip"), PrepareError::Source(SourceError::Format { .. })));
    assert!(matches!(
        error(DatasetType::Alpaca, "a.parquet.gz"),
        PrepareError::Source(SourceError::CompressedParquet { .. })
    ));
    assert!(matches!(error(DatasetType::Alpaca, "a.txt"), PrepareError::Source(SourceError::TextOfOtherType { .. })));
    assert!(matches!(error(DatasetType::Completion, "empty.txt"), PrepareError::TooShort { n_tokens: 1, .. }));
    assert!(matches!(error(DatasetType::Completion, "empty.jsonl"), PrepareError::Empty { n_documents: 0, .. }));
}

#[test]
fn tokenizer_of_another_model_is_refused_with_both_sizes() {
    let files = Files::new(&[("data.txt", "some text")]);
    let config = files.config(DatasetType::Completion, &["data.txt"], 4);

    let error = prepare(&config, &Tokenizer::bytes(), &files.cache(), 200, &|_| Ok(())).unwrap_err();

    assert_eq!(
        error,
        PrepareError::Vocabulary {
            path: files.path("data.txt"),
            id: 256,
            token: "<|bos|>".to_owned(),
            tokenizer_size: 264,
            model_size: 200
        }
    );
}

#[test]
fn progress_ends_at_the_length_of_the_file() {
    let files = Files::new(&[("data.jsonl", &lines(&["abc", "def"]))]);
    let config = files.config(DatasetType::Completion, &["data.jsonl"], 8);
    let last = Cell::new((0, 0));

    prepare(&config, &Tokenizer::bytes(), &files.cache(), 264, &|p| {
        last.set((p.done_bytes, p.total_bytes));
        Ok(())
    })
    .unwrap();

    let len = std::fs::metadata(files.path("data.jsonl")).unwrap().len();
    assert_eq!(last.get(), (len, len));
}

#[test]
fn repeated_documents_are_kept_once_among_all_files() {
    let (first, second) = (lines(&["a", "b", "a"]), lines(&["b", "c"]));
    let files = Files::new(&[("a.jsonl", &first), ("b.jsonl", &second), ("c.jsonl", &lines(&["c"]))]);
    let config = files.config(DatasetType::Completion, &["a.jsonl", "b.jsonl", "c.jsonl"], 4);

    let all = files.prepare(&config).unwrap();
    let once = files.prepare(&DataConfig { deduplicate: true, ..config }).unwrap();

    assert_eq!((all.train.len(), once.train.len()), (6, 3));
    assert_eq!(once.summaries.iter().map(|s| s.n_repeated).collect::<Vec<_>>(), [1, 1]);
}

#[test]
fn test_datasets_are_evaluated_on_and_not_trained_on() {
    let files = Files::new(&[("a.jsonl", &lines(&["a", "b"])), ("t.jsonl", &lines(&["t"]))]);
    let config = files.config(DatasetType::Completion, &["a.jsonl"], 4);
    let test = files.config(DatasetType::Completion, &["t.jsonl"], 4).datasets;

    let prepared = files.prepare(&DataConfig { test_datasets: test, ..config }).unwrap();

    assert_eq!((prepared.train.len(), prepared.digests.len(), prepared.test_digests.len()), (2, 1, 1));
    assert_eq!(text(&batch(&prepared.validation.unwrap(), 0..1).labels), "t<|eos|>");
    let mut twice = files.config(DatasetType::Completion, &["a.jsonl"], 4);
    twice.test_datasets = files.config(DatasetType::Completion, &["t.jsonl"], 4).datasets;
    twice.test_datasets[0].weight = 2.0;
    assert_eq!(files.prepare(&twice).unwrap().validation.unwrap().len(), 2);
}

#[test]
fn slice_of_records_is_trained_on_alone() {
    let files = Files::new(&[("a.jsonl", &lines(&["a", "b", "c", "d"]))]);
    let with = |split: &str| {
        let mut config = files.config(DatasetType::Completion, &["a.jsonl"], 4);
        config.datasets[0].split = Some(Split::parse(split).unwrap());
        let train = files.prepare(&config).unwrap().train;
        text(&batch(&train, 0..train.len() as u64).labels)
    };

    assert_eq!(with("train[1:3]"), "b<|eos|>c<|eos|>");
    assert_eq!(with("train[-25%:]"), "d<|eos|>");
    assert_eq!(with("train[3:]+train[:1]"), "d<|eos|>a<|eos|>");
}

#[test]
fn file_that_changes_while_it_is_tokenized_leaves_no_tokens() {
    let files = Files::new(&[("a.jsonl", &lines(&["alpha"])), ("b.txt", &"alpha beta ".repeat(20))]);
    let gzip = |text: &str| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut encoder, text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let zstd = |text: &str| zstd::encode_all(text.as_bytes(), 1).unwrap();
    for name in ["a.jsonl", "b.txt", "c.jsonl.gz", "d.jsonl.zst", "e.txt.gz"] {
        let pack = |text: &str| match name.rsplit('.').next() {
            Some("gz") => gzip(text),
            Some("zst") => zstd(text),
            _ => text.as_bytes().to_vec(),
        };
        let (kind, path) = (DatasetType::Completion, files.path(name));
        let text = if name.contains("txt") { "alpha beta ".repeat(20) } else { lines(&["alpha"]) };
        let before = pack(&text);
        std::fs::write(&path, &before).unwrap();
        let change = |_: Progress<'_>| {
            std::fs::write(&path, pack(&text.replace("alpha", "bravo"))).unwrap();
            Ok(())
        };

        let changed = prepare(&files.config(kind, &[name], 8), &Tokenizer::bytes(), &files.cache(), 264, &change);

        assert!(changed.unwrap_err().to_string().contains("changed while it was read"));
        let kept = std::fs::read_dir(files.cache()).unwrap().map(|entry| entry.unwrap().file_name());
        assert!(!kept.into_iter().any(|name| name.to_string_lossy().ends_with(".tokens")), "{name}");
        std::fs::write(&path, before).unwrap();
        assert!(files.prepare(&files.config(kind, &[name], 8)).is_ok());
        std::fs::remove_dir_all(files.cache()).unwrap();
    }
}

#[test]
fn stop_while_a_file_is_tokenized_keeps_the_files_before_it() {
    let files = Files::new(&[("a.txt", "alpha beta"), ("b.txt", "gamma delta")]);
    let config = files.config(DatasetType::Completion, &["a.txt", "b.txt"], 4);
    let at_second = |p: Progress<'_>| if p.path.ends_with("b.txt") { Err(Stopped) } else { Ok(()) };

    let stopped = prepare(&config, &Tokenizer::bytes(), &files.cache(), 264, &at_second).unwrap_err();

    assert_eq!(stopped, PrepareError::Tokenize(TokenizeError::Stopped(Stopped)));
    let kept = std::fs::read_dir(files.cache()).unwrap().map(|entry| entry.unwrap().path());
    let kept: Vec<_> = kept.map(|path| path.extension().unwrap().to_owned()).collect();
    assert_eq!(kept, ["tokens"], "nothing half written stays");
    let again = prepare(&config, &Tokenizer::bytes(), &files.cache(), 264, &|_| Ok(())).unwrap();
    assert_eq!(again.summaries.iter().map(|summary| summary.from_cache).collect::<Vec<_>>(), [true, false]);
}

#[test]
fn tokens_are_read_from_more_files_than_stay_open() {
    let names: Vec<String> = (0..3).map(|n| format!("{n}.jsonl")).collect();
    let texts: Vec<String> = names.iter().map(|name| lines(&[name])).collect();
    let contents: Vec<(&str, &str)> = names.iter().zip(&texts).map(|(name, text)| (&name[..], &text[..])).collect();
    let files = Files::new(&contents);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let config = files.config(DatasetType::Completion, &names, 16);
    let sources = sources(&config.datasets, Purpose::Training, 42).unwrap();
    let tokenizer = Tokenizer::bytes();
    let mut preparer = Preparer::new(sources, Cow::Borrowed(&config), Cow::Borrowed(&tokenizer), &files.cache(), 264);
    preparer.n_open_left = 1;

    let loaded = preparer.all(&|_| Ok(())).unwrap();
    let rows = Rows::new(Arc::new(RowStore::new(loaded.parts, RowShape { len: 16, second: None, pad_id: 0 })), None);

    assert!(text(&batch(&rows, 0..3).ids).contains("2.jsonl"));
    for entry in std::fs::read_dir(files.cache()).unwrap() {
        let path = entry.unwrap().path();
        let copy = path.with_extension("copy");
        std::fs::copy(&path, &copy).unwrap();
        std::fs::rename(copy, path).unwrap();
    }
    let counted = |row| rows.n_predicted(&[row]);
    assert!(counted(0).is_ok(), "the first file is open");
    assert!(counted(2).unwrap_err().to_string().contains("replaced while it was used"));
}
