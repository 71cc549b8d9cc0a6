use super::*;
use crate::plan::cost::{NodeSpan, collective_seconds, instr_seconds};
use crate::plan::hardware::HardwareError;
use crate::program::Cost;
use crate::world::Kind;
use proptest::prelude::*;

const GIB: f64 = (1u64 << 30) as f64;

fn at(n_nodes: u32, per_node: u32) -> NodeSpan {
    NodeSpan { n_nodes, per_node }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

#[test]
fn every_shipped_description_is_valid_and_round_trips_through_json() {
    for name in Hardware::NAMES {
        let hardware = Hardware::named(name).unwrap();

        let written = serde_json::to_string(&hardware).unwrap();

        assert_eq!(hardware.name, name);
        assert_eq!(serde_json::from_str::<Hardware>(&written).unwrap().validate(), Ok(hardware));
    }
}

#[test]
fn impossible_descriptions_are_refused() {
    let no_memory = Hardware { memory_bytes: 0, ..h100() };
    let magic = Hardware { memory_fraction: 1.5, ..h100() };

    let expected = "hardware `h100`: `memory_bytes` is 0, expected more than 0";
    assert_eq!(no_memory.validate().unwrap_err().to_string(), expected);
    let above = HardwareError::AboveOne { name: "h100".into(), field: "memory_fraction", found: 1.5 };
    assert_eq!(magic.validate(), Err(above));
}

#[test]
fn large_product_runs_at_its_best_rate_and_a_tiny_one_takes_a_launch() {
    let seconds =
        |matmul_flops| instr_seconds(&h100(), "matmul", &Cost { matmul_flops, ..Cost::default() }, Compute::Bf16);

    assert!((seconds(1e13) * 989e12 * 0.76 / 1e13 - 1.0).abs() < 1e-3);
    assert!((4e-6..1e-5).contains(&seconds(1e3)));
}

#[test]
fn streaming_runs_at_memory_speed() {
    let cost = Cost { streamed_bytes: 3350e9 * 0.85, ..Cost::default() };

    assert!(close(instr_seconds(&h100(), "add", &cost, Compute::F32), 1.0));
}

// Thakur et al. 2005, §3: (n - 1) a + (n - 1) / n B b each for reduce-scatter and all-gather.
#[test]
fn large_all_reduces_take_two_passes_of_a_ring() {
    let hardware = h100();
    let (a, b) = (hardware.intra_node.hop_s, 1.0 / (450e9 * 0.8));
    let half = 7.0 * a + 7.0 / 8.0 * GIB * b;

    let seconds = |kind| collective_seconds(&hardware, kind, GIB, at(1, 8)) - hardware.collective_start_s;

    assert!(close(seconds(Kind::AllGather), half));
    assert!(close(seconds(Kind::ReduceScatter), half));
    assert!(close(seconds(Kind::AllReduce), 2.0 * half));
}

#[test]
fn small_all_reduces_take_a_tree() {
    let hardware = h100();

    let seconds = collective_seconds(&hardware, Kind::AllReduce, 8.0, at(1, 8)) - hardware.collective_start_s;

    assert!(close(seconds, 2.0 * 3.0 * (hardware.intra_node.hop_s + 8.0 / (450e9 * 0.8))));
}

// With all adapters in use, a node sends each byte of the whole once, not eight times.
#[test]
fn every_member_sends_its_share_between_nodes() {
    let hardware = h100();
    let one_adapter = 2.0 * 3.0 / 4.0 * GIB / (50e9 * 0.8);

    let four_nodes = collective_seconds(&hardware, Kind::AllReduce, GIB, at(4, 8));
    let one_node = collective_seconds(&hardware, Kind::AllReduce, GIB, at(1, 8));

    assert!((four_nodes - one_node - one_adapter / 8.0).abs() < 1e-4);
}

#[test]
fn group_of_one_has_no_cost() {
    assert_eq!(collective_seconds(&h100(), Kind::AllReduce, GIB, NodeSpan::of(&[3])), 0.0);
}

#[test]
fn placement_counts_nodes_and_the_fewest_members() {
    assert_eq!(NodeSpan::of(&[0, 0, 1, 1, 1, 5, 5]), at(3, 2));
}

proptest! {
    #[test]
    fn more_bytes_and_more_nodes_never_take_less(
        bytes in 1f64..1e10, more in 1f64..4.0, nodes in 1u32..64, per_node in 1u32..9,
    ) {
        let hardware = h100();
        let reducing = [Kind::AllReduce, Kind::AllGather, Kind::ReduceScatter];
        for kind in reducing.into_iter().chain([Kind::AllToAll, Kind::Broadcast { root: 0 }, Kind::Shift { by: 1 }]) {
            let seconds = |bytes, nodes| collective_seconds(&hardware, kind, bytes, at(nodes, per_node));
            prop_assert!(seconds(bytes * more, nodes) >= seconds(bytes, nodes));
            prop_assert!(seconds(bytes, nodes + 1) >= seconds(bytes, nodes), "{:?}", kind);
        }
    }
}

#[test]
fn logits_count_as_wide_as_the_device_stores_them() {
    let gpu = crate::target::Nowhere { half_copies: true, ..Default::default() };
    let of = |activation_bytes: usize| {
        let w = Workload { activation_bytes, head_streamed_bytes: [8, 12], ..llama_70b(8) }.on(&gpu);
        (w.logit_bytes, w.head_streamed_bytes)
    };

    assert_eq!([of(2), of(4)], [(2, [4, 6]), (4, [8, 12])]);
}
