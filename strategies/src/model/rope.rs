//! Rotary positions: how a configuration stretches their frequencies, and the table of angles.

use super::hf_config::agreed;
use super::{HfConfig, ModelConfig, ModelError};

/// Name of the constant that holds the rotary table, `[2, P, D/2]`: cosines, then sines.
pub(super) const ROPE_TABLE: &str = "rope_table";

/// How rotary frequencies are stretched for long contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions divided by a factor. Source: Chen et al. 2023 (arXiv:2306.15595).
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Llama 3: low frequencies divided by a factor, high ones kept, a ramp between. Source: Dubey et al. 2024
    /// (arXiv:2407.21783), with the constants of the released configuration files.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` count as low frequencies.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` count as high frequencies.
        high_freq_factor: f64,
        /// Context length of the base model.
        original_max_positions: usize,
    },
}

/// The base of the frequencies, and how they are stretched: from `rope_parameters` (the new form), or from `rope_scaling` with
/// `rope_theta` beside it (the old form).
///
/// # Errors
/// When the forms contradict each other: transformers then takes one of them, and other tools take the other.
pub(super) fn read(hf: &HfConfig) -> Result<(f64, RopeScaling), ModelError> {
    let section = |key| Ok::<_, ModelError>(hf.section(key)?.filter(|section| !section.is_empty()).map(|s| (key, s)));
    let sections: Vec<_> = [section("rope_parameters")?, section("rope_scaling")?].into_iter().flatten().collect();
    let mut thetas = vec![("rope_theta".to_owned(), hf.number("rope_theta")?)];
    let mut scalings = Vec::new();
    for (key, section) in sections {
        thetas.push((format!("{key}.rope_theta"), section.number("rope_theta")?));
        scalings.push((key, scaling(hf, section)?));
    }
    if let [(first, a), (second, b)] = scalings.as_slice()
        && a != b
    {
        return Err(ModelError::Conflict { first: (*first).to_owned(), second: (*second).to_owned() });
    }
    // transformers reads the old form alone then, without the base of the new one; other tools read the new form.
    if let [(_, None), (new, Some(theta)), (old, None)] = thetas.as_slice() {
        let old = old.trim_end_matches(".rope_theta").to_owned();
        return Err(ModelError::Conflict { first: format!("{new}: {theta}"), second: old });
    }
    let theta = agreed(thetas)?.unwrap_or(10_000.0);
    Ok((theta, scalings.first().map_or(RopeScaling::None, |(_, scaling)| *scaling)))
}

/// What a section says of how the frequencies are stretched.
fn scaling(hf: &HfConfig, rope: &HfConfig) -> Result<RopeScaling, ModelError> {
    let missing = |field| ModelError::Missing { field, family: "model with scaled rotary embedding" };
    let number = |key| rope.number(key)?.ok_or(missing(key));
    let (kind, old_kind) = (rope.text("rope_type")?, rope.text("type")?);
    if let (Some(kind), Some(old)) = (kind, old_kind)
        && kind != old
    {
        return Err(ModelError::Conflict { first: format!("rope_type: {kind}"), second: format!("type: {old}") });
    }
    match kind.or(old_kind).unwrap_or("default") {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: number("factor")? }),
        "llama3" => {
            let original = "original_max_position_embeddings";
            let given = agreed([(original, hf.size(original)?), (original, rope.size(original)?)])?;
            let given = given.or(hf.size("max_position_embeddings")?);
            Ok(RopeScaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_positions: given.ok_or(missing(original))?,
            })
        }
        other => Err(ModelError::value("rope_type", other, "supported are default, linear, llama3")),
    }
}

impl ModelConfig {
    /// Rotary angle per position of each of the `D / 2` pairs.
    pub fn rope_frequencies(&self) -> Vec<f64> {
        let half = self.head_dim / 2;
        let base = (0..half).map(|i| self.rope_theta.powf(-2.0 * i as f64 / self.head_dim as f64));
        match self.rope_scaling {
            RopeScaling::None => base.collect(),
            RopeScaling::Linear { factor } => base.map(|f| f / factor).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                let original = original_max_positions as f64;
                let stretch = |f: f64| {
                    let wavelength = 2.0 * std::f64::consts::PI / f;
                    let position = original / wavelength - low_freq_factor;
                    let kept = (position / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    f * kept + f / factor * (1.0 - kept)
                };
                base.map(stretch).collect()
            }
        }
    }

    /// Contents of the constant of this name and shape; `None` if the model has no such constant.
    ///
    /// `rope_table`: `[2, P, D/2]`, cosines then sines. Angles are computed in f32 as in PyTorch, so that large positions
    /// round the same way.
    pub fn constant(&self, name: &str, shape: &[usize]) -> Option<Vec<f32>> {
        if name != ROPE_TABLE {
            return None;
        }
        let n_positions = shape.get(1).copied()?;
        let frequencies: Vec<f32> = self.rope_frequencies().iter().map(|f| *f as f32).collect();
        let angles = || (0..n_positions).flat_map(|p| frequencies.iter().map(move |f| p as f32 * f));
        Some(angles().map(|a| f64::from(a).cos() as f32).chain(angles().map(|a| f64::from(a).sin() as f32)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(rope: &str) -> ModelConfig {
        try_parse(rope).unwrap()
    }

    fn try_parse(rope: &str) -> Result<ModelConfig, ModelError> {
        let json = format!(
            r#"{{"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 172,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256, {rope}}}"#
        );
        ModelConfig::try_from(&serde_json::from_str::<HfConfig>(&json).unwrap())
    }

    #[test]
    fn old_and_new_rope_forms_mean_the_same() {
        let scaling = r#""factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64"#;

        let old = parse(&format!(r#""rope_theta": 500000.0, "rope_scaling": {{"type": "llama3", {scaling}}}"#));
        let new = parse(&format!(r#""rope_parameters": {{"rope_theta": 500000.0, "rope_type": "llama3", {scaling}}}"#));

        assert_eq!(old, new);
        assert!(old.rope_theta == 500_000.0 && matches!(old.rope_scaling, RopeScaling::Llama3 { .. }));
    }

    #[test]
    fn forms_that_contradict_each_other_are_refused_and_equal_ones_are_not() {
        let refused = |rope: &str| try_parse(rope).unwrap_err().to_string();
        let linear = r#"{"rope_type": "linear", "factor": 4.0}"#;

        let both = refused(&format!(r#""rope_parameters": {{"rope_type": "default"}}, "rope_scaling": {linear}"#));
        assert_eq!(both, "`rope_parameters` and `rope_scaling` contradict each other; remove the wrong one");
        let theta = refused(r#""rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}"#);
        assert!(
            theta.starts_with("`rope_theta: 10000` and `rope_parameters.rope_theta: 500000` contradict"),
            "{theta}"
        );
        let base = refused(&format!(
            r#""rope_parameters": {{"rope_theta": 500.0, {}, "rope_scaling": {linear}"#,
            &linear[1..]
        ));
        assert!(base.starts_with("`rope_parameters.rope_theta: 500` and `rope_scaling` contradict"), "{base}");
        assert!(refused(r#""rope_scaling": {"rope_type": "linear", "type": "default", "factor": 2}"#).contains("type"));
        let yarn = refused(r#""rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}"#);
        assert!(yarn.contains("yarn"), "{yarn}");
        let equal = parse(&format!(r#""rope_parameters": {linear}, "rope_scaling": {linear}, "rope_theta": 10000"#));
        assert_eq!(equal.rope_scaling, RopeScaling::Linear { factor: 4.0 });
        assert_eq!(parse(r#""rope_parameters": {"rope_theta": 7.0}, "rope_scaling": {}"#).rope_theta, 7.0);
    }

    #[test]
    fn original_length_is_that_of_the_model_if_it_is_not_given() {
        let scaling = r#""rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0"#;
        let original = |keys: &str| match parse(&format!(r#""rope_scaling": {{{scaling}}}{keys}"#)).rope_scaling {
            RopeScaling::Llama3 { original_max_positions, .. } => original_max_positions,
            other => panic!("{other:?}"),
        };

        assert_eq!(original(""), 256);
        assert_eq!(original(r#", "original_max_position_embeddings": 64"#), 64);
    }
}
