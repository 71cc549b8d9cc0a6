//! How long a job needs from the loss of a rank to its next step, by phase.

use anyhow::{Context, Result, ensure};
use phalanx::api::embed::feed::Events;
use phalanx::{Event, RunningJob};
use phalanx_strategies::elastic::incident::Phase;
use phalanx_strategies::elastic::message::MemberPhase;
use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

/// Longest wait for a job: for its ranks, or for its next step.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause between two looks at the ranks of a job.
const LOOK: Duration = Duration::from_millis(5);
/// Steps between the start of a world and a signal: ranks capture graphs in the second one.
const STEPS_BETWEEN: u64 = 4;

/// Milliseconds of a recovery.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Recovery {
    /// From the signal to the end of the next step.
    pub(super) total: f64,
    /// The phases; detection counts from the signal.
    pub(super) phases: [f64; Phase::ALL.len()],
    /// From resumed training to the end of its first step.
    pub(super) step: f64,
}

impl Recovery {
    /// Heads of a table's columns.
    pub(super) const COLUMNS: [&'static str; 10] =
        ["n", "p50", "max", "detect", "agree", "abort", "regroup", "heal", "resume", "step"];

    /// The cells of a row: number of recoveries, median and maximum of the whole, medians of the parts.
    pub(super) fn cells(all: &[Recovery]) -> Vec<String> {
        if all.is_empty() {
            return vec![String::new(); Recovery::COLUMNS.len()];
        }
        let median = |part: &dyn Fn(&Recovery) -> f64| {
            let mut times: Vec<f64> = all.iter().map(part).collect();
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let largest = all.iter().map(|recovery| recovery.total).fold(0.0, f64::max);
        let phases = (0..Phase::ALL.len()).map(|i| median(&|recovery| recovery.phases[i]));
        let times = [median(&|recovery| recovery.total), largest].into_iter().chain(phases);
        let times = times.chain([median(&|recovery| recovery.step)]).map(|ms| format!("{ms:.1}"));
        std::iter::once(all.len().to_string()).chain(times).collect()
    }
}

/// A running job, and what it has told.
pub(super) struct Watched<'a> {
    job: &'a RunningJob,
    events: Events,
    has_ended: bool,
    /// Bits of each step's loss, in the order of steps.
    pub(super) losses: Vec<u64>,
    /// When each step was reported.
    steps: BTreeMap<u64, Instant>,
    /// Lines about incidents, and when they came.
    pub(super) incidents: Vec<(Instant, String)>,
    /// Communicators over NCCL, if the job logs them.
    pub(super) n_over_nccl: usize,
}

impl<'a> Watched<'a> {
    pub(super) fn new(job: &'a RunningJob) -> Watched<'a> {
        let (losses, steps, incidents) = (Vec::new(), BTreeMap::new(), Vec::new());
        Watched { job, events: job.events(), has_ended: false, losses, steps, incidents, n_over_nccl: 0 }
    }

    /// Takes the next event; `false` after the end of the job.
    async fn next(&mut self) -> Result<bool> {
        let Some(event) = self.events.next().await else {
            self.has_ended = true;
            return Ok(false);
        };
        match event? {
            Event::Step(m) => {
                self.losses.push(m.loss.to_bits());
                self.steps.insert(m.step, Instant::now());
            }
            Event::Note(note) if note.contains("detect ") => {
                println!("{note}");
                self.incidents.push((Instant::now(), note));
            }
            Event::Note(note) if note.contains("collectives over NCCL") => self.n_over_nccl += 1,
            _ => {}
        }
        Ok(true)
    }

    /// Takes all events to the end of the job.
    pub(super) async fn finish(&mut self) -> Result<()> {
        while self.next().await? {}
        Ok(())
    }

    /// Takes events until `is_there`.
    pub(super) async fn until(&mut self, what: &str, mut is_there: impl FnMut(&Self) -> bool) -> Result<()> {
        let begin = Instant::now();
        while !is_there(self) {
            let left = PATIENCE.saturating_sub(begin.elapsed());
            let next = tokio::time::timeout(left, self.next()).await;
            ensure!(next.with_context(|| format!("no {what} in {PATIENCE:?}"))??, "the job ended before {what}");
        }
        Ok(())
    }

    /// The number of the last step.
    pub(super) fn step(&self) -> u64 {
        self.steps.last_key_value().map_or(0, |(step, _)| *step)
    }

    /// The processes of the ranks, once all of two train, have done some steps, and this many spares are ready.
    async fn ranks(&mut self, n_spares: usize) -> Result<[u32; 2]> {
        let (begin, first) = (Instant::now(), self.step());
        self.until("more steps", |watched| watched.step() >= first + STEPS_BETWEEN).await?;
        loop {
            let status = self.job.status().await.context("asking for the ranks")?;
            let ranks = || status.nodes.iter().flat_map(|node| &node.ranks).filter(|rank| rank.pid.is_some());
            let mut training: Vec<_> = ranks().filter(|rank| rank.phase == MemberPhase::Running).collect();
            training.sort_by_key(|rank| rank.rank);
            let n_ready = ranks().filter(|rank| rank.phase == MemberPhase::Stopped && rank.rank.is_none()).count();
            if let [first_rank, second_rank] = training[..]
                && n_ready >= n_spares
            {
                return Ok([first_rank, second_rank].map(|rank| rank.pid.expect("filtered")));
            }
            ensure!(begin.elapsed() < PATIENCE, "the job does not get its ranks back: {training:?}, {n_ready} spares");
            // Events wait for a reader only up to a limit.
            let until = Instant::now() + LOOK;
            while let Ok(is_running) = tokio::time::timeout_at(until.into(), self.next()).await {
                ensure!(is_running?, "the job ended before its ranks were signalled");
            }
        }
    }

    /// Sends a signal to the rank at this position, once the job trains undisturbed with this many spares, and measures until
    /// the next step.
    pub(super) async fn recover(&mut self, signal: &str, position: usize, n_spares: usize) -> Result<Recovery> {
        let pid = self.ranks(n_spares).await?[position];
        let (sent, n_incidents) = (Instant::now(), self.incidents.len());
        send(signal, pid)?;
        self.until("an incident", |watched| watched.incidents.len() > n_incidents).await?;
        let (resumed, note) = self.incidents[n_incidents].clone();
        let (phases, first) = phases(&note).with_context(|| format!("not an incident: {note}"))?;
        self.until("a step after an incident", |watched| watched.step() >= first).await?;
        let ms = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1e3;
        // Steps and incidents come from different threads.
        let stepped = self.steps.range(first..).next().map_or(resumed, |(_, at)| resumed.max(*at));
        let others: f64 = phases[1..].iter().sum();
        let detect = (ms(sent, resumed) - others).max(0.0);
        let phases: [f64; 6] = std::array::from_fn(|i| if i == 0 { detect } else { phases[i] });
        Ok(Recovery { total: ms(sent, stepped), phases, step: ms(resumed, stepped) })
    }
}

/// Sends a signal to a process.
pub(super) fn send(signal: &str, pid: u32) -> Result<()> {
    let sent = Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status().context("starting kill")?;
    ensure!(sent.success(), "process {pid} is gone");
    Ok(())
}

/// The phases of an incident in milliseconds, and the first step after it, from the job's line about it.
fn phases(note: &str) -> Option<([f64; Phase::ALL.len()], u64)> {
    let number = |after: &str| note.split_once(after)?.1.split([' ', ',']).next();
    let mut phases = [0.0; Phase::ALL.len()];
    for phase in Phase::ALL {
        phases[phase as usize] = number(&format!(" {} ", format!("{phase:?}").to_lowercase()))?.parse().ok()?;
    }
    Some((phases, number("continuing at step ")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_read_off_the_line_of_an_incident() {
        let note = "generation 2: node 0 slot 1 (incarnation 1) died · detect 446.6 · agree 0.1 · abort 2.2 · regroup 52.5 · \
                    heal 67.2 · resume 1.5 = 570.1 ms; continuing at step 6, repeating 2 steps whose state is lost";

        assert_eq!(phases(note), Some(([446.6, 0.1, 2.2, 52.5, 67.2, 1.5], 6)));
        assert_eq!(phases("saved at step 6"), None);
    }

    #[test]
    fn table_has_the_median_of_each_phase() {
        let recovery = |ms| Recovery { total: 10.0 * ms, phases: [ms; 6], step: ms };

        let cells = Recovery::cells(&[3.0, 1.0, 2.0].map(recovery));

        assert_eq!(cells, ["3", "20.0", "30.0", "2.0", "2.0", "2.0", "2.0", "2.0", "2.0", "2.0"]);
        assert_eq!(Recovery::cells(&[]).len(), Recovery::COLUMNS.len());
    }
}
