//! A job that is to stop while its store is silent: it waits for the store, because the store may take its state, but not for
//! ever.

use crate::control::STOP_PATIENCE;
use std::time::Instant;

#[derive(Debug, Default)]
pub(super) struct SilentStop {
    requested: Option<Instant>,
    /// What the store reported, and since when it has been silent.
    silence: Option<(String, Instant)>,
    has_given_up: bool,
}

impl SilentStop {
    /// Notes a request to stop; the first one counts.
    pub(super) fn note_request(&mut self, now: Instant) {
        self.requested.get_or_insert(now);
    }

    /// Notes a store that is silent, or still is.
    pub(super) fn note_silence(&mut self, now: Instant, error: &str) {
        let since = self.silence.take().map_or(now, |(_, since)| since);
        self.silence = Some((error.to_owned(), since));
    }

    /// Notes a store that answers again.
    pub(super) fn note_answer(&mut self) {
        self.silence = None;
    }

    /// What the store reported, once the job has waited for it for too long. The answer is given once.
    pub(super) fn gives_up(&mut self, now: Instant) -> Option<String> {
        let (error, since) = self.silence.as_ref()?;
        let waited = now.saturating_duration_since(self.requested?.max(*since));
        let is_due = waited >= STOP_PATIENCE && !std::mem::replace(&mut self.has_given_up, waited >= STOP_PATIENCE);
        is_due.then(|| error.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn job_that_is_to_stop_gives_up_once_a_store_that_stays_silent() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut stop = SilentStop::default();
        stop.note_silence(at(0), "no space left");
        assert_eq!(stop.gives_up(at(1_000)), None, "no stop is requested");

        stop.note_request(at(1_000));
        stop.note_silence(at(1_010), "no space left on the device");
        let early = stop.gives_up(at(1_014));
        let (due, again) = (stop.gives_up(at(1_015)), stop.gives_up(at(1_016)));

        assert_eq!((early, due.as_deref(), again), (None, Some("no space left on the device"), None));
    }

    #[test]
    fn store_that_answers_and_falls_silent_again_is_waited_for_anew() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut stop = SilentStop::default();
        stop.note_request(at(0));
        stop.note_silence(at(1), "busy");

        stop.note_answer();
        let answered = stop.gives_up(at(100));
        stop.note_silence(at(100), "busy");

        assert_eq!((answered, stop.gives_up(at(114))), (None, None));
        assert_eq!(stop.gives_up(at(115)).as_deref(), Some("busy"));
    }
}
