//! The groups of a world, as owned by mesh-group actors.

use crate::train::team::ConnectedGroup;
use phalanx_actors::mesh_group::{Awaited, Behind, OwnedGroup, Watermark};
use phalanx_device::Stream;
use phalanx_strategies::mesh::Axes;

/// A group that names its members by their ranks in the world.
struct MeshGroup(ConnectedGroup);

impl OwnedGroup for MeshGroup {
    fn axes(&self) -> Axes {
        self.0.axes
    }

    /// By the device's own words where it runs collectives after its thread has finished them.
    fn watermark(&self) -> Watermark {
        let progress = self.0.owner.control().device_progress().unwrap_or_else(|| self.0.owner.progress());
        Watermark { entered: progress.entered, finished: progress.finished }
    }

    fn behind(&self) -> Vec<Behind> {
        let of = |behind: phalanx_device::communicator::Behind| Behind {
            awaited: match behind.stream {
                Stream::Group => Awaited::Collective,
                Stream::RecvFrom(_) => Awaited::Send,
                Stream::SendTo(_) => Awaited::Receive,
            },
            number: behind.index,
            ranks: behind.positions.iter().map(|position| self.0.members[*position as usize]).collect(),
        };
        self.0.owner.control().behind().into_iter().map(of).collect()
    }

    fn check(&self) -> Result<(), String> {
        self.0.owner.control().check().map_err(|error| error.to_string())
    }

    fn abort(&self, reason: &str) {
        self.0.owner.abort(reason);
    }
}

/// The groups, one for each actor.
pub(crate) fn owned(groups: Vec<ConnectedGroup>) -> Vec<Box<dyn OwnedGroup>> {
    groups.into_iter().map(|group| Box::new(MeshGroup(group)) as Box<dyn OwnedGroup>).collect()
}
