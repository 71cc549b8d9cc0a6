//! Errors of the links between the GPUs of a machine: whose fault they are.
//!
//! Both ends of a link report its errors, and every GPU behind a switch those of the switch. If each of them failed its GPU, one event
//! would cost all GPUs of the machine. And most kinds of them matter only if they come again.
//!
//! Invariants:
//! - `LINK-ERRORS-1` An error that several GPUs report within [`TOGETHER`] is the fault of none of them.
//! - `LINK-ERRORS-2` Any other error counts against its GPU, which fails at the number of errors that its kind permits.
//!
//! Source: NVIDIA, "Xid Errors" with its catalog, `WORKFLOW_NVLINK_ERR`.

use std::time::{Duration, Instant};

/// Reports within this time may have one cause.
const TOGETHER: Duration = Duration::from_secs(1);

/// See the [module](self). The owner passes the time.
#[derive(Debug)]
pub(crate) struct LinkErrors(Vec<OfGpu>);

#[derive(Clone, Debug, Default)]
struct OfGpu {
    latest: Option<Instant>,
    undecided: Option<Undecided>,
    n: u32,
}

#[derive(Clone, Debug)]
struct Undecided {
    since: Instant,
    text: String,
    /// Errors at which the GPU fails.
    n_max: u32,
}

impl LinkErrors {
    /// No errors on `n_gpus` GPUs.
    pub(crate) fn new(n_gpus: usize) -> LinkErrors {
        LinkErrors(vec![OfGpu::default(); n_gpus])
    }

    /// A GPU reports an error. `n_max` such errors fail it.
    pub(crate) fn handle(&mut self, now: Instant, gpu: usize, text: &str, n_max: u32) {
        let gpu = &mut self.0[gpu];
        gpu.latest = Some(now);
        gpu.undecided.get_or_insert_with(|| Undecided { since: now, text: text.to_owned(), n_max });
    }

    /// When the next decision is due.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.0.iter().filter_map(|gpu| Some(gpu.undecided.as_ref()?.since + TOGETHER)).min()
    }

    /// The GPUs that fail now, and their errors.
    pub(crate) fn failed(&mut self, now: Instant) -> Vec<(usize, String)> {
        let latest: Vec<Option<Instant>> = self.0.iter().map(|gpu| gpu.latest).collect();
        let mut failed = Vec::new();
        for (i, gpu) in self.0.iter_mut().enumerate() {
            let Some(error) = gpu.undecided.take_if(|error| error.since + TOGETHER <= now) else { continue };
            let is_together = |other: &Instant| *other + TOGETHER >= error.since && *other <= error.since + TOGETHER;
            let is_shared =
                latest.iter().enumerate().any(|(j, other)| j != i && other.as_ref().is_some_and(is_together));
            gpu.n += u32::from(!is_shared);
            if !is_shared && gpu.n >= error.n_max {
                failed.push((i, error.text));
            }
        }
        failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// The GPUs that fail by errors at these times, all of a kind.
    fn failed(n_max: u32, reports: &[(u32, usize)]) -> Vec<usize> {
        let (begin, mut errors) = (Instant::now(), LinkErrors::new(4));
        let mut failed = Vec::new();
        for (at, gpu) in reports {
            let now = begin + *at * MS;
            failed.extend(errors.failed(now));
            errors.handle(now, *gpu, "an error", n_max);
        }
        let due = errors.due().unwrap();
        assert!(errors.failed(due - MS).is_empty());
        failed.extend(errors.failed(due + TOGETHER));
        assert_eq!(errors.due(), None);
        failed.into_iter().map(|(gpu, _)| gpu).collect()
    }

    #[test]
    fn error_that_one_gpu_reports_is_its_fault() {
        assert_eq!(failed(1, &[(0, 2)]), [2]);
        assert_eq!(failed(1, &[(0, 2), (5_000, 0)]), [2, 0]);
    }

    #[test]
    fn error_that_several_gpus_report_at_once_is_the_fault_of_none() {
        assert_eq!(failed(1, &[(0, 0), (3, 1), (400, 2), (900, 3)]), [0; 0]);
        assert_eq!(failed(1, &[(0, 0), (999, 1)]), [0; 0]);
        assert_eq!(failed(1, &[(0, 0), (2_001, 1)]), [0, 1]);
    }

    #[test]
    fn gpu_fails_at_the_third_error_of_a_kind_that_may_come_twice() {
        let alone = [(0, 1), (10_000, 1), (20_000, 1)];

        assert_eq!(failed(3, &alone[..2]), [0; 0]);
        assert_eq!(failed(3, &alone), [1]);
        // One of the three is that of a switch.
        assert_eq!(failed(3, &[(0, 1), (9_500, 0), (10_000, 1), (20_000, 1)]), [0; 0]);
    }

    #[test]
    fn burst_of_reports_is_one_error() {
        assert_eq!(failed(3, &[(0, 1), (1, 1), (2, 1), (3, 1)]), [0; 0]);
    }
}
