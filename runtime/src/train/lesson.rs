//! State on its way from one that trains to one that learns, a part of it in each step ([`phalanx_strategies::elastic::learner`]).
//!
//! Both sides count the same pages: the sender says before each one that it comes, and when no more come in this step. So
//! whatever comes in a step is of the version between the same two updates at both ends, and the sender never waits for the
//! receiver with more than a page.
#![allow(unsafe_code)] // Who makes a lesson lends it the memory: see `Links::lesson`.

use super::lane::Lane;
use phalanx_device::pulse::Pulse;
use phalanx_device::{Collective, CollectiveError, SliceOperations};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// Chunks that pass between two looks whether the step needs the link: 4 MiB.
const PAGE: usize = 16;

/// What one peer sends to another in the course of many steps.
pub(crate) struct Lesson {
    peer: u32,
    lane: Lane,
    /// Chunks that have passed.
    at: usize,
}

type Peers = BTreeMap<u32, Box<dyn Collective>>;

impl Lesson {
    pub(super) fn new(peer: u32, lane: Lane) -> Lesson {
        Lesson { peer, lane, at: 0 }
    }

    /// Whether all of it has passed.
    pub(crate) fn is_over(&self) -> bool {
        self.at == self.lane.n_chunks()
    }

    fn pass_page(&mut self, group: &mut dyn Collective) -> Result<(), CollectiveError> {
        let end = self.lane.n_chunks().min(self.at + PAGE);
        // SAFETY: the promise of whoever made the lesson. All that was started is finished, or a finish has failed: then the
        // world is aborted, and no communicator touches operands after that.
        let passed = unsafe { self.lane.pass(group, self.at..end) };
        match &passed {
            Ok(()) => self.at = end,
            Err(error) => self.lane.give_up(group, error),
        }
        passed
    }

    fn say(&self, group: &mut dyn Collective, more: bool) -> Result<(), CollectiveError> {
        let there = 1 - group.position();
        group.send(&[f64::from(u8::from(more))], there)
    }

    fn hear(&self, group: &mut dyn Collective) -> Result<bool, CollectiveError> {
        let (there, mut more) = (1 - group.position(), [0.0]);
        group.recv(&mut more, there)?;
        Ok(more[0] > 0.0)
    }
}

/// Stops the teaching when the work is done, also if that panics.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

pub(super) fn teach<T>(
    peers: &mut Peers,
    lessons: &mut [Lesson],
    work: impl FnOnce() -> T,
) -> (T, Result<(), CollectiveError>) {
    if lessons.iter().all(Lesson::is_over) {
        return (work(), Ok(()));
    }
    let done = AtomicBool::new(false);
    let mut teach = || teach_until(&done, &mut pairs(peers, lessons));
    let (worked, taught) = std::thread::scope(|scope| {
        let teaching = std::thread::Builder::new().name("teaching".to_owned()).spawn_scoped(scope, &mut teach);
        let worked = {
            let _done = Done(&done);
            work()
        };
        (worked, teaching.ok().map(joined))
    });
    // Where the system refuses threads, the learner waits for its page.
    (worked, taught.unwrap_or_else(teach))
}

fn teach_until(done: &AtomicBool, open: &mut Vec<Pair<'_>>) -> Result<(), CollectiveError> {
    while !open.is_empty() {
        for (lesson, group) in open.iter_mut() {
            lesson.say(group.as_mut(), true)?;
            lesson.pass_page(group.as_mut())?;
        }
        open.retain(|(lesson, _)| !lesson.is_over());
        if done.load(Ordering::Acquire) {
            return open.iter_mut().try_for_each(|(lesson, group)| lesson.say(group.as_mut(), false));
        }
    }
    Ok(())
}

pub(super) fn learn(peers: &mut Peers, lessons: &mut [Lesson], pulse: &Pulse) -> Result<(), CollectiveError> {
    std::thread::scope(|scope| {
        let mut all = Vec::new();
        for (lesson, group) in pairs(peers, lessons) {
            all.push(scope.spawn(move || learn_from(lesson, group.as_mut(), pulse)));
        }
        all.into_iter().map(joined).fold(Ok(()), Result::and)
    })
}

fn learn_from(lesson: &mut Lesson, group: &mut dyn Collective, pulse: &Pulse) -> Result<(), CollectiveError> {
    while !lesson.is_over() && lesson.hear(group)? {
        lesson.pass_page(group)?;
        pulse.tick();
    }
    Ok(())
}

/// A lesson that is not over, and the link on which it passes.
type Pair<'a> = (&'a mut Lesson, &'a mut Box<dyn Collective>);

/// Of each peer there is one lesson at most.
fn pairs<'a>(peers: &'a mut Peers, lessons: &'a mut [Lesson]) -> Vec<Pair<'a>> {
    let mut groups: BTreeMap<u32, &mut Box<dyn Collective>> =
        peers.iter_mut().map(|(peer, group)| (*peer, group)).collect();
    let open = lessons.iter_mut().filter(|lesson| !lesson.is_over());
    open.map(|lesson| {
        let group =
            groups.remove(&lesson.peer).expect("a world has a group for each two members that exchange anything");
        (lesson, group)
    })
    .collect()
}

fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use super::super::lane::CHUNK;
    use super::super::links::{Links, STAGING_BYTES};
    use phalanx_collective::shm::world::ShmWorld;
    use phalanx_device::Collective;
    use phalanx_device::span::{Room, Source};
    use phalanx_device::world::{World, WorldId};
    use std::collections::BTreeMap;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };

    /// Links of a member of a world in which all others have something for the last one.
    fn links(world: &ShmWorld, me: u32, n: u32) -> Links {
        let member = world.join(me).unwrap();
        let of_pair = |pair: u32| -> Option<(u32, Box<dyn Collective>)> {
            let peer = if me == n - 1 { pair } else { n - 1 };
            (me == n - 1 || me == pair)
                .then(|| (peer, Box::new(member.communicator(pair as usize).unwrap()) as Box<dyn Collective>))
        };
        Links::new((0..n - 1).filter_map(of_pair).collect::<BTreeMap<_, _>>())
    }

    fn update(values: &mut [f32]) {
        values.iter_mut().for_each(|value| *value = value.mul_add(0.5, 1.0));
    }

    /// Two that train and one that learns half of what it needs from each: all make the same updates between the parts.
    #[test]
    fn what_comes_in_parts_between_updates_is_in_the_end_what_those_that_sent_it_have() {
        const N: u32 = 3;
        const LEN: usize = 150 * CHUNK + 7;
        let world = World::new(ID, N, (0..N - 1).map(|i| vec![i, N - 1]).collect()).unwrap();
        let world = ShmWorld::create(&world, &[0; N as usize], STAGING_BYTES).unwrap();
        let first = |i: usize| i as f32 % 1013.0;
        let half = |me: u32| if me == 0 { 0..LEN / 2 } else { LEN / 2..LEN };

        let teach = |me: u32, outcome: std::sync::mpsc::Sender<(u64, Vec<f32>)>| {
            let mut links = links(&world, me, N);
            let mut state: Vec<f32> = (0..LEN).map(first).collect();
            let runs = state[half(me)].chunks(CHUNK / 3 + 1).map(|run| Source::from(run).stretch()).collect();
            // SAFETY: `state` outlives the lessons, and is written only between the parts of them.
            let mut lessons = [unsafe { links.lesson(N - 1, true, runs) }];
            for step in 1u64.. {
                match step {
                    // Whoever has nothing to do passes a page, which is not all.
                    1 => {
                        let done = AtomicBool::new(true);
                        super::teach_until(&done, &mut super::pairs(&mut links.peers, &mut lessons)).unwrap();
                    }
                    _ => links.teach(&mut lessons, || std::thread::sleep(Duration::from_millis(3))).1.unwrap(),
                }
                links.send_number(N - 1, step as f64).unwrap();
                update(&mut state);
                if links.receive_number(N - 1).unwrap() > 0.0 {
                    outcome.send((step, state)).unwrap();
                    return;
                }
            }
        };
        let (sender, outcomes) = channel();
        let (learnt, n_steps) = std::thread::scope(|scope| {
            for me in 0..N - 1 {
                let (teach, sender) = (&teach, sender.clone());
                scope.spawn(move || teach(me, sender));
            }
            let mut links = links(&world, N - 1, N);
            let mut state = vec![f32::NAN; LEN];
            let mut lessons = Vec::new();
            for from in 0..N - 1 {
                let run = Room::from(&mut state[half(from)]).stretch();
                // SAFETY: `state` outlives the lessons, whose halves lie apart, and is touched only between the parts of them.
                lessons.push(unsafe { links.lesson(from, false, vec![run]) });
            }
            for step in 1u64.. {
                links.learn(&mut lessons).unwrap();
                let over = lessons.iter().all(super::Lesson::is_over);
                for from in 0..N - 1 {
                    assert_eq!(links.receive_number(from).unwrap(), step as f64);
                }
                update(&mut state);
                for to in 0..N - 1 {
                    links.send_number(to, f64::from(u8::from(over))).unwrap();
                }
                if over {
                    return (state, step);
                }
            }
            unreachable!("lessons end");
        });

        drop(sender);
        for (step, state) in outcomes {
            assert_eq!(step, n_steps);
            assert!(state == learnt, "all have the same after {step} steps");
        }
        assert!(n_steps > 1, "a page is not all");
    }
}
