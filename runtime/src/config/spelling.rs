//! Hints for an unknown key: the nearest known key, or why a well-known key of other tools is absent.

/// Keys of other tools, and hints for them.
const FOREIGN: &[(&[&str], &str)] = &[
    (&["lr"], "did you mean `learning_rate`?"),
    (&["epochs"], "did you mean `num_epochs`?"),
    (&["batch_size", "per_device_train_batch_size"], "did you mean `micro_batch_size`?"),
    (&["model_name_or_path", "base_model_config"], "did you mean `base_model`?"),
    (
        &["flash_attention", "sdp_attention", "xformers_attention", "attn_implementation"],
        "attention never stores the score matrix, so there is nothing to select; remove the line",
    ),
    (
        &["load_in_8bit", "load_in_4bit", "neftune_noise_alpha", "tf32", "fp8"],
        "this build has no such feature; remove the line",
    ),
    (
        &["wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model", "use_tensorboard"],
        "this build does not report to an experiment tracker; remove the line",
    ),
    (&["deepspeed", "fsdp", "fsdp_config", "fsdp_version"], "use `dp_shard_size` and `dp_replicate_size` instead"),
    (
        &["tokenizer_type", "model_type", "trust_remote_code", "strict"],
        "the model directory determines this; remove the line",
    ),
    (
        &["pad_to_sequence_len", "group_by_length", "eval_sample_packing"],
        "batches always have the full length; remove the line",
    ),
];

/// A hint for the unknown key. Keys of other tools are looked up only at the top level of the file.
pub(crate) fn hint_for(unknown: &str, known: &[&str], at_top: bool) -> Option<String> {
    if let Some((_, why)) = FOREIGN.iter().find(|(keys, _)| at_top && keys.contains(&unknown)) {
        return Some((*why).to_owned());
    }
    nearest(unknown, known).map(|key| format!("did you mean `{key}`?"))
}

/// The known key nearest to a misspelt one, if one is near enough to be plausible.
pub(crate) fn nearest<'a>(unknown: &str, known: &[&'a str]) -> Option<&'a str> {
    let written = unknown.to_lowercase().replace('-', "_");
    let distance = |key: &str| strsim::damerau_levenshtein(&written, key);
    let closest = known.iter().copied().min_by_key(|key| distance(key))?;
    let near_enough = (closest.len() / 3).max(2).min(written.len().saturating_sub(1));
    if distance(closest) <= near_enough {
        return Some(closest);
    }
    // An abbreviation or a longer form: `accumulation_steps`, `micro_batch_size_per_gpu`.
    let related = |key: &&str| written.len() > 4 && key.len() > 4 && (key.contains(&written) || written.contains(*key));
    known.iter().copied().filter(related).min_by_key(|key| distance(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[&str] = &["learning_rate", "gradient_accumulation_steps", "seed", "path"];

    #[test]
    fn misspelt_key_gets_the_nearest_key_as_a_suggestion() {
        assert_eq!(nearest("lerning_rate", KNOWN), Some("learning_rate"));
        assert_eq!(nearest("learning-rate", KNOWN), Some("learning_rate"));
        assert_eq!(nearest("accumulation_steps", KNOWN), Some("gradient_accumulation_steps"));
    }

    #[test]
    fn key_unlike_all_others_gets_no_suggestion() {
        assert_eq!(nearest("zebra_crossing_count", KNOWN), None);
        assert_eq!(nearest("x", KNOWN), None);
    }

    #[test]
    fn key_of_another_tool_is_explained_at_the_top_level_only() {
        assert!(hint_for("flash_attention", KNOWN, true).is_some_and(|hint| hint.contains("remove the line")));
        assert_eq!(hint_for("flash_attention", KNOWN, false), None);
    }
}
