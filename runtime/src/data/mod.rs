//! From the user's files to batches of token ids.
//!
//! The way of the data: a file's records become text with marked spans to learn ([`record`]), text becomes token ids
//! ([`tokenizer`]), ids go into a memory-mapped file that is made once ([`token_cache`]), documents are laid into rows
//! (`packing`), and a batch is copied out of the rows that the sampler names ([`rows`]). [`prepare`] is the front door.

pub mod chat_template;
pub mod config;
pub mod prepare;
pub mod record;
pub mod rows;
pub mod text_stream;
pub mod token_cache;
pub mod tokenize;
pub mod tokenizer;

mod byte_vocabulary;
mod packing;
mod text_chunks;
