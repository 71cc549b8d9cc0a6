//! Attention through cuDNN, which is optional: without it, or where it has no plan, the kernels of this crate are used.
//!
//! - [`graph`]: attention and its adjoint as the graphs that the library recognises, over packed qkv.
//! - [`descriptor`]: descriptors of its interface. [`plan`]: the engine for a graph. [`packing`]: documents of a batch.
//!
//! Which operations run here: whole attention (not the parts of context-parallel ranks) in half width with heads of up to 128
//! columns. Whether there is a plan depends on the model of the GPU, the version of the library and the shape; `alike` refuses
//! worlds whose GPUs or libraries differ.
//!
//! Statistics: the library's are `[B, H, S]` for whole rows; lowering transposes them to the machine's `[N, H]`, so that forward
//! and backward passes need not run through the same engine.
//!
//! Scratch: the compiler plans memory before a GPU is opened, so scratch is computed from the shape by [`Shape::workspace_bytes`],
//! a bound of what cuDNN 9.19 wants on every architecture (seen by planning); an engine that wants more is not used. Documents
//! take part as if each was as long as the longest: at most [`DOCUMENT_TOKENS`] times the tokens of the batch, or this crate's
//! kernels run.
//!
//! Order of sums: an engine adds the gradients of queries with atomics, in any order, or has scratch for all scores, which
//! long rows cannot afford. Reproducible programs use only engines with a fixed order, so for long rows and for documents the
//! kernels of this crate.

mod descriptor;
mod graph;
mod packing;
mod plan;
#[cfg(test)]
mod tests;

pub use graph::TensorId;
pub(crate) use graph::{DOCUMENT_TOKENS, Direction, Shape};
pub(crate) use packing::Packing;

use crate::error::{CudaError, DNN_VERSION_MIN, DnnError};
use crate::gpu::{Gpu, Stream};
use crate::library::{Dnn, Handle};
use descriptor::{Attribute, Descriptor, Kind, Library, Type};
use plan::{Place, Plan};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

/// Addresses of the tensors of one execution.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) shape: Shape,
    pub(crate) direction: Direction,
    pub(crate) tensors: Vec<(TensorId, u64)>,
    /// As many bytes of scratch as the shape's bound.
    pub(crate) workspace: u64,
}

type Planned = ((Shape, Direction), Result<Arc<Plan>, CudaError>);

/// cuDNN on a GPU. It lives as long as the process.
#[derive(Debug)]
pub(crate) struct Cudnn {
    library: Library,
    handle: Handle,
    place: Place,
    /// Plans that were made, or why there is none.
    plans: Mutex<Vec<Planned>>,
}

// SAFETY: the handle is used for planning under the lock of the plans, and for execution by the device thread, which also plans.
unsafe impl Send for Cudnn {}
// SAFETY: as above.
unsafe impl Sync for Cudnn {}

impl Cudnn {
    /// Opens cuDNN on a GPU.
    ///
    /// # Errors
    /// See [`DnnError`].
    pub(crate) fn open(gpu: &Gpu, dnn: &'static Dnn) -> Result<Cudnn, DnnError> {
        let found = dnn.version();
        if found < DNN_VERSION_MIN {
            return Err(DnnError::Old { found, path: dnn.path.clone() });
        }
        gpu.bind()?;
        let library = Library { dnn, device: gpu.name.clone() };
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: a pointer to a local; the context is current.
        library.check("cudnnCreate", unsafe { (dnn.cudnnCreate)(&raw mut handle) })?;
        let place = Place::Gpu { handle, capability: gpu.capability };
        Ok(Cudnn { library, handle, place, plans: Mutex::default() })
    }

    /// The library's version, as it numbers it.
    pub(crate) fn version(&self) -> usize {
        self.library.dnn.version()
    }

    /// Whether there is an engine.
    pub(crate) fn offers(&self, shape: &Shape, direction: Direction) -> bool {
        self.plan(shape, direction).is_ok()
    }

    /// The plan of a shape, which is made once.
    fn plan(&self, shape: &Shape, direction: Direction) -> Result<Arc<Plan>, CudaError> {
        let key = (*shape, direction);
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, plan)) = plans.iter().find(|(known, _)| *known == key) {
            return plan.clone();
        }
        let room = shape.workspace_bytes(direction);
        let plan = Plan::new(&self.library, &self.place, shape, direction, room).map(Arc::new);
        match &plan {
            Ok(plan) => tracing::debug!(?shape, ?direction, bytes = plan.workspace_bytes, "attention through cuDNN"),
            Err(reason) => tracing::info!(?shape, ?direction, %reason, "attention without cuDNN"),
        }
        plans.push((key, plan.clone()));
        plan
    }

    /// Prepares an execution.
    ///
    /// # Errors
    /// When there is no plan, or the library refuses an address.
    pub(crate) fn ready(&self, call: &Call) -> Result<PlannedCall, CudaError> {
        let plan = self.plan(&call.shape, call.direction)?;
        let scalars = Box::new(call.shape.scalars());
        let of_scalars = graph::scalars(&call.shape, call.direction);
        let ids: Vec<i64> =
            call.tensors.iter().map(|(id, _)| *id as i64).chain(of_scalars.iter().map(|(id, _)| *id)).collect();
        let tensors = call.tensors.iter().map(|(_, address)| *address as *mut c_void);
        let scalar = |i: &usize| (&raw const scalars[*i]).cast_mut().cast::<c_void>();
        let pointers: Vec<*mut c_void> = tensors.chain(of_scalars.iter().map(|(_, i)| scalar(i))).collect();
        let mut pack = Descriptor::new(&self.library, Kind::VariantPack)?;
        pack.set(&self.library, Attribute::PackIds, Type::Int64, &ids)?;
        pack.set(&self.library, Attribute::PackPointers, Type::Pointer, &pointers)?;
        pack.set(&self.library, Attribute::PackWorkspace, Type::Pointer, &[call.workspace as *mut c_void])?;
        pack.finalize(&self.library)?;
        Ok(PlannedCall { library: self.library.clone(), handle: self.handle, plan, pack, _scalars: scalars })
    }
}

/// An execution that can be enqueued without preparation.
#[derive(Debug)]
pub(crate) struct PlannedCall {
    library: Library,
    handle: Handle,
    plan: Arc<Plan>,
    pack: Descriptor,
    /// The pack points to them.
    _scalars: Box<[f32; 4]>,
}

// SAFETY: see `Cudnn`; the pack's scalars move with it.
unsafe impl Send for PlannedCall {}

impl PlannedCall {
    /// Enqueues the execution on a stream.
    ///
    /// # Errors
    /// When the library or the GPU fails.
    ///
    /// # Safety
    /// The tensors and the workspace are this GPU's, and only work of the stream accesses them meanwhile.
    pub(crate) unsafe fn enqueue(&self, stream: Stream) -> Result<(), CudaError> {
        let (dnn, plan, pack) = (self.library.dnn, self.plan.descriptor.raw(), self.pack.raw());
        // SAFETY: the caller's contract; the device thread alone uses the handle.
        unsafe {
            self.library.check("cudnnSetStream", (dnn.cudnnSetStream)(self.handle, stream.0))?;
            self.library.check("cudnnBackendExecute", (dnn.cudnnBackendExecute)(self.handle, plan, pack))
        }
    }
}
