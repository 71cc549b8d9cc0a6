//! A compiled program.

use crate::passes::commit::StepPhases;
use crate::passes::memory::Layout;
use crate::program::Program;
use std::sync::Arc;

/// A program with its memory layout. It is not changed once it is compiled.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The program.
    pub program: Program,
    /// Locations of its values.
    pub layout: Layout,
    /// Its phases, which separate changes of state from the rest.
    pub phases: StepPhases,
    /// Which compiled program this is.
    pub identity: Identity,
}

impl Compiled {
    /// A program that is placed.
    pub fn new(program: Program, layout: Layout, phases: StepPhases) -> Compiled {
        Compiled { program, layout, phases, identity: Identity::default() }
    }
}

/// Tells compiled programs apart without comparing them: clones have the same identity, and every other program has another
/// one, for as long as the identity exists.
#[derive(Clone, Debug, Default)]
pub struct Identity(Arc<()>);

impl PartialEq for Identity {
    fn eq(&self, other: &Identity) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Identity {}
