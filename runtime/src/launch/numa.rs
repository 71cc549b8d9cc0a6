//! The processor cores and the memory near a device: those of its NUMA node. Copies between a GPU and memory of another node
//! cross the link between the processors, at a fraction of the rate.

use super::sys;
use std::path::Path;
use std::process::Command;

/// A NUMA node, as far as this process may use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number.
    pub number: u32,
    /// Its cores on which this process may run.
    pub cores: Vec<usize>,
}

impl NumaNode {
    /// The node of the device at this address of the PCI bus, as the kernel describes it in `sysfs` (normally `/sys`); none if
    /// the kernel names none, as on machines with one node, or if this process may not run there.
    pub fn of_pci_device(sysfs: &Path, address: &str) -> Option<NumaNode> {
        let allowed = sys::allowed_cpus().ok()?;
        let folder = sysfs.join("bus/pci/devices").join(address);
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
        // -1 where the firmware names no node.
        let number = read("numa_node")?.trim().parse().ok()?;
        let cores: Vec<usize> =
            cpulist(read("local_cpulist")?.trim())?.into_iter().filter(|cpu| allowed.contains(cpu)).collect();
        (!cores.is_empty()).then_some(NumaNode { number, cores })
    }

    /// Starts the process of `command` on the node's cores, with memory of the node as long as that is free.
    pub fn bind(&self, command: &mut Command) {
        sys::start_near(command, &self.cores, self.number);
    }
}

/// Numbers and ranges such as `0-3,8`.
fn cpulist(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_needs::Need;

    const ADDRESS: &str = "0000:3b:00.0";

    /// A sysfs with one device.
    fn sysfs(numa_node: &str, cpus: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("bus/pci/devices").join(ADDRESS);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("numa_node"), format!("{numa_node}\n")).unwrap();
        std::fs::write(folder.join("local_cpulist"), format!("{cpus}\n")).unwrap();
        root
    }

    #[test]
    fn node_of_a_device_has_the_cores_on_which_this_process_may_run() {
        let last = *sys::allowed_cpus().unwrap().last().unwrap();
        let tree = sysfs("0", &format!("{last},100000-100003"));

        assert_eq!(NumaNode::of_pci_device(tree.path(), ADDRESS), Some(NumaNode { number: 0, cores: vec![last] }));
    }

    #[test]
    fn device_without_a_node_or_with_foreign_cores_or_unknown_leaves_the_process_unbound() {
        let of = |tree: &tempfile::TempDir, address| NumaNode::of_pci_device(tree.path(), address);

        assert_eq!(of(&sysfs("-1", "0-1"), ADDRESS), None);
        assert_eq!(of(&sysfs("1", "100000-100003"), ADDRESS), None);
        assert_eq!(of(&sysfs("0", "0"), "0000:3c:00.0"), None);
        assert_eq!(of(&sysfs("0", "0-x"), ADDRESS), None);
    }

    #[test]
    fn bound_process_runs_on_the_cores_of_the_node_and_prefers_its_memory() {
        let last = *sys::allowed_cpus().unwrap().last().unwrap();
        let mut command = Command::new("cat");
        command.args(["/proc/self/status", "/proc/self/numa_maps"]);
        NumaNode { number: 0, cores: vec![last] }.bind(&mut command);

        let output = String::from_utf8(command.output().unwrap().stdout).unwrap();

        assert!(output.contains(&format!("Cpus_allowed_list:\t{last}\n")), "{output}");
        if !Path::new("/proc/self/numa_maps").exists() {
            return phalanx_needs::skip(Need::Numa, "the kernel has no /proc/self/numa_maps");
        }
        assert!(output.contains(" prefer:0 "), "{output}");
    }

    #[test]
    fn list_of_cores_has_numbers_and_ranges() {
        assert_eq!(cpulist("0-2,8,10-11"), Some(vec![0, 1, 2, 8, 10, 11]));
        assert_eq!((cpulist(""), cpulist("a")), (Some(vec![]), None));
    }
}
