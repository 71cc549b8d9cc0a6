//! One line about a step, as wide as its reader's terminal: what matters most comes in first, and what does not fit is left out.
//! `metrics.jsonl` has all of it.

use crate::events::StepMetrics;
use crate::units::{human_bytes, short_duration};
use std::collections::BTreeMap;
use std::time::Duration;

/// Columns of a reader that does not tell, such as a file.
pub(crate) const COLUMNS: usize = 80;

/// Weight of the latest step in the mean duration of a step.
const NEWEST_SHARE: f64 = 0.1;

/// A mean of the latest steps, from which the rest of the run is estimated.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    mean_step_s: Option<f64>,
}

impl Pace {
    /// Adds a step.
    pub(crate) fn see(&mut self, m: &StepMetrics) {
        let step_s = m.step_ms / 1e3;
        self.mean_step_s = Some(self.mean_step_s.map_or(step_s, |mean| mean + NEWEST_SHARE * (step_s - mean)));
    }

    /// The time that this many steps take; `None` before the first step.
    pub(crate) fn of(&self, n_steps: u64) -> Option<Duration> {
        Duration::try_from_secs_f64(self.mean_step_s? * n_steps as f64).ok()
    }
}

/// Parts of a line in their order, each with its rank: parts of a higher rank are left out first.
type Parts = Vec<(u8, String)>;

/// The line of a step.
pub(crate) fn step_line(m: &StepMetrics, pace: &Pace, columns: usize) -> String {
    let mut parts: Parts = vec![
        (0, format!("step {:5}", m.step)),
        (0, format!("loss {:8.5}", m.loss)),
        (5, format!("grad {}", significant(m.grad_norm))),
        (4, format!("lr {:.2e}", m.lr)),
    ];
    parts.extend(of_pairs(&m.scalars).map(|text| (3, text)));
    parts.extend(rest(m, pace));
    parts.extend(m.loss_scale.map(|scale| (6, format!("loss_scale {scale:.0}"))));
    parts.push((7, format!("mfu {:.1}%", m.mfu_pct)));
    parts.push((8, format!("mem {}", human_bytes(m.memory_bytes))));
    parts.push((9, format!("data {:.1}%", m.data_wait_pct)));
    let slowest = m.slowest_rank.map(|rank| format!(" (slowest rank {rank})")).unwrap_or_default();
    parts.extend(m.collective_pct.map(|pct| (10, format!("collectives {pct:.1}%{slowest}"))));
    fitted(&parts, columns)
}

/// How well pairs are told apart, if that is trained.
pub(crate) fn of_pairs(scalars: &BTreeMap<String, f64>) -> Option<String> {
    // Those of a reward model have the names of TRL's trainer of such models.
    let names = [["rewards/accuracies", "accuracy"], ["rewards/margins", "margin"]];
    let [accuracy, margin] = names.map(|names| names.iter().find_map(|name| scalars.get(*name).copied()));
    Some(format!("accuracy {:.2}  margin {:.3}", accuracy?, margin?))
}

/// The text beside a bar.
pub(crate) fn beside_bar(m: &StepMetrics, pace: &Pace, columns: usize) -> String {
    let mut parts: Parts = vec![(0, format!("{}/{}", m.step, m.total_steps)), (1, format!("loss {:.4}", m.loss))];
    parts.extend(rest(m, pace));
    fitted(&parts, columns)
}

/// Speed, steps left and the time that they take.
fn rest(m: &StepMetrics, pace: &Pace) -> Parts {
    let left = m.total_steps.saturating_sub(m.step);
    let mut parts = vec![(1, format!("{} tok/s", short_count(m.tokens_per_s)))];
    if m.total_steps > 0 {
        parts.push((2, format!("{left} left")));
        parts.extend(pace.of(left).map(|eta| (3, format!("ETA {}", short_duration(eta)))));
    }
    parts
}

/// As many parts as fit, those of the lowest rank first.
fn fitted(parts: &Parts, columns: usize) -> String {
    let width = |parts: &[&(u8, String)]| parts.iter().map(|(_, text)| text.chars().count() + 2).sum::<usize>();
    let mut kept: Vec<&(u8, String)> = parts.iter().collect();
    while width(&kept) > columns + 2 {
        let Some((last, _)) = kept.iter().enumerate().filter(|(_, part)| part.0 > 0).max_by_key(|(_, part)| part.0)
        else {
            break;
        };
        kept.remove(last);
    }
    kept.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("  ")
}

/// A number with three significant digits.
fn significant(x: f64) -> String {
    match x.abs() {
        0.0 => "0".into(),
        0.01..10.0 => format!("{x:.2}"),
        10.0..100.0 => format!("{x:.1}"),
        100.0..100_000.0 => format!("{x:.0}"),
        _ => format!("{x:.2e}"),
    }
}

/// A rate in at most five columns.
pub(crate) fn short_count(x: f64) -> String {
    match x {
        ..99_999.5 => format!("{x:.0}"),
        ..999_500.0 => format!("{:.0}k", x / 1e3),
        ..999_500_000.0 => format!("{:.1}M", x / 1e6),
        _ => format!("{:.1}G", x / 1e9),
    }
}

/// The parts joined by `separator`, on as many lines as `columns` need. A part of its own length is not cut.
pub(crate) fn folded(parts: &[String], separator: &str, columns: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for part in parts {
        match lines.last_mut() {
            Some(line) if (line.chars().count() + separator.chars().count() + part.chars().count()) <= columns => {
                line.push_str(separator);
                line.push_str(part);
            }
            Some(_) => lines.push(format!("  {part}")),
            None => lines.push(part.clone()),
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(step: u64, total_steps: u64) -> StepMetrics {
        StepMetrics {
            step,
            total_steps,
            loss: 5.60627,
            grad_norm: 8.7017,
            lr: 7.5e-5,
            tokens_per_s: 46_704.3,
            step_ms: 250.0,
            epoch: 0.5,
            predicted_tokens: 64,
            mfu_pct: 55.9,
            memory_bytes: 71 << 20,
            data_wait_pct: 0.2,
            scalars: BTreeMap::new(),
            loss_scale: None,
            collective_pct: None,
            verify_pct: None,
            stalled_steps: None,
            slowest_rank: None,
        }
    }

    fn pace(m: &StepMetrics) -> Pace {
        let mut pace = Pace::default();
        pace.see(m);
        pace
    }

    #[test]
    fn line_of_80_columns_names_loss_speed_steps_left_and_their_time() {
        let quick = StepMetrics { step_ms: 30.0, ..metrics(1, 400) };
        let slow = metrics(1, 400);

        let lines = [quick, slow].map(|m| step_line(&m, &pace(&m), 80));

        assert_eq!(lines[0], "step     1  loss  5.60627  grad 8.70  lr 7.50e-5  46704 tok/s  399 left  ETA 12s");
        assert_eq!(lines[1], "step     1  loss  5.60627  lr 7.50e-5  46704 tok/s  399 left  ETA 1m 40s");
    }

    #[test]
    fn long_numbers_push_out_what_matters_least() {
        let m = StepMetrics {
            loss: 123_456.789,
            grad_norm: 1.0e30,
            tokens_per_s: 12_345_678.0,
            step_ms: 60_000.0,
            loss_scale: Some(65_536.0),
            collective_pct: Some(12.3),
            slowest_rank: Some(1023),
            ..metrics(123_456, 12_345_678)
        };

        for columns in [200, 120, 80, 60, 40, 20] {
            let line = step_line(&m, &pace(&m), columns);
            assert!(line.starts_with("step 123456  loss 123456.78900"), "{line}");
            assert!(line.len() <= columns.max(30), "{columns}: {line}");
            assert_eq!(line.contains("12.3M tok/s  12222222 left  ETA "), columns >= 80, "{columns}: {line}");
            assert_eq!(line.contains("slowest rank 1023"), columns >= 200, "{columns}: {line}");
        }
    }

    #[test]
    fn text_beside_a_bar_is_as_short_as_it_must_be() {
        let m = metrics(10, 400);

        assert_eq!(beside_bar(&m, &pace(&m), 60), "10/400  loss 5.6063  46704 tok/s  390 left  ETA 1m 38s");
        assert_eq!(beside_bar(&m, &pace(&m), 36), "10/400  loss 5.6063  46704 tok/s");
        assert_eq!(beside_bar(&m, &pace(&m), 5), "10/400");
    }

    #[test]
    fn time_left_follows_the_latest_steps() {
        let mut pace = pace(&metrics(1, 10));
        assert_eq!(pace.of(4), Some(Duration::from_secs(1)));

        (0..100).for_each(|_| pace.see(&StepMetrics { step_ms: 1000.0, ..metrics(2, 10) }));

        assert!(pace.of(4).unwrap() > Duration::from_millis(3_900));
        assert_eq!(Pace::default().of(4), None);
    }

    #[test]
    fn parts_fold_at_the_width_of_the_reader() {
        let parts = ["running".to_owned(), "step 12".to_owned(), "generation 3".to_owned()];

        assert_eq!(folded(&parts, " · ", 80), "running · step 12 · generation 3");
        assert_eq!(folded(&parts, " · ", 20), "running · step 12\n  generation 3");
    }
}
