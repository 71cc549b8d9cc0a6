//! Reading model directories: values are exact, and errors name the damage.

use half::{bf16, f16};
use proptest::prelude::*;
use safetensors::tensor::{Dtype as CrateDtype, TensorView, serialize};

use super::*;
use crate::hf::layout::{LayoutError, encode_header};

/// A file of any header text and any payload.
fn file_with(header: &str, payload: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), payload].concat()
}

fn open_bytes(bytes: &[u8]) -> Result<TensorSource, HfError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    TensorSource::open(dir.path())
}

fn layout_error(bytes: &[u8]) -> LayoutError {
    match open_bytes(bytes) {
        Err(HfError::BadLayout { layout, .. }) => layout,
        other => panic!("expected a layout error, got {other:?}"),
    }
}

const TWO: &str =
    r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}"#;

#[test]
fn tensors_written_by_the_safetensors_crate_are_read_exactly() {
    let values: Vec<f32> = (0..6).map(|x| x as f32 * 0.5 - 1.0).collect();
    let wide: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let bf: Vec<u8> = values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
    let hf: Vec<u8> = values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
    let view = |dtype, bytes| TensorView::new(dtype, vec![3, 2], bytes).unwrap();
    let views = [
        ("f32", view(CrateDtype::F32, &wide)),
        ("bf16", view(CrateDtype::BF16, &bf)),
        ("f16", view(CrateDtype::F16, &hf)),
    ];
    let source = open_bytes(&serialize(views, None).unwrap()).unwrap();

    for name in ["f32", "bf16", "f16"] {
        let mut all = [0.0; 6];
        source.read_into(name, &mut all).unwrap();
        let mut rows = [0.0; 4];
        source.read_rows_into(name, 1..3, &mut rows).unwrap();

        assert_eq!(all.as_slice(), values, "{name}");
        assert_eq!(rows.as_slice(), &values[2..], "{name}");
    }
}

#[test]
fn run_of_elements_is_read_alone_and_its_bytes_are_counted() {
    let values: Vec<f32> = (0..12).map(|x| x as f32).collect();
    let narrow: Vec<u8> = values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
    let header = encode_header(&[("w", Dtype::BF16, &[4, 3])], &BTreeMap::new(), 8);
    let header_bytes = header.len() as u64;
    let source = open_bytes(&[header, narrow].concat()).unwrap();
    let mut run = [0.0; 5];

    source.read_run_into("w", 4, &mut run).unwrap();

    assert_eq!((run.as_slice(), source.bytes_read()), (&values[4..9], header_bytes + 10));
    let beyond = source.read_run_into("w", 8, &mut run).unwrap_err().to_string();
    assert!(beyond.contains("5 elements from 8 on"), "{beyond}");
    assert!(source.read_run_into("w", usize::MAX, &mut run).is_err());
}

#[test]
fn tensor_longer_than_one_window_is_read_whole_and_its_bad_value_found() {
    const WINDOW_VALUES: usize = WINDOW_BYTES as usize / 4;
    let n = 2 * WINDOW_VALUES + 5;
    let mut values: Vec<f32> = (0..n).map(|x| x as f32).collect();
    values[WINDOW_VALUES + 7] = f32::NAN;
    values[2 * WINDOW_VALUES + 1] = f32::INFINITY;
    let header = encode_header(&[("w", Dtype::F32, &[n])], &BTreeMap::new(), 8);
    let source = open_bytes(&[&header, bytemuck::cast_slice(&values)].concat()).unwrap();
    let mut out = vec![0.0; n];

    let error = source.read_into("w", &mut out).unwrap_err();

    assert!(
        matches!(&error, HfError::NotFinite { position, value, .. } if *position == WINDOW_VALUES + 7 && value == "NaN"),
        "{error}"
    );
    let mut tail = [0.0; 4];
    source.read_rows_into("w", n - 3..n - 3 + 3, &mut tail[..3]).unwrap();
    assert_eq!(tail[..3], values[n - 3..]);
}

#[test]
fn headers_that_do_not_describe_their_file_are_refused_with_the_reason() {
    let payload = [0u8; 12];
    let whole = file_with(TWO, &payload);
    assert!(open_bytes(&whole).is_ok());

    assert!(matches!(layout_error(&whole[..5]), LayoutError::TooShort(5)));
    assert!(matches!(layout_error(&whole[..40]), LayoutError::HeaderLength { .. }));
    assert!(matches!(layout_error(&whole[..whole.len() - 1]), LayoutError::FileLength { .. }));
    assert!(matches!(layout_error(&[whole.as_slice(), &[0]].concat()), LayoutError::FileLength { .. }));
    assert!(matches!(layout_error(&[0xff; 64]), LayoutError::HeaderLength { .. }));
    assert!(matches!(layout_error(&file_with("not json", &[])), LayoutError::Json(_)));
    let huge = r#"{"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]},"b":{"dtype":"U8","shape":[0],"data_offsets":[18446744073709551615,18446744073709551615]}}"#;
    assert!(matches!(layout_error(&file_with(huge, &[])), LayoutError::FileLength { expected: u64::MAX, .. }));
    let changed = |from: &str, to: &str| layout_error(&file_with(&TWO.replace(from, to), &payload));
    assert!(matches!(changed("\"b\"", "\"a\""), LayoutError::Json(text) if text.contains("`a` is described twice")));
    assert!(matches!(changed("[8,12]", "[4,8]"), LayoutError::Gap { tensor, .. } if tensor == "b"));
    assert!(matches!(changed("[8,12]", "[9,13]"), LayoutError::Gap { .. }));
    assert!(matches!(changed("[2]", "[3]"), LayoutError::Extent { tensor, .. } if tensor == "a"));
    assert!(matches!(changed("[2]", "[4294967296,4294967296]"), LayoutError::Extent { .. }));
    assert!(matches!(changed("[8,12]", "[12,8]"), LayoutError::Extent { .. }));
    assert!(matches!(changed("F32", "F9"), LayoutError::UnknownType { dtype, .. } if dtype == "F9"));
}

#[test]
fn messages_name_file_tensor_expected_and_found() {
    let source = open_bytes(&file_with(TWO, &[0; 12])).unwrap();
    let message = |result: Result<(), HfError>| result.unwrap_err().to_string();

    assert!(message(source.check_shape("a", &[3])).ends_with("has shape [2], but the model needs [3]"));
    assert!(message(source.read_into("c", &mut [])).contains("has no tensor `c`"));
    assert!(message(source.read_into("a", &mut [0.0; 3])).contains("do not fit a buffer of 3 values"));
    assert!(message(source.read_rows_into("a", 1..3, &mut [0.0; 2])).contains("rows 1..3"));
    let ints = open_bytes(&file_with(&TWO.replace("F32", "I32"), &[0; 12])).unwrap();
    assert!(message(ints.read_into("a", &mut [0.0; 2])).contains("has type I32"));
}

#[test]
fn shards_are_found_through_the_index_and_only_inside_the_directory() {
    let dir = tempfile::tempdir().unwrap();
    let one = |name: &str, value: f32| {
        [encode_header(&[(name, Dtype::F32, &[])], &BTreeMap::new(), 8), value.to_le_bytes().to_vec()].concat()
    };
    std::fs::write(dir.path().join("m-1.safetensors"), one("x", 1.0)).unwrap();
    std::fs::write(dir.path().join("m-2.safetensors"), one("y", 2.0)).unwrap();
    let open = |map: serde_json::Value| {
        let index = serde_json::json!({"metadata": {}, "weight_map": map});
        std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        TensorSource::open(dir.path())
    };

    let source = open(serde_json::json!({"x": "m-1.safetensors", "y": "m-2.safetensors"})).unwrap();
    let mut y = [0.0];
    source.read_into("y", &mut y).unwrap();
    assert_eq!((y, source.names().collect::<Vec<_>>()), ([2.0], vec!["x", "y"]));

    for shard in ["../m-1.safetensors", "/etc/x.safetensors", "a/b.safetensors", ".x.safetensors", "m-1.bin", ""] {
        let error = open(serde_json::json!({ "x": shard })).unwrap_err();
        assert!(matches!(error, HfError::BadShardName { .. }), "{shard:?} gave {error}");
    }
    // As transformers, the reader finds a tensor wherever it is, and a stale entry matters only to who reads that tensor.
    let stale =
        open(serde_json::json!({"z": "m-1.safetensors", "y": "m-1.safetensors", "x": "m-2.safetensors"})).unwrap();
    assert_eq!(stale.names().collect::<Vec<_>>(), ["x", "y"]);
    let error = stale.read_into("z", &mut y).unwrap_err();
    assert!(error.to_string().contains("m-1.safetensors has no tensor `z`"), "{error}");
    std::fs::write(dir.path().join("m-2.safetensors"), one("x", 1.0)).unwrap();
    assert!(open(serde_json::json!({"x": "m-1.safetensors", "y": "m-2.safetensors"})).is_ok(), "equal copies");
    std::fs::write(dir.path().join("m-2.safetensors"), one("x", 3.0)).unwrap();
    let error = open(serde_json::json!({"x": "m-1.safetensors", "y": "m-2.safetensors"})).unwrap_err();
    assert!(error.to_string().contains("another tensor `x`"), "{error}");
}

#[test]
fn weights_that_cannot_be_read_are_not_taken_for_absent_ones() {
    let dir = tempfile::tempdir().unwrap();
    let single = dir.path().join("model.safetensors");
    std::os::unix::fs::symlink("on-a-disk-that-is-not-there", &single).unwrap();
    std::fs::write(dir.path().join("model.safetensors.index.json"), r#"{"weight_map": {}}"#).unwrap();

    let error = TensorSource::open(dir.path()).unwrap_err().to_string();

    assert!(error.contains("cannot read") && error.contains("model.safetensors:"), "{error}");
    std::fs::remove_file(&single).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &single).unwrap();
    assert!(TensorSource::open(dir.path()).unwrap_err().to_string().contains("it is a device"));
}

#[test]
fn file_with_more_tensors_than_any_model_has_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let names: Vec<String> = (0..=TENSORS_MAX).map(|i| format!("x{i}")).collect();
    let write = |n: usize| {
        let list: Vec<_> = names[..n].iter().map(|name| (name.as_str(), Dtype::F32, &[0usize][..])).collect();
        std::fs::write(&path, encode_header(&list, &BTreeMap::new(), 8)).unwrap();
        TensorSource::open(dir.path())
    };

    assert!(write(TENSORS_MAX).is_ok());
    let error = write(TENSORS_MAX + 1).unwrap_err().to_string();
    assert!(error.contains("has 262145 tensors, and at most 262144 are read"), "{error}");
}

#[test]
fn directory_with_only_pickled_weights_is_refused_with_instructions() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("pytorch_model.bin"), b"x").unwrap();

    let message = TensorSource::open(dir.path()).unwrap_err().to_string();

    assert!(message.contains("convert its pickled weights to safetensors"), "{message}");
}

#[test]
fn reference_models_read_as_the_safetensors_crate_reads_them() {
    for entry in std::fs::read_dir(phalanx_needs::reference("models")).unwrap() {
        let dir = entry.unwrap().path();
        let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
        let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let source = TensorSource::open(&dir).unwrap();
        assert_eq!(source.names().count(), reference.len());
        for (name, view) in reference.tensors() {
            assert_eq!(source.shape(&name).unwrap(), view.shape());
            let mut values = vec![0.0f32; view.shape().iter().product()];
            source.read_into(&name, &mut values).unwrap();
            assert_eq!(view.dtype(), CrateDtype::BF16, "{name}");
            let wide = |bytes: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
            let expected: Vec<f32> = view.data().as_chunks::<2>().0.iter().map(wide).collect();
            assert_eq!(values, expected, "{name}");
        }
    }
}

proptest! {
    #[test]
    fn damaged_file_gives_an_error_or_the_same_shapes_never_a_panic(position in 0usize..150, bit in 0u8..8) {
        let mut bytes = file_with(TWO, &[0; 12]);
        let position = position % bytes.len();
        bytes[position] ^= 1 << bit;

        if let Ok(source) = open_bytes(&bytes) {
            for name in source.names() {
                let mut out = vec![0.0; source.shape(name).unwrap().iter().product()];
                let _ = source.read_into(name, &mut out);
            }
        }
    }

    #[test]
    fn headers_we_write_are_read_by_the_safetensors_crate(
        shapes in proptest::collection::vec(proptest::collection::vec(0usize..5, 0..4), 0..6), page_aligned: bool,
    ) {
        let names: Vec<String> = (0..shapes.len()).map(|i| format!("t{i}")).collect();
        let tensors: Vec<_> = names.iter().zip(&shapes).map(|(n, s)| (n.as_str(), Dtype::F32, s.as_slice())).collect();
        let align = if page_aligned { 4096 } else { 8 };
        let header = encode_header(&tensors, &BTreeMap::from([("format", "pt")]), align);
        let payload: usize = shapes.iter().map(|s| s.iter().product::<usize>() * 4).sum();
        let bytes = [header.as_slice(), &vec![0; payload]].concat();

        let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();

        prop_assert_eq!(header.len() % align, 0);
        prop_assert_eq!(read.len(), shapes.len());
        for (name, _, shape) in &tensors {
            let found = read.tensor(name).unwrap();
            prop_assert_eq!(found.shape(), *shape);
        }
        prop_assert!(open_bytes(&bytes).is_ok());
    }
}
