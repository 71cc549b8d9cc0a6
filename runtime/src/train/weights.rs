//! Parameters and optimizer state as the tensors of a model file: names, shapes, and their bytes in the machine.

use crate::cpu::CpuMachine;
use crate::hf::error::HfError;
use crate::hf::source::TensorSource;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::model::ModelConfig;
use phalanx_strategies::program::{Init, Kind, Op, Param, ValueId};
use phalanx_strategies::rng::CounterRng;
use rayon::prelude::*;
use std::ops::Range;

/// A tensor of a model file, and where its elements are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    /// Name in the file.
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    /// The value that holds it, and which of its elements.
    pub(crate) value: ValueId,
    pub(crate) elements: Range<usize>,
    pub(crate) trainable: bool,
}

/// The tensors of all parameters, in table order.
pub(crate) fn parameters(c: &Compiled) -> Vec<Tensor> {
    c.program.params.iter().flat_map(|p| parts(c, p, p.value, "")).collect()
}

/// The tensors of the optimizer's state, named `exp_avg.<parameter>`.
pub(crate) fn optimizer_state(c: &Compiled) -> Vec<Tensor> {
    let mut tensors = Vec::new();
    for instr in &c.program.instrs {
        let n_state = match instr.op {
            Op::AdamW { .. } => 3,
            Op::Sgd { .. } => 2,
            _ => continue,
        };
        let Some(param) = c.program.param_of(instr.reads[0]) else { continue };
        let param_name = &c.program.value(param.value).name;
        for state in &instr.reads[1..n_state] {
            let slot = c.program.value(*state).name.trim_end_matches(param_name.as_str()).to_string();
            tensors.extend(parts(c, param, *state, &slot));
        }
    }
    tensors
}

fn parts(c: &Compiled, param: &Param, value: ValueId, prefix: &str) -> Vec<Tensor> {
    let shape = &c.program.value(value).shape;
    let row = shape[1..].iter().product::<usize>();
    let mut start = 0;
    let tensor = |part: &phalanx_strategies::program::ParamPart| {
        let elements = start..start + part.rows * row;
        start = elements.end;
        let shape = [&[part.rows], &shape[1..]].concat();
        Tensor { name: format!("{prefix}{}", part.name), shape, value, elements, trainable: param.trainable }
    };
    param.parts.iter().map(tensor).collect()
}

/// Fills parameters from a model directory, or from scratch where there is none or it lacks an adapter; and constants.
///
/// # Errors
/// When a tensor is missing, has another shape, or is not finite.
pub(crate) fn initialise(
    machine: &mut CpuMachine,
    c: &Compiled,
    model: Option<&ModelConfig>,
    seed: u64,
    source: Option<&TensorSource>,
) -> Result<(), HfError> {
    let rng = CounterRng::new(seed).fork_named("init");
    for param in &c.program.params {
        let adapter = param.parts.iter().all(|p| p.name.contains(".lora_"));
        match source {
            Some(source) if !adapter => load(machine, c, param, source)?,
            _ => draw(machine.write(c, param.value), param, rng),
        }
    }
    fill_constants(machine, c, model);
    Ok(())
}

/// Fills the model's tables.
pub(crate) fn fill_constants(machine: &mut CpuMachine, c: &Compiled, model: Option<&ModelConfig>) {
    for (i, value) in c.program.values.iter().enumerate().filter(|(_, v)| v.kind == Kind::Constant) {
        let contents = model.and_then(|m| m.constant(&value.name, &value.shape));
        if let Some(contents) = contents {
            machine.write::<f32>(c, ValueId(i as u32)).copy_from_slice(&contents);
        }
    }
}

fn load(machine: &mut CpuMachine, c: &Compiled, param: &Param, source: &TensorSource) -> Result<(), HfError> {
    for tensor in parts(c, param, param.value, "") {
        let name = name_in(source, &tensor.name);
        source.check_shape(name, &tensor.shape)?;
        let elements = tensor.elements.clone();
        source.read_into(name, &mut machine.write::<f32>(c, param.value)[elements])?;
    }
    Ok(())
}

/// The GPT-2 files on the hub lack the prefix that `transformers` writes today.
fn name_in<'a>(source: &TensorSource, name: &'a str) -> &'a str {
    let short = name.strip_prefix("transformer.").filter(|short| source.contains(short));
    if source.contains(name) { name } else { short.unwrap_or(name) }
}

/// Element `i` of a parameter depends on (seed, name of its part, i in the part) only: neither on the number of
/// threads nor on how projections are stacked.
fn draw(out: &mut [f32], param: &Param, rng: CounterRng) {
    let n_rows: usize = param.parts.iter().map(|p| p.rows).sum();
    let row = out.len() / n_rows.max(1);
    let mut rest = out;
    for part in &param.parts {
        let (elements, tail) = rest.split_at_mut(part.rows * row);
        rest = tail;
        match param.init {
            Init::Zeros => elements.fill(0.0),
            Init::Ones => elements.fill(1.0),
            Init::Normal { std } => {
                let stream = rng.fork_named(&part.name);
                elements.par_iter_mut().enumerate().with_min_len(4096).for_each(|(i, x)| {
                    *x = std * stream.normal(i as u64) as f32;
                });
            }
        }
    }
}

/// Elements of one tensor.
pub(crate) fn elements<'a>(machine: &'a CpuMachine, c: &Compiled, tensor: &Tensor) -> &'a [f32] {
    &machine.read::<f32>(c, tensor.value)[tensor.elements.clone()]
}

/// The first parameter that holds a NaN or an infinity.
pub(crate) fn first_non_finite(machine: &CpuMachine, c: &Compiled) -> Option<String> {
    let bad = |t: &Tensor| elements(machine, c, t).par_iter().any(|x| !x.is_finite());
    parameters(c).into_iter().find(bad).map(|t| t.name)
}
