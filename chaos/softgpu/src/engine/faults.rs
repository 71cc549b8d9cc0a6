//! Faults by plan: sticky errors, kernels that never end, allocations that fail, a slow device, slow copies.

use crate::codes::Code;
use crate::environment;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Which launches are meant: `7`, the seventh of all; `norm`, every one of this kernel; `norm#7`, its seventh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Which {
    kernel: Option<String>,
    nth: Option<u64>,
}

/// What happens to a launch instead of its execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Error(Code),
    Hang,
}

/// The plan and what was counted since it was made.
#[derive(Default)]
pub struct Faults {
    plan: Vec<(Which, Fault)>,
    launches: u64,
    launches_of: BTreeMap<String, u64>,
    allocation: u64,
    allocations: u64,
}

/// The value of `SOFTGPU_FAULT`.
pub fn parse_faults(text: &str) -> Option<Vec<(Which, Fault)>> {
    entries(text)
        .map(|entry| {
            let (which, code) = entry.rsplit_once(':')?;
            let code = code.parse().ok().filter(|c| *c != 0)?;
            Some((parse_which(which)?, Fault::Error(code)))
        })
        .collect()
}

/// The value of `SOFTGPU_HANG`.
pub fn parse_hangs(text: &str) -> Option<Vec<(Which, Fault)>> {
    entries(text).map(|entry| Some((parse_which(entry)?, Fault::Hang))).collect()
}

fn entries(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|e| !e.is_empty())
}

fn parse_which(text: &str) -> Option<Which> {
    if let Ok(nth) = text.parse() {
        return Some(Which { kernel: None, nth: Some(nth) }).filter(|_| nth > 0);
    }
    let (kernel, nth) = match text.split_once('#') {
        Some((kernel, nth)) => (kernel, Some(nth.parse().ok().filter(|n| *n > 0)?)),
        None => (text, None),
    };
    let is_name = !kernel.is_empty() && kernel.chars().all(|c| c.is_alphanumeric() || c == '_');
    is_name.then(|| Which { kernel: Some(kernel.into()), nth })
}

impl Faults {
    /// By the settings, with counters at zero.
    pub fn planned() -> Faults {
        let mut plan = parse_faults(&environment::text("SOFTGPU_FAULT")).unwrap_or_default();
        plan.extend(parse_hangs(&environment::text("SOFTGPU_HANG")).unwrap_or_default());
        Faults { plan, allocation: environment::number("SOFTGPU_ALLOC_FAIL"), ..Faults::default() }
    }

    /// Counts a launch. Returns the fault planned for it.
    pub fn on_launch(&mut self, kernel: &str) -> Option<Fault> {
        self.launches += 1;
        if self.plan.is_empty() {
            return None;
        }
        let of_kernel = self.launches_of.entry(kernel.into()).or_default();
        *of_kernel += 1;
        let (launches, of_kernel) = (self.launches, *of_kernel);
        let meant = |w: &Which| match &w.kernel {
            Some(name) => name == kernel && w.nth.is_none_or(|n| n == of_kernel),
            None => w.nth == Some(launches),
        };
        self.plan.iter().find(|(w, _)| meant(w)).map(|(_, fault)| *fault)
    }

    /// Counts an allocation of device memory. Returns whether it is planned to fail.
    pub fn fails_allocation(&mut self) -> bool {
        self.allocations += 1;
        self.allocations == self.allocation
    }
}

/// How much longer a kernel takes that took `took`.
pub fn slowness(took: Duration) -> Duration {
    let percent = environment::number("SOFTGPU_SLOW_PERCENT").saturating_sub(100);
    took.mul_f64(percent as f64 / 100.0) + Duration::from_micros(environment::number("SOFTGPU_SLOW_US"))
}

/// How much longer each capture takes.
pub fn capture_delay() -> Duration {
    Duration::from_micros(environment::number("SOFTGPU_CAPTURE_US"))
}

/// Whether copies between devices and pinned memory take longer.
pub fn copies_are_slow() -> bool {
    environment::number("SOFTGPU_COPY_US") > 0
}

/// Whether a copy whose turn came then is not done yet. The setting may change meanwhile.
pub fn is_copy_late(since: Instant) -> bool {
    since.elapsed() < Duration::from_micros(environment::number("SOFTGPU_COPY_US"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn which(kernel: Option<&str>, nth: Option<u64>) -> Which {
        Which { kernel: kernel.map(Into::into), nth }
    }

    #[test]
    fn faults_are_parsed_by_number_name_and_both() {
        let expected = vec![
            (which(None, Some(3)), Fault::Error(700)),
            (which(Some("norm"), None), Fault::Error(719)),
            (which(Some("adamw"), Some(2)), Fault::Error(214)),
        ];

        assert_eq!(parse_faults("3:700, norm:719,adamw#2:214"), Some(expected));
        for wrong in ["3", "3:x", "0:700", ":700", "a#0:1", "a#:1", "a b:1", "3:0"] {
            assert_eq!(parse_faults(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn fault_strikes_the_launch_that_it_names() {
        let plan = parse_faults("4:700,b#2:719").unwrap();
        let mut faults = Faults { plan, ..Faults::default() };

        let seen: Vec<_> = ["a", "b", "b", "a", "b"].map(|k| faults.on_launch(k)).into();

        assert_eq!(seen, [None, None, Some(Fault::Error(719)), Some(Fault::Error(700)), None]);
    }
}
