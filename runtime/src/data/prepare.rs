//! From the data section of the configuration to rows for training and rows for validation.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_storage::{foreign_file, home};
use thiserror::Error;

use super::chat_template::ChatTemplateError;
use super::config::{DataConfig, DataConfigError, DatasetConfig, TemplateConfig};
use super::data_file::DataFile;
use super::document_layout::{self, Kept, Seen, TooLong};
use super::held_out::{self, Divided, Side};
use super::packing::Packing;
use super::record::RecordReader;
use super::records::{Compression, ReadError, plain_copy};
use super::rows::{Layout, Part, RowShape, RowStore, Rows, Weight};
use super::sources::choice::Choice;
use super::sources::{Purpose, SourceError, SourceFile, files_of};
use super::stream::{Stream, StreamFiles, in_order_of_stream};
use super::token_cache::{FORMAT_VERSION, TokenFile, TokenWriter};
use super::token_cache_format::TokenCacheError;
use super::token_turn::{PATIENCE, Turn};
use super::tokenize::{OnProgress, Progress, TokenizeError, tokenize_records, tokenize_text};
use super::tokenizer::Tokenizer;
use crate::config::chat_template::ChatTemplateChoice;
use crate::config::datasets::{DatasetType, FileFormat};
use crate::process_limits;

/// Why the data cannot be turned into rows.
#[allow(missing_docs, reason = "each variant's message says what its fields are")]
#[derive(Debug, Clone, PartialEq, Error)]
pub enum PrepareError {
    /// The section contradicts itself.
    #[error(transparent)]
    Config(#[from] DataConfigError),
    /// The files of a data set cannot be found.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The chat template cannot be used.
    #[error("dataset {}: {reason}", path.display())]
    Template { path: PathBuf, reason: ChatTemplateError },
    /// `chat_template: jinja` and `chat_template_jinja` go together.
    #[error("chat_template: jinja and chat_template_jinja go together; found only one of them")]
    JinjaWithoutTemplate,
    /// The file that `chat_template_jinja` names cannot be read.
    #[error("chat_template_jinja: cannot read {}: {reason}", path.display())]
    TemplateFile { path: PathBuf, reason: String },
    /// Conversations need a template.
    #[error(
        "dataset {} has conversations, but the tokenizer has no chat template; set chat_template, for example to chatml",
        path.display()
    )]
    NoTemplate { path: PathBuf },
    /// A file cannot be tokenised.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
    /// The token cache cannot be used.
    #[error(transparent)]
    Cache(#[from] TokenCacheError),
    /// The tokenizer has tokens beyond the model's vocabulary.
    #[error(
        "dataset {} needs token {id} ({token:?}), but the model's vocabulary has {model_size}; the tokenizer's has {tokenizer_size}: use the tokenizer of this model, or name the token under `tokens`, so that the model gets a row for it",
        path.display()
    )]
    Vocabulary { path: PathBuf, id: u32, token: String, tokenizer_size: usize, model_size: usize },
    /// A document does not fit.
    #[error(
        "{}:{line}: this document has {len} tokens, more than sequence_len {limit}; set sequence_len to at least {len}, or excess_length_strategy to drop or truncate",
        path.display()
    )]
    TooLong { path: PathBuf, line: u64, len: usize, limit: usize },
    /// The text does not fill a row.
    #[error("dataset {} has {n_tokens} tokens, less than one row of sequence_len {limit}", path.display())]
    TooShort { path: PathBuf, n_tokens: usize, limit: usize },
    /// No document has a token to predict.
    #[error(
        "dataset {} has nothing to train on: {n_documents} documents, {n_empty} without a token to predict, {n_dropped} dropped as too long{}, {n_short} shorter than min_sample_len, {n_repeated} repeated",
        path.display(),
        in_tokens(*dropped_lens)
    )]
    Empty {
        path: PathBuf,
        n_documents: usize,
        n_empty: usize,
        n_dropped: usize,
        dropped_lens: Option<(usize, usize)>,
        n_short: usize,
        n_repeated: usize,
    },
    /// Rows have numbers of 32 bits.
    #[error(
        "the data has {n_rows} rows, more than the {} that a job can have; use a part of it, or a longer sequence_len",
        u32::MAX
    )]
    TooManyRows { n_rows: usize },
    /// The split leaves one side empty.
    #[error(
        "val_set_size {val_set_size} of {n_samples} samples leaves {n_validation} for validation and {n_train} for training; both need at least one"
    )]
    Split { val_set_size: f64, n_samples: usize, n_validation: usize, n_train: usize },
}

/// The lengths of documents between brackets, if there are any.
pub(crate) fn in_tokens(lens: Option<(usize, usize)>) -> String {
    match lens {
        None => String::new(),
        Some((least, most)) if least == most => format!(" ({least} tokens)"),
        Some((least, most)) => format!(" ({least} to {most} tokens)"),
    }
}

impl PrepareError {
    /// Whether a file has no document, or only documents that another one has too. One of several files may be too short, or have no
    /// record of a shard; it is an error only if all are.
    pub(super) fn is_of_nothing(&self) -> bool {
        match self {
            Self::TooShort { .. } => true,
            Self::Empty { n_documents, n_repeated, .. } => n_documents == n_repeated,
            _ => false,
        }
    }
}

/// The prepared data of a job.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// Rows to train on.
    pub train: Rows,
    /// Rows to evaluate on: those of `test_datasets`, or rows held out from `train`, if there are any.
    pub validation: Option<Rows>,
    /// The result for each file, in the order of `datasets` and then of `test_datasets`; of a stream, for its first file.
    pub summaries: Vec<Summary>,
    /// A digest of the tokens of each file of `datasets` and of their marks for prediction.
    pub digests: Vec<[u8; 32]>,
    /// The same of `test_datasets`.
    pub test_digests: Vec<[u8; 32]>,
}

/// The result of preparing a data set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// The file.
    pub path: PathBuf,
    /// Whether its tokens came from the cache.
    pub from_cache: bool,
    /// Tokens of all its documents.
    pub n_tokens: usize,
    /// Tokens of the documents in its rows.
    pub n_kept_tokens: usize,
    /// Documents in the file; a plain text is one.
    pub n_documents: usize,
    /// Documents left out because they have no token to predict.
    pub n_empty: usize,
    /// Documents left out as too long.
    pub n_dropped: usize,
    /// Tokens of the shortest and the longest of these.
    pub dropped_lens: Option<(usize, usize)>,
    /// Documents left out as too short.
    pub n_short: usize,
    /// Documents left out because the same one was there before.
    pub n_repeated: usize,
    /// Documents truncated to a row.
    pub n_truncated: usize,
    /// Documents cut into several rows.
    pub n_cut: usize,
    /// Rows of the data set.
    pub n_rows: usize,
}

/// Tokenises the data sets of `config`, or takes their tokens from `cache_dir`, and lays them into rows.
///
/// `vocab_size` is the model's. `progress` is called now and then while a file is tokenised, on the calling thread. The same
/// data gives the same rows, whatever the machine or the number of threads.
///
/// # Errors
/// When the section, a file or a record cannot be used; the message names it and what is supported. Tokens of files
/// finished before stay in the cache.
pub fn prepare(
    config: &DataConfig,
    tokenizer: &Tokenizer,
    cache_dir: &Path,
    vocab_size: usize,
    progress: OnProgress<'_>,
) -> Result<Prepared, PrepareError> {
    config.validate()?;
    let of_purpose = |datasets, purpose| {
        let sources = sources(datasets, purpose, config.seed)?;
        Ok::<_, PrepareError>(Preparer::new(
            sources,
            Cow::Borrowed(config),
            Cow::Borrowed(tokenizer),
            cache_dir,
            vocab_size,
        ))
    };
    let pad = tokenizer.padding(vocab_size);
    let store = |parts| {
        let store = RowStore::new(parts, row_shape(config, pad));
        match u32::try_from(store.len()) {
            Ok(_) => Ok(Arc::new(store)),
            Err(_) => Err(PrepareError::TooManyRows { n_rows: store.len() }),
        }
    };
    let training = of_purpose(&config.datasets, Purpose::Training)?.holding_out();
    let (train, mut validation, mut summaries, digests) = match config.stream_rows {
        None => divided(config, training.all(progress)?, &store)?,
        Some(n_rows) => {
            let (stream, summary, digest) = training.into_stream(n_rows, pad, progress)?;
            (Rows::streamed(stream), None, vec![summary], vec![digest])
        }
    };
    let mut test_digests = Vec::new();
    if !config.test_datasets.is_empty() {
        let test = of_purpose(&config.test_datasets, Purpose::Evaluation)?.all(progress)?;
        validation = Some(Rows::new(store(test.parts)?, None).weighted(&test.weights, config.seed));
        summaries.extend(test.summaries);
        test_digests = test.digests;
    }
    Ok(Prepared { train, validation, summaries, digests, test_digests })
}

/// Rows to train on, and those of the same files that are held out of it, with a summary and a digest of each file.
type Halves = (Rows, Option<Rows>, Vec<Summary>, Vec<[u8; 32]>);

/// Holds out the share of the samples that `config` asks for.
fn divided(
    config: &DataConfig,
    loaded: Loaded,
    store: &dyn Fn(Vec<Part>) -> Result<Arc<RowStore>, PrepareError>,
) -> Result<Halves, PrepareError> {
    let Loaded { parts, lens, weights, mut summaries, digests } = loaded;
    let (train, validation) = match (config.val_set_size, config.sample_packing) {
        (0.0, _) => (Rows::new(store(parts)?, None).weighted(&weights, config.seed), None),
        (size, false) => {
            let (train, validation) = held_out::of_rows(store(parts)?, size, config.seed)?;
            (train.weighted(&weights, config.seed), Some(validation))
        }
        (size, true) => {
            let files = parts.into_iter().zip(lens).zip(weights);
            let files = files.map(|((part, lens), weight)| (part, lens, weight)).collect();
            let pack = |lens: &[(u32, usize)]| packed(lens, config);
            let Divided { train, validation, n_rows } = held_out::of_samples(files, size, config.seed, pack)?;
            summaries.iter_mut().zip(n_rows).for_each(|(summary, n_rows)| summary.n_rows = n_rows);
            let Side { parts, weights } = train;
            let train = Rows::new(store(parts)?, None).weighted(&weights, config.seed);
            (train, Some(Rows::new(store(validation.parts)?, None)))
        }
    };
    Ok((train, validation, summaries, digests))
}

fn row_shape(config: &DataConfig, pad_id: Option<u32>) -> RowShape {
    RowShape { len: config.sequence_len, second: config.second_row, pad_id: pad_id.unwrap_or(0) }
}

/// The tokens of data sets, laid into rows.
#[derive(Default)]
struct Loaded {
    parts: Vec<Part>,
    /// Tokens of the samples of each part, if they are still to be packed.
    lens: Vec<Vec<usize>>,
    /// The weight of each part.
    weights: Vec<Weight>,
    summaries: Vec<Summary>,
    digests: Vec<[u8; 32]>,
}

/// The tokens of a file, laid into rows.
pub(super) struct LoadedFile {
    pub(super) part: Part,
    /// Tokens of its samples, if they are still to be packed.
    lens: Vec<usize>,
    weight: Weight,
    pub(super) summary: Summary,
    pub(super) digest: [u8; 32],
}

/// Files that are prepared one after the other.
#[derive(Debug)]
pub(crate) struct Preparer<'a> {
    sources: std::vec::IntoIter<Source>,
    config: Cow<'a, DataConfig>,
    tokenizer: Cow<'a, Tokenizer>,
    cache_dir: PathBuf,
    vocab_size: usize,
    seen: Seen,
    /// Whether samples are packed once some are held out.
    is_packed_later: bool,
    /// Files of tokens that may stay open, besides those that are.
    n_open_left: usize,
}

impl<'a> Preparer<'a> {
    fn new(
        sources: Vec<Source>,
        config: Cow<'a, DataConfig>,
        tokenizer: Cow<'a, Tokenizer>,
        cache_dir: &Path,
        vocab_size: usize,
    ) -> Self {
        let seen = config.deduplicate.then(Default::default);
        // The other halves are for the data to evaluate on, and for all else that a rank opens.
        let n_open_left = process_limits::open_files() / 4;
        let (sources, cache_dir) = (sources.into_iter(), cache_dir.to_owned());
        Self { sources, config, tokenizer, cache_dir, vocab_size, seen, is_packed_later: false, n_open_left }
    }

    /// The same preparer, which leaves packing until some samples are held out.
    fn holding_out(self) -> Self {
        let is_packed_later = self.config.sample_packing && self.config.val_set_size > 0.0;
        Self { is_packed_later, ..self }
    }

    /// The next file; none if all are prepared.
    pub(super) fn next_file(&mut self, progress: OnProgress<'_>) -> Option<Result<LoadedFile, PrepareError>> {
        let source = self.sources.next()?;
        Some(self.load(&source, progress))
    }

    fn load(&mut self, source: &Source, progress: OnProgress<'_>) -> Result<LoadedFile, PrepareError> {
        let (config, tokenizer) = (&*self.config, &*self.tokenizer);
        let (tokens, from_cache) = source.tokens(config, tokenizer, &self.cache_dir, progress)?;
        check_vocabulary(&source.path, &tokens, tokenizer, self.vocab_size)?;
        let (digest, n_tokens) = (tokens.digest(), tokens.tokens().len());
        let laid_out = match source.format {
            // What does not fill a row is less than a row of all the data.
            FileFormat::Text if !source.is_one_of_several => {
                cut(&source.path, tokens, config.sequence_len).map(|(part, summary)| (part, Vec::new(), summary))
            }
            _ => lay_out(source, tokens, config, self.is_packed_later, &mut self.seen),
        };
        let (mut part, lens, summary) = match laid_out {
            Err(PrepareError::Empty { path, .. }) if source.format == FileFormat::Text => {
                Err(PrepareError::TooShort { path, n_tokens, limit: config.sequence_len })
            }
            laid_out => laid_out,
        }?;
        match self.n_open_left.checked_sub(1) {
            Some(left) => self.n_open_left = left,
            None => Arc::get_mut(&mut part.tokens).expect("nobody else has it yet").close(),
        }
        let weight = Weight { dataset: source.nth_dataset, n_visits: source.dataset.weight };
        Ok(LoadedFile { part, lens, weight, summary: Summary { from_cache, ..summary }, digest })
    }

    /// All files.
    fn all(mut self, progress: OnProgress<'_>) -> Result<Loaded, PrepareError> {
        let (mut loaded, mut empty) = (Loaded::default(), None);
        while let Some(next) = self.next_file(progress) {
            match next {
                Ok(file) => {
                    loaded.parts.push(file.part);
                    loaded.lens.push(file.lens);
                    loaded.weights.push(file.weight);
                    loaded.summaries.push(file.summary);
                    loaded.digests.push(file.digest);
                }
                Err(error) if error.is_of_nothing() => empty = empty.or(Some(error)),
                Err(error) => return Err(error),
            }
        }
        match empty.filter(|_| loaded.parts.is_empty()) {
            Some(error) => Err(error),
            None => Ok(loaded),
        }
    }

    /// A stream of `n_rows` rows, with its first part; the summary and the digest of that file.
    fn into_stream(
        self,
        n_rows: u64,
        pad_id: Option<u32>,
        progress: OnProgress<'_>,
    ) -> Result<(Arc<Stream>, Summary, [u8; 32]), PrepareError> {
        let seed = self.config.shuffle.then_some(self.config.seed);
        let sources = in_order_of_stream(self.sources.collect(), seed);
        let files = StreamFiles::of(&sources)?;
        let store = Arc::new(RowStore::growing(sources.len(), row_shape(&self.config, pad_id)));
        let (config, tokenizer) = (Cow::Owned(self.config.into_owned()), Cow::Owned(self.tokenizer.into_owned()));
        let mut rest = Preparer::new(sources, config, tokenizer, &self.cache_dir, self.vocab_size);
        let mut empty = None;
        while let Some(next) = rest.next_file(progress) {
            match next {
                Ok(LoadedFile { part, summary, digest, .. }) => {
                    store.push(part);
                    return Ok((Stream::new(store, seed, n_rows, files, rest), summary, digest));
                }
                Err(error) if error.is_of_nothing() => empty = empty.or(Some(error)),
                Err(error) => return Err(error),
            }
        }
        Err(empty.unwrap_or(DataConfigError::NoDatasets.into()))
    }
}

impl StreamFiles {
    fn of(sources: &[Source]) -> Result<Self, PrepareError> {
        let (mut names, mut lengths) = (blake3::Hasher::new(), blake3::Hasher::new());
        for Source { path, .. } in sources {
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            names.update(&(name.len() as u64).to_le_bytes()).update(name);
            let metadata = path.metadata().map_err(|error| TokenizeError::Read(ReadError::file(path, &error)))?;
            lengths.update(&metadata.len().to_le_bytes());
        }
        Ok(Self { names: *names.finalize().as_bytes(), lengths: *lengths.finalize().as_bytes() })
    }
}

/// A file and its data set.
#[derive(Debug)]
struct Source {
    dataset: Arc<DatasetConfig>,
    nth_dataset: usize,
    path: PathBuf,
    format: FileFormat,
    choice: Choice,
    is_one_of_several: bool,
}

/// The files of data sets.
fn sources(datasets: &[DatasetConfig], purpose: Purpose, seed: u64) -> Result<Vec<Source>, SourceError> {
    let mut sources = Vec::new();
    for (nth_dataset, dataset) in datasets.iter().enumerate() {
        let files = files_of(dataset, purpose, seed)?;
        let dataset = Arc::new(dataset.clone());
        sources.extend(files.into_iter().map(|SourceFile { path, format, choice }| Source {
            dataset: Arc::clone(&dataset),
            nth_dataset,
            path,
            format,
            choice,
            is_one_of_several: false,
        }));
    }
    let is_one_of_several = sources.len() > 1;
    sources.iter_mut().for_each(|source| source.is_one_of_several = is_one_of_several);
    Ok(sources)
}

impl Source {
    /// The tokens of the file, and whether they were in the cache.
    fn tokens(
        &self,
        config: &DataConfig,
        tokenizer: &Tokenizer,
        cache_dir: &Path,
        progress: OnProgress<'_>,
    ) -> Result<(TokenFile, bool), PrepareError> {
        let kind = self.dataset.kind;
        let templates = match template_sources(&self.dataset.template, tokenizer, &self.path) {
            _ if !kind.has_messages() => None,
            // Texts need none; a record with messages says so.
            Err(PrepareError::NoTemplate { .. }) if !kind.is_conversation() => None,
            found => Some(found?),
        };
        let file = DataFile::open(&self.path).map_err(TokenizeError::Read)?;
        let content = file.hash().map_err(TokenizeError::Read)?;
        let of_template = templates.as_ref().map(TemplateSources::key).unwrap_or_default();
        let key = self.key(&content, config, tokenizer, &of_template);
        if let Some(file) = self.cached(cache_dir, &key)? {
            return Ok((file, true));
        }
        let (path, total_bytes) = (&self.path, file.len());
        let turn = Turn::wait(cache_dir, &key, PATIENCE, &|| progress(Progress { path, done_bytes: 0, total_bytes }))?;
        // Another process may have written it meanwhile.
        if let Some(file) = self.cached(cache_dir, &key)? {
            return Ok((file, true));
        }
        let mut writer = TokenWriter::create(cache_dir, &key)?;
        match self.format {
            FileFormat::Text => {
                let copy = match Compression::of(&self.path) {
                    Compression::None => None,
                    _ => Some(plain_copy(&file, cache_dir, || turn.goes_on()).map_err(TokenizeError::Read)?),
                };
                let text = copy.as_ref().unwrap_or(file.file());
                tokenize_text(&self.path, text, tokenizer, &mut writer, progress)?;
            }
            format => {
                let parse = |source: &str| {
                    let template = tokenizer.parse_template(source)?;
                    Ok(template.with_variables(self.dataset.template.variables.clone()))
                };
                let parse_all = |sources: &TemplateSources| {
                    Ok((parse(&sources.plain)?, sources.with_tools.as_deref().map(parse).transpose()?))
                };
                let parse = || templates.as_ref().map(parse_all).transpose();
                let mut dataset = DatasetConfig::clone(&self.dataset);
                dataset.conversation.markers.eos = tokenizer.eos_id().and_then(|id| tokenizer.token_text(id));
                let reader = RecordReader::new(&dataset, config.train_on_inputs, parse)
                    .map_err(|reason| PrepareError::Template { path: self.path.clone(), reason })?;
                tokenize_records(&file, format, &self.choice, &reader, tokenizer, &mut writer, progress)?;
            }
        }
        file.check_unchanged(&content).map_err(TokenizeError::Read)?;
        Ok((writer.finish()?, false))
    }

    /// The tokens that are in the cache and undamaged.
    fn cached(&self, cache_dir: &Path, key: &[u8; 32]) -> Result<Option<TokenFile>, TokenCacheError> {
        let found = TokenFile::open(cache_dir, key);
        if let Err(error @ TokenCacheError::Damaged { .. }) = &found {
            tracing::warn!(dataset = %self.path.display(), %error, "tokenising again");
            return Ok(None);
        }
        found
    }

    /// The hash of everything that determines the tokens. It excludes the row layout, so that another `sequence_len` finds
    /// the same tokens.
    fn key(&self, content: &blake3::Hash, config: &DataConfig, tokenizer: &Tokenizer, template: &str) -> [u8; 32] {
        let dataset = &*self.dataset;
        let mut options = format!("{:?} {:?} {:?}", self.format, dataset.kind, self.choice);
        match dataset.kind {
            DatasetType::Completion => options += &format!(" {:?}", dataset.field),
            DatasetType::Alpaca | DatasetType::Prompt(_) | DatasetType::Custom | DatasetType::InputOutput => {
                options += &format!(" {} {:?}", config.train_on_inputs, dataset.prompt);
            }
            DatasetType::Tokenized => {}
            DatasetType::ChatTemplate | DatasetType::Sharegpt | DatasetType::Preference(_) => {
                let (conversation, bos) = (&dataset.conversation, tokenizer.bos_id());
                let variables = &dataset.template.variables;
                options += &format!(" {} {conversation:?} {bos:?} {template:?} {variables:?}", config.train_on_inputs);
                options += &dataset.pair.as_ref().map(|pair| format!(" {pair:?}")).unwrap_or_default();
            }
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&FORMAT_VERSION.to_le_bytes());
        hasher.update(content.as_bytes());
        hasher.update(&tokenizer.fingerprint());
        hasher.update(options.as_bytes());
        *hasher.finalize().as_bytes()
    }
}

/// The texts of the templates of a data set.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct TemplateSources {
    pub(crate) plain: String,
    /// The template for conversations with tools, if it is another one.
    pub(crate) with_tools: Option<String>,
}

impl TemplateSources {
    /// What the tokens depend on.
    fn key(&self) -> String {
        match &self.with_tools {
            None => self.plain.clone(),
            Some(with_tools) => format!("{:?} {with_tools:?}", self.plain),
        }
    }
}

/// The templates for the conversations at `dataset`; only a tokenizer's own ones may be several.
pub(crate) fn template_sources(
    config: &TemplateConfig,
    tokenizer: &Tokenizer,
    dataset: &Path,
) -> Result<TemplateSources, PrepareError> {
    let plain = template_source(config, tokenizer, dataset)?;
    let is_own = config.jinja.is_none() && tokenizer.chat_template() == Some(&plain);
    Ok(TemplateSources { plain, with_tools: tokenizer.tool_template().filter(|_| is_own).map(str::to_owned) })
}

/// The text of the template for the conversations at `dataset`.
fn template_source(config: &TemplateConfig, tokenizer: &Tokenizer, dataset: &Path) -> Result<String, PrepareError> {
    match (config.choice, &config.jinja) {
        // A template without a choice is meant.
        (ChatTemplateChoice::Jinja | ChatTemplateChoice::TokenizerDefault, Some(template)) => read_template(template),
        (ChatTemplateChoice::Jinja, None) | (_, Some(_)) => Err(PrepareError::JinjaWithoutTemplate),
        (ChatTemplateChoice::Named(template), None) => Ok(template.source().to_owned()),
        (choice, None) => match (tokenizer.chat_template(), choice) {
            (Some(template), _) => Ok(template.to_owned()),
            (None, ChatTemplateChoice::Fallback(template)) => Ok(template.source().to_owned()),
            (None, _) => Err(PrepareError::NoTemplate { path: dataset.to_owned() }),
        },
    }
}

/// The longest template that is read; the longest known ones have some 20 kB.
pub(crate) const TEMPLATE_BYTES_MAX: u64 = 16 << 20;

/// Text with a tag of Jinja is a template; anything else is the path of one.
pub(crate) fn read_template(template: &str) -> Result<String, PrepareError> {
    if template.contains("{{") || template.contains("{%") {
        return Ok(template.to_owned());
    }
    let path = home::expanded(template);
    foreign_file::read_text(&path, TEMPLATE_BYTES_MAX)
        .map_err(|error| PrepareError::TemplateFile { path, reason: error.to_string() })
}

fn check_vocabulary(
    path: &Path,
    tokens: &TokenFile,
    tokenizer: &Tokenizer,
    model_size: usize,
) -> Result<(), PrepareError> {
    let id = tokens.max_id();
    if (id as usize) < model_size {
        return Ok(());
    }
    Err(PrepareError::Vocabulary {
        path: path.to_owned(),
        id,
        token: tokenizer.token_text(id).unwrap_or_default(),
        tokenizer_size: tokenizer.vocab_size(),
        model_size,
    })
}

/// A plain text that is all the data: rows of exactly `row_len` tokens, the incomplete last one left out.
fn cut(path: &Path, tokens: TokenFile, row_len: usize) -> Result<(Part, Summary), PrepareError> {
    let n_tokens = tokens.tokens().len();
    let n_rows = n_tokens / row_len;
    if n_rows == 0 {
        return Err(PrepareError::TooShort { path: path.to_owned(), n_tokens, limit: row_len });
    }
    let summary = Summary {
        path: path.to_owned(),
        from_cache: false,
        n_tokens,
        n_kept_tokens: n_rows * row_len,
        n_documents: 1,
        n_empty: 0,
        n_dropped: 0,
        dropped_lens: None,
        n_short: 0,
        n_repeated: 0,
        n_truncated: 0,
        n_cut: 0,
        n_rows,
    };
    Ok((Part { tokens: Arc::new(tokens.into_reader()), layout: Layout::Cut { n_rows } }, summary))
}

/// Records: one document per row, or several.
fn lay_out(
    source: &Source,
    tokens: TokenFile,
    config: &DataConfig,
    is_packed_later: bool,
    seen: &mut Seen,
) -> Result<(Part, Vec<usize>, Summary), PrepareError> {
    let (path, row_len) = (source.path.clone(), config.sequence_len);
    let is_cut = source.dataset.kind == DatasetType::Completion;
    let kept = document_layout::kept(&tokens, config, is_cut, seen)
        .map_err(|TooLong { line, len }| PrepareError::TooLong { path: path.clone(), line, len, limit: row_len })?;
    let Kept { pieces, lens, n_empty, n_dropped, dropped_lens, n_short, n_repeated, n_truncated, n_cut } = kept;
    let (n_tokens, n_documents) = (tokens.tokens().len(), tokens.documents().len());
    if pieces.is_empty() {
        return Err(PrepareError::Empty { path, n_documents, n_empty, n_dropped, dropped_lens, n_short, n_repeated });
    }
    if n_empty + n_dropped + n_short > 0 {
        // The summary tells the user.
        tracing::debug!(dataset = %path.display(), n_documents, n_empty, n_dropped, n_short, "documents are left out");
    }
    let n_kept_tokens = lens.iter().sum();
    let (packing, lens) = if is_packed_later {
        (Packing::one_per_row((0..pieces.len() as u32).collect()), lens)
    } else {
        (packed(&(0..).zip(lens).collect::<Vec<_>>(), config), Vec::new())
    };
    let n_rows = packing.len();
    let part = Part { tokens: Arc::new(tokens.into_reader()), layout: Layout::Documents(packing, pieces) };
    let summary = Summary {
        path,
        from_cache: false,
        n_tokens,
        n_kept_tokens,
        n_documents,
        n_empty,
        n_dropped,
        dropped_lens,
        n_short,
        n_repeated,
        n_truncated,
        n_cut,
        n_rows,
    };
    Ok((part, lens, summary))
}

/// The rows of documents with these numbers and numbers of tokens.
fn packed(lens: &[(u32, usize)], config: &DataConfig) -> Packing {
    match (config.sample_packing, config.sample_packing_sequentially) {
        _ if config.documents_per_row() > 1 => Packing::groups(lens.len(), config.documents_per_row()),
        (true, false) => Packing::best_fit(lens, config.sequence_len),
        (true, true) => Packing::sequential(lens, config.sequence_len),
        (false, _) => Packing::one_per_row(lens.iter().map(|(number, _)| *number).collect()),
    }
}

#[cfg(test)]
#[path = "prepare_tests.rs"]
mod tests;
