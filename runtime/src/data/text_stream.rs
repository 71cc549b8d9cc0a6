//! Text from tokens that arrive one at a time, without ever showing half a character.

use super::tokenizer::Tokenizer;
use super::tokenizer_error::TokenizerError;

/// No character needs more tokens than this in any byte-level vocabulary; tokens that are still undecodable then are not
/// text, or are the replacement character itself.
const PENDING_TOKENS_MAX: usize = 8;

/// Turns a stream of ids into pieces of text whose concatenation is the text of all of them.
///
/// A token may hold part of a character, or a space that appears only after another token; so each token is decoded
/// together with the tokens of the previous piece, and the difference is its text.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Tokens of the piece shown last, then those not shown yet.
    ids: Vec<u32>,
    n_shown: usize,
    shown: String,
}

impl<'a> TextStream<'a> {
    /// An empty stream; special tokens will add no text.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), n_shown: 0, shown: String::new() }
    }

    /// Takes the next token and returns the text that has become certain, which may be empty.
    ///
    /// # Errors
    /// When the id is not in the vocabulary; the stream is then unchanged.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.ids.push(id);
        let text = match self.tokenizer.decode(&self.ids, true) {
            Ok(text) => text,
            Err(error) => {
                self.ids.pop();
                return Err(error);
            }
        };
        let n_pending = self.ids.len() - self.n_shown;
        if self.tokenizer.ends_inside_character(&self.ids, &text) && n_pending < PENDING_TOKENS_MAX {
            return Ok(String::new());
        }
        self.show(text)
    }

    /// Ends the text and returns the rest, even if it is half a character.
    ///
    /// # Errors
    /// Only errors that an earlier `push` would have reported.
    pub fn finish(mut self) -> Result<String, TokenizerError> {
        let text = self.tokenizer.decode(&self.ids, true)?;
        self.show(text)
    }

    fn show(&mut self, text: String) -> Result<String, TokenizerError> {
        let new = match text.strip_prefix(&self.shown) {
            Some(new) => new.to_owned(),
            // A decoder may take back the bytes before one that is no text; what was shown stays.
            None => self.tokenizer.decode(&self.ids[self.n_shown..], true)?,
        };
        // Tokens shown before the last piece can no longer change what follows.
        self.ids.drain(..self.n_shown);
        self.n_shown = self.ids.len();
        self.shown = self.tokenizer.decode(&self.ids, true)?;
        Ok(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn streamed_pieces_join_to_the_whole_text(text in "\\PC{0,40}") {
            let tokenizer = Tokenizer::bytes();
            let mut stream = TextStream::new(&tokenizer);

            let mut joined = String::new();
            for id in tokenizer.encode(&text).unwrap() {
                let piece = stream.push(id).unwrap();
                prop_assert!(!piece.contains(char::REPLACEMENT_CHARACTER) || text.contains(char::REPLACEMENT_CHARACTER));
                joined += &piece;
            }
            joined += &stream.finish().unwrap();

            prop_assert_eq!(joined, tokenizer.decode(&tokenizer.encode(&text).unwrap(), true).unwrap());
        }
    }

    #[test]
    fn half_a_character_is_held_back_until_it_is_whole() {
        let tokenizer = Tokenizer::bytes();
        let mut stream = TextStream::new(&tokenizer);

        let pieces: Vec<String> = "é!".bytes().map(|byte| stream.push(u32::from(byte)).unwrap()).collect();

        assert_eq!(pieces, ["", "é", "!"]);
    }

    #[test]
    fn bytes_that_are_not_text_after_a_byte_that_is_are_not_lost() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference/models/tiny-llama2");
        let tokenizer = Tokenizer::from_dir(&dir).unwrap();
        let id = |text: &str| (0..512).find(|id| tokenizer.token_text(*id).as_deref() == Some(text)).unwrap();
        let mut stream = TextStream::new(&tokenizer);

        let mut shown: String = [&[id("<0x30>")][..], &[id("<0xDB>"); 23]]
            .concat()
            .into_iter()
            .map(|id| stream.push(id).unwrap())
            .collect();
        shown += &stream.finish().unwrap();

        assert_eq!(shown, format!("0{}", "\u{fffd}".repeat(23)));
    }

    #[test]
    fn bytes_that_are_not_text_are_returned_after_a_bounded_wait() {
        let tokenizer = Tokenizer::bytes();
        let mut stream = TextStream::new(&tokenizer);

        let shown: String = (0..64).map(|_| stream.push(0x80).unwrap()).collect();

        assert!(shown.contains(char::REPLACEMENT_CHARACTER));
        assert!(stream.ids.len() <= 2 * PENDING_TOKENS_MAX);
    }
}
