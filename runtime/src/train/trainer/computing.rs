//! One step: its gradients, the vote for it, and the update.

use super::{Outcome, STREAM_POLL, Trainer};
use crate::control::Control;
use crate::data::prepare::PrepareError;
use crate::data::rows::Rows;
use crate::error::JobError;
use crate::train::links::{Exchange, STAGED, WHOLE};
use crate::train::saving::{SaveOutcome, Saving, TrainerState};
use crate::train::step_trace::StepTrace;
use crate::train::vote::Vote;
use crate::train::{shadow, weights};
use phalanx_device::span::{SpanMut, SpanRef};
use phalanx_device::{ExecError, Machine, Run};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::elastic::message::Requests;
use phalanx_strategies::elastic::progress::At;
use phalanx_strategies::loss_scale::Verdict;
use phalanx_strategies::mesh::Axis;
use phalanx_strategies::objective::{Counts, Sums};
use phalanx_strategies::passes::shadow::log;
use phalanx_strategies::program::{Hyper, Role, ValueId};
use phalanx_strategies::tree::leaves_of;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Trainer<'_> {
    /// Computes the gradients of the next step, which is open once they are finite.
    pub(super) fn open_step(&mut self, rows: &Rows) -> Result<(), JobError> {
        let outcome = self.prepare_with_faults(rows)?;
        let judged = self.judge(&outcome);
        if let Err(JobError::NonFinite { what, .. }) = judged {
            // All ranks have the same loss and gradient norm. A broken copy of the state is not a diverged model.
            self.verify_if_due(true, outcome.step_s)?;
            self.repeat_once(what)?;
        }
        self.open = Some((judged?, outcome));
        Ok(())
    }

    /// Agrees with all other ranks that the open step counts. Returns the requests, whether a checkpoint was newly
    /// requested, and the background save that has ended, if any: a rank applies a committed step even if the save failed.
    pub(super) fn vote(
        &mut self,
        control: &Control,
        saving: &mut Saving,
        is_due: bool,
    ) -> Result<(Requests, bool, Option<SaveOutcome>), JobError> {
        let step = self.state.step + 1;
        self.member.as_mut().map_or(Ok(()), |member| member.computed(step))?;
        // A running save finishes first. A step after which another is due would wait for it in any case.
        let pauses = self.member.is_some() && control.pause.load(Ordering::Acquire) == self.generation.0;
        // Any rank may be asked to stop; the leader passes requests to save on to all ranks.
        let own = Vote {
            n_stop: u64::from(control.stop.load(Ordering::Acquire) || self.is_over()),
            n_saves: if self.team.leads() { control.saves.load(Ordering::Acquire) } else { 0 },
            n_pause: u64::from(pauses && (saving.is_idle() || is_due)),
            save: saving.ballot(),
        };
        let start = Instant::now();
        let all = own.counted(&mut self.team)?;
        let waited_s = start.elapsed().as_secs_f64();
        if let Some((_, outcome)) = &mut self.open {
            (outcome.collective_s, outcome.step_s) = (outcome.collective_s + waited_s, outcome.step_s + waited_s);
        }
        let requests = all.requests(self.generation);
        self.member.as_mut().map_or(Ok(()), |member| member.committed(step, requests))?;
        Ok((requests, self.is_asked(all.n_saves), saving.count(all.save, &self.team)))
    }

    /// Sends this step's gradients to shadow holders and followers of this rank, and receives those of other ranks.
    #[allow(unsafe_code)] // Repeats an exchange whose gradients are no longer borrowed.
    fn share_gradients(&mut self, outcome: &Outcome) -> Result<(), JobError> {
        let followers = &self.outgoing_catch_up.followers;
        if self.shadow_holders.is_empty() && self.shadows.is_empty() && followers.is_empty() {
            return Ok(());
        }
        if let Some(gradients) = self.gradients.as_mut().filter(|_| followers.is_empty()) {
            // SAFETY: it points to gradients of this machine and of the shadows, which have not moved: every method that
            // maps or replaces a machine resets it. No program runs on these machines before this returns.
            return Ok(unsafe { self.links.repeat(gradients) }?);
        }
        let known = if followers.is_empty() { Vec::new() } else { self.known_of_step(outcome) };
        let c = &self.programs.train;
        let bytes_max = self.exchanged_at_once();
        let whole = |grad: ValueId| self.machine.source(c, grad, 0..c.program.value(grad).n_elements());
        let own: Vec<SpanRef<'_>> = log(&c.program, &c.phases).into_iter().map(whole).collect();
        let to_shadow_holders = self.shadow_holders.iter().map(|shadow_holder| (*shadow_holder, own.clone()));
        let to_followers = followers.iter().map(|follower| {
            let known = follower.leads.then(|| SpanRef::from(bytemuck::cast_slice::<f64, f32>(&known)));
            (follower.member, known.into_iter().chain(own.iter().cloned()).collect())
        });
        let sends: Vec<(u32, Vec<SpanRef<'_>>)> = to_shadow_holders.chain(to_followers).collect();
        let receives: Vec<(u32, Vec<SpanMut<'_>>)> =
            self.shadows.iter_mut().map(|shadow| (shadow.of, shadow.gradients())).collect();
        let mut exchange = Exchange::new(&sends, &receives, bytes_max);
        // SAFETY: the tensors are borrowed until this returns.
        unsafe { self.links.repeat(&mut exchange) }?;
        // The scalars for followers belong to this step alone.
        self.gradients = followers.is_empty().then_some(exchange);
        Ok(())
    }

    /// Bytes of gradients per operation; the ranks of a world have devices of the same kind.
    pub(crate) fn exchanged_at_once(&self) -> usize {
        if self.machine.memory().is_none() { WHOLE } else { STAGED }
    }

    /// Computes all that the update of the next step needs.
    pub(super) fn prepare(&mut self, rows: &Rows) -> Result<Outcome, JobError> {
        let start = Instant::now();
        self.sampler.fill_step(self.state.step, 0, &mut self.rows);
        self.await_rows(rows)?;
        let counts = rows.counts(&self.rows).map_err(PrepareError::from)?;
        // Each data-parallel rank takes a run of the step's microbatches.
        let mesh_rank = self.team.mesh_rank;
        let per_microbatch = self.plan.n_samples();
        let data_rank = mesh_rank.mesh.coord(mesh_rank.rank).data_rank(&mesh_rank.mesh);
        let own = leaves_of(self.rows.len() / per_microbatch, mesh_rank.mesh.data_ranks(), data_rank);
        let dropout = self.sampler.dropout_of(self.state.step);
        for (microbatch, inputs) in self.train_inputs.iter().enumerate().filter(|(_, i)| !i.is_empty()) {
            let counts = microbatch < own.len();
            let at = (own.start + if counts { microbatch } else { 0 }) * per_microbatch;
            let own_rows = &self.rows[at..at + per_microbatch];
            self.staging.fill(rows, own_rows, mesh_rank.on(Axis::Cp), dropout)?;
            if !counts {
                // This rank has one microbatch less than others and repeats its first to stay in step with them.
                self.staging.ignore(0);
            }
            self.staging.copy_to(&mut *self.machine, &self.programs.train, inputs);
        }
        let data_wait_s = start.elapsed().as_secs_f64();
        self.write_hyper(&counts);
        let c = &self.programs.train;
        self.team.groups.take_waited();
        let (machine, models, groups) = (&mut self.machine, &mut self.models, &mut self.team.groups);
        let trace = self.trace.as_mut().filter(|trace| trace.step == self.state.step);
        // The compute phase does not touch the state that updates change, so it can be sent meanwhile.
        let (ran, sent) = self.links.send_pages(&mut self.outgoing_catch_up.catch_up_transfers, || {
            let timings = trace.map(StepTrace::begin);
            machine.run(c, c.phases.compute(), &mut Run { groups, models, timings })?;
            // A rank votes for a step only after it has computed the step.
            machine.settle()
        });
        ran?;
        sent?;
        let outcome = Outcome {
            sums: sums_of_loss(&*self.machine, c, self.report.n_sums()),
            grad_norm: scalar(&*self.machine, c, Role::GradNorm),
            own_loss: if self.team.n_ranks() > 1 && self.verification.is_on() { self.own_loss() } else { 0 },
            counts,
            data_wait_s,
            collective_s: self.team.groups.take_waited().as_secs_f64(),
            verify_s: self.verification.spent_s.take(),
            step_s: start.elapsed().as_secs_f64(),
        };
        self.share_gradients(&outcome)?;
        self.await_followers()?;
        Ok(Outcome { step_s: start.elapsed().as_secs_f64(), ..outcome })
    }

    /// Waits until the rows of the step are prepared, which can take a while if they are of the next file of a stream.
    fn await_rows(&self, rows: &Rows) -> Result<(), JobError> {
        let last = self.rows.iter().copied().max().unwrap_or(0);
        if rows.are_ready(last)? {
            return Ok(());
        }
        tracing::info!(step = self.state.step + 1, "waiting until the next file of the stream is tokenised");
        let counter = self.team.groups.progress_counter();
        let _reads = counter.during(At::Stores);
        while !rows.are_ready(last)? {
            if counter.is_left() {
                return Err(ExecError::Left.into());
            }
            counter.tick();
            std::thread::sleep(STREAM_POLL);
        }
        Ok(())
    }

    /// A digest of this rank's part of the loss, of any number of terms.
    fn own_loss(&self) -> u64 {
        let c = &self.programs.train;
        let mut digest = 0u64;
        for value in c.program.bound(Role::OwnLoss) {
            self.machine.elements::<f64>(c, value, 0..c.program.value(value).n_elements()).iter().for_each(|term| {
                digest = digest.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ term.to_bits();
            });
        }
        digest
    }

    /// Makes the open step part of the state.
    pub(super) fn update(&mut self) -> Result<Outcome, JobError> {
        let programs = Arc::clone(&self.programs);
        let c = &programs.train;
        let step = self.state.step;
        let mut outcome = self.update_alone()?;
        if self.member.is_some() {
            self.settled = Some(self.metrics(step, &outcome));
        }
        let groups = &mut self.team.groups;
        let timings = self.trace.as_mut().filter(|trace| trace.step == step).map(StepTrace::go_on);
        self.machine.run(c, c.phases.gather(), &mut Run { groups, models: &mut self.models, timings })?;
        outcome.collective_s += self.team.groups.take_waited().as_secs_f64();
        Ok(outcome)
    }

    /// The part of [`Trainer::update`] that needs no other rank: the outcome of a step may become known only after its world
    /// has ended.
    ///
    /// # Panics
    /// If no step is open.
    pub(super) fn update_alone(&mut self) -> Result<Outcome, JobError> {
        let (next, outcome) = self.open.take().expect("a step is prepared before it is applied");
        let c = &self.programs.train;
        let (groups, models) = (&mut self.alone, &mut self.models[..]);
        let timings = self.trace.as_mut().filter(|trace| trace.step == self.state.step).map(StepTrace::go_on);
        shadow::update(&mut *self.machine, c, &mut self.shadows, &mut Run { groups, models, timings })?;
        self.state = next;
        Ok(outcome)
    }

    fn write_hyper(&mut self, counts: &Counts) {
        let c = &self.programs.train;
        let of_rule = self.plan.spec.optimizer.scalars(self.state.n_updates + 1);
        let scale = self.state.loss_scale.scale;
        if let Some(value) = c.program.bound(Role::Hyper).next() {
            let mut hyper = [0.0; Hyper::LEN];
            hyper[Hyper::LEARNING_RATE] = self.run.schedule.learning_rate(self.state.step);
            let ratio = self.plan.spec.lora.as_ref().and_then(|lora| lora.rate_ratio).unwrap_or(1.0);
            hyper[Hyper::ADAPTER_LEARNING_RATE] = ratio * hyper[Hyper::LEARNING_RATE];
            hyper[Hyper::RULE..][..of_rule.len()].copy_from_slice(&of_rule);
            for unit in &self.report.units {
                hyper[unit.hyper()] = scale / counts.of(*unit);
            }
            hyper[Hyper::LOSS_SCALE] = scale;
            self.machine.write(c, value, 0, &hyper);
        }
    }

    /// The position after the step, or why the step failed.
    pub(super) fn judge(&self, outcome: &Outcome) -> Result<TrainerState, JobError> {
        let step = self.state.step;
        let non_finite =
            |what| JobError::NonFinite { step: step + 1, what, parameter: self.first_non_finite(), last_good: step };
        if !outcome.sums.iter().take(self.report.units.len()).all(|sum| sum.is_finite()) {
            return Err(non_finite("the loss"));
        }
        let TrainerState { mut loss_scale, mut n_updates, .. } = self.state;
        match loss_scale.observe(outcome.grad_norm.is_finite()) {
            Verdict::Diverged => return Err(non_finite("the gradient")),
            Verdict::Updated => n_updates += 1,
            Verdict::Skipped => {}
        }
        Ok(TrainerState { step: step + 1, n_updates, loss_scale, ..self.state })
    }

    /// The first parameter, in table order, that is not finite; otherwise the first, in the order of the backward pass,
    /// with a gradient that is not finite.
    fn first_non_finite(&self) -> String {
        let c = &self.programs.train;
        if let Some(name) = weights::first_non_finite(&*self.machine, c) {
            return format!("the weights {name}");
        }
        let sums = c.program.bindings.iter().filter(|b| b.role == Role::GradSumSquares);
        let mut bad: Vec<usize> = sums
            .filter(|b| !self.machine.first::<f64>(c, b.value).is_finite())
            .map(|b| b.microbatch as usize)
            .collect();
        bad.sort_by_key(|p| std::cmp::Reverse(first_read(c, *p)));
        bad.first().map_or("the logits".into(), |p| format!("the gradient of {}", c.program.params[*p].parts[0].name))
    }
}

/// The sums of the loss of the last run of a program; not a number if it has none.
fn sums_of_loss(machine: &dyn Machine, c: &Compiled, n: usize) -> Sums {
    match c.program.bound(Role::LossSum).next() {
        None => Sums::filled(f64::NAN, n),
        Some(v) if n == 1 => Sums::filled(machine.first(c, v), n),
        Some(v) => Sums::of(&machine.elements(c, v, 0..n)),
    }
}

fn scalar(machine: &dyn Machine, c: &Compiled, role: Role) -> f64 {
    c.program.bound(role).next().map_or(f64::NAN, |v| machine.first::<f64>(c, v))
}

/// Index of the first instruction that reads a parameter; the backward pass reaches it in reverse order.
fn first_read(c: &Compiled, param: usize) -> usize {
    let value = c.program.params[param].value;
    c.program.instrs.iter().position(|i| i.reads.contains(&value)).unwrap_or(0)
}
