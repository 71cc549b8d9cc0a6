//! Tokenises a long text in overlapping pieces, in parallel and in bounded memory, with the same result as tokenising it
//! whole.
//!
//! Two neighbouring pieces overlap. Where both give the same run of tokens at the same bytes, the second sequence continues
//! the first. In byte-pair encoding this is exact: a sequence of tokens is *the* encoding of its text if each adjacent pair
//! is the encoding of its own text, and every adjacent pair of the joined sequence occurs in one of the two encodings.
//! Pre-tokenizers need only a few characters of context, less than the required run. If no run agrees (in a megabyte of one
//! repeated letter, say), the text is tokenised whole.
//!
//! Source of the pair criterion: van Antwerpen and Neubeck 2024, "So many tokens, so little time", on the `bpe` crate.

use crate::data::token_span::Piece;
use rayon::prelude::*;

/// Consecutive tokens on which both sides must agree.
const RUN_TOKENS: usize = 8;

/// How a text is split.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    pub(crate) chunk_bytes: u64,
    /// Bytes that a piece reaches into each neighbour.
    pub(crate) overlap_bytes: u64,
}

impl Default for Cut {
    // Without a pre-tokenizer, a piece is one word for the merge queue, whose time per byte grows with its length. 2 KiB
    // hold hundreds of tokens.
    fn default() -> Self {
        Self { chunk_bytes: 64 << 10, overlap_bytes: 2 << 10 }
    }
}

/// Tokenises the `text_bytes` bytes that `encode` reads, passing ids to `emit` in order.
///
/// `encode(start, end)` returns the pieces of the bytes `start .. end`, narrowed to whole characters, with offsets in the
/// whole text. `emit` also receives the number of bytes done.
pub(crate) fn tokenize<E: Send>(
    text_bytes: u64,
    cut: Cut,
    encode: impl Fn(u64, u64) -> Result<Vec<Piece>, E> + Sync,
    mut emit: impl FnMut(&[Piece], u64) -> Result<(), E>,
) -> Result<(), E> {
    let n_chunks = text_bytes.div_ceil(cut.chunk_bytes).max(1);
    // Enough that no thread waits long for the slowest piece of a group.
    let n_at_once = 16 * rayon::current_num_threads() as u64;
    let (mut open, mut n_emitted) = (Vec::new(), 0);
    for first in (0..n_chunks).step_by(n_at_once as usize) {
        let group: Vec<Vec<Piece>> = (first..n_chunks.min(first + n_at_once))
            .into_par_iter()
            .map(|chunk| {
                let start = (chunk * cut.chunk_bytes).saturating_sub(cut.overlap_bytes);
                encode(start, text_bytes.min((chunk + 1) * cut.chunk_bytes + cut.overlap_bytes))
            })
            .collect::<Result<_, E>>()?;
        for (chunk, next) in (first..).zip(group) {
            if chunk == 0 {
                open = next;
                continue;
            }
            let border = chunk * cut.chunk_bytes;
            match seam(&open, &next, border as usize) {
                Some((n_open, n_next)) => {
                    emit(&open[..n_open], border)?;
                    n_emitted += n_open;
                    open = next[n_next..].to_vec();
                }
                // The emitted tokens are a prefix of the whole encoding, by the argument above; emit the rest.
                None => return emit(&encode(0, text_bytes)?[n_emitted..], text_bytes),
            }
        }
    }
    emit(&open, text_bytes)
}

/// Where to switch from `open` to `next`: in the middle of a run on which both agree, as close after `border` as possible,
/// because each sequence is unreliable at its own ends.
fn seam(open: &[Piece], next: &[Piece], border: usize) -> Option<(usize, usize)> {
    let mut i = open.partition_point(|piece| piece.start < next.first().map_or(0, |first| first.start));
    let (mut j, mut run, mut found) = (0, 0, None);
    while i < open.len() && j < next.len() {
        if open[i] == next[j] {
            run += 1;
            if run >= RUN_TOKENS {
                found = Some((i - RUN_TOKENS / 2, j - RUN_TOKENS / 2));
                if open[i].start >= border {
                    break;
                }
            }
            (i, j) = (i + 1, j + 1);
            continue;
        }
        run = 0;
        match (open[i].end, open[i].start).cmp(&(next[j].end, next[j].start)) {
            std::cmp::Ordering::Less => i += 1,
            std::cmp::Ordering::Greater => j += 1,
            std::cmp::Ordering::Equal => (i, j) = (i + 1, j + 1),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::tokenizer::Tokenizer;

    fn in_pieces(tokenizer: &Tokenizer, text: &str, cut: Cut) -> Vec<u32> {
        let mut ids = Vec::new();
        let encode = |start: u64, end: u64| -> Result<Vec<Piece>, String> {
            let (start, end) = (text.ceil_char_boundary(start as usize), text.floor_char_boundary(end as usize));
            let pieces = tokenizer.encode_pieces(&text[start..end]).map_err(|error| error.to_string())?;
            Ok(pieces.into_iter().map(|p| Piece { id: p.id, start: p.start + start, end: p.end + start }).collect())
        };
        let emit = |pieces: &[Piece], _| {
            ids.extend(pieces.iter().map(|piece| piece.id));
            Ok(())
        };
        tokenize(text.len() as u64, cut, encode, emit).unwrap();
        ids
    }

    #[test]
    fn pieces_join_to_the_encoding_of_the_whole_text() {
        let text = std::fs::read_to_string(phalanx_needs::reference("text.txt")).unwrap().repeat(25) + "naïve — 語";
        for model in ["models/tiny-llama2", "models/tiny-llama3"] {
            let tokenizer = Tokenizer::from_dir(&phalanx_needs::reference(model)).unwrap();
            let whole = tokenizer.encode(&text).unwrap();

            for chunk_bytes in [1000, 4099, 65_536] {
                let joined = in_pieces(&tokenizer, &text, Cut { chunk_bytes, overlap_bytes: 300 });

                assert!(joined == whole, "{model}: chunks of {chunk_bytes} bytes give other tokens than the whole");
            }
        }
    }

    #[test]
    fn special_token_across_a_border_stays_one_token() {
        let text = "abcdefgh<|eos|>ijklmnop<|bos|>".repeat(20);
        let tokenizer = Tokenizer::bytes();

        for chunk_bytes in 40..60 {
            let joined = in_pieces(&tokenizer, &text, Cut { chunk_bytes, overlap_bytes: 35 });

            assert_eq!(joined, tokenizer.encode(&text).unwrap(), "chunks of {chunk_bytes} bytes");
        }
    }

    #[test]
    fn text_without_an_agreeing_run_is_tokenised_whole() {
        // The vocabulary has "ll", so a piece that begins one letter earlier or later pairs all letters differently.
        let tokenizer = Tokenizer::from_dir(&phalanx_needs::reference("models/tiny-llama3")).unwrap();
        let text = format!("{}{}", "One day a little girl went out to play. ".repeat(30), "l".repeat(5001));

        for overlap_bytes in [9, 10] {
            let joined = in_pieces(&tokenizer, &text, Cut { chunk_bytes: 600, overlap_bytes });

            assert!(joined == tokenizer.encode(&text).unwrap(), "overlap of {overlap_bytes} bytes");
        }
    }

    #[test]
    fn empty_text_has_no_tokens() {
        assert!(in_pieces(&Tokenizer::bytes(), "", Cut::default()).is_empty());
    }
}
