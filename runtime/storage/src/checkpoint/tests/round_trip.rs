//! A state saved in any boxes loads in any other boxes.

use std::ops::Range;

use phalanx_strategies::boxes::TensorBox;
use proptest::prelude::*;

use super::*;
use crate::checkpoint::reader::Checkpoint;

/// The elements of a box by plain indexing: the reference for reads.
pub(super) fn cut(values: &[u16], global: &[usize], region: &TensorBox) -> Vec<u16> {
    let n: usize = region.extent.iter().product();
    let element = |mut flat: usize| {
        let mut index = 0;
        let mut stride = 1;
        for dim in (0..global.len()).rev() {
            index += (region.offset[dim] + flat % region.extent[dim]) * stride;
            flat /= region.extent[dim];
            stride *= global[dim];
        }
        values[index]
    };
    (0..n).map(element).collect()
}

/// Splits a box at random places along random dims: a tiling that need not be a grid.
pub(super) fn split(region: TensorBox, cuts: &[(prop::sample::Index, prop::sample::Index)]) -> Vec<TensorBox> {
    let mut boxes = vec![region];
    for (which, place) in cuts {
        let whole = boxes.swap_remove(which.index(boxes.len()));
        let dims: Vec<usize> = (0..whole.extent.len()).filter(|&dim| whole.extent[dim] > 1).collect();
        if dims.is_empty() {
            boxes.push(whole);
            continue;
        }
        let dim = dims[place.index(dims.len())];
        let at = 1 + place.index(whole.extent[dim] - 1);
        let (mut low, mut high) = (whole.clone(), whole);
        low.extent[dim] = at;
        high.offset[dim] += at;
        high.extent[dim] -= at;
        boxes.extend([low, high]);
    }
    boxes
}

pub(super) fn region_of(ranges: &[Range<usize>]) -> TensorBox {
    TensorBox {
        offset: ranges.iter().map(|range| range.start).collect(),
        extent: ranges.iter().map(|range| range.end - range.start).collect(),
    }
}

proptest! {
    #[test]
    fn any_box_reads_back_from_any_tiling(
        shape in proptest::collection::vec(1usize..7, 0..4),
        cuts in proptest::collection::vec(any::<(prop::sample::Index, prop::sample::Index)>(), 0..8),
        corners in proptest::collection::vec(any::<(prop::sample::Index, prop::sample::Index)>(), 4),
        shard_bytes_max in 1u64..200,
    ) {
        let root = tempfile::tempdir().unwrap();
        let n: usize = shape.iter().product();
        let values: Vec<u16> = (0..n as u16).map(|x| x.wrapping_mul(40503)).collect();
        let boxes = split(TensorBox::whole(&shape), &cuts);
        let contents: Vec<Vec<u16>> = boxes.iter().map(|region| cut(&values, &shape, region)).collect();
        let pieces: Vec<Piece<'_>> = boxes.iter().zip(&contents).map(|(region, content)| Piece {
            name: "t",
            dtype: Dtype::U16,
            global_shape: &shape,
            offset: &region.offset,
            shape: &region.extent,
            bytes: bytemuck::cast_slice(content),
            fingerprint: None,
        }).collect();
        let ranges: Vec<_> = shape.iter().zip(&corners).map(|(&dim, (a, b))| {
            let (a, b) = (a.index(dim + 1), b.index(dim + 1));
            a.min(b)..a.max(b)
        }).collect();
        let wanted = region_of(&ranges);

        let writer = quick_writer(root.path()).with_shard_bytes_max(shard_bytes_max);
        writer.save(&meta(1), &pieces, &[]).unwrap();
        let checkpoint = latest_valid(root.path()).unwrap().0.unwrap();
        let mut whole = vec![0u16; n];
        checkpoint.read_whole_into("t", bytemuck::cast_slice_mut(&mut whole)).unwrap();
        let mut part = vec![0u16; wanted.n_elements()];
        checkpoint.read_into("t", &wanted, bytemuck::cast_slice_mut(&mut part)).unwrap();

        prop_assert_eq!(part, cut(&values, &shape, &wanted));
        prop_assert_eq!(whole, values);
    }
}

/// A tensor of several hash chunks, saved as four blocks of columns.
fn wide_tensor(root: &Path) -> (Vec<u16>, [usize; 2], Checkpoint) {
    let shape = [1500, 4096];
    let values: Vec<u16> = (0..1500 * 4096u32).map(|x| (x.wrapping_mul(2654435761) >> 16) as u16).collect();
    let boxes: Vec<TensorBox> = (0..4).map(|i| region_of(&[0..1500, i * 1024..(i + 1) * 1024])).collect();
    let contents: Vec<Vec<u16>> = boxes.iter().map(|region| cut(&values, &shape, region)).collect();
    let piece = |(region, content)| {
        let (TensorBox { offset, extent: box_shape }, content): (&TensorBox, &Vec<u16>) = (region, content);
        let bytes = bytemuck::cast_slice(content);
        let (name, dtype, fingerprint) = ("wide", Dtype::BF16, None);
        Piece { name, dtype, global_shape: &shape, offset, shape: box_shape, bytes, fingerprint }
    };
    let pieces: Vec<Piece<'_>> = boxes.iter().zip(&contents).map(piece).collect();
    quick_writer(root).save(&meta(1), &pieces, &[]).unwrap();
    (values, shape, latest_valid(root).unwrap().0.unwrap())
}

#[test]
fn tensors_larger_than_hash_chunks_and_read_windows_come_back_exactly() {
    let root = tempfile::tempdir().unwrap();
    let (values, shape, checkpoint) = wide_tensor(root.path());
    assert!(checkpoint.contents().files["rank-00000-0000.safetensors"].blake3.len() >= 3);
    for ranges in [[0..1500, 0..4096], [3..1400, 5..6], [700..701, 0..4096], [1..1499, 1000..3100]] {
        let wanted = region_of(&ranges);
        let mut part = vec![0u16; wanted.n_elements()];

        checkpoint.read_into("wide", &wanted, bytemuck::cast_slice_mut(&mut part)).unwrap();

        assert!(part == cut(&values, &shape, &wanted), "{ranges:?}");
    }
}

#[test]
fn damage_in_a_later_part_of_a_file_is_named_by_its_bytes() {
    let root = tempfile::tempdir().unwrap();
    let (_, _, checkpoint) = wide_tensor(root.path());
    let path = checkpoint.id().path.join("rank-00000-0000.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[9 << 20] ^= 1;
    std::fs::write(&path, bytes).unwrap();

    let error = Checkpoint::open(&checkpoint.id().path).unwrap_err();

    assert_eq!(error, CheckpointError::FileHash { path, start: 9 << 20, end: 10 << 20 });
}

#[test]
fn shards_are_plain_safetensors_with_a_page_aligned_payload() {
    let root = tempfile::tempdir().unwrap();
    let dir = save_state(&CheckpointWriter::at(root.path()).unwrap(), 7).unwrap().path;
    let bytes = std::fs::read(dir.join("rank-00000-0000.safetensors")).unwrap();

    let shard = safetensors::SafeTensors::deserialize(&bytes).unwrap();

    assert_eq!(shard.tensor("model.weight").unwrap().shape(), [4, 6]);
    assert_eq!(shard.tensor("counts").unwrap().data(), bytemuck::cast_slice::<u64, u8>(&[7; 3]));
    assert_eq!((8 + u64::from_le_bytes(bytes[..8].try_into().unwrap())) % 4096, 0);
}

#[test]
fn scalars_empty_tensors_and_states_without_tensors_are_saved() {
    let root = tempfile::tempdir().unwrap();
    let writer = quick_writer(root.path());
    let pieces = [
        Piece::whole("scalar", Dtype::F32, &[], bytemuck::bytes_of(&1.5f32)),
        Piece::whole("empty", Dtype::F32, &[0, 3], &[]),
    ];

    writer.save(&meta(1), &pieces, &[("none", b"")]).unwrap();
    let checkpoint = latest_valid(root.path()).unwrap().0.unwrap();
    let mut scalar = 0f32;
    checkpoint.read_whole_into("scalar", bytemuck::bytes_of_mut(&mut scalar)).unwrap();
    checkpoint.read_whole_into("empty", &mut []).unwrap();

    assert_eq!(scalar, 1.5);
    assert_eq!(checkpoint.extra("none").unwrap(), b"");
    writer.save(&meta(2), &[], &[]).unwrap();
    assert_eq!(latest_valid(root.path()).unwrap().0.unwrap().id().step, 2);
}

#[test]
fn pieces_that_contradict_each_other_are_refused_before_anything_is_written() {
    let root = tempfile::tempdir().unwrap();
    let writer = quick_writer(root.path());
    let whole = Piece::whole("t", Dtype::U8, &[4], &[1, 2, 3, 4]);
    let half = Piece { shape: &[2], bytes: &[1, 2], ..whole };
    let refused = |pieces: &[Piece<'_>]| {
        let error = writer.save(&meta(1), pieces, &[]).unwrap_err();
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
        error.to_string()
    };

    assert!(refused(&[half]).contains("hole or overlap"));
    assert!(refused(&[whole, half]).contains("hole or overlap"));
    assert!(refused(&[Piece { bytes: &[1], ..whole }]).contains("does not match its bytes"));
    assert!(refused(&[Piece { global_shape: &[2], ..half }, whole]).contains("differ in type"));
    assert!(refused(&[Piece { name: "../t", ..whole }]).contains("names have"));
    let extras = writer.save(&meta(1), &[whole], &[("a/b", b"")]).unwrap_err();
    assert!(extras.to_string().contains("`a/b`"));
}

#[test]
fn invalid_requests_are_refused() {
    let root = tempfile::tempdir().unwrap();
    save_state(&quick_writer(root.path()), 1).unwrap();
    let checkpoint = latest_valid(root.path()).unwrap().0.unwrap();
    let refused = |ranges: &[Range<usize>], len: usize| {
        checkpoint.read_into("model.weight", &region_of(ranges), &mut vec![0; len]).unwrap_err().to_string()
    };

    assert!(refused(&[0..4, 0..7], 112).contains("does not fit `model.weight` of shape [4, 6]"));
    assert!(refused(&[0..4, 0..6], 95).contains("in 95 bytes"));
    assert!(refused(std::slice::from_ref(&(0..4)), 16).contains("does not fit"));
    assert!(checkpoint.read_whole_into("model.wait", &mut []).unwrap_err().to_string().contains("has no `model.wait`"));
    assert!(checkpoint.extra("x").is_err());
}

#[test]
fn background_thread_saves_from_a_snapshot_that_it_owns() {
    let root = tempfile::tempdir().unwrap();
    let writer = CheckpointWriter::at(root.path()).unwrap();
    let snapshot = vec![0.25f32; 1000];
    let saving = std::thread::spawn({
        let writer = writer.clone();
        move || writer.save(&meta(1), &[Piece::whole("w", Dtype::F32, &[1000], bytemuck::cast_slice(&snapshot))], &[])
    });

    let id = saving.join().unwrap().unwrap();

    assert_eq!(Checkpoint::open(&id.path).unwrap().tensor("w").unwrap().shape, [1000]);
}
