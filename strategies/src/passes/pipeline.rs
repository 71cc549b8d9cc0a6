//! Pipeline parallelism: each rank has some blocks of the model, and microbatches pass through the ranks.
//!
//! Source: Huang et al. 2018, GPipe (arXiv:1811.06965); Narayanan et al. 2021, §2.2, for several chunks a rank
//! (arXiv:2104.04473). This pass only cuts the forward program: values that one chunk makes and a later one reads are sent
//! and received. Since send and receive are adjoint, differentiation yields the transfers of gradients in the other
//! direction. [`crate::pipeline`] decides when each chunk runs; [`super::accumulate`] applies that order.

use crate::mesh::{Axis, Group};
use crate::program::{Collective, CollectiveKind, Instr, Kind, Op, Program, Role, Site, ValueId, op};
use std::ops::Range;

/// Why a model cannot be cut into this many chunks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{blocks} blocks cannot fill {chunks} pipeline chunks (pipeline_parallel_size {pp} with {per_stage} each); at most {blocks} would fit"
)]
pub struct PipelineError {
    /// Blocks of the model.
    pub blocks: usize,
    /// Requested chunks.
    pub chunks: usize,
    /// Size of the axis.
    pub pp: usize,
    /// Chunks of each rank.
    pub per_stage: usize,
}

/// The chunks of this rank, in order: chunk `c` of stage `s` is the `c * pp + s`-th of the model.
///
/// Blocks are distributed evenly; the remainder goes to the first chunks, since the last chunk has the head. Instructions
/// outside blocks stay with their operands.
///
/// # Errors
/// When there are fewer blocks than chunks.
pub fn pipeline(forward: &Program, chunks_per_stage: usize) -> Result<Vec<Program>, PipelineError> {
    let (pp, stage) = (forward.mesh_rank.mesh.pp, forward.mesh_rank.on(Axis::Pp));
    let n_chunks = pp * chunks_per_stage;
    if n_chunks == 1 {
        return Ok(vec![forward.clone()]);
    }
    let n_blocks = forward.instrs.iter().filter_map(|i| i.site.block).max().map_or(0, |b| b as usize + 1);
    if n_blocks < n_chunks {
        return Err(PipelineError { blocks: n_blocks, chunks: n_chunks, pp, per_stage: chunks_per_stage });
    }
    let home = chunk_of_instrs(forward, n_blocks, n_chunks);
    let crossing = Crossing::new(forward, &home);
    let readers = readers(forward, &home);
    let chunk = |c: usize| cut(forward, &home, &crossing, &readers, c * pp + stage, n_chunks);
    Ok((0..chunks_per_stage).map(chunk).collect())
}

/// Blocks of each chunk.
pub fn blocks_of_chunk(n_blocks: usize, n_chunks: usize, chunk: usize) -> Range<usize> {
    let (each, more) = (n_blocks / n_chunks, n_blocks % n_chunks);
    let start = |c: usize| c * each + c.min(more);
    start(chunk)..start(chunk + 1)
}

fn chunk_of_instrs(forward: &Program, n_blocks: usize, n_chunks: usize) -> Vec<usize> {
    let of_block: Vec<usize> =
        (0..n_chunks).flat_map(|c| blocks_of_chunk(n_blocks, n_chunks, c).map(move |_| c)).collect();
    let mut made_in = vec![0; forward.values.len()];
    let mut home = Vec::with_capacity(forward.instrs.len());
    for instr in &forward.instrs {
        let of_reads = instr.reads.iter().map(|v| made_in[v.0 as usize]).max().unwrap_or(0);
        let chunk = instr.site.block.map_or(of_reads, |b| of_block[b as usize].max(of_reads));
        instr.writes.iter().for_each(|v| made_in[v.0 as usize] = chunk);
        home.push(chunk);
    }
    home
}

/// The chunks where values are made and last read.
struct Crossing {
    /// `(value, chunk that makes it, last chunk that reads it)` of each value that crosses a boundary, in program order.
    values: Vec<(ValueId, usize, usize)>,
}

impl Crossing {
    fn new(forward: &Program, home: &[usize]) -> Crossing {
        let mut last = vec![0; forward.values.len()];
        for (instr, chunk) in forward.instrs.iter().zip(home) {
            instr.reads.iter().for_each(|v| last[v.0 as usize] = last[v.0 as usize].max(*chunk));
        }
        let made = forward.instrs.iter().zip(home).flat_map(|(i, chunk)| i.writes.iter().map(move |v| (*v, *chunk)));
        let values = made.map(|(v, chunk)| (v, chunk, last[v.0 as usize])).filter(|(_, made, last)| last > made);
        Crossing { values: values.collect() }
    }

    /// Values sent from chunk `after` to the next one, including values that it only forwards.
    fn sent_after(&self, after: usize) -> Vec<ValueId> {
        self.values.iter().filter(|(_, made, last)| *made <= after && *last > after).map(|(v, ..)| *v).collect()
    }
}

/// The chunks that read each parameter, ascending. The first of them owns it (tied embeddings have two).
fn readers(forward: &Program, home: &[usize]) -> Vec<Vec<usize>> {
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); forward.values.len()];
    for (instr, chunk) in forward.instrs.iter().zip(home) {
        for v in instr.reads.iter().filter(|v| forward.value(**v).kind == Kind::Parameter) {
            readers[v.0 as usize].push(*chunk);
        }
    }
    for chunks in &mut readers {
        chunks.sort_unstable();
        chunks.dedup();
    }
    readers
}

fn cut(
    forward: &Program,
    home: &[usize],
    crossing: &Crossing,
    readers: &[Vec<usize>],
    chunk: usize,
    n_chunks: usize,
) -> Program {
    let group = Group::over(&[Axis::Pp]);
    let pp = forward.mesh_rank.mesh.pp;
    let stage_of = |c: usize| (c % pp) as u32;
    let own: Vec<&Instr> = forward.instrs.iter().zip(home).filter(|(_, c)| **c == chunk).map(|(i, _)| i).collect();
    let mut program = Program { instrs: Vec::new(), ..forward.clone() };
    let site = |instr: Option<&&Instr>| instr.map_or(forward.instrs[0].site, |i| i.site);
    if chunk > 0 {
        let (values, site): (_, Site) = (crossing.sent_after(chunk - 1), site(own.first()));
        let c =
            Collective::new(CollectiveKind::Recv { from: stage_of(chunk - 1), channel: 2 * chunk as u32 - 2 }, group);
        program.push(Op::Start(op::Start(c)), vec![], values.clone(), site);
        program.push(Op::Await(op::Await(c)), values, vec![], site);
    }
    program.instrs.extend(own.iter().map(|i| (*i).clone()));
    if chunk + 1 < n_chunks {
        let (values, site) = (crossing.sent_after(chunk), site(own.last()));
        let c = Collective::new(CollectiveKind::Send { to: stage_of(chunk + 1), channel: 2 * chunk as u32 }, group);
        program.push(Op::Start(op::Start(c)), values, vec![], site);
        program.push(Op::Await(op::Await(c)), vec![], vec![], site);
    }
    let is_last = chunk + 1 == n_chunks;
    let mut touched = vec![false; program.values.len()];
    program.instrs.iter().flat_map(|i| i.reads.iter().chain(&i.writes)).for_each(|v| touched[v.0 as usize] = true);
    program.bindings.retain(|b| touched[b.value.0 as usize] && (b.role != Role::LossSum || is_last));
    for param in &mut program.params {
        let readers = &readers[param.value.0 as usize];
        // Unread parameters stay with the first chunk.
        param.owned &= readers.first().copied().unwrap_or(0) == chunk;
        param.stages = readers.iter().map(|c| c % pp).collect();
        param.stages.sort_unstable();
        param.stages.dedup();
    }
    program
}
