//! Warp-group products and tensor copies of sm_90a, compiled by the real NVRTC.

mod support;

use phalanx_ptxsim::{Arg, Device, Finding, Kind, Swizzle, TensorMap};
use support::{assert_clean, bf16, bf16s, compile, numbers, wide};

const N: usize = 64;

/// Runs the product; returns the findings and the largest error.
fn product(swizzle: Swizzle, by_columns: bool, plant: &str) -> Option<(Vec<Finding>, f64)> {
    let row_bytes = match swizzle {
        Swizzle::None => 16,
        Swizzle::Bytes32 => 32,
        Swizzle::Bytes64 => 64,
        Swizzle::Bytes128 => 128,
    };
    let width = format!("-DSWIZZLE={}", if swizzle == Swizzle::None { 0 } else { row_bytes });
    let mut options = vec!["--gpu-architecture=compute_90a", width.as_str()];
    options.extend(by_columns.then_some("-DB_BY_COLUMNS"));
    options.extend((!plant.is_empty()).then_some(plant));
    let module = compile("hopper.cu", &options)?;
    let (a, b) = (numbers(N * N, 21), numbers(N * N, 22));
    let mut device = Device::new();
    let (da, db, dd) = (bf16s(&mut device, &a), bf16s(&mut device, &b), device.alloc(N * N * 4));
    let map = |address: u64| TensorMap {
        address,
        element_bytes: 2,
        dims: vec![N as u32, N as u32],
        strides_bytes: vec![2 * N as u64],
        box_dims: vec![row_bytes / 2, N as u16],
        swizzle,
    };
    let bytes = |address| Arg::Bytes(map(address).encode().to_vec());
    let args = [bytes(da.address()), bytes(db.address()), Arg::Ptr(dd)];
    let kernel = module.kernel("warp_group_product").unwrap();

    let run = kernel.launch(&mut device, [1, 1, 1], [128, 1, 1], 0, &args).unwrap();

    let value = |x: f32| f64::from(wide(bf16(x)));
    let error = device.f32s(dd).into_iter().enumerate().map(|(at, found)| {
        let b_at = |n: usize, k: usize| if by_columns { b[k * N + n] } else { b[n * N + k] };
        let expected: f64 = (0..N).map(|k| value(a[at / N * N + k]) * value(b_at(at % N, k))).sum();
        (f64::from(found) - expected).abs()
    });
    Some((run.findings, error.fold(0.0, f64::max)))
}

#[test]
fn warp_group_product_equals_f64_for_every_swizzle() {
    for swizzle in [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128] {
        for by_columns in [false, true] {
            let Some((findings, error)) = product(swizzle, by_columns, "") else { return };
            assert_clean(&findings);
            assert!(error < 2e-5, "{swizzle:?}, columns {by_columns}: {error}");
        }
    }
}

#[test]
fn product_before_its_operands_arrive_is_found() {
    let Some((findings, _)) = product(Swizzle::Bytes128, false, "-DPLANT_NO_WAIT") else { return };
    assert!(
        findings.iter().any(|f| f.kind == Kind::CopyInFlight && f.site.instruction.starts_with("wgmma")),
        "{findings:?}"
    );
}

#[test]
fn results_used_before_the_group_is_waited_for_are_found() {
    let Some((findings, _)) = product(Swizzle::Bytes128, false, "-DPLANT_NO_GROUP_WAIT") else { return };
    assert!(!findings.is_empty() && findings.iter().all(|f| f.kind == Kind::PendingRegister), "{findings:?}");
}
