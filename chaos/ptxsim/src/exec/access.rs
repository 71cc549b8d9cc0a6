//! Loads and stores.

use super::block::Block;
use super::warp::Warp;
use crate::alu::WARP;
use crate::memory::clock::lanes;
use crate::memory::{ACCESS_BYTES_MAX, Mode};
use crate::program::{Access, Address, Strength};
use crate::report::{Kind, Place, Violation};
use crate::types::{Space, mask_of, sign_extend};

/// The upper byte of a generic address names its window; global memory has 0.
pub(super) const WINDOW_SHIFT: u32 = 56;
pub(super) const SHARED_WINDOW: u64 = 1;
pub(super) const LOCAL_WINDOW: u64 = 2;
pub(super) const PARAM_WINDOW: u64 = 3;

/// The space and the address in it of a generic address.
fn resolve(space: Space, address: u64) -> (Space, u64) {
    let within = address & ((1 << WINDOW_SHIFT) - 1);
    match (space, address >> WINDOW_SHIFT) {
        (Space::Generic, SHARED_WINDOW) => (Space::Shared, within),
        (Space::Generic, LOCAL_WINDOW) => (Space::Local, within),
        (Space::Generic, PARAM_WINDOW) => (Space::Param, within),
        (Space::Generic, _) => (Space::Global, address),
        // Addresses of shared memory have 32 bits, and may come from a generic address.
        (Space::Shared, _) => (Space::Shared, address & 0xffff_ffff),
        (space, _) => (space, address),
    }
}

fn mode(strength: Strength) -> Mode {
    match strength {
        Strength::Weak => Mode::Plain,
        Strength::NonCoherent => Mode::NonCoherent,
        Strength::Strong | Strength::Acquire | Strength::Release => Mode::Atomic,
    }
}

impl Block<'_, '_> {
    pub(super) fn address_of(&self, warp: &Warp, address: Address, lane: usize) -> u64 {
        warp.reg(address.base)[lane].wrapping_add(address.offset as u64)
    }

    pub(super) fn load(&mut self, warp: &mut Warp, access: &Access, exec: u32) {
        let len = access.bytes * access.regs.len();
        let mut out = [[0u64; WARP]; 8];
        for lane in lanes(exec) {
            let address = self.address_of(warp, access.address, lane);
            let mut buffer = [0u8; ACCESS_BYTES_MAX];
            let violation =
                self.read_lane(warp, lane, access.space, address, &mut buffer[..len], mode(access.strength));
            self.note(warp, lane, violation);
            if access.strength == Strength::Acquire || access.strength == Strength::Strong {
                self.acquire(warp, address);
            }
            for (k, chunk) in buffer[..len].chunks_exact(access.bytes).enumerate() {
                let mut word = [0u8; 8];
                word[..access.bytes.min(8)].copy_from_slice(&chunk[..access.bytes.min(8)]);
                let value = u64::from_le_bytes(word);
                out[k][lane] = match access.extend_to {
                    Some(bytes) => sign_extend(value, access.bytes) & mask_of(bytes),
                    None => value,
                };
            }
        }
        for (k, reg) in access.regs.iter().enumerate() {
            warp.set(*reg, &out[k], exec);
        }
    }

    pub(super) fn store(&mut self, warp: &mut Warp, access: &Access, exec: u32) {
        let len = access.bytes * access.regs.len();
        let mut addresses = [0u64; WARP];
        for lane in lanes(exec) {
            let address = self.address_of(warp, access.address, lane);
            addresses[lane] = address;
            let mut buffer = [0u8; ACCESS_BYTES_MAX];
            for (k, reg) in access.regs.iter().enumerate() {
                let value = warp.reg(*reg)[lane].to_le_bytes();
                buffer[k * access.bytes..][..access.bytes].copy_from_slice(&value[..access.bytes]);
            }
            if access.strength == Strength::Release || access.strength == Strength::Strong {
                self.publish(warp, address, access.strength == Strength::Release);
            }
            let violation = self.write_lane(warp, lane, access.space, address, &buffer[..len], mode(access.strength));
            self.note(warp, lane, violation);
        }
        if access.space != Space::Local && access.strength == Strength::Weak {
            self.check_collisions(warp, access, &addresses, exec);
        }
    }

    /// Reports lanes of one store that write different values to the same bytes: which one stays is not defined.
    fn check_collisions(&mut self, warp: &Warp, access: &Access, addresses: &[u64; WARP], exec: u32) {
        let len = (access.bytes * access.regs.len()) as u64;
        let mut last: Option<u64> = None;
        let ascending = lanes(exec).all(|lane| {
            let ok = last.is_none_or(|l| addresses[lane] >= l + len);
            last = Some(addresses[lane]);
            ok
        });
        if ascending {
            return;
        }
        let mut order: Vec<usize> = lanes(exec).collect();
        order.sort_by_key(|lane| addresses[*lane]);
        for pair in order.windows(2) {
            let [a, b] = [pair[0], pair[1]];
            let same_value = access.regs.iter().all(|reg| warp.reg(*reg)[a] == warp.reg(*reg)[b]);
            if addresses[b] < addresses[a] + len && !(addresses[a] == addresses[b] && same_value) {
                let (space, address) = resolve(access.space, addresses[b]);
                if space == Space::Local {
                    continue;
                }
                let (kind, place) = match space {
                    Space::Shared => (Kind::SharedRace, Place::Shared { byte: address as usize, variable: None }),
                    _ => (Kind::GlobalRace, self.global_place(address)),
                };
                let note = "lanes of one store write different values to the same bytes";
                self.find(warp, b, Violation::new(kind, note).at(place));
                return;
            }
        }
    }

    fn global_place(&self, address: u64) -> Place {
        self.launch.device.place(address)
    }

    /// Reads bytes for a lane from any space.
    pub(super) fn read_lane(
        &mut self,
        warp: &Warp,
        lane: usize,
        space: Space,
        address: u64,
        to: &mut [u8],
        mode: Mode,
    ) -> Option<Violation> {
        let (space, address) = resolve(space, address);
        let misaligned = self.misaligned(space, address, to.len());
        let violation = match space {
            Space::Shared => {
                let actor = Self::actor(&self.clocks, self.index, warp);
                self.shared.read(address, to, &actor, lane, mode)
            }
            Space::Local => match local_range(warp, lane, address, to.len()) {
                Some(range) => {
                    to.copy_from_slice(&warp.local[range]);
                    None
                }
                None => Some(Violation::new(Kind::OutOfBounds, "").at(Place::Local { byte: address })),
            },
            Space::Param => match self.launch.params.get(address as usize..).and_then(|p| p.get(..to.len())) {
                Some(bytes) => {
                    to.copy_from_slice(bytes);
                    None
                }
                None => Some(Violation::new(Kind::OutOfBounds, "").at(Place::Param { byte: address })),
            },
            _ => {
                let actor = Self::actor(&self.clocks, self.index, warp);
                self.launch.device.read(address, to, &actor, lane, mode)
            }
        };
        misaligned.or(violation)
    }

    /// Writes bytes for a lane to any space.
    pub(super) fn write_lane(
        &mut self,
        warp: &mut Warp,
        lane: usize,
        space: Space,
        address: u64,
        from: &[u8],
        mode: Mode,
    ) -> Option<Violation> {
        let (space, address) = resolve(space, address);
        let misaligned = self.misaligned(space, address, from.len());
        let violation = match space {
            Space::Shared => {
                let actor = Self::actor(&self.clocks, self.index, warp);
                self.shared.write(address, from, &actor, lane, mode)
            }
            Space::Local => match local_range(warp, lane, address, from.len()) {
                Some(range) => {
                    warp.local[range].copy_from_slice(from);
                    None
                }
                None => Some(Violation::new(Kind::OutOfBounds, "").at(Place::Local { byte: address })),
            },
            Space::Param => {
                Some(Violation::new(Kind::OutOfBounds, "parameters are read-only").at(Place::Param { byte: address }))
            }
            _ => {
                let actor = Self::actor(&self.clocks, self.index, warp);
                self.launch.device.write_by(address, from, &actor, lane, mode)
            }
        };
        misaligned.or(violation)
    }

    fn misaligned(&self, space: Space, address: u64, len: usize) -> Option<Violation> {
        if address.is_multiple_of(len as u64) {
            return None;
        }
        let place = match space {
            Space::Shared => Place::Shared { byte: address as usize, variable: None },
            Space::Local => Place::Local { byte: address },
            Space::Param => Place::Param { byte: address },
            _ => self.global_place(address),
        };
        Some(Violation::new(Kind::Misaligned, "the address is no multiple of the size of the access").at(place))
    }

    /// Learns what others published at an address.
    pub(super) fn acquire(&mut self, warp: &Warp, address: u64) {
        let key = self.sync_key(address);
        if let Some(all) = self.launch.published.get(&key) {
            for (block, clock) in all {
                match *block == self.index {
                    true => self.clocks[warp.index].join(clock),
                    false => self.clocks[warp.index].join_foreign(*block, clock),
                }
            }
        }
    }

    /// Publishes at an address what the warp knew at its last fence, or knows now.
    pub(super) fn publish(&mut self, warp: &mut Warp, address: u64, now: bool) {
        let clock = if now { Some(self.clocks[warp.index].clone()) } else { warp.fence.clone() };
        let Some(clock) = clock else { return };
        let key = self.sync_key(address);
        let all = self.launch.published.entry(key).or_default();
        match all.iter_mut().find(|(block, _)| *block == self.index) {
            Some((_, known)) => known.join(&clock),
            None => all.push((self.index, clock)),
        }
        if now {
            self.tick(warp);
        }
    }

    /// Addresses of shared memory mean something within the block only.
    fn sync_key(&self, address: u64) -> u64 {
        let is_global = self.launch.device.allocation(address).is_some();
        if is_global { address } else { 1 << 63 | u64::from(self.index) << 32 | address & 0xffff_ffff }
    }
}

fn local_range(warp: &Warp, lane: usize, address: u64, len: usize) -> Option<std::ops::Range<usize>> {
    let end = address.checked_add(len as u64)?;
    (end <= warp.local_bytes as u64).then(|| {
        let start = lane * warp.local_bytes + address as usize;
        start..start + len
    })
}
