//! Losses over pairs as TRL and Axolotl write them: lists, with weights.

use serde_yaml_ng::{Mapping, Value};

use super::Outcome::{self, Refused, Said};
use super::{Draft, Fate, Note, shown};
use crate::config::described::{describe, is_empty};
use crate::config::error::ConfigError;
use crate::config::yaml_1_1::number;

const LOSSES: &str = "dpo_loss_type";
/// The likelihood of preferred answers, in a list of losses.
const LIKELIHOOD: &str = "sft";

/// One loss, and the weight of the likelihood of preferred answers beside it.
pub(super) struct Combined {
    pub(super) loss: String,
    pub(super) alpha: Option<f64>,
}

impl Combined {
    /// What a list of losses and their weights mean; a weight that is not given is 1. The error is what would fit.
    pub(super) fn of(losses: &Value, weights: Option<&Value>) -> Result<Self, String> {
        let names: Vec<String> = match losses {
            Value::Sequence(names) => names.iter().map(shown).collect(),
            name => vec![shown(name)],
        };
        let weights = match weights {
            None => vec![1.0; names.len()],
            Some(Value::Sequence(weights)) => weights.iter().filter_map(number).collect(),
            Some(weight) => number(weight).into_iter().collect(),
        };
        if weights.len() != names.len() {
            return Err(format!("it must have a number for each of the {} losses", names.len()));
        }
        let (likelihoods, others): (Vec<_>, Vec<_>) =
            names.into_iter().zip(weights).partition(|(name, _)| name == LIKELIHOOD);
        match (&others[..], &likelihoods[..]) {
            ([(loss, 1.0)], []) => Ok(Self { loss: loss.clone(), alpha: None }),
            ([(loss, 1.0)], [(_, alpha)]) if *alpha >= 0.0 => Ok(Self { loss: loss.clone(), alpha: Some(*alpha) }),
            ([_], [] | [_]) => {
                Err("the loss has the weight 1, and `rpo_alpha` is that of the likelihood `sft` beside it".into())
            }
            _ => Err(
                "one loss is trained, and beside it the likelihood `sft`, with the weight `rpo_alpha`; name one loss"
                    .into(),
            ),
        }
    }
}

/// Weights of the losses of `dpo_loss_type`.
pub(super) fn dpo_loss_weights(weights: &Value, draft: &mut Draft<'_>) -> Outcome {
    let losses = draft.given(LOSSES).cloned().unwrap_or("sigmoid".into());
    match set(&losses, Some(weights), &mut draft.keys) {
        Ok(means) => Said(means),
        Err(why) => Refused(why),
    }
}

/// Replaces a list of losses.
pub(super) fn translate(keys: &mut Mapping, notes: &mut Vec<Note>, refused: &mut Vec<ConfigError>) {
    let Some(losses) = keys.get(LOSSES).filter(|losses| losses.is_sequence() && !is_empty(losses)).cloned() else {
        return;
    };
    match set(&losses, None, keys) {
        Ok(means) => notes.push(Note { key: LOSSES.into(), fate: Fate::Said(means) }),
        Err(instead) => {
            keys.remove(LOSSES);
            refused.push(ConfigError::Refused { key: LOSSES.into(), found: describe(&losses), instead });
        }
    }
}

fn set(losses: &Value, weights: Option<&Value>, keys: &mut Mapping) -> Result<String, String> {
    let Combined { loss, alpha } = Combined::of(losses, weights)?;
    let mut means = format!("it means `{LOSSES}: {loss}` here");
    if let Some(alpha) = alpha {
        if keys.get("rpo_alpha").is_some_and(|own| !is_empty(own)) {
            return Err("`rpo_alpha` is the weight of the likelihood `sft`; keep one of the two".into());
        }
        keys.insert("rpo_alpha".into(), alpha.into());
        means = format!("it means `{LOSSES}: {loss}` and `rpo_alpha: {alpha}` here");
    }
    keys.insert(LOSSES.into(), loss.into());
    Ok(means)
}

/// Keys of TRL's configuration that Axolotl passes on: of those, the scale of differences is known.
pub(super) fn trl(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    let key = match draft.given("rl").map(shown).as_deref() {
        Some("orpo") => "orpo_alpha",
        _ => "rl_beta",
    };
    let beta = value.as_mapping().filter(|keys| keys.len() == 1).and_then(|keys| keys.get("beta"));
    match beta.and_then(number) {
        Some(beta) if draft.given(key).and_then(number).is_none_or(|own| own == beta) => {
            draft.keys.insert(key.into(), beta.into());
            Said(format!("it means `{key}: {beta}` here"))
        }
        Some(beta) => Refused(format!("its `beta` means `{key}: {beta}`, and the file has another `{key}`; keep one of them")),
        None => Refused("of its keys only `beta` is known, which is `rl_beta`: there is no reinforcement training; remove the others".into()),
    }
}
