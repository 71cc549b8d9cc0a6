//! Reference definitions of the operations: each member's values and its expected results.

use half::{bf16, f16};

use phalanx_device::parts::part;
use phalanx_device::{Collective, Element, SliceOperations};

/// An element with test values whose sums round, so that results depend on the order of summation.
pub trait Value: Element + PartialEq {
    fn of(x: f64) -> Self;
    fn sum_of(values: &[Self]) -> Self;
}

impl Value for f32 {
    fn of(x: f64) -> f32 {
        x as f32
    }
    fn sum_of(values: &[f32]) -> f32 {
        values[1..].iter().fold(values[0], |sum, x| sum + x)
    }
}
impl Value for bf16 {
    fn of(x: f64) -> bf16 {
        bf16::from_f64(x)
    }
    fn sum_of(values: &[bf16]) -> bf16 {
        bf16::from_f32(values[1..].iter().fold(values[0].to_f32(), |sum, x| sum + x.to_f32()))
    }
}
impl Value for f16 {
    fn of(x: f64) -> f16 {
        f16::from_f64(x)
    }
    fn sum_of(values: &[f16]) -> f16 {
        f16::from_f32(values[1..].iter().fold(values[0].to_f32(), |sum, x| sum + x.to_f32()))
    }
}
impl Value for f64 {
    fn of(x: f64) -> f64 {
        x
    }
    fn sum_of(values: &[f64]) -> f64 {
        values[1..].iter().fold(values[0], |sum, x| sum + x)
    }
}
impl Value for i32 {
    fn of(x: f64) -> i32 {
        (x * 1000.0) as i32
    }
    fn sum_of(values: &[i32]) -> i32 {
        values.iter().fold(0, |sum, x| sum.wrapping_add(*x))
    }
}

/// The values of the member at `position`.
pub fn values<T: Value>(position: u32, n: usize, salt: u32) -> Vec<T> {
    (0..n as u32)
        .map(|i| {
            let x = (i ^ salt).wrapping_mul(0x9e37_79b9).wrapping_add(position.wrapping_mul(0x85eb_ca6b));
            T::of(f64::from(x ^ (x >> 15)) / 65_536.0 - 32_768.3)
        })
        .collect()
}

/// Sum over `size` members, in order of position.
pub fn sum<T: Value>(size: u32, n: usize, salt: u32) -> Vec<T> {
    let all: Vec<Vec<T>> = (0..size).map(|position| values(position, n, salt)).collect();
    (0..n).map(|i| T::sum_of(&all.iter().map(|values| values[i]).collect::<Vec<T>>())).collect()
}

/// Panics at the first element that differs in a bit.
pub fn assert_same<T: Value>(found: &[T], expected: &[T], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert_eq!(bytemuck::bytes_of(a), bytemuck::bytes_of(b), "{what}: element {i} of {}", found.len());
    }
}

/// Runs every operation once on slices; panics at the first result that differs in a bit from its definition.
pub fn check_every_kind<T: Value>(group: &mut dyn Collective, n: usize, unit: usize, salt: u32) {
    let (position, size) = (group.position(), group.size());
    let own = part(n, unit, size, position);
    let part_of = |all: &[T], i: u32| all[part(n, unit, size, i)].to_vec();

    let mut reduced = values::<T>(position, n, salt);
    group.all_reduce(&mut reduced).unwrap();
    assert_same(&reduced, &sum::<T>(size, n, salt), "all_reduce");

    let mut output = values::<T>(9, own.len(), salt);
    group.reduce_scatter(&values::<T>(position, n, salt), &mut output, unit).unwrap();
    assert_same(&output, &part_of(&sum::<T>(size, n, salt), position), "reduce_scatter");

    let whole = values::<T>(7, n, salt);
    let mut gathered = values::<T>(9, n, salt);
    group.all_gather(&whole[own.clone()], &mut gathered, unit).unwrap();
    assert_same(&gathered, &whole, "all_gather");

    let mut exchanged = values::<T>(9, own.len() * size as usize, salt);
    group.all_to_all(&values::<T>(position, n, salt), &mut exchanged, unit).unwrap();
    let expected: Vec<T> = (0..size).flat_map(|peer| part_of(&values::<T>(peer, n, salt), position)).collect();
    assert_same(&exchanged, &expected, "all_to_all");

    let root = salt % size;
    let mut copied = values::<T>(position, n, salt);
    group.broadcast(&mut copied, root).unwrap();
    assert_same(&copied, &values::<T>(root, n, salt), "broadcast");

    for by in [1, -1, 5] {
        let mut shifted = values::<T>(9, n, salt);
        group.shift(&values::<T>(position, n, salt), &mut shifted, by).unwrap();
        let source = (i64::from(position) - i64::from(by)).rem_euclid(i64::from(size)) as u32;
        assert_same(&shifted, &values::<T>(source, n, salt), "shift");
    }
    check_transfers::<T>(group, n, salt);
    group.barrier().unwrap();
}

/// Every member except the last sends to the next member, which sends half of the values back.
fn check_transfers<T: Value>(group: &mut dyn Collective, n: usize, salt: u32) {
    let (position, size) = (group.position(), group.size());
    if position > 0 {
        let mut received = values::<T>(9, n, salt);
        group.recv(&mut received, position - 1).unwrap();
        assert_same(&received, &values::<T>(position - 1, n, salt), "recv from below");
        group.send(&received[..n / 2], position - 1).unwrap();
    }
    if position + 1 < size {
        group.send(&values::<T>(position, n, salt), position + 1).unwrap();
        let mut back = values::<T>(9, n / 2, salt);
        group.recv(&mut back, position + 1).unwrap();
        assert_same(&back, &values::<T>(position, n, salt)[..n / 2], "recv from above");
    }
}
