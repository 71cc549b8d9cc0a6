//! The memory that this process may use: that of the machine, or less in a container or a batch job, whose control group limits it.
//! The kernel kills the processes of a group that exceeds its limit.

use std::path::{Path, PathBuf};

/// Where control groups are mounted.
const MOUNT: &str = "/sys/fs/cgroup";

/// The memory that this process may use, in bytes: the machine's, or less if a control group limits it.
pub(crate) fn usable(machine_bytes: u64) -> u64 {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    limit_of(&groups, read).map_or(machine_bytes, |limit| limit.min(machine_bytes))
}

/// The lowest limit of a process's groups and the groups that contain them, as in `/proc/self/cgroup`; `None` if none has one.
fn limit_of(groups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let limits = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, fields.next()?.trim_start_matches('/'));
        // Version 2 has one line without controllers.
        let (root, file) = match controllers {
            "" => (PathBuf::from(MOUNT), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (Path::new(MOUNT).join("memory"), "memory.limit_in_bytes")
            }
            _ => return None,
        };
        let of_group = root.join(group);
        let containing = of_group.ancestors().take_while(|path| path.starts_with(&root));
        // A group without a limit says `max`.
        containing.filter_map(|path| read(&path.join(file))?.trim().parse::<u64>().ok()).min()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(groups: &str, files: &[(&str, &str)]) -> Option<u64> {
        let find = |path: &Path| files.iter().find(|(name, _)| Path::new(MOUNT).join(name) == path);
        limit_of(groups, |path| find(path).map(|(_, text)| format!("{text}\n")))
    }

    #[test]
    fn lowest_limit_of_the_groups_that_contain_a_process_counts() {
        let nested = [("pod/memory.max", "3000"), ("pod/job/memory.max", "max"), ("memory.max", "9000")];
        assert_eq!(limit("0::/pod/job\n", &nested), Some(3000));
        // In a container with a namespace of its own.
        assert_eq!(limit("0::/\n", &[("memory.max", "200")]), Some(200));
        let first = "5:cpu,cpuacct:/a\n4:memory:/slurm/job_7\n0::/ignored\n";
        assert_eq!(limit(first, &[("memory/slurm/job_7/memory.limit_in_bytes", "7000")]), Some(7000));
    }

    #[test]
    fn process_without_a_limit_may_use_the_whole_machine() {
        assert_eq!(limit("0::/user.slice\n", &[("user.slice/memory.max", "max")]), None);
        assert_eq!(limit("", &[]), None);
        assert!(usable(1 << 20) <= 1 << 20);
    }
}
