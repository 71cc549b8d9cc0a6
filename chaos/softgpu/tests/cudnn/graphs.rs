//! Graphs that are not attention, and what engines round.

use crate::builder::*;
use crate::reference::{numbers, of_bf16, to_bf16};
use crate::support::P;

#[test]
fn product_of_strided_operands_agrees_with_f64() {
    let cudnn = Cudnn::new();
    let (b, h, m, n, k) = (2, 4, 9, 11, 21);
    // b has two heads for the four of a, and lies transposed; rows have gaps.
    let a = cudnn.tensor(&spec(1, FLOAT, &[b, h, m, k], &[h * m * 24, m * 24, 24, 1]));
    let right = cudnn.tensor(&spec(2, FLOAT, &[b, 2, k, n], &[2 * n * k, n * k, 1, k]));
    let c = cudnn.tensor(&spec(3, FLOAT, &[b, h, m, n], &[h * m * n, n, h * n, 1]));
    let plan = cudnn.plan(&[cudnn.try_matmul(&a, &right, &c, [None; 3]).unwrap()]).unwrap();
    let (va, vb) = (numbers((b * h * m * 24) as usize, 1), numbers((b * 2 * n * k) as usize, 2));
    let at = [(1, cudnn.gpu.put(&va)), (2, cudnn.gpu.put(&vb)), (3, cudnn.gpu.alloc(4 * (b * h * m * n) as usize))];

    cudnn.run(plan, &at);

    let found: Vec<f32> = cudnn.gpu.get(at[2].1, (b * h * m * n) as usize);
    for (batch, head, i, j) in all([b, h, m, n]) {
        let product = |p: i64| {
            let left = va[(((batch * h + head) * m + i) * 24 + p) as usize];
            f64::from(left) * f64::from(vb[((batch * 2 + head / 2) * n * k + j * k + p) as usize])
        };
        let expected: f64 = (0..k).map(product).sum();
        let found = found[(batch * h * m * n + i * h * n + head * n + j) as usize];
        assert!((f64::from(found) - expected).abs() < 1e-5, "{batch} {head} {i} {j}: {found} {expected}");
    }
}

fn all([a, b, c, d]: [i64; 4]) -> impl Iterator<Item = (i64, i64, i64, i64)> {
    (0..a * b * c * d).map(move |i| (i / (b * c * d), i / (c * d) % b, i / d % c, i % d))
}

#[test]
fn softmax_agrees_with_f64() {
    let cudnn = Cudnn::new();
    let (dims, rows) = ([2, 3, 5, 17], [2, 3, 5, 1]);
    let (x, y) =
        (cudnn.tensor(&spec(1, FLOAT, &dims, &packed(&dims))), cudnn.tensor(&spec(2, FLOAT, &dims, &packed(&dims))));
    let mut g = Graph::new(&cudnn);
    let (max, sum) = (g.virtual_like(&rows), g.virtual_like(&rows));
    g.reduce_to(REDUCE_MAX, &x, &max);
    let shifted = g.pointwise(SUB, &[&x, &max]);
    let e = g.pointwise(EXP, &[&shifted]);
    g.reduce_to(REDUCE_ADD, &e, &sum);
    g.pointwise_to(DIV, &[&e, &sum], &y);
    let values: Vec<f32> = numbers(2 * 3 * 5 * 17, 3).iter().map(|v| v * 20.0).collect();
    let at = [(1, cudnn.gpu.put(&values)), (2, cudnn.gpu.alloc(4 * values.len()))];

    cudnn.run(cudnn.plan(&g.operations).unwrap(), &at);

    let found: Vec<f32> = cudnn.gpu.get(at[1].1, values.len());
    for (row, found) in values.chunks(17).zip(found.chunks(17)) {
        let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
        for (x, f) in row.iter().zip(found) {
            assert!((f64::from(*f) - f64::from(*x).exp() / sum).abs() < 1e-6, "{x} {f}");
        }
    }
}

/// The f32 operand is rounded to the type of the other one before the product, as tensor cores need it.
#[test]
fn operands_of_a_product_are_rounded_to_its_type() {
    let cudnn = Cudnn::new();
    let dims = [1, 1, 8];
    let a = cudnn.tensor(&spec(1, FLOAT, &[1, 8, 8], &[64, 8, 1]));
    let b = cudnn.tensor(&spec(2, BFLOAT16, &[1, 8, 8], &[64, 8, 1]));
    let c = cudnn.tensor(&spec(3, FLOAT, &[1, 8, 8], &[64, 8, 1]));
    let plan = cudnn.plan(&[cudnn.try_matmul(&a, &b, &c, [None; 3]).unwrap()]).unwrap();
    let mut identity = vec![0f32; 64];
    (0..8).for_each(|i| identity[i * 9] = 1.0);
    let third = 1.0f32 / 3.0;
    let at = [(1, cudnn.gpu.put(&[third; 64])), (2, cudnn.gpu.put(&to_bf16(&identity))), (3, cudnn.gpu.alloc(4 * 64))];

    cudnn.run(plan, &at);

    let rounded = of_bf16(&[((third.to_bits() + 0x8000) >> 16) as u16])[0];
    assert_ne!(rounded, third);
    assert_eq!(cudnn.gpu.get::<f32>(at[2].1, 64), [rounded; 64], "{dims:?}");
}

#[test]
fn virtual_tensors_keep_f32_and_stored_ones_are_rounded_to_even() {
    let cudnn = Cudnn::new();
    let dims = [1, 1, 1, 4];
    let (x, one) = (cudnn.tensor(&spec(1, FLOAT, &dims, &packed(&dims))), cudnn.scalar(2, FLOAT));
    let y = cudnn.tensor(&spec(3, HALF, &dims, &packed(&dims)));
    let mut g = Graph::new(&cudnn);
    let between = g.virtual_tensor(HALF, &dims, &packed(&dims));
    g.pointwise_to(ADD, &[&x, &one], &between);
    g.pointwise_to(SUB, &[&between, &one], &y);
    let steps = [2f32.powi(-11), 3.0 * 2f32.powi(-11), -(2f32.powi(-13)), 65520.0];
    let scalar = 1.0f32;
    let at = [(1, cudnn.gpu.put(&steps)), (2, &raw const scalar as u64), (3, cudnn.gpu.alloc(8))];

    cudnn.run(cudnn.plan(&g.operations).unwrap(), &at);

    // Rounded in between, the first would be 0.
    assert_eq!(cudnn.gpu.get::<u16>(at[2].1, 4), [0x1000, 0x1600, 0x8800, 0x7c00]);
}

#[test]
fn stored_tensor_is_read_again_as_it_was_rounded() {
    let cudnn = Cudnn::new();
    let dims = [1, 1, 1, 4];
    let (x, one) = (cudnn.tensor(&spec(1, FLOAT, &dims, &packed(&dims))), cudnn.scalar(2, FLOAT));
    let between = cudnn.tensor(&spec(3, HALF, &dims, &packed(&dims)));
    let y = cudnn.tensor(&spec(4, FLOAT, &dims, &packed(&dims)));
    let mut g = Graph::new(&cudnn);
    g.pointwise_to(ADD, &[&x, &one], &between);
    g.pointwise_to(SUB, &[&between, &one], &y);
    let scalar = 1.0f32;
    let step = 2f32.powi(-11);
    let at = [
        (1, cudnn.gpu.put(&[step, 3.0 * step, 2.0 * step, 0.0])),
        (2, &raw const scalar as u64),
        (3, cudnn.gpu.alloc(8)),
        (4, cudnn.gpu.alloc(16)),
    ];

    cudnn.run(cudnn.plan(&g.operations).unwrap(), &at);

    assert_eq!(cudnn.gpu.get::<f32>(at[3].1, 4), [0.0, 4.0 * step, 2.0 * step, 0.0]);
}

/// Sequences of two and no tokens, of at most three, each of two numbers.
#[test]
fn tokens_that_a_ragged_tensor_does_not_have_are_neither_numbers_nor_written() {
    let cudnn = Cudnn::new();
    let (dims, strides) = ([2, 1, 3, 2], [6, 2, 2, 1]);
    let offsets = cudnn.tensor(&spec(9, INT32, &[3, 1, 1, 1], &[1; 4])).descriptor;
    let ragged = |id| cudnn.tensor(&Spec { ragged: Some(offsets), ..spec(id, FLOAT, &dims, &strides) });
    let (x, y, copy) = (ragged(1), cudnn.tensor(&spec(2, FLOAT, &dims, &packed(&dims))), ragged(3));
    let to_dense = cudnn.try_pointwise(IDENTITY, None, &[&x], &y).unwrap();
    let to_ragged = cudnn.try_pointwise(IDENTITY, None, &[&y], &copy).unwrap();
    let at = [
        (1, cudnn.gpu.put(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0])),
        (2, cudnn.gpu.alloc(48)),
        (3, cudnn.gpu.put(&[-1f32; 12])),
        (9, cudnn.gpu.put(&[0, 4, 4])),
    ];

    cudnn.run(cudnn.plan(&[to_dense, to_ragged]).unwrap(), &at);

    let dense: Vec<f32> = cudnn.gpu.get(at[1].1, 12);
    assert_eq!(dense[..4], [1.0, 2.0, 3.0, 4.0]);
    assert!(dense[4..].iter().all(|d| d.is_nan()), "{dense:?}");
    assert_eq!(cudnn.gpu.get::<f32>(at[2].1, 6), [1.0, 2.0, 3.0, 4.0, -1.0, -1.0]);
}

#[test]
fn operations_may_come_in_any_order_and_scalars_are_read_when_enqueued() {
    let cudnn = Cudnn::new();
    let dims = [1, 1, 1, 3];
    let (x, y) =
        (cudnn.tensor(&spec(1, FLOAT, &dims, &packed(&dims))), cudnn.tensor(&spec(2, FLOAT, &dims, &packed(&dims))));
    let mut g = Graph::new(&cudnn);
    let scaled = g.pointwise(MUL, &[&x, &cudnn.scalar(3, FLOAT)]);
    g.pointwise_to(SUB, &[&scaled, &x], &y);
    let backwards: Vec<P> = g.operations.iter().rev().copied().collect();
    let mut scale = Box::new(3.0f32);
    let at = [(1, cudnn.gpu.put(&[1f32, 2.0, 4.0])), (2, cudnn.gpu.alloc(12)), (3, &raw const *scale as u64)];
    let plan = cudnn.plan(&backwards).unwrap();

    assert_eq!(cudnn.execute(plan, &at, 0), 0);
    *scale = 100.0;

    assert_eq!(cudnn.gpu.get::<f32>(at[1].1, 3), [2.0, 4.0, 8.0]);
    assert_eq!(*scale, 100.0);
}

/// `[B, H, S, D]` to `[B, K, S, D]`: neighbouring heads form a group.
#[test]
fn reduction_sums_groups_of_heads() {
    let cudnn = Cudnn::new();
    let (dims, to) = ([1, 4, 1, 2], [1, 2, 1, 2]);
    let (x, y) =
        (cudnn.tensor(&spec(1, FLOAT, &dims, &packed(&dims))), cudnn.tensor(&spec(2, FLOAT, &to, &packed(&to))));
    let plan = cudnn.plan(&[cudnn.try_reduction(REDUCE_ADD, &x, &y).unwrap()]).unwrap();
    let at = [(1, cudnn.gpu.put(&[1f32, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0])), (2, cudnn.gpu.alloc(16))];

    cudnn.run(plan, &at);

    assert_eq!(cudnn.gpu.get::<f32>(at[1].1, 4), [3.0, 30.0, 7.0, 70.0]);
}

#[test]
fn unwritten_memory_reaches_every_result() {
    let cudnn = Cudnn::new();
    let dims = [1, 1, 1, 4];
    let (x, y) =
        (cudnn.tensor(&spec(1, FLOAT, &dims, &packed(&dims))), cudnn.tensor(&spec(2, FLOAT, &[1; 4], &[1; 4])));
    let plan = cudnn.plan(&[cudnn.try_reduction(REDUCE_MAX, &x, &y).unwrap()]).unwrap();
    let at = [(1, cudnn.gpu.alloc(16)), (2, cudnn.gpu.alloc(4))];

    cudnn.run(plan, &at);

    assert!(cudnn.gpu.get::<f32>(at[1].1, 1)[0].is_nan());
}
