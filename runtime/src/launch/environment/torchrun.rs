//! The variables of torchrun, which other launchers set too: `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, `RANK`.
//!
//! With `LOCAL_WORLD_SIZE`, they count ranks, as under torchrun, which starts one process per rank: the first process of a
//! machine then starts all its ranks. Without it, they count machines, with one process on each.

use super::{EnvironmentError, LaunchContext, Reader, Variables, contradiction, within};

const HINT: &str = "`--torchrun` needs MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK";

/// The launch context of a process.
///
/// # Errors
/// When a variable is missing, or two contradict each other.
pub fn torchrun(variables: &Variables) -> Result<LaunchContext, EnvironmentError> {
    let read = Reader { variables, hint: HINT };
    let head = read.text("MASTER_ADDR")?.to_owned();
    read.text("MASTER_PORT")?;
    let port: u16 = read.number_if_set("MASTER_PORT", "a port from 1 to 65535")?.expect("it is set");
    let (world, rank) = (read.count("WORLD_SIZE")?, read.position("RANK")?);
    within(("RANK", rank), ("WORLD_SIZE", world), "ranks")?;
    let n_local = read.count_if_set("LOCAL_WORLD_SIZE")?;
    let n_each = n_local.unwrap_or(1);
    if world % n_each != 0 {
        let why = "all machines must have the same number of ranks";
        return Err(contradiction("LOCAL_WORLD_SIZE", n_each, "WORLD_SIZE", world, why));
    }
    let (node, n_nodes) = (rank / n_each, world / n_each);
    if let Some(group) = read.number_if_set::<u32>("GROUP_RANK", super::POSITION)?
        && group != node
    {
        let why = format!("with {n_each} ranks on each machine, this is machine {node}");
        return Err(contradiction("GROUP_RANK", group, "RANK", rank, &why));
    }
    if let Some(groups) = read.count_if_set("GROUP_WORLD_SIZE")?
        && groups != n_nodes
    {
        let why = format!("with {n_each} ranks on each machine, there are {n_nodes} machines");
        return Err(contradiction("GROUP_WORLD_SIZE", groups, "WORLD_SIZE", world, &why));
    }
    if let Some(local) = read.number_if_set::<u32>("LOCAL_RANK", super::POSITION)?
        && local != rank % n_each
    {
        let why = format!("with {n_each} ranks on each machine, this is local rank {}", rank % n_each);
        return Err(contradiction("LOCAL_RANK", local, "RANK", rank, &why));
    }
    // Consecutive runs may share address and port; then only torchrun's run id differs.
    let run = read.text_if_set("TORCHELASTIC_RUN_ID").map_or(String::new(), |run| format!("-{run}"));
    Ok(LaunchContext {
        // Kubeflow names its first machine `localhost` on that machine, and by its name on the others.
        launch: format!("torchrun-{port}-{world}{run}"),
        node,
        n_nodes,
        is_first: rank.is_multiple_of(n_each),
        head,
        port: Some(port),
        n_ranks: n_local,
        n_gpus: None,
        n_cpus: None,
    })
}
