//! Which tensor of a file has which type.
//!
//! llama.cpp's mixtures "M" give 6 bits to the output layer, and in half of the blocks to the values of the attention and the
//! second matrix of the feed-forward layer, where errors cost the most perplexity.
//!
//! Source: ggml-org/llama.cpp, `llama_tensor_get_type` of src/llama-quant.cpp, for models without experts. We differ where rows
//! are not made of blocks of 256: llama.cpp stores them as `Q5_0`, `Q5_1` or `Q8_0`, depending on the type that does not fit,
//! and we always as `Q8_0`, the most exact one.

use super::tensor_type::TensorType;
use super::{Encoding, GgufTensor};

/// The rules of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mixture {
    encoding: Encoding,
    /// Blocks of the model.
    n_blocks: usize,
    /// Whether the output layer has weights of its own. Otherwise those of the embedding are also its weights.
    has_output: bool,
}

impl Mixture {
    pub(super) fn of(encoding: Encoding, tensors: &[GgufTensor<'_>]) -> Self {
        let n_blocks = tensors.iter().filter_map(|t| block_of(&t.name)).max().map_or(0, |(last, _)| last + 1);
        Self { encoding, n_blocks, has_output: tensors.iter().any(|t| t.name == OUTPUT) }
    }

    /// The type of a tensor: only matrices are narrowed, and blocks must fill rows.
    pub(super) fn type_of(&self, name: &str, shape: &[usize]) -> TensorType {
        let [.., _, columns] = shape else { return TensorType::F32 };
        let wanted = match self.encoding {
            Encoding::F32 => TensorType::F32,
            Encoding::F16 => TensorType::F16,
            Encoding::Bf16 => TensorType::Bf16,
            Encoding::Q8_0 => TensorType::Q8_0,
            Encoding::Q4Km => self.mixed(name, TensorType::Q4k),
            Encoding::Q5Km => self.mixed(name, TensorType::Q5k),
        };
        let fits = |kind: &TensorType| columns % kind.block().0 == 0;
        [wanted, TensorType::Q8_0].into_iter().find(fits).unwrap_or(TensorType::F16)
    }

    fn mixed(&self, name: &str, most: TensorType) -> TensorType {
        if name == if self.has_output { OUTPUT } else { EMBEDDING } {
            return TensorType::Q6k;
        }
        match block_of(name) {
            Some((block, "attn_v.weight" | "ffn_down.weight")) if self.is_sensitive(block) => TensorType::Q6k,
            // Models of 80 blocks have eight heads for one head of values, whose weights are few.
            Some((_, "attn_v.weight")) if self.n_blocks == 80 && most == TensorType::Q4k => TensorType::Q5k,
            _ => most,
        }
    }

    /// The first and the last eighth of the blocks, and every third one between them.
    fn is_sensitive(&self, block: usize) -> bool {
        let eighth = self.n_blocks / 8;
        block < eighth || block >= 7 * self.n_blocks / 8 || (block - eighth) % 3 == 2
    }
}

const OUTPUT: &str = "output.weight";
const EMBEDDING: &str = "token_embd.weight";

/// The block of a tensor, and the rest of its name.
fn block_of(name: &str) -> Option<(usize, &str)> {
    let (block, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((block.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn types(encoding: Encoding, n_blocks: usize, has_output: bool, part: &str) -> Vec<TensorType> {
        let mixture = Mixture { encoding, n_blocks, has_output };
        (0..n_blocks).map(|block| mixture.type_of(&format!("blk.{block}.{part}"), &[256, 512])).collect()
    }

    #[test]
    fn half_of_the_sensitive_matrices_have_six_bits() {
        use TensorType::{Q4k, Q5k, Q6k};

        let of_16 = types(Encoding::Q4Km, 16, true, "ffn_down.weight");
        let of_2 = types(Encoding::Q5Km, 2, true, "attn_v.weight");
        let of_80 = types(Encoding::Q4Km, 80, true, "attn_v.weight");

        let six: Vec<usize> = (0..16).filter(|i| of_16[*i] == Q6k).collect();
        assert_eq!(six, [0, 1, 4, 7, 10, 13, 14, 15]);
        assert!(of_16.iter().all(|kind| [Q4k, Q6k].contains(kind)));
        assert_eq!(of_2, [Q5k, Q6k]);
        assert_eq!((of_80.iter().filter(|kind| **kind == Q6k).count(), of_80[10]), (40, Q5k));
        for part in ["attn_q.weight", "attn_k.weight", "attn_output.weight", "ffn_gate.weight", "ffn_up.weight"] {
            assert_eq!(types(Encoding::Q4Km, 16, true, part), [Q4k; 16], "{part}");
        }
    }

    #[test]
    fn output_layer_has_six_bits_and_an_embedding_only_as_one() {
        let type_of = |has_output, name| {
            Mixture { encoding: Encoding::Q4Km, n_blocks: 4, has_output }.type_of(name, &[1000, 256])
        };

        assert_eq!([type_of(true, OUTPUT), type_of(true, EMBEDDING)], [TensorType::Q6k, TensorType::Q4k]);
        assert_eq!(type_of(false, EMBEDDING), TensorType::Q6k);
    }

    #[test]
    fn rows_without_whole_blocks_have_the_next_type_that_fits() {
        let mixture = |encoding| Mixture { encoding, n_blocks: 1, has_output: true };
        let of = |encoding, name, shape: &[usize]| mixture(encoding).type_of(name, shape);

        for encoding in [Encoding::Q4Km, Encoding::Q5Km] {
            assert_eq!(of(encoding, OUTPUT, &[4, 288]), TensorType::Q8_0);
            assert_eq!(of(encoding, "blk.0.attn_q.weight", &[4, 128]), TensorType::Q8_0);
            assert_eq!(of(encoding, "blk.0.attn_q.weight", &[4, 300]), TensorType::F16);
            assert_eq!(of(encoding, "blk.0.attn_v.bias", &[256]), TensorType::F32);
        }
        assert_eq!(of(Encoding::Q8_0, "blk.0.attn_q.weight", &[4, 300]), TensorType::F16);
        assert_eq!(of(Encoding::Bf16, "blk.0.attn_q.weight", &[4, 300]), TensorType::Bf16);
    }
}
