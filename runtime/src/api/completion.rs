//! One request for a continuation: its limits, the texts that end it, and the likelihood of its tokens.

use super::generate::Generator;
use super::sampling::Sampling;
use crate::data::text_stream::TextStream;
use crate::data::tokenizer::Tokenizer;
use crate::error::JobError;
use crate::error::generate::GenerateError;
use phalanx_strategies::rng::CounterRng;
use std::sync::Arc;

/// What is wanted of a continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Most tokens to generate.
    pub max_new: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Texts that end the continuation; they are not part of it.
    pub stop: Vec<String>,
    /// Tokens that end it besides the model's own, such as the one that ends a turn of a chat.
    pub stop_ids: Vec<u32>,
    /// Whether neither `stop_ids` nor the model's own end-of-text tokens end the continuation.
    pub ignore_eos: bool,
    /// Number of most likely tokens to report for each token; `None` reports no likelihoods.
    pub n_top: Option<usize>,
}

/// A token and its natural logarithm of probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Likely {
    /// The token.
    pub id: u32,
    /// Its log-probability, before any setting of the sampling.
    pub logprob: f32,
}

/// A generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// The token.
    pub token: Likely,
    /// The most likely tokens in its place, the most likely one first.
    pub top: Vec<Likely>,
    /// Characters of the continuation before its text.
    pub offset: usize,
}

/// Why a continuation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// An end-of-text token.
    Stop,
    /// A stop text, which is cut off with the text behind it.
    StopText,
    /// The limit of tokens, or the longest text of the model.
    Length,
    /// The receiver wants no more.
    Cancelled,
}

/// The end of a continuation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Why it ended.
    pub finish: Finish,
    /// Tokens that were generated, an end-of-text token included.
    pub n_new: usize,
}

impl Completion {
    /// Continues `prompt`. For every token, `see` gets the text that has become certain, which may be empty, and the token's
    /// likelihood if it was asked for; it returns whether to go on. An end-of-text token has a likelihood and no text. A last
    /// call may have text without a token.
    ///
    /// # Errors
    /// When a setting is out of range, or the prompt is empty or too long.
    pub fn run(
        &self,
        generator: &mut Generator,
        prompt: &[u32],
        mut see: impl FnMut(&str, Option<Chosen>) -> bool,
    ) -> Result<Ended, JobError> {
        if let Some((name, found, fits)) = self.sampling.out_of_range() {
            return Err(GenerateError::Sampling { name, found: found.to_string(), fits }.into());
        }
        generator.check(prompt)?;
        let tokenizer = Arc::clone(generator.tokenizer());
        let mut stream = TextStream::new(&tokenizer);
        for id in prompt {
            // The text of the first new token can depend on the last ones of the prompt.
            stream.push(*id)?;
        }
        let special = self.special_stops(&tokenizer);
        let is_end = |id: &u32| self.stop_ids.contains(id) || tokenizer.stop_ids().contains(id);
        let mut offset = 0;
        let mut held = HeldBack::new(&self.stop);
        let mut ids = prompt.to_vec();
        let rng = CounterRng::new(self.sampling.seed).fork_named("generate");
        let (mut finish, mut n_new) = (Finish::Length, 0);
        for i in 0..self.max_new {
            if ids.len() >= generator.max_len() {
                break;
            }
            let logits = generator.logits(&ids)?;
            let next = self.sampling.choose(logits, &ids, rng.uniform(i as u64));
            let is_end = special.contains(&next) || !self.ignore_eos && is_end(&next);
            let chosen = self.n_top.map(|n| Chosen { offset, ..chosen(logits, next, n) });
            n_new += 1;
            if is_end {
                if chosen.is_some() && !see("", chosen) {
                    return Ok(Ended { finish: Finish::Cancelled, n_new });
                }
                finish = Finish::Stop;
                break;
            }
            ids.push(next);
            let text = stream.push(next)?;
            offset += text.chars().count();
            let (text, is_stopped) = held.push(&text);
            if !see(&text, chosen) {
                return Ok(Ended { finish: Finish::Cancelled, n_new });
            }
            if is_stopped {
                return Ok(Ended { finish: Finish::StopText, n_new });
            }
        }
        let (text, is_stopped) = held.push(&stream.finish()?);
        let rest = if is_stopped { text } else { text + &held.text };
        if !rest.is_empty() && !see(&rest, None) {
            finish = Finish::Cancelled;
        } else if is_stopped {
            finish = Finish::StopText;
        }
        Ok(Ended { finish, n_new })
    }

    /// Ids of stop texts that are one special token. These never appear in a text; other tokens do, as what they stand for, which is not
    /// what the vocabulary writes.
    fn special_stops(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let of_stop =
            |(text, id, is_special): (String, u32, bool)| (is_special && self.stop.contains(&text)).then_some(id);
        tokenizer.added_tokens().into_iter().filter_map(of_stop).collect()
    }
}

/// The likelihoods of the tokens of a text, as if each were generated after the earlier ones. The first one has none; their
/// offsets are not counted.
///
/// # Errors
/// When the text is empty or too long.
pub fn likelihoods(generator: &mut Generator, ids: &[u32], n_top: usize) -> Result<Vec<Option<Chosen>>, JobError> {
    let mut found = vec![None];
    let vocab_size = generator.vocab_size();
    generator.each_logits(ids, |first, rows| {
        let next = ids.iter().skip(first + 1);
        found.extend(rows.chunks(vocab_size).zip(next).map(|(row, id)| Some(chosen(row, *id, n_top))));
    })?;
    Ok(found)
}

/// A token among the logits of its position, at the beginning of a text.
pub fn chosen(logits: &[f32], id: u32, n_top: usize) -> Chosen {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    let normaliser = f64::from(max) + total.ln();
    let likely = |id: u32| Likely { id, logprob: (f64::from(logits[id as usize]) - normaliser) as f32 };
    let by_likelihood = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let mut order: Vec<u32> = if n_top > 0 { (0..logits.len() as u32).collect() } else { Vec::new() };
    if (1..order.len()).contains(&n_top) {
        order.select_nth_unstable_by(n_top - 1, by_likelihood);
        order.truncate(n_top);
    }
    order.sort_unstable_by(by_likelihood);
    Chosen { token: likely(id), top: order.into_iter().map(likely).collect(), offset: 0 }
}

/// Text that may be the beginning of a stop text.
struct HeldBack<'a> {
    stop: &'a [String],
    text: String,
}

impl<'a> HeldBack<'a> {
    fn new(stop: &'a [String]) -> Self {
        Self { stop, text: String::new() }
    }

    /// Takes more text; returns the text that is certain, and whether a stop text follows it.
    fn push(&mut self, more: &str) -> (String, bool) {
        self.text += more;
        let stop = || self.stop.iter().filter(|stop| !stop.is_empty());
        if let Some(at) = stop().filter_map(|stop| self.text.find(stop.as_str())).min() {
            return (self.text[..at].to_owned(), true);
        }
        let begins_stop = |at: &usize| stop().any(|stop| stop.starts_with(&self.text[*at..]));
        let certain = self.text.char_indices().map(|(at, _)| at).find(begins_stop).unwrap_or(self.text.len());
        (self.text.drain(..certain).collect(), false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_before_a_stop_text_is_returned_and_its_beginnings_are_held_back() {
        let stop = ["User:".to_owned(), "\n\n".to_owned()];
        let mut held = HeldBack::new(&stop);

        assert_eq!(held.push("Hello U"), ("Hello ".to_owned(), false));
        assert_eq!(held.push("s"), (String::new(), false));
        assert_eq!(held.push("eful é\n"), ("Useful é".to_owned(), false));
        assert_eq!(held.push("\nUser:"), (String::new(), true));
    }

    #[test]
    fn likelihoods_are_logarithms_of_probabilities() {
        let logits = [4f32.ln(), 3f32.ln(), 2f32.ln(), 1f32.ln()];

        let chosen = chosen(&logits, 2, 2);

        assert!((chosen.token.logprob - 0.2f32.ln()).abs() < 1e-6);
        let top: Vec<(u32, f32)> = chosen.top.iter().map(|likely| (likely.id, likely.logprob.exp())).collect();
        assert!(matches!(top[..], [(0, a), (1, b)] if (a - 0.4).abs() < 1e-6 && (b - 0.3).abs() < 1e-6), "{top:?}");
    }
}
