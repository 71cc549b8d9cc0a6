//! Variables that Slurm, torchrun and other launchers set.

use super::Target;
use phalanx::launch::environment::hosts::expand;
use phalanx::launch::environment::{Variables, slurm, torchrun};

pub(super) const TARGET: Target = Target { name: "environment", run, seeds };

/// A list of machines has no empty name; a node's index is below the number of nodes.
fn run(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(hosts) = expand(&text) {
        assert!(!hosts.is_empty() && hosts.iter().all(|host| !host.is_empty() && !host.contains(['[', ']', ','])));
    }
    let split = |line: &str| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    let variables: Variables = text.lines().filter_map(split).collect();
    for launch_context in [slurm(&variables), torchrun(&variables)].into_iter().flatten() {
        assert!(
            launch_context.node < launch_context.n_nodes
                && !launch_context.head.is_empty()
                && launch_context.n_ranks != Some(0)
        );
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let slurm = "SLURM_JOB_ID=7\nSLURM_STEP_ID=0\nSLURM_NNODES=4\nSLURM_NODEID=2\nSLURM_JOB_NODELIST=node[01-03,07]\n\
                 SLURM_NTASKS=4\nSLURM_RESTART_COUNT=1\nSLURM_GPUS_ON_NODE=8\nSLURM_CPUS_PER_TASK=6\n";
    let step = "SLURM_STEP_NUM_NODES=2\nSLURM_STEP_NODELIST=a,b\nSLURM_STEP_NUM_TASKS=2\n";
    let torchrun = "MASTER_ADDR=head\nMASTER_PORT=29500\nWORLD_SIZE=16\nRANK=9\nLOCAL_WORLD_SIZE=8\nLOCAL_RANK=1\n\
                    GROUP_RANK=1\nGROUP_WORLD_SIZE=2\nTORCHELASTIC_RUN_ID=x\n";
    let texts = ["rack[1-2]n[1-2]-ib,login", slurm, &format!("{slurm}{step}"), torchrun];
    texts.map(|text| text.as_bytes().to_vec()).to_vec()
}
