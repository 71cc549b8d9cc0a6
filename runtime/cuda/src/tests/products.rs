//! Which algorithm a product gets, and when products are run to find it.

use super::BorrowedGpu;
use crate::product::{Choice, Matrix, Product, Products, WORKSPACE_BYTES};
use phalanx_strategies::program::DType;

/// Rows and columns of the result.
const N: usize = 16;
/// Terms for which the software GPU proposes two algorithms.
const LONG: usize = 1024;
/// Terms for which it proposes one.
const SHORT: usize = 64;

#[test]
fn products_run_once_for_each_kind_and_only_where_nothing_needs_their_results() {
    let gpu = BorrowedGpu::take();
    let products = Products::open(&gpu.0).unwrap();
    let memory = gpu.0.allocate(WORKSPACE_BYTES + 4 * N * (2 * LONG + N)).unwrap();
    let product = |k: usize| {
        let (workspace, a) = (memory.address, memory.address + WORKSPACE_BYTES as u64);
        let matrix = |address, stride, is_transposed| Matrix { address, stride, dtype: DType::F32, is_transposed };
        let (b, c) = (a + (4 * N * LONG) as u64, a + (8 * N * LONG) as u64);
        let (a, b, c) = (matrix(a, k, false), matrix(b, k, true), matrix(c, N, false));
        Product { m: N, n: N, k, a, b, c, alpha: 1.0, added: None, bias: None, workspace }
    };
    // SAFETY: all memory is this test's.
    let runs_for = |k, choice| unsafe {
        let (result, mut found) = (product(k).c.address, vec![0u8; 4 * N * N]);
        gpu.0.zero(memory.address, memory.bytes, gpu.0.compute).unwrap();
        gpu.0.synchronize().unwrap();
        gpu.0.write(result, &vec![7; 4 * N * N]).unwrap();
        drop(products.plan(&gpu.0, product(k), choice).unwrap());
        gpu.0.synchronize().unwrap();
        gpu.0.read(result, &mut found).unwrap();
        found.iter().all(|byte| *byte == 0)
    };

    let choices = [Choice::First, Choice::Known, Choice::Fastest, Choice::Known, Choice::Fastest, Choice::First];
    let runs = |k| choices.map(|choice| runs_for(k, choice));

    assert_eq!(runs(LONG), [false, false, true, false, false, false]);
    assert_eq!(runs(SHORT), [false; 6], "there is nothing to choose from");
}
