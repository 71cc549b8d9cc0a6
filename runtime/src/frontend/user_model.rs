//! A model that the user wrote, as a job sees it: a table of parameters and one opaque operation.

use phalanx_device::{OpaqueModel, ThreadError};
use phalanx_strategies::model::BatchShape;
use phalanx_strategies::program::{
    Binding, Column, DType, Hyper, Init, Kind, Op, Param, ParamPart, Phase, Program, Role, Site, ValueId, op,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// The `model_type` of a user-defined model in a configuration and in `config.json`.
pub const MODEL_TYPE: &str = "user_defined";

/// One tensor of a user-defined model.
#[derive(Clone, Debug, PartialEq)]
pub struct UserParam {
    /// Name in checkpoints and in the exported file.
    pub name: String,
    /// Extent of each dim; at least one.
    pub shape: Vec<usize>,
    /// Whether it is trained. Untrained tensors are kept with the trained ones and written to every file.
    pub trainable: bool,
    /// The values from which training starts, row-major.
    pub values: Vec<f32>,
}

/// Makes the operation of a rank, on its device thread, for microbatches of one shape.
///
/// The operation reads the inputs [`UserModel::INPUTS`] and the trained parameters in table order.
pub type Start = Box<dyn Fn(BatchShape) -> Result<Box<dyn OpaqueModel>, ThreadError> + Send + Sync>;

/// A model that the user wrote.
pub struct UserModel {
    vocab_size: usize,
    params: Vec<UserParam>,
    start: Start,
}

/// Why a user-defined model cannot be trained.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UserModelError {
    /// No parameter is trained.
    #[error("the model has no trained parameter")]
    NothingTrainable,
    /// Two tensors have the same name, so a file could not hold both.
    #[error("the model has two tensors named `{name}`")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// A tensor without elements, or with another number of values than its shape has.
    #[error(
        "tensor `{name}` has {n_values} values for the shape {shape:?}, expected at least one dim and one value an element"
    )]
    Shape {
        /// Its name.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The number of its values.
        n_values: usize,
    },
}

impl UserModel {
    /// The operation's inputs for a microbatch, i32 `[n_rows * seq_len]` each, in this order.
    pub const INPUTS: [Column; 4] = [Column::Ids, Column::Labels, Column::Positions, Column::DocStart];

    /// A model from its parameters and its operation. `vocab_size` is the number of token ids that it can read and
    /// predict.
    ///
    /// # Errors
    /// See [`UserModelError`].
    pub fn new(vocab_size: usize, params: Vec<UserParam>, start: Start) -> Result<UserModel, UserModelError> {
        check(&params)?;
        Ok(UserModel { vocab_size, params, start })
    }

    /// Its parameters.
    pub fn params(&self) -> &[UserParam] {
        &self.params
    }

    pub(crate) fn table(&self) -> UserTable {
        let tensor =
            |p: &UserParam| UserTensor { name: p.name.clone(), shape: p.shape.clone(), trainable: p.trainable };
        UserTable {
            model_type: MODEL_TYPE.into(),
            vocab_size: self.vocab_size,
            tensors: self.params.iter().map(tensor).collect(),
        }
    }

    /// A digest of the names, shapes and initial values of its tensors.
    pub(crate) fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for UserParam { name, shape, trainable, values } in &self.params {
            hasher.update(format!("{name:?} {shape:?} {trainable}").as_bytes());
            hasher.update(bytemuck::cast_slice(values));
        }
        hasher.update(&self.vocab_size.to_le_bytes()).finalize().to_hex().to_string()
    }

    /// The operation of one rank.
    pub(crate) fn start(&self, batch: BatchShape) -> Result<Box<dyn OpaqueModel>, ThreadError> {
        (self.start)(batch)
    }
}

impl fmt::Debug for UserModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserModel").field("table", &self.table()).finish_non_exhaustive()
    }
}

/// Checks that parameters can form a table.
pub(super) fn check(params: &[UserParam]) -> Result<(), UserModelError> {
    let mut names = BTreeSet::new();
    for param in params {
        let UserParam { name, shape, values, .. } = param;
        if shape.is_empty() || values.is_empty() || shape.iter().product::<usize>() != values.len() {
            let (name, shape, n_values) = (name.clone(), shape.clone(), values.len());
            return Err(UserModelError::Shape { name, shape, n_values });
        }
        if !names.insert(name.as_str()) {
            return Err(UserModelError::NameTaken { name: name.clone() });
        }
    }
    if params.iter().all(|p| !p.trainable) {
        return Err(UserModelError::NothingTrainable);
    }
    Ok(())
}

/// The `config.json` of a user-defined model in a checkpoint: enough to read its weights back without the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UserTable {
    model_type: String,
    pub(crate) vocab_size: usize,
    tensors: Vec<UserTensor>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct UserTensor {
    name: String,
    shape: Vec<usize>,
    trainable: bool,
}

impl UserTable {
    /// The forward program: one operation from the inputs and the trained parameters to the summed loss.
    pub(crate) fn forward(&self, batch: BatchShape) -> Program {
        let mut p = Program::default();
        let column = |column: &Column| (Role::Column(*column), column.name(), batch.n_tokens(), column.dtype());
        let mut reads: Vec<ValueId> = UserModel::INPUTS.iter().map(|c| input(&mut p, column(c))).collect();
        let params: Vec<ValueId> =
            self.tensors.iter().filter_map(|t| Some(param(&mut p, t)).filter(|_| t.trainable)).collect();
        reads.extend(&params);
        reads.push(input(&mut p, (Role::Hyper, "hyper", Hyper::LEN, DType::F64)));
        let loss = p.add_value("loss_sum", &[], DType::F64, Kind::Output);
        let n_inputs = UserModel::INPUTS.len();
        let op =
            Op::Opaque(op::Opaque { model: 0, n_inputs, n_params: params.len(), residual: false, gradient: false });
        p.push(op, reads, vec![loss], Site { phase: Phase::Forward, block: None, microbatch: 0 });
        p.bindings.push(Binding::new(Role::LossSum, loss));
        p
    }
}

fn input(p: &mut Program, (role, name, len, dtype): (Role, &str, usize, DType)) -> ValueId {
    let value = p.add_value(name, &[len], dtype, Kind::Input);
    p.bindings.push(Binding::new(role, value));
    value
}

fn param(p: &mut Program, tensor: &UserTensor) -> ValueId {
    let value = p.add_value(&tensor.name, &tensor.shape, DType::F32, Kind::Parameter);
    let parts = vec![ParamPart::whole(&tensor.name, &tensor.shape)];
    // The user provides the initial values; these parameters are never drawn.
    let (init, trainable, decay) = (Init::Zeros, tensor.trainable, tensor.shape.len() >= 2);
    p.params.push(Param { trainable, decay, ..Param::whole(value, &tensor.shape, parts, init) });
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_strategies::verify::verify;

    fn tensor(name: &str, shape: &[usize], trainable: bool) -> UserParam {
        UserParam { name: name.into(), shape: shape.to_vec(), trainable, values: vec![0.5; shape.iter().product()] }
    }

    fn model(params: Vec<UserParam>) -> Result<UserModel, UserModelError> {
        struct Never;
        impl OpaqueModel for Never {
            fn step(
                &mut self,
                _: &[&[i32]],
                _: &[&[f32]],
                _: f64,
                _: &mut [&mut [f32]],
                _: bool,
            ) -> Result<f64, String> {
                Err("not run here".into())
            }
        }
        UserModel::new(7, params, Box::new(|_| Ok(Box::new(Never))))
    }

    #[test]
    fn forward_program_reads_trained_parameters_only_and_verifies() {
        let model =
            model(vec![tensor("a", &[2, 3], true), tensor("mean", &[3], false), tensor("b", &[3], true)]).unwrap();

        let p = model.table().forward(BatchShape { n_rows: 2, seq_len: 5 });

        verify(&p).unwrap();
        let names: Vec<&str> = p.instrs[0].reads.iter().map(|v| p.value(*v).name.as_str()).collect();
        assert_eq!(names, ["ids", "labels", "positions", "docstart", "a", "b", "hyper"]);
        assert_eq!((p.n_params(), p.n_trainable()), (12, 9));
    }

    #[test]
    fn invalid_parameter_tables_are_refused() {
        let twice = model(vec![tensor("a", &[2], true), tensor("a", &[3], true)]).unwrap_err();
        let frozen = model(vec![tensor("a", &[2], false)]).unwrap_err();
        let scalar = model(vec![tensor("a", &[], true)]).unwrap_err();

        assert_eq!(twice, UserModelError::NameTaken { name: "a".into() });
        assert_eq!(frozen, UserModelError::NothingTrainable);
        assert_eq!(scalar, UserModelError::Shape { name: "a".into(), shape: vec![], n_values: 1 });
    }
}
