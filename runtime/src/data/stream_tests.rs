//! Tests of [`super`], from files to the order of rows.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::*;
use crate::config::datasets::DatasetType;
use crate::data::columns::Columns;
use crate::data::config::{DataConfig, DatasetConfig};
use crate::data::prepare::prepare;
use crate::data::rows::Rows;
use crate::data::tokenizer::Tokenizer;
use phalanx_strategies::model::BatchShape;
use phalanx_strategies::program::Column;
use phalanx_strategies::rng::CounterRng;

const S: usize = 4;
/// Rows of the files that [`files`] writes.
const ROWS: [usize; 4] = [5, 2, 7, 3];

/// JSON lines of one row each; the text of a row names its file and its place there.
fn files(dir: &Path) -> Vec<PathBuf> {
    let file = |(nth, n_rows): (usize, &usize)| {
        let path = dir.join(format!("{nth}.jsonl"));
        let lines = (0..*n_rows).map(|row| format!("{{\"text\": \"{nth}{row}\"}}\n"));
        std::fs::write(&path, lines.collect::<String>()).unwrap();
        path
    };
    ROWS.iter().enumerate().map(file).collect()
}

fn streamed(files: &[PathBuf], n_rows: u64, change: impl Fn(&mut DataConfig)) -> Result<Rows, PrepareError> {
    let datasets = files.iter().map(|path| DatasetConfig::new(path, DatasetType::Completion)).collect();
    let mut config = DataConfig { stream_rows: Some(n_rows), ..DataConfig::new(datasets, S) };
    change(&mut config);
    let cache = files[0].parent().unwrap().join("cache");
    prepare(&config, &Tokenizer::bytes(), &cache, 264, &|_| Ok(())).map(|prepared| prepared.train)
}

/// The names of the rows at these positions, each of two digits.
fn names(rows: &Rows, positions: std::ops::Range<u64>) -> Vec<String> {
    let name = |position| {
        let mut batch = Columns::new([Column::Ids], BatchShape { n_rows: 1, seq_len: S });
        rows.fill(&[position], CounterRng::new(0), &mut batch).unwrap();
        batch.of(Column::Ids)[1..3].iter().map(|id| char::from(*id as u8)).collect()
    };
    positions.map(name).collect()
}

/// The files of consecutive rows, each once per run of rows.
fn runs(names: &[String]) -> String {
    let mut files: Vec<char> = names.iter().map(|name| name.chars().next().unwrap()).collect();
    files.dedup();
    files.into_iter().collect()
}

#[test]
fn each_pass_visits_every_row_once_file_by_file_in_random_orders() {
    let dir = tempfile::tempdir().unwrap();
    let rows = streamed(&files(dir.path()), 1000, |_| ()).unwrap();
    rows.stream().unwrap().prepare_now(&|_| Ok(())).unwrap();
    let n: u64 = ROWS.iter().sum::<usize>() as u64;

    let passes: Vec<Vec<String>> = (0..3).map(|pass| names(&rows, pass * n..(pass + 1) * n)).collect();

    for pass in &passes {
        let all: BTreeSet<&String> = pass.iter().collect();
        assert_eq!((all.len(), runs(pass).len()), (n as usize, ROWS.len()), "{pass:?}");
    }
    assert_eq!(runs(&passes[0]), runs(&passes[1]));
    assert_ne!(passes[0], passes[1]);
    let sorted = |seed| {
        let rows = streamed(&files(dir.path()), 1000, |config| (config.shuffle, config.seed) = (false, seed)).unwrap();
        rows.stream().unwrap().prepare_now(&|_| Ok(())).unwrap();
        names(&rows, 0..n)
    };
    assert!(sorted(1).is_sorted() && sorted(1) == sorted(2));
    let orders: BTreeSet<String> = (0..20)
        .map(|seed| {
            let rows = streamed(&files(dir.path()), 1000, |config| config.seed = seed).unwrap();
            rows.stream().unwrap().prepare_now(&|_| Ok(())).unwrap();
            runs(&names(&rows, 0..n))
        })
        .collect();
    assert!(orders.len() > 8, "20 seeds have the orders {orders:?}");
}

#[test]
fn rows_of_the_first_file_are_ready_before_the_others_and_stay_where_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let rows = streamed(&files(dir.path()), 17, |_| ()).unwrap();
    let n_first = rows.len() as u64;
    assert!(ROWS.contains(&rows.len()));
    assert_eq!((rows.are_ready(n_first - 1), rows.are_ready(n_first)), (Ok(true), Ok(false)));
    let before = names(&rows, 0..n_first);

    rows.stream().unwrap().prepare_in_background().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !rows.are_ready(16).unwrap() {
        assert!(Instant::now() < deadline, "the other files are not prepared");
        std::thread::sleep(Duration::from_millis(1));
    }

    assert_eq!(names(&rows, 0..n_first), before);
    assert_eq!(names(&rows, 0..17).into_iter().collect::<BTreeSet<_>>().len(), 17);
}

#[test]
fn file_that_cannot_be_used_is_an_error_only_for_rows_that_need_it() {
    let dir = tempfile::tempdir().unwrap();
    let paths = files(dir.path());
    std::fs::write(&paths[2], "{\"text\": \"20\"}\n{\"body\": 1}\n").unwrap();
    let in_file_order = |config: &mut DataConfig| config.shuffle = false;

    let all = streamed(&paths, 10, in_file_order).unwrap();
    let of_all = all.stream().unwrap().prepare_now(&|_| Ok(()));
    let few = streamed(&paths, 7, in_file_order).unwrap();
    let of_few = few.stream().unwrap().prepare_now(&|_| Ok(()));

    assert!(of_all.clone().unwrap_err().to_string().contains("2.jsonl:2"), "{of_all:?}");
    assert_eq!((all.are_ready(6), all.are_ready(7)), (Ok(true), of_all.map(|()| true)));
    assert_eq!((of_few, few.len()), (Ok(()), 7));
}

#[test]
fn empty_files_are_passed_over_and_a_stream_of_nothing_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let paths = files(dir.path());
    [0, 3].iter().for_each(|nth| std::fs::write(&paths[*nth], "").unwrap());

    let rows = streamed(&paths, 1000, |_| ()).unwrap();
    rows.stream().unwrap().prepare_now(&|_| Ok(())).unwrap();

    assert_eq!(rows.len(), ROWS[1] + ROWS[2]);
    paths.iter().for_each(|path| std::fs::write(path, "").unwrap());
    assert!(matches!(streamed(&paths, 1000, |_| ()), Err(PrepareError::Empty { .. })));
}

#[test]
fn files_are_told_apart_by_name_and_by_length() {
    let dir = tempfile::tempdir().unwrap();
    let paths = files(dir.path());
    let of = |paths: &[PathBuf]| *streamed(paths, 10, |_| ()).unwrap().stream().unwrap().files();
    let before = of(&paths);
    assert_eq!(of(&paths), before);
    assert!(of(&paths[..3]).names != before.names);

    std::fs::write(&paths[1], "{\"text\": \"longer\"}\n").unwrap();

    let after = of(&paths);
    assert!(after.names == before.names && after.lengths != before.lengths);
}
