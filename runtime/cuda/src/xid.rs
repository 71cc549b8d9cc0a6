//! Xid events, the driver's error reports: which of them mean that a GPU fails.
//!
//! Source: NVIDIA, "Xid Errors" with its catalog (docs.nvidia.com/deploy/xid-errors), and "GPU Memory Error Management"
//! (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt). A GPU fails by an event whose immediate action there is a reset, a reboot or
//! service. Stricter than the catalog: after 94 an application may restart on the same GPU, but the row of memory is repaired
//! only by a reset.
//!
//! Errors of NVLink are judged by [`link_errors`](crate::link_errors). Some of them can be ignored, but the bits that tell which are
//! in the kernel's log only.

/// Events after which a GPU must not be used before a reset: codes and what they mean.
const FATAL: [(u64, &str); 16] = [
    (46, "the GPU stopped processing"),
    (48, "an uncorrectable memory error"),
    (62, "the GPU's internal micro-controller halted"),
    (64, "a defective row of memory could not be replaced"),
    (79, "the GPU has fallen off the bus"),
    (94, "a contained memory error"),
    (95, "an uncontained memory error"),
    (109, "a context switch timed out"),
    (110, "a security fault"),
    (119, "the GPU's system processor does not answer"),
    (120, "the GPU's system processor failed"),
    (140, "an unrecovered memory error"),
    (143, "the GPU could not be initialised"),
    (151, "an error of key rotation"),
    (156, "a defective part was retired"),
    (158, "the GPU's fatal timeout"),
];

/// Errors of links: codes, what they mean, and the number of them at which a GPU fails. The catalog asks for a reset after 136 and 155,
/// and for most kinds of the others if they come "more than 2 times".
const LINKS: [(u64, &str, u32); 10] = [
    (74, "an NVLink error", 3),
    (136, "an NVLink training error", 1),
    (144, "an NVLink error", 3),
    (145, "an NVLink error", 3),
    (146, "an NVLink error", 3),
    (147, "an NVLink error", 3),
    (148, "an NVLink error", 3),
    (149, "an NVLink error", 3),
    (150, "an NVLink error", 3),
    (155, "an NVLink software error", 1),
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

/// What an event says about the GPU that reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The GPU has failed.
    Failed,
    /// An error of a link, at which the GPU fails if it is the n-th one.
    Link(u32),
    /// The GPU goes on.
    Harmless,
}

/// An event as a clause, and what it says about its GPU. Unknown events do not fail a GPU: newer drivers report more of them.
pub(crate) fn describe(code: u64) -> (String, Verdict) {
    let meaning = |table: &[(u64, &'static str)]| table.iter().find(|(known, _)| *known == code).map(|(_, text)| *text);
    let known = |text: &str| format!("Xid {code}, {text}");
    if let Some((_, text, n_max)) = LINKS.iter().find(|(known, ..)| *known == code) {
        return (known(text), Verdict::Link(*n_max));
    }
    match (meaning(&FATAL), meaning(&HARMLESS)) {
        (Some(text), _) => (known(text), Verdict::Failed),
        (None, Some(text)) => (known(text), Verdict::Harmless),
        (None, None) => (format!("Xid {code}"), Verdict::Harmless),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Immediate actions of the catalog for architectures from Ampere on, read on 2026-11-27, whatever this module thinks of them.
    const CATALOG: [(&str, &[u64]); 7] = [
        ("RESET_GPU", &[62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158]),
        ("WORKFLOW_XID_48, which begins with a reset", &[48]),
        ("RESTART_BM", &[79]),
        ("RESTART_VM", &[151]),
        ("WORKFLOW_NVLINK_ERR and its successor", &[74, 144, 145, 146, 147, 148, 149, 150]),
        ("RESTART_APP", &[8, 11, 13, 31, 68, 69, 70, 71, 72, 75, 80, 82, 86, 88, 96, 105, 126, 139]),
        ("IGNORE", &[63, 67, 92, 93, 106, 107, 108, 121, 137, 141, 157, 160, 161]),
    ];

    #[test]
    fn gpu_fails_by_exactly_the_events_whose_immediate_action_is_a_reset_or_a_reboot() {
        for (action, codes) in CATALOG {
            let is_reset = action.starts_with("RESET") || action.contains("reset") || action.starts_with("RESTART_");
            let fails = is_reset && action != "RESTART_APP";
            for code in codes {
                match describe(*code).1 {
                    Verdict::Failed => assert!(fails, "{code}: {action}"),
                    Verdict::Link(1) => assert!(fails && [136, 155].contains(code), "{code}: {action}"),
                    Verdict::Link(_) => assert!(action.contains("NVLINK"), "{code}: {action}"),
                    Verdict::Harmless => assert!(!fails && !action.contains("NVLINK"), "{code}: {action}"),
                }
            }
        }
        // Stricter than the catalog: see the module.
        assert_eq!(describe(94).1, Verdict::Failed);
    }

    #[test]
    fn events_are_told_by_their_meaning_and_unknown_ones_by_their_number() {
        assert_eq!(describe(79), ("Xid 79, the GPU has fallen off the bus".to_owned(), Verdict::Failed));
        assert_eq!(describe(9999), ("Xid 9999".to_owned(), Verdict::Harmless));
    }

    #[test]
    fn no_event_is_in_two_tables() {
        let all = FATAL.iter().chain(&HARMLESS).map(|(code, _)| *code).chain(LINKS.iter().map(|(code, ..)| *code));
        let all: Vec<u64> = all.collect();
        assert_eq!(all.iter().collect::<std::collections::BTreeSet<_>>().len(), all.len());
    }
}
