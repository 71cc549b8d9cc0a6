//! Copies and products at the sizes of large models: the ceilings of all other rates.

use super::Report;
use crate::measure::{self, Shape};
use anyhow::Result;
use phalanx_cuda::CudaDevice;
use phalanx_device::Device;
use phalanx_strategies::program::{Compute, DType, MatMul, Op, op};

/// Elements of the copied value on a GPU: 256 MiB of f32.
const COPIED: usize = 64 << 20;
/// Rows, columns and depth of the products.
const SIDE: usize = 8192;

/// Operations of a layer in FP8 with a weight in e4m3. The product of 16 columns or rows takes next to no time, so that its rows show what
/// comes before a product.
fn fp8(gpu: &CudaDevice, side: usize, report: &mut Report) -> Result<()> {
    let (few, wide) = (Compute::FP8_VECTOR, 7 * side / 2);
    let seconds = |layout: MatMul, rows: usize, k: usize, n: usize| {
        let weight = if layout.trans_b { [n, k] } else { [k, n] };
        let operands = [Shape::new(&[rows, k], DType::Bf16), Shape::new(&weight, DType::E4m3)];
        let op = Op::MatMul(MatMul { compute: Compute::Fp8, ..layout });
        measure::seconds(gpu, &op, &operands, &[Shape::new(&[rows, n], DType::Bf16)])
    };
    let s = seconds(MatMul::nt(), side, side, side)?;
    let rate = format!("{:.1} TFLOP/s", 2.0 * (side as f64).powi(3) / s / 1e12);
    report.row(&[&format!("product fp8 {side}, rows rounded"), &format!("{:.3}", s * 1e3), &rate]);
    for k in [side / 2, wide] {
        let s = seconds(MatMul::nt(), side / 2, k, few)?;
        let rate = format!("{:.2} TB/s", 3.0 * (side / 2 * k) as f64 / s / 1e12);
        report.row(&[&format!("rows to fp8 {} x {k}", side / 2), &format!("{:.3}", s * 1e3), &rate]);
    }
    let s = seconds(MatMul::nn(), few, wide, side / 2)?;
    let rate = format!("{:.2} TB/s", 2.0 * (wide * side / 2) as f64 / s / 1e12);
    report.row(&[&format!("transpose of fp8 {wide} x {}", side / 2), &format!("{:.3}", s * 1e3), &rate]);
    Ok(())
}

pub(super) fn run(gpu: &CudaDevice) -> Result<Report> {
    let mut report = Report::new(&gpu.gpus()[0].name, &["what", "ms", "rate"]);
    // The software GPU measures nothing; it shows that the stage works.
    let (copied, side) = if measure::is_software(gpu) { (1 << 16, 64) } else { (COPIED, SIDE) };
    let copy = [Shape::new(&[copied], DType::F32), Shape::new(&[copied], DType::F32)];
    let s = measure::seconds(gpu, &Op::Cast(op::Cast), &copy[..1], &copy[1..])?;
    report.row(&[&"copy", &format!("{:.3}", s * 1e3), &format!("{:.2} TB/s", 8.0 * copied as f64 / s / 1e12)]);
    for (name, compute, dtype) in [("bf16", Compute::Bf16, DType::Bf16), ("f32", Compute::F32, DType::F32)] {
        let operands = [Shape::new(&[side, side], dtype), Shape::new(&[side, side], dtype)];
        let op = Op::MatMul(MatMul { compute, ..MatMul::nt() });
        let s = measure::seconds(gpu, &op, &operands, &[Shape::new(&[side, side], DType::F32)])?;
        let rate = 2.0 * (side as f64).powi(3) / s / 1e12;
        let peak = gpu.peak_flops(compute == Compute::Bf16) / 1e12;
        let share = format!("{rate:.1} TFLOP/s, {:.0} % of {peak:.0}", 100.0 * rate / peak);
        report.row(&[&format!("product {name} {side}"), &format!("{:.3}", s * 1e3), &share]);
    }
    fp8(gpu, side, &mut report)?;
    Ok(report)
}
