//! State of a machine, from the host's side.

use super::BorrowedGpu;
use super::step::{Trainer, program, shared};
use crate::machine::CudaMachine;
use crate::ring::GpuMemory;
use phalanx_device::Machine;
use phalanx_device::groups::Groups;
use phalanx_softgpu::Installation;
use phalanx_strategies::mesh::MeshRank;
use std::process::Command;
use std::sync::Arc;

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

/// Set in the process of a test that counts what the process loads: other tests load too.
const ALONE: &str = "PHALANX_TEST_ALONE";

#[test]
fn first_step_of_a_rehearsed_spare_loads_nothing() {
    if std::env::var_os(ALONE).is_none() {
        let test = "tests::machine::first_step_of_a_rehearsed_spare_loads_nothing";
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let ended = alone.args([test, "--exact", "--nocapture"]).env(ALONE, "1").output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        return;
    }
    let n_loaded = || Installation::new().unwrap().stat(c"loads").unwrap();
    let gpu = BorrowedGpu::take();
    let shared = shared(&Arc::new(GpuMemory::new(gpu.0.clone())));
    let c = program(MeshRank::default()).0;
    let mut spare = CudaMachine::without_buffers(&shared, &[&c], true).unwrap();
    let n_products = || Installation::new().unwrap().stat(c"products").unwrap();

    while spare.rehearse() {}
    let rehearsed = n_loaded();
    let mut trainer = Trainer::of(&shared, MeshRank::default(), true);
    trainer.compute(&mut Groups::none(), 0, None).unwrap();
    trainer.update(&mut Groups::none()).unwrap();

    assert!(rehearsed > 3, "{rehearsed}");
    assert_eq!(n_loaded(), rehearsed);
    assert!(n_products() > 0);
    assert_eq!(spare.allocated_bytes(), 0);
}
