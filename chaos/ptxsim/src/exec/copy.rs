//! Asynchronous copies: `cp.async` by groups of a thread, and bulk copies by mbarriers or bulk groups.

use super::block::Block;
use super::swizzle::Swizzle;
use super::warp::{PendingCopy, Warp};
use crate::memory::Mode;
use crate::memory::clock::lanes;
use crate::memory::shared::Outgoing;
use crate::program::{Address, CopyOp};
use crate::report::{Kind, Violation};
use crate::types::{Space, Ty};

/// Addresses and sizes of bulk copies are multiples of this.
const BULK_ALIGN: u64 = 16;

impl Block<'_, '_> {
    pub(super) fn copy(&mut self, warp: &mut Warp, copy: &CopyOp, exec: u32) {
        for lane in lanes(exec) {
            match copy {
                CopyOp::Small { to, from, bytes, source_bytes, skip } => {
                    let skip = skip.is_some_and(|pred| warp.pred(pred) >> lane & 1 == 1);
                    let n = source_bytes.map_or(*bytes, |reg| (warp.reg(reg)[lane] & 0xffff_ffff) as usize);
                    self.start_small(warp, lane, (*to, *from), *bytes, if skip { 0 } else { n.min(*bytes) });
                }
                CopyOp::Commit => {
                    let copies = &mut warp.copies[lane];
                    let group = std::mem::take(&mut copies.open);
                    copies.groups.push_back(group);
                }
                CopyOp::Wait { pending } => self.wait_small(warp, lane, *pending),
                CopyOp::WaitAll => {
                    let copies = &mut warp.copies[lane];
                    let open = std::mem::take(&mut copies.open);
                    copies.groups.push_back(open);
                    self.wait_small(warp, lane, 0);
                }
                CopyOp::Arrive { barrier, no_increment } => self.arrive_small(warp, lane, *barrier, *no_increment),
                CopyOp::BulkLoad { to, from, bytes, barrier } => {
                    let bytes = warp.reg(*bytes)[lane] & 0xffff_ffff;
                    let (to, from) = (self.barrier_address(warp, *to, lane), self.address_of(warp, *from, lane));
                    let barrier = self.barrier_address(warp, *barrier, lane);
                    self.bulk_load(warp, lane, to, &[(from, bytes as usize)], barrier);
                }
                CopyOp::BulkStore { to, from, bytes, reduce } => {
                    let bytes = warp.reg(*bytes)[lane] & 0xffff_ffff;
                    let (to, from) = (self.address_of(warp, *to, lane), self.barrier_address(warp, *from, lane));
                    self.bulk_store(warp, lane, to, from, bytes as usize, *reduce);
                }
                CopyOp::BulkCommit => warp.copies[lane].bulk_groups += 1,
                CopyOp::BulkWait { pending } => {
                    let done = warp.copies[lane].bulk_groups.saturating_sub(*pending as u64);
                    let index = warp.index;
                    self.shared.outgoing.retain(|o| o.warp != index || o.lane != lane || o.group >= done);
                }
                CopyOp::TensorLoad { .. } | CopyOp::TensorStore { .. } => self.tensor_copy(warp, lane, copy),
            }
        }
    }

    /// Starts a copy of `bytes` bytes: the first `n` come from memory, the others are zero.
    fn start_small(&mut self, warp: &mut Warp, lane: usize, (to, from): (Address, Address), bytes: usize, n: usize) {
        let to = self.barrier_address(warp, to, lane);
        let from = self.address_of(warp, from, lane);
        if !to.is_multiple_of(bytes as u64) || !from.is_multiple_of(bytes as u64) {
            let note = "both addresses of a copy must be multiples of its size";
            self.find(warp, lane, Violation::new(Kind::Misaligned, note));
        }
        let mut buffer = [0u8; 16];
        if n > 0 {
            let actor = Self::actor(&self.clocks, self.index, warp);
            let violation = self.launch.device.read(from, &mut buffer[..n], &actor, lane, Mode::Plain);
            self.note(warp, lane, violation);
        }
        let actor = Self::actor(&self.clocks, self.index, warp);
        let violation = self.shared.start_copy(to, bytes, &actor, lane);
        self.note(warp, lane, violation);
        warp.copies[lane].open.push(PendingCopy { to, len: bytes, bytes: buffer });
    }

    fn wait_small(&mut self, warp: &mut Warp, lane: usize, pending: usize) {
        let now = self.clocks[warp.index].of(warp.index);
        while warp.copies[lane].groups.len() > pending {
            for copy in warp.copies[lane].groups.pop_front().into_iter().flatten() {
                self.shared.finish_copy(copy.to, &copy.bytes[..copy.len], warp.index, now);
            }
        }
    }

    /// The copies so far complete on an mbarrier instead of a group.
    fn arrive_small(&mut self, warp: &mut Warp, lane: usize, barrier: Address, no_increment: bool) {
        let at = self.barrier_address(warp, barrier, lane);
        let Some((agent, time)) = self.start_transaction(warp, lane, at) else { return };
        let copies = std::mem::take(&mut warp.copies[lane]);
        for copy in copies.groups.into_iter().flatten().chain(copies.open) {
            self.shared.finish_copy(copy.to, &copy.bytes[..copy.len], agent, time);
        }
        self.arrive_by_copies(warp, lane, at, no_increment);
    }

    /// A bulk copy into shared memory, gathered from ranges of global memory.
    pub(super) fn bulk_load(&mut self, warp: &mut Warp, lane: usize, to: u64, from: &[(u64, usize)], barrier: u64) {
        let total: usize = from.iter().map(|(_, n)| n).sum();
        let aligned =
            from.iter().all(|(at, n)| at.is_multiple_of(BULK_ALIGN) && (*n as u64).is_multiple_of(BULK_ALIGN));
        if !aligned || !to.is_multiple_of(BULK_ALIGN) {
            self.find(warp, lane, Violation::new(Kind::Misaligned, "bulk copies need multiples of 16 bytes"));
        }
        let mut bytes = vec![0u8; total];
        let mut done = 0;
        for (from, n) in from {
            let actor = Self::actor(&self.clocks, self.index, warp);
            let violation = self.launch.device.read(*from, &mut bytes[done..done + n], &actor, lane, Mode::Plain);
            self.note(warp, lane, violation);
            done += n;
        }
        self.deliver(warp, lane, to, &bytes, barrier, Swizzle::None);
    }

    /// Writes the bytes of a bulk copy and completes its transaction.
    pub(super) fn deliver(&mut self, warp: &Warp, lane: usize, to: u64, bytes: &[u8], barrier: u64, swizzle: Swizzle) {
        let actor = Self::actor(&self.clocks, self.index, warp);
        let violation = self.shared.start_copy(to, bytes.len(), &actor, lane);
        self.note(warp, lane, violation);
        let Some((agent, time)) = self.start_transaction(warp, lane, barrier) else { return };
        for (k, chunk) in bytes.chunks(16).enumerate() {
            self.shared.finish_copy(swizzle.apply(to + 16 * k as u64), chunk, agent, time);
        }
        self.complete_transaction(barrier, bytes.len() as u64);
    }

    fn bulk_store(&mut self, warp: &mut Warp, lane: usize, to: u64, from: u64, n: usize, reduce: Option<Ty>) {
        if [to, from, n as u64].iter().any(|v| !v.is_multiple_of(BULK_ALIGN)) {
            self.find(warp, lane, Violation::new(Kind::Misaligned, "bulk copies need multiples of 16 bytes"));
        }
        let bytes = self.take_outgoing(warp, lane, from, n, Swizzle::None);
        match reduce {
            None => {
                let actor = Self::actor(&self.clocks, self.index, warp);
                let violation = self.launch.device.write_by(to, &bytes, &actor, lane, Mode::Plain);
                self.note(warp, lane, violation);
            }
            Some(ty) => self.add_elements(warp, lane, to, &bytes, ty),
        }
    }

    /// Reads shared bytes for a copy out of them, which may go on reading until it is waited for.
    pub(super) fn take_outgoing(&mut self, warp: &Warp, lane: usize, from: u64, n: usize, swizzle: Swizzle) -> Vec<u8> {
        let mut bytes = vec![0u8; n];
        for (k, chunk) in bytes.chunks_mut(16).enumerate() {
            let actor = Self::actor(&self.clocks, self.index, warp);
            let at = swizzle.apply(from + 16 * k as u64);
            let violation = self.shared.read_by_proxy(at, chunk, &actor, lane);
            self.note(warp, lane, violation);
        }
        let group = warp.copies[lane].bulk_groups;
        let (from, pc) = (from as usize, warp.fragments[warp.current].pc);
        self.shared.outgoing.push(Outgoing { warp: warp.index, lane, group, from, to: from + n, pc });
        bytes
    }

    /// Adds elements to global memory, each atomically.
    pub(super) fn add_elements(&mut self, warp: &mut Warp, lane: usize, to: u64, bytes: &[u8], ty: Ty) {
        let n = ty.bytes();
        for (k, operand) in bytes.chunks_exact(n).enumerate() {
            let address = to + (k * n) as u64;
            let (mut old, mut word) = ([0u8; 8], [0u8; 8]);
            word[..n].copy_from_slice(operand);
            let violation = self.read_lane(warp, lane, Space::Global, address, &mut old[..n], Mode::Atomic);
            self.note(warp, lane, violation);
            let sum = super::atomic::apply(
                crate::program::AtomOp::Add,
                ty,
                u64::from_le_bytes(old),
                u64::from_le_bytes(word),
                0,
            );
            let violation = self.write_lane(warp, lane, Space::Global, address, &sum.to_le_bytes()[..n], Mode::Atomic);
            self.note(warp, lane, violation);
        }
    }
}
