//! Vector clocks: which accesses of other warps are known to be over.
//!
//! Each warp has a clock that advances whenever the warp releases something (arrives at a barrier, publishes by an atomic) and
//! whenever its lanes diverge. Knowing "warp 3 at clock 7" means that all accesses of warp 3 up to clock 7 happened before.
//! Source: Flanagan and Freund 2009, FastTrack, §3.

use std::collections::BTreeMap;
use std::rc::Rc;

/// What a warp knows: a time for each warp and each copy engine of its own block, and for warps of other blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock {
    own: Vec<u32>,
    foreign: Option<Rc<BTreeMap<u32, Vec<u32>>>>,
}

impl Clock {
    /// The time up to which the accesses of an agent of the same block are known.
    pub(crate) fn of(&self, agent: usize) -> u32 {
        self.own.get(agent).copied().unwrap_or(0)
    }

    /// The time up to which the accesses of a warp of another block are known.
    pub(crate) fn of_block(&self, block: u32, warp: usize) -> u32 {
        let times = self.foreign.as_ref().and_then(|f| f.get(&block));
        times.and_then(|t| t.get(warp)).copied().unwrap_or(0)
    }

    pub(crate) fn set(&mut self, agent: usize, time: u32) {
        if self.own.len() <= agent {
            self.own.resize(agent + 1, 0);
        }
        self.own[agent] = self.own[agent].max(time);
    }

    /// Learns what another clock of the same block knows.
    pub(crate) fn join(&mut self, other: &Clock) {
        for (agent, time) in other.own.iter().enumerate() {
            self.set(agent, *time);
        }
        if let Some(foreign) = &other.foreign {
            if self.foreign.as_ref().is_some_and(|mine| Rc::ptr_eq(mine, foreign)) {
                return;
            }
            for (block, times) in foreign.iter() {
                self.join_block(*block, times);
            }
        }
    }

    /// Learns what a clock of another block knows, including about this one's relatives.
    pub(crate) fn join_foreign(&mut self, block: u32, other: &Clock) {
        self.join_block(block, &other.own);
        if let Some(foreign) = &other.foreign {
            for (block, times) in foreign.iter() {
                self.join_block(*block, times);
            }
        }
    }

    fn join_block(&mut self, block: u32, times: &[u32]) {
        let mine = Rc::make_mut(self.foreign.get_or_insert_default()).entry(block).or_default();
        if mine.len() < times.len() {
            mine.resize(times.len(), 0);
        }
        for (mine, time) in mine.iter_mut().zip(times) {
            *mine = (*mine).max(*time);
        }
    }
}

/// For each pair of lanes that diverged, the time when they were last converged.
#[derive(Clone, Debug, Default)]
pub(crate) struct Together(Option<Box<[[u32; 32]; 32]>>);

impl Together {
    pub(crate) fn last(&self, a: usize, b: usize) -> u32 {
        self.0.as_ref().map_or(0, |last| last[a][b])
    }

    /// Notes that the lanes of `a` and those of `b` part at `time`.
    pub(crate) fn part(&mut self, a: u32, b: u32, time: u32) {
        let last = self.0.get_or_insert_with(|| Box::new([[0; 32]; 32]));
        for x in lanes(a) {
            for y in lanes(b) {
                last[x][y] = time;
                last[y][x] = time;
            }
        }
    }
}

/// The lanes of a mask.
pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        let lane = rest.trailing_zeros();
        rest &= rest.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}
