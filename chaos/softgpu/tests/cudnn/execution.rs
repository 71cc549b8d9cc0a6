//! Plans as work of a stream: order, capture, faults, workspaces, pointers.

use crate::attention::{Attention, DQ_ACCUMULATOR, Memory, O, Q, documents, rows};
use crate::builder::*;
use crate::reference::{Shape, to_bf16};
use crate::support::{P, assert_ends_with, cu, in_child};

fn shape() -> Shape {
    rows(1, 2, 1, 96, 16)
}

#[test]
fn execution_obeys_events_and_runs_on_the_handles_stream() {
    for seed in ["0", "1", "2", "3", "4"] {
        let cudnn = Cudnn::with(&[("SOFTGPU_SEED", seed)]);
        let dims = [1, 1, 1, 64];
        let (x, y) = (
            cudnn.tensor(&spec(1, FLOAT, &dims, &packed(&dims))),
            cudnn.tensor(&spec(2, FLOAT, &dims, &packed(&dims))),
        );
        let plan = cudnn.plan(&[cudnn.try_pointwise(IDENTITY, None, &[&x], &y).unwrap()]).unwrap();
        let (other, at) = (cudnn.gpu.new_stream(), [(1, cudnn.gpu.alloc(256)), (2, cudnn.gpu.alloc(256))]);
        cudnn.gpu.sync();

        cu!(cudnn.gpu, cuMemsetD32Async(at[0].1 => u64, 0x3f80_0000 => u32, 64 => usize, other => P));
        cudnn.gpu.after(other, cudnn.gpu.stream);
        assert_eq!(cudnn.execute(plan, &at, 0), 0);

        assert_eq!(cudnn.gpu.get::<f32>(at[1].1, 64), [1.0; 64], "seed {seed}");
    }
}

#[test]
fn missing_event_is_found_by_some_seed() {
    let is_right = |seed: u32| {
        let cudnn = Cudnn::with(&[("SOFTGPU_SEED", &seed.to_string())]);
        let (x, y) = (cudnn.tensor(&spec(1, FLOAT, &[1; 4], &[1; 4])), cudnn.tensor(&spec(2, FLOAT, &[1; 4], &[1; 4])));
        let plan = cudnn.plan(&[cudnn.try_pointwise(IDENTITY, None, &[&x], &y).unwrap()]).unwrap();
        let (other, at) = (cudnn.gpu.new_stream(), [(1, cudnn.gpu.alloc(16)), (2, cudnn.gpu.alloc(16))]);
        cudnn.gpu.sync();
        cu!(cudnn.gpu, cuMemsetD32Async(at[0].1 => u64, 0x3f80_0000 => u32, 4 => usize, other => P));
        assert_eq!(cudnn.execute(plan, &at, 0), 0);
        cudnn.gpu.get::<f32>(at[1].1, 1) == [1.0]
    };

    let found: Vec<bool> = (0..16).map(is_right).collect();

    assert!(found.contains(&false) && found.contains(&true), "{found:?}");
}

#[test]
fn captured_execution_runs_at_each_launch() {
    let cudnn = Cudnn::new();
    let (shape, stream) = (shape(), cudnn.gpu.stream);
    let memory = Memory::new(&cudnn, &shape);
    let plan = cudnn.plan(&Attention::new(&cudnn, &shape).forward()).unwrap();
    let workspace = cudnn.gpu.alloc(cudnn.workspace_bytes(plan));
    cudnn.gpu.sync();
    let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());

    cu!(cudnn.gpu, cuStreamBeginCapture_v2(stream => P, 1 => u32));
    assert_eq!(cudnn.execute(plan, &memory.of_forward(), workspace), 0);
    assert_eq!(cu!(cudnn.gpu, cuStreamEndCapture(stream => P, &raw mut graph => *mut P)), 0);
    cu!(cudnn.gpu, cuGraphInstantiateWithFlags(&raw mut exec => *mut P, graph => P, 0 => u64));
    assert!(memory.o().iter().all(|o| o.is_nan()), "nothing runs while it is captured");
    cu!(cudnn.gpu, cuGraphLaunch(exec => P, stream => P));
    let first = memory.o();
    cu!(cudnn.gpu, cuMemsetD16Async(memory.at(Q) => u64, 0x3f80 => u32, memory.qkv.len() => usize, stream => P));
    cu!(cudnn.gpu, cuGraphLaunch(exec => P, stream => P));
    let second = memory.o();

    let is_one = |o: &f32| (o - 1.0).abs() < 1.0 / 128.0;
    assert!(first.iter().all(|o| o.is_finite()) && !first.iter().all(is_one));
    assert!(second.iter().all(is_one), "the values of all tokens are 1");
}

#[test]
fn fault_strikes_the_execution_that_it_names_and_stays() {
    for (fault, n_before) in [("cudnn_attention_forward#2:719", 1), ("2:719", 1), ("cudnn_attention_forward:719", 0)] {
        let cudnn = Cudnn::with(&[("SOFTGPU_FAULT", fault), ("SOFTGPU_HOLD_US", "10000000")]);
        let shape = shape();
        let memory = Memory::new(&cudnn, &shape);
        let plan = cudnn.plan(&Attention::new(&cudnn, &shape).forward()).unwrap();
        let workspace = cudnn.gpu.alloc(cudnn.workspace_bytes(plan));
        cudnn.gpu.sync();

        let before = cudnn.gpu.stat("executions");
        let enqueued = [0; 2].map(|_: i32| cudnn.execute(plan, &memory.of_forward(), workspace));
        let code = cudnn.gpu.synchronize(cudnn.gpu.stream);
        let executed = cudnn.gpu.stat("executions") - before;
        let after = cudnn.execute(plan, &memory.of_forward(), workspace);
        cudnn.gpu.set("SOFTGPU_FAULT", "");

        assert_eq!((enqueued, code, executed, after), ([0; 2], 719, n_before, 5000), "{fault}");
    }
}

#[test]
fn hung_execution_occupies_its_stream() {
    let output = in_child("execution::hung_execution_occupies_its_stream", &[], || {
        let cudnn = Cudnn::with(&[("SOFTGPU_HANG", "cudnn_graph")]);
        let (x, y) = (cudnn.tensor(&spec(1, FLOAT, &[1; 4], &[1; 4])), cudnn.tensor(&spec(2, FLOAT, &[1; 4], &[1; 4])));
        let plan = cudnn.plan(&[cudnn.try_pointwise(IDENTITY, None, &[&x], &y).unwrap()]).unwrap();
        assert_eq!(cudnn.execute(plan, &[(1, cudnn.gpu.alloc(16)), (2, cudnn.gpu.alloc(16))], 0), 0);
        let other = cudnn.gpu.new_stream();
        let z = cudnn.gpu.alloc(4);
        cu!(cudnn.gpu, cuMemsetD32Async(z => u64, 5 => u32, 1 => usize, other => P));
        assert_eq!(cudnn.gpu.synchronize(other), 0);
        assert_eq!(cu!(cudnn.gpu, cuStreamQuery(cudnn.gpu.stream => P)), 600);
    });

    assert_ends_with(&output, 0);
}

#[test]
fn workspace_holds_nothing_from_one_execution_to_the_next() {
    let cudnn = Cudnn::new();
    let shape = shape();
    let memory = Memory::new(&cudnn, &shape);
    let plan = cudnn.plan(&Attention::new(&cudnn, &shape).forward()).unwrap();
    let bytes = cudnn.workspace_bytes(plan);
    // The plan's workspace is a part of this one: what lies beside it must stay.
    let workspace = cudnn.gpu.put(&vec![7u8; bytes + 64]);

    assert_eq!(cudnn.execute(plan, &memory.of_forward(), workspace + 32), 0);

    let found: Vec<u8> = cudnn.gpu.get(workspace, bytes + 64);
    assert_eq!((&found[..32], &found[32 + bytes..]), (&[7; 32][..], &[7; 32][..]));
    let n_left = found[32..][..bytes].iter().filter(|b| **b == 7).count();
    assert!(n_left < bytes / 16, "{n_left} of {bytes} bytes were left");
}

/// Documents whose number is known only when the plan is executed.
#[test]
fn workspace_that_documents_overlap_is_seen_in_the_results() {
    let cudnn = Cudnn::new();
    let shape = documents(&[8, 5], 0, 2, 2, 16);
    let memory = Memory::new(&cudnn, &shape);
    let plan = cudnn.plan(&Attention::new(&cudnn, &shape).forward()).unwrap();
    let bytes = cudnn.workspace_bytes(plan);
    assert!(bytes < 2 * memory.d_o.len());

    for (id, is_right) in [(None, true), (Some(Q), false), (Some(O), false)] {
        let workspace = id.map_or_else(|| cudnn.gpu.alloc(bytes), |id| memory.at(id));
        let expected = shape.attend(&memory.qkv, &memory.d_o).o;
        assert_eq!(cudnn.execute(plan, &memory.of_forward(), workspace), 0);
        let is_near = memory.o().iter().zip(&expected).all(|(o, e)| (f64::from(*o) - e).abs() < 1.0 / 64.0);
        assert_eq!(is_near, is_right, "{id:?}");
        let (values, n) = (to_bf16(&memory.qkv), 2 * memory.qkv.len());
        let from = values.as_ptr().cast_mut().cast();
        cu!(cudnn.gpu, cuMemcpyHtoDAsync_v2(memory.at(Q) => u64, from => P, n => usize, cudnn.gpu.stream => P));
    }
}

#[test]
fn wrong_pointers_are_refused() {
    let cudnn = Cudnn::new();
    let shape = shape();
    let memory = Memory::new(&cudnn, &shape);
    let plan = cudnn.plan(&Attention::new(&cudnn, &shape).backward()).unwrap();
    let bytes = cudnn.workspace_bytes(plan);
    let (workspace, short) = (cudnn.gpu.alloc(bytes), cudnn.gpu.alloc(bytes - 256));
    let good = memory.of_backward(true);
    let with = |id: i64, at: u64| good.iter().map(|(i, a)| (*i, if *i == id { at } else { *a })).collect::<Vec<_>>();
    let without = |id: i64| good.iter().copied().filter(|(i, _)| *i != id).collect::<Vec<_>>();

    let found = [
        cudnn.execute(plan, &good, workspace),
        cudnn.execute(plan, &good, 0),
        cudnn.execute(plan, &good, short),
        cudnn.execute(plan, &with(O, workspace), workspace),
        cudnn.execute(plan, &with(Q, 0), workspace),
        cudnn.execute(plan, &with(Q, memory.at(Q) + 2), workspace),
        cudnn.execute(plan, &with(O, memory.at(O) + 32), workspace),
        cudnn.execute(plan, &without(O), workspace),
        cudnn.execute(plan, &[&good[..], &[(99, workspace)]].concat(), workspace),
    ];

    assert_eq!(found, [0, 2002, 2000, 2000, 2002, 2003, 2000, 2000, 2000]);
    cudnn.gpu.sync();
}

#[test]
fn offsets_that_leave_the_memory_end_the_process() {
    let output = in_child("execution::offsets_that_leave_the_memory_end_the_process", &[], || {
        let cudnn = Cudnn::new();
        let shape = documents(&[8, 5], 0, 2, 2, 16);
        let plan = cudnn.plan(&Attention::new(&cudnn, &shape).forward()).unwrap();
        let memory = Memory::new(&cudnn, &shape);
        let wrong = cudnn.gpu.put(&[0, 8, 14].map(|start| start * shape.columns() as i64));
        let pointers: Vec<(i64, u64)> =
            memory.of_forward().iter().map(|(id, at)| (*id, if *id == 12 { wrong } else { *at })).collect();
        cudnn.run(plan, &pointers);
    });

    let stderr = assert_ends_with(&output, 87);
    assert!(stderr.contains("cudnn_attention_forward reaches"), "{stderr}");
}

#[test]
fn lengths_beyond_the_sequence_are_an_error() {
    let cudnn = Cudnn::new();
    let mut shape = documents(&[8, 5], 0, 2, 2, 16);
    let plan = cudnn.plan(&Attention::new(&cudnn, &shape).forward()).unwrap();
    shape.lengths = vec![8, 9];
    let memory = Memory::new(&cudnn, &shape);
    let workspace = cudnn.gpu.alloc(cudnn.workspace_bytes(plan));

    assert_eq!(cudnn.execute(plan, &memory.of_forward(), workspace), 0);
    let code = cudnn.gpu.synchronize(cudnn.gpu.stream);
    cudnn.gpu.set("SOFTGPU_FAULT", "");

    assert_eq!(code, 700);
}

/// The bits of gradients that go through an accumulator change with the seed, the others' do not.
#[test]
fn only_the_graph_without_an_accumulator_is_deterministic() {
    let gradients = |is_deterministic: bool, seed: u32| {
        let cudnn = Cudnn::with(&[("SOFTGPU_SEED", &seed.to_string())]);
        let shape = shape();
        let (mut attention, memory) = (Attention::new(&cudnn, &shape), Memory::new(&cudnn, &shape));
        attention.is_deterministic = is_deterministic;
        cudnn.run(cudnn.plan(&attention.forward()).unwrap(), &memory.of_forward());
        cudnn.run(cudnn.plan(&attention.backward()).unwrap(), &memory.of_backward(is_deterministic));
        memory.dqkv().iter().map(|d| d.to_bits()).collect::<Vec<_>>()
    };
    let differs = |d: bool| (1..6).any(|seed| gradients(d, seed) != gradients(d, 0));

    assert!(!differs(true));
    assert!(differs(false));
}

/// On sm_100 the proposed engines sum in no order; one that is not proposed does, if it is told to.
#[test]
fn engine_of_sm_100_is_deterministic_by_its_knob_only() {
    let gradients = |stages: Option<i64>, seed: u32| {
        let cudnn = Cudnn::with(&[("SOFTGPU_ARCH", "100"), ("SOFTGPU_SEED", &seed.to_string())]);
        let shape = shape();
        let (attention, memory) = (Attention::new(&cudnn, &shape), Memory::new(&cudnn, &shape));
        cudnn.run(cudnn.plan(&attention.forward()).unwrap(), &memory.of_forward());
        let graph = cudnn.try_graph(&attention.backward()).unwrap();
        let config = match stages {
            Some(stages) => cudnn.config(graph, 5, &[(24, 31), (14, stages)]).unwrap(),
            None => cudnn.configs(graph).unwrap()[0],
        };
        cudnn.run(cudnn.try_plan(config).unwrap(), &memory.of_backward(true));
        memory.dqkv().iter().map(|d| d.to_bits()).collect::<Vec<_>>()
    };
    let differs = |stages| (1..6).any(|seed| gradients(stages, seed) != gradients(stages, 0));

    assert!(differs(None) && differs(Some(1)));
    assert!(!differs(Some(2)));
}

/// Before 9.6.0 the program sets accumulators to zero.
#[test]
fn accumulator_of_an_old_version_must_be_zero_before() {
    for (version, is_zeroed, expected) in [("90500", false, false), ("90500", true, true), ("91901", false, true)] {
        let cudnn = Cudnn::with(&[("SOFTGPU_CUDNN_VERSION", version)]);
        let shape = shape();
        let (mut attention, memory) = (Attention::new(&cudnn, &shape), Memory::new(&cudnn, &shape));
        attention.is_deterministic = false;
        let n = shape.heads * shape.tokens * shape.width;
        if is_zeroed {
            let at = memory.at(DQ_ACCUMULATOR);
            cu!(cudnn.gpu, cuMemsetD32Async(at => u64, 0 => u32, n => usize, cudnn.gpu.stream => P));
        }

        cudnn.run(cudnn.plan(&attention.forward()).unwrap(), &memory.of_forward());
        cudnn.run(cudnn.plan(&attention.backward()).unwrap(), &memory.of_backward(false));

        assert_eq!(memory.dqkv().iter().all(|d| d.is_finite()), expected, "{version} {is_zeroed}");
        assert_eq!(cu!(cudnn.gpu, cudnnGetVersion()), version.parse().unwrap());
    }
}
