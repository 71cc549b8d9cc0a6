//! The operating system: coordinator, node supervisors, ranks and mesh groups as actors, and the QUIC traffic between
//! them.
//!
//! Nothing is here yet: a job of one rank on one machine needs no control plane, and `phalanx` runs it on its device
//! thread. What belongs here is listed in the order in which a message passes through it:
//! - `gateway`: a connection; decodes with a limit, refuses strangers and stale generations;
//! - `coordinator`: the shell around the membership, recovery and commit machines of `phalanx_strategies`;
//! - `supervisor`: spawns, watches and kills the ranks of a node; holds no device state;
//! - `rank`: tells the device thread what to do next and reports outcomes;
//! - `mesh_group`: owns the communicator of one group for one generation and its watermark.
//!
//! Deliberately absent, now and later: decisions. A handler with an `if` about policy belongs in `phalanx_strategies`.
