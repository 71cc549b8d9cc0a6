//! Pages of exported files: a rank reads and verifies each page of its elements once, and no other byte.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::json;

use super::*;
use crate::hf::dtype::Dtype;
use crate::hf::export::{Export, ExportTensor, Values, export_model};
use crate::hf::layout::encode_header;
use crate::hf::source::TensorSource;

/// Lengths of the tensors `a` and `b`, whose elements are whole numbers that every type represents.
const N: [usize; 2] = [9_001, 300_017];

fn element(tensor: usize, index: usize) -> f32 {
    ((index * 7 + tensor * 13) % 251) as f32
}

fn values(tensor: usize) -> Vec<f32> {
    (0..N[tensor]).map(|i| element(tensor, i)).collect()
}

/// A directory with an export of both tensors.
fn exported(dtype: Dtype) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let [a, b] = [0, 1].map(values);
    let tensors = [
        ExportTensor { name: "a", shape: &N[..1], values: Values::Here(&a) },
        ExportTensor { name: "b", shape: &N[1..], values: Values::Here(&b) },
    ];
    let config = json!({});
    let export = Export {
        config: &config,
        generation_config: None,
        tensors: &tensors,
        dtype,
        files: &[],
        max_shard_bytes: u64::MAX,
    };
    export_model(&root.path().join("model"), &export).unwrap();
    root
}

fn weights(root: &Path) -> PathBuf {
    root.join("model/model.safetensors")
}

fn open(root: &Path) -> Result<TensorSource, HfError> {
    TensorSource::open(&root.join("model"))
}

fn header_bytes(weights: &Path) -> u64 {
    let bytes = std::fs::read(weights).unwrap();
    8 + u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

fn flip(path: &Path, at: u64) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at as usize] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

/// Runs of a tensor's elements, with gaps between their places: a rank's part of a tensor that is split by columns.
fn runs(ends: &[Index], n: usize, gap: usize) -> Vec<(usize, Range<usize>)> {
    let mut ends: Vec<usize> = ends.iter().map(|end| end.index(n + 1)).collect();
    ends.sort_unstable();
    let mut place = 0;
    let run = |ends: &[usize]| {
        let at = place..place + ends[1] - ends[0];
        place = at.end + gap;
        (ends[0], at)
    };
    ends.chunks_exact(2).map(run).collect()
}

fn check_values(tensor: usize, runs: &[(usize, Range<usize>)], out: &[f32]) {
    let mut untouched = vec![true; out.len()];
    for (first, at) in runs {
        for (i, place) in at.clone().enumerate() {
            assert_eq!(out[place], element(tensor, first + i), "element {}", first + i);
            untouched[place] = false;
        }
    }
    assert!(out.iter().zip(untouched).all(|(x, untouched)| !untouched || *x == -1.0), "wrote outside the runs");
}

fn room(runs: &[(usize, Range<usize>)]) -> Vec<f32> {
    vec![-1.0; runs.last().map_or(0, |(_, at)| at.end) + 1]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn runs_of_an_export_are_read_in_whole_pages_each_once(
        ends in prop::collection::vec(any::<Index>(), 2..40), gap in 0usize..3, tensor in 0usize..2,
        dtype in prop::sample::select(vec![Dtype::F32, Dtype::BF16, Dtype::F16]),
    ) {
        let root = exported(dtype);
        let runs = runs(&ends, N[tensor], gap);
        let mut out = room(&runs);
        let source = open(root.path()).unwrap();
        let header = header_bytes(&weights(root.path()));
        prop_assert_eq!((source.bytes_read(), header % PAGE_BYTES), (header + HEADER_DIGEST_BYTES, 0));

        source.read_runs_into(["a", "b"][tensor], runs.clone(), &mut out).unwrap();

        check_values(tensor, &runs, &out);
        let bytes = dtype.bytes();
        let (start, end) = (tensor * N[0] * bytes, (N[0] + N[1]) * bytes);
        let page = |element: usize| (start + element * bytes) / PAGE_BYTES as usize;
        let held = runs.iter().filter(|(_, at)| !at.is_empty());
        let pages: BTreeSet<usize> = held.flat_map(|(first, at)| page(*first)..=page(first + at.len() - 1)).collect();
        let of_page = |page: &usize| (PAGE_BYTES as usize).min(end - page * PAGE_BYTES as usize);
        let digests = pages.last().map_or(0, |last| 1 + last - pages.first().unwrap()) * DIGEST_BYTES;
        let expected = pages.iter().map(of_page).sum::<usize>() + digests;
        prop_assert_eq!(source.bytes_read() - header - HEADER_DIGEST_BYTES, expected as u64);
    }

    #[test]
    fn runs_of_a_file_without_digests_are_read_to_the_byte(
        ends in prop::collection::vec(any::<Index>(), 2..40), gap in 0usize..3, odd: bool,
        dtype in prop::sample::select(vec![Dtype::F32, Dtype::BF16, Dtype::F16]),
    ) {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("model.safetensors");
        // A tensor of one byte before it puts every element at an odd address.
        let before = usize::from(odd);
        let header = encode_header(&[("x", Dtype::U8, &[before]), ("b", dtype, &N[1..])], &BTreeMap::new(), 8);
        let mut bytes = [&header[..], &vec![0; before]].concat();
        for x in values(1) {
            match dtype {
                Dtype::F32 => bytes.extend(x.to_le_bytes()),
                Dtype::BF16 => bytes.extend(half::bf16::from_f32(x).to_le_bytes()),
                _ => bytes.extend(half::f16::from_f32(x).to_le_bytes()),
            }
        }
        std::fs::write(&path, bytes).unwrap();
        let runs = runs(&ends, N[1], gap);
        let mut out = room(&runs);
        let source = TensorSource::open(root.path()).unwrap();

        source.read_runs_into("b", runs.clone(), &mut out).unwrap();

        check_values(1, &runs, &out);
        let held: usize = runs.iter().map(|(_, at)| at.len() * dtype.bytes()).sum();
        prop_assert_eq!(source.bytes_read(), (header.len() + held) as u64);
    }
}

#[test]
fn runs_that_do_not_ascend_or_leave_the_tensor_are_refused() {
    let root = exported(Dtype::BF16);
    let source = open(root.path()).unwrap();
    let mut out = [0.0; 8];

    for runs in [vec![(4, 0..2), (5, 2..4)], vec![(0, 2..4), (9, 3..5)], vec![(N[0] - 1, 0..2)], vec![(0, 7..9)]] {
        let error = source.read_runs_into("a", runs.clone(), &mut out).unwrap_err();
        assert!(matches!(error, HfError::Run { .. }), "{runs:?}: {error}");
    }
}

#[test]
fn damaged_page_fails_only_reads_that_need_it() {
    let root = exported(Dtype::BF16);
    let path = weights(root.path());
    let start_of_b = header_bytes(&path) + 2 * N[0] as u64;
    let at = start_of_b + 200_001;
    flip(&path, at);
    let source = open(root.path()).unwrap();
    let mut out = vec![0.0; N[1]];

    source.read_into("a", &mut out[..N[0]]).unwrap();
    source.read_run_into("b", 0, &mut out[..90_000]).unwrap();
    let error = source.read_into("b", &mut out).unwrap_err();

    let HfError::Damaged { path: named, tensor, start, end } = &error else { panic!("{error}") };
    assert_eq!((named, tensor.as_str(), end - start), (&path, "b", PAGE_BYTES));
    assert!((*start..*end).contains(&at));
    assert!(error.to_string().contains("model.safetensors is damaged") && error.to_string().contains("tensor `b`"));
}

#[test]
fn damaged_header_or_digest_is_detected() {
    for (file, at) in [("model.safetensors", 8), ("model.safetensors", 4000), ("model.safetensors.digests", 3)] {
        let root = exported(Dtype::F16);
        flip(&root.path().join("model").join(file), at);

        let error = open(root.path()).unwrap_err().to_string();

        assert!(error.contains("model.safetensors"), "{error}");
    }
    let root = exported(Dtype::F16);
    flip(&root.path().join("model/model.safetensors.digests"), HEADER_DIGEST_BYTES + 1);
    let source = open(root.path()).unwrap();
    let mut out = vec![0.0; N[0]];
    assert!(matches!(source.read_into("a", &mut out), Err(HfError::Damaged { tensor, .. }) if tensor == "a"));
}

#[test]
fn export_without_page_digests_is_verified_whole_when_opened() {
    let root = exported(Dtype::BF16);
    let path = weights(root.path());
    std::fs::remove_file(root.path().join("model/model.safetensors.digests")).unwrap();
    let len = std::fs::metadata(&path).unwrap().len();

    let source = open(root.path()).unwrap();
    assert_eq!(source.bytes_read(), len);
    let mut out = vec![0.0; N[1]];
    source.read_into("b", &mut out).unwrap();
    assert_eq!(out, values(1));

    flip(&path, len - 5);
    let error = open(root.path()).unwrap_err();
    assert!(matches!(&error, HfError::BadFile { path: named, .. } if *named == path), "{error}");
}

/// Bytes that system calls of this thread have read.
fn bytes_of_thread() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

#[test]
fn counted_bytes_match_the_count_of_the_kernel() {
    let root = exported(Dtype::BF16);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let (counted, read) = pool.install(|| {
        // Reading the counter counts, too.
        let overheads = [bytes_of_thread(), bytes_of_thread()];
        let overhead = overheads[1] - overheads[0];
        let before = bytes_of_thread();
        let source = open(root.path()).unwrap();
        let mut out = vec![0.0; 3_000];
        source.read_run_into("b", 100_000, &mut out).unwrap();
        source.read_runs_into("a", [(5, 0..10), (8_000, 10..20)], &mut out[..20]).unwrap();
        (source.bytes_read(), bytes_of_thread() - before - overhead)
    });

    // The counter's text grows by at most one digit per read.
    assert!(read.abs_diff(counted) <= 4, "{counted} counted, {read} read");
    assert!(counted < header_bytes(&weights(root.path())) + 6 * PAGE_BYTES, "{counted}");
}
