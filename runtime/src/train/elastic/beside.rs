//! What a device does beside a world that trains, to have a seat later with all that belongs to it, and what it does for
//! those who do.
#![allow(unsafe_code)] // Lessons are lent the memory of a seat, which outlives them.

use super::device::{Device, Seat, senders};
use super::heal::{Healing, Places};
use super::pairs::tutors;
use crate::train::JobError;
use crate::train::lesson::Lesson;
use crate::train::links::Links;
use crate::train::team::{Joined, Team};
use crate::train::trainer::learning::Learning;
use phalanx_strategies::elastic::identity::Generation;
use phalanx_strategies::elastic::message::{Formation, Learner};
use phalanx_strategies::elastic::recovery::shared;
use phalanx_strategies::mesh::Place;
use std::collections::BTreeMap;
use std::time::Instant;

impl Device<'_> {
    /// Takes the memory of the seat that it is to have later, and agrees with those that train on what they send meanwhile.
    pub(super) fn sit_beside(
        &mut self,
        formation: &Formation,
        learner: &Learner,
        joined: Joined,
    ) -> Result<(), JobError> {
        let Joined { links, memory, .. } = joined;
        let mut links = links.with_pulse(self.pulse.clone());
        let place = Place { mesh: learner.mesh, rank: learner.rank };
        let team = Team::beside(place, memory).with_pulse(self.pulse.clone());
        let begin = Instant::now();
        let (mut seat, in_place) = self.seat(formation, &learner.holds, team)?;
        let seated = begin.elapsed();
        self.fill_frozen(&mut seat)?;
        let mut healing = Healing::default();
        for (shard, room) in seat.rooms() {
            if !learner.transfers.is_empty() || !in_place.contains(&shard) {
                healing.lacks(shard, room);
            }
        }
        self.lend(&mut healing);
        for group in shared(&learner.transfers) {
            let (members, _) = senders(formation, group);
            healing.ask(&mut links, &members, group[0].shard)?;
        }
        let (runs, state) = if learner.transfers.is_empty() {
            // It has all of it, though perhaps in the memory of another seat.
            learner
                .holds
                .iter()
                .filter(|shard| !in_place.contains(shard))
                .for_each(|shard| healing.find(*shard, *shard));
            (BTreeMap::new(), healing.carry_out(&mut links)?)
        } else {
            healing.lessons()?
        };
        // SAFETY: as of [`lessons`]; and nobody reads or writes the state of one that learns while it does.
        let lessons = runs.into_iter().map(|(from, runs)| unsafe { links.lesson(from, false, runs) }).collect();
        seat.trainer.state = state.unwrap_or(seat.trainer.state);
        seat.trainer.learn_from(links, Learning { lessons, tutors: tutors(formation, learner) });
        tracing::debug!(worker = %self.worker, in_place = in_place.len(), ?seated, agreed = ?begin.elapsed(), "sits beside");
        self.seats.push(seat);
        self.cell.seated(formation.generation);
        Ok(())
    }

    /// Catches up until the world ends.
    pub(super) fn learn(&mut self, generation: Generation) -> Result<(), JobError> {
        self.seats.retain(|seat| seat.generation == generation);
        self.seats.last_mut().map_or(Ok(()), |seat| seat.trainer.learn())
    }
}

/// What a rank sends to those who learn from it, as they have agreed on.
pub(super) fn lessons(seat: &Seat<'_>, links: &mut Links, asked: Vec<(u32, Places)>) -> Vec<Lesson> {
    let lesson = |(to, places): (u32, Places)| {
        let held = seat.holdings().find(|(shard, _)| *shard == places.held);
        let (_, holding) = held.expect("one is asked for what one holds in this world");
        // SAFETY: the seat keeps its memory while it has a place in this world, and has lessons no longer. A step does not
        // touch what updates change before its update, and nobody teaches then.
        unsafe { links.lesson(to, true, places.runs(&holding)) }
    };
    asked.into_iter().map(lesson).collect()
}
