//! Comparison of all copies of the world's state ([`phalanx_strategies::elastic::copies`]).

use super::{Outcome, Trainer};
use crate::data::rows::Rows;
use crate::error::JobError;
use crate::error::peer::PeerError;
use crate::train::fingerprints::{boxes, of_boxes};
use crate::train::planted::{Where, flip_gradient, flip_state, replace_weight};
use crate::train::verification::{Compared, Verification};
use crate::train::weights::Tensor;
use phalanx_strategies::elastic::copies::{Claim, Copies, Copy, Difference, Holder};
use phalanx_strategies::elastic::dispute::{Repeated, settle};
use phalanx_strategies::elastic::identity::Step;
use phalanx_strategies::elastic::message::NotFinite;
use phalanx_strategies::program::Role;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// The fingerprints of a rank's boxes, by part.
type Fingerprints = Vec<BTreeMap<u64, u64>>;

impl Trainer<'_> {
    /// Compares all copies if that is due after this step, or if the step `saves`.
    ///
    /// # Errors
    /// [`JobError::Corrupt`] on all ranks if copies differ; when a peer is lost.
    pub(crate) fn verify_if_due(&mut self, saves: bool, step_s: f64) -> Result<(), JobError> {
        let step = self.state.step;
        if !self.verification.is_on() || !saves && (self.team.n_ranks() == 1 || !self.verification.is_due(step)) {
            return Ok(());
        }
        let whole = Instant::now();
        self.verification.compared = Compared::default();
        self.find_copies()?;
        let copies = self.verification.copies.take().unwrap_or_default();
        let begin = Instant::now();
        let found = self.fingerprints(&copies, saves);
        let outcome = found.and_then(|found| {
            let compare_s = begin.elapsed().as_secs_f64() + self.verification.exchange_s;
            self.compare(&copies, &found, [compare_s, step_s])
        });
        self.verification.copies = Some(copies);
        let spent_s = self.verification.spent_s.get_or_insert_default();
        *spent_s += whole.elapsed().as_secs_f64();
        outcome
    }

    /// Learns which boxes the ranks of this world hold.
    fn find_copies(&mut self) -> Result<(), JobError> {
        if self.verification.copies.is_some() {
            return Ok(());
        }
        let shadows = self.shadows.iter().map(|shadow| boxes(&shadow.compiled));
        let parts: Vec<BTreeMap<u64, Tensor>> = [boxes(&self.programs.train)].into_iter().chain(shadows).collect();
        let names: Vec<BTreeSet<u64>> = parts.iter().map(|boxes| boxes.keys().copied().collect()).collect();
        let held: Vec<Vec<BTreeSet<u64>>> = self.exchange(&names)?;
        (self.verification.parts, self.verification.copies) = (parts, Some(Copies::new(&held)));
        Ok(())
    }

    /// The values of all ranks, by rank.
    fn exchange<T: Serialize + DeserializeOwned>(&mut self, own: &T) -> Result<Vec<T>, JobError> {
        let own = serde_json::to_string(own).expect("numbers and names always have a JSON form");
        // The team limits the length of a text.
        let texts = self.team.gather_texts(own)?;
        let read = |(member, text): (u32, &String)| {
            serde_json::from_str(text).map_err(|source| PeerError::Decode { member, source }.into())
        };
        (0..).zip(&texts).map(read).collect()
    }

    /// The fingerprints of all boxes that have copies; if the state is saved, of all its own boxes that lie in host memory:
    /// from the memory of a device they would be copied twice for each save.
    fn fingerprints(&mut self, copies: &Copies, saves: bool) -> Result<Fingerprints, JobError> {
        let rank = self.team.mesh_rank.rank as u32;
        let own = std::iter::once((&self.programs.train, &*self.machine));
        let memories = own.chain(self.shadows.iter().map(|shadow| (&shadow.compiled, &*shadow.machine)));
        let mut all = Vec::new();
        for ((part, boxes), (c, machine)) in (0..).zip(&self.verification.parts).zip(memories) {
            let wanted: BTreeSet<u64> = copies.boxes(Holder { rank, part }).collect();
            let is_saved = saves && part == 0 && machine.memory().is_none();
            let is_wanted = |name: &u64| wanted.contains(name) || is_saved;
            let (names, tensors): (Vec<u64>, Vec<&Tensor>) = boxes.iter().filter(|(name, _)| is_wanted(name)).unzip();
            all.push(names.into_iter().zip(of_boxes(machine, c, &tensors)?).collect());
        }
        let own = all.first().cloned().unwrap_or_default();
        self.verification.compared = Compared { own, ..Compared::default() };
        Ok(all)
    }

    /// Exchanges the digests of all classes of copies, and the times from which the interval follows.
    fn compare(&mut self, copies: &Copies, found: &Fingerprints, times: [f64; 2]) -> Result<(), JobError> {
        let n = copies.n_digests();
        if n == 0 {
            self.verification.compared.is_compared = true;
            self.verification.choose(f64::INFINITY, 1.0);
            return Ok(());
        }
        let mut all = vec![0.0; 2 * n + times.len()];
        let rank = self.team.mesh_rank.rank as u32;
        for (at, digest) in copies.digests(rank, |part, name| found[part as usize][&name]) {
            // One rank fills each element and the others have zero there, so the sums are exact.
            (all[2 * at], all[2 * at + 1]) = ((digest >> 32) as f64, f64::from(digest as u32));
        }
        all[2 * n..].copy_from_slice(&times);
        let begin = Instant::now();
        self.team.add_up(&mut all)?;
        self.verification.exchange_s = begin.elapsed().as_secs_f64();
        self.verification.choose(all[2 * n], all[2 * n + 1]);
        let digests: Vec<u64> =
            all[..2 * n].chunks_exact(2).map(|halves| (halves[0] as u64) << 32 | halves[1] as u64).collect();
        let differing = copies.differing(&digests);
        if !differing.is_empty() {
            let step = Step(self.state.step);
            self.verification.memory.remember(step, self.team.mesh_rank, differing[0], &digests);
            let boxes = differing.iter().flat_map(|class| class.boxes.iter().copied()).collect();
            return Err(self.describe(&boxes, found)?);
        }
        (self.verification.compared.is_verified, self.verification.compared.is_compared) = (copies.is_complete(), true);
        self.settle_dispute(copies, &digests)?;
        self.verification.memory.note_agreement();
        Ok(())
    }

    /// Why the step fails: exchanges the fingerprints of all boxes in doubt.
    fn describe(&mut self, differing: &BTreeSet<u64>, found: &Fingerprints) -> Result<JobError, JobError> {
        let (step, rank) = (Step(self.state.step), self.team.mesh_rank.rank as u32);
        let mut own = Vec::new();
        for ((part, boxes), values) in (0..).zip(&self.verification.parts).zip(found) {
            for (name, value) in values.iter().filter(|(name, _)| differing.contains(name)) {
                let claim = Claim { holder: Holder { rank, part }, value: *value };
                let is_received = self.verification.memory.is_received();
                own.push(Copy { name: *name, tensor: boxes[name].name.clone(), claim, is_received });
            }
        }
        let copies = self.exchange(&own)?.into_iter().flatten();
        // The digests differ, so a rank has exchanged other fingerprints than it added up.
        let unclear = || Difference { step, tensor: "the digests".into(), name: 0, suspects: vec![], claims: vec![] };
        let difference = Difference::among(step, copies.collect()).unwrap_or_else(unclear);
        Ok(JobError::Corrupt(Box::new(difference)))
    }

    /// After the repetition of a step whose copies differed before, finds and reports whose copy was wrong.
    fn settle_dispute(&mut self, copies: &Copies, digests: &[u64]) -> Result<(), JobError> {
        let (step, mesh_rank) = (self.state.step, self.team.mesh_rank);
        if !self.verification.memory.is_disputed(Step(step)) {
            return Ok(());
        }
        let (repeated, holders) = self.verification.memory.repeated(Step(step), mesh_rank, copies, digests);
        let [loss, own, shadow] = repeated.encode().map(|value| self.team.gather(value));
        let (loss, own, shadow) = (loss?, own?, shadow?);
        let all: Vec<Repeated> =
            (0..mesh_rank.mesh.size()).map(|rank| Repeated::decode([loss[rank], own[rank], shadow[rank]])).collect();
        // A rank whose process was replaced does not know who holds the box, and leaves the answer to the others.
        let suspect = settle(&mesh_rank.mesh, Step(step), &holders, &all).filter(|_| !holders.is_empty());
        tracing::debug!(step, ?suspect, ?holders, ?all, "repeated a disputed step");
        let Some(member) = self.member.as_mut().filter(|_| !holders.is_empty()) else { return Ok(()) };
        member.settled(step, suspect)
    }

    /// Lets the next world repeat a step whose loss or gradient is not finite, unless this world repeats it already: a rank that
    /// computes wrongly is not a diverged model.
    ///
    /// # Errors
    /// [`JobError::NotFiniteOnce`] on all ranks; when a peer is lost.
    pub(super) fn repeat_once(&mut self, what: &'static str) -> Result<(), JobError> {
        let step = Step(self.state.step + 1);
        if self.member.is_none() || !self.verification.is_on() || self.verification.memory.is_disputed(step) {
            return Ok(());
        }
        let c = &self.programs.train;
        let mut terms = c
            .program
            .bound(Role::OwnLoss)
            .flat_map(|value| self.machine.elements::<f64>(c, value, 0..c.program.value(value).n_elements()).to_vec());
        let is_finite = terms.all(f64::is_finite);
        let all = self.team.gather(u64::from(!is_finite))?;
        let mut wrong = (0..).zip(&all).filter(|(_, is_wrong)| **is_wrong > 0).map(|(rank, _)| rank);
        // Rows of a diverged model fail on many ranks at once, as do ranks that compute the same rows together.
        let suspect = wrong.next().filter(|_| all.len() > 1 && wrong.next().is_none());
        Err(JobError::NotFiniteOnce { what, found: NotFinite { step, suspect } })
    }

    /// Computes all that the update of the next step needs, with the faults that a test has planned.
    pub(super) fn prepare_with_faults(&mut self, rows: &Rows) -> Result<Outcome, JobError> {
        let (step, rank) = (self.state.step + 1, self.team.mesh_rank.rank);
        self.planted.damage_wire(self.generation.0, step, rank);
        let Some(seed) = self.planted.take(Where::Compute, self.generation.0, step, rank) else {
            return self.prepare(rows);
        };
        let before = replace_weight(&mut *self.machine, &self.programs.train, seed, f32::INFINITY.to_bits());
        let outcome = self.prepare(rows);
        if let Some(bits) = before {
            replace_weight(&mut *self.machine, &self.programs.train, seed, bits);
        }
        outcome
    }

    /// Flips a bit if a test has planned that.
    pub(super) fn plant(&mut self, place: Where) {
        let step = self.state.step + u64::from(place == Where::Gradient);
        let Some(seed) = self.planted.take(place, self.generation.0, step, self.team.mesh_rank.rank) else { return };
        let c = &self.programs.train;
        let flipped = match (place, self.shadows.first_mut()) {
            (Where::Gradient, _) => flip_gradient(&mut *self.machine, c, seed),
            (Where::Shadow, Some(shadow)) => flip_state(&mut *shadow.machine, &shadow.compiled, place, seed),
            (Where::Weights | Where::Optimizer, _) => flip_state(&mut *self.machine, c, place, seed),
            (Where::Shadow | Where::Checkpoint | Where::Wire | Where::Compute, _) => None,
        };
        tracing::warn!(step, ?place, flipped, "planted a fault");
    }

    /// Begins to train in a world in which the copies after these steps differed before.
    pub(crate) fn begin_verification(&mut self, disputed: Vec<Step>) {
        self.verification.begin(disputed);
    }

    pub(crate) fn verification_mut(&mut self) -> &mut Verification {
        &mut self.verification
    }
}
