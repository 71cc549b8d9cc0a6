//! `ldmatrix` and `stmatrix`: 8 × 8 matrices of 16-bit elements, a row from each address.
//!
//! Lane `l` holds elements `2 (l % 4)` and `2 (l % 4) + 1` of row `l / 4`; transposed, of column `l / 4`.

use super::block::Block;
use super::flow::Flow;
use super::warp::Warp;
use crate::alu::WARP;
use crate::memory::Mode;
use crate::program::MatrixAccess;
use crate::report::Kind;

impl Block<'_, '_> {
    pub(super) fn matrix(&mut self, warp: &mut Warp, access: &MatrixAccess, exec: u32) -> Flow {
        match self.converge(warp, u32::MAX) {
            None => return Flow::Done,
            Some(missing) if missing != 0 || exec != u32::MAX => {
                self.find_first(warp, exec, Kind::LaneMask, "not all lanes of the warp execute the matrix instruction");
            }
            Some(_) => {}
        }
        for (k, reg) in access.regs.iter().enumerate() {
            let mut rows = [[0u16; 8]; 8];
            if access.store {
                let values = warp.reg(*reg);
                for (lane, value) in values.iter().enumerate() {
                    for half in 0..2 {
                        *element(&mut rows, access.transposed, lane, half) = (value >> (16 * half)) as u16;
                    }
                }
            }
            for (row, elements) in rows.iter_mut().enumerate() {
                let lane = 8 * k + row;
                let address = self.address_of(warp, access.address, lane);
                let mut bytes = [0u8; 16];
                let violation = if access.store {
                    for (to, from) in bytes.chunks_exact_mut(2).zip(elements.iter()) {
                        to.copy_from_slice(&from.to_le_bytes());
                    }
                    self.write_lane(warp, lane, access.space, address, &bytes, Mode::Plain)
                } else {
                    let violation = self.read_lane(warp, lane, access.space, address, &mut bytes, Mode::Plain);
                    for (to, from) in elements.iter_mut().zip(bytes.chunks_exact(2)) {
                        *to = u16::from_le_bytes([from[0], from[1]]);
                    }
                    violation
                };
                self.note(warp, lane, violation);
            }
            if !access.store {
                let mut out = [0u64; WARP];
                for (lane, value) in out.iter_mut().enumerate() {
                    let low = *element(&mut rows, access.transposed, lane, 0);
                    let high = *element(&mut rows, access.transposed, lane, 1);
                    *value = u64::from(low) | u64::from(high) << 16;
                }
                warp.set(*reg, &out, exec);
            }
        }
        Flow::Next
    }
}

fn element(rows: &mut [[u16; 8]; 8], transposed: bool, lane: usize, half: usize) -> &mut u16 {
    let (row, column) = (lane / 4, lane % 4 * 2 + half);
    if transposed { &mut rows[column][row] } else { &mut rows[row][column] }
}
