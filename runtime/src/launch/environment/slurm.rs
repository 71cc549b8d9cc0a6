//! A task of a Slurm step, one on each node: `srun --ntasks-per-node=1 phalanx train --slurm my.yaml`.

use super::hosts::expand;
use super::{EnvironmentError, LaunchContext, Reader, Variables, contradiction, within};

const HINT: &str = "inside an allocation, `srun --ntasks-per-node=1 phalanx train --slurm …` sets it";

/// The launch context of a task.
///
/// # Errors
/// When the process is not a task of a step with one task on each node.
pub fn slurm(variables: &Variables) -> Result<LaunchContext, EnvironmentError> {
    let read = Reader { variables, hint: HINT };
    let (job, step) = (read.text("SLURM_JOB_ID")?, read.text("SLURM_STEP_ID")?);
    // A step may have fewer nodes than its allocation.
    let of_step = |step: &'static str, job: &'static str| if read.text_if_set(step).is_some() { step } else { job };
    let count_name = of_step("SLURM_STEP_NUM_NODES", "SLURM_NNODES");
    let list_name = of_step("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST");
    let tasks_name = of_step("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");

    let n_nodes = read.count(count_name)?;
    let node = read.position("SLURM_NODEID")?;
    within(("SLURM_NODEID", node), (count_name, n_nodes), "nodes")?;
    let list = read.text(list_name)?;
    let hosts = expand(list).map_err(|source| EnvironmentError::Hosts { name: list_name, source })?;
    if hosts.len() != n_nodes as usize {
        let why = format!("the list has {} names", hosts.len());
        return Err(contradiction(list_name, list, count_name, n_nodes, &why));
    }
    if let Some(n_tasks) = read.count_if_set(tasks_name)?
        && n_tasks != n_nodes
    {
        let why = "each node must have one task, which starts its ranks: srun --ntasks-per-node=1";
        return Err(contradiction(tasks_name, n_tasks, count_name, n_nodes, why));
    }
    // A requeued job keeps its job number.
    let restarts: u32 = read.number_if_set("SLURM_RESTART_COUNT", super::POSITION)?.unwrap_or(0);
    Ok(LaunchContext {
        launch: format!("slurm-{job}.{step}.{restarts}"),
        node,
        n_nodes,
        is_first: true,
        head: hosts.into_iter().next().expect("a node has a name"),
        port: None,
        n_ranks: None,
        n_gpus: read.count_if_set("SLURM_GPUS_ON_NODE")?,
        n_cpus: read.count_if_set("SLURM_CPUS_PER_TASK")?,
    })
}
