//! Hints for an unknown key: the nearest known key.

use super::foreign;

/// Keys of other tools with the name of the key here.
const SYNONYMS: &[(&str, &str)] = &[
    ("lr", "learning_rate"),
    ("epochs", "num_epochs"),
    ("num_train_epochs", "num_epochs"),
    ("lr_scheduler_type", "lr_scheduler"),
    ("optim", "optimizer"),
    ("dataset", "datasets"),
    ("dataset_name", "datasets"),
];

/// A hint for the unknown key. Keys of other tools are looked up only at the top level of the file.
pub(crate) fn hint_for(unknown: &str, known: &[&str], at_top: bool) -> Option<String> {
    let synonym = SYNONYMS.iter().find(|(word, _)| at_top && *word == unknown).map(|(_, key)| *key);
    let of_axolotl: Vec<&str> = if at_top { foreign::names().collect() } else { Vec::new() };
    let synonym = synonym.or_else(|| foreign::synonym(unknown).filter(|_| at_top));
    let key = synonym.or_else(|| nearest(unknown, known)).or_else(|| nearest(unknown, &of_axolotl))?;
    Some(format!("did you mean `{key}`?"))
}

/// The known key nearest to a misspelt one, if one is near enough to be plausible.
pub(crate) fn nearest<'a>(unknown: &str, known: &[&'a str]) -> Option<&'a str> {
    let written = unknown.to_lowercase().replace('-', "_");
    let distance = |key: &str| strsim::damerau_levenshtein(&written, key);
    let closest = known.iter().copied().min_by_key(|key| distance(key))?;
    if distance(closest) <= (closest.len() / 5).max(1).min(written.len().saturating_sub(1)) {
        return Some(closest);
    }
    // An abbreviation or a longer form: `accumulation_steps`, `micro_batch_size_per_gpu`.
    let related = |key: &&str| {
        let (short, long) = (written.len().min(key.len()), written.len().max(key.len()));
        short > 4 && 2 * short > long && (key.contains(&written) || written.contains(*key))
    };
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
    fn key_that_shares_only_a_part_with_others_gets_no_suggestion() {
        let known = ["model", "base_model", "tokenizer", "save_steps"];

        for unknown in ["lora_model_dir", "hub_model_id", "load_best_model_at_end", "model_parallel"] {
            assert_eq!(nearest(unknown, &known), None, "{unknown}");
        }
        assert_eq!(nearest("save_step", &known), Some("save_steps"));
        assert_eq!(nearest("bsae_model", &known), Some("base_model"));
    }

    #[test]
    fn word_of_another_tool_is_explained_at_the_top_level_only() {
        assert_eq!(hint_for("lr", KNOWN, true).as_deref(), Some("did you mean `learning_rate`?"));
        assert_eq!(hint_for("lr", KNOWN, false), None);
        assert_eq!(hint_for("flash_atention", KNOWN, true).as_deref(), Some("did you mean `flash_attention`?"));
    }
}
