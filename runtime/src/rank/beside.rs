//! What a device does beside a world that trains, to have a seat later with all that belongs to it, and what it does for
//! those who do.
#![allow(unsafe_code)] // Lessons are lent the memory of a seat, which outlives them.

use crate::error::JobError;
use crate::rank::device::{Device, Seat, senders};
use crate::rank::heal::{Healing, Places};
use crate::rank::pairs::tutors;
use crate::train::lesson::Lesson;
use crate::train::links::Links;
use crate::train::team::{Joined, Team};
use crate::train::trainer::learning::Learning;
use phalanx_device::span::Stretch;
use phalanx_strategies::elastic::identity::Generation;
use phalanx_strategies::elastic::message::{Formation, Learner};
use phalanx_strategies::elastic::recovery::shared;
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::mesh::Place;
use std::collections::BTreeMap;
use std::time::Instant;

impl<'a> Device<'a> {
    /// Takes the memory of the seat that it is to have later, and agrees with those that train on what they send meanwhile.
    pub(crate) fn sit_beside(
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
        let mut seat = self.seat(formation, &learner.holds, team)?;
        let (seated, in_place) = (begin.elapsed(), seat.has.len());
        let agreed = self.agree(formation, learner, &mut seat, &mut links);
        tracing::debug!(worker = %self.worker, in_place, ?seated, agreed = ?begin.elapsed(), "sits beside");
        let lessons = match agreed {
            Ok(lessons) => lessons,
            Err(error) => {
                // What was there before may be needed by others until the world runs.
                self.seats.extend((in_place > 0).then_some(seat));
                return Err(error);
            }
        };
        seat.trainer.learn_from(links, Learning { lessons, tutors: tutors(formation, learner) });
        self.seats.push(seat);
        self.cell.seated(formation.generation);
        Ok(())
    }

    /// What comes to a seat while others train. What can be had at once is there then.
    fn agree(
        &self,
        formation: &Formation,
        learner: &Learner,
        seat: &mut Seat<'a>,
        links: &mut Links,
    ) -> Result<Vec<Lesson>, JobError> {
        self.fill_frozen(seat)?;
        let (has, comes) = (seat.has.clone(), !learner.transfers.is_empty());
        let mut healing = Healing::default();
        for (shard, room) in seat.rooms() {
            if comes || !has.contains(&shard) {
                healing.lacks(shard, room);
            }
        }
        self.lend(&mut healing);
        if !comes {
            // It has all of it, though perhaps in the memory of another seat.
            let is_elsewhere = |shard: &&Shard| !has.contains(shard);
            learner.holds.iter().filter(is_elsewhere).for_each(|shard| healing.find(*shard, *shard));
            let found = healing.carry_out(links)?;
            seat.trainer.state = found.unwrap_or(seat.trainer.state);
            seat.completed();
            return Ok(Vec::new());
        }
        for group in shared(&learner.transfers) {
            let (members, _) = senders(formation, group);
            healing.ask(links, &members, group[0].shard)?;
        }
        let (runs, state) = healing.lessons()?;
        // SAFETY: as of [`lessons`]; and nobody reads or writes the state of one that learns while it does.
        let lessons = runs.into_iter().map(|(from, runs)| unsafe { links.lesson(from, false, runs) }).collect();
        seat.trainer.state = state.unwrap_or(seat.trainer.state);
        Ok(lessons)
    }

    /// Catches up until the world ends.
    pub(crate) fn learn(&mut self, generation: Generation) -> Result<(), JobError> {
        self.give_up_before(generation);
        let Some(seat) = self.seats.last_mut() else { return Ok(()) };
        if !seat.trainer.is_whole() {
            seat.has.clear();
        }
        let learnt = seat.trainer.learn();
        if seat.trainer.is_whole() {
            seat.completed();
        }
        learnt
    }
}

/// What a rank sends to those who learn from it, as they have agreed on: to each of them one thing after the other.
pub(crate) fn lessons(seat: &Seat<'_>, links: &mut Links, asked: Vec<(u32, Places)>) -> Vec<Lesson> {
    let mut runs: BTreeMap<u32, Vec<Stretch>> = BTreeMap::new();
    for (to, places) in asked {
        let held = seat.holdings().find(|(shard, _)| *shard == places.held);
        let (_, holding) = held.expect("one is asked for what one holds in this world");
        runs.entry(to).or_default().extend(places.runs(&holding));
    }
    // SAFETY: the seat keeps its memory while it has a place in this world, and has lessons no longer. A step does not
    // touch what updates change before its update, and nobody teaches then.
    runs.into_iter().map(|(to, runs)| unsafe { links.lesson(to, true, runs) }).collect()
}
