//! How much messages, content parts and tokens count in the loss.

use phalanx_strategies::objective::{WEIGHT_MAX, WEIGHT_ONE};
use serde_json::Value;

use super::exact_json;
use super::record_error::RecordError;

/// A weight that a record gives, as it is stored: a multiple of `1 / WEIGHT_ONE`, so that sums of weights are exact. `what` names it in the error.
pub(super) fn weight(value: &Value, what: impl FnOnce() -> String) -> Result<f32, RecordError> {
    let number = value.as_bool().map(|flag| f64::from(u8::from(flag))).or_else(|| exact_json::as_f64(value));
    match number.filter(|number| (0.0..=f64::from(WEIGHT_MAX)).contains(number)) {
        Some(number) => Ok(((number * WEIGHT_ONE as f64).round() / WEIGHT_ONE as f64) as f32),
        None => Err(RecordError::NotAWeight { what: what(), found: exact_json::shown(value), most: WEIGHT_MAX as u32 }),
    }
}

/// A stored weight in whole parts of 1.
pub(super) fn counted(weight: f32) -> u64 {
    (f64::from(weight) * WEIGHT_ONE as f64) as u64
}

/// The tokens of a document, with marks for prediction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tokens {
    pub(crate) ids: Vec<u32>,
    /// How much each of them counts as a label, as bits of f32; none if all of them count once.
    pub(crate) weights: Vec<u32>,
}

impl Tokens {
    /// Tokens with weights, which are left out if all are 1.
    pub(super) fn weighted(ids: Vec<u32>, weights: &[f32]) -> Self {
        let has_other = weights.iter().any(|weight| *weight != 1.0);
        Self {
            ids,
            weights: if has_other { weights.iter().map(|weight| weight.to_bits()).collect() } else { Vec::new() },
        }
    }
}

impl From<Vec<u32>> for Tokens {
    fn from(ids: Vec<u32>) -> Self {
        Self { ids, weights: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn weights_are_whole_parts_of_one_so_that_their_sums_are_exact() {
        let read = |value: Value| weight(&value, || "it".into());
        let numbers = [0.1, 1e-3, 0.999_999_99, 1.0, 3.3, 1_000.123_456, 1_048_576.0];

        for number in numbers {
            let stored = read(json!(number)).unwrap();
            assert!((f64::from(stored) - number).abs() <= (number * 6e-8).max(3e-8), "{number}");
            assert_eq!(counted(stored) as f64 / WEIGHT_ONE as f64, f64::from(stored), "{number}");
        }
        assert_eq!([read(json!(0)), read(json!(1e-9)), read(json!(true))], [Ok(0.0), Ok(0.0), Ok(1.0)]);
    }

    #[test]
    fn what_is_no_weight_is_refused() {
        let not_finite = exact_json::value("[NaN, Infinity, -Infinity, 100000000000000000000000]").unwrap();
        let others = [json!(-0.5), json!(1_048_577), json!("1"), json!(null)];

        for value in not_finite.as_array().unwrap().iter().chain(&others) {
            let refused = weight(value, || "`weight` of a message".into()).unwrap_err().to_string();
            assert!(
                refused.starts_with("`weight` of a message is ") && refused.contains("from 0 to 1048576"),
                "{refused}"
            );
        }
    }
}
