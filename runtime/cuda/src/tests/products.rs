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

/// Whether planning runs the product `[N, k] [k, N]`, which it shows by its result.
fn runs(gpu: &BorrowedGpu, products: &Products, k: usize, choice: Choice) -> bool {
    let memory = gpu.0.allocate(WORKSPACE_BYTES + 4 * N * (2 * LONG + N)).unwrap();
    let (workspace, a) = (memory.address, memory.address + WORKSPACE_BYTES as u64);
    let matrix = |address, stride, is_transposed| Matrix { address, stride, dtype: DType::F32, is_transposed };
    let (b, c) = (a + (4 * N * LONG) as u64, a + (8 * N * LONG) as u64);
    let (a, b, c) = (matrix(a, k, false), matrix(b, k, true), matrix(c, N, false));
    let product = Product { m: N, n: N, k, a, b, scales: None, c, alpha: 1.0, added: None, bias: None, workspace };
    let mut found = vec![0u8; 4 * N * N];
    // SAFETY: all memory is this test's.
    unsafe {
        gpu.0.zero(memory.address, memory.bytes, gpu.0.compute).unwrap();
        gpu.0.synchronize().unwrap();
        gpu.0.write(c.address, &vec![7; 4 * N * N]).unwrap();
        drop(products.plan(&gpu.0, product, choice).unwrap());
        gpu.0.synchronize().unwrap();
        gpu.0.read(c.address, &mut found).unwrap();
    }
    found.iter().all(|byte| *byte == 0)
}

#[test]
fn products_run_once_for_each_kind_and_only_where_nothing_needs_their_results() {
    let gpu = BorrowedGpu::take();
    gpu.0.bind().unwrap();
    let products = Products::open(&gpu.0, None).unwrap();
    let choices = [Choice::First, Choice::Known, Choice::Fastest, Choice::Known, Choice::Fastest, Choice::First];

    let [long, short] = [LONG, SHORT].map(|k| choices.map(|choice| runs(&gpu, &products, k, choice)));

    assert_eq!(long, [false, false, true, false, false, false]);
    assert_eq!(short, [false; 6], "there is nothing to choose from");
}

#[test]
fn algorithms_in_the_folder_are_used_unless_the_library_refuses_them() {
    let (gpu, folder) = (BorrowedGpu::take(), tempfile::tempdir().unwrap());
    gpu.0.bind().unwrap();
    let open = || Products::open(&gpu.0, Some(folder.path().to_owned())).unwrap();
    let again = || runs(&gpu, &open(), LONG, Choice::Fastest);
    let file = || std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).next().unwrap();

    assert_eq!([again(), again()], [true, false]);

    for damaged in [vec![0; 64], vec![1; 63], Vec::new()] {
        std::fs::write(file(), damaged).unwrap();
        assert_eq!([again(), again()], [true, false], "it is replaced");
    }
}
