//! Events of a run for any number of readers. The run never waits for a reader.
//!
//! The latest [`KEPT`] events are kept. A reader that falls further behind, or starts later, gets the number of events that
//! it missed and continues with the oldest kept event.

use crate::events::Event;
use futures_core::Stream;
use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Number of events that are kept for readers.
pub const KEPT: usize = 1024;

/// The number of events that a reader missed because it was too slow or started too late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} events were dropped before this reader took them")]
pub struct Missed(pub u64);

/// The events of a run.
#[derive(Debug, Default)]
pub(crate) struct Feed {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    kept: VecDeque<Event>,
    /// Number of events before the oldest kept event.
    n_gone: u64,
    has_ended: bool,
    n_readers: u64,
    waiting: BTreeMap<u64, Waker>,
}

impl Feed {
    /// Adds an event.
    pub(crate) fn push(&self, event: Event) {
        self.change(|state| {
            if state.kept.len() == KEPT {
                state.kept.pop_front();
                state.n_gone += 1;
            }
            state.kept.push_back(event);
        });
    }

    /// Ends the stream of events.
    pub(crate) fn end(&self) {
        self.change(|state| state.has_ended = true);
    }

    /// A reader that starts with the oldest kept event.
    pub(crate) fn events(self: &Arc<Feed>) -> Events {
        let mut state = self.state();
        state.n_readers += 1;
        Events { feed: Arc::clone(self), reader: state.n_readers, at: 0 }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let waiting = {
            let mut state = self.state();
            change(&mut state);
            std::mem::take(&mut state.waiting)
        };
        waiting.into_values().for_each(Waker::wake);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic of a waker can only leave readers that were not woken; the next event wakes them.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A [`Stream`] of the events of a run, from the oldest kept event to the end of the run.
#[derive(Debug)]
pub struct Events {
    feed: Arc<Feed>,
    reader: u64,
    /// Number of events that this reader has taken or missed.
    at: u64,
}

impl Events {
    /// The next event, or the number of events missed before it; `None` when the run has ended.
    pub async fn next(&mut self) -> Option<Result<Event, Missed>> {
        poll_fn(|ctx| Pin::new(&mut *self).poll_next(ctx)).await
    }
}

impl Stream for Events {
    type Item = Result<Event, Missed>;

    fn poll_next(mut self: Pin<&mut Self>, ctx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let feed = Arc::clone(&self.feed);
        let mut state = feed.state();
        let missed = state.n_gone.saturating_sub(self.at);
        if missed > 0 {
            self.at = state.n_gone;
            return Poll::Ready(Some(Err(Missed(missed))));
        }
        if let Some(event) = state.kept.get((self.at - state.n_gone) as usize) {
            self.at += 1;
            return Poll::Ready(Some(Ok(event.clone())));
        }
        if state.has_ended {
            return Poll::Ready(None);
        }
        state.waiting.insert(self.reader, ctx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.feed.state().waiting.remove(&self.reader);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(i: usize) -> Event {
        Event::Note(i.to_string())
    }

    /// Polls the reader once.
    fn now(events: &mut Events) -> Poll<Option<Result<Event, Missed>>> {
        Pin::new(events).poll_next(&mut Context::from_waker(Waker::noop()))
    }

    #[tokio::test]
    async fn reader_is_woken_by_the_next_event_and_by_the_end() {
        let feed = Arc::new(Feed::default());
        let mut events = feed.events();
        let reader = tokio::spawn(async move { (events.next().await, events.next().await) });
        tokio::task::yield_now().await;

        feed.push(note(1));
        tokio::task::yield_now().await;
        feed.end();

        assert_eq!(reader.await.unwrap(), (Some(Ok(note(1))), None));
    }

    #[test]
    fn slow_reader_gets_the_number_of_missed_events_and_does_not_block_others() {
        let feed = Arc::new(Feed::default());
        let (mut slow, mut fast) = (feed.events(), feed.events());

        for i in 0..KEPT + 3 {
            feed.push(note(i));
            assert_eq!(now(&mut fast), Poll::Ready(Some(Ok(note(i)))));
        }

        assert_eq!(now(&mut slow), Poll::Ready(Some(Err(Missed(3)))));
        assert_eq!(now(&mut slow), Poll::Ready(Some(Ok(note(3)))));
        assert!(now(&mut fast).is_pending());
        assert_eq!(feed.state().kept.len(), KEPT);
    }

    #[test]
    fn late_reader_gets_kept_events_and_a_dropped_reader_removes_its_waker() {
        let feed = Arc::new(Feed::default());
        feed.push(note(1));

        let mut late = feed.events();

        assert_eq!(now(&mut late), Poll::Ready(Some(Ok(note(1)))));
        assert!(now(&mut late).is_pending());
        assert_eq!(feed.state().waiting.len(), 1);
        drop(late);
        assert_eq!(feed.state().waiting.len(), 0);
    }
}
