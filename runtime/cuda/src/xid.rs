//! Xid events, the driver's error reports: which of them mean that a GPU fails.
//!
//! Source: NVIDIA, "Xid Errors" with its catalog (docs.nvidia.com/deploy/xid-errors), and "GPU Memory Error Management"
//! (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt). A GPU fails by an event whose immediate action there is a reset, a reboot or
//! service. Stricter than the catalog: after 94 an application may restart on the same GPU, but the row of memory is repaired
//! only by a reset.

/// Events after which a GPU must not be used before a reset: codes and what they mean.
const FATAL: [(u64, &str); 17] = [
    (46, "the GPU stopped processing"),
    (48, "an uncorrectable memory error"),
    (62, "the GPU's internal micro-controller halted"),
    (64, "a defective row of memory could not be replaced"),
    (74, "an NVLink error"),
    (79, "the GPU has fallen off the bus"),
    (94, "a contained memory error"),
    (95, "an uncontained memory error"),
    (109, "a context switch timed out"),
    (110, "a security fault"),
    (119, "the GPU's system processor does not answer"),
    (120, "the GPU's system processor failed"),
    (136, "an NVLink training error"),
    (140, "an unrecovered memory error"),
    (143, "the GPU could not be initialised"),
    (155, "an NVLink software error"),
    (158, "the GPU's fatal timeout"),
];

/// Other events: mistakes of a program, its end, and repairs that wait for a reset.
const HARMLESS: [(u64, &str); 7] = [
    (13, "an exception in a kernel"),
    (31, "a kernel accessed memory that it does not own"),
    (43, "a program's work was stopped"),
    (45, "a program's work was removed"),
    (63, "a defective row of memory is replaced at the next reset"),
    (92, "many corrected memory errors"),
    (154, "the recommended recovery has changed"),
];

/// An event as a clause, and whether the GPU fails by it. Unknown events do not fail a GPU: newer drivers report more of them.
pub(crate) fn describe(code: u64) -> (String, bool) {
    let meaning = |table: &[(u64, &'static str)]| table.iter().find(|(known, _)| *known == code).map(|(_, text)| *text);
    match (meaning(&FATAL), meaning(&HARMLESS)) {
        (Some(text), _) => (format!("Xid {code}, {text}"), true),
        (None, Some(text)) => (format!("Xid {code}, {text}"), false),
        (None, None) => (format!("Xid {code}"), false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hardware_events_fail_a_gpu_and_those_of_programs_do_not() {
        for code in [48, 64, 74, 79, 94, 95, 119, 120] {
            assert!(describe(code).1, "{code}");
        }
        for code in [13, 31, 43, 45, 63, 9999] {
            assert!(!describe(code).1, "{code}");
        }
        assert_eq!(describe(79).0, "Xid 79, the GPU has fallen off the bus");
    }

    #[test]
    fn no_event_is_in_both_tables() {
        assert!(FATAL.iter().all(|(code, _)| HARMLESS.iter().all(|(other, _)| other != code)));
    }
}
