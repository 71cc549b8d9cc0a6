//! Transfers of state from a training member to a catching-up member, one part per step
//! ([`phalanx_strategies::elastic::catch_up`]).
//!
//! Both sides count the same pages: the sender announces each page, and the end of the pages of a step. Everything sent
//! in one step is therefore of one version at both ends, and the sender waits for the receiver with at most one page.
#![allow(unsafe_code)] // The creator of a catch-up transfer vouches for its memory: see `Links::catch_up_transfer`.

use super::lane::Lane;
use phalanx_device::progress_counter::ProgressCounter;
use phalanx_device::{Collective, CollectiveError, SliceOperations};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// Chunks between two checks of whether the step needs the link: 4 MiB.
const PAGE: usize = 16;

/// A transfer between two peers that spans many steps.
pub(crate) struct CatchUpTransfer {
    peer: u32,
    lane: Lane,
    /// Number of transferred chunks.
    at: usize,
}

type Peers = BTreeMap<u32, Box<dyn Collective>>;

impl CatchUpTransfer {
    pub(super) fn new(peer: u32, lane: Lane) -> CatchUpTransfer {
        CatchUpTransfer { peer, lane, at: 0 }
    }

    /// Whether all chunks are transferred.
    pub(crate) fn is_over(&self) -> bool {
        self.at == self.lane.n_chunks()
    }

    fn pass_page(&mut self, group: &mut dyn Collective) -> Result<(), CollectiveError> {
        let end = self.lane.n_chunks().min(self.at + PAGE);
        // SAFETY: the creator of the transfer promised this. Every started operation is finished, or a finish has failed:
        // then the world is aborted, and no communicator touches operands any more.
        let passed = unsafe { self.lane.pass(group, self.at..end) };
        match &passed {
            Ok(()) => self.at = end,
            Err(error) => self.lane.give_up(group, error),
        }
        passed
    }

    fn announce(&self, group: &mut dyn Collective, more: bool) -> Result<(), CollectiveError> {
        let there = 1 - group.position();
        group.send(&[f64::from(u8::from(more))], there)
    }

    fn is_announced(&self, group: &mut dyn Collective) -> Result<bool, CollectiveError> {
        let (there, mut more) = (1 - group.position(), [0.0]);
        group.recv(&mut more, there)?;
        Ok(more[0] > 0.0)
    }
}

/// Stops sending when the work is done, even if it panics.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

pub(super) fn send_pages<T>(
    peers: &mut Peers,
    transfers: &mut [CatchUpTransfer],
    work: impl FnOnce() -> T,
) -> (T, Result<(), CollectiveError>) {
    if transfers.iter().all(CatchUpTransfer::is_over) {
        return (work(), Ok(()));
    }
    let done = AtomicBool::new(false);
    let mut send_pages = || send_until(&done, &mut pairs(peers, transfers));
    let (worked, sent) = std::thread::scope(|scope| {
        let outgoing_catch_up =
            std::thread::Builder::new().name("catch-up-sender".to_owned()).spawn_scoped(scope, &mut send_pages);
        let worked = {
            let _done = Done(&done);
            work()
        };
        (worked, outgoing_catch_up.ok().map(joined))
    });
    // Without a thread, the receiver waits for its page.
    (worked, sent.unwrap_or_else(send_pages))
}

fn send_until(done: &AtomicBool, open: &mut Vec<Pair<'_>>) -> Result<(), CollectiveError> {
    while !open.is_empty() {
        for (transfer, group) in open.iter_mut() {
            transfer.announce(group.as_mut(), true)?;
            transfer.pass_page(group.as_mut())?;
        }
        open.retain(|(transfer, _)| !transfer.is_over());
        if done.load(Ordering::Acquire) {
            return open.iter_mut().try_for_each(|(transfer, group)| transfer.announce(group.as_mut(), false));
        }
    }
    Ok(())
}

pub(super) fn receive_catch_up(
    peers: &mut Peers,
    transfers: &mut [CatchUpTransfer],
    progress_counter: &ProgressCounter,
) -> Result<(), CollectiveError> {
    std::thread::scope(|scope| {
        let mut all = Vec::new();
        for (transfer, group) in pairs(peers, transfers) {
            all.push(scope.spawn(move || receive_from(transfer, group.as_mut(), progress_counter)));
        }
        all.into_iter().map(joined).fold(Ok(()), Result::and)
    })
}

fn receive_from(
    transfer: &mut CatchUpTransfer,
    group: &mut dyn Collective,
    progress_counter: &ProgressCounter,
) -> Result<(), CollectiveError> {
    while !transfer.is_over() && transfer.is_announced(group)? {
        transfer.pass_page(group)?;
        progress_counter.tick();
    }
    Ok(())
}

/// An unfinished transfer and its link.
type Pair<'a> = (&'a mut CatchUpTransfer, &'a mut Box<dyn Collective>);

/// There is at most one transfer per peer.
fn pairs<'a>(peers: &'a mut Peers, transfers: &'a mut [CatchUpTransfer]) -> Vec<Pair<'a>> {
    let mut groups: BTreeMap<u32, &mut Box<dyn Collective>> =
        peers.iter_mut().map(|(peer, group)| (*peer, group)).collect();
    let open = transfers.iter_mut().filter(|transfer| !transfer.is_over());
    open.map(|transfer| {
        let group =
            groups.remove(&transfer.peer).expect("a world has a group for each two members that exchange anything");
        (transfer, group)
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
    use phalanx_device::span::{SpanMut, SpanRef};
    use phalanx_device::world::World;
    use phalanx_device::world_id::WorldId;
    use std::collections::BTreeMap;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };

    /// Links of a member of a world in which all others send to the last one.
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

    const N: u32 = 3;
    const LEN: usize = 150 * CHUNK + 7;

    fn half(me: u32) -> std::ops::Range<usize> {
        if me == 0 { 0..LEN / 2 } else { LEN / 2..LEN }
    }

    /// Sends its half of the state while it trains, until the receiver has all of it.
    fn send_pages(world: &ShmWorld, me: u32, outcome: &std::sync::mpsc::Sender<(u64, Vec<f32>)>) {
        let mut links = links(world, me, N);
        let mut state: Vec<f32> = (0..LEN).map(|i| i as f32 % 1013.0).collect();
        let runs = state[half(me)].chunks(CHUNK / 3 + 1).map(|run| SpanRef::from(run).span()).collect();
        // SAFETY: `state` outlives the transfers, and is written only between their parts.
        let mut transfers = [unsafe { links.catch_up_transfer(N - 1, true, runs) }];
        for step in 1u64.. {
            match step {
                // Without other work one page is sent, which is only a part.
                1 => {
                    let done = AtomicBool::new(true);
                    super::send_until(&done, &mut super::pairs(&mut links.peers, &mut transfers)).unwrap();
                }
                _ => links.send_pages(&mut transfers, || std::thread::sleep(Duration::from_millis(3))).1.unwrap(),
            }
            links.send_number(N - 1, step as f64).unwrap();
            update(&mut state);
            if links.receive_number(N - 1).unwrap() > 0.0 {
                outcome.send((step, state)).unwrap();
                return;
            }
        }
    }

    /// Two training members send half of the state each to a third one; all apply the same updates between the parts.
    #[test]
    fn state_received_in_parts_between_updates_equals_the_senders_state() {
        let world = World::new(ID, N, (0..N - 1).map(|i| vec![i, N - 1]).collect()).unwrap();
        let world = ShmWorld::create(&world, &[0; N as usize], STAGING_BYTES).unwrap();
        let (sender, outcomes) = channel();
        let (caught_up, n_steps) = std::thread::scope(|scope| {
            for me in 0..N - 1 {
                let (world, sender) = (&world, sender.clone());
                scope.spawn(move || send_pages(world, me, &sender));
            }
            let mut links = links(&world, N - 1, N);
            let mut state = vec![f32::NAN; LEN];
            let mut transfers = Vec::new();
            for from in 0..N - 1 {
                let run = SpanMut::from(&mut state[half(from)]).span();
                // SAFETY: `state` outlives the transfers, whose halves are disjoint; it is accessed only between their
                // parts.
                transfers.push(unsafe { links.catch_up_transfer(from, false, vec![run]) });
            }
            for step in 1u64.. {
                links.receive_catch_up(&mut transfers).unwrap();
                let over = transfers.iter().all(super::CatchUpTransfer::is_over);
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
            unreachable!("catch-up transfers end");
        });

        drop(sender);
        for (step, state) in outcomes {
            assert_eq!(step, n_steps);
            assert!(state == caught_up, "states differ after {step} steps");
        }
        assert!(n_steps > 1, "one page holds the whole state");
    }
}
