//! All-reduce between threads: `cargo bench -p phalanx --bench collective -- RANKS BYTES [BYTES ...]`.
//!
//! Prints one line per size: ranks, bytes, median microseconds at rank 0. The counterpart is
//! `tests/peers/gloo_allreduce.py`.

use std::time::Instant;

use phalanx::collective::SliceOperations;
use phalanx::collective::local::LocalWorld;
use phalanx::collective::world::{World, WorldId};

fn main() -> anyhow::Result<()> {
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let (size, sizes) = match numbers.split_first() {
        Some((size, sizes)) if !sizes.is_empty() => (*size as u32, sizes.to_vec()),
        _ => (2, vec![1 << 10, 1 << 20]),
    };
    let id = WorldId { job: 1, generation: 1, incarnation: 1 };
    let world = LocalWorld::new(World::of_one_group(id, size)?);
    std::thread::scope(|scope| {
        for rank in 0..size {
            let (world, sizes) = (&world, &sizes);
            scope.spawn(move || run_rank(&mut world.communicator(0, rank).expect("a rank of the world"), sizes));
        }
    });
    Ok(())
}

fn run_rank(group: &mut impl SliceOperations, sizes: &[u64]) {
    for bytes in sizes {
        let mut values = vec![0.0f32; *bytes as usize / 4];
        let mut times = Vec::new();
        for _ in 0..20 {
            let start = Instant::now();
            group.all_reduce(&mut values).expect("no rank fails");
            times.push(start.elapsed());
        }
        times.sort_unstable();
        if group.position() == 0 {
            println!("local {} {bytes} {:.2}", group.size(), times[10].as_secs_f64() * 1e6);
        }
    }
}
