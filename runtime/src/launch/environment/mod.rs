//! The position of a process among those that a cluster launcher started on several machines, from its environment.
//!
//! Pure: variables in, a [`LaunchContext`] out. Only the command line reads environment variables, where the process starts.

pub mod hosts;
mod slurm;
mod torchrun;

pub use slurm::slurm;
pub use torchrun::torchrun;

use hosts::HostsError;
use std::collections::BTreeMap;

/// Variables of an environment.
pub type Variables = BTreeMap<String, String>;

/// The launch context of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchContext {
    /// Identity of the launch, shared by all of its processes.
    pub launch: String,
    /// Index of this machine; machine 0 coordinates.
    pub node: u32,
    /// Number of machines.
    pub n_nodes: u32,
    /// Whether this is the first process of its machine, which starts all ranks there. Other processes, of launchers that
    /// start one for each rank, do nothing.
    pub is_first: bool,
    /// Host name or address of the head node.
    pub head: String,
    /// Port of the head node, if given.
    pub port: Option<u16>,
    /// Ranks per machine, if the launcher specifies them.
    pub n_ranks: Option<u32>,
    /// GPUs of this machine, if the launcher specifies them.
    pub n_gpus: Option<u32>,
    /// Cores of this process, if the launcher specifies them.
    pub n_cpus: Option<u32>,
}

/// Why the variables do not give the position of a process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    /// A variable is missing.
    #[error("{name} is not set; {hint}")]
    Missing {
        /// The variable.
        name: &'static str,
        /// How to set the variable.
        hint: &'static str,
    },
    /// A variable has an invalid value.
    #[error("{name} is `{value}`, but must be {fits}")]
    Value {
        /// The variable.
        name: &'static str,
        /// The found value.
        value: String,
        /// The accepted values.
        fits: &'static str,
    },
    /// Two variables contradict each other.
    #[error("{first} and {second} contradict each other: {why}")]
    Contradiction {
        /// One variable, with its value.
        first: String,
        /// The other variable, with its value.
        second: String,
        /// The violated relation.
        why: String,
    },
    /// A list of machines cannot be read.
    #[error("{name}: {source}")]
    Hosts {
        /// The variable with the list.
        name: &'static str,
        /// The fault of the list.
        source: HostsError,
    },
}

/// The variables that one launcher sets.
struct Reader<'a> {
    variables: &'a Variables,
    /// How to set a missing variable.
    hint: &'static str,
}

const COUNT: &str = "a whole number of at least 1";
const POSITION: &str = "a whole number of at least 0";

impl<'a> Reader<'a> {
    /// A string; an empty one counts as missing.
    fn text(&self, name: &'static str) -> Result<&'a str, EnvironmentError> {
        self.text_if_set(name).ok_or(EnvironmentError::Missing { name, hint: self.hint })
    }

    fn text_if_set(&self, name: &str) -> Option<&'a str> {
        self.variables.get(name).map(|text| text.trim()).filter(|text| !text.is_empty())
    }

    fn number_if_set<T: std::str::FromStr>(
        &self,
        name: &'static str,
        fits: &'static str,
    ) -> Result<Option<T>, EnvironmentError> {
        let parse = |text: &str| {
            text.parse().map_err(|_| EnvironmentError::Value { name, value: text.chars().take(80).collect(), fits })
        };
        self.text_if_set(name).map(parse).transpose()
    }

    /// A position, counted from 0.
    fn position(&self, name: &'static str) -> Result<u32, EnvironmentError> {
        self.text(name)?;
        Ok(self.number_if_set(name, POSITION)?.expect("it is set"))
    }

    /// A number of at least 1.
    fn count_if_set(&self, name: &'static str) -> Result<Option<u32>, EnvironmentError> {
        let count = self.number_if_set(name, COUNT)?;
        if count == Some(0) {
            return Err(EnvironmentError::Value { name, value: "0".into(), fits: COUNT });
        }
        Ok(count)
    }

    fn count(&self, name: &'static str) -> Result<u32, EnvironmentError> {
        self.text(name)?;
        Ok(self.count_if_set(name)?.expect("it is set"))
    }
}

/// Rejects a position that is not below a count.
fn within(
    (position_name, position): (&str, u32),
    (count_name, count): (&str, u32),
    what: &str,
) -> Result<(), EnvironmentError> {
    if position < count {
        return Ok(());
    }
    Err(contradiction(position_name, position, count_name, count, &format!("{what} are counted from 0")))
}

fn contradiction(
    first: &str,
    one: impl std::fmt::Display,
    second: &str,
    other: impl std::fmt::Display,
    why: &str,
) -> EnvironmentError {
    EnvironmentError::Contradiction {
        first: format!("{first}={one}"),
        second: format!("{second}={other}"),
        why: why.to_owned(),
    }
}

#[cfg(test)]
mod tests;
