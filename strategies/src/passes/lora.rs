//! Low-rank adapters: the base is frozen, and each target gets `y += alpha / r * (x A^T) B^T`.
//!
//! Source: Hu et al. 2021, LoRA, §4.1 (arXiv:2106.09685). A starts with normal variates of standard deviation
//! `1/sqrt(in)` (the reference implementation's Kaiming-uniform has the same variance up to a constant), B with zeros, so
//! that the first step computes the base model. B of a target within a fused projection adds only to the target's columns.

use crate::program::{Columns, DType, Init, Instr, Kind, MatMul, Op, Param, ParamPart, Program, ValueId};

/// What to adapt, and how strongly.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraSpec {
    /// Rank of the update.
    pub rank: usize,
    /// Strength: the update is scaled by `alpha / rank`.
    pub alpha: f32,
    /// Module names as in the model file, e.g. `q_proj`; the last component before `.weight`.
    pub target_modules: Vec<String>,
}

/// Why adapters cannot be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoraError {
    /// No linear module has this name.
    #[error("lora_target_modules names `{name}`, which this model does not have; it has {}", present.join(", "))]
    NoSuchModule {
        /// The name.
        name: String,
        /// Names of the model's linear modules.
        present: Vec<String>,
    },
    /// Rank zero.
    #[error("lora_r must be at least 1")]
    ZeroRank,
}

/// Freezes the base and adds adapters to a forward program.
///
/// # Errors
/// When a target module does not exist or the rank is zero; the program is then unchanged.
pub fn lora(program: &mut Program, spec: &LoraSpec) -> Result<(), LoraError> {
    if spec.rank == 0 {
        return Err(LoraError::ZeroRank);
    }
    let present = linear_modules(program);
    if let Some(name) = spec.target_modules.iter().find(|t| !present.contains(t)) {
        return Err(LoraError::NoSuchModule { name: name.clone(), present });
    }
    program.params.iter_mut().for_each(|p| p.trainable = false);
    let instrs = std::mem::take(&mut program.instrs);
    let mut renamed: Vec<ValueId> = (0..program.values.len() as u32).map(ValueId).collect();
    for mut instr in instrs {
        for v in instr.reads.iter_mut() {
            *v = renamed.get(v.0 as usize).copied().unwrap_or(*v);
        }
        let targets = targets_of(program, &instr, spec);
        let (x, mut y) = (instr.reads.first().copied(), instr.writes.first().copied());
        let site = instr.site;
        let original = y;
        program.instrs.push(instr);
        for target in targets {
            let (Some(x), Some(before)) = (x, y) else { continue };
            y = Some(adapt(program, &target, x, before, site));
        }
        if let (Some(original), Some(y)) = (original, y) {
            renamed[original.0 as usize] = y;
        }
    }
    Ok(())
}

struct Target {
    /// `model.layers.0.self_attn.q_proj`.
    module: String,
    columns: Columns,
    rank: usize,
    /// Factor of the update: `alpha / rank`, times the factor of the base's own product.
    factor: f32,
}

/// Names of all linear modules, in order of appearance, without repetition.
fn linear_modules(program: &Program) -> Vec<String> {
    let is_table = |instr: &Instr, param: &Param| {
        matches!(instr.op, Op::Embedding { .. }) && instr.reads.get(1) == Some(&param.value)
    };
    let mut names: Vec<String> = Vec::new();
    for instr in &program.instrs {
        let Some(param) = weight_of(program, instr) else { continue };
        // A head that shares the embedding's weight is not a separate module.
        if program.instrs.iter().any(|other| is_table(other, param)) {
            continue;
        }
        for part in &param.parts {
            let name = module_name(&part.name).to_string();
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    names
}

fn module_name(tensor: &str) -> &str {
    let module = tensor.trim_end_matches(".weight");
    module.rsplit('.').next().unwrap_or(module)
}

fn weight_of<'a>(program: &'a Program, instr: &Instr) -> Option<&'a Param> {
    matches!(instr.op, Op::MatMul(_)).then(|| program.param_of(instr.reads[1])).flatten()
}

/// Columns of the product that each targeted part of its weight makes.
fn targets_of(program: &Program, instr: &Instr, spec: &LoraSpec) -> Vec<Target> {
    let Some(param) = weight_of(program, instr) else { return Vec::new() };
    let Op::MatMul(m) = instr.op else { return Vec::new() };
    let mut start = 0;
    let mut targets = Vec::new();
    for part in &param.parts {
        // A weight stored `[in, out]` is one part whose columns, not rows, are the outputs.
        let len = if m.trans_b { part.rows() } else { program.value(param.value).n_columns() };
        if spec.target_modules.iter().any(|t| t == module_name(&part.name)) {
            let module = part.name.trim_end_matches(".weight").to_string();
            let factor = m.alpha * spec.alpha / spec.rank as f32;
            targets.push(Target { module, columns: Columns { start, len }, rank: spec.rank, factor });
        }
        start += len;
    }
    targets
}

/// Emits `u = x A^T; z = y + factor u B^T` and returns `z`.
fn adapt(program: &mut Program, target: &Target, x: ValueId, y: ValueId, site: crate::program::Site) -> ValueId {
    let (n, n_in, n_out) = (program.value(x).n_rows(), program.value(x).n_columns(), program.value(y).n_columns());
    let std = 1.0 / (n_in as f32).sqrt();
    let a = adapter(program, &format!("{}.lora_A.weight", target.module), &[target.rank, n_in], Init::Normal { std });
    let b =
        adapter(program, &format!("{}.lora_B.weight", target.module), &[target.columns.len, target.rank], Init::Zeros);
    let u = program.add_value("lora.down", &[n, target.rank], DType::F32, Kind::Activation);
    let kind = program.value(y).kind;
    program.values[y.0 as usize].kind = Kind::Activation;
    let z = program.add_value("lora.up", &[n, n_out], DType::F32, kind);
    program.bindings.iter_mut().filter(|bound| bound.value == y).for_each(|bound| bound.value = z);
    program.push(Op::MatMul(MatMul::nt()), vec![x, a], vec![u], site);
    let up = MatMul { residual: true, alpha: target.factor, c_columns: Some(target.columns), ..MatMul::nt() };
    program.push(Op::MatMul(up), vec![u, b, y], vec![z], site);
    z
}

fn adapter(program: &mut Program, name: &str, shape: &[usize], init: Init) -> ValueId {
    let value = program.add_value(name, shape, DType::F32, Kind::Parameter);
    let parts = vec![ParamPart::whole(name, shape)];
    program.params.push(Param::whole(value, shape, parts, init));
    value
}
