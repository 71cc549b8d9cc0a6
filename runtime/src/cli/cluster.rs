//! `phalanx train --slurm` and `--torchrun`: the job configuration that follows from the launcher's environment.

use super::{JobArgs, report_notes};
use crate::config::JobConfig;
use crate::config::error::ConfigError;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::error::fit::FitError;
use crate::launch::environment::{LaunchContext, Variables, slurm, torchrun};
use std::time::Duration;

#[derive(Debug, clap::Args)]
pub(super) struct ClusterArgs {
    /// Run as one task of a Slurm step that has one task on each node; see below.
    #[arg(long)]
    slurm: bool,
    /// Take the position of this machine from MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK; see below.
    #[arg(long, conflicts_with = "slurm")]
    torchrun: bool,
    /// With --slurm or --torchrun: number of nodes beyond the mesh, which serve as warm spares.
    #[arg(long, default_value_t = 0, value_name = "N")]
    spare_nodes: u32,
    /// With --slurm or --torchrun: how long the other nodes wait for node 0.
    #[arg(long, default_value_t = 300, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(0..=31_536_000))]
    join_wait: u64,
}

/// The environment of this process, without variables that are not Unicode.
fn environment() -> Variables {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).collect()
}

impl ClusterArgs {
    /// The position of this process, if the flags say that a launcher started several.
    pub(super) fn launch_context(&self) -> Result<Option<LaunchContext>, JobError> {
        let launch_context = match (self.slurm, self.torchrun) {
            (true, _) => slurm(&environment()),
            (_, true) => torchrun(&environment()),
            _ if self.spare_nodes > 0 => {
                return Err(CommandError::SpareNodesAlone.into());
            }
            _ => return Ok(None),
        };
        let launch_context = launch_context.map_err(CommandError::Environment)?;
        let (n_spares, n_nodes) = (self.spare_nodes, launch_context.n_nodes);
        if n_spares >= n_nodes {
            return Err(CommandError::SpareNodes { n_spares, n_nodes }.into());
        }
        Ok(Some(launch_context))
    }

    /// The flag as given, for a command to print.
    pub(super) const fn flag(&self) -> &'static str {
        match (self.slurm, self.torchrun) {
            (true, _) => "--slurm ",
            (_, true) => "--torchrun ",
            _ => "",
        }
    }

    pub(super) const fn patience(&self) -> Duration {
        Duration::from_secs(self.join_wait)
    }

    /// Loads the job, with the numbers of machines, ranks and cores from the launch context.
    pub(super) fn load(&self, job: &JobArgs, launch_context: &LaunchContext) -> Result<JobConfig, JobError> {
        let mut keys = job.overrides()?;
        let key = |name: &str, value: u32| (name.to_owned(), value.to_string());
        keys.push(key("nnodes", launch_context.n_nodes - self.spare_nodes));
        keys.extend(launch_context.n_ranks.map(|n| key("nproc_per_node", n)));
        let mut config = match (JobConfig::load(&job.config, &keys), launch_context.n_gpus) {
            // Without any other number of ranks per node, each GPU gets one rank.
            (Err(ConfigError::AutoAxis), Some(n_gpus)) => {
                keys.push(key("nproc_per_node", n_gpus));
                JobConfig::load(&job.config, &keys)?
            }
            (config, _) => config?,
        };
        report_notes(&config);
        let n_ranks = n_slots(&config)?;
        let n_threads = launch_context.n_cpus.map(|n_cpus| (n_cpus / n_ranks).max(1) as usize);
        config.precision.threads = config.precision.threads.or(n_threads);
        Ok(config)
    }
}

/// Rank processes of each machine, spares included.
pub(super) fn n_slots(config: &JobConfig) -> Result<u32, JobError> {
    let (parallel, mesh) = (&config.parallel, config.parallel.mesh()?);
    let n_each = mesh.size() / parallel.nnodes;
    if n_each * parallel.nnodes != mesh.size() {
        return Err(FitError::Uneven { mesh, n_nodes: parallel.nnodes }.into());
    }
    Ok((n_each + config.elastic.spare_ranks) as u32)
}
