//! Ranks without heartbeats: they hang, they wait for a processor, or their supervisor slept.

use super::tests::{drain, reports, started};
use super::*;

/// A supervisor with one rank, and what examinations of the rank's process find.
struct Watched {
    supervisor: Supervisor,
    worker: Worker,
    status_report: MemberReport,
    start: Instant,
    /// The last heartbeat or examination, in milliseconds.
    last: u64,
    /// When the process was examined.
    examined: Vec<u64>,
}

impl Watched {
    fn new() -> Watched {
        let start = Instant::now();
        let (supervisor, worker, status_report) = started(start);
        Watched { supervisor, worker, status_report, start, last: 0, examined: vec![] }
    }

    /// Lets time pass, one millisecond at a time, without a heartbeat. `waited` is the answer to an examination at a time that
    /// follows the last heartbeat or examination by another time. Returns when the rank was first reported to hang.
    fn hangs_at(&mut self, ms: std::ops::RangeInclusive<u64>, waited: impl Fn(u64, u64) -> Option<u64>) -> Option<u64> {
        for ms in ms {
            let now = self.start + Duration::from_millis(ms);
            self.supervisor.handle_timeout(now);
            let mut commands = drain(&mut self.supervisor);
            if commands.contains(&Command::Examine(self.worker)) {
                self.examined.push(ms);
                if let Some(waited) = waited(ms, ms - self.last) {
                    self.supervisor.handle_examined(now, self.worker, Duration::from_millis(waited));
                    commands.extend(drain(&mut self.supervisor));
                }
                self.last = ms;
            }
            if reports(commands).iter().any(|report| report.members[0].hangs) {
                return Some(ms);
            }
        }
        None
    }

    fn heartbeat(&mut self, ms: u64) -> Vec<Report> {
        self.last = ms;
        self.supervisor.handle_status_report(self.start + Duration::from_millis(ms), self.status_report.clone());
        reports(drain(&mut self.supervisor))
    }
}

#[test]
fn rank_without_heartbeats_counts_as_hung_after_the_suspicion_time() {
    let mut rank = Watched::new();

    assert_eq!(rank.hangs_at(1..=600, |_, _| Some(0)), Some(500));

    assert!(!rank.heartbeat(601)[0].members[0].hangs, "a recovery is reported at once, too");
}

// SUPERVISOR-12
#[test]
fn rank_that_waits_for_a_processor_does_not_hang() {
    let mut rank = Watched::new();

    let hangs = rank.hangs_at(1..=2_000, |_, since| Some(since));

    assert_eq!((hangs, &rank.examined[..]), (None, &[500, 1_000, 1_500, 2_000][..]));
    assert_eq!(rank.heartbeat(2_001), [], "it was never reported to hang");
    assert_eq!(rank.hangs_at(2_002..=9_000, |_, _| Some(0)), Some(2_501), "its waits are over");
}

// SUPERVISOR-12
#[test]
fn rank_that_stops_after_a_wait_hangs_once_the_rest_of_the_suspicion_time_has_passed() {
    let waits_until = |until: u64| move |ms: u64, since: u64| Some(until.saturating_sub(ms - since).min(since));

    assert_eq!(Watched::new().hangs_at(1..=9_000, waits_until(400)), Some(900));
    assert_eq!(Watched::new().hangs_at(1..=9_000, waits_until(1_600)), Some(2_100));
}

// SUPERVISOR-12
#[test]
fn rank_that_spins_among_others_hangs_once_it_has_run_for_most_of_the_suspicion_time() {
    let half = Watched::new().hangs_at(1..=9_000, |_, since| Some(since / 2)).unwrap();
    let a_bit = Watched::new().hangs_at(1..=9_000, |_, since| Some(since / 8)).unwrap();

    assert!((850..=1_000).contains(&half), "{half}");
    assert_eq!(a_bit, 500, "waits as short as the delays of the supervisor explain no silence");
}

// SUPERVISOR-12
#[test]
fn rank_hangs_after_the_time_of_a_stuck_device_even_if_it_waits_or_nobody_examines_it() {
    let stuck = Timing::default().stuck.as_millis() as u64;
    let mut unanswered = Watched::new();

    assert_eq!(Watched::new().hangs_at(1..=9_000, |_, since| Some(since)), Some(stuck));
    assert_eq!(unanswered.hangs_at(1..=9_000, |_, _| None), Some(stuck));
    assert_eq!(unanswered.examined, [500]);
}

// SUPERVISOR-12
#[test]
fn answer_that_a_heartbeat_has_overtaken_changes_nothing() {
    let mut rank = Watched::new();
    assert_eq!(rank.hangs_at(1..=500, |_, _| None), None);
    let answered = rank.start + Duration::from_millis(502);
    rank.heartbeat(501);

    rank.supervisor.handle_examined(answered, rank.worker, Duration::ZERO);
    assert_eq!(drain(&mut rank.supervisor), []);
    rank.supervisor.handle_examined(answered, rank.worker, Duration::from_secs(4));

    assert_eq!(rank.hangs_at(502..=9_000, |_, _| Some(0)), Some(1_001), "its waits count from its heartbeat");
}

// SUPERVISOR-7
#[test]
fn report_with_news_of_one_rank_blames_no_other_one_whose_supervisor_slept() {
    let start = Instant::now();
    let mut supervisor = Supervisor::new(start, JobId(1), NodeId(0), Incarnation(5), 2, Timing::default());
    let spawned = drain(&mut supervisor);
    let workers = spawned.iter().map(|command| if let Command::Spawn(worker) = command { *worker } else { panic!() });
    let status_reports: Vec<MemberReport> =
        workers.map(|worker| Member::new(JobId(1), worker, None, Schedule::default()).report()).collect();
    status_reports.iter().for_each(|status_report| supervisor.handle_started(start, status_report.clone()));
    drain(&mut supervisor);

    let news = MemberReport { phase: MemberPhase::Ready, ..status_reports[0].clone() };
    supervisor.handle_status_report(start + Duration::from_secs(2), news);

    let reported = reports(drain(&mut supervisor));
    assert_eq!(reported[0].members.iter().map(|member| member.hangs).collect::<Vec<_>>(), [false, false]);
}

// SUPERVISOR-7
#[test]
fn ranks_do_not_count_as_hung_because_their_supervisor_slept() {
    let mut rank = Watched::new();

    assert_eq!(rank.hangs_at(2_000..=2_000, |_, _| Some(0)), None, "the supervisor was due at 300 ms and slept");

    assert_eq!(rank.hangs_at(2_001..=3_000, |_, _| Some(0)), Some(2_200), "the rest of the suspicion time has passed");
}
