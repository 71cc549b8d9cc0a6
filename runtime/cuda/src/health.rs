//! The state of GPUs as NVML reports it, without a context on them: for the process that supervises the ranks of a node, which
//! must not take memory of a GPU, nor hang with it.

use crate::gpu_info::GpuInfo;
use crate::library::nvml::{
    COMPUTE_PROHIBITED, Device, EXCLUSIVE_PROCESS, EventData, EventSet, GPU_IS_LOST, GPU_SENSOR, Memory, ProcessInfo,
    TIMEOUT, UNCORRECTED_SINCE_RESET, XID,
};
use crate::library::{Nvml, Search};
use crate::link_errors::LinkErrors;
use crate::xid::{self, Verdict};
use phalanx_strategies::elastic::devices::DeviceHealth;
use std::ffi::CString;
use std::time::{Duration, Instant};

/// How long a non-fatal event stays in a GPU's status.
const EVENT_LIFE: Duration = Duration::from_secs(60);

/// Reasons for lowered clocks that are unusual. Power caps are not: large GPUs run at their cap.
/// Source: `nvmlClocksEventReasons` of nvml.h.
const SLOWNESS: [(u64, &str); 4] =
    [(0x40, "heat"), (0x20, "heat"), (0x80, "the external power brake"), (0x8, "a hardware slowdown")];

/// Watches GPUs.
pub(crate) struct Monitor {
    /// None without NVML: then only names and sizes are known.
    nvml: Option<&'static Nvml>,
    gpus: Vec<Watched>,
    events: Option<EventSet>,
    links: LinkErrors,
}

// SAFETY: handles of NVML may be used from any thread; the event set is used by one at a time.
unsafe impl Send for Monitor {}

struct Watched {
    /// Its handle, if NVML knows it.
    device: Option<Device>,
    health: DeviceHealth,
    event_since: Option<Instant>,
}

impl Monitor {
    /// Watches these GPUs from now on. A machine without NVML reports what the driver knows.
    pub(crate) fn new(search: &Search, gpus: &[GpuInfo]) -> Monitor {
        let nvml = Nvml::find(search).inspect_err(|e| tracing::warn!("the health of GPUs is unknown: {e}")).ok();
        let watched = |(i, gpu): (usize, &GpuInfo)| {
            let id = gpu.uuid.clone().unwrap_or_else(|| format!("{i}"));
            let device = nvml.zip(gpu.uuid.as_deref()).and_then(|(nvml, uuid)| nvml.device(uuid));
            let total_bytes = gpu.memory_bytes as u64;
            let health = DeviceHealth { id, name: gpu.name.clone(), total_bytes, ..DeviceHealth::default() };
            Watched { device, health, event_since: None }
        };
        let gpus: Vec<Watched> = gpus.iter().enumerate().map(watched).collect();
        let events = nvml.and_then(|nvml| nvml.events_of(gpus.iter().filter_map(|gpu| gpu.device)));
        let links = LinkErrors::new(gpus.len());
        Monitor { nvml, gpus, events, links }
    }

    /// The state of all GPUs now.
    pub(crate) fn sample(&mut self) -> Vec<DeviceHealth> {
        let Some(nvml) = self.nvml else { return self.gpus.iter().map(|gpu| gpu.health.clone()).collect() };
        let now = Instant::now();
        for gpu in &mut self.gpus {
            if gpu.event_since.is_some_and(|since| now > since + EVENT_LIFE) {
                (gpu.event_since, gpu.health.event) = (None, None);
            }
            if let Some(device) = gpu.device {
                nvml.sample(device, &mut gpu.health);
            }
        }
        self.gpus.iter().map(|gpu| gpu.health.clone()).collect()
    }

    /// Waits for an event, at most `timeout`; then gives the state of all GPUs.
    pub(crate) fn wait(&mut self, timeout: Duration) -> Vec<DeviceHealth> {
        let until_due = self.links.due().map_or(timeout, |due| due.saturating_duration_since(Instant::now()));
        let mut left = timeout.min(until_due);
        while let Some((device, code)) = self.next_event(left) {
            left = Duration::ZERO;
            let Some(i) = self.gpus.iter().position(|gpu| gpu.device == Some(device)) else { continue };
            let (text, verdict) = xid::describe(code);
            match verdict {
                Verdict::Failed => self.fail(i, text),
                Verdict::Link(n_max) => {
                    self.links.handle(Instant::now(), i, &text, n_max);
                    self.note(i, text);
                }
                Verdict::Harmless => self.note(i, text),
            }
        }
        for (i, text) in self.links.failed(Instant::now()) {
            self.fail(i, text);
        }
        self.sample()
    }

    fn fail(&mut self, gpu: usize, text: String) {
        let health = &mut self.gpus[gpu].health;
        tracing::warn!(gpu = health.id, "{text}");
        health.fault.get_or_insert(text);
    }

    fn note(&mut self, gpu: usize, text: String) {
        let gpu = &mut self.gpus[gpu];
        tracing::info!(gpu = gpu.health.id, "{text}");
        (gpu.health.event, gpu.event_since) = (Some(text), Some(Instant::now()));
    }

    /// The GPU and the code of the next Xid event.
    fn next_event(&mut self, timeout: Duration) -> Option<(Device, u64)> {
        let wait = self.nvml.and_then(|nvml| nvml.nvmlEventSetWait_v2);
        let (Some(wait), Some(events)) = (wait, self.events) else {
            std::thread::sleep(timeout);
            return None;
        };
        let began = Instant::now();
        let mut event =
            EventData { device: std::ptr::null_mut(), kind: 0, data: 0, gpu_instance: 0, compute_instance: 0 };
        // SAFETY: the set lives as long as the monitor; a pointer to a local.
        match unsafe { wait(events, &raw mut event, timeout.as_millis() as u32) } {
            0 if event.kind == XID => Some((event.device, event.data)),
            0 | TIMEOUT => None,
            code => {
                // A lost GPU makes every wait fail at once: the state of each GPU tells which.
                tracing::debug!(code, "cannot wait for events of GPUs");
                std::thread::sleep(timeout.saturating_sub(began.elapsed()));
                None
            }
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        if let (Some(nvml), Some(events)) = (self.nvml, self.events) {
            // SAFETY: made by this monitor, and no thread waits for it.
            unsafe { (nvml.nvmlEventSetFree)(events) };
        }
    }
}

impl Nvml {
    fn device(&self, uuid: &str) -> Option<Device> {
        let (uuid, mut device): (_, Device) = (CString::new(uuid).ok()?, std::ptr::null_mut());
        // SAFETY: a string that ends in NUL, and a pointer to a local.
        let code = unsafe { (self.nvmlDeviceGetHandleByUUID)(uuid.as_ptr(), &raw mut device) };
        (code == 0).then_some(device)
    }

    /// A set of the Xid events of these devices; those without such events are left out.
    fn events_of(&self, devices: impl Iterator<Item = Device>) -> Option<EventSet> {
        let mut events: EventSet = std::ptr::null_mut();
        // SAFETY: a pointer to a local; then a set that was just made.
        unsafe {
            if (self.nvmlEventSetCreate)(&raw mut events) != 0 {
                return None;
            }
            for device in devices {
                let code = (self.nvmlDeviceRegisterEvents)(device, XID, events);
                if code != 0 {
                    tracing::warn!("a GPU reports no Xid events: {}", self.text(code));
                }
            }
        }
        Some(events)
    }

    fn sample(&self, device: Device, health: &mut DeviceHealth) {
        let (mut memory, mut celsius, mut n_uncorrected, mut reasons) = (Memory::default(), 0, 0, 0);
        let (kind, counter) = UNCORRECTED_SINCE_RESET;
        let clocks = self.nvmlDeviceGetCurrentClocksEventReasons.or(self.nvmlDeviceGetCurrentClocksThrottleReasons);
        // SAFETY: a handle of this library, and pointers to locals.
        let codes = unsafe {
            [
                (self.nvmlDeviceGetMemoryInfo)(device, &raw mut memory),
                (self.nvmlDeviceGetTemperature)(device, GPU_SENSOR, &raw mut celsius),
                (self.nvmlDeviceGetTotalEccErrors)(device, kind, counter, &raw mut n_uncorrected),
                clocks.map_or(TIMEOUT, |clocks| clocks(device, &raw mut reasons)),
            ]
        };
        if codes.contains(&GPU_IS_LOST) {
            health.fault.get_or_insert_with(|| self.text(GPU_IS_LOST));
        }
        if codes[0] == 0 {
            (health.used_bytes, health.total_bytes) = (memory.used, memory.total);
        }
        health.celsius = (codes[1] == 0).then_some(celsius);
        health.n_uncorrected = (codes[2] == 0).then_some(n_uncorrected);
        let slowness = SLOWNESS.iter().find(|(bit, _)| codes[3] == 0 && reasons & bit != 0);
        health.slowed_by = slowness.map(|(_, text)| (*text).to_owned());
    }

    /// The processes that compute on a device: their ids and bytes of memory.
    fn processes(&self, device: Device) -> Vec<(u32, u64)> {
        let mut processes = [ProcessInfo::default(); 64];
        let mut n = processes.len() as u32;
        let Some(running) = self.nvmlDeviceGetComputeRunningProcesses_v3 else { return Vec::new() };
        // SAFETY: a handle of this library, and pointers to locals with room for `n`.
        let code = unsafe { running(device, &raw mut n, processes.as_mut_ptr()) };
        let n = if code == 0 { (n as usize).min(processes.len()) } else { 0 };
        processes[..n].iter().map(|process| (process.pid, process.used)).collect()
    }
}

/// Whether a process that uses the GPU, or its mode, keeps this one from using it.
pub(crate) fn is_taken(search: &Search, uuid: Option<&str>) -> bool {
    let Some((nvml, device)) = nvml_of(search, uuid) else { return false };
    let mut mode = 0;
    // SAFETY: a handle of this library, and a pointer to a local.
    let code = unsafe { (nvml.nvmlDeviceGetComputeMode)(device, &raw mut mode) };
    code == 0 && (mode == COMPUTE_PROHIBITED || mode == EXCLUSIVE_PROCESS && !nvml.processes(device).is_empty())
}

/// Free bytes of a GPU's memory, if NVML knows.
pub(crate) fn free_bytes(search: &Search, uuid: Option<&str>) -> Option<u64> {
    let (nvml, device) = nvml_of(search, uuid)?;
    let mut memory = Memory::default();
    // SAFETY: a handle of this library, and a pointer to a local.
    let code = unsafe { (nvml.nvmlDeviceGetMemoryInfo)(device, &raw mut memory) };
    (code == 0).then_some(memory.free)
}

/// The other processes that use the GPU, as a clause; empty if there are none, or NVML does not know.
pub(crate) fn users(search: &Search, uuid: Option<&str>) -> String {
    let Some((nvml, device)) = nvml_of(search, uuid) else { return String::new() };
    let others = nvml.processes(device).into_iter().filter(|(pid, _)| *pid != std::process::id());
    let names: Vec<String> = others.map(|(pid, bytes)| format!("process {pid} uses {} MiB", bytes >> 20)).collect();
    if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) }
}

fn nvml_of(search: &Search, uuid: Option<&str>) -> Option<(&'static Nvml, Device)> {
    let nvml = Nvml::find(search).ok()?;
    Some((nvml, nvml.device(uuid?)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu;
    use phalanx_softgpu::Installation;
    use std::io::Write;

    fn search() -> Search {
        Search::only(vec![Installation::new().unwrap().dir().to_owned()])
    }

    /// Changes a setting of the software GPU of this process.
    fn set(name: &str, value: &str) {
        Installation::new().unwrap().set(name, value).unwrap();
    }

    // One test, because settings are those of the process.
    #[test]
    fn counters_and_events_of_the_driver_are_the_state_of_their_gpu() {
        let (search, mut xids) = (search(), tempfile::NamedTempFile::new().unwrap());
        set("SOFTGPU_NVML_XID_FILE", xids.path().to_str().unwrap());
        let gpus = gpu::find(&search).unwrap().1;
        let mut monitor = Monitor::new(&search, &gpus[..1]);
        let mut first = monitor.sample().remove(0);
        assert_eq!((first.celsius, first.n_uncorrected, first.complaint()), (Some(41), Some(0), None));
        assert!(first.id.starts_with("GPU-") && first.used_bytes > 0 && first.total_bytes > first.used_bytes);

        set("SOFTGPU_NVML_ECC", "3");
        set("SOFTGPU_NVML_CLOCKS", "128");
        first = monitor.wait(Duration::ZERO).remove(0);
        assert_eq!(
            first.remarks().unwrap(),
            "3 uncorrected memory errors; slowed by the external power brake at 41 °C"
        );
        set("SOFTGPU_NVML_ECC", "0");
        // A power cap is no remark.
        set("SOFTGPU_NVML_CLOCKS", "4");

        writeln!(xids, "31 0").unwrap();
        first = monitor.wait(Duration::from_secs(60)).remove(0);
        assert_eq!(first.remarks().unwrap(), "Xid 31, a kernel accessed memory that it does not own");
        assert_eq!(first.fault, None);
        writeln!(xids, "79 0\n13 0").unwrap();
        first = monitor.wait(Duration::from_secs(60)).remove(0);
        assert_eq!(first.fault.as_deref(), Some("Xid 79, the GPU has fallen off the bus"));
    }

    #[test]
    fn without_nvml_names_and_sizes_are_known() {
        let without = Installation::new().unwrap().without("libnvidia-ml.so.1").unwrap();
        let search = Search::only(vec![without.dir().to_owned()]);
        let gpus = gpu::find(&search).unwrap().1;

        let health = Monitor::new(&search, &gpus[..1]).sample().remove(0);

        // A machine with a driver of its own has NVML there.
        if Nvml::find(&search).is_err() {
            assert_eq!((health.celsius, health.used_bytes), (None, 0));
        }
        assert_eq!(health.total_bytes, gpus[0].memory_bytes as u64);
    }
}
