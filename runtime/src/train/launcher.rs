//! Ranks as processes of this machine: started, given their orders, followed to their end.
//!
//! The launcher holds the shared memory of the ranks but is none of them. When one fails it aborts the world, so that
//! the others stop where they wait; whoever is still at it after [`GRACE`] is ended. What the run failed of is what the
//! first rank failed of, not what that did to the others.

use super::chorus::Chorus;
use super::error::JobError;
use super::orders::{Assignment, Excuse, Order, Word};
use crate::collective::shm::passing::send_world;
use crate::collective::shm::world::ShmWorld;
use crate::config::JobConfig;
use crate::job::{Control, Event, Report};
use crate::launch::cores::Cores;
use crate::launch::failure::Ending;
use crate::launch::rank_set::{RankEvent, RankSet, RankStart};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long ranks have to notice that one of them failed, before they are ended.
const GRACE: Duration = Duration::from_millis(400);
/// How long a rank has to end by itself when it is asked to.
const TERM_GRACE: Duration = Duration::from_millis(100);
/// How often the launcher looks whether somebody asked to stop or save.
const LOOK: Duration = Duration::from_millis(50);

/// A run whose ranks are processes.
#[derive(Debug)]
pub(super) struct Launch<'a> {
    pub(super) config: &'a JobConfig,
    pub(super) world: &'a ShmWorld,
    /// This program, which knows the hidden subcommand `rank`.
    pub(super) program: &'a Path,
    pub(super) control: &'a Control,
}

impl Launch<'_> {
    /// Starts the ranks and follows them to their end. Ranks end with the thread that runs this, however it ends.
    pub(super) fn run(&self, on_event: &mut (dyn FnMut(&Event) + Send)) -> Result<Report, JobError> {
        let n_ranks = self.world.control().world().n_ranks();
        // Not bound to cores: nobody says that this job has the machine to itself, and on one that it shares, a rank whose
        // core is taken holds up all others.
        let cores = Cores::of_this_process(n_ranks, false)?;
        let mut ranks = RankSet::spawn(&cores, |start| self.command(start))?;
        let id = self.world.control().world().id();
        let assignment = |rank| Assignment {
            rank,
            world: [id.job, id.generation, id.incarnation],
            n_threads: self.config.precision.threads.unwrap_or(cores.n_threads()),
            yaml: self.config.to_yaml(),
        };
        for rank in 0..n_ranks {
            ranks.send(rank, &Order::Run(assignment(rank)))?;
            let Some(passage) = ranks.take_passage(rank) else { continue };
            if let Err(error) = send_world(&passage, self.world, None) {
                // A rank that ended at once; its end says more, and comes.
                tracing::warn!(rank, %error, "shared memory was not taken");
            }
        }
        let watch = Watch {
            ranks,
            world: self.world,
            chorus: Chorus::new(n_ranks),
            excuses: BTreeMap::new(),
            report: None,
            checkpoint: None,
            is_stopping: false,
            patience: None,
        };
        watch.follow(self.control, on_event)
    }

    fn command(&self, start: &RankStart) -> Command {
        let mut command = Command::new(self.program);
        let (channel, passage) = (start.channel.to_string(), start.passage.to_string());
        // The number of the rank is for whoever looks at the list of processes.
        command.args(["rank", "--rank", &start.rank.to_string(), "--channel", &channel, "--passage", &passage]);
        command.stdout(Stdio::null());
        command
    }
}

/// Rank processes that run.
struct Watch<'a> {
    ranks: RankSet,
    world: &'a ShmWorld,
    chorus: Chorus,
    /// What ranks that failed said, by rank.
    excuses: BTreeMap<u32, Excuse>,
    report: Option<Report>,
    checkpoint: Option<PathBuf>,
    is_stopping: bool,
    /// When those that live are ended.
    patience: Option<Instant>,
}

impl Watch<'_> {
    fn follow(mut self, control: &Control, on_event: &mut (dyn FnMut(&Event) + Send)) -> Result<Report, JobError> {
        loop {
            self.pass_on(control)?;
            let patience = self.patience.map(|end| end.saturating_duration_since(Instant::now()));
            if patience == Some(Duration::ZERO) {
                self.patience = None;
                self.ranks.terminate_all(TERM_GRACE)?;
            }
            match self.ranks.next_event(Some(patience.map_or(LOOK, |left| left.min(LOOK))))? {
                Some(RankEvent::Message { rank, bytes }) => self.hear(rank, &bytes),
                Some(RankEvent::Line { rank, text }) => on_event(&Event::Note(format!("rank {rank}: {text}"))),
                Some(RankEvent::Exited { rank, ending }) if ending != Ending::Code(0) => {
                    self.abort(&format!("rank {rank} {ending}"));
                }
                Some(RankEvent::Exited { .. } | RankEvent::Woken) => {}
                None if self.ranks.n_live() == 0 => break,
                None => {}
            }
            while let Some(event) = self.chorus.next() {
                self.tell(&event, on_event);
            }
        }
        while let Some(event) = self.chorus.next_as_it_is() {
            self.tell(&event, on_event);
        }
        self.outcome()
    }

    /// What was asked of the run is asked of its leader; ranks agree among themselves after every step.
    fn pass_on(&mut self, control: &Control) -> Result<(), JobError> {
        if control.stop.load(Ordering::Acquire) && !self.is_stopping {
            self.is_stopping = true;
            self.ranks.send(0, &Order::Stop)?;
        }
        if control.save.swap(false, Ordering::AcqRel) {
            self.ranks.send(0, &Order::Save)?;
        }
        Ok(())
    }

    fn hear(&mut self, rank: u32, bytes: &[u8]) {
        match serde_json::from_slice(bytes) {
            Ok(Word::Event(event)) => self.chorus.hear(rank, event),
            Ok(Word::Done(report)) => self.report = self.report.take().or(Some(report).filter(|_| rank == 0)),
            Ok(Word::Failed(excuse)) => {
                self.abort(&format!("rank {rank}: {}", excuse.text));
                self.excuses.insert(rank, excuse);
            }
            Err(error) => {
                let text = format!("rank {rank} said what its launcher does not understand: {error}");
                self.abort(&text);
                self.excuses.insert(rank, Excuse { text, is_input: false, is_consequence: false });
            }
        }
    }

    /// Stops all ranks where they wait for each other; the first reason stands.
    fn abort(&mut self, reason: &str) {
        self.world.control().abort(reason);
        self.patience.get_or_insert_with(|| Instant::now() + GRACE);
    }

    fn tell(&mut self, event: &Event, on_event: &mut (dyn FnMut(&Event) + Send)) {
        match event {
            Event::Saved { path, .. } => self.checkpoint = Some(path.clone()),
            Event::Started(started) => self.checkpoint = started.resumed_from.clone(),
            _ => {}
        }
        on_event(event);
    }

    /// The leader's report, or what the first rank failed of.
    fn outcome(mut self) -> Result<Report, JobError> {
        let failure = self.ranks.failure();
        let own = failure.and_then(|failure| Some((failure.rank, self.excuses.get(&failure.rank)?)));
        let mut said = own.into_iter().chain(self.excuses.iter().map(|(rank, excuse)| (*rank, excuse)));
        let how = match (failure, said.find(|(_, excuse)| !excuse.is_consequence)) {
            (_, Some((rank, excuse))) => {
                return Err(JobError::OfRank { rank, text: excuse.text.clone(), is_input: excuse.is_input });
            }
            (Some(failure), None) => failure.to_string(),
            (None, None) => match self.report.take() {
                Some(report) => return Ok(report),
                None => "rank 0 ended without a report".into(),
            },
        };
        let when = self.chorus.last_step().map_or("before its first step".into(), |n| format!("in step {}", n + 1));
        Err(JobError::RankLost { how, when, checkpoint: self.checkpoint.take() })
    }
}
