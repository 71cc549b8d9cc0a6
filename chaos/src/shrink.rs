//! Minimizes a failing plan: removes faults as long as the run still fails.

use crate::plan::Plan;
use crate::sim::{Config, run};

/// The smallest plan found that violates the same invariant. Removes halves, then quarters, down to single faults.
/// Source: Zeller and Hildebrandt 2002, "Simplifying and isolating failure-inducing input" (ddmin).
pub fn shrink(config: Config, plan: &Plan) -> Plan {
    let Some(broken) = run(config, plan).violation else { return plan.clone() };
    let fails = |plan: &Plan| run(config, plan).violation.is_some_and(|v| v.invariant == broken.invariant);
    let mut plan = plan.clone();
    let mut chunk = plan.0.len().div_ceil(2).max(1);
    loop {
        let mut first = 0;
        while first < plan.0.len() {
            let mut smaller = plan.clone();
            smaller.0.drain(first..(first + chunk).min(plan.0.len()));
            if fails(&smaller) {
                plan = smaller;
            } else {
                first += chunk;
            }
        }
        if chunk == 1 {
            return plan;
        }
        chunk = chunk.div_ceil(2);
    }
}
