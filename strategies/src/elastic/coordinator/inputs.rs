//! What the nodes of a job train on and with.
//!
//! Invariant:
//! - `COORDINATOR-15` All nodes of a job have the same inputs. The first node that reports decides. A node that differs is
//!   refused: it takes no part, and its supervisor ends with the reason. If it took part before it restarted, its report proves
//!   that the processes of that time are gone, so that the job goes on without waiting for them.

use super::super::inputs::difference;
use super::super::message::Report;
use super::Coordinator;

impl Coordinator {
    /// Why the reporting node may not take part, if its inputs are not the job's.
    pub(super) fn difference_of_inputs(&mut self, report: &Report) -> Option<String> {
        // The node of a job on one machine names none: nobody joins it. Such a job may be led over several machines later.
        if self.inputs.is_none() && !report.inputs.is_empty() {
            self.inputs = Some(report.inputs.clone());
        }
        let difference = difference(self.inputs.as_ref()?, &report.inputs)?;
        let node = report.node;
        Some(format!(
            "{node} {difference}, which the job's first node has; ranks of both would train another model than either \
             alone: give all nodes the same files and the same version of Phalanx"
        ))
    }
}
