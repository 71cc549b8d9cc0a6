//! Kernels: their sources, the compilation of instances, and the cache.
//!
//! Sources are CUDA C++ without headers. An *instance* is one kernel of one source with macros that select element types
//! and sizes. NVRTC compiles each set of macros of a source once, for exactly this GPU, to a cubin; a folder keeps cubins
//! between processes.

mod compile;

pub(crate) use compile::{CompileError, Kernels, Loaded, keep};

/// A source file.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// File name.
    pub name: &'static str,
    /// Its text, without the prelude.
    pub text: &'static str,
    /// Sets of macros, each `NAME=VALUE NAME=VALUE …`, with which checks compile it.
    pub checked: &'static [&'static str],
}

impl PartialEq for Source {
    fn eq(&self, other: &Source) -> bool {
        self.name == other.name
    }
}
impl Eq for Source {}

/// Types, conversions and instructions that every source uses.
pub const PRELUDE: &str = include_str!("../../kernels/prelude.cuh");

macro_rules! sources {
    ($($(#[$doc:meta])* $name:ident = $file:literal $(after $($header:literal)+)?, $checked:expr;)*) => {
        $($(#[$doc])* pub(crate) const $name: Source = Source {
            name: $file,
            text: concat!(
                $($("#line 1 \"", $header, "\"\n", include_str!(concat!("../../kernels/", $header)),)+
                    "#line 1 \"", $file, "\"\n",)?
                include_str!(concat!("../../kernels/", $file)),
            ),
            checked: $checked,
        };)*

        /// All sources.
        pub const SOURCES: &[Source] = &[$($name),*];
    };
}

sources! {
    /// Elementwise arithmetic.
    ELEMENTWISE = "elementwise.cu", &["X=float Y=bf16", "X=f16 Y=float", "X=bf16 Y=bf16 Z=float"];
    /// Conversions of elements.
    CAST = "cast.cu" after "runs.cuh", &["X=float Y=bf16", "X=f16 Y=float", "X=bf16 Y=f16"];
    /// Packed weights as numbers.
    UNPACK = "unpack.cu" after "e4m3.cuh", &["Y=float", "Y=bf16", "Y=f16"];
    /// Rows of activations for products in FP8.
    FP8_ROWS = "fp8_rows.cu" after "e4m3.cuh", &[
        "Y=e4m3 V=8 ITEMS=1", "Y=e4m3 V=8 ITEMS=4", "Y=e4m3 V=1 ITEMS=8", "Y=bf16 V=8 ITEMS=2", "Y=bf16 V=1 ITEMS=8",
    ];
    /// Weights for products in FP8.
    FP8_WEIGHTS = "fp8_weights.cu" after "e4m3.cuh", &["X=bf16 Y=e4m3", "X=bf16 Y=bf16", "X=e4m3 Y=e4m3"];
    /// Attention in f32 arithmetic, and its adjoint.
    ATTENTION = "attention.cu" after "attention.cuh", &[
        "X=float Y=float HEAD_DIM=64 TILE=64",
        "X=float Y=float HEAD_DIM=128 TILE=64",
        "X=float Y=float HEAD_DIM=128 TILE=32",
        "X=float Y=float HEAD_DIM=256 TILE=32",
        "X=float Y=float HEAD_DIM=256 TILE=16",
        "X=bf16 Y=bf16 HEAD_DIM=96 TILE=64",
        "X=f16 Y=float HEAD_DIM=20 TILE=64",
    ];
    /// Attention on tensor cores.
    ATTENTION_MMA_FORWARD = "attention_mma_forward.cu" after "attention.cuh" "attention_mma.cuh", &[
        "X=bf16 Y=bf16 HEAD_DIM=64",
        "X=bf16 Y=bf16 HEAD_DIM=128",
        "X=f16 Y=float HEAD_DIM=96",
        "X=f16 Y=float HEAD_DIM=256",
    ];
    /// The adjoint of attention on tensor cores.
    ATTENTION_MMA_BACKWARD = "attention_mma_backward.cu" after "attention.cuh" "attention_mma.cuh", &[
        "X=bf16 Y=bf16 HEAD_DIM=64",
        "X=bf16 Y=float HEAD_DIM=128",
        "X=f16 Y=f16 HEAD_DIM=96",
    ];
    /// What the adjoint of attention needs besides its operands.
    ATTENTION_PREPARE = "attention_prepare.cu" after "attention.cuh", &[
        "X=bf16 Y=float HEAD_DIM=80 TILE=64",
        "X=bf16 Y=bf16 HEAD_DIM=64 TILE=32",
        "X=f16 Y=f16 HEAD_DIM=20 TILE=16",
    ];
    /// What attention through a library needs besides it.
    ATTENTION_DOCUMENTS = "attention_documents.cu", &["X=bf16 HEAD_DIM=64", "X=f16 HEAD_DIM=80"];
    /// A cache of keys and values, and attention to it.
    CACHE = "cache.cu", &["X=float", "X=bf16", "X=f16"];
    /// Norms of rows.
    NORM = "norm.cu", &[
        "X=float Y=bf16 V=4 ITEMS=2 LAYER=0", "X=float Y=bf16 V=4 ITEMS=4 LAYER=0", "X=float Y=float V=4 ITEMS=4 LAYER=1",
        "X=bf16 Y=bf16 V=8 ITEMS=2 LAYER=1", "X=f16 Y=float V=1 ITEMS=8 LAYER=1",
    ];
    /// Adjoint of the norms of rows.
    NORM_BACKWARD = "norm_backward.cu", &[
        "X=float Y=bf16 V=4 ITEMS=2 LAYER=0 AGAIN=0 NARROW=0", "X=float Y=bf16 V=4 ITEMS=4 LAYER=0 AGAIN=0 NARROW=0",
        "X=float Y=float V=4 ITEMS=4 LAYER=0 AGAIN=0 NARROW=0", "X=bf16 Y=bf16 V=8 ITEMS=2 LAYER=0 AGAIN=0 NARROW=0",
        "X=float Y=float V=4 ITEMS=2 LAYER=1 AGAIN=0 NARROW=0", "X=f16 Y=float V=1 ITEMS=8 LAYER=1 AGAIN=0 NARROW=0",
        "X=float Y=bf16 V=4 ITEMS=2 LAYER=0 AGAIN=1 NARROW=0", "X=float Y=bf16 V=4 ITEMS=4 LAYER=0 AGAIN=1 NARROW=0",
        "X=float Y=float V=4 ITEMS=4 LAYER=0 AGAIN=1 NARROW=0", "X=bf16 Y=bf16 V=8 ITEMS=2 LAYER=0 AGAIN=1 NARROW=0",
        "X=float Y=float V=4 ITEMS=2 LAYER=1 AGAIN=1 NARROW=0", "X=f16 Y=float V=1 ITEMS=8 LAYER=1 AGAIN=1 NARROW=0",
        "X=float Y=bf16 V=4 ITEMS=2 LAYER=0 AGAIN=0 NARROW=1", "X=float Y=bf16 V=4 ITEMS=4 LAYER=0 AGAIN=0 NARROW=1",
        "X=float Y=bf16 V=4 ITEMS=2 LAYER=0 AGAIN=1 NARROW=1", "X=float Y=bf16 V=4 ITEMS=4 LAYER=0 AGAIN=1 NARROW=1",
        "X=float Y=f16 V=4 ITEMS=2 LAYER=1 AGAIN=1 NARROW=1",
    ];
    /// Second stage of sums over rows.
    SUM_PARTS = "sum_parts.cu", &[""];
    /// A bias and its gradient.
    BIAS = "bias.cu", &["X=float V=4", "X=bf16 V=8", "X=f16 V=1"];
    /// Rows of adapted weights with trained lengths.
    MAGNITUDE = "magnitude.cu", &["X=float", "X=bf16", "X=f16"];
    /// Columns of a matrix, apart and together.
    COLUMNS = "columns.cu", &["X=bf16 P=bf16 V=8", "X=bf16 P=float V=4", "X=f16 P=float V=1"];
    /// Rotary embedding.
    ROTARY = "rotary.cu", &["X=bf16 V=8 HEADS=4", "X=float V=4 HEADS=4", "X=f16 V=1 HEADS=4"];
    /// Norm of each query and key head.
    HEAD_NORM = "head_norm.cu", &[
        "X=bf16 V=8 LANES=8 ITEMS=1", "X=bf16 V=8 LANES=16 ITEMS=1", "X=float V=4 LANES=32 ITEMS=2", "X=f16 V=1 LANES=32 ITEMS=4",
    ];
    /// Norm over all queries and over all keys of a token.
    QK_NORM = "qk_norm.cu", &["X=bf16 V=8 ITEMS=2", "X=float V=4 ITEMS=4", "X=f16 V=1 ITEMS=16"];
    /// SwiGLU and GELU, and their adjoints.
    ACTIVATION = "activation.cu", &["X=bf16 Y=bf16", "X=f16 Y=float", "X=float Y=float"];
    /// Embedding and its adjoint.
    EMBEDDING = "embedding.cu" after "split.cuh", &["Y=float", "Y=bf16", "Y=f16"];
    /// Sums of scalars, and the factor that clips gradients.
    SCALARS = "scalars.cu", &[""];
    /// Sums of squares.
    SQUARES = "squares.cu" after "runs.cuh", &["X=float", "X=bf16", "X=f16"];
    /// Sums of gradients along a fixed tree.
    TREE_SUM = "tree_sum.cu", &[""];
    /// Softmax cross-entropy and its gradient.
    CROSS_ENTROPY = "cross_entropy.cu" after "logits.cuh", &["X=float", "X=bf16", "X=f16"];
    /// Log-probabilities of labels and their gradient.
    LOG_PROBS = "log_probs.cu" after "logits.cuh", &["X=float", "X=bf16", "X=f16"];
    /// Formulas over rows.
    FORMULAS = "formulas.cu", &[""];
    /// Updates by rules that work element by element, or in blocks of elements.
    OPTIMIZER = "optimizer.cu" after "runs.cuh" "split.cuh", &[""];
    /// Signs of progress.
    PROGRESS = "progress.cu", &[""];
    /// Adafactor.
    ADAFACTOR = "adafactor.cu", &[""];
}

/// One kernel of a source, with the macros that select its types and sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Instance {
    pub(crate) source: Source,
    /// The function.
    pub(crate) kernel: &'static str,
    /// Macros, as `NAME=VALUE`.
    pub(crate) macros: Vec<String>,
}

impl Instance {
    /// A kernel without macros.
    pub(crate) fn of(source: Source, kernel: &'static str) -> Instance {
        Instance { source, kernel, macros: Vec::new() }
    }

    /// The kernel with one more macro.
    pub(crate) fn with(mut self, name: &str, value: impl std::fmt::Display) -> Instance {
        self.macros.push(format!("{name}={value}"));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_waits_for_its_predecessor_first() {
        let mut n_kernels = 0;
        for source in SOURCES {
            for kernel in source.text.split("__global__").skip(1) {
                let (signature, body) = kernel.split_once('{').unwrap();
                assert!(body.trim_start().starts_with("wait_for_predecessor();"), "{}: {signature}", source.name);
                n_kernels += 1;
            }
        }
        assert!(n_kernels > 50, "{n_kernels} kernels");
    }
}
