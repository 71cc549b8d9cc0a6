//! Low-rank adapters: the base is frozen, and each target gets `y += alpha / r * (x A^T) B^T`.
//!
//! Source: Hu et al. 2021, LoRA, §4.1 (arXiv:2106.09685). A starts with normal variates of standard deviation
//! `1/sqrt(3 in)`, that of PEFT's Kaiming-uniform distribution, and B with zeros, so that the first step computes the base
//! model. B of a target within a fused projection adds only to the target's columns.
//!
//! Targets of one projection read the same input, so their matrices A are one parameter, stacked like the weights of the
//! projection: a step then reads the input once for `x A^T` and once for the gradient of A, and adds once to the gradient of the
//! input. The product with B of a target reads the target's columns of `x A^T`. Each target has a parameter A of its own with
//! dropout, since each has draws of its own in PEFT; with DoRA, which takes the lengths of the rows of one target; and where shards
//! of a stack would begin within blocks of optimizer state ([`crate::program::blocks`]).

use crate::program::blocks::can_be_stacked;
use crate::program::op::weight_use::WeightUse;
use crate::program::{
    AdaptedRows, Binding, Column, Columns, DType, Dropout, Hyper, Init, Instr, Kind, MatMul, Measured, Op, Packing,
    Param, ParamPart, Phase, Program, Role, Site, ValueId, op,
};
use std::collections::BTreeSet;
use std::slice;

/// What to adapt, and how strongly.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoraSpec {
    /// Rank of the update.
    pub rank: usize,
    /// Strength: the update is scaled by `alpha / rank`, or by `alpha / sqrt(rank)` if it is rank-stabilised.
    pub alpha: f32,
    /// Scale by the root of the rank. Source: Kalajdzievski 2023, rsLoRA (arXiv:2312.03732).
    pub rank_stabilised: bool,
    /// Modules as in the model file, without `.weight`: whole paths, or their last components, e.g. `q_proj`.
    pub target_modules: Vec<String>,
    /// Adapt only modules of these blocks; empty for all.
    pub blocks: Vec<usize>,
    /// Modules that are trained whole beside the adapters; see [`is_saved`].
    pub modules_to_save: Vec<String>,
    /// Probability with which an element of an adapter's input is zeroed in training.
    pub dropout: f32,
    /// Nothing is zeroed. The parameters are those of training.
    pub in_evaluation: bool,
    /// Scale the rows of each adapted weight to trained lengths. Source: Liu et al. 2024, DoRA (arXiv:2402.09353).
    pub magnitudes: bool,
    /// Learning rate of B, and of vectors that are trained whole, over that of matrices, if they differ.
    /// Source: Hayou et al. 2024, LoRA+ (arXiv:2402.12354).
    pub rate_ratio: Option<f64>,
    /// How the frozen matrices of blocks are stored, if not as f32; see [`super::pack`].
    pub packing: Option<Packing>,
}

impl LoraSpec {
    /// Factor of the product of the matrices.
    pub fn scale(&self) -> f32 {
        let rank = self.rank as f32;
        self.alpha / if self.rank_stabilised { rank.sqrt() } else { rank }
    }

    fn adapts(&self, module: &str) -> bool {
        let of_block = || block_of(module).is_some_and(|block| self.blocks.contains(&block));
        is_named(module, &self.target_modules) && (self.blocks.is_empty() || of_block())
    }
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
    /// No target is in this block.
    #[error("peft_layers_to_transform names layer {block}, in which no module is adapted; adapted modules are in {}",
        if blocks.is_empty() { "no layer".into() } else { blocks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ") })]
    NoSuchBlock {
        /// The block.
        block: usize,
        /// The blocks that have targets.
        blocks: Vec<usize>,
    },
    /// No module of this name can be trained whole.
    #[error("lora_modules_to_save names `{name}`, which this model does not have as a module of its own; it has {}",
        present.join(", "))]
    NoSuchSaved {
        /// The name.
        name: String,
        /// Names of the model's modules.
        present: Vec<String>,
    },
    /// A module that shares its weight with another one.
    #[error(
        "lora_modules_to_save names `{name}`, but embedding and head are one weight in this model, which PEFT would load \
        as two; train the whole model, without `adapter`, or remove the name"
    )]
    Tied {
        /// The module.
        name: String,
    },
    /// A module that is multiplied together with others that stay frozen.
    #[error("lora_modules_to_save names `{name}` without {}, which are computed with it; name all of them or none",
        others.join(", "))]
    Fused {
        /// The module.
        name: String,
        /// The other modules of its parameter.
        others: Vec<String>,
    },
    /// A module that is adapted and trained whole.
    #[error("`{name}` is in lora_modules_to_save and is adapted too; remove it from one of them")]
    Both {
        /// The module.
        name: String,
    },
    /// Rank zero.
    #[error("lora_r must be at least 1")]
    ZeroRank,
    /// Rows of adapted weights that are on several ranks.
    #[error("peft_use_dora needs whole rows of the adapted weights: tensor_parallel_size is {tp}, expected 1")]
    CutRows {
        /// Size of the tensor-parallel axis.
        tp: usize,
    },
}

/// Freezes the base, except modules that are trained whole, and adds adapters to a forward program.
///
/// # Errors
/// When a module or block does not exist, a module cannot be trained whole, or the rank is zero; the program is then unchanged.
pub fn lora(program: &mut Program, spec: &LoraSpec) -> Result<(), LoraError> {
    if spec.rank == 0 {
        return Err(LoraError::ZeroRank);
    }
    let tp = program.mesh_rank.mesh.tp;
    if spec.magnitudes && tp > 1 {
        return Err(LoraError::CutRows { tp });
    }
    check_targets(program, spec)?;
    let saved = saved_params(program, spec)?;
    for (param, saved) in program.params.iter_mut().zip(saved) {
        param.trainable = saved;
        // As in PEFT, vectors learn as fast as B.
        if spec.rate_ratio.is_some() && param.shape.len() == 1 {
            param.rate = Hyper::ADAPTER_LEARNING_RATE;
        }
    }
    let instrs = std::mem::take(&mut program.instrs);
    let mut renamed: Vec<ValueId> = (0..program.values.len() as u32).map(ValueId).collect();
    let mut n_groups = 0;
    for mut instr in instrs {
        for v in instr.reads.iter_mut() {
            *v = renamed.get(v.0 as usize).copied().unwrap_or(*v);
        }
        let targets = targets_of(program, &instr, spec);
        if spec.magnitudes && !targets.is_empty() {
            adapt_with_magnitudes(program, &targets, instr);
            continue;
        }
        let (x, mut y) = (instr.reads.first().copied(), instr.writes.first().copied());
        let site = instr.site;
        let original = y;
        program.instrs.push(instr);
        let n_in = x.map_or(0, |x| program.value(x).n_columns());
        let share = spec.dropout == 0.0 && can_be_stacked(spec.rank * n_in);
        for group in targets.chunks(if share { targets.len().max(1) } else { 1 }) {
            let (Some(x), Some(before)) = (x, y) else { continue };
            let input = match spec.dropout > 0.0 && !spec.in_evaluation {
                true => dropped_out(program, x, spec.dropout, n_groups, site),
                false => x,
            };
            n_groups += 1;
            y = Some(adapt(program, group, input, before, site));
        }
        if let (Some(original), Some(y)) = (original, y) {
            renamed[original.0 as usize] = y;
        }
    }
    Ok(())
}

/// Paths of all linear modules, in order of appearance.
pub fn linear_modules(program: &Program) -> Vec<String> {
    let mut paths: Vec<String> = Vec::new();
    for instr in &program.instrs {
        // A head that shares the embedding's weight is not a separate module.
        let Some(param) = weight_of(program, instr).filter(|param| !is_table(program, param)) else { continue };
        for part in &param.parts {
            let path = module_of(&part.name);
            if !paths.iter().any(|known| known == path) {
                paths.push(path.into());
            }
        }
    }
    paths
}

fn check_targets(program: &Program, spec: &LoraSpec) -> Result<(), LoraError> {
    let paths = linear_modules(program);
    if let Some(name) = spec.target_modules.iter().find(|t| !paths.iter().any(|path| is_at(path, t))) {
        return Err(LoraError::NoSuchModule { name: name.clone(), present: last_names(paths.iter()) });
    }
    let targets = paths.iter().filter(|path| is_named(path, &spec.target_modules));
    let blocks: BTreeSet<usize> = targets.filter_map(|path| block_of(path)).collect();
    match spec.blocks.iter().find(|block| !blocks.contains(block)) {
        Some(&block) => Err(LoraError::NoSuchBlock { block, blocks: blocks.into_iter().collect() }),
        None => Ok(()),
    }
}

/// Which parameters are trained whole.
fn saved_params(program: &Program, spec: &LoraSpec) -> Result<Vec<bool>, LoraError> {
    let names = &spec.modules_to_save;
    let paths = || program.params.iter().flat_map(|p| &p.parts).map(|part| module_of(&part.name));
    if let Some(name) = names.iter().find(|&name| !paths().any(|path| is_saved(path, slice::from_ref(name)))) {
        let is_head = name.rsplit('.').next() == Some("lm_head") && program.params.iter().any(|p| is_tied(program, p));
        return Err(match is_head {
            true => LoraError::Tied { name: name.clone() },
            false => LoraError::NoSuchSaved { name: name.clone(), present: last_names(paths()) },
        });
    }
    let mut saved = Vec::new();
    for param in &program.params {
        let (named, others): (Vec<&str>, Vec<&str>) =
            param.parts.iter().map(|part| module_of(&part.name)).partition(|path| is_saved(path, names));
        if let Some(&name) = named.first() {
            let name = name.to_string();
            if !others.is_empty() {
                return Err(LoraError::Fused { name, others: others.into_iter().map(Into::into).collect() });
            }
            if is_tied(program, param) {
                return Err(LoraError::Tied { name });
            }
            let weights = || program.instrs.iter().any(|i| is_weight(program, i, param));
            if let Some(both) = named.iter().find(|path| spec.adapts(path) && weights()) {
                return Err(LoraError::Both { name: both.to_string() });
            }
        }
        saved.push(!named.is_empty());
    }
    Ok(saved)
}

/// Whether a parameter is embedding and head.
fn is_tied(program: &Program, param: &Param) -> bool {
    is_table(program, param) && program.instrs.iter().any(|i| is_weight(program, i, param))
}

impl LoraSpec {
    /// Adapters on the modules of these names in all blocks, for a model with other blocks.
    #[must_use]
    pub fn in_every_block(&self) -> LoraSpec {
        let names = |paths: &[String]| last_names(paths.iter());
        let (target_modules, modules_to_save) = (names(&self.target_modules), names(&self.modules_to_save));
        LoraSpec { target_modules, modules_to_save, blocks: Vec::new(), ..self.clone() }
    }

    /// The same adapters in evaluation.
    #[must_use]
    pub fn evaluated(&self) -> LoraSpec {
        LoraSpec { in_evaluation: true, ..self.clone() }
    }
}

struct Target {
    /// `model.layers.0.self_attn.q_proj`.
    module: String,
    columns: Columns,
    rank: usize,
    /// [`LoraSpec::scale`].
    scale: f32,
    /// Factor of the update: the scale times the factor of the base's own product.
    factor: f32,
    /// B has a learning rate of its own.
    own_rate: bool,
}

/// The path of the module that a tensor of a model file belongs to.
fn module_of(tensor: &str) -> &str {
    tensor.strip_suffix(".weight").or_else(|| tensor.strip_suffix(".bias")).unwrap_or(tensor)
}

/// Whether a name is a module's path, or its last components.
fn is_at(path: &str, name: &str) -> bool {
    path.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Whether a module is trained whole: it, or a module that contains it, has a path that ends with one of the names. As in PEFT, a
/// name may begin within a component, so that `norm` also means every `input_layernorm`.
pub fn is_saved(path: &str, names: &[String]) -> bool {
    let ends = |path: &str| names.iter().any(|name| path.ends_with(name.as_str()));
    path.match_indices('.').any(|(at, _)| ends(&path[..at])) || ends(path)
}

fn is_named(path: &str, names: &[String]) -> bool {
    names.iter().any(|name| is_at(path, name))
}

/// Index of the block that a module is part of: the number in its path.
fn block_of(path: &str) -> Option<usize> {
    path.split('.').find_map(|component| component.parse().ok())
}

/// Last components of paths, without repetition.
fn last_names<S: AsRef<str>>(paths: impl Iterator<Item = S>) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for path in paths {
        let name = path.as_ref().rsplit('.').next().unwrap_or_default();
        if !names.iter().any(|known| known == name) {
            names.push(name.into());
        }
    }
    names
}

/// Whether a parameter is the table of an embedding.
fn is_table(program: &Program, param: &Param) -> bool {
    let reads = |instr: &Instr| match instr.op.operation().weight() {
        Some((at, WeightUse::Table)) => instr.reads[at] == param.value,
        _ => false,
    };
    program.instrs.iter().any(reads)
}

/// Whether an instruction multiplies by a parameter.
fn is_weight(program: &Program, instr: &Instr, param: &Param) -> bool {
    weight_of(program, instr).is_some_and(|weight| weight.value == param.value)
}

fn weight_of<'a>(program: &'a Program, instr: &Instr) -> Option<&'a Param> {
    matches!(instr.op, Op::MatMul(_)).then(|| program.param_of(instr.reads[1])).flatten()
}

/// Columns of the product that each targeted part of its weight makes.
fn targets_of(program: &Program, instr: &Instr, spec: &LoraSpec) -> Vec<Target> {
    // A reference is the base.
    if instr.site.phase == Phase::Reference {
        return Vec::new();
    }
    let Some(param) = weight_of(program, instr) else { return Vec::new() };
    let Op::MatMul(m) = instr.op else { return Vec::new() };
    let mut start = 0;
    let mut targets = Vec::new();
    for part in &param.parts {
        // A weight stored `[in, out]` is one part whose columns, not rows, are the outputs.
        let len = if m.trans_b { part.rows() } else { program.value(param.value).n_columns() };
        let module = module_of(&part.name).to_string();
        if spec.adapts(&module) {
            let (rank, scale, columns) = (spec.rank, spec.scale(), Columns { start, len });
            let own_rate = spec.rate_ratio.is_some();
            targets.push(Target { module, columns, rank, scale, factor: m.alpha * scale, own_rate });
        }
        start += len;
    }
    targets
}

/// Emits `u = x A^T` for targets that read the same input, and `z = y + factor u B^T` for each; returns the last `z`.
fn adapt(program: &mut Program, targets: &[Target], x: ValueId, y: ValueId, site: Site) -> ValueId {
    let kind = program.value(y).kind;
    program.values[y.0 as usize].kind = Kind::Activation;
    let a = matrix_a(program, targets, program.value(x).n_columns());
    let u = down(program, [x, a], site);
    let mut z = y;
    for (at, target) in targets.iter().enumerate() {
        let b = matrix_b(program, target);
        let own = Columns { start: at * target.rank, len: target.rank };
        z = up(program, target, [u, b, z], (targets.len() > 1).then_some(own), site);
    }
    program.values[z.0 as usize].kind = kind;
    program.bindings.iter_mut().filter(|bound| bound.value == y).for_each(|bound| bound.value = z);
    z
}

/// Creates A, stacked for all targets.
fn matrix_a(program: &mut Program, targets: &[Target], n_in: usize) -> ValueId {
    // That of PEFT's Kaiming-uniform distribution, which is even between -1/sqrt(in) and 1/sqrt(in).
    let std = 1.0 / (3.0 * n_in as f32).sqrt();
    adapter(program, targets, "lora_A.weight", &[targets[0].rank, n_in], Init::Normal { std })
}

/// Creates B.
fn matrix_b(program: &mut Program, target: &Target) -> ValueId {
    let shape = [target.columns.len, target.rank];
    let b = adapter(program, slice::from_ref(target), "lora_B.weight", &shape, Init::Zeros);
    if let Some(param) = program.params.last_mut().filter(|_| target.own_rate) {
        param.rate = Hyper::ADAPTER_LEARNING_RATE;
    }
    b
}

/// Emits `u = x A^T`.
fn down(program: &mut Program, [x, a]: [ValueId; 2], site: Site) -> ValueId {
    let shape = [program.value(x).n_rows(), program.value(a).n_rows()];
    let u = program.add_value("lora.down", &shape, DType::F32, Kind::Activation);
    program.push(Op::MatMul(MatMul::nt()), vec![x, a], vec![u], site);
    u
}

/// Emits the product of columns of `u` with B, which adds to the target's columns of `y`.
fn up(
    program: &mut Program,
    target: &Target,
    [u, b, y]: [ValueId; 3],
    a_columns: Option<Columns>,
    site: Site,
) -> ValueId {
    let shape = program.value(y).shape.clone();
    let z = program.add_value("lora.up", &shape, DType::F32, Kind::Activation);
    let c_columns = Some(target.columns);
    let op = MatMul { residual: true, alpha: target.factor, a_columns, c_columns, ..MatMul::nt() };
    program.push(Op::MatMul(op), vec![u, b, y], vec![z], site);
    z
}

/// Emits `z = magnitude / |W + s B A| (x W^T + s x A^T B^T)` for the columns of each target, where the lengths of rows are
/// constants, and then adds the bias and the residual of the base's own product.
fn adapt_with_magnitudes(program: &mut Program, targets: &[Target], instr: Instr) {
    let Instr { op: Op::MatMul(m), reads, writes, site } = instr else { unreachable!("only products have targets") };
    let (x, w, y) = (reads[0], reads[1], writes[0]);
    let shape = program.value(y).shape.clone();
    let like = |program: &mut Program, name: &str| program.add_value(name, &shape, DType::F32, Kind::Activation);
    let mut sum = like(program, "base");
    program.push(Op::MatMul(MatMul { bias: false, residual: false, ..m }), vec![x, w], vec![sum], site);
    let is_last = |at: usize| at + 1 == targets.len() && !m.bias && !m.residual;
    for (at, target) in targets.iter().enumerate() {
        let alone = slice::from_ref(target);
        let a = matrix_a(program, alone, program.value(x).n_columns());
        let b = matrix_b(program, target);
        let init = Init::RowLengths(measured(program, w, !m.trans_b));
        let magnitude = adapter(program, alone, "lora_magnitude_vector", &[target.columns.len], init);
        if let Some(param) = program.params.last_mut().filter(|_| target.own_rate) {
            param.rate = Hyper::ADAPTER_LEARNING_RATE;
        }
        let lengths = program.add_value("row_lengths", &[target.columns.len], DType::F32, Kind::Activation);
        let rows = AdaptedRows { columns: target.columns, factor: target.scale, trans_b: m.trans_b };
        program.push(Op::RowLengths(op::RowLengths(rows)), vec![w, a, b], vec![lengths], site);
        let u = down(program, [x, a], site);
        let adapted = up(program, target, [u, b, sum], None, site);
        let scaled = if is_last(at) { y } else { like(program, "scaled") };
        program.push(
            Op::Magnitude(op::Magnitude(target.columns)),
            vec![adapted, magnitude, lengths],
            vec![scaled],
            site,
        );
        sum = scaled;
    }
    if m.bias {
        let with_bias = if m.residual { like(program, "with_bias") } else { y };
        program.push(Op::AddBias(op::AddBias), vec![sum, reads[2]], vec![with_bias], site);
        sum = with_bias;
    }
    if m.residual {
        program.push(Op::Add(op::Add), vec![reads[reads.len() - 1], sum], vec![y], site);
    }
}

/// What the magnitudes of a weight measure.
fn measured(program: &Program, w: ValueId, of_columns: bool) -> Measured {
    let param = program.param_of(w).expect("an adapted weight is a parameter");
    let std = if let Init::Normal { std } = param.init { std } else { 0.0 };
    Measured { of_columns, n_in: param.shape[usize::from(!of_columns)], std, packing: param.packing }
}

/// Zeroes elements of an adapter's input; every target has draws of its own, as in PEFT.
fn dropped_out(program: &mut Program, x: ValueId, rate: f32, stream: u32, site: Site) -> ValueId {
    let bound = program.bound(Role::Column(Column::DropoutKeys)).next();
    let keys = bound.unwrap_or_else(|| {
        let keys = program.add_value("dropout_keys", &[program.value(x).n_rows()], DType::I32, Kind::Input);
        program.bindings.push(Binding::new(Role::Column(Column::DropoutKeys), keys));
        keys
    });
    let shape = program.value(x).shape.clone();
    let y = program.add_value("lora.input", &shape, DType::F32, Kind::Activation);
    program.push(Op::Dropout(Dropout { rate, stream, first_column: 0 }), vec![x, keys], vec![y], site);
    y
}

/// Creates a parameter that has a tensor of this shape for each target.
fn adapter(program: &mut Program, targets: &[Target], tensor: &str, shape: &[usize], init: Init) -> ValueId {
    let names = || targets.iter().map(|target| format!("{}.{tensor}", target.module));
    let stacked = [&[targets.len() * shape[0]], &shape[1..]].concat();
    let name = names().collect::<Vec<_>>().join(" + ");
    let value = program.add_value(name, &stacked, DType::F32, Kind::Parameter);
    let parts = names().map(|name| ParamPart::whole(name, shape)).collect();
    // DoRA's lengths are neither biases nor weights of norms, so that they decay, as in transformers' trainer.
    program.params.push(Param { decay: true, ..Param::whole(value, &stacked, parts, init) });
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{BatchShape, Head, HfConfig, ModelConfig};

    fn model(more: &str) -> Program {
        let json = format!(
            r#"{{"model_type": "llama", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 40,
            "num_hidden_layers": 3, "num_attention_heads": 4 {more}}}"#
        );
        let config = ModelConfig::try_from(&serde_json::from_str::<HfConfig>(&json).unwrap()).unwrap();
        config.forward(BatchShape { n_rows: 1, seq_len: 16 }, Head::Loss).unwrap()
    }

    fn spec(targets: &[&str], saved: &[&str]) -> LoraSpec {
        let [target_modules, modules_to_save] = [targets, saved].map(|n| n.iter().map(ToString::to_string).collect());
        LoraSpec { rank: 4, alpha: 8.0, target_modules, modules_to_save, ..LoraSpec::default() }
    }

    /// Names of the trained tensors, without the matrices A.
    fn trained(program: &Program) -> Vec<&str> {
        let trained = program.params.iter().filter(|p| p.trainable).flat_map(|p| &p.parts);
        trained.map(|part| part.name.as_str()).filter(|name| !name.ends_with(".lora_A.weight")).collect()
    }

    #[test]
    fn targets_are_paths_or_ends_of_paths_within_the_named_blocks() {
        let mut p = model("");
        let paths = spec(&["layers.0.self_attn.v_proj", "model.layers.2.mlp.down_proj"], &[]);
        lora(&mut p, &paths).unwrap();
        let expected = ["model.layers.0.self_attn.v_proj", "model.layers.2.mlp.down_proj"];
        assert_eq!(trained(&p), expected.map(|module| format!("{module}.lora_B.weight")));

        let mut p = model("");
        lora(&mut p, &LoraSpec { blocks: vec![1], ..spec(&["o_proj", "up_proj"], &[]) }).unwrap();
        let expected = ["model.layers.1.self_attn.o_proj", "model.layers.1.mlp.up_proj"];
        assert_eq!(trained(&p), expected.map(|module| format!("{module}.lora_B.weight")));
    }

    #[test]
    fn magnitudes_scale_products_before_bias_and_residual_are_added() {
        let mut p = model(r#", "attention_bias": true"#);
        let biased = "model.layers.1.self_attn.q_proj";
        let in_stream = "model.layers.1.mlp.down_proj";

        lora(&mut p, &LoraSpec { magnitudes: true, ..spec(&[biased, in_stream], &[]) }).unwrap();

        let at = |module: &str| {
            let name = format!("{module}.lora_magnitude_vector");
            let magnitude = p.params.iter().find(|param| param.parts[0].name == name).unwrap();
            assert!(magnitude.decay, "{name}");
            let magnitude = magnitude.value;
            p.instrs.iter().position(|instr| instr.reads.get(1) == Some(&magnitude)).unwrap()
        };
        let names = |from: usize| p.instrs[from - 4..from + 2].iter().map(|i| i.op.name()).collect::<Vec<_>>();
        let base = ["matmul", "row_lengths", "matmul", "matmul", "magnitude"];
        assert_eq!(names(at(biased)), [&base[..], &["add_bias"]].concat());
        assert_eq!(names(at(in_stream)), [&base[..], &["add"]].concat());
        let mut p = model("");
        p.mesh_rank.mesh.tp = 2;
        let error = lora(&mut p, &LoraSpec { magnitudes: true, ..spec(&["q_proj"], &[]) }).unwrap_err();
        assert_eq!(error, LoraError::CutRows { tp: 2 });
    }

    #[test]
    fn saved_modules_are_trained_whole() {
        let mut p = model("");
        let of_block = "model.layers.1.input_layernorm";

        lora(&mut p, &spec(&["model.layers.0.self_attn.o_proj"], &["embed_tokens", "lm_head", of_block])).unwrap();

        let adapter = "model.layers.0.self_attn.o_proj.lora_B.weight";
        let norm = format!("{of_block}.weight");
        let mut expected = ["model.embed_tokens.weight", &norm, "lm_head.weight", adapter];
        let mut found = trained(&p);
        expected.sort();
        found.sort();
        assert_eq!(found, expected);
    }

    #[test]
    fn name_of_saved_modules_is_the_end_of_their_paths_or_of_modules_around_them() {
        let saved = |names: &[&str]| {
            let mut p = model("");
            lora(&mut p, &spec(&["o_proj"], names)).unwrap();
            let names: Vec<String> = trained(&p).into_iter().map(str::to_owned).collect();
            names.into_iter().filter(|name| !name.contains(".lora_")).collect::<Vec<_>>()
        };

        // PEFT wraps each module whose path ends with the name.
        assert_eq!(saved(&["norm"]).len(), 7);
        assert_eq!(saved(&["model.norm"]), ["model.norm.weight"]);
        let mlp = ["gate_proj", "up_proj", "down_proj"].map(|part| format!("model.layers.1.mlp.{part}.weight"));
        assert_eq!(saved(&["layers.1.mlp"]), mlp);
    }

    #[test]
    fn only_matrices_b_and_vectors_have_a_rate_of_their_own() {
        let mut p = model("");

        lora(&mut p, &LoraSpec { rate_ratio: Some(16.0), ..spec(&["o_proj"], &["lm_head", "model.norm"]) }).unwrap();

        for param in &p.params {
            let own = param.parts[0].name.ends_with(".lora_B.weight") || param.shape.len() == 1;
            assert_eq!(param.rate == Hyper::ADAPTER_LEARNING_RATE, own, "{}", param.parts[0].name);
        }
    }

    #[test]
    fn rank_stabilised_scale_is_relative_to_the_root_of_the_rank() {
        let plain = spec(&["o_proj"], &[]);

        assert_eq!(plain.scale(), 2.0);
        assert_eq!(LoraSpec { rank_stabilised: true, ..plain }.scale(), 4.0);
    }

    /// For each matrix A, the modules whose matrices it stacks.
    fn stacked(program: &Program) -> Vec<Vec<&str>> {
        fn module(part: &ParamPart) -> Option<&str> {
            part.name.strip_suffix(".lora_A.weight")?.rsplit('.').next()
        }
        let modules = program.params.iter().map(|param| param.parts.iter().filter_map(module).collect::<Vec<_>>());
        modules.filter(|modules| !modules.is_empty()).collect()
    }

    #[test]
    fn targets_of_one_projection_share_products_unless_each_has_draws_or_lengths_of_its_own() {
        let targets = spec(&["q_proj", "v_proj", "o_proj", "up_proj"], &[]);
        let [mut together, mut drawn, mut evaluated, mut scaled] = [(); 4].map(|()| model(""));

        lora(&mut together, &targets).unwrap();
        lora(&mut drawn, &LoraSpec { dropout: 0.1, ..targets.clone() }).unwrap();
        lora(&mut evaluated, &LoraSpec { dropout: 0.1, ..targets.clone() }.evaluated()).unwrap();
        lora(&mut scaled, &LoraSpec { magnitudes: true, ..targets }).unwrap();

        assert_eq!(stacked(&together)[..3], [vec!["q_proj", "v_proj"], vec!["o_proj"], vec!["up_proj"]]);
        assert_eq!(stacked(&drawn)[..4], ["q_proj", "v_proj", "o_proj", "up_proj"].map(|module| vec![module]));
        assert_eq!([&evaluated, &scaled].map(stacked), [(); 2].map(|()| stacked(&drawn)));
        // Training and evaluation share the memory of parameters.
        let tensors = |p: &Program| p.params.iter().map(|param| param.parts.clone()).collect::<Vec<_>>();
        assert_eq!(tensors(&evaluated), tensors(&drawn));
        assert!(!evaluated.instrs.iter().any(|i| matches!(i.op, Op::Dropout(_))));
        let columns_of_u = |start| Some(Columns { start, len: 4 });
        let ups = together.instrs.iter().filter_map(|i| match i.op {
            Op::MatMul(m) if m.c_columns.is_some() => Some((m.a_columns, m.c_columns.map(|c| (c.start, c.len)))),
            _ => None,
        });
        let v = (columns_of_u(4), Some((64, 32)));
        let expected = [(columns_of_u(0), Some((0, 32))), v, (None, Some((0, 32))), (None, Some((40, 40)))];
        assert_eq!(ups.take(4).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn matrices_that_are_not_whole_blocks_of_optimizer_state_are_not_stacked() {
        let n_matrices = |rank| {
            let mut p = model("");
            lora(&mut p, &LoraSpec { rank, ..spec(&["q_proj", "v_proj"], &[]) }).unwrap();
            stacked(&p).len()
        };

        // 4128 elements are a part of a block more than 4096; 3 x 32 are too few for blocks.
        assert_eq!([3, 128, 129].map(n_matrices), [3, 3, 6]);
    }

    #[test]
    fn every_target_has_draws_of_its_own() {
        let mut p = model("");

        lora(&mut p, &LoraSpec { dropout: 0.1, ..spec(&["q_proj", "k_proj", "down_proj"], &[]) }).unwrap();

        let drawn = |i: &Instr| match i.op {
            Op::Dropout(dropout) => Some(dropout.stream),
            _ => None,
        };
        let streams: Vec<u32> = p.instrs.iter().filter_map(drawn).collect();
        assert_eq!(streams, (0..9).collect::<Vec<u32>>());
        let n_reads = p.instrs.iter().filter(|i| i.reads.first().is_some_and(|x| p.value(*x).name == "lora.input"));
        assert_eq!(n_reads.count(), 9);
    }

    /// `kaiming_uniform_(a=sqrt(5))` is even between `-1/sqrt(in)` and `1/sqrt(in)`.
    #[test]
    fn matrices_a_begin_with_the_deviation_of_those_of_peft() {
        let mut p = model("");
        lora(&mut p, &spec(&["o_proj", "down_proj"], &[])).unwrap();

        for (module, n_in) in [("o_proj", 32.0f32), ("down_proj", 40.0)] {
            let is_a = |param: &&Param| param.parts[0].name.ends_with(&format!("{module}.lora_A.weight"));
            let Some(Init::Normal { std }) = p.params.iter().find(is_a).map(|param| param.init) else {
                panic!("{module}")
            };
            assert!((std * n_in.sqrt() - 3f32.sqrt().recip()).abs() < 1e-6, "{module}: {std}");
        }
    }

    #[test]
    fn modules_that_cannot_be_trained_whole_are_named() {
        let refused = |more: &str, targets: &[&str], saved: &[&str]| {
            let mut p = model(more);
            let before = p.clone();
            let error = lora(&mut p, &spec(targets, saved)).unwrap_err();
            assert_eq!(p, before);
            error.to_string()
        };
        let cases = [
            ("", "wte", "lora_modules_to_save names `wte`, which this model does not have"),
            ("", "q_proj", "lora_modules_to_save names `model.layers.0.self_attn.q_proj` without"),
            ("", "o_proj", "`model.layers.0.self_attn.o_proj` is in lora_modules_to_save and is adapted too"),
            (r#", "tie_word_embeddings": true"#, "embed_tokens", "embedding and head are one weight in this model"),
            (r#", "tie_word_embeddings": true"#, "lm_head", "embedding and head are one weight in this model"),
        ];
        for (more, saved, text) in cases {
            let error = refused(more, &["o_proj"], &[saved]);
            assert!(error.contains(text), "{error}");
        }
        let mut p = model("");
        let error = lora(&mut p, &LoraSpec { blocks: vec![1, 3], ..spec(&["o_proj"], &[]) }).unwrap_err();
        assert_eq!(error, LoraError::NoSuchBlock { block: 3, blocks: vec![0, 1, 2] });
    }
}
