//! How a trainer catches up while others train, and what those others do for it
//! ([`phalanx_strategies::elastic::learner`]).
//!
//! Who learns has the programs and the memory of the seat that it is to have, and makes the second half of each step itself:
//! what the first half would have left there comes from ranks that train the same shards. Each step has three parts at both
//! ends: pages of state while the others compute; then the gradients, and the answer that all of them have come, before
//! anybody votes; then the word that the step counts. Without the answer whoever learns over a slow network would be a step
//! behind whenever the world makes room for it, and learn for ever.

use super::{Outcome, Trainer};
use crate::error::JobError;
use crate::train::lesson::Lesson;
use crate::train::links::Links;
use phalanx_device::span::Room;
use phalanx_strategies::passes::shadow::{coefficient, log};
use phalanx_strategies::program::{Role, ValueId};

/// Somebody who learns from the gradients of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Follower {
    /// By its position in the world.
    pub(crate) member: u32,
    /// Whether it also gets the scalars of each step and its outcome from here.
    pub(crate) leads: bool,
}

/// What a rank does for those who learn beside its world.
#[derive(Default)]
pub(crate) struct Teaching {
    pub(crate) lessons: Vec<Lesson>,
    pub(crate) followers: Vec<Follower>,
}

/// From whom one learns.
#[derive(Default)]
pub(crate) struct Learning {
    pub(crate) lessons: Vec<Lesson>,
    /// Those whose gradients it gets: for each of its shards, its own first.
    pub(crate) tutors: Vec<u32>,
}

/// What is known of a step before its outcome, besides the gradients and the scalars of its update.
const N_KNOWN: usize = 4;

impl Trainer<'_> {
    /// Takes its place beside a world.
    pub(crate) fn learn_from(&mut self, links: Links, learning: Learning) {
        self.link(links, Vec::new(), Teaching::default());
        self.learning = learning;
    }

    /// Whether all that its seat asks for has come.
    pub(crate) fn is_whole(&self) -> bool {
        self.learning.lessons.iter().all(Lesson::is_over)
    }

    /// Catches up, and keeps up, as long as the world is there.
    ///
    /// # Errors
    /// When the world ends, in any case.
    pub(crate) fn learn(&mut self) -> Result<(), JobError> {
        let member = self.member.clone().expect("who learns is a member of elastic worlds");
        let leader = self.learning.tutors[0];
        let mut has_learnt = false;
        loop {
            self.links.learn(&mut self.learning.lessons)?;
            if !has_learnt && self.is_whole() {
                has_learnt = true;
                member.learnt(self.state.step)?;
            }
            let outcome = self.gradients_of_others()?;
            let next = self.judge(&outcome)?;
            self.open = Some((next, outcome));
            member.followed(next.step)?;
            self.links.send_number(leader, next.step as f64)?;
            let counts = self.links.receive_number(leader)?;
            if counts != next.step as f64 {
                let what = format!("member {leader} says that step {counts} counts, and this one is at {}", next.step);
                return Err(JobError::Unusable(what));
            }
            member.outcome(next.step)?;
            self.update_alone()?;
        }
    }

    /// Gets what the second half of the step needs.
    fn gradients_of_others(&mut self) -> Result<Outcome, JobError> {
        let c = &self.programs.train;
        let (gradients, hyper) = (log(&c.program, &c.turn), c.program.bound(Role::Hyper).next());
        let bytes_max = self.exchanged_at_once();
        let n_elements = |v: ValueId| c.program.value(v).n_elements();
        let mut scalars = vec![0.0; N_KNOWN + hyper.map_or(0, n_elements)];
        let own = std::iter::once(Room::from(bytemuck::cast_slice_mut::<f64, f32>(&mut scalars)));
        let whole: Vec<_> = gradients.into_iter().map(|grad| (grad, 0..n_elements(grad))).collect();
        let own = own.chain(self.machine.rooms(c, &whole).expect("gradients lie apart")).collect();
        let copies = self.shadows.iter_mut().map(|shadow| shadow.gradients());
        let tutors = self.learning.tutors.iter().copied();
        let receives: Vec<(u32, Vec<Room<'_>>)> = tutors.zip(std::iter::once(own).chain(copies)).collect();
        self.links.exchange(&[], &receives, bytes_max)?;
        drop(receives);
        let (known, of_update) = scalars.split_at(N_KNOWN);
        let [loss_sum, grad_norm, predicted_tokens, factor] = known.try_into().expect("there are so many");
        if let Some(hyper) = hyper {
            self.machine.write(c, hyper, 0, of_update);
        }
        if let Some(coefficient) = coefficient(&c.program, &c.turn) {
            self.machine.write(c, coefficient, 0, &[factor]);
        }
        let predicted_tokens = predicted_tokens as u64;
        let (data_wait_s, collective_s, step_s) = (0.0, 0.0, 0.0);
        Ok(Outcome { loss_sum, grad_norm, predicted_tokens, data_wait_s, collective_s, step_s })
    }

    /// What those that learn from this rank get beside its gradients.
    pub(super) fn known_of_step(&self, outcome: &Outcome) -> Vec<f64> {
        let c = &self.programs.train;
        let factor = coefficient(&c.program, &c.turn).map_or(0.0, |factor| self.machine.first::<f64>(c, factor));
        let Outcome { loss_sum, grad_norm, predicted_tokens, .. } = *outcome;
        let known: [f64; N_KNOWN] = [loss_sum, grad_norm, predicted_tokens as f64, factor];
        let hyper = c.program.bound(Role::Hyper).next().map(|hyper| self.machine.read::<f64>(c, hyper));
        known.into_iter().chain(hyper.into_iter().flatten()).collect()
    }

    /// Waits until those that this rank leads have the gradients of the step that is open, those of other ranks included.
    pub(super) fn await_followers(&mut self) -> Result<(), JobError> {
        let step = (self.state.step + 1) as f64;
        for follower in self.teaching.followers.iter().filter(|follower| follower.leads) {
            let has = self.links.receive_number(follower.member)?;
            if has != step {
                let what =
                    format!("member {} has the gradients of step {has}, and this one is at {step}", follower.member);
                return Err(JobError::Unusable(what));
            }
        }
        Ok(())
    }

    /// Tells those that learn from this rank that its last step counts.
    pub(super) fn tell_followers(&mut self) -> Result<(), JobError> {
        let step = self.state.step as f64;
        let mut led = self.teaching.followers.iter().filter(|follower| follower.leads);
        Ok(led.try_for_each(|follower| self.links.send_number(follower.member, step))?)
    }
}
