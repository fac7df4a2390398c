//! Which processors are near a device, as far as the system tells.
//!
//! Invariants: threads are only ever kept from processors that they were allowed before, and never from all
//! of them; where the system says nothing of nodes, or has one alone, nothing changes.

use std::fs;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Has this thread, and those that it starts, run on processors of the node that a device is attached to.
/// Memory that they touch first is then there as well.
pub(super) fn stay_near(pci_bus_id: &str) {
    let Some(near) = processors_near(Path::new("/sys"), pci_bus_id) else { return };
    // Only saves time: elsewhere, copies are as right.
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let mut chosen = CpuSet::new();
    near.into_iter().filter(|&number| allowed.is_set(number)).for_each(|number| chosen.set(number));
    if chosen.count() > 0 {
        let _ = sched_setaffinity(None, &chosen);
    }
}

/// The processors of a device's node; `None` where it is not known, or all are.
fn processors_near(system: &Path, pci_bus_id: &str) -> Option<Vec<usize>> {
    let device = system.join("bus/pci/devices").join(pci_bus_id.to_ascii_lowercase());
    // -1 where the system has nodes, but does not know of the device's.
    let node: u32 = fs::read_to_string(device.join("numa_node")).ok()?.trim().parse().ok()?;
    let nodes = system.join("devices/system/node");
    if parse_list(&fs::read_to_string(nodes.join("online")).ok()?)?.len() < 2 {
        return None;
    }
    parse_list(&fs::read_to_string(nodes.join(format!("node{node}/cpulist"))).ok()?)
}

/// The numbers in a text such as `0-3,8,10-11`.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        // More than a set of processors can hold is no list of them.
        if last >= CpuSet::MAX_CPU || first > last {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn system(node: &str, online: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("bus/pci/devices/0000:ab:00.0/numa_node", node);
        write("devices/system/node/online", online);
        write("devices/system/node/node0/cpulist", "0-3\n");
        write("devices/system/node/node1/cpulist", "4-5,7\n");
        root
    }

    #[test]
    fn the_processors_of_the_devices_node_are_near() {
        let near = |node, online, device: &str| processors_near(system(node, online).path(), device);
        assert_eq!(near("1\n", "0-1\n", "0000:AB:00.0"), Some(vec![4, 5, 7]));
        assert_eq!(near("0\n", "0-1\n", "0000:ab:00.0"), Some(vec![0, 1, 2, 3]));
        assert_eq!(near("0\n", "0\n", "0000:ab:00.0"), None);
        assert_eq!(near("-1\n", "0-1\n", "0000:ab:00.0"), None);
        assert_eq!(near("2\n", "0-1\n", "0000:ab:00.0"), None);
        assert_eq!(near("1\n", "0-1\n", "0000:cd:00.0"), None);
    }

    #[test]
    fn lists_of_processors_are_parsed() {
        assert_eq!(parse_list("0\n"), Some(vec![0]));
        assert_eq!(parse_list("0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!(parse_list("\n"), Some(vec![]));
        for text in ["a", "1-", "3-1", "0-4000000000"] {
            assert_eq!(parse_list(text), None, "{text}");
        }
    }

    #[test]
    fn a_device_that_is_unknown_changes_nothing() {
        let before = sched_getaffinity(None).unwrap();
        stay_near("ffff:ff:1f.7");
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
