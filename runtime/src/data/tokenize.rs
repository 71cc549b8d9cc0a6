//! Converts a data file to a token file: records in parallel, in file order, in bounded memory.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::Value;
use thiserror::Error;

use super::data_file::DataFile;
use super::document::{Document, Sample};
use super::record::RecordReader;
use super::record_error::RecordError;
use super::records::{LeftOut, Numbered, ReadError, RecordFile};
use super::sources::choice::Choice;
use super::text_chunks::{self, Cut};
use super::token_cache::TokenWriter;
use super::token_cache_format::{TRAINED, TokenCacheError, UNDESIRABLE};
use super::token_span::Piece;
use super::tokenizer::Tokenizer;
use super::tokenizer_error::TokenizerError;
use crate::config::datasets::FileFormat;

/// Why a data file cannot be tokenised.
#[allow(missing_docs, reason = "each variant's message says what its fields are")]
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TokenizeError {
    /// The run was asked to stop.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A record does not have the fields that its type requires.
    #[error("{}:{line}: {reason}", path.display())]
    Record { path: PathBuf, line: u64, reason: RecordError },
    /// Several records cannot be used.
    #[error("{}", listed(first, *is_all))]
    Records { first: Vec<TokenizeError>, is_all: bool },
    /// A text file is not UTF-8.
    #[error(
        "{} is not UTF-8 text at byte {offset}; convert it, or train with the byte tokenizer, which takes any file",
        path.display()
    )]
    NotUtf8 { path: PathBuf, offset: u64 },
    /// The tokenizer refuses a text.
    #[error("{}: {reason}", path.display())]
    Tokenizer { path: PathBuf, reason: TokenizerError },
    /// The tokens cannot be stored.
    #[error(transparent)]
    Cache(#[from] TokenCacheError),
}

/// Progress of tokenising a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The data file.
    pub path: &'a Path,
    /// Tokenised bytes of the file.
    pub done_bytes: u64,
    /// Its length.
    pub total_bytes: u64,
}

/// The work was asked to stop; files that were finished before stay in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("stopped while the data was tokenized")]
pub struct Stopped;

/// Is called now and then while files are tokenized, and ends that with an error.
pub(crate) type OnProgress<'a> = &'a dyn Fn(Progress<'_>) -> Result<(), Stopped>;

/// Tokenises the plain text at `path` as one document: BOS if the tokenizer begins texts with it, then every token of the
/// file, all trained on. `file` holds the text; it is another file than that at `path` if that one is compressed.
pub(crate) fn tokenize_text(
    path: &Path,
    file: &File,
    tokenizer: &Tokenizer,
    writer: &mut TokenWriter,
    progress: OnProgress<'_>,
) -> Result<(), TokenizeError> {
    let read_error = |error| read_error(path, &error);
    let total_bytes = file.metadata().map_err(read_error)?.len();
    let encode = |start: u64, end: u64| {
        let mut bytes = vec![0; (end - start) as usize];
        file.read_exact_at(&mut bytes, start).map_err(read_error)?;
        encode_bytes(path, tokenizer, &bytes, start, end == total_bytes)
    };
    if let Some(bos) = tokenizer.document_start() {
        writer.push(&[bos])?;
    }
    let mut ids = Vec::new();
    text_chunks::tokenize(total_bytes, Cut::default(), encode, |pieces, done_bytes| {
        ids.clear();
        ids.extend(pieces.iter().map(|piece| piece.id | TRAINED));
        writer.push(&ids)?;
        progress(Progress { path, done_bytes, total_bytes })?;
        Ok::<(), TokenizeError>(())
    })?;
    writer.end_document(1);
    Ok(())
}

/// The pieces of `bytes`, which begin at `start` of the file and may begin and end inside a character.
fn encode_bytes(
    path: &Path,
    tokenizer: &Tokenizer,
    bytes: &[u8],
    start: u64,
    at_end: bool,
) -> Result<Vec<Piece>, TokenizeError> {
    let shifted = |pieces: Vec<Piece>, by: usize| {
        pieces.into_iter().map(|p| Piece { id: p.id, start: p.start + by, end: p.end + by }).collect()
    };
    if let Some(pieces) = tokenizer.encode_bytes(bytes) {
        return Ok(shifted(pieces, start as usize));
    }
    // A character has at most three continuation bytes; more are not UTF-8 and are reported below.
    let is_continuation = |byte: &&u8| **byte & 0xc0 == 0x80;
    let skipped = if start == 0 { 0 } else { bytes.iter().take(3).take_while(is_continuation).count() };
    let text = match std::str::from_utf8(&bytes[skipped..]) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() && !at_end => {
            let whole = &bytes[skipped..skipped + error.valid_up_to()];
            std::str::from_utf8(whole).expect("valid up to here")
        }
        Err(error) => {
            let offset = start + (skipped + error.valid_up_to()) as u64;
            return Err(TokenizeError::NotUtf8 { path: path.to_owned(), offset });
        }
    };
    let pieces = tokenizer.encode_pieces(text).map_err(|reason| tokenizer_error(path, reason))?;
    Ok(shifted(pieces, start as usize + skipped))
}

/// Tokenises the chosen records of a file.
pub(crate) fn tokenize_records(
    file: &DataFile,
    format: FileFormat,
    choice: &Choice,
    reader: &RecordReader,
    tokenizer: &Tokenizer,
    writer: &mut TokenWriter,
    progress: OnProgress<'_>,
) -> Result<(), TokenizeError> {
    let (path, total_bytes) = (file.path(), file.len());
    let mut records = RecordFile::open(file, format, &reader.fields_of_messages())?;
    let encode = |numbered: Numbered| {
        let line = numbered.line;
        encode_record(path, line, &numbered.into_value(path)?, reader, tokenizer)
    };
    let (mut n_read, mut unusable) = (0, Unusable::default());
    loop {
        let batch = match records.next_batch() {
            Err(error) if !unusable.errors.is_empty() => {
                unusable.add(error.into(), &records.left_out());
                return unusable.end(true);
            }
            batch => batch?,
        };
        let done_bytes = records.done_bytes();
        if batch.is_empty() || choice.ends_before(n_read) {
            progress(Progress { path, done_bytes, total_bytes })?;
            return unusable.end(true);
        }
        let first = n_read;
        if first == 0 {
            let media = reader.check_columns(&records.left_out());
            media.map_err(|reason| TokenizeError::Record { path: path.to_owned(), line: 1, reason })?;
        }
        n_read += batch.len() as u64;
        let chosen = (first..).zip(batch).filter(|(record, _)| choice.has(*record));
        let batch: Vec<Numbered> = chosen.map(|(_, numbered)| numbered).collect();
        let encoded: Vec<Result<Vec<Encoded>, TokenizeError>> = batch.into_par_iter().map(encode).collect();
        for documents in encoded {
            match documents {
                Ok(documents) if unusable.errors.is_empty() => write_documents(documents, writer)?,
                Ok(_) => {}
                Err(error) => unusable.add(error, &records.left_out()),
            }
        }
        if unusable.is_enough(done_bytes) {
            return unusable.end(done_bytes >= total_bytes);
        }
        progress(Progress { path, done_bytes, total_bytes })?;
    }
}

/// Records that cannot be used: as many as a message names, so that a user does not meet them one by one.
#[derive(Default)]
struct Unusable {
    errors: Vec<TokenizeError>,
    n_more: usize,
    /// Bytes of the file that were read when the first one was met.
    met_at: Option<u64>,
}

impl Unusable {
    /// Records that are named.
    const N_MAX: usize = 10;

    /// Bytes of the file that are searched for more after the first.
    const BYTES_MAX: u64 = 64 << 20;

    fn add(&mut self, error: TokenizeError, left_out: &[LeftOut]) {
        let error = match error {
            TokenizeError::Record { path, line, reason } => {
                TokenizeError::Record { path, line, reason: reason.with_type_of_column(left_out) }
            }
            other => other,
        };
        // All records of a file have the same columns, and one tokenizer.
        let of_all = |error: &TokenizeError| match error {
            TokenizeError::Record { reason: RecordError::ColumnType { field, .. }, .. } => Some(field.clone()),
            TokenizeError::Record { reason: RecordError::NoTemplate { .. }, .. } => Some(String::new()),
            _ => None,
        };
        if of_all(&error).is_some() && self.errors.iter().any(|known| of_all(known) == of_all(&error)) {
            return;
        }
        if self.errors.len() < Self::N_MAX { self.errors.push(error) } else { self.n_more += 1 }
    }

    /// Whether the message is complete; `done_bytes` of the file are read.
    fn is_enough(&mut self, done_bytes: u64) -> bool {
        if self.errors.is_empty() {
            return false;
        }
        let met_at = *self.met_at.get_or_insert(done_bytes);
        self.errors.len() == Self::N_MAX || done_bytes - met_at > Self::BYTES_MAX
    }

    /// The error, if a record cannot be used; `is_all` is whether all of the file was read.
    fn end(mut self, is_all: bool) -> Result<(), TokenizeError> {
        match self.errors.len() {
            0 => Ok(()),
            1 => Err(self.errors.remove(0)),
            _ => Err(TokenizeError::Records { first: self.errors, is_all: is_all && self.n_more == 0 }),
        }
    }
}

fn listed(errors: &[TokenizeError], is_all: bool) -> String {
    let lines: Vec<String> = errors.iter().map(|error| format!("  {error}")).collect();
    let at_least = if is_all { "" } else { "at least " };
    format!("{at_least}{} records cannot be used:\n{}", errors.len(), lines.join("\n"))
}

/// The tokens of one document and the line that it came from.
type Encoded = (u64, Vec<u32>);

fn write_documents(documents: Vec<Encoded>, writer: &mut TokenWriter) -> Result<(), TokenCacheError> {
    for (line, tokens) in documents {
        writer.push(&tokens)?;
        writer.end_document(line);
    }
    Ok(())
}

fn encode_record(
    path: &Path,
    line: u64,
    record: &Value,
    reader: &RecordReader,
    tokenizer: &Tokenizer,
) -> Result<Vec<Encoded>, TokenizeError> {
    let samples =
        reader.samples(record).map_err(|reason| TokenizeError::Record { path: path.to_owned(), line, reason })?;
    let encode = |sample| Ok((line, encode_sample(sample, tokenizer)?));
    let encoded: Result<Vec<Encoded>, _> = samples.into_iter().map(encode).collect();
    let mut encoded = encoded.map_err(|reason| tokenizer_error(path, reason))?;
    if reader.aligns_answers() {
        align(&mut encoded);
    }
    Ok(encoded)
}

/// The tokens of a sample; none for one that is left out, so that it is counted.
fn encode_sample(sample: Sample, tokenizer: &Tokenizer) -> Result<Vec<u32>, TokenizerError> {
    Ok(match sample {
        Sample::Text(document) => encode_document(&document, tokenizer)?,
        Sample::Answer { document, undesirable } => {
            let pieces = tokenizer.encode_pieces(&document.text)?;
            let tokens = bounded(&document, marked(&document, &pieces), tokenizer).into_iter();
            tokens.map(|token| if undesirable && token & TRAINED != 0 { token | UNDESIRABLE } else { token }).collect()
        }
        Sample::Segments(segments) => {
            let mut tokens = Vec::new();
            for segment in segments {
                let flag = if segment.is_trained { TRAINED } else { 0 };
                tokens.extend(tokenizer.encode(&segment.text)?.into_iter().map(|id| id | flag));
            }
            tokens
        }
        Sample::Tokens(tokens) => tokens,
        Sample::Empty => Vec::new(),
    })
}

/// The tokens of a document: those that have characters of a trained span carry [`TRAINED`], and so does an EOS right after one. A text that
/// brings its BOS or EOS gets no second one.
fn encode_document(document: &Document, tokenizer: &Tokenizer) -> Result<Vec<u32>, TokenizerError> {
    let Document { text, trained, .. } = document;
    let is_whole = matches!(&trained[..], [span] if *span == (0..text.len()));
    let body: Vec<u32> = if is_whole {
        tokenizer.encode(text)?.into_iter().map(|id| id | TRAINED).collect()
    } else {
        marked(document, &pieces_of(document, tokenizer)?)
    };
    Ok(bounded(document, body, tokenizer))
}

/// The tokens of a text, with marks.
fn marked(document: &Document, pieces: &[Piece]) -> Vec<u32> {
    let is_trained = |piece: &Piece| document.trained.iter().any(|span| is_in(piece, span));
    pieces.iter().map(|piece| piece.id | if is_trained(piece) { TRAINED } else { 0 }).collect()
}

/// Adds BOS and EOS where a document has them.
fn bounded(document: &Document, body: Vec<u32>, tokenizer: &Tokenizer) -> Vec<u32> {
    let Document { text, trained, bounded } = document;
    if !*bounded {
        return body;
    }
    let is_at = |token: Option<&u32>, id: u32| token.is_some_and(|token| token & !TRAINED == id);
    let begin = tokenizer.document_start().filter(|bos| !is_at(body.first(), *bos));
    let flag = if trained.last().is_some_and(|span| span.end == text.len()) { TRAINED } else { 0 };
    let end = tokenizer.eos_id().filter(|eos| !text.is_empty() && !is_at(body.last(), *eos));
    begin.into_iter().chain(body).chain(end.map(|eos| eos | flag)).collect()
}

/// Lets the answers of a pair begin at the same token: that at which the earlier one begins.
fn align(answers: &mut [(u64, Vec<u32>)]) {
    let is_trained = |token: &u32| token & TRAINED != 0;
    let first = answers.iter().filter_map(|(_, tokens)| tokens.iter().position(is_trained)).min();
    for (_, tokens) in answers {
        let begin = tokens.iter().position(is_trained);
        if let (Some(first), Some(begin)) = (first, begin) {
            tokens[first..begin].iter_mut().for_each(|token| *token |= TRAINED);
        }
    }
}

/// Whether a token has characters of a span: one that contains the border in front of it has the first ones.
fn is_in(piece: &Piece, span: &Range<usize>) -> bool {
    span.contains(&piece.start) || (piece.start < span.start && span.start < piece.end && !span.is_empty())
}

/// The tokens of a text. The prompt of an instruction is tokenised by itself where a token would contain the border to the answer, as it
/// is when the model is asked; a chat template writes what the model is asked with as one text.
fn pieces_of(document: &Document, tokenizer: &Tokenizer) -> Result<Vec<Piece>, TokenizerError> {
    let Document { text, trained, bounded } = document;
    let pieces = tokenizer.encode_pieces(text)?;
    let border = trained.first().map_or(0, |span| span.start);
    if !*bounded || !pieces.iter().any(|piece| piece.start < border && border < piece.end) {
        return Ok(pieces);
    }
    let mut apart = tokenizer.encode_pieces(&text[..border])?;
    let answer = tokenizer.encode_pieces(&text[border..])?;
    apart.extend(answer.into_iter().map(|p| Piece { id: p.id, start: p.start + border, end: p.end + border }));
    Ok(apart)
}

fn read_error(path: &Path, error: &std::io::Error) -> TokenizeError {
    ReadError::file(path, error).into()
}

fn tokenizer_error(path: &Path, reason: TokenizerError) -> TokenizeError {
    TokenizeError::Tokenizer { path: path.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::datasets::DatasetType;
    use crate::data::chat_template::{CHATML, ChatTemplate};
    use crate::data::config::DatasetConfig;
    use crate::data::token_cache::TokenFile;

    fn records(kind: DatasetType, content: &str) -> Result<TokenFile, TokenizeError> {
        records_with(&Tokenizer::bytes(), kind, content)
    }

    fn records_with(tokenizer: &Tokenizer, kind: DatasetType, content: &str) -> Result<TokenFile, TokenizeError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.jsonl");
        std::fs::write(&path, content).unwrap();
        let reader = RecordReader::new(&DatasetConfig::new(&path, kind), false, || {
            Ok(Some((ChatTemplate::parse(CHATML, "", "")?, None)))
        })
        .unwrap();
        let mut writer = TokenWriter::create(dir.path(), &[0; 32])?;
        let file = DataFile::open(&path)?;
        tokenize_records(&file, FileFormat::Json, &Choice::ALL, &reader, tokenizer, &mut writer, &|_| Ok(()))?;
        Ok(writer.finish()?)
    }

    fn decoded(tokens: &[u32]) -> String {
        let ids: Vec<u32> = tokens.iter().map(|token| token & !TRAINED).collect();
        Tokenizer::bytes().decode(&ids, false).unwrap()
    }

    fn trained(tokens: &[u32]) -> String {
        decoded(&tokens.iter().copied().filter(|token| token & TRAINED != 0).collect::<Vec<_>>())
    }

    #[test]
    fn every_line_is_a_document_between_bos_and_eos() {
        let file = records(DatasetType::Completion, "{\"text\":\"ab\"}\n\n{\"text\":\"c\"}").unwrap();

        assert_eq!(decoded(file.tokens()), "<|bos|>ab<|eos|><|bos|>c<|eos|>");
        assert_eq!(trained(file.tokens()), "ab<|eos|>c<|eos|>");
        assert_eq!(file.documents().iter().map(|d| (d.end, d.line)).collect::<Vec<_>>(), [(4, 1), (7, 3)]);
    }

    #[test]
    fn list_of_records_reads_like_lines() {
        let lines = records(DatasetType::Completion, "{\"text\":\"ab\"}\n{\"text\":\"c\"}\n").unwrap();

        let list = records(DatasetType::Completion, "\u{feff}\n[{\"text\":\"ab\"}, {\"text\":\"c\"}]").unwrap();

        assert_eq!(list.tokens(), lines.tokens());
        assert_eq!(list.documents(), lines.documents());
    }

    #[test]
    fn conversation_trains_on_assistant_tokens_only() {
        let line = r#"{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Yes, é."},{"role":"user","content":"So"},{"role":"assistant","content":"No."}]}"#;

        let file = records(DatasetType::ChatTemplate, line).unwrap();

        let trained = trained(file.tokens());
        assert_eq!(trained, "Yes, é.<|im_end|>No.<|im_end|>", "trained on {trained:?}");
        assert!(decoded(file.tokens()).starts_with("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes"));
    }

    #[test]
    fn instruction_trains_on_output_and_end_only() {
        let file = records(DatasetType::Alpaca, r#"{"instruction":"Add.","input":"1 2","output":"3"}"#).unwrap();

        let trained = trained(file.tokens());
        assert_eq!(trained, "3<|eos|>", "trained on {trained:?}");
    }

    #[test]
    fn first_word_of_an_answer_is_trained_on_where_a_token_would_join_it_to_the_prompt() {
        let tokenizer = Tokenizer::from_dir(&phalanx_needs::reference("models/tiny-llama2")).unwrap();
        let joined = |span: Range<usize>, bounded| {
            let trained = vec![span];
            let document = Document { text: "Was she sad? the".to_owned(), trained, bounded };
            let tokens = encode_document(&document, &tokenizer).unwrap();
            let trained: Vec<u32> = tokens.iter().filter(|&t| t & TRAINED != 0).map(|t| t & !TRAINED).collect();
            (tokens.iter().map(|t| t & !TRAINED).collect::<Vec<_>>(), tokenizer.decode(&trained, false).unwrap())
        };

        let (ids, answer) = joined(13..16, true);
        let (turns, turn) = joined(13..16, false);

        let apart = [tokenizer.encode("Was she sad? ").unwrap(), tokenizer.encode("the").unwrap()].concat();
        assert_eq!(ids[1..ids.len() - 1], apart, "the prompt is what the model is asked with");
        assert_eq!(answer.trim_start(), "the</s>");
        assert_eq!(turns, tokenizer.encode("Was she sad? the").unwrap());
        assert_eq!(turn.trim_start(), "the");
    }

    #[test]
    fn span_without_characters_trains_no_token() {
        let piece = Piece { id: 0, start: 2, end: 5 };
        assert!(is_in(&piece, &(3..9)) && is_in(&piece, &(2..3)) && is_in(&piece, &(0..3)));
        assert!(!is_in(&piece, &(3..3)) && !is_in(&piece, &(5..9)) && !is_in(&piece, &(0..2)));
    }

    #[test]
    fn text_that_brings_its_ends_gets_no_second_ones() {
        let lines = "{\"text\":\"<|bos|>ab<|eos|>\"}\n{\"text\":\"<|bos|>c\"}";
        let file = records(DatasetType::Completion, lines).unwrap();
        let line = r#"{"instruction":"Add.","input":"1 2","output":"3<|eos|>"}"#;
        let instruction = records(DatasetType::Alpaca, line).unwrap();

        assert_eq!(decoded(file.tokens()), "<|bos|>ab<|eos|><|bos|>c<|eos|>");
        assert_eq!(trained(instruction.tokens()), "3<|eos|>");
        assert!(decoded(instruction.tokens()).ends_with("3<|eos|>"));
    }

    #[test]
    fn masks_follow_the_tokens_of_a_subword_vocabulary() {
        let model = phalanx_needs::reference("models/tiny-llama2");
        let tokenizer = Tokenizer::from_dir(&model).unwrap();
        let trained = |kind, line: &str| {
            let file = records_with(&tokenizer, kind, line).unwrap();
            let ids: Vec<u32> = file.tokens().iter().filter(|&t| t & TRAINED != 0).map(|t| t & !TRAINED).collect();
            tokenizer.decode(&ids, false).unwrap()
        };

        let answer = trained(DatasetType::Alpaca, r#"{"instruction":"Was Lily happy?","output":"Yes, é she was."}"#);
        let turn = trained(
            DatasetType::ChatTemplate,
            r#"{"messages":[{"role":"user","content":"Was she?"},{"role":"assistant","content":"She was 語."}]}"#,
        );

        assert_eq!(answer, "Yes, é she was.</s>", "trained on {answer:?}");
        assert_eq!(turn, "She was 語.<|im_end|>", "trained on {turn:?}");
    }

    #[test]
    fn malformed_line_is_named_by_its_number() {
        let error = records(DatasetType::Completion, "{\"text\":\"ab\"}\n{\"text\":\n").unwrap_err();

        assert!(matches!(error, TokenizeError::Read(ReadError::Record { line: 2, .. })), "{error}");
    }

    #[test]
    fn records_that_cannot_be_used_are_named_together() {
        let few = records(DatasetType::Completion, "{\"body\":1}\n{\"text\":\"a\"}\n{\"text\":2}\n{")
            .unwrap_err()
            .to_string();
        let many = records(DatasetType::Completion, &"{\"body\":\"\"}\n".repeat(100)).unwrap_err().to_string();

        assert!(few.starts_with("3 records cannot be used:\n"), "{few}");
        for named in [":1: field \"text\" is missing", ":3: field \"text\" must be text", ":4: this is not valid JSON"]
        {
            assert!(few.contains(named), "{few}");
        }
        assert!(many.starts_with("at least 10 records") && many.lines().count() == 11, "{many}");
    }

    #[test]
    fn record_without_its_field_is_named_by_line_and_fields() {
        let error = records(DatasetType::Completion, "{\"text\":\"ab\"}\n{\"body\":\"\"}\n").unwrap_err().to_string();

        assert!(error.ends_with("data.jsonl:2: field \"text\" is missing; the record has body"), "{error}");
    }

    #[test]
    fn answers_of_a_pair_begin_at_the_same_token() {
        let tokens = |trained: [bool; 4]| trained.map(|is_trained| if is_trained { 5 | TRAINED } else { 5 }).to_vec();
        let mut pair = [(1, tokens([false, false, false, true])), (1, tokens([false, true, true, true]))];

        align(&mut pair);

        assert_eq!(pair[0].1, tokens([false, true, true, true]));
        assert_eq!(pair[1].1, tokens([false, true, true, true]));
    }

    #[test]
    fn bytes_that_are_not_utf8_are_refused_by_text_tokenizers_only() {
        let model = phalanx_needs::reference("models/tiny-llama2");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.txt");
        std::fs::write(&path, b"abc\xffdef").unwrap();
        let tokenize = |tokenizer: &Tokenizer| {
            let mut writer = TokenWriter::create(dir.path(), &[0; 32])?;
            tokenize_text(&path, &File::open(&path).unwrap(), tokenizer, &mut writer, &|_| Ok(()))?;
            Ok::<_, TokenizeError>(writer.finish()?.tokens().len())
        };

        assert_eq!(tokenize(&Tokenizer::bytes()), Ok(8));
        assert_eq!(
            tokenize(&Tokenizer::from_dir(&model).unwrap()),
            Err(TokenizeError::NotUtf8 { path: path.clone(), offset: 3 })
        );
    }
}
