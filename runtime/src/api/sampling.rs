//! The choice of the next token from logits, with the settings and the numbers of `transformers`.

use serde_json::{Map, Value};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Number of most likely tokens to sample from; 0 means all.
    pub top_k: usize,
    /// Total probability of the most likely tokens to sample from.
    pub top_p: f32,
    /// Positive logits of tokens that the text has already are divided by it, negative ones multiplied; 1 changes nothing.
    /// Source: Keskar et al. 2019, CTRL, §4.1 (arXiv:1909.05858).
    pub repetition_penalty: f32,
    /// Seed; the same seed gives the same text.
    pub seed: u64,
}

/// Keys of transformers' generation settings that are not followed, each with the value that changes nothing.
fn rules_not_followed() -> Vec<(&'static str, Value)> {
    let lists = [
        "bad_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "stop_strings",
        "force_words_ids",
        "constraints",
    ];
    let others = [
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "watermarking_config",
        "penalty_alpha",
        "min_p",
        "top_h",
    ];
    let zeros = [
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "min_length",
        "min_new_tokens",
        "epsilon_cutoff",
        "eta_cutoff",
        "diversity_penalty",
    ];
    let ones = ["typical_p", "num_beams", "guidance_scale", "encoder_repetition_penalty"];
    let without =
        |names: &[&'static str], value: Value| names.iter().map(move |name| (*name, value.clone())).collect::<Vec<_>>();
    [without(&lists, Value::Null), without(&others, Value::Null), without(&zeros, 0.into()), without(&ones, 1.into())]
        .concat()
}

/// The number of most likely tokens that transformers samples from if a model recommends to sample, and no number.
const TOP_K: usize = 50;

impl Sampling {
    /// Always takes the most likely token.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, repetition_penalty: 1.0, seed: 0 };

    /// What a model's `generation_config.json` recommends; greedy if it does not sample.
    pub(crate) fn recommended(config: &Value) -> Sampling {
        let number = |key: &str| config[key].as_f64().map(|x| x as f32);
        let samples = config["do_sample"].as_bool() == Some(true);
        Sampling {
            temperature: if samples { number("temperature").unwrap_or(1.0) } else { 0.0 },
            top_k: config["top_k"].as_u64().map_or(if samples { TOP_K } else { 0 }, |k| k as usize),
            top_p: number("top_p").unwrap_or(1.0),
            repetition_penalty: number("repetition_penalty").unwrap_or(1.0),
            seed: 0,
        }
    }

    /// As [`Sampling::recommended`], with the defaults of OpenAI's API: without a recommendation, the temperature is 1.
    pub(crate) fn of_api(config: &Value) -> Sampling {
        let temperature = config["temperature"].as_f64().map_or(1.0, |x| x as f32);
        let top_k = config["top_k"].as_u64().map_or(0, |k| k as usize);
        Sampling { temperature, top_k, ..Sampling::recommended(config) }
    }

    /// A sentence on the rules of a `generation_config.json` that change which tokens are chosen and that are not followed here, if
    /// it has some.
    pub(crate) fn unfollowed(config: &Value) -> Option<String> {
        let is_set = |(name, without): &(&str, Value)| {
            let found = &config[*name];
            let is_empty = found.as_array().is_some_and(Vec::is_empty) || found.as_object().is_some_and(Map::is_empty);
            let is_same = found == without || found.is_number() && found.as_f64() == without.as_f64();
            !(found.is_null() || is_empty || is_same)
        };
        let rules = rules_not_followed();
        let found: Vec<&str> = rules.iter().filter(|rule| is_set(rule)).map(|(name, _)| *name).collect();
        (!found.is_empty()).then(|| {
            let names = found.join(", ");
            format!("generation_config.json sets {names}, which transformers follows and Phalanx does not: other tokens may be chosen")
        })
    }

    /// The first setting outside its range, as name, value and what fits.
    pub(crate) fn out_of_range(&self) -> Option<(&'static str, f32, &'static str)> {
        let is = |x: f32, fits: bool| !(x.is_finite() && fits);
        [
            ("temperature", self.temperature, is(self.temperature, self.temperature >= 0.0), "a number from 0 on"),
            ("top_p", self.top_p, is(self.top_p, self.top_p > 0.0 && self.top_p <= 1.0), "above 0 and at most 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                is(self.repetition_penalty, self.repetition_penalty > 0.0),
                "a number above 0",
            ),
        ]
        .into_iter()
        .find_map(|(name, found, is_bad, fits)| is_bad.then_some((name, found, fits)))
    }

    /// The next token of a text, given a uniform variate.
    pub(crate) fn choose(&self, logits: &[f32], text: &[u32], uniform: f64) -> u32 {
        if self.temperature <= 0.0 {
            return match self.repetition_penalty == 1.0 {
                true => most_likely(logits),
                false => most_likely(&self.penalised(logits, text)),
            };
        }
        let candidates = self.candidates(logits, text);
        let mut left = uniform * candidates.iter().map(|(_, w)| w).sum::<f64>();
        for (id, w) in &candidates {
            left -= w;
            if left < 0.0 {
                return *id;
            }
        }
        candidates.last().map_or(0, |(id, _)| *id)
    }

    /// The tokens to sample from, the most likely one first, and their weights relative to it.
    fn candidates(&self, logits: &[f32], text: &[u32]) -> Vec<(u32, f64)> {
        let logits = self.penalised(logits, text);
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let by_likelihood = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        if (1..order.len()).contains(&self.top_k) {
            order.select_nth_unstable_by(self.top_k - 1, by_likelihood);
            order.truncate(self.top_k);
        }
        order.sort_unstable_by(by_likelihood);
        let Some(max) = order.first().map(|id| f64::from(logits[*id as usize])) else { return Vec::new() };
        let weight = |id: &u32| ((f64::from(logits[*id as usize]) - max) / f64::from(self.temperature)).exp();
        let mut candidates: Vec<(u32, f64)> = order.iter().map(|id| (*id, weight(id))).collect();
        let total: f64 = candidates.iter().map(|(_, w)| w).sum();
        let mut kept = 0.0;
        let nucleus = candidates.iter().position(|(_, w)| {
            kept += w;
            kept >= f64::from(self.top_p) * total
        });
        candidates.truncate(nucleus.map_or(candidates.len(), |i| i + 1));
        candidates
    }

    fn penalised(&self, logits: &[f32], text: &[u32]) -> Vec<f32> {
        let mut scores = logits.to_vec();
        if self.repetition_penalty != 1.0 {
            for id in text {
                // From the original logit: a token that occurs twice has one penalty.
                let (Some(score), Some(logit)) = (scores.get_mut(*id as usize), logits.get(*id as usize)) else {
                    continue;
                };
                *score = if *logit < 0.0 { logit * self.repetition_penalty } else { logit / self.repetition_penalty };
            }
        }
        scores
    }
}

/// The token with the greatest logit; the lowest id on a tie, as in PyTorch's argmax.
fn most_likely(logits: &[f32]) -> u32 {
    let greater = |best: (u32, f32), next: (u32, f32)| if next.1 > best.1 { next } else { best };
    (0u32..).zip(logits.iter().copied()).reduce(greater).map_or(0, |(id, _)| id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const ALL: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };

    #[test]
    fn greedy_sampling_takes_the_most_likely_token_and_the_lower_id_on_a_tie() {
        assert_eq!(Sampling::GREEDY.choose(&[0.0, 3.0, 3.0, 1.0], &[], 0.99), 1);
        let penalty = Sampling { repetition_penalty: 1.5, ..Sampling::GREEDY };
        assert_eq!(penalty.choose(&[0.0, 3.0, 3.0, 1.0], &[1, 1], 0.99), 2);
    }

    #[test]
    fn rules_that_are_not_followed_are_named_if_they_change_something() {
        let named = json!({"bad_words_ids": [[4]], "no_repeat_ngram_size": 3, "num_beams": 4, "top_p": 0.9});
        let neutral =
            json!({"suppress_tokens": [], "sequence_bias": {}, "min_length": 0, "typical_p": 1.0, "min_p": null});

        let note = Sampling::unfollowed(&named).unwrap();

        assert!(note.contains("sets bad_words_ids, no_repeat_ngram_size, num_beams,"), "{note}");
        assert_eq!((Sampling::unfollowed(&neutral), Sampling::unfollowed(&Value::Null)), (None, None));
    }

    #[test]
    fn sampling_follows_the_probabilities_within_top_k_and_top_p() {
        let logits = [4f32.ln(), 3f32.ln(), 2f32.ln(), 1f32.ln()];
        let count = |s: Sampling| {
            let mut n = [0; 4];
            (0..1000).for_each(|i| n[s.choose(&logits, &[], (f64::from(i) + 0.5) / 1000.0) as usize] += 1);
            n
        };
        assert_eq!(count(ALL), [400, 300, 200, 100]);
        assert_eq!(count(Sampling { top_k: 2, ..ALL }), [571, 429, 0, 0]);
        assert_eq!(count(Sampling { top_p: 0.65, ..ALL }), [571, 429, 0, 0]);
        let cold = count(Sampling { temperature: 0.1, ..ALL });
        assert!(cold[0] > 900, "{cold:?}");
    }

    /// Golden numbers: probabilities after `RepetitionPenaltyLogitsProcessor(1.3)`, `TemperatureLogitsWarper(0.7)`,
    /// `TopKLogitsWarper(5)` and `TopPLogitsWarper(0.9)` of transformers; see `tests/peers/sampling.py`.
    #[test]
    fn probabilities_after_all_settings_are_those_of_transformers() {
        let logits = [1.2f32, -0.7, 0.3, 2.5, -1.9, 0.9, 2.1, 0.0];
        let sampling = Sampling { temperature: 0.7, top_k: 5, top_p: 0.9, repetition_penalty: 1.3, seed: 0 };

        let candidates = sampling.candidates(&logits, &[3, 1, 3, 4]);

        let total: f64 = candidates.iter().map(|(_, w)| w).sum();
        let found: Vec<(u32, f64)> = candidates.iter().map(|(id, w)| (*id, w / total)).collect();
        assert_eq!(found.len(), GOLDEN.len(), "{found:?}");
        for ((id, p), (expected_id, expected_p)) in found.iter().zip(GOLDEN) {
            assert!(id == expected_id && (p - expected_p).abs() < 1e-6, "{found:?}");
        }
    }

    const GOLDEN: &[(u32, f64)] = &[(6, 0.447785983), (3, 0.347779390), (0, 0.123791816), (5, 0.080642812)];

    #[test]
    fn recommendation_of_a_model_is_read_and_ranges_are_checked() {
        let config = json!({"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 20});

        let sampling = Sampling::recommended(&config);

        assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (0.6, 0.9, 20));
        assert_eq!(Sampling::recommended(&json!({"temperature": 0.6})).temperature, 0.0);
        let top_k =
            |config: Value| [Sampling::recommended(&config), Sampling::of_api(&config)].map(|found| found.top_k);
        assert_eq!(top_k(json!({"do_sample": true})), [TOP_K, 0]);
        assert_eq!(top_k(json!({"do_sample": true, "top_k": 0})), [0, 0]);
        assert_eq!(top_k(json!({"do_sample": true, "top_k": 7})), [7, 7]);
        assert_eq!(sampling.out_of_range(), None);
        assert_eq!(Sampling { top_p: 0.0, ..sampling }.out_of_range().map(|(name, ..)| name), Some("top_p"));
        assert_eq!(
            Sampling { temperature: f32::NAN, ..ALL }.out_of_range().map(|(name, ..)| name),
            Some("temperature")
        );
    }
}
