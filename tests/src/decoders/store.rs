//! Files of the coordinator's store, and a coordinator that starts from them.

use super::{Target, honest};
use phalanx_actors::fuzzing::{record_of, stored, stored_again};
use phalanx_strategies::elastic::coordinator::Coordinator;
use phalanx_strategies::elastic::identity::Term;
use phalanx_strategies::elastic::succession::Lease;
use phalanx_strategies::elastic::timing::Timing;
use std::time::{Duration, Instant};

pub(super) const TARGET: Target = Target { name: "store", run, seeds };

/// Values survive writing and reading; a coordinator that starts from a record keeps running.
fn run(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    for text in [text.to_string(), stored(&text)] {
        let again = stored_again(&text);
        for (which, again) in again.iter().enumerate() {
            let Some(again) = again else { continue };
            assert_eq!(stored_again(again)[which].as_ref(), Some(again));
        }
        let Some(record) = record_of(&text) else { continue };
        let (now, term) = (Instant::now(), Term(record.term.0 + 1));
        let mut coordinator = Coordinator::new(now, honest::JOB, term, record, honest::policy(), Timing::default());
        for wait in [0, 400, 2_000, 60_000] {
            coordinator.handle_timeout(now + Duration::from_millis(wait));
            while coordinator.poll_command().is_some() {}
            coordinator.handle_persisted(now, true);
        }
        drop(coordinator.status(now));
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let lease = Lease { term: Term(3), holder: 7, beat: 11 };
    let records = honest::job().records;
    let bodies = records.iter().map(|record| serde_json::to_string_pretty(record).expect("a record is JSON"));
    let lease = serde_json::to_string_pretty(&lease).expect("a lease is JSON");
    bodies.take(12).chain([lease.clone(), stored(&lease)]).map(String::into_bytes).collect()
}
