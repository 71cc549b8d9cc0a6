//! From the user's files to batches of token ids.
//!
//! Data flow: a file's records ([`sources`], [`records`]) become text with marked spans to train on ([`record`]), text becomes token ids
//! ([`tokenizer`]), ids are cached in a file ([`token_cache`]), documents are packed into rows (`packing`),
//! and a batch is copied from the rows that the sampler selects ([`rows`]). [`prepare`] is the entry point; files of a stream follow while
//! the job trains (`stream`).

mod bad_records;
pub mod chat_spans;
pub mod chat_template;
pub mod columns;
pub mod config;
pub(crate) mod data_file;
pub mod document;
pub(crate) mod end_of_turn;
pub(crate) mod exact_json;
pub(crate) mod gguf_vocabulary;
mod preference;
pub mod prepare;
pub(crate) mod prepare_error;
mod preparer;
pub mod record;
pub mod record_error;
pub mod records;
pub mod rows;
pub mod shown;
pub(crate) mod skipped;
pub mod sources;
pub(crate) mod stream;
mod summary;
pub(crate) mod template_sources;
pub mod text_stream;
pub mod token_cache;
pub mod token_cache_format;
pub mod token_changes;
pub(crate) mod token_pieces;
pub mod token_span;
pub mod tokenize;
pub mod tokenize_error;
pub mod tokenizer;

mod byte_vocabulary;
pub(crate) mod conversation;
mod conversation_forms;
mod document_layout;
mod function_calls;
mod held_out;
mod jinja;
mod labelled;
mod loss_weights;
mod mistral_regex;
#[cfg(test)]
mod named_templates_tests;
mod packing;
mod pretokenized;
mod prompt_completion;
mod prompts;
mod reader_differences;
pub(crate) mod recognised;
mod segments;
mod side_tokens;
mod splitting;
mod text_chunks;
mod thinking;
mod token_reader;
mod token_turn;
pub mod tokenizer_error;
mod tokenizer_files;
mod training_parts;
mod transformers_class;
