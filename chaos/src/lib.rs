//! Fault injection: a deterministic simulator, faults on real processes, invariants, and a seeded fuzzer.
//!
//! Nothing is here yet: there is no second process whose failure could be injected. (That one process survives a kill
//! at any moment is proved by `runtime/tests/resume.rs`.) What belongs here:
//! - `simulator`: the pure machines of `phalanx_strategies` on a simulated network, disk and clock, from one seed;
//! - `invariants`: one a file, each with its source;
//! - `faults`: a fault plan as data; the same vocabulary for simulated and real processes.
//!
//! Deliberately absent, now and later: hooks in production code beyond the seams it has anyway.
