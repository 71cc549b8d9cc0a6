//! A model of rewards: it gives preferred answers greater scores than rejected ones.
//!
//! Source: Bradley and Terry 1952; Ouyang et al. 2022, eq. 1 (arXiv:2203.02155); Eisenstein et al. 2023, §2 (arXiv:2312.09244), for scores
//! around zero.

use super::Unit;
use super::pairs::{CHOSEN, OfPairs, REJECTED, Scalar, Term, score};
use crate::program::formula::Expr;

/// The objective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reward {
    /// Weight of the square of the sum of both scores, which are otherwise free up to a constant.
    pub center: f64,
}

fn margin() -> Expr {
    score(CHOSEN) - score(REJECTED)
}

impl OfPairs for Reward {
    fn has_scores(&self) -> bool {
        true
    }

    fn terms(&self) -> Vec<Term> {
        let term = |formula| Term { formula, unit: Unit::Sample };
        let center = || term(self.center * (score(CHOSEN) + score(REJECTED)).squared());
        [Some(term(-margin().log_sigmoid())), (self.center > 0.0).then(center)].into_iter().flatten().collect()
    }

    fn scalars(&self) -> Vec<Scalar> {
        let scalar = |name, formula| Scalar::of(name, formula, Unit::Sample);
        vec![
            scalar("accuracy", margin().positive()),
            scalar("margin", margin()),
            scalar("mean_reward", 0.5 * (score(CHOSEN) + score(REJECTED))),
        ]
    }
}
