//! Training on pairs of answers and on labelled ones, in files of TRL and of LLaMA-Factory.
//!
//! A file of LLaMA-Factory names its stage. One of TRL is for the trainer that has all its keys; where it has none of them, the data tell.

use serde_yaml_ng::{Mapping, Value};

use super::convert::Then::{Key, LeftOut, NoEffect, Only, Part};
use super::convert::{Converted, Rule, at};
use super::losses::Combined;
use super::shown;
use crate::config::preference::Rl;
use crate::config::yaml_1_1::{number, truth};
use std::path::Path;

/// What is trained on the pairs or labelled answers of a data set, if its first record has any.
pub(crate) type PairsAt<'a> = dyn Fn(&Path) -> Option<Rl> + 'a;

/// What is trained instead of the likelihood of texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    Dpo,
    Kto,
    /// CPO, and SimPO.
    Cpo,
    Orpo,
    Reward,
}

use Method::{Cpo, Dpo, Kto, Orpo, Reward};

pub(super) const NO_REINFORCEMENT: &str = "there is no reinforcement training";
const FROZEN: &str = "the model that is compared with is the one that training begins with";

/// Keys of the trainers, whatever the method.
pub(super) const RULES: &[Rule] = &[
    ("beta", Part),
    ("loss_weights", Part),
    ("label_smoothing", Part),
    ("simpo_gamma", Part),
    ("rpo_alpha", Key("rpo_alpha")),
    ("desirable_weight", Key("kto_desirable_weight")),
    ("undesirable_weight", Key("kto_undesirable_weight")),
    ("cpo_alpha", Key("cpo_alpha")),
    ("center_rewards_coefficient", Key("center_rewards_coefficient")),
    ("alpha", Only("0.0", "the reward of an answer is its log-likelihood")),
    ("ld_alpha", LeftOut("all tokens of an answer count alike")),
    ("f_divergence_type", Only("reverse_kl", "the divergence is reverse_kl")),
    ("f_alpha_divergence_coef", NoEffect),
    ("discopop_tau", Only("0.05", "the temperature of discopop is 0.05")),
    ("use_weighting", Only("false", "all pairs count alike")),
    (
        "reference_free",
        Only("false", "without a model to compare with, use `rl: cpo`, `simpo` or `orpo` in the result"),
    ),
    ("sync_ref_model", Only("false", FROZEN)),
    ("ref_model_mixup_alpha", NoEffect),
    ("ref_model_sync_steps", NoEffect),
    ("model_adapter_name", LeftOut(FROZEN)),
    ("ref_adapter_name", LeftOut(FROZEN)),
    ("ref_model_init_kwargs.*", NoEffect),
    ("force_use_ref_model", NoEffect),
    ("base_model_attribute_name", NoEffect),
    ("precompute_ref_log_probs", Part),
    ("precompute_ref_batch_size", NoEffect),
    ("use_logits_to_keep", NoEffect),
    ("use_liger_loss", NoEffect),
    ("generate_during_eval", NoEffect),
    ("is_encoder_decoder", NoEffect),
    ("label_pad_token_id", NoEffect),
    ("padding_value", NoEffect),
    ("disable_dropout", Only("true", "nothing is dropped while answers are compared")),
    ("tools", LeftOut("store the tools in a column `tools` of the data")),
    ("max_prompt_length", Part),
    ("max_completion_length", Part),
    ("reward_funcs", LeftOut(NO_REINFORCEMENT)),
    ("num_generations", LeftOut(NO_REINFORCEMENT)),
    // LLaMA-Factory.
    ("pref_beta", Part),
    ("pref_loss", Part),
    ("pref_ftx", Part),
    ("dpo_label_smoothing", Part),
    ("kto_chosen_weight", Part),
    ("kto_rejected_weight", Part),
    ("pref_bco_weight", LeftOut("the loss bco_pair stands alone; set `dpo_loss_type: bco_pair` in the result")),
    ("ref_model", LeftOut(FROZEN)),
    ("ref_model_adapters", LeftOut(FROZEN)),
    ("ref_model_quantization_bit", LeftOut(FROZEN)),
    ("reward_model", LeftOut(NO_REINFORCEMENT)),
    ("reward_model_adapters", LeftOut(NO_REINFORCEMENT)),
    ("reward_model_quantization_bit", LeftOut(NO_REINFORCEMENT)),
    ("reward_model_type", Only("lora", NO_REINFORCEMENT)),
    ("ppo_buffer_size", Only("1", NO_REINFORCEMENT)),
    ("ppo_epochs", Only("4", NO_REINFORCEMENT)),
    ("ppo_score_norm", LeftOut(NO_REINFORCEMENT)),
    ("ppo_target", Only("6", NO_REINFORCEMENT)),
    ("ppo_whiten_rewards", LeftOut(NO_REINFORCEMENT)),
];

const COMPARED: &[Method] = &[Dpo, Kto];
const OF_PAIRS: &[Method] = &[Dpo, Kto, Cpo, Orpo];
const OF_ALL: &[Method] = &[Dpo, Kto, Cpo, Orpo, Reward];

/// The trainers of TRL that have a key, and no other one has it.
const OWNERS: &[(&str, &[Method])] = &[
    ("beta", OF_PAIRS),
    ("loss_weights", &[Dpo]),
    ("label_smoothing", &[Dpo, Cpo]),
    ("simpo_gamma", &[Cpo]),
    ("cpo_alpha", &[Cpo]),
    ("alpha", &[Cpo]),
    ("rpo_alpha", &[Dpo]),
    ("desirable_weight", &[Kto]),
    ("undesirable_weight", &[Kto]),
    ("center_rewards_coefficient", &[Reward]),
    ("ld_alpha", &[Dpo]),
    ("f_divergence_type", &[Dpo]),
    ("f_alpha_divergence_coef", &[Dpo]),
    ("discopop_tau", &[Dpo]),
    ("use_weighting", &[Dpo]),
    ("reference_free", &[Dpo]),
    ("sync_ref_model", COMPARED),
    ("ref_model_mixup_alpha", COMPARED),
    ("ref_model_sync_steps", COMPARED),
    ("model_adapter_name", &[Dpo]),
    ("ref_adapter_name", &[Dpo]),
    ("ref_model_init_kwargs", COMPARED),
    ("force_use_ref_model", &[Dpo]),
    ("precompute_ref_log_probs", COMPARED),
    ("precompute_ref_batch_size", COMPARED),
    ("use_logits_to_keep", &[Dpo]),
    ("use_liger_loss", COMPARED),
    ("generate_during_eval", OF_PAIRS),
    ("is_encoder_decoder", &[Kto, Cpo, Orpo]),
    ("label_pad_token_id", OF_PAIRS),
    ("padding_value", OF_PAIRS),
    ("disable_dropout", OF_ALL),
    ("max_prompt_length", OF_PAIRS),
    ("max_completion_length", OF_PAIRS),
];
/// The same for words of `loss_type`; those that are in no row are losses of DPO.
const OWNERS_OF_LOSSES: &[(&str, &[Method])] = &[
    ("kto", &[Kto]),
    ("apo_zero_unpaired", &[Kto]),
    ("simpo", &[Cpo]),
    ("sigmoid", &[Dpo, Cpo]),
    ("hinge", &[Dpo, Cpo]),
    ("ipo", &[Dpo, Cpo]),
];
const LOSSES_OF_TEXTS: [&str; 3] = ["nll", "chunked_nll", "dft"];
/// Keys that only the training on texts has.
const OF_TEXTS: [&str; 4] = ["assistant_only_loss", "completion_only_loss", "packing", "dataset_text_field"];

impl Method {
    /// The method of a file, if it does not train on texts.
    pub(super) fn of(tool: &str, file: &Mapping, pairs_at: &PairsAt<'_>, to: &mut Converted) -> Option<Self> {
        match (tool, at(file, "stage").map(shown).as_deref()) {
            ("LLaMA-Factory", Some("dpo")) => Some(match at(file, "pref_loss").map(shown).as_deref() {
                Some("simpo") => Cpo,
                Some("orpo") => Orpo,
                _ => Dpo,
            }),
            ("LLaMA-Factory", Some("kto")) => Some(Kto),
            ("LLaMA-Factory", Some("rm")) => Some(Reward),
            ("LLaMA-Factory", _) => None,
            _ => Self::of_trl(file, pairs_at, to),
        }
    }

    fn of_trl(file: &Mapping, pairs_at: &PairsAt<'_>, to: &mut Converted) -> Option<Self> {
        let entries = at(file, "datasets").and_then(Value::as_sequence).into_iter().flatten();
        let mut names = entries.filter_map(|entry| entry.get("path")).chain(at(file, "dataset_name"));
        let seen = names.find_map(|name| pairs_at(Path::new(&shown(name))));
        let seen = seen.map(|rl| if rl == Rl::Kto { Kto } else { Dpo });
        let owners = owners(file);
        if owners.is_empty() {
            let is_of_texts = |key: &&str| at(file, key).is_some_and(|value| truth(value) != Some(false));
            let found = seen.filter(|_| !OF_TEXTS.iter().any(is_of_texts))?;
            to.notes.push(format!(
                "the data have {}: the file is taken for one of TRL's {} trainer; {OTHERS}",
                if found == Kto { "labelled answers" } else { "pairs of answers" },
                found.word()
            ));
            return Some(found);
        }
        let fits = |method: &Method| owners.iter().all(|(_, owners)| owners.contains(method));
        let fitting: Vec<Method> = OF_ALL.iter().copied().filter(fits).collect();
        let found = seen.filter(|found| fitting.contains(found)).or(fitting.first().copied());
        match found {
            Some(found) if fitting.len() > 1 => to.notes.push(format!(
                "`{}`: the file is taken for one of TRL's {} trainer; {OTHERS}",
                owners[0].0,
                found.word()
            )),
            Some(_) => {}
            None => {
                let (key, _) = owners[owners.len() - 1];
                to.leave_out(key, format!("no trainer of TRL has it beside `{}`", owners[0].0));
            }
        }
        found.or(Some(Dpo))
    }

    const fn word(self) -> &'static str {
        match self {
            Dpo => "DPO",
            Kto => "KTO",
            Cpo => "CPO",
            Orpo => "ORPO",
            Reward => "reward",
        }
    }

    /// Defaults of TRL's trainers that differ from those for texts.
    pub(super) fn defaults(self, tool: &str, to: &mut Converted) {
        // In the order of the data: the mismatched answers of KTO are those beside each other.
        if self == Kto && tool == "TRL" {
            to.set("shuffle", false);
        }
        if tool == "TRL" {
            to.set("learning_rate", self.rate_of_trl());
        }
        // Scores of texts that are cut would be those of other texts.
        if self == Reward && tool == "TRL" {
            to.set("excess_length_strategy", "drop");
        }
    }

    const fn rate_of_trl(self) -> f64 {
        if let Reward = self { 1e-4 } else { 1e-6 }
    }

    /// Sets what is trained, with its numbers.
    pub(super) fn apply(self, tool: &str, file: &Mapping, to: &mut Converted) {
        to.keys.remove("lora_dropout");
        let lowest = at(file, "lr_scheduler_kwargs.min_lr").and_then(number);
        if let Some(lowest) = lowest.filter(|_| tool == "TRL" && at(file, "learning_rate").is_none()) {
            to.set("cosine_min_lr_ratio", lowest / self.rate_of_trl());
        }
        for key in ["max_prompt_length", "max_completion_length"].into_iter().filter(|key| at(file, key).is_some()) {
            to.notes.push(format!(
                "`{key}`: prompts and answers are not cut by themselves here; a pair of more than `sequence_len` tokens loses the ends of its \
                 answers, and one whose prompt is as long is left out"
            ));
        }
        match self {
            Reward => to.set("reward_model", true),
            Dpo => to.set("rl", "dpo"),
            Kto => to.set("rl", "kto"),
            Cpo => to.set("rl", "cpo"),
            Orpo => to.set("rl", "orpo"),
        }
        match tool {
            "LLaMA-Factory" => self.of_llama_factory(file, to),
            _ => self.with_numbers_of_trl(file, to),
        }
    }

    fn with_numbers_of_trl(self, file: &Mapping, to: &mut Converted) {
        let beta = if self == Orpo { "orpo_alpha" } else { "rl_beta" };
        let set = |key: &str, ours: &str, to: &mut Converted| {
            if let Some(value) = at(file, key) {
                to.set_from(key, ours, value.clone());
            }
        };
        set("beta", beta, to);
        match self {
            Dpo => losses(file, to),
            Cpo => {
                if at(file, "label_smoothing").and_then(number).is_some_and(|x| x != 0.0) {
                    to.leave_out("label_smoothing", "labels are smoothed with dpo only");
                }
                match at(file, "loss_type").map(shown).as_deref() {
                    None | Some("sigmoid") => {
                        to.no_effect.extend(at(file, "simpo_gamma").map(|_| "simpo_gamma".into()))
                    }
                    Some("simpo") => {
                        to.set_from("loss_type", "rl", "simpo");
                        set("simpo_gamma", "simpo_gamma", to);
                    }
                    Some(_) => to.leave_out("loss_type", "of CPO, there are sigmoid and simpo"),
                }
            }
            Kto if at(file, "loss_type").is_some_and(|loss| loss != "kto") => {
                to.leave_out("loss_type", "of KTO, there is kto");
            }
            Kto | Orpo | Reward => {}
        }
        match (self, at(file, "precompute_ref_log_probs")) {
            (Dpo, Some(is_set)) => {
                to.set_from("precompute_ref_log_probs", "precompute_ref_log_probs", is_set.clone());
            }
            (_, Some(_)) => to.no_effect.push("precompute_ref_log_probs".into()),
            (_, None) => {}
        }
        if self == Kto && at(file, "train_sampling_strategy").is_none() {
            to.notes.push("`shuffle: false`: TRL's KTO trainer takes the data in their order by default".into());
        }
    }

    fn of_llama_factory(self, file: &Mapping, to: &mut Converted) {
        let numbers: &[(&str, &str)] = match self {
            Dpo => {
                &[("pref_beta", "rl_beta"), ("dpo_label_smoothing", "dpo_label_smoothing"), ("pref_ftx", "rpo_alpha")]
            }
            Kto => &[
                ("pref_beta", "rl_beta"),
                ("kto_chosen_weight", "kto_desirable_weight"),
                ("kto_rejected_weight", "kto_undesirable_weight"),
            ],
            Cpo => &[("pref_beta", "rl_beta"), ("simpo_gamma", "simpo_gamma"), ("pref_ftx", "cpo_alpha")],
            Orpo => &[("pref_beta", "orpo_alpha")],
            Reward => &[],
        };
        for (key, ours) in numbers {
            if let Some(value) = at(file, key) {
                to.set_from(key, ours, value.clone());
            }
        }
        let ftx = at(file, "pref_ftx").and_then(number).unwrap_or(0.0);
        match self {
            Dpo => {
                match at(file, "pref_loss").map(shown).as_deref() {
                    None | Some("sigmoid") => {}
                    Some(loss @ ("hinge" | "ipo")) => to.set_from("pref_loss", "dpo_loss_type", loss),
                    Some(_) => to.leave_out("pref_loss", "use sigmoid, hinge, ipo, orpo or simpo"),
                }
                if ftx == 0.0 {
                    to.keys.remove("rpo_alpha");
                }
            }
            Cpo => {
                to.set_from("pref_loss", "rl", "simpo");
                to.set("cpo_alpha", ftx);
            }
            Orpo => {
                if ftx != 0.0 {
                    to.leave_out("pref_ftx", "ORPO trains the likelihood of preferred answers with the weight 1");
                }
                to.notes.push("`pref_loss`: the likelihood of ORPO is that of prompts and preferred answers here, as in TRL; LLaMA-Factory leaves out prompts".into());
            }
            Kto => to.notes.push(
                "`stage`: KTO estimates the divergence from the answers of a microbatch here, as TRL does".into(),
            ),
            Reward => to
                .notes
                .push("`stage`: the head of scores has no bias here, and is stored as `score` of the model".into()),
        }
        if ftx != 0.0 && self != Orpo {
            to.notes.push("`pref_ftx`: the likelihood is an average over all tokens of a microbatch here; LLaMA-Factory averages over each answer first".into());
        }
    }
}

const OTHERS: &str = "for those of CPO, SimPO, ORPO, KTO and reward models, set `rl` or `reward_model` in the result";

/// Whether a file has a key that only TRL's trainers on answers have.
pub(super) fn is_of_trl(file: &Mapping) -> bool {
    !owners(file).is_empty()
}

/// The keys of a file that only some trainers have.
fn owners(file: &Mapping) -> Vec<(&'static str, &'static [Method])> {
    let of_keys = OWNERS.iter().copied().filter(|(key, _)| file.contains_key(*key));
    let words: Vec<String> = match at(file, "loss_type") {
        Some(Value::Sequence(words)) => words.iter().map(shown).collect(),
        word => word.map(shown).into_iter().collect(),
    };
    let losses = words.iter().filter(|word| !LOSSES_OF_TEXTS.contains(&&word[..]));
    let of_loss = |word: &String| match OWNERS_OF_LOSSES.iter().find(|(known, _)| known == word) {
        Some((_, owners)) => ("loss_type", *owners),
        None => ("loss_type", &[Dpo][..]),
    };
    let scores = at(file, "lora_task_type").is_some_and(|task| task == "SEQ_CLS");
    of_keys.chain(losses.map(of_loss)).chain(scores.then_some(("lora_task_type", &[Reward][..]))).collect()
}

/// The losses of DPO.
fn losses(file: &Mapping, to: &mut Converted) {
    let (losses, weights) = (at(file, "loss_type"), at(file, "loss_weights"));
    match Combined::of(losses.unwrap_or(&"sigmoid".into()), weights) {
        Ok(Combined { loss, alpha }) => {
            if let Some(smoothing) = at(file, "label_smoothing") {
                match &loss[..] {
                    "robust" | "exo_pair" => to.set_from("label_smoothing", "dpo_label_smoothing", smoothing.clone()),
                    "sigmoid" => {
                        to.set_from("label_smoothing", "dpo_label_smoothing", smoothing.clone());
                        to.notes.push("`label_smoothing`: TRL applies it to sigmoid up to version 0.28, as is done here, and not from 0.29 on".into());
                    }
                    _ => to.no_effect.push("label_smoothing".into()),
                }
            }
            if losses.is_some() {
                to.set_from("loss_type", "dpo_loss_type", loss);
            }
            if let Some(alpha) = alpha {
                to.set_from("loss_weights", "rpo_alpha", alpha);
            }
        }
        Err(why) => to.leave_out(if weights.is_some() { "loss_weights" } else { "loss_type" }, why),
    }
}
