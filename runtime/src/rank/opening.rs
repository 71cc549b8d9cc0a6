//! The device of a rank, opened beside the rest of the rank's start: the driver, a context and the libraries of a GPU take longer
//! than everything else.

use crate::config::precision::{DeviceChoice, PrecisionSection};
use crate::devices::{self, Chosen};
use crate::error::JobError;
use phalanx_device::ThreadError;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::Scope;

pub(super) struct Opening(Receiver<Result<Chosen, JobError>>);

impl Opening {
    /// Begins to open the device, on a thread that the scope waits for: a process must not exit while its driver starts.
    ///
    /// # Errors
    /// When the system refuses the thread.
    pub(super) fn begin<'s>(scope: &'s Scope<'s, '_>, config: &'s PrecisionSection) -> Result<Opening, JobError> {
        let (chosen, receiver) = sync_channel(1);
        let open = move || {
            let device = devices::chosen(config);
            let opens = device.as_ref().ok().map(|(device, _)| Arc::clone(device));
            // Without a receiver, the rank has failed meanwhile.
            if chosen.send(device).is_ok() {
                opens.iter().for_each(|device| device.open_ahead());
            }
        };
        if config.device == DeviceChoice::Cpu {
            open();
        } else {
            let spawned = std::thread::Builder::new().name("opening".to_owned()).spawn_scoped(scope, open);
            spawned.map_err(|source| JobError::Thread(ThreadError::Spawn(source)))?;
        }
        Ok(Opening(receiver))
    }

    /// The device, which may still be opening.
    ///
    /// # Errors
    /// As [`devices::chosen`].
    pub(super) fn device(self) -> Result<Chosen, JobError> {
        self.0.recv().unwrap_or_else(|_| unreachable!("the thread sends before it ends"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_softgpu::Installation;
    use std::process::Command;

    /// The folder of signs of the software GPU, in the process of the test.
    const CONTROL: &str = "SOFTGPU_CONTROL";

    #[test]
    fn device_is_known_while_its_context_is_made() {
        let Some(folder) = std::env::var_os(CONTROL) else {
            let (gpu, folder) = (Installation::new().unwrap(), tempfile::tempdir().unwrap());
            std::fs::write(folder.path().join("hold-context"), "").unwrap();
            let mut own = Command::new(std::env::current_exe().unwrap());
            own.args(["rank::opening::tests::device_is_known_while_its_context_is_made", "--exact", "--nocapture"]);
            let ended = own.env(CONTROL, folder.path()).env("PHALANX_CUDA_LIBS", gpu.dir()).output().unwrap();
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
            return;
        };
        let config = PrecisionSection { device: DeviceChoice::Cuda, ..PrecisionSection::default() };

        let device = std::thread::scope(|scope| {
            let (device, _) = Opening::begin(scope, &config).unwrap().device().unwrap();
            assert!(device.activity().is_none(), "the context is held");
            std::fs::remove_file(std::path::Path::new(&folder).join("hold-context")).unwrap();
            device
        });

        assert!(device.activity().is_some(), "it is open");
    }
}
