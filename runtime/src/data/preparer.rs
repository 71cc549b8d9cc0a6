//! Files of data sets that are tokenized and laid into rows one after the other.

use super::bad_records::BadRecords;
use super::config::{DataConfig, DataConfigError, DatasetConfig};
use super::data_file::DataFile;
use super::document_layout::{self, Kept, Seen, TooLong};
use super::packing::Packing;
use super::prepare_error::PrepareError;
use super::record::RecordReader;
use super::records::{Compression, ReadError, plain_copy};
use super::rows::{Layout, Part, RowShape, RowStore, Weight};
use super::skipped;
use super::sources::choice::Choice;
use super::sources::{Purpose, SourceError, SourceFile, files_of};
use super::stream::{Stream, StreamFiles, in_order_of_stream};
use super::summary::Summary;
use super::template_sources::{TemplateSources, template_sources};
use super::token_cache::{FORMAT_VERSION, TokenFile, TokenWriter};
use super::token_cache_format::TokenCacheError;
use super::token_turn::{PATIENCE, Turn};
use super::tokenize::{OnProgress, Progress, ReadRecords, tokenize_records, tokenize_text};
use super::tokenize_error::TokenizeError;
use super::tokenizer::Tokenizer;
use crate::config::datasets::{DatasetType, FileFormat};
use crate::process_limits;
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The tokens of data sets, laid into rows.
#[derive(Default)]
pub(super) struct Loaded {
    pub(super) parts: Vec<Part>,
    /// Tokens of the samples of each part, if they are still to be packed.
    pub(super) lens: Vec<Vec<usize>>,
    /// The weight of each part.
    pub(super) weights: Vec<Weight>,
    pub(super) summaries: Vec<Summary>,
    pub(super) digests: Vec<[u8; 32]>,
}

impl Loaded {
    fn push(&mut self, file: LoadedFile) {
        self.parts.push(file.part);
        self.lens.push(file.lens);
        self.weights.push(file.weight);
        self.summaries.push(file.summary);
        self.digests.push(file.digest);
    }
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
    pub(super) n_open_left: usize,
}

impl<'a> Preparer<'a> {
    pub(super) fn new(
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
    pub(super) fn holding_out(self) -> Self {
        let is_packed_later = self.config.sample_packing && self.config.val_set_size > 0.0;
        Self { is_packed_later, ..self }
    }

    /// The next file; none if all are prepared.
    pub(super) fn next_file(&mut self, progress: OnProgress<'_>) -> Option<Result<LoadedFile, PrepareError>> {
        let source = self.sources.next()?;
        Some(self.load(&source, progress))
    }

    /// The length of the next file.
    fn next_bytes(&self) -> u64 {
        let next = self.sources.as_slice().first().and_then(|source| source.path.metadata().ok());
        next.map_or(0, |file| file.len())
    }

    fn load(&mut self, source: &Source, progress: OnProgress<'_>) -> Result<LoadedFile, PrepareError> {
        let (config, tokenizer) = (&*self.config, &*self.tokenizer);
        let (tokens, key, from_cache) = source.tokens(config, tokenizer, &self.cache_dir, progress)?;
        check_vocabulary(&source.path, &tokens, tokenizer, self.vocab_size)?;
        let (digest, n_tokens) = (tokens.digest(), tokens.tokens().len());
        let skipped_list = skipped::write_list(&self.cache_dir, &key, &source.path, &tokens);
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
        Ok(LoadedFile { part, lens, weight, summary: Summary { from_cache, skipped_list, ..summary }, digest })
    }

    /// All files.
    pub(super) fn all(mut self, progress: OnProgress<'_>) -> Result<Loaded, PrepareError> {
        let (mut loaded, mut empty, mut bad) = (Loaded::default(), None, BadRecords::default());
        while let Some(next) = self.next_file(progress) {
            match next {
                Ok(file) => loaded.push(file),
                Err(error) if error.is_of_nothing() => empty = empty.or(Some(error)),
                // A user who mends one file does not want to meet the next one then.
                Err(PrepareError::Tokenize(error)) if error.is_of_records() && !self.config.skip_bad_records => {
                    bad.add(error)
                }
                Err(error) if bad.is_empty() || error.is_stop() => return Err(error),
                Err(_) => {
                    bad.leave_open();
                    break;
                }
            }
            if !bad.is_empty() && !bad.has_room_for(self.next_bytes()) {
                bad.leave_open();
                break;
            }
        }
        bad.refused()?;
        match empty.filter(|_| loaded.parts.is_empty()) {
            Some(error) => Err(error),
            None => Ok(loaded),
        }
    }

    /// A stream of `n_rows` rows, with its first part; the summary and the digest of that file.
    pub(super) fn into_stream(
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
pub(super) struct Source {
    dataset: Arc<DatasetConfig>,
    nth_dataset: usize,
    path: PathBuf,
    format: FileFormat,
    choice: Choice,
    is_one_of_several: bool,
}

/// The files of data sets.
pub(super) fn sources(datasets: &[DatasetConfig], purpose: Purpose, seed: u64) -> Result<Vec<Source>, SourceError> {
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
    /// The tokens of the file, their key, and whether they were in the cache.
    fn tokens(
        &self,
        config: &DataConfig,
        tokenizer: &Tokenizer,
        cache_dir: &Path,
        progress: OnProgress<'_>,
    ) -> Result<(TokenFile, [u8; 32], bool), PrepareError> {
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
            return Ok((file, key, true));
        }
        let (path, total_bytes) = (&self.path, file.len());
        let turn = Turn::wait(cache_dir, &key, PATIENCE, &|| progress(Progress { path, done_bytes: 0, total_bytes }))?;
        // Another process may have written it meanwhile.
        if let Some(file) = self.cached(cache_dir, &key)? {
            return Ok((file, key, true));
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
                let (choice, reader, skips_bad) = (&self.choice, &reader, config.skip_bad_records);
                let how = ReadRecords { format, choice, reader, tokenizer, skips_bad };
                tokenize_records(&file, &how, &mut writer, progress)?;
            }
        }
        file.check_unchanged(&content).map_err(TokenizeError::Read)?;
        Ok((writer.finish()?, key, false))
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
        if dataset.loss_weights && self.format != FileFormat::Text {
            options += " loss_weights";
        }
        if config.skip_bad_records && self.format != FileFormat::Text {
            options += " skip_bad_records";
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&FORMAT_VERSION.to_le_bytes());
        hasher.update(content.as_bytes());
        hasher.update(&tokenizer.fingerprint());
        hasher.update(options.as_bytes());
        *hasher.finalize().as_bytes()
    }
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
        n_records: 0,
        n_skipped: 0,
        skipped_list: None,
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
    let (n_records, n_skipped) = (tokens.n_records(), tokens.n_skipped());
    if pieces.is_empty() {
        return Err(PrepareError::Empty {
            path,
            n_documents,
            n_empty,
            n_dropped,
            dropped_lens,
            n_short,
            n_repeated,
            n_skipped,
        });
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
        n_records: n_records as usize,
        n_skipped: n_skipped as usize,
        skipped_list: None,
        n_rows,
    };
    Ok((part, lens, summary))
}

/// The rows of documents with these numbers and numbers of tokens.
pub(super) fn packed(lens: &[(u32, usize)], config: &DataConfig) -> Packing {
    match (config.sample_packing, config.sample_packing_sequentially) {
        _ if config.documents_per_row() > 1 => Packing::groups(lens.len(), config.documents_per_row()),
        (true, false) => Packing::best_fit(lens, config.sequence_len),
        (true, true) => Packing::sequential(lens, config.sequence_len),
        (false, _) => Packing::one_per_row(lens.iter().map(|(number, _)| *number).collect()),
    }
}

pub(super) fn row_shape(config: &DataConfig, pad_id: Option<u32>) -> RowShape {
    RowShape { len: config.sequence_len, second: config.second_row, pad_id: pad_id.unwrap_or(0) }
}
