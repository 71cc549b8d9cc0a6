//! Reproducible gradients: the same bits for every number of ranks that share the data, the state or the layers.
//!
//! The microbatches of a step are the leaves of a fixed tree ([`crate::tree`]). A rank sums its own microbatches to whole
//! nodes; ranks then exchange parts of these nodes, and the owner of a part completes its sum. Norm and loss are sums over
//! blocks, parameters and microbatches in an order that does not depend on the mesh. The gradients of a parameter with
//! several uses (a tied embedding) are summed separately for each use, since the uses may lie on different stages.
//!
//! Tensor-parallel ranks split the sums inside of products, so the bits depend on their number: for a fixed number of
//! them, all arrangements of the other ranks agree.
//!
//! Reproducibility needs memory for a few gradients instead of one, which is why it is optional.

use super::buckets::buckets;
use super::clip::coefficient;
use super::data_parallel::{Insertions, last_writes, like};
use crate::mesh::{Axes, Axis, Group};
use crate::program::{Binding, Collective, CollectiveKind, DType, Kind, Op, Phase, Program, Role, Site, ValueId, op};
use crate::tree::{Step, leaves_of, nodes_of, steps};

const DATA: Group = Group::over(&[Axis::DpReplicate, Axis::DpShard]);
const SITE: Site = Site { phase: Phase::Optimizer, block: None, microbatch: 0 };
/// Elements of a block, whose squares are summed first; shards consist of whole blocks.
pub const BLOCK: usize = 256;

/// Gradient of one use of a parameter, microbatch by microbatch.
pub type Leaves = (usize, Vec<ValueId>);

/// Sums every gradient along the tree; returns this rank's part of each.
pub fn sum_along_tree(
    program: &mut Program,
    grads: &[Leaves],
    n_leaves: usize,
    bucket_bytes: usize,
) -> Vec<(usize, ValueId)> {
    let (n_ranks, rank) = (program.mesh_rank.group_size(DATA), program.mesh_rank.position(DATA));
    let own: Vec<(usize, Vec<ValueId>)> = own_nodes(program, grads, leaves_of(n_leaves, n_ranks, rank).start, n_leaves);
    let totals = if n_ranks == 1 {
        own.into_iter().map(|(p, mut n)| (p, n.remove(0))).collect()
    } else {
        exchange(program, &own, n_leaves, bucket_bytes)
    };
    let mut kept: Vec<(usize, ValueId)> = Vec::new();
    for (param, total) in totals {
        match kept.iter_mut().find(|(p, _)| *p == param) {
            None => kept.push((param, total)),
            Some((_, sum)) => {
                let both = like(program, total);
                program.push(Op::Add(op::Add), vec![*sum, total], vec![both], SITE);
                *sum = both;
            }
        }
    }
    kept
}

/// Sums this rank's microbatches to whole nodes as soon as they are available. A single rank sums the whole tree.
fn own_nodes(program: &mut Program, grads: &[Leaves], first: usize, n_leaves: usize) -> Vec<(usize, Vec<ValueId>)> {
    let written = last_writes(program);
    let mut insert = Insertions::default();
    let (n_ranks, rank) = (program.mesh_rank.group_size(DATA), program.mesh_rank.position(DATA));
    let n_own = leaves_of(n_leaves, n_ranks, rank).len();
    let mut nodes = Vec::new();
    for (param, leaves) in grads {
        // Microbatches after the rank's last leaf only keep it in step with the other ranks.
        let leaves = &leaves[..n_own];
        let mut stack: Vec<(usize, u32, ValueId)> = Vec::new();
        for (i, leaf) in leaves.iter().enumerate() {
            stack.push((first + i, 0, *leaf));
            let at = written[leaf.0 as usize];
            while let [.., (a, level, left), (_, other, right)] = stack[..] {
                if level != other || !a.is_multiple_of(2 << level) {
                    break;
                }
                let sum = insert.add(program, at, Some(left), right);
                stack.truncate(stack.len() - 2);
                stack.push((a, level + 1, sum));
            }
        }
        while let ([.., (a, level, left), (.., right)], true) = (&stack[..], n_ranks == 1) {
            let (a, level, left, right) = (*a, *level, *left, *right);
            let at = written[leaves[n_own - 1].0 as usize];
            let sum = insert.add(program, at, Some(left), right);
            stack.truncate(stack.len() - 2);
            stack.push((a, level, sum));
        }
        nodes.push((*param, stack.into_iter().map(|(.., v)| v).collect()));
    }
    insert.apply(program);
    nodes
}

/// Every rank receives its part of all nodes and sums it; parts of unsharded gradients are gathered again.
fn exchange(
    program: &mut Program,
    own: &[(usize, Vec<ValueId>)],
    n_leaves: usize,
    bucket_bytes: usize,
) -> Vec<(usize, ValueId)> {
    let mesh_rank = program.mesh_rank;
    let (n_ranks, rank) = (mesh_rank.group_size(DATA), mesh_rank.position(DATA));
    let n_nodes = (0..n_ranks).map(|r| nodes_of(leaves_of(n_leaves, n_ranks, r)).len()).max().unwrap_or(1);
    let send = Collective { unit: BLOCK, ..Collective::new(CollectiveKind::AllToAll, DATA) };
    let gather = Collective { kind: CollectiveKind::AllGather, ..send };
    let mut totals = Vec::new();
    let indices: Vec<usize> = (0..own.len()).collect();
    for bucket in buckets(program, &indices, |i| own[i].0, bucket_bytes) {
        let part_len = |p: &Program, i: usize| send.part(p.value(own[i].1[0]).n_elements(), n_ranks, rank).len();
        let mut received: Vec<Vec<ValueId>> = vec![Vec::new(); bucket.len()];
        for node in 0..n_nodes {
            // A rank with fewer nodes repeats one; receivers ignore the copy.
            let reads: Vec<ValueId> =
                bucket.iter().map(|i| own[*i].1.get(node).copied().unwrap_or(own[*i].1[0])).collect();
            let mut writes = Vec::new();
            for (i, received) in bucket.iter().zip(&mut received) {
                let len = n_ranks * part_len(program, *i);
                let value = program.add_value("nodes", &[len], DType::F32, Kind::Gradient);
                received.push(value);
                writes.push(value);
            }
            program.push(Op::Start(op::Start(send)), reads, writes.clone(), SITE);
            program.push(Op::Await(op::Await(send)), writes, vec![], SITE);
        }
        let mut parts = Vec::new();
        for (i, received) in bucket.iter().zip(received) {
            let len = part_len(program, *i);
            let part = program.add_value("d.part", &[len], DType::F32, Kind::Gradient);
            program.push(Op::TreeSum(op::TreeSum { n_leaves, n_ranks }), received, vec![part], SITE);
            parts.push(part);
        }
        if mesh_rank.mesh.dp_replicate > 1 {
            let whole: Vec<ValueId> = bucket.iter().map(|i| like(program, own[*i].1[0])).collect();
            program.push(Op::Start(op::Start(gather)), parts, whole.clone(), SITE);
            program.push(Op::Await(op::Await(gather)), whole.clone(), vec![], SITE);
            parts = bucket.iter().zip(whole).map(|(i, whole)| shard_of(program, own[*i].0, whole)).collect();
        }
        totals.extend(bucket.iter().map(|i| own[*i].0).zip(parts));
    }
    totals
}

/// The elements of a whole gradient that this rank updates.
fn shard_of(program: &mut Program, param: usize, whole: ValueId) -> ValueId {
    let updated = program.params[param].updated.clone();
    if updated.len() == program.value(whole).n_elements() {
        return whole;
    }
    let shard = program.add_value("d.shard", &[updated.len()], DType::F32, Kind::Gradient);
    program.push(Op::Slice(op::Slice { start: updated.start }), vec![whole], vec![shard], SITE);
    shard
}

/// Appends the norm over `grads`, the clipping coefficient, and the loss over all microbatches; returns the coefficient.
///
/// `losses` are those of this rank's microbatches, if it has the head of the model; each has the shape `loss_shape`.
pub fn clip_and_loss(
    program: &mut Program,
    grads: &[(usize, ValueId)],
    losses: &[ValueId],
    loss_shape: &[usize],
    n_leaves: usize,
    max_norm: Option<f64>,
) -> ValueId {
    let hyper = super::optimizer::hyper(program);
    let mesh_rank = program.mesh_rank;
    let own = leaves_of(n_leaves, mesh_rank.group_size(DATA), mesh_rank.position(DATA));
    let counts_loss = mesh_rank.on(Axis::Tp) == 0;
    let losses: Vec<(usize, ValueId)> = own.zip(losses.iter().copied()).filter(|_| counts_loss).collect();
    let squares: Vec<(usize, ValueId)> = grads
        .iter()
        .map(|(param, grad)| (*param, squares(program, *param, *grad)))
        .collect::<Vec<_>>()
        .into_iter()
        .filter(|(param, _)| program.params[*param].owned && mesh_rank.position(DATA) == 0)
        .collect();
    let n_params = program.params.len();
    let n_losses = n_leaves * loss_shape.iter().product::<usize>();
    let vectors = [(n_losses, losses), (n_params, squares)].map(|(len, terms)| {
        let vector = program.add_value("terms", &[len], DType::F64, Kind::Activation);
        let places = terms.iter().map(|(at, _)| *at).collect();
        program.push(
            Op::Assemble(op::Assemble { places }),
            terms.into_iter().map(|(_, v)| v).collect(),
            vec![vector],
            SITE,
        );
        vector
    });
    if mesh_rank.mesh.size() > 1 {
        program.bindings.push(Binding::new(Role::OwnLoss, vectors[0]));
    }
    let totals = over_world(program, vectors);
    let loss = program.add_value("loss_sum", loss_shape, DType::F64, Kind::Output);
    program.push(Op::Sum(op::Sum), vec![totals[0]], vec![loss], SITE);
    program.bindings.push(Binding::new(Role::LossSum, loss));
    coefficient(program, vec![totals[1], hyper], max_norm)
}

/// Sum of squares of a parameter's gradient. The blocks are added in order, on whichever ranks they lie.
fn squares(program: &mut Program, param: usize, grad: ValueId) -> ValueId {
    let shards = super::fully_sharded::GROUP;
    let n_blocks = program.value(grad).n_elements().div_ceil(BLOCK);
    let mut blocks = program.add_value("squares", &[n_blocks], DType::F64, Kind::Activation);
    program.push(Op::SumSquaresBlocks(op::SumSquaresBlocks { block: BLOCK }), vec![grad], vec![blocks], SITE);
    let n_all = program.params[param].shape.iter().product::<usize>().div_ceil(BLOCK);
    if n_all != n_blocks || program.mesh_rank.group_size(shards) > 1 {
        let all = program.add_value("squares", &[n_all], DType::F64, Kind::Activation);
        let gather = Collective::new(CollectiveKind::AllGather, shards);
        program.push(Op::Start(op::Start(gather)), vec![blocks], vec![all], SITE);
        program.push(Op::Await(op::Await(gather)), vec![all], vec![], SITE);
        blocks = all;
    }
    let sum = program.add_value("sum_squares", &[], DType::F64, Kind::Output);
    program.push(Op::Sum(op::Sum), vec![blocks], vec![sum], SITE);
    let binding = Binding::new(Role::GradSumSquares, sum);
    program.bindings.push(Binding { microbatch: param as u32, ..binding });
    sum
}

/// One rank fills each element of the vectors and the others have zero there, so the sum is exact.
fn over_world(program: &mut Program, vectors: [ValueId; 2]) -> [ValueId; 2] {
    let mesh = program.mesh_rank.mesh;
    let axes: Vec<Axis> = Axis::ALL.into_iter().filter(|a| mesh.axis(*a) > 1).collect();
    if axes.is_empty() {
        return vectors;
    }
    let totals = vectors.map(|v| like(program, v));
    let c = Collective::new(CollectiveKind::AllReduce, Group { axes: Axes::of(&axes), run: None });
    program.push(Op::Start(op::Start(c)), vectors.to_vec(), totals.to_vec(), SITE);
    program.push(Op::Await(op::Await(c)), totals.to_vec(), vec![], SITE);
    totals
}

/// How a rank sums the nodes that it receives for its part of a gradient: the sender of each node and its index among the
/// sender's nodes, and the steps over the nodes.
pub fn plan_of_sum(n_leaves: usize, n_ranks: usize) -> (Vec<(usize, usize)>, Vec<Step>) {
    let (mut senders, mut nodes) = (Vec::new(), Vec::new());
    for rank in 0..n_ranks {
        for (i, node) in nodes_of(leaves_of(n_leaves, n_ranks, rank)).into_iter().enumerate() {
            senders.push((rank, i));
            nodes.push(node);
        }
    }
    (senders, steps(&nodes))
}
