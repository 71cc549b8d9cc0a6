//! Trains in a world, and passes on what happens.

use crate::error::JobError;
use crate::events::{Event, Report};
use crate::rank::device::Device;
use crate::rank::instance::RankInstance;
use crate::rank::port::Membership;
use crate::rank::rank_messages::FromRank;
use crate::rank::recycled_arenas::largest_spare;
use crate::train::event_sink::EventSink;
use crate::train::saving::Saving;
use crate::train::step_trace::StepTrace;
use crate::train::trainer::{Pause, TrainData, Trainer};
use phalanx_actors::rank::DeviceEvent;
use phalanx_actors::step_log::StepWriter;
use phalanx_strategies::elastic::identity::Generation;
use phalanx_strategies::elastic::progress::At;

impl<'a> Device<'a> {
    pub(super) fn train(&mut self, steps: StepWriter, trains: bool) -> Result<(), JobError> {
        let generation = steps.generation();
        self.give_up_before(generation);
        let mut saving = self.saving(generation);
        let Some(mut instance) = self.instances.pop() else { return Ok(()) };
        instance.trainer.verification_mut().memory = std::mem::take(&mut self.memory);
        instance.trainer.begin_verification(instance.disputed.clone());
        instance.trainer.planted = std::mem::take(&mut self.planted);
        saving.saved_elsewhere = self.saved_elsewhere.take();
        let trained = self.train_in(&mut instance, &mut saving, steps, trains);
        self.saved_elsewhere = saving.saved_elsewhere.take();
        self.planted = std::mem::take(&mut instance.trainer.planted);
        self.memory = std::mem::take(&mut instance.trainer.verification_mut().memory);
        self.instances.push(instance);
        if let Some(report) = trained? {
            self.outbox.send(&FromRank::Done(report));
        }
        self.rank.tell(DeviceEvent::Finished(generation));
        Ok(())
    }

    /// The world of this generation runs, so superseded state is dropped (`MEMBER-2`).
    pub(crate) fn give_up_before(&mut self, generation: Generation) {
        let is_of_it = |instance: &mut RankInstance<'a>| instance.generation == generation;
        let now: Vec<RankInstance<'a>> = self.instances.extract_if(.., is_of_it).collect();
        let before = std::mem::replace(&mut self.instances, now);
        let Some(now) = self.instances.last() else { return };
        let memory =
            |instance: &RankInstance<'a>| instance.trainer.arena().expect("a rank has memory").memory().clone();
        let spares = before.iter().map(|instance| (instance.memory.mesh.size(), memory(instance)));
        self.spare = largest_spare(spares.chain(self.spare.take()), now.memory.mesh.size(), &memory(now));
    }

    /// Trains to the end; the leader reports.
    fn train_in(
        &self,
        instance: &mut RankInstance<'a>,
        saving: &mut Saving,
        steps: StepWriter,
        trains: bool,
    ) -> Result<Option<Report>, JobError> {
        let output = &self.config.output;
        let leads = instance.memory.rank == 0;
        let first_step = instance.trainer.state.step;
        let member = Box::new(Membership { steps, rank: self.rank.clone() });
        instance.trainer.begin(instance.generation, instance.n_saves, member)?;
        let buffer_bytes = instance.trainer.buffer_bytes()?;
        let n_rows = (self.data.train.n_of_run(), self.data.validation.as_ref().map_or(0, |rows| rows.len()));
        let (generation, rank) = (instance.generation.0, instance.memory.rank as u32);
        let (actor, outbox, watch) = (&self.rank, &self.outbox, &self.device_watch);
        let mut on_event = |event: &Event| {
            if let Event::Step(_) = event {
                watch.commit();
            }
            saved(generation, event).into_iter().for_each(|event| actor.tell(event));
            if leads || matches!(event, Event::Step(_)) {
                outbox.send(&FromRank::Event { generation, rank, event: event.clone() });
            }
        };
        let found = self.start_from.as_ref().filter(|(step, _)| instance.from_disk && *step == first_step);
        let resumed = found.map(|(_, path)| path.clone());
        let started = instance.trainer.started(n_rows, self.n_threads, buffer_bytes, resumed.clone());
        on_event(&Event::Started(started));
        let trace = output.trace.as_deref().filter(|_| instance.from_disk);
        instance.trainer.trace = trace.map(|path| StepTrace::new(path, first_step, self.run.total_steps));
        let mut event_sink =
            EventSink::new(&output.folder(), first_step, leads, saving, resumed, self.fault.clone(), &mut on_event);
        instance.trainer.agree_on_best()?;
        if let Some(metrics) = instance.trainer.take_settled()? {
            event_sink.make_up_for(metrics);
        }
        let data = self.train_data();
        let lacks_evaluation = event_sink.lacks_evaluation(first_step);
        instance.trainer.agree_on_unfinished(&data, lacks_evaluation, instance.from_disk)?;
        if first_step == self.run.total_steps && instance.from_disk {
            event_sink.emit(Event::Note(format!("all {first_step} steps were already done")));
        }
        if trains {
            let ended = instance.trainer.train(&data, saving, &self.control, &mut |event| event_sink.emit(event))?;
            if ended == Pause::Paused {
                return Ok(None);
            }
        } else {
            save_last(&mut instance.trainer, &data, saving, &mut event_sink)?;
        }
        let mut report = event_sink.report.clone();
        report.finished = report.steps >= self.run.total_steps || instance.trainer.is_over();
        if report.finished && leads {
            let _stores = self.progress_counter.during(At::Stores);
            report.model_dir = Some(event_sink.export(&output.folder(), &instance.trainer, saving)?);
        }
        Ok(leads.then_some(report))
    }

    /// The rows of the job, and when it evaluates and saves.
    fn train_data(&self) -> TrainData<'_> {
        TrainData {
            train: &self.data.train,
            validation: self.data.validation.as_ref(),
            eval_steps: self.run.eval_steps,
            save_steps: self.run.save_steps,
            checkpoint_required: self.config.output.checkpoint_required,
        }
    }

    pub(super) fn tell(&self, instance: &RankInstance<'a>, event: Event) {
        if instance.memory.rank == 0 || matches!(event, Event::Step(_)) {
            self.outbox.send(&FromRank::Event {
                generation: instance.generation.0,
                rank: instance.memory.rank as u32,
                event,
            });
        }
    }
}

/// Saves the last step in a world that trains no more: earlier worlds have completed it, or their checkpoint was lost, or the job fails.
fn save_last(
    trainer: &mut Trainer<'_>,
    data: &TrainData<'_>,
    saving: &mut Saving,
    event_sink: &mut EventSink<'_>,
) -> Result<(), JobError> {
    // The run that resumes needs it, and its state is saved in any case.
    let _is_whole = trainer.keep_reference(data, saving)?;
    trainer.check_weights()?;
    trainer.verify_if_due(true, 1.0)?;
    let outcome = trainer.save(saving)?;
    trainer.conclude_last(outcome, saving, &mut |event| event_sink.emit(event))
}

/// What the rank's actor learns of a checkpoint.
fn saved(generation: u64, event: &Event) -> Option<DeviceEvent> {
    match event {
        Event::Saved { step, .. } => Some(DeviceEvent::Saved(*step)),
        Event::NotSaved { step, reason } => Some(DeviceEvent::NotSaved(Generation(generation), *step, reason.clone())),
        _ => None,
    }
}
