//! The devices of a node, such as GPUs: their health, and the device of each slot.
//!
//! Invariants:
//! - `DEVICES-1` A slot keeps its device until that device fails, so that restarts find the same device.
//! - `DEVICES-2` A failed device gets no further process as long as the node's supervisor lives, even if the device seems to
//!   recover.
//! - `DEVICES-3` No device gets more slots than the fullest device had at the start: the job was sized for that number.

use serde::{Deserialize, Serialize};

/// State of one device, as its driver reports it without using the device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceHealth {
    /// Unique name, the same after restarts; at most [`TEXT_LEN_MAX`] bytes, like all texts here.
    pub id: String,
    /// Name of the product.
    pub name: String,
    /// Bytes of its memory that are in use, by any process.
    pub used_bytes: u64,
    /// Bytes of its memory.
    pub total_bytes: u64,
    /// Its temperature in degrees Celsius, if the driver tells.
    pub celsius: Option<u32>,
    /// Why it runs slower than it could, such as heat; none while it does not.
    pub slowed_by: Option<String>,
    /// Memory errors since the last reset that could not be corrected, if the driver counts them.
    pub n_uncorrected: Option<u64>,
    /// The driver's latest message about it that is no failure.
    pub event: Option<String>,
    /// Why it must not be used further.
    pub fault: Option<String>,
}

/// Maximum length of each text in a [`DeviceHealth`], in bytes.
pub const TEXT_LEN_MAX: usize = 256;
/// Maximum number of devices of a node.
pub const DEVICES_MAX: usize = 256;

impl DeviceHealth {
    /// What its driver complains about, other than a fault.
    pub fn remarks(&self) -> Option<String> {
        let slowed_by = self.slowed_by.as_ref().map(|reason| {
            let celsius = self.celsius.map_or(String::new(), |celsius| format!(" at {celsius} °C"));
            format!("slowed by {reason}{celsius}")
        });
        let n_uncorrected = self.n_uncorrected.filter(|n| *n > 0).map(|n| format!("{n} uncorrected memory errors"));
        let remarks: Vec<String> = [self.event.clone(), n_uncorrected, slowed_by].into_iter().flatten().collect();
        (!remarks.is_empty()).then(|| remarks.join("; "))
    }

    /// Whether the device has made memory errors since an earlier report of the same device.
    pub fn has_new_errors(&self, earlier: &DeviceHealth) -> bool {
        self.id == earlier.id && earlier.n_uncorrected.is_some_and(|n| self.n_uncorrected > Some(n))
    }

    /// What an incident on this device should mention: the device, and its fault or what its driver complains about.
    pub fn complaint(&self) -> Option<String> {
        let DeviceHealth { name, id, fault, .. } = self;
        let complaint = fault.clone().or_else(|| self.remarks())?;
        Some(format!("{name} {id}: {complaint}"))
    }
}

/// See the [module](self). Without devices, every slot uses the node's processors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    health: Vec<DeviceHealth>,
    /// The device of each slot.
    of_slot: Vec<u32>,
    /// `DEVICES-3`
    n_slots_max: usize,
}

impl Devices {
    /// These devices, with the slots spread evenly over them.
    ///
    /// # Panics
    /// If there are more than [`DEVICES_MAX`].
    pub fn new(health: Vec<DeviceHealth>, n_slots: u32) -> Devices {
        let n = health.len() as u32;
        assert!(health.len() <= DEVICES_MAX, "a node has at most {DEVICES_MAX} devices");
        let of_slot = if n == 0 { Vec::new() } else { (0..n_slots).map(|slot| slot % n).collect() };
        Devices { health, of_slot, n_slots_max: n_slots.div_ceil(n.max(1)) as usize }
    }

    /// State of all devices.
    pub fn health(&self) -> &[DeviceHealth] {
        &self.health
    }

    /// The device of a slot; none without devices.
    pub fn of(&self, slot: u32) -> Option<u32> {
        self.of_slot.get(slot as usize).copied()
    }

    /// Why the device of a slot must not be used further, if so.
    pub fn fault_of(&self, slot: u32) -> Option<&str> {
        self.health.get(self.of(slot)? as usize)?.fault.as_deref()
    }

    /// Takes over the latest state of known devices. Returns whether more has changed than amounts of memory and heat.
    pub fn handle_health(&mut self, latest: Vec<DeviceHealth>) -> bool {
        let mut is_news = false;
        for new in latest {
            let Some(old) = self.health.iter_mut().find(|old| old.id == new.id) else { continue };
            // DEVICES-2
            let new = DeviceHealth { fault: old.fault.clone().or(new.fault), ..new };
            is_news |= old.settled() != new.settled();
            *old = new;
        }
        is_news
    }

    /// Moves a slot whose device has failed to the healthy device with the fewest slots. Returns whether the slot has a device
    /// that may be used, or needs none.
    pub fn replace(&mut self, slot: u32) -> bool {
        if self.fault_of(slot).is_none() {
            return true;
        }
        let n_slots = |device: u32| self.of_slot.iter().filter(|other| **other == device).count();
        let healthy = (0u32..).zip(&self.health).filter(|(_, health)| health.fault.is_none());
        let free = healthy.map(|(device, _)| (n_slots(device), device)).filter(|(n, _)| *n < self.n_slots_max);
        let Some((_, device)) = free.min() else { return false };
        self.of_slot[slot as usize] = device;
        true
    }
}

impl DeviceHealth {
    /// The state without the amounts that always change.
    #[must_use]
    pub fn settled(&self) -> DeviceHealth {
        DeviceHealth { used_bytes: 0, celsius: None, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy(n: u32) -> Vec<DeviceHealth> {
        (0..n).map(|i| DeviceHealth { id: format!("GPU-{i}"), ..DeviceHealth::default() }).collect()
    }

    fn failed(i: usize) -> Vec<DeviceHealth> {
        vec![DeviceHealth { fault: Some("Xid 79".into()), ..healthy(9).swap_remove(i) }]
    }

    // DEVICES-1, DEVICES-2
    #[test]
    fn slot_of_a_failed_device_moves_to_a_free_one_and_the_others_stay() {
        let mut devices = Devices::new(healthy(3), 2);
        assert!(devices.handle_health(failed(0)));
        assert!(!devices.handle_health(healthy(3)), "a fault stays");

        assert!(devices.fault_of(0).is_some() && devices.fault_of(1).is_none());
        assert!(devices.replace(0) && devices.replace(1));

        assert_eq!((devices.of(0), devices.of(1)), (Some(2), Some(1)));
    }

    // DEVICES-3
    #[test]
    fn slot_without_a_free_healthy_device_is_lost() {
        let mut devices = Devices::new(healthy(2), 2);
        devices.handle_health(failed(1));

        assert!(devices.replace(0) && !devices.replace(1));

        let mut shared = Devices::new(healthy(2), 3);
        shared.handle_health(failed(0));
        assert!(shared.replace(0), "a device that two slots may share has room for one more");
        assert!(!shared.replace(2));
    }

    #[test]
    fn slots_of_a_node_without_devices_need_none() {
        let mut devices = Devices::new(vec![], 2);

        assert!(devices.replace(0) && devices.of(1).is_none() && !devices.handle_health(failed(0)));
    }

    #[test]
    fn memory_and_heat_are_no_news_and_slowness_is() {
        let mut devices = Devices::new(healthy(1), 1);
        let warmer = DeviceHealth { celsius: Some(80), used_bytes: 1, ..healthy(1).remove(0) };

        assert!(!devices.handle_health(vec![warmer.clone()]));
        let slow = DeviceHealth { slowed_by: Some("heat".into()), ..warmer };
        assert!(devices.handle_health(vec![slow.clone()]) && !devices.handle_health(vec![slow.clone()]));

        assert_eq!(slow.complaint().unwrap(), " GPU-0: slowed by heat at 80 °C");
    }
}
