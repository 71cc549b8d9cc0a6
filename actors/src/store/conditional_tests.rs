//! Objects in memory that lose answers, delay requests and refuse them; and the store over them.

use super::*;
use phalanx_strategies::elastic::identity::Generation;

/// What happens to a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Treatment {
    #[default]
    Answered,
    /// It has no effect and no answer.
    Lost,
    /// It takes effect, but its answer is lost.
    AnswerLost,
    /// It has no answer, and takes effect when [`ObjectsInMemory::deliver`] is called.
    Delayed,
}

#[derive(Debug, Default)]
struct Contents {
    objects: BTreeMap<String, (Vec<u8>, u64)>,
    n_replaced: u64,
    /// Treatments of the next requests; further ones are answered.
    treatments: std::collections::VecDeque<Treatment>,
    delayed: Vec<(String, Option<Version>, Vec<u8>)>,
}

/// Objects that several stores share.
#[derive(Clone, Debug, Default)]
pub(crate) struct ObjectsInMemory(Arc<Mutex<Contents>>);

fn version(number: u64) -> Version {
    Version { e_tag: Some(format!("\"{number}\"")), generation: None }
}

impl Contents {
    fn replace(&mut self, name: &str, expected: Option<&Version>, bytes: &[u8]) -> Option<Version> {
        let have = self.objects.get(name).map(|(_, number)| version(*number));
        if have.as_ref() != expected {
            return None;
        }
        self.n_replaced += 1;
        self.objects.insert(name.to_owned(), (bytes.to_vec(), self.n_replaced));
        Some(version(self.n_replaced))
    }
}

impl ObjectsInMemory {
    /// The treatments of the next requests.
    pub(crate) fn treat(&self, treatments: &[Treatment]) {
        locked(&self.0).treatments = treatments.iter().copied().collect();
    }

    /// Delayed requests arrive; returns whether each one took effect.
    fn deliver(&self) -> Vec<bool> {
        let mut contents = locked(&self.0);
        let delayed = std::mem::take(&mut contents.delayed);
        delayed
            .iter()
            .map(|(name, expected, bytes)| contents.replace(name, expected.as_ref(), bytes).is_some())
            .collect()
    }

    fn silent(&self, name: &str) -> StoreError {
        StoreError::Io { path: self.location(name), action: "asked", message: "no answer".into() }
    }
}

impl Objects for ObjectsInMemory {
    fn read(&self, name: &str, _: Duration) -> Result<Option<(Vec<u8>, Version)>, StoreError> {
        let mut contents = locked(&self.0);
        if contents.treatments.pop_front().unwrap_or_default() != Treatment::Answered {
            return Err(self.silent(name));
        }
        Ok(contents.objects.get(name).map(|(bytes, number)| (bytes.clone(), version(*number))))
    }

    fn replace(
        &self,
        name: &str,
        expected: Option<&Version>,
        bytes: &[u8],
        _: bool,
        _: Duration,
    ) -> Result<Option<Version>, StoreError> {
        let mut contents = locked(&self.0);
        match contents.treatments.pop_front().unwrap_or_default() {
            Treatment::Answered => Ok(contents.replace(name, expected, bytes)),
            Treatment::Lost => Err(self.silent(name)),
            Treatment::AnswerLost => {
                contents.replace(name, expected, bytes);
                Err(self.silent(name))
            }
            Treatment::Delayed => {
                contents.delayed.push((name.to_owned(), expected.cloned(), bytes.to_vec()));
                Err(self.silent(name))
            }
        }
    }

    fn location(&self, name: &str) -> PathBuf {
        PathBuf::from("memory://").join(name)
    }
}

/// A store over these objects, as of another process.
pub(crate) fn over(objects: impl Objects) -> Conditional {
    Conditional::new(Arc::new(objects), Duration::from_secs(1))
}

fn lease(term: u64, holder: u32, beat: u64) -> Lease {
    Lease { term: Term(term), holder, beat }
}

fn record(term: u64, generation: u64) -> Record {
    Record { term: Term(term), generation: Generation(generation), ..Record::default() }
}

/// Objects with a lease of term 1, and the store of its leader.
fn led() -> (ObjectsInMemory, Conditional) {
    let objects = ObjectsInMemory::default();
    let leader = over(objects.clone());
    leader.replace_lease(Lease::default(), lease(1, 7, 0)).unwrap().unwrap();
    (objects, leader)
}

// STORE-1
#[test]
fn renewal_whose_answer_was_lost_is_recognised_as_its_own() {
    let (objects, leader) = led();

    objects.treat(&[Treatment::AnswerLost]);
    let unknown = leader.replace_lease(lease(1, 7, 0), lease(1, 7, 1));
    let again = leader.replace_lease(lease(1, 7, 0), lease(1, 7, 1));

    assert!(matches!(unknown, Err(StoreError::Io { .. })));
    assert_eq!(again, Ok(Ok(lease(1, 7, 1))));
}

// STORE-1
#[test]
fn lease_of_another_process_with_the_same_candidate_number_is_not_taken_for_an_own_one() {
    let objects = ObjectsInMemory::default();
    let (one, other) = (over(objects.clone()), over(objects.clone()));
    let alone = lease(1, 0, 0);
    other.read_lease().unwrap();

    assert_eq!(one.replace_lease(Lease::default(), alone), Ok(Ok(alone)));
    assert_eq!(other.replace_lease(Lease::default(), alone), Ok(Err(alone)));
}

// STORE-2
#[test]
fn own_lease_is_found_only_once_the_record_is_fenced() {
    let (objects, _) = led();
    let next = over(objects.clone());
    next.read_lease().unwrap();

    // The lease is replaced without an answer; then the fence meets a silent store.
    objects.treat(&[Treatment::AnswerLost]);
    next.replace_lease(lease(1, 7, 0), lease(2, 8, 0)).unwrap_err();
    objects.treat(&[Treatment::Answered, Treatment::Lost]);
    next.read_lease().unwrap_err();

    assert_eq!(next.read_lease(), Ok(lease(2, 8, 0)));
    assert_eq!(next.write_record(&record(2, 5)), Ok(true));
}

// STORE-2
#[test]
fn record_that_arrives_after_a_later_term_has_begun_has_no_effect() {
    let (objects, leader) = led();
    assert_eq!(leader.write_record(&record(1, 4)), Ok(true));

    objects.treat(&[Treatment::Delayed]);
    let unknown = leader.write_record(&record(1, 5));
    let next = over(objects.clone());
    assert_eq!(next.read_lease(), Ok(lease(1, 7, 0)));
    next.replace_lease(lease(1, 7, 0), lease(2, 8, 0)).unwrap().unwrap();
    let read = next.read_record().unwrap();
    let late = objects.deliver();

    assert!(unknown.is_err());
    assert_eq!((read, late), (record(1, 4), vec![false]));
    assert_eq!(next.read_record(), Ok(record(1, 4)), "the record that the new leader has read is final");
    assert_eq!(leader.write_record(&record(1, 5)), Ok(false), "the earlier leader learns that it is replaced");
}

// STORE-2
#[test]
fn record_that_arrives_before_the_fence_is_read_by_the_new_leader() {
    let (objects, leader) = led();

    objects.treat(&[Treatment::Delayed]);
    assert!(leader.write_record(&record(1, 5)).is_err());
    let late = objects.deliver();
    let next = over(objects.clone());
    next.replace_lease(lease(1, 7, 0), lease(2, 8, 0)).unwrap().unwrap();

    assert_eq!((late, next.read_record()), (vec![true], Ok(record(1, 5))));
}

// STORE-2
#[test]
fn candidate_has_won_only_once_the_record_is_fenced() {
    let (objects, leader) = led();
    leader.write_record(&record(1, 4)).unwrap();
    let next = over(objects.clone());
    next.read_lease().unwrap();

    // The lease is replaced and the record read; the fence is lost.
    objects.treat(&[Treatment::Answered, Treatment::Answered, Treatment::Lost]);
    let unknown = next.replace_lease(lease(1, 7, 0), lease(2, 8, 0));
    let before = leader.write_record(&record(1, 5));
    let won = next.replace_lease(lease(1, 7, 0), lease(2, 8, 0));

    assert!(unknown.is_err());
    assert_eq!((before, won), (Ok(true), Ok(Ok(lease(2, 8, 0)))));
    assert_eq!((next.read_record(), leader.write_record(&record(1, 6))), (Ok(record(1, 5)), Ok(false)));
}

// STORE-2
#[test]
fn newer_record_replaces_one_whose_answer_was_lost() {
    let (objects, leader) = led();

    objects.treat(&[Treatment::AnswerLost]);
    assert!(leader.write_record(&record(1, 4)).is_err());
    // The record is read first.
    objects.treat(&[Treatment::Answered, Treatment::Delayed]);
    assert!(leader.write_record(&record(1, 5)).is_err());
    let newer = leader.write_record(&record(1, 6));

    assert_eq!((newer, objects.deliver()), (Ok(true), vec![false]));
    assert_eq!(leader.read_record(), Ok(record(1, 6)));
}

#[test]
fn document_that_a_successor_has_replaced_is_not_overwritten() {
    let (objects, leader) = led();
    leader.write_document("register", b"one node").unwrap();
    let next = over(objects.clone());
    assert_eq!(next.read_document("register").unwrap().as_deref(), Some(&b"one node"[..]));
    next.write_document("register", b"two nodes").unwrap();

    let stale = leader.write_document("register", b"another node");
    objects.treat(&[Treatment::AnswerLost]);
    let unknown = next.write_document("register", b"three nodes");

    assert!(matches!(stale, Err(StoreError::Replaced { path }) if path.ends_with("register")));
    assert!(unknown.is_err() && next.write_document("register", b"three nodes").is_ok());
    assert_eq!(next.read_document("absent"), Ok(None));
}

// STORE-3
#[test]
fn damaged_object_is_an_error_that_names_it() {
    let (objects, leader) = led();
    let (_, found) = objects.read(RECORD, LIMIT_MIN).unwrap().unwrap();
    objects.replace(RECORD, Some(&found), b"nothing", true, LIMIT_MIN).unwrap().unwrap();

    let error = leader.read_record().unwrap_err();

    assert!(matches!(&error, StoreError::Damaged { path, .. } if path.ends_with(RECORD)), "{error}");
}

/// Candidates take and renew leases and write records while requests get lost, their answers get lost, and requests arrive late.
/// Each record that was acknowledged is read by the next leader, and no term is won twice.
#[test]
fn acknowledged_records_survive_every_order_of_lost_and_late_requests() {
    let rng = phalanx_strategies::rng::CounterRng::new(17);
    for case in 0..2_000u64 {
        let objects = ObjectsInMemory::default();
        let stores = [over(objects.clone()), over(objects.clone()), over(objects.clone())];
        // The term that each store leads, and the newest record that was acknowledged to its leader or may have been written.
        let (mut leads, mut acknowledged, mut attempted) = ([None; 3], 0, [0; 3]);
        let mut won = std::collections::BTreeSet::new();
        for turn in 0..24u64 {
            let bits = rng.bits(case * 64 + turn);
            let treatment = |shift: u64| match (bits >> shift) % 8 {
                0 => Treatment::Lost,
                1 => Treatment::AnswerLost,
                2 => Treatment::Delayed,
                _ => Treatment::Answered,
            };
            objects.treat(&[treatment(8), treatment(11), treatment(14), treatment(17), treatment(20)]);
            let who = (bits % 3) as usize;
            match ((bits >> 4) % 4, leads[who]) {
                (0, _) => drop(objects.deliver()),
                (1, Some(term)) | (2, Some(term)) => {
                    attempted[who] = turn + 1;
                    if stores[who].write_record(&record(term, turn + 1)) == Ok(true) {
                        acknowledged = turn + 1;
                    }
                }
                _ => {
                    let Ok(old) = stores[who].read_lease() else { continue };
                    let new = lease(old.term.0 + 1, who as u32, 0);
                    if stores[who].replace_lease(old, new) == Ok(Ok(new)) {
                        assert!(won.insert(new.term), "case {case}: {} is won twice", new.term);
                        leads[who] = Some(new.term.0);
                        objects.treat(&[]);
                        let read = stores[who].read_record().unwrap().generation.0;
                        assert!(
                            read >= acknowledged,
                            "case {case}: record {read} was read, {acknowledged} acknowledged"
                        );
                        acknowledged = read;
                    }
                }
            }
        }
    }
}
