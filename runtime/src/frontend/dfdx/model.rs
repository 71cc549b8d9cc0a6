//! A dfdx module and its loss as a [`UserModel`].

use super::parameters;
use super::tape::{Batch, Loss, Tape};
use super::tape_thread::{TapeThread, Work};
use crate::frontend::user_model::check;
use crate::frontend::{UserModel, UserModelError, UserParam};
use dfdx::nn::tensor_collection::TensorCollection;
use dfdx::prelude::{Cpu, CpuError};
use phalanx_device::OpaqueModel;
use phalanx_strategies::model::BatchShape;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// A model written in dfdx: a module built on dfdx's CPU, and a closure that computes its loss. Both must be `Clone`,
/// because each rank has its own.
///
/// The loss is the **sum** over all labels that are not -100, in nats: the job divides by the number of predicted
/// tokens of the whole step, which is unknown to a microbatch. [`super::ops::cross_entropy`] returns that sum; dfdx's own
/// `cross_entropy_with_logits_loss` is a mean over rows and must be multiplied by their number.
///
/// ```
/// use dfdx::prelude::*;
/// use phalanx::frontend::dfdx::{Batch, DfdxModel, Tape, ops};
///
/// type Net = (Embedding<264, 16>, Linear<16, 264>);
/// let module = Cpu::seed_from_u64(1).build_module::<Net, f32>();
/// let model = DfdxModel::new(module, 264, |net, batch: &Batch<'_>, tape: Tape| {
///     let x = ops::embedding(&net.0.weight, batch.ids, tape);
///     ops::cross_entropy(net.1.forward(x), batch.labels)
/// })?;
/// let job = phalanx::Job::builder()
///     .set("tokenizer", "bytes")
///     .set("datasets.0.path", "train.txt")
///     .set("datasets.0.type", "completion")
///     .set("max_steps", 100)
///     .model(model)
///     .build()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DfdxModel<M, F> {
    module: M,
    loss: F,
    vocab_size: usize,
    params: Vec<UserParam>,
}

impl<M, F> DfdxModel<M, F>
where
    M: TensorCollection<f32, Cpu> + Send + 'static,
    F: FnMut(&M, &Batch<'_>, Tape) -> Loss + Send + 'static,
{
    /// A model whose training starts from the current values of `module`.
    ///
    /// Tensors are named by their path in the module (`0.weight`, `blocks.1.gain`). Detached ones are not trained and
    /// keep their values; they are saved and exported with the rest. `vocab_size` is the number of the model's token ids.
    ///
    /// # Errors
    /// When two tensors have the same name, one has no elements, or none is trained; or when memory runs out.
    pub fn new(mut module: M, vocab_size: usize, loss: F) -> Result<DfdxModel<M, F>, DfdxError> {
        let params = parameters::table(&mut module)?;
        check(&params)?;
        Ok(DfdxModel { module, loss, vocab_size, params })
    }
}

impl<M, F> From<DfdxModel<M, F>> for UserModel
where
    M: TensorCollection<f32, Cpu> + Clone + Send + 'static,
    F: FnMut(&M, &Batch<'_>, Tape) -> Loss + Clone + Send + 'static,
{
    fn from(model: DfdxModel<M, F>) -> UserModel {
        let DfdxModel { module, loss, vocab_size, params } = model;
        // Modules are `Send` but not `Sync`, so ranks take their copies one after another.
        let first = Mutex::new((module, loss));
        let start = move |batch: BatchShape| {
            let (module, loss) = first.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let thread = TapeThread::start(loss, rayon::current_num_threads())?;
            let model: Box<dyn OpaqueModel> = Box::new(Running { module: Some(Box::new(module)), thread, batch });
            Ok(model)
        };
        UserModel::new(vocab_size, params, Box::new(start)).expect("the table was checked when the model was made")
    }
}

impl<M, F> fmt::Debug for DfdxModel<M, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensors = self.params.iter().map(|p| (&p.name, &p.shape));
        f.debug_struct("DfdxModel").field("tensors", &tensors.collect::<Vec<_>>()).finish_non_exhaustive()
    }
}

/// Why a dfdx module cannot be trained.
#[derive(Debug, thiserror::Error)]
pub enum DfdxError {
    /// Its tensors do not form a parameter table.
    #[error(transparent)]
    Model(#[from] UserModelError),
    /// dfdx could not copy a tensor.
    #[error("dfdx: {0}")]
    Device(#[from] CpuError),
}

/// The model in a run: keeps the module and sends it to the tape thread for each microbatch.
struct Running<M> {
    /// `None` only after the tape thread ended while it had the module.
    module: Option<Box<M>>,
    thread: TapeThread<M>,
    batch: BatchShape,
}

impl<M: TensorCollection<f32, Cpu> + Send + 'static> OpaqueModel for Running<M> {
    fn step(
        &mut self,
        inputs: &[&[i32]],
        params: &[&[f32]],
        grad_scale: f64,
        grads: &mut [&mut [f32]],
        accumulate: bool,
    ) -> Result<f64, String> {
        let mut module = self.module.take().ok_or("its tape thread has ended")?;
        parameters::write(&mut *module, params).map_err(|e| e.to_string())?;
        let BatchShape { n_rows, seq_len } = self.batch;
        let inputs = inputs.iter().map(|input| input.to_vec()).collect();
        let work = Work { module, inputs, n_rows, seq_len, backward: !grads.is_empty() };
        let done = self.thread.run(work)?;
        let module = self.module.insert(done.module);
        let (loss, gradients) = done.outcome?;
        if let Some(mut gradients) = gradients {
            parameters::read_gradients(&**module, &mut gradients, grad_scale as f32, grads, accumulate)
                .map_err(|e| e.to_string())?;
        }
        Ok(loss)
    }
}
