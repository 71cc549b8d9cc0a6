//! Optimizers: the rules that turn gradients into changes of the weights.
//!
//! An optimizer is three things: its rule (a file of this folder), its kernel (in the device crate), and its entry in the
//! registration below. Everything else follows from the rule: configuration keys and their validation, instructions and
//! their shapes, memory, sharding, names in checkpoints, shadows, and the bounds of the planner.
//!
//! A rule that works element by element has state of the shape of its parameter. A rule may also keep one value for each row
//! or column of a tensor ([`Extent`]). Such a rule sums over whole tensors, and each rank has only some of the elements: the
//! ranks add their sums before they vote on the step ([`crate::passes::tensor_sums`]), then each updates alone.
//!
//! State is f32, like the parameters, or blocks of 8-bit numbers (`crate::program::blocks`).
//!
//! Deliberately absent: arithmetic on elements (in the kernel) and the learning rate (an input of each step).

mod adafactor;
mod adamw;
mod adamw_8bit;
mod lion;
mod sgd;

pub use adafactor::Adafactor;
pub use adamw::AdamW;
pub use adamw_8bit::AdamW8bit;
pub use lion::Lion;
pub use sgd::Sgd;

/// What the rest of the system needs to know about an optimizer. Its fields are its hyperparameters.
pub trait Rule {
    /// Words for it in a configuration; the first is its name.
    fn words(&self) -> &'static [&'static str];

    /// One-line description for the key reference.
    fn summary(&self) -> &'static str;

    /// The configuration keys that it uses, with their values.
    fn hyperparameters(&mut self) -> Vec<Hyperparameter<'_>>;

    /// Its state for a parameter with this number of dims.
    fn state(&self, n_dims: usize) -> &'static [StateTensor];

    /// The sums over whole tensors that an update of a parameter with this number of dims reads, in rounds: a round may
    /// depend on the sums of earlier rounds.
    fn sums(&self, n_dims: usize) -> &'static [&'static [Extent]] {
        let _ = n_dims;
        &[]
    }

    /// Scalars of the kernel that change with each update, besides the learning rate; `t` counts updates from 1.
    fn scalars(&self, t: u64) -> [f64; N_SCALARS] {
        let _ = t;
        [1.0; N_SCALARS]
    }
}

/// Scalars that a rule derives from the number of the update.
pub const N_SCALARS: usize = 2;

/// Elements of a block of state ([`Extent::Blocks`]).
pub const STATE_BLOCK: usize = 256;
/// Words of a block: its scale, an f32 number, and four elements in each of the others, the first in the lowest bits.
pub const STATE_WORDS: usize = 1 + STATE_BLOCK / 4;

/// A tensor of a rule's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateTensor {
    /// Its name; checkpoints append the name of the weight.
    pub name: &'static str,
    /// What each of its values belongs to.
    pub extent: Extent,
}

impl StateTensor {
    /// A tensor of the shape of the parameter.
    pub const fn of_elements(name: &'static str) -> StateTensor {
        StateTensor { name, extent: Extent::Elements }
    }
}

/// What each value of state or sums belongs to. A tensor with more than two dims counts as a stack of matrices, a tensor
/// with fewer as a matrix of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Each element that this rank updates.
    Elements,
    /// Each row of the whole tensor.
    Rows,
    /// Each column of the whole tensor.
    Columns,
    /// The tensor.
    Tensor,
    /// The elements that this rank updates, in words of 32 bits: blocks of 8-bit numbers with their scales, or an f32 number for
    /// each element (`crate::program::blocks`).
    Blocks,
}

/// A configuration key of a rule.
#[derive(Debug)]
pub struct Hyperparameter<'a> {
    /// The key. Several rules may use the same key with different defaults.
    pub key: &'static str,
    /// What it means for this rule.
    pub doc: &'static str,
    /// The valid values.
    pub range: Range,
    /// The value.
    pub value: &'a mut f64,
}

/// The valid values of a hyperparameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Range {
    /// 0 and above.
    NotNegative,
    /// 0 and below.
    NotPositive,
    /// Above 0.
    Positive,
    /// 0 and above, below 1.
    BelowOne,
}

impl Range {
    /// Whether a value is valid.
    pub fn holds(self, value: f64) -> bool {
        match self {
            Range::NotNegative => value >= 0.0 && value.is_finite(),
            Range::NotPositive => value <= 0.0 && value.is_finite(),
            Range::Positive => value > 0.0 && value.is_finite(),
            Range::BelowOne => (0.0..1.0).contains(&value),
        }
    }
}

/// The key that is zero for parameters exempt from weight decay.
const WEIGHT_DECAY: &str = "weight_decay";

/// The weight decay of rules that apply it separately from the gradient.
fn decoupled_weight_decay(value: &mut f64) -> Hyperparameter<'_> {
    let doc = "decoupled weight decay; biases and norms are exempt";
    Hyperparameter { key: WEIGHT_DECAY, doc, range: Range::NotNegative, value }
}

/// Defines the enum of all optimizers.
macro_rules! optimizers {
    ($($(#[doc = $doc:literal])+ $Rule:ident,)+) => {
        /// An optimizer and its hyperparameters.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum OptimizerSpec {
            $($(#[doc = $doc])+ $Rule($Rule),)+
        }

        impl OptimizerSpec {
            /// Every optimizer with its defaults.
            pub fn all() -> Vec<OptimizerSpec> {
                vec![$(OptimizerSpec::$Rule($Rule::default()),)+]
            }

            fn rule(&self) -> &dyn Rule {
                match self {
                    $(OptimizerSpec::$Rule(rule) => rule,)+
                }
            }

            fn rule_mut(&mut self) -> &mut dyn Rule {
                match self {
                    $(OptimizerSpec::$Rule(rule) => rule,)+
                }
            }
        }
    };
}

// The registration.
optimizers! {
    /// Adam with decoupled weight decay.
    AdamW,
    /// The same with averages in 8 bits.
    AdamW8bit,
    /// Stochastic gradient descent with momentum.
    Sgd,
    /// The sign of averaged gradients.
    Lion,
    /// Gradients divided by the root of factored averages of their squares.
    Adafactor,
}

impl OptimizerSpec {
    /// The optimizer that a configuration calls `word`, with its defaults.
    pub fn named(word: &str) -> Option<OptimizerSpec> {
        OptimizerSpec::all().into_iter().find(|o| o.words().contains(&word))
    }

    /// See [`Rule::words`].
    pub fn words(&self) -> &'static [&'static str] {
        self.rule().words()
    }

    /// Its name: the first of its words.
    pub fn name(&self) -> &'static str {
        self.words()[0]
    }

    /// See [`Rule::summary`].
    pub fn summary(&self) -> &'static str {
        self.rule().summary()
    }

    /// See [`Rule::hyperparameters`].
    pub fn hyperparameters(&mut self) -> Vec<Hyperparameter<'_>> {
        self.rule_mut().hyperparameters()
    }

    /// The value of a key, if this optimizer uses it.
    pub fn get(mut self, key: &str) -> Option<f64> {
        self.hyperparameters().into_iter().find(|h| h.key == key).map(|h| *h.value)
    }

    /// Sets a key. Returns whether this optimizer uses it.
    pub fn set(&mut self, key: &str, value: f64) -> bool {
        let found = self.hyperparameters().into_iter().find(|h| h.key == key);
        found.map(|h| *h.value = value).is_some()
    }

    /// See [`Rule::state`].
    pub fn state(&self, n_dims: usize) -> &'static [StateTensor] {
        self.rule().state(n_dims)
    }

    /// See [`Rule::sums`].
    pub fn sums(&self, n_dims: usize) -> &'static [&'static [Extent]] {
        self.rule().sums(n_dims)
    }

    /// Values of its state for each element of a matrix, without state of rows and columns.
    pub fn n_state_of_elements(&self) -> usize {
        self.state(2).iter().filter(|tensor| tensor.extent == Extent::Elements).count()
    }

    /// The least words of 32 bits that its state takes for each element of a matrix, without state of rows and columns.
    pub fn words_of_element(&self) -> f64 {
        let words = |tensor: &StateTensor| match tensor.extent {
            Extent::Elements => 1.0,
            Extent::Blocks => STATE_WORDS as f64 / STATE_BLOCK as f64,
            Extent::Rows | Extent::Columns | Extent::Tensor => 0.0,
        };
        self.state(2).iter().map(words).sum()
    }

    /// Whether its state is stored in blocks, which are never cut.
    pub fn has_blocks(&self) -> bool {
        self.state(2).iter().any(|tensor| tensor.extent == Extent::Blocks)
    }

    /// See [`Rule::scalars`].
    pub fn scalars(&self, t: u64) -> [f64; N_SCALARS] {
        self.rule().scalars(t)
    }

    /// The same for a parameter that is exempt from weight decay.
    #[must_use]
    pub fn without_decay(mut self) -> OptimizerSpec {
        self.set(WEIGHT_DECAY, 0.0);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_word_names_one_optimizer() {
        let words: Vec<&str> = OptimizerSpec::all().iter().flat_map(OptimizerSpec::words).copied().collect();

        assert_eq!(words.iter().collect::<BTreeSet<_>>().len(), words.len(), "{words:?}");
        for word in words {
            assert!(OptimizerSpec::named(word).is_some_and(|o| o.words().contains(&word)), "{word}");
        }
        assert_eq!(OptimizerSpec::named("adam_of_tomorrow"), None);
    }

    #[test]
    fn every_hyperparameter_is_read_and_written_by_its_key_and_its_default_fits() {
        for mut optimizer in OptimizerSpec::all() {
            let list: Vec<(&str, Range, f64)> =
                optimizer.hyperparameters().into_iter().map(|h| (h.key, h.range, *h.value)).collect();
            for (i, (key, range, default)) in list.iter().enumerate() {
                assert!(range.holds(*default), "{} {key}", optimizer.name());
                let value = 0.25 + i as f64 / 64.0;
                assert!(optimizer.set(key, value));
                assert_eq!(optimizer.get(key), Some(value), "{} {key}", optimizer.name());
            }
            assert!(!optimizer.set("of_no_rule", 1.0));
            assert_eq!(optimizer.get("of_no_rule"), None);
        }
    }

    #[test]
    fn exemption_from_decay_changes_nothing_else() {
        let with = AdamW { weight_decay: 0.1, ..AdamW::default() };

        let without = OptimizerSpec::AdamW(with).without_decay();

        assert_eq!(without, OptimizerSpec::AdamW(AdamW { weight_decay: 0.0, ..with }));
    }
}
