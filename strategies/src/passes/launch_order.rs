//! Launch order: moves receives of a pipeline up, so that all ranks start all collectives in one common order.
//!
//! The earlier passes start a receive where a stage needs the message, and a send where the stage has made it. With 1F1B, a
//! stage then starts to send its second activation before it starts to receive its first gradient, and the next stage the
//! other way round. Where a communicator runs its operations in the order of their starts, as on a GPU, both stages wait for
//! each other. So this pass starts a receive before every message that comes later in [`crate::pipeline::message_order`],
//! and no earlier, since the memory of the message is in use from its start. Results do not change.
//!
//! Ranks of one stage start everything in the same order, so only messages need this. [`crate::world`] proves the common
//! order of whole meshes (`WORLD-4`).

use crate::pipeline::Message;
use crate::program::{CollectiveKind, Instr, Op, Program, op};
use std::collections::BTreeMap;

/// Moves the starts of receives before the messages that come after them in `order`.
pub fn launch_order(program: &mut Program, order: &[Message]) {
    let places: BTreeMap<Message, usize> = order.iter().enumerate().map(|(i, message)| (*message, i)).collect();
    // Messages that come after all messages before them: places and positions in the program, both ascending.
    let mut latest: Vec<(usize, usize)> = Vec::new();
    // Receives by the position that they move to.
    let mut moved: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
    for (i, instr) in program.instrs.iter().enumerate() {
        let Some((message, is_receive)) = message(instr) else { continue };
        let Some(place) = places.get(&message).copied() else { continue };
        let later = latest.get(latest.partition_point(|(other, _)| *other < place));
        match later {
            Some((_, at)) if is_receive => moved.entry(*at).or_default().push((place, i)),
            Some(_) => {}
            None => latest.push((place, i)),
        }
    }
    let mut instrs: Vec<Option<Instr>> = std::mem::take(&mut program.instrs).into_iter().map(Some).collect();
    for i in 0..instrs.len() {
        let mut receives = moved.remove(&i).unwrap_or_default();
        receives.sort_unstable();
        program.instrs.extend(receives.into_iter().filter_map(|(_, receive)| instrs[receive].take()));
        program.instrs.extend(instrs[i].take());
    }
}

/// The message that an instruction starts, and whether it receives the message.
fn message(instr: &Instr) -> Option<(Message, bool)> {
    let Op::Start(op::Start(c)) = instr.op else { return None };
    let (channel, is_receive) = match c.kind {
        CollectiveKind::Send { channel, .. } => (channel, false),
        CollectiveKind::Recv { channel, .. } => (channel, true),
        _ => return None,
    };
    Some((Message { channel, microbatch: instr.site.microbatch }, is_receive))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Axis, Group};
    use crate::pipeline::{ScheduleKind, message_order};
    use crate::program::{Collective, Phase, Site};

    /// A program of messages of one pipeline stage of two: channel 0 goes forward, channel 1 back.
    fn program(messages: &[(&str, u32)]) -> Program {
        let mut program = Program::default();
        for (name, microbatch) in messages {
            let kind = match *name {
                "send F" => CollectiveKind::Send { to: 1, channel: 0 },
                "recv F" => CollectiveKind::Recv { from: 0, channel: 0 },
                "send B" => CollectiveKind::Send { to: 0, channel: 1 },
                _ => CollectiveKind::Recv { from: 1, channel: 1 },
            };
            let site = Site { phase: Phase::Forward, block: None, microbatch: *microbatch };
            program.push(Op::Start(op::Start(Collective::new(kind, Group::over(&[Axis::Pp])))), vec![], vec![], site);
        }
        program
    }

    fn after_the_pass(messages: &[(&str, u32)]) -> Program {
        let mut program = program(messages);
        launch_order(&mut program, &message_order(ScheduleKind::OneF1B, 2, 3));
        program
    }

    #[test]
    fn receive_starts_before_the_first_later_send_of_its_stage_and_no_earlier() {
        let first = [("send F", 0), ("send F", 1), ("recv B", 0), ("send F", 2), ("recv B", 1), ("recv B", 2)];
        let last = [("recv F", 0), ("send B", 0), ("recv F", 1), ("send B", 1), ("recv F", 2), ("send B", 2)];

        assert_eq!(after_the_pass(&first), program(&first));
        let moved = [("recv F", 0), ("recv F", 1), ("send B", 0), ("recv F", 2), ("send B", 1), ("send B", 2)];
        assert_eq!(after_the_pass(&last), program(&moved));
    }
}
