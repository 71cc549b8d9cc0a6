//! Bulk copies of boxes out of tensors, and the tensor maps that describe them.

use super::block::Block;
use super::swizzle::Swizzle;
use super::warp::Warp;
use crate::memory::Mode;
use crate::program::{Address, CopyOp, Reg};
use crate::report::{Kind, Violation};
use crate::types::{Space, Ty};

const MAGIC: u32 = u32::from_le_bytes(*b"PXTM");
/// Size of an encoded map, that of `CUtensorMap`.
const MAP_BYTES: usize = 128;
const RANK_MAX: usize = 5;

/// A tensor in global memory and the box that one copy moves, innermost dimension first.
///
/// The driver's `CUtensorMap` is opaque; the interpreter reads the bytes of [`TensorMap::encode`] in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Address of the first element.
    pub address: u64,
    /// Bytes of an element.
    pub element_bytes: u8,
    /// Elements of each dimension.
    pub dims: Vec<u32>,
    /// Bytes from one index of a dimension to the next, from the second dimension on.
    pub strides_bytes: Vec<u64>,
    /// Elements of the box in each dimension.
    pub box_dims: Vec<u16>,
    /// How the box lies in shared memory.
    pub swizzle: Swizzle,
}

impl TensorMap {
    /// The map as a kernel parameter of 128 bytes.
    ///
    /// # Panics
    /// When the lists do not have the lengths of one to five dimensions.
    pub fn encode(&self) -> [u8; MAP_BYTES] {
        let rank = self.dims.len();
        assert!((1..=RANK_MAX).contains(&rank) && self.box_dims.len() == rank && self.strides_bytes.len() == rank - 1);
        let swizzle = match self.swizzle {
            Swizzle::None => 0,
            Swizzle::Bytes32 => 1,
            Swizzle::Bytes64 => 2,
            Swizzle::Bytes128 => 3,
        };
        let mut bytes = [0u8; MAP_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        (bytes[4], bytes[5], bytes[6]) = (rank as u8, self.element_bytes, swizzle);
        bytes[8..16].copy_from_slice(&self.address.to_le_bytes());
        for (k, dim) in self.dims.iter().enumerate() {
            bytes[16 + 4 * k..][..4].copy_from_slice(&dim.to_le_bytes());
            bytes[36 + 2 * k..][..2].copy_from_slice(&self.box_dims[k].to_le_bytes());
        }
        for (k, stride) in self.strides_bytes.iter().enumerate() {
            bytes[48 + 8 * k..][..8].copy_from_slice(&stride.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8; MAP_BYTES]) -> Option<TensorMap> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let rank = usize::from(bytes[4]);
        if u32_at(0) != MAGIC || !(1..=RANK_MAX).contains(&rank) {
            return None;
        }
        Some(TensorMap {
            address: u64_at(8),
            element_bytes: bytes[5],
            dims: (0..rank).map(|k| u32_at(16 + 4 * k)).collect(),
            strides_bytes: (0..rank - 1).map(|k| u64_at(48 + 8 * k)).collect(),
            box_dims: (0..rank).map(|k| u16::from_le_bytes([bytes[36 + 2 * k], bytes[37 + 2 * k]])).collect(),
            swizzle: [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128][usize::from(bytes[6] & 3)],
        })
    }

    fn row_bytes(&self) -> usize {
        usize::from(self.box_dims[0]) * usize::from(self.element_bytes)
    }

    fn box_bytes(&self) -> usize {
        self.box_dims.iter().map(|n| usize::from(*n)).product::<usize>() * usize::from(self.element_bytes)
    }

    /// The rows of the box at some coordinates: the address of each, and which of its bytes lie in the tensor. Rows outside of
    /// the tensor have none.
    fn rows(&self, at: &[i64]) -> Vec<(u64, std::ops::Range<usize>)> {
        let n_rows: usize = self.box_dims[1..].iter().map(|n| usize::from(*n)).product();
        let element = i64::from(self.element_bytes);
        let row = |index: usize| {
            let (mut rest, mut inside) = (index, true);
            let mut address = self.address.wrapping_add((at[0] * element) as u64);
            for (k, n) in self.box_dims.iter().enumerate().skip(1) {
                let position = at[k] + (rest % usize::from(*n)) as i64;
                rest /= usize::from(*n);
                inside &= (0..i64::from(self.dims[k])).contains(&position);
                address = address.wrapping_add((position as u64).wrapping_mul(self.strides_bytes[k - 1]));
            }
            let first = (-at[0]).clamp(0, i64::from(self.box_dims[0]));
            let last = (i64::from(self.dims[0]) - at[0]).clamp(first, i64::from(self.box_dims[0]));
            let range = (first * element) as usize..(last * element) as usize;
            (address, if inside { range } else { 0..0 })
        };
        (0..n_rows).map(row).collect()
    }
}

impl Block<'_, '_> {
    pub(super) fn tensor_copy(&mut self, warp: &mut Warp, lane: usize, copy: &CopyOp) {
        match copy {
            CopyOp::TensorLoad { to, map, coordinates, barrier } => {
                let Some((map, rows)) = self.tensor_box(warp, lane, *map, coordinates) else { return };
                let to = self.barrier_address(warp, *to, lane);
                let barrier = self.barrier_address(warp, *barrier, lane);
                let mut bytes = vec![0u8; map.box_bytes()];
                for ((address, range), row) in rows.iter().zip(bytes.chunks_exact_mut(map.row_bytes())) {
                    self.read_row(warp, lane, *address, range.clone(), row);
                }
                self.check_box(warp, lane, &map, to);
                self.deliver(warp, lane, to, &bytes, barrier, map.swizzle);
            }
            CopyOp::TensorStore { map, coordinates, from, reduce } => {
                let Some((map, rows)) = self.tensor_box(warp, lane, *map, coordinates) else { return };
                let from = self.barrier_address(warp, *from, lane);
                self.check_box(warp, lane, &map, from);
                let bytes = self.take_outgoing(warp, lane, from, map.box_bytes(), map.swizzle);
                for ((address, range), row) in rows.iter().zip(bytes.chunks_exact(map.row_bytes())) {
                    let at = address.wrapping_add(range.start as u64);
                    let part = &row[range.clone()];
                    if *reduce {
                        self.add_elements(warp, lane, at, part, Ty::F32);
                    } else if !part.is_empty() {
                        let actor = Self::actor(&self.clocks, self.index, warp);
                        let violation = self.launch.device.write_by(at, part, &actor, lane, Mode::Plain);
                        self.note(warp, lane, violation);
                    }
                }
            }
            _ => {}
        }
    }

    fn read_row(&mut self, warp: &Warp, lane: usize, address: u64, range: std::ops::Range<usize>, row: &mut [u8]) {
        if range.is_empty() {
            return;
        }
        let at = address.wrapping_add(range.start as u64);
        let actor = Self::actor(&self.clocks, self.index, warp);
        let violation = self.launch.device.read(at, &mut row[range], &actor, lane, Mode::Plain);
        self.note(warp, lane, violation);
    }

    fn check_box(&mut self, warp: &Warp, lane: usize, map: &TensorMap, shared: u64) {
        let strides_fit = map.strides_bytes.iter().all(|s| s.is_multiple_of(16)) && map.address.is_multiple_of(16);
        if !strides_fit || !map.row_bytes().is_multiple_of(16) {
            let note = "address, strides and rows of a tensor box must be multiples of 16 bytes";
            self.find(warp, lane, Violation::new(Kind::Misaligned, note));
        }
        // A swizzle repeats after 8 rows, where the interpreter requires the box to start.
        let align = if map.swizzle == Swizzle::None { 128 } else { 8 * map.swizzle.row_bytes() };
        if !shared.is_multiple_of(align)
            || map.swizzle != Swizzle::None && map.row_bytes() as u64 > map.swizzle.row_bytes()
        {
            let note =
                "a box in shared memory starts where its swizzle repeats, and its rows are no wider than the swizzle";
            self.find(warp, lane, Violation::new(Kind::Misaligned, note));
        }
    }

    /// The tensor map at an address, and the rows of its box.
    #[allow(clippy::type_complexity)]
    fn tensor_box(
        &mut self,
        warp: &Warp,
        lane: usize,
        map: Address,
        coordinates: &[Reg],
    ) -> Option<(TensorMap, Vec<(u64, std::ops::Range<usize>)>)> {
        let address = self.address_of(warp, map, lane);
        let mut bytes = [0u8; MAP_BYTES];
        for (k, chunk) in bytes.chunks_exact_mut(16).enumerate() {
            let violation = self.read_lane(warp, lane, Space::Generic, address + 16 * k as u64, chunk, Mode::Plain);
            self.note(warp, lane, violation);
        }
        let at: Vec<i64> = coordinates.iter().map(|reg| i64::from(warp.reg(*reg)[lane] as i32)).collect();
        match TensorMap::decode(&bytes).filter(|map| map.dims.len() == at.len()) {
            Some(map) => {
                let rows = map.rows(&at);
                Some((map, rows))
            }
            None => {
                let note = "no tensor map of this rank lies at the address; encode it by `TensorMap`";
                self.find(warp, lane, Violation::new(Kind::TensorMap, note));
                None
            }
        }
    }
}
