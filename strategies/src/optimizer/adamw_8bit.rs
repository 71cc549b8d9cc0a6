//! AdamW with its averages in 8 bits. The update is that of [`AdamW`], with averages of full precision; they are rounded when they are
//! stored, in blocks of elements with a scale each ([`Extent::Blocks`]).
//!
//! Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, §2 and §3 (arXiv:2110.02861), with the blocks, the
//! numbers and the exceptions of bitsandbytes.

use super::{AdamW, Extent, Hyperparameter, N_SCALARS, Rule, StateTensor};

/// AdamW with averages in 8 bits. Its hyperparameters are those of [`AdamW`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AdamW8bit(pub AdamW);

impl Rule for AdamW8bit {
    fn words(&self) -> &'static [&'static str] {
        &["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"]
    }

    fn summary(&self) -> &'static str {
        "AdamW with averages in 8 bits, as bitsandbytes (Dettmers et al. 2022)"
    }

    fn hyperparameters(&mut self) -> Vec<Hyperparameter<'_>> {
        self.0.hyperparameters()
    }

    fn state(&self, _: usize) -> &'static [StateTensor] {
        const {
            &[
                StateTensor { name: "state1", extent: Extent::Blocks },
                StateTensor { name: "state2", extent: Extent::Blocks },
            ]
        }
    }

    fn scalars(&self, t: u64) -> [f64; N_SCALARS] {
        self.0.scalars(t)
    }
}
