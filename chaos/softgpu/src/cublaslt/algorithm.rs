//! Algorithms: opaque to the program, valid for the problem that they were found for.

use super::attributes::Preference;
use super::problem::Problem;
use super::{INVALID_VALUE, NOT_SUPPORTED, Outcome, is_reachable, refuse};

const MAGIC: u64 = 0x736f_6674_6770_7531;
const WORKSPACE_ALIGNMENT: usize = 256;
/// Sums of parts in the order of the parts, through the workspace.
const SCHEME_COMPUTE_TYPE: u32 = 2;

/// `cublasLtMatmulAlgo_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Algorithm {
    magic: u64,
    problem: u64,
    workspace_bytes: u64,
    /// Of A, B, C and D: what was promised of the pointers.
    alignments: [u16; 4],
    /// Into how many parts the sum over k is cut.
    split: u32,
    scheme: u32,
    reserved: [u64; 3],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Found {
    pub algorithm: Algorithm,
    workspace_bytes: usize,
    state: u32,
    waves: f32,
    reserved: [i32; 4],
}

const _: () = assert!(size_of::<Algorithm>() == 64 && size_of::<Found>() == 96);

/// Algorithms for a problem; where sums over k are long and it is allowed, one that cuts them comes first.
pub fn find(problem: &Problem, preference: &Preference) -> Vec<Found> {
    let split = match problem.k {
        0..512 => 1,
        512..4096 => 2,
        _ => 4,
    };
    let sums = (problem.m * problem.n * problem.batches * 4 * split) as u64;
    let workspace_bytes = sums.next_multiple_of(WORKSPACE_ALIGNMENT as u64);
    let may_split =
        preference.reduction_schemes & SCHEME_COMPUTE_TYPE != 0 && workspace_bytes <= preference.workspace_most;
    let of = |split: usize| {
        let is_split = split > 1;
        Found::of(Algorithm {
            magic: MAGIC,
            problem: problem.hash(),
            workspace_bytes: if is_split { workspace_bytes } else { 0 },
            alignments: preference.alignments.map(|a| a.min(256) as u16),
            split: split as u32,
            scheme: if is_split { SCHEME_COMPUTE_TYPE } else { 0 },
            reserved: [0; 3],
        })
    };
    if split > 1 && may_split { vec![of(split), of(1)] } else { vec![of(1)] }
}

impl Found {
    pub fn of(algorithm: Algorithm) -> Found {
        let workspace_bytes = algorithm.workspace_bytes as usize;
        Found { algorithm, workspace_bytes, state: 0, waves: 1.0, reserved: [0; 4] }
    }
}

impl Algorithm {
    pub fn split(&self) -> usize {
        self.split as usize
    }

    /// Whether it was found for this problem.
    pub fn check(&self, problem: &Problem) -> Outcome {
        if self.magic != MAGIC {
            return Err(refuse(INVALID_VALUE, format_args!("an algorithm that no heuristic gave")));
        }
        if self.problem != problem.hash() {
            return Err(refuse(NOT_SUPPORTED, format_args!("the algorithm was found for another problem")));
        }
        Ok(())
    }

    /// Whether the pointers are what was promised.
    pub fn check_call(&self, pointers: [usize; 4], workspace: usize, bytes: usize) -> Outcome {
        for (pointer, alignment) in pointers.into_iter().zip(self.alignments) {
            if !pointer.is_multiple_of(alignment.into()) {
                let what = format_args!("{pointer:#x} is not a multiple of {alignment}, as the preference promised");
                return Err(refuse(INVALID_VALUE, what));
            }
        }
        let needed = self.workspace_bytes as usize;
        if bytes < needed {
            return Err(refuse(INVALID_VALUE, format_args!("a workspace of {bytes} bytes, {needed} are needed")));
        }
        if bytes > 0 && (!workspace.is_multiple_of(WORKSPACE_ALIGNMENT) || !is_reachable(workspace, bytes)) {
            let what = format_args!("the workspace of {bytes} at {workspace:#x} is not aligned memory of a device");
            return Err(refuse(INVALID_VALUE, what));
        }
        Ok(())
    }

    /// A `cublasLtMatmulAlgoConfigAttributes_t`.
    pub fn config(&self, attribute: u32) -> Option<u32> {
        match attribute {
            0 => Some(66),
            1 => Some(20),
            2 => Some(self.split),
            3 => Some(self.scheme),
            _ => None,
        }
    }
}
