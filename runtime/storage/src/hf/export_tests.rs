//! Writing model directories: exports read back and split, and never overwrite the user's files.

use super::*;
use crate::hf::source::{TensorSource, read_json};

const A: [f32; 4] = [1.0, -2.0, 0.5, 65504.0];
const B: [f32; 3] = [0.25, 0.0, -1.0];

fn tensors() -> [ExportTensor<'static>; 2] {
    [
        ExportTensor { name: "a", shape: &[2, 2], values: Values::Here(&A) },
        ExportTensor { name: "b", shape: &[3], values: Values::Here(&B) },
    ]
}

fn export<'a>(config: &'a Value, tensors: &'a [ExportTensor<'a>], dtype: Dtype) -> Export<'a> {
    Export { config, generation_config: None, tensors, dtype, files: &[], max_shard_bytes: MAX_SHARD_BYTES_DEFAULT }
}

fn read(dir: &Path, name: &str) -> Vec<f32> {
    let source = TensorSource::open(dir).unwrap();
    let mut out = vec![0.0; source.shape(name).unwrap().iter().product()];
    source.read_into(name, &mut out).unwrap();
    out
}

#[test]
fn exported_model_reads_back_in_every_type() {
    let root = tempfile::tempdir().unwrap();
    let (config, tensors) = (json!({"model_type": "llama", "torch_dtype": "float64"}), tensors());
    for (dtype, name) in [(Dtype::F32, "float32"), (Dtype::BF16, "bfloat16"), (Dtype::F16, "float16")] {
        let dir = root.path().join(name);
        let expected: Vec<f32> = match dtype {
            Dtype::BF16 => A.iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
            _ => A.to_vec(),
        };

        export_model(&dir, &export(&config, &tensors, dtype)).unwrap();

        assert_eq!((read(&dir, "a"), read(&dir, "b")), (expected, B.to_vec()));
        assert_eq!(read_json(&dir.join("config.json")).unwrap()["torch_dtype"], json!(name));
    }
}

#[test]
fn weights_beyond_the_limit_are_split_and_found_through_the_index() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    let (config, tensors) = (json!({}), tensors());

    export_model(&dir, &Export { max_shard_bytes: 16, ..export(&config, &tensors, Dtype::F32) }).unwrap();

    assert!(dir.join("model-00001-of-00002.safetensors").is_file());
    let index = read_json(&dir.join("model.safetensors.index.json")).unwrap();
    assert_eq!(index["metadata"]["total_size"], json!(28));
    assert_eq!((read(&dir, "a"), read(&dir, "b")), (A.to_vec(), B.to_vec()));
}

#[test]
fn earlier_export_is_replaced_whole() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    let (config, tensors) = (json!({}), tensors());
    let files = [("tokenizer.json".to_owned(), b"{}".to_vec())];
    export_model(&dir, &Export { files: &files, max_shard_bytes: 1, ..export(&config, &tensors, Dtype::F32) }).unwrap();

    export_model(&dir, &export(&config, &tensors, Dtype::F32)).unwrap();

    let mut names: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [".phalanx-export", "config.json", "model.safetensors", "model.safetensors.digests"]);
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 1, "nothing is left beside the export");
}

#[test]
fn export_is_moved_file_by_file_where_its_folder_cannot_be_renamed() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    let (config, tensors) = (json!({}), tensors());
    let files = [("tokenizer.json".to_owned(), b"{}".to_vec())];
    export_model(&dir, &Export { files: &files, ..export(&config, &tensors, Dtype::F32) }).unwrap();
    // No folder takes the name of one that has files.
    let in_the_way = root.path().join(format!(".model.replaced-{}", std::process::id()));
    std::fs::create_dir(&in_the_way).unwrap();
    std::fs::write(in_the_way.join("file"), "").unwrap();

    export_model(&dir, &export(&config, &tensors, Dtype::F32)).unwrap();

    assert_eq!((read(&dir, "a"), read(&dir, "b")), (A.to_vec(), B.to_vec()));
    assert!(!dir.join("tokenizer.json").exists(), "files of the earlier export are gone");
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 2, "nothing else is left beside the export");
}

#[test]
fn next_export_removes_what_a_killed_one_has_left_but_not_that_of_a_living_one() {
    let root = tempfile::tempdir().unwrap();
    let (left, alive) = (root.path().join(".model.writing-1"), root.path().join(".model.writing-2"));
    for dir in [&left, &alive] {
        std::fs::create_dir(dir).unwrap();
    }
    let lock = std::fs::File::open(&alive).unwrap();
    lock.try_lock().unwrap();

    export_model(&root.path().join("model"), &export(&json!({}), &tensors(), Dtype::F32)).unwrap();

    assert!(!left.exists() && alive.exists());
}

#[test]
fn export_into_a_link_is_written_where_it_leads() {
    let root = tempfile::tempdir().unwrap();
    let (dir, disk) = (root.path().join("model"), root.path().join("disk/model"));
    let (config, tensors) = (json!({}), tensors());
    std::os::unix::fs::symlink("disk/model", &dir).unwrap();

    for refused in [
        crate::hf::staging::refuse_foreign(&dir).unwrap_err(),
        export_model(&dir, &export(&config, &tensors, Dtype::F32)).unwrap_err(),
    ] {
        assert!(refused.to_string().contains("a link to disk/model, which does not exist"), "{refused}");
    }
    std::fs::create_dir_all(&disk).unwrap();
    // Twice: the second one replaces the first one.
    for _ in 0..2 {
        export_model(&dir, &export(&config, &tensors, Dtype::F32)).unwrap();

        assert!(dir.is_symlink());
        assert_eq!(read(&disk, "b"), B);
    }
}

#[test]
fn directory_with_other_files_is_left_unchanged() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    let (config, tensors) = (json!({}), tensors());
    export_model(&dir, &export(&config, &tensors, Dtype::F32)).unwrap();
    std::fs::write(dir.join("notes.txt"), "mine").unwrap();

    let error = export_model(&dir, &export(&config, &tensors, Dtype::F32)).unwrap_err();

    assert!(matches!(&error, HfError::Occupied { found, .. } if found == "notes.txt"), "{error}");
    assert_eq!(std::fs::read_to_string(dir.join("notes.txt")).unwrap(), "mine");
    assert_eq!(read(&dir, "b"), B);
}

#[test]
fn tensors_that_no_reader_would_accept_are_refused_before_anything_is_written() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    let config = json!({});
    let refused = |tensors: &[ExportTensor<'_>], dtype| {
        let message = export_model(&dir, &export(&config, tensors, dtype)).unwrap_err().to_string();
        assert!(!dir.exists());
        message
    };
    let one = |values| [ExportTensor { name: "w", shape: &[1], values: Values::Here(values) }];

    assert!(refused(&one(&[f32::NAN]), Dtype::F32).contains("NaN at position 0 is not a finite F32"));
    assert!(refused(&one(&[70000.0]), Dtype::F16).contains("not a finite F16"));
    assert!(refused(&one(&[f32::MAX]), Dtype::BF16).contains("not a finite BF16"));
    assert!(refused(&one(&[1.0, 2.0]), Dtype::F32).contains("does not hold 2 values"));
    assert!(refused(&one(&[1.0]), Dtype::I32).contains("not written as I32"));
    assert!(refused(&[one(&[1.0])[0], one(&[1.0])[0]], Dtype::F32).contains("taken"));
}

#[test]
fn file_names_that_leave_the_directory_are_refused_and_nothing_remains() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    let (config, tensors) = (json!({}), tensors());
    for name in ["../x", "a/b", "", ".hidden", "config.json"] {
        let files = [(name.to_owned(), Vec::new())];
        let error = export_model(&dir, &Export { files: &files, ..export(&config, &tensors, Dtype::F32) }).unwrap_err();
        assert!(matches!(error, HfError::BadExport { .. }), "{name:?} gave {error}");
    }
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn export_contains_the_tokenizer_of_a_reference_model() {
    let model = phalanx_needs::reference("models/tiny-llama2");
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    let files = read_tokenizer_files(&model).unwrap();
    let (config, tensors) = (read_json(&model.join("config.json")).unwrap(), tensors());

    export_model(&dir, &Export { files: &files, ..export(&config, &tensors, Dtype::F32) }).unwrap();

    for name in ["tokenizer.json", "tokenizer_config.json"] {
        assert_eq!(std::fs::read(dir.join(name)).unwrap(), std::fs::read(model.join(name)).unwrap());
    }
}

#[test]
fn root_of_a_file_system_is_told_from_other_directories() {
    let root = tempfile::tempdir().unwrap();

    assert!(crate::hf::staging::is_mounted(Path::new("/proc")));
    assert!(
        !crate::hf::staging::is_mounted(root.path()) && !crate::hf::staging::is_mounted(&root.path().join("absent"))
    );
}
