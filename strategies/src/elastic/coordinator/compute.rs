//! What the ranks of a job compute on.
//!
//! Invariant:
//! - `COORDINATOR-11` All ranks of a job compute on processors, or all on devices of their nodes; with
//!   [`Policy::one_model`](super::super::mesh_choice::Policy::one_model), on devices of one model. The first node that reports
//!   decides. A node that differs is refused: it takes no part, and its supervisor ends with the reason.

use super::super::message::{Compute, DesiredState, Refusal, Report};
use super::{Command, Coordinator, Phase, Purpose};

/// How a node differs from the job.
enum Difference {
    /// It may not take part.
    Refused(String),
    /// It may.
    Mixed(String),
}

impl Coordinator {
    /// Whether the reporting node may not take part; then it is told why. A node without devices has none from its first report
    /// on, and a node with devices names all of them there.
    pub(super) fn refuses(&mut self, report: &Report) -> bool {
        let found = compute_of(report);
        let compute = self.compute.get_or_insert(found).clone();
        let is_new = self.judged.get(&report.node) != Some(&report.boot);
        let node = report.node;
        let of_operator = self.is_gone(report).then(|| {
            Difference::Refused(format!(
                "the operator has declared {node} gone, and the job continues without its processes: start the node again to \
                 take part"
            ))
        });
        let of_inputs = || self.difference_of_inputs(report).map(Difference::Refused);
        match of_operator.or_else(of_inputs).or_else(|| difference(&compute, report, self.policy.one_model)) {
            None => false,
            Some(Difference::Mixed(text)) => {
                if is_new {
                    self.judged.insert(node, report.boot);
                    self.commands.push_back(Command::Mixed(node, text));
                }
                false
            }
            Some(Difference::Refused(reason)) => {
                if is_new {
                    self.judged.insert(node, report.boot);
                    self.commands.push_back(Command::Refused(node, reason.clone()));
                }
                let (job, id, requests) = (self.job, self.desired_state_id(), self.record.requests);
                let refused = Some(Refusal { boot: report.boot, reason });
                let refusal =
                    DesiredState { job, id, world_plan: None, evict: vec![], requests, release: None, refused };
                self.commands.push_back(Command::Send(node, refusal));
                true
            }
        }
    }
}

impl Coordinator {
    /// Makes durable what the first report has decided, before the first world: a refused node that does not know yet must not
    /// decide otherwise at the next coordinator. Jobs on the processors of one machine have nothing to decide. Returns whether
    /// there is something to write.
    pub(super) fn write_decisions(&mut self) -> bool {
        let has_devices = matches!(self.compute, Some(Compute::Devices(_)));
        let writes_compute = has_devices && self.record.compute.is_none();
        let writes_inputs = self.inputs.is_some() && self.record.inputs.is_none();
        if !(writes_compute || writes_inputs) || matches!(self.phase, Phase::Deposed | Phase::Ended { .. }) {
            return false;
        }
        self.write(self.record.clone(), Purpose::Close);
        true
    }
}

fn compute_of(report: &Report) -> Compute {
    report.devices.first().map_or(Compute::Processors, |device| Compute::Devices(device.name.clone()))
}

fn difference(job: &Compute, report: &Report, one_model: bool) -> Option<Difference> {
    let node = report.node;
    match (job, compute_of(report)) {
        (Compute::Processors, Compute::Processors) => None,
        (Compute::Processors, Compute::Devices(model)) => Some(Difference::Refused(format!(
            "{node} computes on GPUs ({model}) and the ranks of this job on processors, and a world cannot mix them: start \
             the job with `device: cpu`, or only on machines with GPUs"
        ))),
        (Compute::Devices(model), Compute::Processors) => Some(Difference::Refused(format!(
            "{node} computes on its processors and the ranks of this job on GPUs ({model}), and a world cannot mix them: \
             `device: cuda` makes the node name what it lacks, `device: cpu` runs the whole job on processors"
        ))),
        (Compute::Devices(model), Compute::Devices(_)) => {
            let other = report.devices.iter().map(|device| &device.name).find(|name| *name != model)?;
            Some(if one_model {
                Difference::Refused(format!(
                    "{node} has a GPU of another model ({other}) than the job ({model}), and with `reproducible` all ranks \
                     need one model, because the results of models differ in their last bits"
                ))
            } else {
                Difference::Mixed(format!(
                    "{node} has a GPU of another model ({other}) than the job ({model}): every step takes as long as on the \
                     slower one"
                ))
            })
        }
    }
}
