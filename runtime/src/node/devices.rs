//! The devices of this node: which ones its ranks use, and the thread that watches them.

use crate::error::JobError;
use phalanx_actors::node::Node;
use phalanx_device::{HealthWatch, ThreadError};
use phalanx_strategies::elastic::devices::{DeviceHealth, Devices};
use std::time::Duration;

/// Longest time between two looks at the devices; events are noticed at once.
const PERIOD: Duration = Duration::from_secs(1);

/// The devices among `all` for this number of slots: those of the first one's model if they suffice, else all.
pub(super) fn for_slots(all: Vec<DeviceHealth>, n_slots: u32) -> Devices {
    let is_like_the_first = |other: &&DeviceHealth| all.first().is_some_and(|first| first.name == other.name);
    let alike: Vec<DeviceHealth> = all.iter().filter(is_like_the_first).cloned().collect();
    let is_enough = alike.len() >= (n_slots as usize).min(all.len());
    Devices::new(if is_enough { alike } else { all }, n_slots)
}

/// Passes the state of the devices to the supervisor until the supervisor ends. The thread is not joined: it may be inside the
/// driver for up to [`PERIOD`].
///
/// # Errors
/// When the system refuses the thread.
pub(super) fn watch(mut devices: HealthWatch, supervisor: Node) -> Result<(), JobError> {
    let look = move || {
        while !supervisor.has_ended() {
            // A state that does not fit into the mailbox is replaced by the next one.
            supervisor.health(devices(PERIOD));
        }
    };
    let spawned = std::thread::Builder::new().name("device-health".into()).spawn(look);
    spawned.map(drop).map_err(|e| JobError::Thread(ThreadError::Spawn(e)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_of_another_model_is_used_only_if_the_others_do_not_suffice() {
        let health = |name: &str| DeviceHealth { name: name.to_owned(), ..DeviceHealth::default() };
        let models = |n_slots| {
            let devices = for_slots(["H100", "T400", "H100"].map(health).to_vec(), n_slots);
            devices.health().iter().map(|device| device.name.clone()).collect::<Vec<_>>()
        };

        assert_eq!(models(2), ["H100", "H100"]);
        assert_eq!(models(3), ["H100", "T400", "H100"]);
    }
}
