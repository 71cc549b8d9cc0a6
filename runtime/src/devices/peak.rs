//! The peak rate of a device's products, the reference for utilisation. A measurement takes as long as all else before the first step
//! of a small model, so that it is kept.

use super::kept::Measurements;
use super::{DeviceChoice, choice_of};
use phalanx_device::Device;

/// FLOP/s of products on the threads of the current pool, of operands in bf16 or f32: kept from an earlier start, or measured.
pub(crate) fn peak_flops(device: &dyn Device, bf16: bool) -> f64 {
    if choice_of(device) == DeviceChoice::Cuda {
        // Published figures of the GPU that is there now.
        return device.peak_flops(bf16);
    }
    let (kept, key) = (Measurements::in_cache(FILE), key(device, bf16));
    let known = kept.get::<f64>(&key).filter(|flops| flops.is_finite() && *flops > 0.0);
    known.unwrap_or_else(|| measured_peak_flops(device, bf16))
}

/// Measures, and replaces what is kept.
pub(crate) fn measured_peak_flops(device: &dyn Device, bf16: bool) -> f64 {
    let flops = device.peak_flops(bf16);
    Measurements::in_cache(FILE).keep(&key(device, bf16), &flops);
    flops
}

const FILE: &str = "peaks.json";

fn key(device: &dyn Device, bf16: bool) -> String {
    let (n_threads, format) = (rayon::current_num_threads(), if bf16 { "bf16" } else { "f32" });
    format!("{}; {}; {format}; {n_threads} threads", device.name(), device.engine(bf16))
}
