//! A number of steps, written as such or as a share of the run, whose length is known only with the data.

use serde_yaml_ng::Value;

use super::at::At;
use super::error::ConfigError;
use super::setting::Setting;
use super::yaml_1_1::whole;

/// A number of steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Steps {
    /// This many.
    Count(u64),
    /// This share of all steps of the run, above 0 and below 1.
    Share(f64),
}

impl Steps {
    /// The number of steps in a run of `total_steps`; a share is rounded up, as in Hugging Face's trainer.
    pub fn of(self, total_steps: u64) -> u64 {
        match self {
            Self::Count(n) => n,
            Self::Share(share) => (total_steps as f64 * share).ceil() as u64,
        }
    }
}

/// Steps between two occurrences of what happens `per_epoch` times in each epoch of `epoch_steps`, or else every `steps` steps of
/// a run of `total_steps`; `None` if it never happens.
pub fn interval(steps: Option<Steps>, per_epoch: Option<u64>, epoch_steps: f64, total_steps: u64) -> Option<u64> {
    match per_epoch.filter(|n| *n > 0) {
        Some(n) => Some(((epoch_steps / n as f64).ceil() as u64).max(1)),
        None => steps.map(|steps| steps.of(total_steps)).filter(|n| *n > 0),
    }
}

impl Setting for Steps {
    fn fits() -> String {
        "a whole number of steps, or a share of all steps between 0 and 1".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        match (whole(value), f64::read(value, at)) {
            (Some(n), _) => Ok(Self::Count(n)),
            (None, Ok(share)) if share > 0.0 && share < 1.0 => Ok(Self::Share(share)),
            _ => Err(at.mismatch(value, Self::fits())),
        }
    }
    fn write(&self) -> Value {
        match self {
            Self::Count(n) => n.write(),
            Self::Share(share) => share.write(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_is_of_all_steps_and_rounded_up() {
        assert_eq!(Steps::Share(0.25).of(100), 25);
        assert_eq!(Steps::Share(0.25).of(10), 3);
        assert_eq!(Steps::Share(0.001).of(10), 1);
        assert_eq!(Steps::Count(7).of(10), 7);
    }

    #[test]
    fn occurrences_per_epoch_divide_the_steps_of_an_epoch_and_go_before_a_number_of_steps() {
        assert_eq!(interval(Some(Steps::Count(500)), Some(4), 100.0, 300), Some(25));
        assert_eq!(interval(Some(Steps::Count(500)), Some(4), 10.0, 30), Some(3));
        assert_eq!(interval(None, Some(100), 10.0, 30), Some(1));
        assert_eq!(interval(Some(Steps::Count(500)), None, 100.0, 300), Some(500));
        assert_eq!(interval(Some(Steps::Share(0.5)), Some(0), 100.0, 300), Some(150));
    }

    #[test]
    fn nothing_or_0_never_happens() {
        assert_eq!(interval(None, None, 100.0, 300), None);
        assert_eq!(interval(Some(Steps::Count(0)), None, 100.0, 300), None);
    }
}
