//! Direct preference optimisation: a preferred answer becomes more likely than a rejected one, relative to a frozen reference.
//!
//! Source: Rafailov et al. 2023, §4 (arXiv:2305.18290). The losses are those of TRL, by its names; each has its source.

use super::Unit;
use super::cpo::likelihood;
use super::pairs::{CHOSEN, OfPairs, REJECTED, Scalar, Term, length, log_prob, reference, scalars_of};
use crate::program::formula::Expr;

/// The function of the log-ratios `c` and `r` of the preferred and the rejected answer, model over reference; `x = c - r`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DpoLoss {
    /// `-ln sigmoid(beta x)`; with smoothing, a mean of it and of the loss of the exchanged pair.
    #[default]
    Sigmoid,
    /// `max(0, 1 - beta x)`. Source: Zhao et al. 2023, SLiC (arXiv:2305.10425).
    Hinge,
    /// `(x - 1 / (2 beta))²`, with log-ratios averaged over the tokens of an answer. Source: Azar et al. 2023, eq. 17
    /// (arXiv:2310.12036).
    Ipo,
    /// Divergence from the distribution of a label that is wrong with the probability of the smoothing. Source: Ji et al. 2024,
    /// eq. 16 (arXiv:2402.00856).
    ExoPair,
    /// Each answer against a constant. Source: Chen et al. 2024, NCA (arXiv:2402.05369).
    NcaPair,
    /// Unbiased if labels are wrong with the probability of the smoothing. Source: Chowdhury et al. 2024 (arXiv:2403.00409).
    Robust,
    /// The answers classified one by one. Source: Jung et al. 2024, BCO (arXiv:2404.04656), without its shift.
    BcoPair,
    /// Squared distances to `1 / (2 beta)` and to its opposite. Source: Wu et al. 2024, eq. 4.7 (arXiv:2405.00675).
    SppoHard,
    /// Preferred answers become more likely, rejected ones less. Source: D'Oosterlinck et al. 2024, eq. 7 (arXiv:2408.06266).
    ApoZero,
    /// Both become less likely, rejected ones more so. Source: as above, eq. 8.
    ApoDown,
    /// Source: Lu et al. 2024, eq. 5 (arXiv:2406.08414), with its temperature of 0.05.
    Discopop,
    /// As [`DpoLoss::Sigmoid`], with log-ratios averaged over the tokens of an answer.
    SigmoidNorm,
}

impl DpoLoss {
    /// Whether the label smoothing changes the loss.
    pub fn is_smoothed(self) -> bool {
        matches!(self, DpoLoss::Sigmoid | DpoLoss::ExoPair | DpoLoss::Robust)
    }
}

/// Temperature of the modulation of [`DpoLoss::Discopop`].
const DISCOPOP_TEMPERATURE: f64 = 0.05;

/// The objective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dpo {
    /// How closely the model stays to the reference.
    pub beta: f64,
    /// The loss.
    pub loss: DpoLoss,
    /// Probability that a label of a pair is wrong, for losses that take it into account.
    pub label_smoothing: f64,
    /// Weight of the likelihood of preferred answers. Source: Pang et al. 2024, RPO (arXiv:2404.19733).
    pub alpha: f64,
    /// Whether the log-probabilities of the reference are computed once, before the first step.
    pub computed_before: bool,
}

/// Log-ratio of an answer.
fn ratio(row: u32) -> Expr {
    log_prob(row) - reference(row)
}

/// The same of its average token.
fn mean_ratio(row: u32) -> Expr {
    ratio(row) / length(row)
}

impl Dpo {
    fn loss(&self) -> Expr {
        let (beta, wrong) = (self.beta, self.label_smoothing);
        let [chosen, rejected] = [CHOSEN, REJECTED].map(ratio);
        let x = beta * (chosen.clone() - rejected.clone());
        // Their rewards.
        let (c, r) = (beta * chosen.clone(), beta * rejected.clone());
        let [mean_chosen, mean_rejected] = [CHOSEN, REJECTED].map(mean_ratio);
        let mean = mean_chosen - mean_rejected;
        match self.loss {
            DpoLoss::Sigmoid => -((1.0 - wrong) * x.clone().log_sigmoid() + wrong * (-x).log_sigmoid()),
            DpoLoss::Hinge => (1.0 - x).relu(),
            DpoLoss::Ipo => (mean - 1.0 / (2.0 * beta)).squared(),
            DpoLoss::ExoPair => {
                let right = x.clone().sigmoid() * (x.clone().log_sigmoid() - (1.0 - wrong).ln());
                right + (-x.clone()).sigmoid() * ((-x).log_sigmoid() - wrong.ln())
            }
            DpoLoss::NcaPair => -(c.clone().log_sigmoid() + 0.5 * (-c).log_sigmoid() + 0.5 * (-r).log_sigmoid()),
            DpoLoss::Robust => {
                let of_labels = (1.0 - wrong) * x.clone().log_sigmoid() - wrong * (-x).log_sigmoid();
                -of_labels / (1.0 - 2.0 * wrong)
            }
            DpoLoss::BcoPair => -(c.log_sigmoid() + (-r).log_sigmoid()),
            DpoLoss::SppoHard => (chosen - 0.5 / beta).squared() + (rejected + 0.5 / beta).squared(),
            DpoLoss::ApoZero => 1.0 - c.sigmoid() + r.sigmoid(),
            DpoLoss::ApoDown => 1.0 + c.sigmoid() - x.sigmoid(),
            DpoLoss::Discopop => {
                let share = (x.clone() / DISCOPOP_TEMPERATURE).sigmoid();
                -x.clone().log_sigmoid() * (1.0 - share.clone()) + (-x).exp() * share
            }
            DpoLoss::SigmoidNorm => -(beta * mean).log_sigmoid(),
        }
    }
}

impl OfPairs for Dpo {
    fn has_reference(&self) -> bool {
        true
    }

    fn has_computed_reference(&self) -> bool {
        self.computed_before
    }

    fn terms(&self) -> Vec<Term> {
        let (of_text, unit) = likelihood();
        let text = Term { formula: self.alpha * of_text, unit };
        let loss = Term { formula: self.loss(), unit: Unit::Sample };
        [Some(loss), (self.alpha > 0.0).then_some(text)].into_iter().flatten().collect()
    }

    fn scalars(&self) -> Vec<Scalar> {
        scalars_of(|row| self.beta * ratio(row), log_prob)
    }
}
