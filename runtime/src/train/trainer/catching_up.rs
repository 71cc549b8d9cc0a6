//! Catching up in the trainer: the catching-up side and the sending side ([`phalanx_strategies::elastic::catch_up`]).
//!
//! A catching-up member has the programs and the arena of its future rank and runs the apply phase of each step itself;
//! ranks that train the same shards send the results of the compute phase. Each step has three parts at both ends:
//! pages of state while the others compute; then the gradients and their acknowledgement, before any member votes; then
//! the commit. Without the acknowledgement a member behind a slow network would always be one step late and never
//! finish catching up.

use super::{Member, Outcome, Trainer};
use crate::error::JobError;
use crate::error::peer::PeerError;
use crate::train::catch_up_transfer::CatchUpTransfer;
use crate::train::links::Links;
use phalanx_device::span::SpanMut;
use phalanx_strategies::objective::{Counts, Sums, Unit};
use phalanx_strategies::passes::shadow::log;
use phalanx_strategies::program::{Role, ValueId};

/// A catching-up member that receives a rank's gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Follower {
    /// Its index among the members of the world.
    pub(crate) member: u32,
    /// Whether this rank also sends it the scalars and the outcome of each step.
    pub(crate) leads: bool,
}

/// What a rank sends to catching-up members.
#[derive(Default)]
pub(crate) struct OutgoingCatchUp {
    pub(crate) catch_up_transfers: Vec<CatchUpTransfer>,
    pub(crate) followers: Vec<Follower>,
}

/// What a catching-up member receives.
#[derive(Default)]
pub(crate) struct IncomingCatchUp {
    pub(crate) catch_up_transfers: Vec<CatchUpTransfer>,
    /// The ranks that send it gradients: for each of its shards, its own first.
    pub(crate) gradient_senders: Vec<u32>,
}

/// Number of scalars of a step that are known before its outcome, besides those of its update.
const N_KNOWN: usize = 2 + Unit::N;

impl Trainer<'_> {
    /// Starts to catch up beside a world.
    pub(crate) fn start_catch_up(&mut self, links: Links, incoming_catch_up: IncomingCatchUp) {
        self.link(links, Vec::new(), OutgoingCatchUp::default());
        self.incoming_catch_up = incoming_catch_up;
    }

    /// Whether the state of its rank is complete.
    pub(crate) fn is_whole(&self) -> bool {
        self.incoming_catch_up.catch_up_transfers.iter().all(CatchUpTransfer::is_over)
    }

    /// Catches up, and keeps up, until the world ends.
    ///
    /// # Errors
    /// When the world ends, in any case.
    pub(crate) fn receive_catch_up(&mut self, member: &mut dyn Member) -> Result<(), JobError> {
        let leader = self.incoming_catch_up.gradient_senders[0];
        let mut has_caught_up = false;
        loop {
            self.links.receive_catch_up(&mut self.incoming_catch_up.catch_up_transfers)?;
            if !has_caught_up && self.is_whole() {
                has_caught_up = true;
                member.caught_up(self.state.step)?;
            }
            let outcome = self.gradients_of_others()?;
            let next = self.judge(&outcome)?;
            self.open = Some((next, outcome));
            member.followed(next.step)?;
            self.links.send_number(leader, next.step as f64)?;
            let counts = self.links.receive_number(leader)?;
            if counts != next.step as f64 {
                return Err(PeerError::Outcome { member: leader, theirs: counts, here: next.step }.into());
            }
            member.outcome(next.step)?;
            self.update_alone()?;
        }
    }

    /// Receives the inputs of the apply phase.
    fn gradients_of_others(&mut self) -> Result<Outcome, JobError> {
        let c = &self.programs.train;
        let (gradients, hyper) = (log(&c.program, &c.phases), c.program.bound(Role::Hyper).next());
        let bytes_max = self.exchanged_at_once();
        let n_elements = |v: ValueId| c.program.value(v).n_elements();
        let n_sums = self.report.n_sums();
        let mut scalars = vec![0.0; N_KNOWN + n_sums + hyper.map_or(0, n_elements)];
        let own = std::iter::once(SpanMut::from(bytemuck::cast_slice_mut::<f64, f32>(&mut scalars)));
        let whole: Vec<_> = gradients.into_iter().map(|grad| (grad, 0..n_elements(grad))).collect();
        let own = own.chain(self.machine.spans_mut(c, &whole).expect("gradients do not overlap")).collect();
        let copies = self.shadows.iter_mut().map(|shadow| shadow.gradients());
        let gradient_senders = self.incoming_catch_up.gradient_senders.iter().copied();
        let receives: Vec<(u32, Vec<SpanMut<'_>>)> = gradient_senders.zip(std::iter::once(own).chain(copies)).collect();
        self.links.exchange(&[], &receives, bytes_max)?;
        drop(receives);
        let (known, rest) = scalars.split_at(N_KNOWN);
        let (sums, of_update) = rest.split_at(n_sums);
        let [grad_norm, factor, of_counts @ ..]: [f64; N_KNOWN] =
            known.try_into().expect("the slice has N_KNOWN scalars");
        let counts = Counts(of_counts.map(|n| n as u64));
        if let Some(hyper) = hyper {
            self.machine.write(c, hyper, 0, of_update);
        }
        if let Some(coefficient) = c.program.bound(Role::ClipCoefficient).next() {
            self.machine.write(c, coefficient, 0, &[factor]);
        }
        let (data_wait_s, collective_s, step_s) = (0.0, 0.0, 0.0);
        let (own_loss, verify_s) = (0, None);
        let sums = Sums::of(sums);
        Ok(Outcome { sums, own_loss, verify_s, grad_norm, counts, data_wait_s, collective_s, step_s })
    }

    /// Sends scalars to the followers of this rank, besides its gradients.
    pub(super) fn known_of_step(&self, outcome: &Outcome) -> Vec<f64> {
        let c = &self.programs.train;
        let factor = c.program.bound(Role::ClipCoefficient).next();
        let factor = factor.map_or(0.0, |factor| self.machine.first::<f64>(c, factor));
        let counts = outcome.counts.0.map(|n| n as f64);
        let hyper = c.program.bound(Role::Hyper).next().map(|hyper| self.machine.read::<f64>(c, hyper));
        let known = [outcome.grad_norm, factor].into_iter().chain(counts);
        known.chain(outcome.sums.iter().copied()).chain(hyper.into_iter().flatten()).collect()
    }

    /// Waits until the followers that this rank leads have all gradients of the open step, including those of other ranks.
    pub(super) fn await_followers(&mut self) -> Result<(), JobError> {
        let step = (self.state.step + 1) as f64;
        for follower in self.outgoing_catch_up.followers.iter().filter(|follower| follower.leads) {
            let has = self.links.receive_number(follower.member)?;
            if has != step {
                return Err(PeerError::Gradients { member: follower.member, theirs: has, here: step }.into());
            }
        }
        Ok(())
    }

    /// Sends the followers of this rank the commit of its last step.
    pub(super) fn notify_followers(&mut self) -> Result<(), JobError> {
        let step = self.state.step as f64;
        let mut led = self.outgoing_catch_up.followers.iter().filter(|follower| follower.leads);
        Ok(led.try_for_each(|follower| self.links.send_number(follower.member, step))?)
    }
}
