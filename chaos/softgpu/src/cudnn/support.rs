//! Which graphs have an engine, and what it needs.
//!
//! Source: cuDNN 9.19.1 asked for plans of attention without a GPU, and the checks of NVIDIA's cudnn-frontend 1.32 (MIT),
//! `node/scaled_dot_product_flash_attention.h` and `node/sdpa_support_surface.h`. Where cuDNN takes a graph and computes
//! wrong numbers (strides of workspaces), the graph is refused here.

use super::graph::Graph;
use super::operation::{Reduction, Work};
use super::status::{
    NOT_SUPPORTED, NOT_SUPPORTED_ARCH, NOT_SUPPORTED_LAYOUT, NOT_SUPPORTED_PATTERN, NOT_SUPPORTED_SHAPE,
    NOT_SUPPORTED_TYPE, Outcome, refuse, refuse_aloud,
};
use super::tensor::{DataType, Tensor};
use crate::cublaslt::element::Element;
use crate::{device, environment};
use std::ffi::CStr;

/// What an engine is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    Forward,
    Backward,
    /// At most one product, with pointwise operations and reductions.
    Other,
}

/// An engine for one graph.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Support {
    pub pattern: Pattern,
    pub workspace_bytes: usize,
    /// What operands of its products are rounded to, if they are not 16-bit types themselves.
    pub half: Option<Element>,
}

/// Values of `SOFTGPU_CUDNN_REFUSE`: graphs without an engine, and `first`: the first engine of each graph has no plan.
pub const REFUSALS: [&str; 4] = ["forward", "backward", "other", "first"];

/// The entries of such a value.
pub fn refused(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|r| !r.is_empty())
}

/// Whether the setting names this.
pub fn is_refused(what: &str) -> bool {
    refused(&environment::text("SOFTGPU_CUDNN_REFUSE")).any(|r| r == what)
}

impl Pattern {
    /// The kernel's name, for faults and messages.
    pub fn kernel(self) -> &'static CStr {
        match self {
            Pattern::Forward => c"cudnn_attention_forward",
            Pattern::Backward => c"cudnn_attention_backward",
            Pattern::Other => c"cudnn_graph",
        }
    }

    fn of(graph: &Graph) -> Outcome<Pattern> {
        let n_reductions = |r| graph.nodes.iter().filter(|n| matches!(n.work, Work::Reduction(of) if of == r)).count();
        match (products(graph).count(), n_reductions(Reduction::Max), n_reductions(Reduction::Add)) {
            (2, 1, 1) => Ok(Pattern::Forward),
            (5, 0, 1 | 3) => Ok(Pattern::Backward),
            (0 | 1, ..) => Ok(Pattern::Other),
            (n, ..) => refuse(NOT_SUPPORTED_PATTERN, format_args!("{n} products that are not those of attention")),
        }
    }
}

/// The engines of a graph, the best first.
///
/// # Errors
/// Where cuDNN has none.
pub fn engines(graph: &Graph) -> Outcome<[Support; 2]> {
    let pattern = Pattern::of(graph)?;
    let name = match pattern {
        Pattern::Forward => "forward",
        Pattern::Backward => "backward",
        Pattern::Other => "other",
    };
    if is_refused(name) {
        return refuse(NOT_SUPPORTED, format_args!("no engine for this graph, by SOFTGPU_CUDNN_REFUSE"));
    }
    if pattern != Pattern::Other {
        check_attention(graph, pattern)?;
    }
    let half = products(graph).next().and_then(|(a, ..)| a.dtype.half());
    Ok(workspace_bytes(graph, pattern).map(|workspace_bytes| Support { pattern, workspace_bytes, half }))
}

/// The engine of sm_100 that can sum gradients in a fixed order, which heuristics do not propose.
/// Source: the frontend's `override_heuristics_query`.
pub const ORDERED: usize = 5;

/// Whether the device sums the gradients of this graph in a fixed order by that engine only.
pub fn has_ordered(graph: &Graph) -> bool {
    device::capability() / 10 == 10 && Pattern::of(graph) == Ok(Pattern::Backward)
}

/// Whether blocks of a product are added to what a tensor in memory holds.
pub fn is_accumulator(graph: &Graph, tensor: usize) -> bool {
    let is_product = |n: usize| matches!(graph.nodes[n].work, Work::Matmul { .. });
    graph.is_workspace(tensor) && graph.producers[tensor].is_some_and(is_product)
}

/// Those of cuDNN 9.19 for whole rows on sm_90 (seen), for both engines: a forward pass needs next to nothing, a backward pass
/// dQ in f32, and the gradients of the scores too where it has no accumulator of the program. Ragged sequences need a
/// little more here, so that a program asks.
fn workspace_bytes(graph: &Graph, pattern: Pattern) -> [usize; 2] {
    let Some((q, _, scores)) = products(graph).next() else { return [0; 2] };
    let (&[b, h, s_q, s_kv], Some(d)) = (&*scores.dims, q.dims.last()) else { return [0; 2] };
    let is_ragged = graph.tensors.iter().any(|t| t.ragged.is_some());
    let lists = if is_ragged { (b + 1) * 128 } else { 0 };
    let has_accumulator = (0..graph.tensors.len()).any(|t| is_accumulator(graph, t));
    let [rows, columns] = [s_q, s_kv].map(|s| s.next_multiple_of(64));
    let gradients = if has_accumulator { 0 } else { 2 * b * h * rows * columns };
    let dq = 4 * b * h * s_q * d;
    match pattern {
        Pattern::Other => [0; 2],
        Pattern::Forward => [256 + lists, 0],
        Pattern::Backward if has_accumulator => [dq + 256 + lists, 2 * dq + 128 + lists],
        Pattern::Backward => [dq + gradients + 256 + lists, dq + gradients + 128 + lists],
    }
}

/// Operands and output of each product.
fn products(graph: &Graph) -> impl Iterator<Item = (&Tensor, &Tensor, &Tensor)> {
    let tensor = |t: usize| &*graph.tensors[t];
    let products = graph.nodes.iter().filter(|n| matches!(n.work, Work::Matmul { .. }));
    products.map(move |n| (tensor(n.inputs[0]), tensor(n.inputs[1]), tensor(n.output)))
}

fn check_attention(graph: &Graph, pattern: Pattern) -> Outcome {
    let (first, ..) = products(graph).next().expect("attention has products");
    let Some(half) = first.dtype.half() else {
        return refuse(NOT_SUPPORTED_TYPE, format_args!("attention of {:?}: HALF or BFLOAT16 is needed", first.dtype));
    };
    for (i, t) in graph.tensors.iter().enumerate() {
        if t.dims.len() != 4 {
            return refuse(NOT_SUPPORTED_SHAPE, format_args!("tensor {} of attention has {:?}", t.id, t.dims));
        }
        if graph.is_workspace(i) {
            check_workspace(t)?;
        }
    }
    for (a, b, c) in products(graph) {
        for t in [a, b, c] {
            check_operand(t, half)?;
        }
        if !a.is_virtual && !b.is_virtual {
            check_width(a.dims[3])?;
        }
    }
    check_ragged(graph, pattern)?;
    if pattern == Pattern::Backward { check_statistics(graph) } else { Ok(()) }
}

/// cuDNN 9.19 has engines for multiples of 8 up to 256 on sm_90 (seen); that older devices end at 128 is our reading.
fn check_width(d: usize) -> Outcome {
    let max = if device::capability() >= 90 { 256 } else { 128 };
    if d.is_multiple_of(8) && d <= max {
        return Ok(());
    }
    refuse(NOT_SUPPORTED_SHAPE, format_args!("heads of width {d}: multiples of 8 up to {max} have engines"))
}

/// Heads must be contiguous and rows aligned to 16 bytes, or they could not be loaded as tiles.
fn check_operand(t: &Tensor, half: Element) -> Outcome {
    let id = t.id;
    if t.dtype.half().is_some_and(|of| of != half) || (t.dtype.half().is_none() && t.dtype != DataType::F32) {
        return refuse(NOT_SUPPORTED_TYPE, format_args!("tensor {id} of attention is {:?} beside {half:?}", t.dtype));
    }
    if t.is_virtual || t.dtype == DataType::F32 {
        return Ok(());
    }
    let is_aligned = |(d, s): (&usize, &usize)| *d == 1 || *s == 1 || s.is_multiple_of(8);
    if t.alignment < 16 || !t.strides[2..].contains(&1) || !t.dims.iter().zip(&t.strides).all(is_aligned) {
        let what = format_args!("tensor {id}: strides {:?}, alignment {}", t.strides, t.alignment);
        return refuse(NOT_SUPPORTED_LAYOUT, what);
    }
    Ok(())
}

/// cuDNN takes other strides and computes wrong gradients.
fn check_workspace(t: &Tensor) -> Outcome {
    if t.dtype == DataType::F32 && t.is_packed() && t.ragged.is_none() {
        return Ok(());
    }
    let what = format_args!("workspace {} must be FLOAT and packed [B, H, S, D], not {t:?}", t.id);
    refuse_aloud(NOT_SUPPORTED_LAYOUT, what)
}

/// Source: the frontend's checks for ragged offsets and for SM8x and SM12x.
fn check_ragged(graph: &Graph, pattern: Pattern) -> Outcome {
    if !graph.tensors.iter().any(|t| t.ragged.is_some()) {
        return Ok(());
    }
    let has_sizes = |work: &Work| match work {
        Work::Matmul { overrides, .. } => overrides.iter().flatten().count() == 2,
        _ => true,
    };
    if !graph.nodes.iter().all(|n| has_sizes(&n.work)) {
        return refuse(NOT_SUPPORTED, format_args!("ragged offsets without the lengths of sequences in each product"));
    }
    if pattern == Pattern::Backward && [8, 12].contains(&(device::capability() / 10)) {
        let what = format_args!("ragged backward passes on sm_{}", device::capability());
        return refuse(NOT_SUPPORTED_ARCH, what);
    }
    Ok(())
}

/// Source: the frontend refuses other statistics of whole rows below cuDNN 9.26, which takes them and reads them wrongly.
fn check_statistics(graph: &Graph) -> Outcome {
    for (i, t) in graph.tensors.iter().enumerate() {
        let is_input = !t.is_virtual && !t.is_by_value && graph.producers[i].is_none();
        let is_statistics = is_input && t.dtype == DataType::F32 && t.dims[3] == 1 && t.len() > 1;
        if is_statistics && t.ragged.is_none() && !t.is_packed() {
            let what = format_args!("statistics of whole rows must be packed [B, H, S], not strides {:?}", t.strides);
            return refuse_aloud(NOT_SUPPORTED_LAYOUT, what);
        }
    }
    Ok(())
}
