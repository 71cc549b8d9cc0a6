//! Descriptors of cuDNN's backend interface: objects with typed attributes, which are finalized once and then read.
//!
//! The numbers are those of `cudnn_graph.h`.

use crate::error::CudaError;
use crate::library::{Dnn, RawDescriptor, Status};
use std::ffi::c_void;

/// Kinds of descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Pointwise = 0,
    Engine = 2,
    EngineConfig = 3,
    EngineHeuristics = 4,
    Plan = 5,
    KnobChoice = 7,
    PointwiseOperation = 13,
    OperationGraph = 15,
    VariantPack = 16,
    Tensor = 17,
    MatMul = 18,
    MatMulOperation = 19,
    Reduction = 21,
    ReductionOperation = 22,
    ReshapeOperation = 31,
    #[cfg(test)]
    DeviceProperties = 38,
}

/// Attributes of descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attribute {
    PointwiseMode = 0,
    PointwisePrecision = 1,
    PointwiseAxis = 9,
    HeuristicsMode = 200,
    HeuristicsGraph = 201,
    HeuristicsResults = 202,
    #[cfg(test)]
    HeuristicsDevice = 204,
    ConfigEngine = 300,
    ConfigKnobs = 302,
    PlanHandle = 400,
    PlanConfig = 401,
    PlanWorkspaceBytes = 402,
    #[cfg(test)]
    PlanDevice = 407,
    KnobType = 600,
    KnobValue = 601,
    PointwiseDescriptor = 750,
    PointwiseX = 751,
    PointwiseB = 752,
    PointwiseY = 753,
    PointwiseT = 758,
    GraphHandle = 800,
    GraphOperations = 801,
    TensorAlignment = 900,
    TensorType = 901,
    TensorDims = 902,
    TensorStrides = 903,
    TensorId = 906,
    TensorIsVirtual = 907,
    TensorIsByValue = 908,
    TensorRaggedOffset = 913,
    PackIds = 1000,
    PackPointers = 1001,
    PackWorkspace = 1003,
    EngineGraph = 1300,
    EngineIndex = 1301,
    EngineNumericalNotes = 1303,
    #[cfg(test)]
    EngineDevice = 1307,
    MatMulPrecision = 1500,
    MatMulPadding = 1503,
    MatMulA = 1520,
    MatMulB = 1521,
    MatMulC = 1522,
    MatMulDescriptor = 1523,
    MatMulM = 1525,
    MatMulN = 1526,
    MatMulK = 1527,
    ReductionOperator = 1600,
    ReductionPrecision = 1601,
    ReductionX = 1610,
    ReductionY = 1611,
    ReductionDescriptor = 1612,
    ReshapeX = 2200,
    ReshapeY = 2201,
    #[cfg(test)]
    DeviceJson = 2702,
}

/// Types of attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Handle = 0,
    Elements = 1,
    Boolean = 2,
    Int64 = 3,
    Double = 5,
    Pointer = 6,
    HeuristicsMode = 8,
    Knob = 9,
    NumericalNote = 11,
    PointwiseMode = 14,
    Descriptor = 15,
    ReductionOperator = 18,
    #[cfg(test)]
    Char = 24,
}

/// What failed, and on which device, for errors.
#[derive(Clone, Debug)]
pub(super) struct Library {
    pub(super) dnn: &'static Dnn,
    pub(super) device: String,
}

impl Library {
    pub(super) fn check(&self, call: &'static str, status: Status) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        Err(CudaError { call, device: self.device.clone(), code: status, text: self.dnn.text(status) })
    }
}

/// A descriptor, destroyed with its owner. A descriptor that names another one in an attribute copies it when it is finalized,
/// but the other one is kept by all owners here until then.
#[derive(Debug)]
pub(super) struct Descriptor {
    dnn: &'static Dnn,
    raw: RawDescriptor,
}

// SAFETY: a finalized descriptor is memory of the library that only reads change; one thread has it at a time.
unsafe impl Send for Descriptor {}
// SAFETY: as above; reads of finalized descriptors do not write.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    /// A descriptor without attributes.
    ///
    /// # Errors
    /// When the library does not know the kind.
    pub(super) fn new(library: &Library, kind: Kind) -> Result<Descriptor, CudaError> {
        let mut raw: RawDescriptor = std::ptr::null_mut();
        // SAFETY: a pointer to a local.
        let status = unsafe { (library.dnn.cudnnBackendCreateDescriptor)(kind as u32, &raw mut raw) };
        library.check("cudnnBackendCreateDescriptor", status)?;
        Ok(Descriptor { dnn: library.dnn, raw })
    }

    pub(super) fn raw(&self) -> RawDescriptor {
        self.raw
    }

    /// Sets an attribute to these elements.
    ///
    /// # Errors
    /// When the library refuses the value.
    pub(super) fn set<T: Element>(
        &mut self,
        library: &Library,
        name: Attribute,
        of: Type,
        elements: &[T],
    ) -> Result<(), CudaError> {
        let at = elements.as_ptr().cast::<c_void>();
        // SAFETY: the library reads as many elements as it is told, of the type's size, and copies them.
        let status =
            unsafe { (self.dnn.cudnnBackendSetAttribute)(self.raw, name as u32, of as u32, elements.len() as i64, at) };
        library.check("cudnnBackendSetAttribute", status)
    }

    /// Sets an attribute to other descriptors.
    ///
    /// # Errors
    /// When the library refuses one.
    pub(super) fn refer(&mut self, library: &Library, name: Attribute, to: &[&Descriptor]) -> Result<(), CudaError> {
        let raw: Vec<RawDescriptor> = to.iter().map(|descriptor| descriptor.raw).collect();
        self.set(library, name, Type::Descriptor, &raw)
    }

    /// Ends the setting of attributes.
    ///
    /// # Errors
    /// When attributes are missing or do not fit, or the library does not support what they describe.
    pub(super) fn finalize(&mut self, library: &Library) -> Result<(), CudaError> {
        // SAFETY: a descriptor of this library.
        library.check("cudnnBackendFinalize", unsafe { (self.dnn.cudnnBackendFinalize)(self.raw) })
    }

    /// Reads up to `room.len()` elements of an attribute; returns how many there are.
    ///
    /// # Errors
    /// When the descriptor has no such attribute.
    pub(super) fn get<T: Element>(
        &self,
        library: &Library,
        name: Attribute,
        of: Type,
        room: &mut [T],
    ) -> Result<usize, CudaError> {
        let mut n = 0;
        let at = if room.is_empty() { std::ptr::null_mut() } else { room.as_mut_ptr().cast::<c_void>() };
        // SAFETY: the library writes at most as many elements as there is room for.
        let status = unsafe {
            let get = self.dnn.cudnnBackendGetAttribute;
            get(self.raw, name as u32, of as u32, room.len() as i64, &raw mut n, at)
        };
        library.check("cudnnBackendGetAttribute", status)?;
        Ok(usize::try_from(n).unwrap_or(0))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created once by this library, and destroyed once.
        unsafe { (self.dnn.cudnnBackendDestroyDescriptor)(self.raw) };
    }
}

/// Elements of attributes: plain memory that is valid whatever bytes the library writes.
pub(super) trait Element: Copy {}
impl Element for i64 {}
impl Element for f64 {}
impl Element for u32 {}
impl Element for u8 {}
impl Element for *mut c_void {}
