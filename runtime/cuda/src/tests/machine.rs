//! State of a machine, from the host's side.

use super::BorrowedGpu;
use super::step::Trainer;
use phalanx_device::Machine;
use phalanx_strategies::mesh::MeshRank;

#[test]
fn host_reads_and_edits_state_through_copies() {
    let gpu = BorrowedGpu::take();
    let Trainer { c, mut machine, .. } = Trainer::new(&gpu.0, MeshRank::default(), false);
    let (machine, v) = (&mut machine as &mut dyn Machine, c.program.params[0].value);
    let before = machine.elements::<f32>(&c, v, 3..8).into_owned();

    machine.edit::<f32>(&c, v, 4..6, |_, elements| elements.iter_mut().for_each(|x| *x += 1.0));

    let after = machine.elements::<f32>(&c, v, 3..8);
    assert_eq!(after[..], [before[0], before[1] + 1.0, before[2] + 1.0, before[3], before[4]]);
}
