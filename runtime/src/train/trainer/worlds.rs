//! What a trainer takes from one world of ranks to the next: its memory, its shadows, and an open step.

use super::catching_up::{IncomingCatchUp, OutgoingCatchUp};
use super::{Trainer, alone};
use crate::error::JobError;
use crate::events::StepMetrics;
use crate::train::links::Links;
use crate::train::member::Member;
use crate::train::saving::TrainerState;
use crate::train::shadow::Shadow;
use crate::train::team::Team;
use phalanx_device::shared_memory::Arena;
use phalanx_device::{Machine, Run};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::elastic::identity::Generation;

impl<'a> Trainer<'a> {
    /// The same trainer with room for copies of other ranks' state.
    pub(crate) fn with_shadows(self, shadows: Vec<Shadow>) -> Trainer<'a> {
        Trainer { shadows, ..self }
    }

    /// Whether its state is in this memory.
    pub(crate) fn is_in(&self, memory: Option<&Arena>) -> bool {
        memory.zip(self.arena()).is_some_and(|(a, b)| a.is_same(b))
    }

    /// The memory that it shares with its peers, if any.
    pub(crate) const fn arena(&self) -> Option<&Arena> {
        self.team.memory()
    }

    /// Joins the next world with the same rank.
    ///
    /// # Panics
    /// If the rank or its memory differs.
    pub(crate) fn rejoin(&mut self, team: Team) {
        assert!(
            team.mesh_rank == self.team.mesh_rank && self.is_in(team.memory()),
            "a trainer keeps its rank and its memory"
        );
        self.gradients = None;
        if let Some(memory) = team.memory() {
            self.machine.remap(memory);
            self.shadows.iter_mut().for_each(|shadow| shadow.machine.remap(memory));
        }
        self.alone = alone(&team);
        self.team = team;
    }

    /// Ends it: its machine, its position, and the metrics of its last step.
    pub(crate) fn into_parts(self) -> (Box<dyn Machine>, TrainerState, Option<StepMetrics>) {
        (self.machine, self.state, self.settled)
    }

    /// The metrics of its last step, in case they are unreported.
    pub(crate) const fn settled(&self) -> Option<&StepMetrics> {
        self.settled.as_ref()
    }

    /// The same trainer, with the metrics of the last step of an earlier one.
    #[must_use]
    pub(crate) fn with_settled(self, settled: Option<StepMetrics>) -> Trainer<'a> {
        Trainer { settled, ..self }
    }

    /// Sets the links for gradients outside the program, and the followers of this rank.
    pub(crate) fn link(&mut self, links: Links, shadow_holders: Vec<u32>, outgoing_catch_up: OutgoingCatchUp) {
        (self.links, self.shadow_holders, self.outgoing_catch_up) = (links, shadow_holders, outgoing_catch_up);
        (self.gradients, self.incoming_catch_up) = (None, IncomingCatchUp::default());
    }

    /// The program and the machine that hold its state.
    pub(crate) fn memory(&self) -> (&Compiled, &dyn Machine) {
        (&self.programs.train, &*self.machine)
    }

    /// As [`Trainer::memory`], mutable.
    pub(crate) fn memory_mut(&mut self) -> (&Compiled, &mut dyn Machine) {
        (&self.programs.train, &mut *self.machine)
    }

    /// As [`Trainer::memory_mut`], with its shadows.
    pub(crate) fn memories_mut(&mut self) -> ((&Compiled, &mut dyn Machine), &mut [Shadow]) {
        ((&self.programs.train, &mut *self.machine), &mut self.shadows)
    }

    pub(crate) fn shadows(&self) -> &[Shadow] {
        &self.shadows
    }

    pub(crate) fn shadows_mut(&mut self) -> &mut [Shadow] {
        &mut self.shadows
    }

    /// Applies the open step, whose commit became known after its world had ended.
    pub(crate) fn settle(&mut self) -> Result<(), JobError> {
        let step = self.state.step;
        let outcome = self.update_alone()?;
        self.settled = Some(self.metrics(step, &outcome));
        Ok(())
    }

    /// Discards the open step, if there is one.
    pub(crate) fn give_up(&mut self) {
        self.open = None;
    }

    /// Metrics of the previous world's last step, if any rank has them: the leader may have died before reporting them.
    pub(crate) fn take_settled(&mut self) -> Result<Option<StepMetrics>, JobError> {
        let own = self.settled.take().filter(|metrics| metrics.step == self.state.step);
        let own = own.and_then(|metrics| serde_json::to_string(&metrics).ok()).unwrap_or_default();
        let texts = self.team.gather_texts(own)?;
        Ok(texts.iter().find_map(|text| serde_json::from_str(text).ok()))
    }

    /// Begins to train as a member of a world; gathers the weights that other ranks update, which may be outdated here.
    pub(crate) fn begin(
        &mut self,
        generation: Generation,
        n_saves: u64,
        member: Box<dyn Member>,
    ) -> Result<(), JobError> {
        let c = &self.programs.train;
        (self.generation, self.n_saves, self.member) = (generation, n_saves, Some(member));
        let with = &mut Run { groups: &mut self.team.groups, models: &mut self.models, timings: None };
        Ok(self.machine.run(c, c.phases.gather(), with)?)
    }
}
