//! Converts a data file to a token file: records in parallel, in file order, in bounded memory.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rayon::prelude::*;
use serde_json::Value;

use super::bad_records::{BadRecords, explained, skipped};
use super::data_file::DataFile;
use super::document::{Document, Sample};
use super::loss_weights::Tokens;
use super::record::RecordReader;
use super::records::{Numbered, ReadError, RecordFile};
use super::sources::choice::Choice;
use super::text_chunks::{self, Cut};
use super::token_cache::TokenWriter;
use super::token_cache_format::{TRAINED, TokenCacheError, UNDESIRABLE};
use super::token_span::Piece;
use super::tokenize_error::{Stopped, TokenizeError};
use super::tokenizer::Tokenizer;
use super::tokenizer_error::TokenizerError;
use crate::config::datasets::FileFormat;

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
        writer.push(&[bos], &[])?;
    }
    let mut ids = Vec::new();
    text_chunks::tokenize(total_bytes, Cut::default(), encode, |pieces, done_bytes| {
        ids.clear();
        ids.extend(pieces.iter().map(|piece| piece.id | TRAINED));
        writer.push(&ids, &[])?;
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

/// Which records of a file are tokenized, and how.
pub(crate) struct ReadRecords<'a> {
    pub(crate) format: FileFormat,
    pub(crate) choice: &'a Choice,
    pub(crate) reader: &'a RecordReader,
    pub(crate) tokenizer: &'a Tokenizer,
    /// Leave out records that cannot be used.
    pub(crate) skips_bad: bool,
}

/// Tokenises the chosen records of a file.
pub(crate) fn tokenize_records(
    file: &DataFile,
    how: &ReadRecords<'_>,
    writer: &mut TokenWriter,
    progress: OnProgress<'_>,
) -> Result<(), TokenizeError> {
    let (path, total_bytes) = (file.path(), file.len());
    let ReadRecords { format, choice, reader, tokenizer, skips_bad } = *how;
    let mut records = RecordFile::open(file, format, &reader.fields_of_messages())?;
    let encode = |numbered: Numbered| {
        let line = numbered.line;
        encode_record(path, line, &numbered.into_value(path)?, reader, tokenizer)
    };
    let (mut n_read, mut bad) = (0, BadRecords::default());
    loop {
        let batch = match records.next_batch() {
            Err(error) if !bad.is_empty() && !skips_bad => {
                bad.add(error.into());
                break;
            }
            batch => batch?,
        };
        let done_bytes = records.done_bytes();
        if batch.is_empty() || choice.ends_before(n_read) {
            progress(Progress { path, done_bytes, total_bytes })?;
            break;
        }
        let first = n_read;
        if first == 0 {
            let media = reader.check_columns(&records.left_out());
            media.map_err(|reason| TokenizeError::Record { path: path.to_owned(), line: 1, reason })?;
        }
        n_read += batch.len() as u64;
        let chosen = (first..).zip(batch).filter(|(record, _)| choice.has(*record));
        let batch: Vec<Numbered> = chosen.map(|(_, numbered)| numbered).collect();
        writer.count_records(batch.len() as u64);
        let encoded: Vec<Result<Vec<Encoded>, TokenizeError>> = batch.into_par_iter().map(encode).collect();
        take(encoded, skips_bad, &records, &mut bad, writer)?;
        if !skips_bad && bad.is_enough(done_bytes) {
            bad.leave_open();
            break;
        }
        progress(Progress { path, done_bytes, total_bytes })?;
    }
    match skips_bad {
        true => bad.refused_as_most(path, writer.n_skipped(), writer.n_records()),
        false => bad.refused(),
    }
}

/// Writes the documents of records, and leaves out or collects the records that cannot be used. What comes after one that is not left
/// out is not needed.
fn take(
    encoded: Vec<Result<Vec<Encoded>, TokenizeError>>,
    skips_bad: bool,
    file: &RecordFile,
    bad: &mut BadRecords,
    writer: &mut TokenWriter,
) -> Result<(), TokenizeError> {
    for documents in encoded {
        match documents {
            Ok(documents) if bad.is_empty() || skips_bad => write_documents(documents, writer)?,
            Ok(_) => {}
            Err(error) => {
                let error = explained(error, &file.left_out());
                match skipped(&error) {
                    Some(record) if skips_bad => writer.skip(record),
                    // What is not about one record would be lost with it.
                    None if skips_bad => return Err(error),
                    _ => {}
                }
                bad.add(error);
            }
        }
    }
    Ok(())
}

/// The tokens of one document and the line that it came from.
type Encoded = (u64, Tokens);

fn write_documents(documents: Vec<Encoded>, writer: &mut TokenWriter) -> Result<(), TokenCacheError> {
    for (line, tokens) in documents {
        writer.push(&tokens.ids, &tokens.weights)?;
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
    let refused = |reason| TokenizeError::Record { path: path.to_owned(), line, reason };
    let samples = reader.samples(record).map_err(refused)?;
    let encode = |sample| Ok((line, encode_sample(sample, tokenizer)?));
    let encoded: Result<Vec<Encoded>, TokenizerError> = samples.into_iter().map(encode).collect();
    let mut encoded = encoded.map_err(|reason| refused(reason.into()))?;
    if reader.aligns_answers() {
        align(&mut encoded);
    }
    Ok(encoded)
}

/// The tokens of a sample; none for one that is left out, so that it is counted.
fn encode_sample(sample: Sample, tokenizer: &Tokenizer) -> Result<Tokens, TokenizerError> {
    let ids: Vec<u32> = match sample {
        Sample::Text(document) => return encode_document(&document, tokenizer),
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
        Sample::Tokens(tokens) => return Ok(tokens),
        Sample::Empty => Vec::new(),
    };
    Ok(ids.into())
}

/// The tokens of a document: those that have characters of a trained span carry [`TRAINED`], and so does an EOS right after one. A text that
/// brings its BOS or EOS gets no second one.
fn encode_document(document: &Document, tokenizer: &Tokenizer) -> Result<Tokens, TokenizerError> {
    let Document { text, trained, weights, .. } = document;
    if !weights.is_empty() {
        // A chat template writes what is around such a text.
        let pieces = pieces_of(document, tokenizer)?;
        let ids = marked(document, &pieces);
        let weights: Vec<f32> = ids.iter().zip(&pieces).map(|(id, piece)| weight_of(*id, piece, weights)).collect();
        return Ok(Tokens::weighted(ids, &weights));
    }
    let is_whole = matches!(&trained[..], [span] if *span == (0..text.len()));
    let body: Vec<u32> = if is_whole {
        tokenizer.encode(text)?.into_iter().map(|id| id | TRAINED).collect()
    } else {
        marked(document, &pieces_of(document, tokenizer)?)
    };
    Ok(bounded(document, body, tokenizer).into())
}

/// How much a token counts: as the last range that it has characters of. One that is not predicted counts as any other.
fn weight_of(id: u32, piece: &Piece, weights: &[(Range<usize>, f32)]) -> f32 {
    let own = || weights.iter().rev().find(|(span, _)| is_in(piece, span));
    if id & TRAINED == 0 { 1.0 } else { own().map_or(1.0, |(_, weight)| *weight) }
}

/// The tokens of a text, with marks.
fn marked(document: &Document, pieces: &[Piece]) -> Vec<u32> {
    let is_trained = |piece: &Piece| document.trained.iter().any(|span| is_in(piece, span));
    pieces.iter().map(|piece| piece.id | if is_trained(piece) { TRAINED } else { 0 }).collect()
}

/// Adds BOS and EOS where a document has them.
fn bounded(document: &Document, body: Vec<u32>, tokenizer: &Tokenizer) -> Vec<u32> {
    let Document { text, trained, bounded, .. } = document;
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
fn align(answers: &mut [Encoded]) {
    let is_trained = |token: &u32| token & TRAINED != 0;
    let first = answers.iter().filter_map(|(_, tokens)| tokens.ids.iter().position(is_trained)).min();
    for (_, tokens) in answers {
        let begin = tokens.ids.iter().position(is_trained);
        if let (Some(first), Some(begin)) = (first, begin) {
            tokens.ids[first..begin].iter_mut().for_each(|token| *token |= TRAINED);
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
    let Document { text, trained, bounded, .. } = document;
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
        let (format, choice) = (FileFormat::Json, &Choice::ALL);
        let how = ReadRecords { format, choice, reader: &reader, tokenizer, skips_bad: false };
        tokenize_records(&file, &how, &mut writer, &|_| Ok(()))?;
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
            let document = Document { text: "Was she sad? the".to_owned(), trained, weights: Vec::new(), bounded };
            let tokens = encode_document(&document, &tokenizer).unwrap().ids;
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
    fn tokens_count_as_the_last_range_that_they_have_characters_of() {
        let piece = |id, start, end| Piece { id, start, end };
        let weights = [(0..6, 0.5), (2..4, 3.0)];
        let found = [
            piece(1 | TRAINED, 0, 2),
            piece(2 | TRAINED, 1, 3),
            piece(3 | TRAINED, 4, 6),
            piece(4, 2, 3),
            piece(5 | TRAINED, 6, 7),
        ]
        .map(|piece| weight_of(piece.id, &piece, &weights));

        assert_eq!(found, [0.5, 3.0, 0.5, 1.0, 1.0]);
    }

    #[test]
    fn weights_of_messages_are_those_of_their_tokens() {
        let dir = tempfile::tempdir().unwrap();
        let dataset = DatasetConfig { loss_weights: true, ..DatasetConfig::new("", DatasetType::ChatTemplate) };
        let reader =
            RecordReader::new(&dataset, false, || Ok(Some((ChatTemplate::parse(CHATML, "", "")?, None)))).unwrap();
        let encoded = |weight: f32| {
            let record = serde_json::json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc", "weight": weight}]});
            encode_record(dir.path(), 1, &record, &reader, &Tokenizer::bytes()).unwrap().remove(0).1
        };

        let (half, once) = (encoded(0.5), encoded(1.0));

        assert_eq!((&half.ids, &once.weights[..]), (&once.ids, &[][..]));
        let weights: Vec<f32> = half.weights.iter().map(|bits| f32::from_bits(*bits)).collect();
        for (id, weight) in half.ids.iter().zip(weights) {
            assert_eq!(weight, if id & TRAINED == 0 { 1.0 } else { 0.5 });
        }
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
        assert!(many.starts_with("100 records cannot be used:\n") && many.contains("\n  and 90 more\n"), "{many}");
        assert_eq!(many.lines().count(), 13, "{many}");
    }

    #[test]
    fn record_without_its_field_is_named_by_line_and_fields() {
        let error = records(DatasetType::Completion, "{\"text\":\"ab\"}\n{\"body\":\"\"}\n").unwrap_err().to_string();

        assert!(error.ends_with("data.jsonl:2: field \"text\" is missing; the record has body"), "{error}");
    }

    #[test]
    fn answers_of_a_pair_begin_at_the_same_token() {
        let tokens = |trained: [bool; 4]| {
            Tokens::from(trained.map(|is_trained| if is_trained { 5 | TRAINED } else { 5 }).to_vec())
        };
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
