//! CHECKPOINT-7: many writers save one checkpoint, any ranks read it, and it exists only when it is complete.

use std::ops::Range;
use std::sync::{Condvar, Mutex};

use phalanx_strategies::boxes::TensorBox;
use proptest::prelude::*;
use proptest::sample::Index as Pick;

use super::round_trip::{cut, region_of, split};
use super::*;
use crate::checkpoint::reader::Checkpoint;
use crate::checkpoint::writer::WriterRank;

/// Stands in for a collective sum: all values are added, and all writers fail once one has left.
pub(super) struct Board {
    n: usize,
    state: Mutex<BoardState>,
    changed: Condvar,
}

#[derive(Default)]
struct BoardState {
    round: usize,
    n_given: usize,
    sum: u64,
    last_sum: u64,
    has_left: bool,
}

impl Board {
    pub(super) fn new(n: usize) -> Self {
        Self { n, state: Mutex::default(), changed: Condvar::new() }
    }

    pub(super) fn sum(&self, value: u64) -> Result<u64, String> {
        let mut state = self.state.lock().unwrap();
        let round = state.round;
        state.sum += value;
        state.n_given += 1;
        if state.n_given == self.n {
            (state.last_sum, state.sum, state.n_given, state.round) = (state.sum, 0, 0, round + 1);
            self.changed.notify_all();
        }
        let state = self.changed.wait_while(state, |state| state.round == round && !state.has_left).unwrap();
        if state.round == round {
            return Err("a writer was lost".into());
        }
        Ok(state.last_sum)
    }

    /// Fails current and later sums, as after the loss of a writer.
    pub(super) fn leave(&self) {
        self.state.lock().unwrap().has_left = true;
        self.changed.notify_all();
    }
}

/// A tensor and the boxes in which it is saved or read, each with its owner.
#[derive(Debug)]
struct Cut {
    shape: Vec<usize>,
    boxes: Vec<(TensorBox, usize)>,
}

/// How to cut a tensor among ranks.
#[derive(Clone, Debug)]
enum Scheme {
    /// Along a dim, at these places, as tensor parallelism does.
    Dim(Pick, Vec<Pick>),
    /// In runs of elements, as ZeRO does.
    Flat(Vec<Pick>),
    /// In arbitrary boxes with arbitrary owners.
    Any(Vec<(Pick, Pick)>, Vec<Pick>),
}

fn scheme() -> impl Strategy<Value = Scheme> {
    let picks = || proptest::collection::vec(any::<Pick>(), 8);
    prop_oneof![
        (any::<Pick>(), picks()).prop_map(|(dim, places)| Scheme::Dim(dim, places)),
        picks().prop_map(Scheme::Flat),
        (proptest::collection::vec(any::<(Pick, Pick)>(), 0..8), picks())
            .prop_map(|(cuts, owners)| Scheme::Any(cuts, owners)),
    ]
}

/// The runs into which `total` is cut at `n - 1` of the places; some may be empty.
fn runs(total: usize, n: usize, places: &[Pick]) -> Vec<Range<usize>> {
    let mut ends: Vec<usize> = places[..n - 1].iter().map(|place| place.index(total + 1)).collect();
    ends.sort_unstable();
    ends.push(total);
    let starts = std::iter::once(0).chain(ends.clone());
    starts.zip(ends).map(|(start, end)| start..end).collect()
}

fn cut_among(shape: &[usize], n: usize, scheme: &Scheme) -> Cut {
    let whole = TensorBox::whole(shape);
    let boxes = match scheme {
        Scheme::Dim(dim, places) if !shape.is_empty() => {
            let dim = dim.index(shape.len());
            let part = |run: Range<usize>| {
                let mut region = whole.clone();
                (region.offset[dim], region.extent[dim]) = (run.start, run.end - run.start);
                region
            };
            runs(shape[dim], n, places)
                .into_iter()
                .map(part)
                .zip(0..)
                .filter(|(region, _)| region.extent[dim] > 0)
                .collect()
        }
        Scheme::Flat(places) => {
            let owned = |(owner, run)| whole.boxes_of_run(run).into_iter().map(move |region| (region, owner));
            (0..).zip(runs(whole.n_elements(), n, places)).flat_map(owned).collect()
        }
        Scheme::Any(cuts, owners) => {
            let owner = |i: usize| owners[i % owners.len()].index(n);
            split(whole, cuts).into_iter().enumerate().map(|(i, region)| (region, owner(i))).collect()
        }
        Scheme::Dim(..) => vec![(whole, 0)],
    };
    Cut { shape: shape.to_vec(), boxes }
}

fn values(tensor: usize, shape: &[usize]) -> Vec<u16> {
    (0..shape.iter().product::<usize>()).map(|x| (x as u16).wrapping_mul(40503) ^ tensor as u16).collect()
}

/// Saves the tensors, each writer on its own thread.
fn save(root: &Path, n: usize, tensors: &[Cut], shard_bytes_max: u64) -> Vec<Result<CheckpointId, CheckpointError>> {
    let board = Board::new(n);
    let part = |writer: usize| {
        let mut parts = Vec::new();
        for (t, tensor) in tensors.iter().enumerate() {
            let whole = values(t, &tensor.shape);
            let owned = tensor.boxes.iter().filter(|(_, owner)| *owner == writer);
            parts
                .extend(owned.map(|(region, _)| (format!("t{t}"), tensor, region, cut(&whole, &tensor.shape, region))));
        }
        let piece = |(name, tensor, region, content)| {
            let (tensor, region, content): (&&Cut, &&TensorBox, &Vec<u16>) = (tensor, region, content);
            let TensorBox { offset, extent: shape } = region;
            let bytes = bytemuck::cast_slice(content);
            let (dtype, global_shape, fingerprint) = (Dtype::U16, &tensor.shape[..], None);
            Piece { name, dtype, global_shape, offset, shape, bytes, fingerprint }
        };
        let pieces: Vec<Piece<'_>> =
            parts.iter().map(|(name, t, r, c): &(String, _, _, _)| piece((name, t, r, c))).collect();
        let writer_rank = WriterRank { writer: writer as u32, n_writers: n as u32 };
        let name = format!("rng-{writer}");
        let extras: [(&str, &[u8]); 1] = [(&name, &[writer as u8])];
        let disk = quick_writer(root).with_shard_bytes_max(shard_bytes_max);
        disk.save_together(&meta(1), writer_rank, &pieces, &extras, |value| board.sum(value))
    };
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..n).map(|writer| scope.spawn(move || part(writer))).collect();
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn any_number_of_readers_reads_bit_for_bit_what_any_number_of_writers_saved(
        tensors in proptest::collection::vec((proptest::collection::vec(1usize..7, 0..4), scheme(), scheme()), 1..4),
        n_writers in 1usize..6,
        n_readers in 1usize..6,
        shard_bytes_max in 1u64..200,
    ) {
        let root = tempfile::tempdir().unwrap();
        let saved: Vec<Cut> = tensors.iter().map(|(shape, scheme, _)| cut_among(shape, n_writers, scheme)).collect();

        for result in save(root.path(), n_writers, &saved, shard_bytes_max) {
            prop_assert_eq!(result.unwrap().generation, 3);
        }

        let path = latest_valid(root.path()).unwrap().0.unwrap().id().path.clone();
        for reader in 0..n_readers {
            let checkpoint = Checkpoint::open_lazily(&path).unwrap();
            for (t, (shape, _, scheme)) in tensors.iter().enumerate() {
                let whole = values(t, shape);
                for (region, _) in cut_among(shape, n_readers, scheme).boxes.iter().filter(|(_, owner)| *owner == reader) {
                    let mut part = vec![0u16; region.n_elements()];
                    checkpoint.read_into(&format!("t{t}"), region, bytemuck::cast_slice_mut(&mut part)).unwrap();
                    prop_assert_eq!(part, cut(&whole, shape, region));
                }
            }
            for writer in 0..n_writers {
                prop_assert_eq!(checkpoint.extra(&format!("rng-{writer}")).unwrap(), [writer as u8]);
            }
        }
    }
}

fn rows(ranges: &[Range<usize>]) -> Cut {
    let boxes = ranges.iter().zip(0..).map(|(range, owner)| (region_of(&[range.clone(), 0..2]), owner)).collect();
    Cut { shape: vec![6, 2], boxes }
}

#[test]
fn boxes_of_different_writers_that_overlap_or_leave_a_hole_fail_the_save_for_all() {
    for ranges in [[0..2, 2..4, 3..6], [0..2, 2..4, 5..6], [0..6, 0..6, 0..6]] {
        let root = tempfile::tempdir().unwrap();

        let results = save(root.path(), 3, &[rows(&ranges)], 100);

        let leader = results[0].as_ref().unwrap_err().to_string();
        assert!(leader.ends_with("the boxes of `t0` do not tile its shape"), "{leader}");
        for result in &results[1..] {
            assert_eq!(result, &Err(CheckpointError::OthersFailed { step: 1, n_failed: 1 }));
        }
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0, "nothing remains");
    }
}

#[test]
fn writer_with_overlapping_pieces_fails_the_save_for_all() {
    for wrong in 0..3 {
        let root = tempfile::tempdir().unwrap();
        let mut tensor = rows(&[0..2, 2..4, 4..6]);
        tensor.boxes.push(tensor.boxes[wrong].clone());

        let results = save(root.path(), 3, &[tensor], 100);

        for (writer, result) in results.iter().enumerate() {
            let message = result.as_ref().unwrap_err().to_string();
            let expected = if writer == wrong { "its pieces overlap" } else { "1 other writers failed" };
            assert!(message.contains(expected), "{message}");
        }
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0, "nothing remains");
    }
}

#[test]
fn writers_join_the_leaders_generation_when_remains_occupy_the_first() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("step-0000000001.g0003")).unwrap();
    std::fs::write(root.path().join("step-0000000001.g0003/rank-00001-index.json"), "{}").unwrap();

    let results = save(root.path(), 2, &[rows(&[0..2, 2..6])], 100);

    let id = results[0].clone().unwrap();
    assert_eq!((id.generation, results[1].clone()), (4, Ok(id.clone())));
    assert_eq!(Checkpoint::open(&id.path).unwrap().contents().writers, 2);
}

#[test]
fn early_commit_names_the_writer_whose_part_is_missing() {
    let root = tempfile::tempdir().unwrap();
    let pending = quick_writer(root.path()).begin(&meta(1)).unwrap();
    let other = quick_writer(root.path()).join(&meta(1), pending.id().generation);
    let piece = Piece::whole("t", Dtype::U8, &[2], &[1, 2]);
    pending.write_part(0, &[piece], &[]).unwrap();

    let early = pending.commit(2).unwrap_err();
    other.write_part(1, &[], &[]).unwrap();

    assert!(early.to_string().starts_with("writer 1 of 2 has not written its part"), "{early}");
    pending.commit(2).unwrap();
    assert!(Checkpoint::open(&pending.id().path).is_ok());
}

#[test]
fn parts_that_contradict_each_other_are_not_committed() {
    let refused = |pieces: [Piece<'_>; 2], extras: [&str; 2]| {
        let root = tempfile::tempdir().unwrap();
        let pending = quick_writer(root.path()).begin(&meta(1)).unwrap();
        for writer in 0..2 {
            pending.write_part(writer as u32, &pieces[writer..=writer], &[(extras[writer], b"x")]).unwrap();
        }
        pending.commit(2).unwrap_err().to_string()
    };
    let whole = Piece::whole("t", Dtype::U8, &[4], &[1, 2, 3, 4]);
    let half = Piece { shape: &[2], bytes: &[1, 2], ..whole };
    let other_half = Piece { offset: &[2], ..half };

    let shape = refused([Piece { global_shape: &[2], ..half }, other_half], ["a", "b"]);
    let dtype = refused([half, Piece { dtype: Dtype::I8, ..other_half }], ["a", "b"]);
    let twice = refused([half, other_half], ["a", "a"]);

    assert!(shape.contains("writer 1 gives `t` another type or shape"), "{shape}");
    assert!(dtype.contains("writer 1 gives `t` another type or shape"), "{dtype}");
    assert!(twice.contains("`a` was written twice"), "{twice}");
}

#[test]
fn part_truncated_after_its_write_is_not_committed() {
    let root = tempfile::tempdir().unwrap();
    let pending = quick_writer(root.path()).begin(&meta(1)).unwrap();
    pending.write_part(0, &[Piece::whole("t", Dtype::U8, &[2], &[1, 2])], &[]).unwrap();
    std::fs::write(pending.id().path.join("rank-00000-0000.safetensors"), "short").unwrap();

    assert!(matches!(pending.commit(1), Err(CheckpointError::FileLength { found: 5, .. })));
}
