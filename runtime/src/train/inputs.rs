//! What a run trains on and with, by digests: nodes compare them when they join, and a run with the checkpoint that it resumes.

use crate::config::JobConfig;
use crate::data::prepare::{Prepared, Summary};
use crate::data::tokenizer::Tokenizer;
use crate::error::JobError;
use crate::error::export::ExportError;
use crate::train::initial_adapter;
use crate::train::plan::ModelPlan;
use crate::train::run_files::{INPUTS_JSON, cache_dir};
use crate::train::weights::name_in;
use phalanx_storage::hf::source::TensorSource;
use phalanx_storage::hf::tensor_digests::{TensorDigests, tensor_digests};
use phalanx_strategies::elastic::inputs::{INPUT_LEN_MAX, Input};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Digests of everything besides the configuration that determines a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct RunInputs {
    /// Version of this program; results of two versions may differ in their last bits.
    version: String,
    tokenizer: String,
    /// In the order of `datasets`; of a stream, its first file.
    data_sets: Vec<DataSet>,
    /// Rows to train on, whose number decides about their order; 0 if it is not known, as that of a stream.
    rows: u64,
    /// Digest of the names of the files of a stream, in their order; empty without one.
    stream: String,
    /// The same of their lengths, which nodes compare. A run may continue after a file that it has not reached was mended.
    stream_lengths: String,
    /// One digest of all `test_datasets`; empty without any.
    test_data: String,
    /// With the tensors of `lora_model_dir`; empty without `base_model`.
    base_model: TensorDigests,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct DataSet {
    file: String,
    /// Digest of its tokens and their marks for prediction.
    tokens: String,
}

/// Data sets that are compared one by one when a node joins; all further ones are compared together, to bound the message.
const DATA_SETS_NAMED: usize = 16;

impl RunInputs {
    /// Reads the base model's weights, unless their digests are known from an earlier start.
    ///
    /// # Errors
    /// When the weights cannot be read.
    pub(crate) fn of(
        config: &JobConfig,
        model: &ModelPlan,
        tokenizer: &Tokenizer,
        data: &Prepared,
    ) -> Result<RunInputs, JobError> {
        let mut base_model = match &model.weights {
            Some(dir) => {
                let source = TensorSource::open(dir)?;
                let used = used_tensors(model, &source)?;
                digests(dir, &source, |name| used.contains(name), &cache_dir(config))?
            }
            None => TensorDigests::new(),
        };
        if let Some(dir) = &model.adapter {
            base_model.extend(digests(dir, &initial_adapter::open(dir)?, |_| true, &cache_dir(config))?);
        }
        let data_set = |(summary, digest): (&Summary, &[u8; 32])| DataSet {
            file: file_name(&summary.path),
            tokens: short(digest),
        };
        Ok(RunInputs {
            version: env!("CARGO_PKG_VERSION").into(),
            tokenizer: short(&tokenizer.fingerprint()),
            data_sets: data.summaries.iter().zip(&data.digests).map(data_set).collect(),
            rows: data.train.stream().map_or(data.train.len() as u64, |_| 0),
            stream: data.train.stream().map_or(String::new(), |stream| short(&stream.files().names)),
            stream_lengths: data.train.stream().map_or(String::new(), |stream| short(&stream.files().lengths)),
            test_data: match &data.test_digests[..] {
                [] => String::new(),
                sets => digest(sets.iter().map(short).collect::<Vec<_>>().iter().map(String::as_str)),
            },
            base_model,
        })
    }

    /// As a file of a checkpoint.
    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("text and lists are JSON")
    }

    /// Why a checkpoint with these inputs does not continue as this run, if it does not. Another version may continue it.
    ///
    /// # Errors
    /// When the file is none of ours.
    pub(crate) fn difference_from(&self, file: &[u8]) -> Result<Option<String>, serde_json::Error> {
        let then: RunInputs = serde_json::from_slice(file)?;
        Ok(self.difference(&then).map(|difference| {
            format!(
                "{difference}; restore it, or start a new run from the weights: `phalanx export` writes them, and \
                 `base_model` reads them, or `lora_model_dir` those of an adapter"
            )
        }))
    }

    /// A word about another number of rows than that of a checkpoint with these inputs: after a change of keys, or of this program.
    pub(crate) fn other_rows(&self, file: &[u8]) -> Option<String> {
        let then: RunInputs = serde_json::from_slice(file).ok()?;
        let (now, then) = (self.rows, then.rows);
        (now != then && now > 0 && then > 0)
            .then(|| format!("the rows of its data ({now} instead of {then}), so that their order is another one"))
    }

    /// The first tensor of a base model that differs from what a file of a checkpoint says of it.
    ///
    /// # Errors
    /// When the file is none of ours, or the weights cannot be read.
    pub(crate) fn other_weight(
        file: &[u8],
        dir: &Path,
        source: &TensorSource,
        cache: &Path,
    ) -> Result<Option<String>, JobError> {
        let decode = |source| ExportError::Json { file: INPUTS_JSON.into(), source };
        let then: RunInputs = serde_json::from_slice(file).map_err(decode)?;
        let now = digests(dir, source, |name| then.base_model.contains_key(name), cache)?;
        Ok(now
            .into_iter()
            .find(|(tensor, digest)| then.base_model.get(tensor) != Some(digest))
            .map(|(tensor, _)| tensor))
    }

    fn difference(&self, then: &RunInputs) -> Option<String> {
        match (self.stream.is_empty(), then.stream.is_empty()) {
            (true, false) => return Some("its data was streamed, and `streaming` is not set".into()),
            (false, true) => return Some("its data was not streamed, and `streaming` is set".into()),
            _ if self.stream != then.stream => {
                return Some("the files of `datasets` have other names than when the checkpoint was saved".into());
            }
            _ => {}
        }
        let (n, n_then) = (self.data_sets.len(), then.data_sets.len());
        if n != n_then {
            return Some(format!("it was trained on {n_then} data sets, and `datasets` has {n}"));
        }
        for (i, (now, then)) in self.data_sets.iter().zip(&then.data_sets).enumerate() {
            if now.tokens != then.tokens {
                let (name, file) = (name(i, &now.file), &then.file);
                return Some(format!("{name} has other tokens than {file} had when the checkpoint was saved"));
            }
        }
        if self.tokenizer != then.tokenizer {
            return Some("the tokenizer is another one than when the checkpoint was saved".into());
        }
        // Earlier versions also stored the digests of tensors that the model does not use.
        let (changed, _) = self.base_model.iter().find(|(name, now)| then.base_model.get(*name) != Some(*now))?;
        Some(match then.base_model.contains_key(changed) {
            true => format!("tensor `{changed}` of `base_model` has other values than when the checkpoint was saved"),
            false => format!("`base_model` has tensor `{changed}`, which it lacked when the checkpoint was saved"),
        })
    }

    /// For the comparison with other nodes.
    pub(crate) fn of_node(&self) -> Vec<Input> {
        let input = |name: String, value: String| Input { name, value };
        let mut inputs = vec![
            input("version of Phalanx".into(), self.version.clone()),
            input("tokenizer".into(), self.tokenizer.clone()),
        ];
        let named = self.data_sets.iter().take(DATA_SETS_NAMED).enumerate();
        inputs.extend(named.map(|(i, set)| input(name(i, &set.file), set.tokens.clone())));
        if self.data_sets.len() > DATA_SETS_NAMED {
            let rest = self.data_sets[DATA_SETS_NAMED..].iter().map(|set| set.tokens.as_str());
            inputs.push(input(format!("data set behind the first {DATA_SETS_NAMED}"), digest(rest)));
        }
        if !self.stream.is_empty() {
            inputs.push(input("names of the files of `datasets`".into(), self.stream.clone()));
            inputs.push(input("lengths of the files of `datasets`".into(), self.stream_lengths.clone()));
        }
        if !self.test_data.is_empty() {
            inputs.push(input("`test_datasets`".into(), self.test_data.clone()));
        }
        if !self.base_model.is_empty() {
            let tensors = self.base_model.iter().flat_map(|(name, tensor)| [name.as_str(), tensor.as_str()]);
            inputs.push(input("`base_model`".into(), digest(tensors)));
        }
        inputs
    }
}

fn name(i: usize, file: &str) -> String {
    format!("`datasets[{i}]` ({file})")
}

/// The name of a file, of a length that messages may have.
fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    name.chars().take(INPUT_LEN_MAX / 8).collect()
}

/// Names in the files of the tensors that a model uses; foreign files may have any number of others.
fn used_tensors(model: &ModelPlan, source: &TensorSource) -> Result<BTreeSet<String>, JobError> {
    let prefix = model.model.known().map_or("", |known| known.family.prefix);
    let program = model.forward()?;
    let parts = program.params.iter().flat_map(|param| &param.parts);
    Ok(parts.map(|part| name_in(source, &part.name, prefix).to_owned()).collect())
}

fn digests(
    dir: &Path,
    source: &TensorSource,
    wanted: impl Fn(&str) -> bool,
    cache: &Path,
) -> Result<TensorDigests, JobError> {
    // Machines that share the cache may have other models at equal paths.
    let read = |source| JobError::Io { action: "read", path: dir.to_owned(), source };
    let metadata = std::fs::metadata(dir).map_err(read)?;
    let name = blake3::hash(format!("{} {} {}", dir.display(), metadata.dev(), metadata.ino()).as_bytes()).to_hex();
    let known = cache.join(format!("weights-{}.json", &name[..16]));
    Ok(tensor_digests(source, wanted, &known)?)
}

/// The digest of texts, each with its length.
fn digest<'a>(texts: impl Iterator<Item = &'a str>) -> String {
    let mut hasher = blake3::Hasher::new();
    for text in texts {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    short(hasher.finalize().as_bytes())
}

/// The first 16 bytes in hexadecimal.
fn short(digest: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*digest).to_hex()[..32].into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs() -> RunInputs {
        let set = |file: &str, tokens: &str| DataSet { file: file.into(), tokens: tokens.into() };
        RunInputs {
            version: "1".into(),
            tokenizer: "t".into(),
            data_sets: vec![set("a.txt", "aa"), set("b.txt", "bb")],
            rows: 0,
            stream: String::new(),
            stream_lengths: String::new(),
            test_data: String::new(),
            base_model: [("w".to_owned(), "00".to_owned()), ("x".to_owned(), "01".to_owned())].into(),
        }
    }

    #[test]
    fn checkpoint_of_other_data_tokenizer_or_weights_is_named_and_another_version_continues() {
        let mut of_data = inputs();
        of_data.data_sets[1].tokens = "bc".into();
        let mut of_weights = inputs();
        of_weights.base_model.insert("x".into(), "02".into());
        let mut of_tensor = inputs();
        of_tensor.base_model.remove("w");
        let stream =
            |names: &str, lengths: &str| RunInputs { stream: names.into(), stream_lengths: lengths.into(), ..inputs() };
        assert_eq!(stream("n", "l").difference(&stream("n", "of a file that was mended")), None);
        assert_ne!(stream("n", "l").of_node(), stream("n", "other").of_node());
        for (then, expected) in [
            (inputs(), None),
            (RunInputs { version: "2".into(), ..inputs() }, None),
            (of_data, Some("`datasets[1]` (b.txt) has other tokens than b.txt had")),
            (stream("n", "l"), Some("its data was streamed")),
            (RunInputs { data_sets: vec![], ..inputs() }, Some("trained on 0 data sets, and `datasets` has 2")),
            (RunInputs { tokenizer: "u".into(), ..inputs() }, Some("the tokenizer is another one")),
            (of_weights, Some("tensor `x` of `base_model` has other values")),
            (of_tensor, Some("`base_model` has tensor `w`, which it lacked")),
        ] {
            let found = inputs().difference_from(&then.encode()).unwrap();
            assert_eq!(found.is_some(), expected.is_some(), "{found:?}");
            assert!(found.unwrap_or_default().contains(expected.unwrap_or_default()), "{expected:?}");
        }
    }

    #[test]
    fn message_of_a_node_is_bounded_and_notices_each_data_set() {
        let many = |n: usize| {
            let set = |i: usize| DataSet { file: "long".repeat(1000), tokens: format!("{i}") };
            RunInputs { data_sets: (0..n).map(set).collect(), ..inputs() }
        };
        let message = many(1000).of_node();
        assert_eq!(message.len(), 2 + 16 + 1 + 1);
        let mut other = many(1000);
        other.data_sets[999].tokens = "else".into();
        let found = phalanx_strategies::elastic::inputs::difference(&message, &other.of_node());
        assert!(found.unwrap().contains("data set behind the first 16"));
        let short = |input: &Input| input.name.len() <= INPUT_LEN_MAX && input.value.len() <= INPUT_LEN_MAX;
        let named = RunInputs {
            data_sets: vec![DataSet { file: file_name(Path::new(&"é".repeat(4000))), tokens: "".into() }],
            ..inputs()
        };
        assert!(named.of_node().iter().all(short));
    }
}
