//! The matrix products of the benchmark step (1024 tokens, d 512, feed-forward 1408, vocabulary 4096), in the three
//! layouts of training, on all threads of the machine. `tests/peers/torch_matmul.py` times the same products in
//! PyTorch. Throughput counts floating-point operations: Gelem/s reads GFLOP/s.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use phalanx_cpu::matmul::{Compute, Epilogue, Mat, MatMut, Slice, SliceMut, Storage, matmul, scratch_bytes};

const FORWARD: [[usize; 3]; 5] =
    [[1024, 1536, 512], [1024, 512, 512], [1024, 2816, 512], [1024, 512, 1408], [1024, 4096, 512]];
const INPUT_GRADIENT: [[usize; 3]; 5] =
    [[1024, 512, 1536], [1024, 512, 512], [1024, 512, 2816], [1024, 1408, 512], [1024, 512, 4096]];
const WEIGHT_GRADIENT: [[usize; 3]; 5] =
    [[1536, 512, 1024], [512, 512, 1024], [2816, 512, 1024], [512, 1408, 1024], [4096, 512, 1024]];

/// Which operands are stored transposed.
struct Layout {
    name: &'static str,
    a: bool,
    b: bool,
    shapes: [[usize; 3]; 5],
}

const LAYOUTS: [Layout; 3] = [
    Layout { name: "NT", a: false, b: true, shapes: FORWARD },
    Layout { name: "NN", a: false, b: false, shapes: INPUT_GRADIENT },
    Layout { name: "TN", a: true, b: false, shapes: WEIGHT_GRADIENT },
];

/// Numbers of unit scale, stored both ways.
fn numbers(len: usize) -> (Vec<f32>, Vec<bf16>) {
    let wide: Vec<f32> = (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8e6 - 1.0).collect();
    let narrow = wide.iter().map(|&x| bf16::from_f32(x)).collect();
    (wide, narrow)
}

fn products(c: &mut Criterion) {
    for (name, compute, stored) in [
        ("f32", Compute::F32, Storage::F32),
        ("bf16", Compute::Bf16, Storage::Bf16),
        ("bf16 of f32", Compute::Bf16, Storage::F32),
    ] {
        let mut group = c.benchmark_group(name);
        group.sample_size(15).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(700));
        for layout in &LAYOUTS {
            for [m, n, k] in layout.shapes {
                let (a, b) = (numbers(m * k), numbers(k * n));
                let (mut wide, mut narrow) = numbers(m * n);
                let mut scratch = vec![0; scratch_bytes(compute, m, n, k, stored)];
                let operand = |x: &'static (Vec<f32>, Vec<bf16>), ld, transposed| Mat {
                    data: if stored == Storage::F32 { Slice::F32(&x.0) } else { Slice::Bf16(&x.1) },
                    ld,
                    transposed,
                };
                // Leaked, which keeps the closure below simple; a bench process is short-lived.
                let (a, b) = (&*Box::leak(Box::new(a)), &*Box::leak(Box::new(b)));
                let a = operand(a, if layout.a { m } else { k }, layout.a);
                let b = operand(b, if layout.b { k } else { n }, layout.b);
                // A weight gradient is summed in f32 for every type of activations; activations keep their storage.
                let gradient = layout.a;
                group.throughput(Throughput::Elements((2 * m * n * k) as u64));
                group.bench_function(format!("{} {m}x{n}x{k}", layout.name), |bencher| {
                    bencher.iter(|| {
                        let data = if gradient || stored == Storage::F32 {
                            SliceMut::F32(&mut wide)
                        } else {
                            SliceMut::Bf16(&mut narrow)
                        };
                        let epilogue = Epilogue { accumulate: gradient, ..Epilogue::default() };
                        matmul(compute, m, n, k, a, b, MatMut { data, ld: n }, epilogue, &mut scratch);
                    });
                    black_box((&wide, &narrow));
                });
            }
        }
        group.finish();
    }
}

criterion_group!(benches, products);
criterion_main!(benches);
