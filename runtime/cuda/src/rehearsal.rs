//! What a spare does while it waits: each kind of product and of attention in its programs is planned and captured once without buffers,
//! so that the libraries have loaded everything when its first step runs. Nothing is launched.

use crate::algorithms::Kind;
use crate::command::Command;
use crate::cudnn::{Direction, Packing, Shape};
use crate::error::CudaError;
use crate::gpu::Stream;
use crate::graph::Graph;
use crate::kernels::CompileError;
use crate::lower::{cudnn_shape, lower};
use crate::lowered::choice_of;
use crate::product::Choice;
use crate::shared::Shared;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::{Instr, Op, Program, ValueId, op};
use std::collections::VecDeque;

/// An address for the value or the scratch with this number, which no command accesses.
pub(crate) fn nowhere(number: u32) -> u64 {
    (u64::from(number) + 1) << 40
}

/// Commands that are still to be rehearsed. See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Rehearsal(VecDeque<(Command, Choice)>);

impl Rehearsal {
    /// Of each kind of product and attention in these programs, for batches whose rows are whole: how others are packed is not known
    /// yet.
    pub(crate) fn of(shared: &Shared, programs: &[&Compiled]) -> Rehearsal {
        let (mut products, mut attentions): (Vec<Kind>, Vec<(Shape, Direction)>) = Default::default();
        let mut commands = VecDeque::new();
        for (program, instr) in programs.iter().flat_map(|c| c.program.instrs.iter().map(|instr| (&c.program, instr))) {
            let whole = cudnn_shape(program, instr, whole_rows(program, instr));
            let engines = shared.engines(&instr.op, whole.filter(|_| shared.cudnn.is_some()));
            let scratch = nowhere(program.values.len() as u32);
            let (of_instr, _) = lower(program, instr, |v: ValueId| nowhere(v.0), scratch, engines).finish();
            let mut is_new = |command: &Command| match command {
                Command::Product(product) => is_first(&mut products, product.kind()),
                Command::Attention(call) => is_first(&mut attentions, (call.shape, call.direction)),
                _ => false,
            };
            commands.extend(of_instr.into_iter().filter(&mut is_new).map(|command| (command, choice_of(program))));
        }
        Rehearsal(commands)
    }

    /// Rehearses the next command on a stream that runs nothing; `false` if none is left.
    pub(crate) fn next(&mut self, shared: &Shared, stream: Stream) -> bool {
        let Some((command, choice)) = self.0.pop_front() else { return false };
        // The first step reports what fails.
        if let Err(error) = rehearse(shared, command, choice, stream) {
            tracing::debug!(%error, "cannot prepare a command in advance");
        }
        true
    }
}

fn rehearse(shared: &Shared, command: Command, choice: Choice, stream: Stream) -> Result<(), CompileError> {
    shared.gpu.bind()?;
    // SAFETY: without `Choice::Fastest`, nothing runs.
    let ready = unsafe { shared.ready(command, choice) }?;
    // SAFETY: what is captured does not run.
    let enqueue = |stream| unsafe { shared.enqueue(&ready, stream) };
    Ok::<(), CudaError>(Graph::rehearse(&shared.gpu, stream, enqueue)?).map_err(CompileError::from)
}

/// The packing of batches whose rows are whole, if the instruction is attention over them.
fn whole_rows(program: &Program, instr: &Instr) -> Packing {
    match &instr.op {
        Op::Attention(heads) | Op::AttentionBackward(op::AttentionBackward(heads)) => {
            let n_tokens = program.value(instr.reads[1]).n_elements();
            Packing::Whole { rows: n_tokens / heads.seq_len, seq_len: heads.seq_len }
        }
        _ => Packing::Unknown,
    }
}

/// Whether something is not known yet; it is afterwards.
fn is_first<T: PartialEq>(known: &mut Vec<T>, one: T) -> bool {
    let is_new = !known.contains(&one);
    if is_new {
        known.push(one);
    }
    is_new
}
