//! The section `elastic`: failure detection, waiting for replacements, and limits of shrinking.

use std::time::Duration;

use phalanx_strategies::elastic::mesh_choice::Policy;
use phalanx_strategies::elastic::quorum::FOREVER;
use phalanx_strategies::elastic::timing::Timing;
use phalanx_strategies::mesh::Mesh;
use serde_yaml_ng::{Mapping, Value};

use super::at::At;
use super::error::{ConfigError, Errors};
use super::section::{Section, section};
use super::setting::{AT_LEAST_ONE, COUNT, SECONDS, SECONDS_OF_DETECTION, SECONDS_OF_LIMIT, SPARES, Setting};
use super::yaml_1_1::whole;

section! {
    /// The section `elastic`.
    pub struct Elastic {
        /// Seconds after which a silent machine counts as lost; all other timeouts are derived from it.
        pub detection_time: f64 = 1.0 => SECONDS_OF_DETECTION;
        /// Rank processes beyond the mesh on every node, kept as warm spares: their model is compiled and their memory
        /// is allocated. On a GPU they have a context, and their kernels, products and attention are prepared; they
        /// allocate buffers once they take a rank. A spare takes ranks of its own GPU, so as many spares as GPUs are
        /// useful.
        pub spare_ranks: usize = 0 => SPARES;
        /// Seconds to wait for a replacement before the job continues in a smaller world, and for any member of a lost
        /// world before the job continues from its newest checkpoint (there at least 5 times `detection_time`); `none`
        /// waits forever.
        pub replace_patience: Option<f64> = Some(30.0) => SECONDS;
        /// Smallest number of model copies with which the job continues.
        pub dp_replicate_min: usize = 1 => AT_LEAST_ONE;
        /// Smallest number of ranks that share the state of one copy; bounded by a rank's memory.
        pub dp_shard_min: usize = 1 => AT_LEAST_ONE;
        /// Keep a second copy of state that would otherwise be lost with one node (or, on a single node, one process).
        pub shadows: bool = true;
        /// Bytes of missing state above which a new rank catches up while the others train, if they can train without
        /// it; smaller amounts are fetched between two steps.
        pub rest_bytes_max: usize = 32 << 20;
        /// Replace a rank that delays all others for too long, instead of waiting for it.
        pub evict_stragglers: bool = true;
        /// Seconds that a rank may make no progress before its first step in a world; later limits follow from
        /// `detection_time` and the duration of the longest instruction.
        pub step_timeout: f64 = 600.0 => SECONDS_OF_LIMIT;
        /// Steps between comparisons of all copies of the state, which find silent corruption; they are also compared
        /// before every checkpoint. `auto` compares as often as 0.1 % of the time allows; 0 never compares.
        pub verify_steps: VerifySteps = VerifySteps::Auto;
        /// Maximum number of consecutive failures without a completed step; more end the job once they have lasted for
        /// 30 times `detection_time`. Before each further world the job pauses, twice as long as before the last one.
        pub incidents_max: usize = 5 => COUNT;
    }
}

section! {
    /// Elasticity.
    pub struct ElasticSection {
        /// Handling of lost and added ranks and machines; its keys are listed below.
        pub elastic: Elastic = Elastic::default();
    }
}

/// How often all copies of the state are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerifySteps {
    /// As often as a thousandth of the time allows.
    Auto,
    /// After each multiple of this number of steps; 0 for never.
    Every(u64),
}

impl Setting for VerifySteps {
    fn fits() -> String {
        "auto or a whole number of at least 0".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        match value {
            Value::String(word) if word == "auto" => Ok(VerifySteps::Auto),
            _ => whole(value).map(VerifySteps::Every).ok_or_else(|| at.mismatch(value, Self::fits())),
        }
    }
    fn write(&self) -> Value {
        match self {
            VerifySteps::Auto => Value::String("auto".into()),
            VerifySteps::Every(n) => n.write(),
        }
    }
}

impl Setting for Elastic {
    fn fits() -> String {
        "a section with keys such as `detection_time`".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        let keys = value.as_mapping().ok_or_else(|| at.mismatch(value, Self::fits()))?;
        let known: Vec<&str> = Elastic::keys().iter().map(|doc| doc.key).collect();
        let mut errors = Errors::default();
        errors.keep(at.refuse_unknown(keys, &known));
        let read = errors.keep(Elastic::read_section(keys, at)).unwrap_or_default();
        errors.end(read)
    }
    fn write(&self) -> Value {
        let mut keys = Mapping::new();
        self.write_section(&mut keys);
        Value::Mapping(keys)
    }
}

/// Longer than any job runs, and short enough for timers.
impl Elastic {
    /// The timeouts that follow from the detection time.
    pub fn timing(&self) -> Timing {
        // The duration of preparations does not depend on the detection time.
        let derived = Timing::derive(Duration::from_secs_f64(self.detection_time));
        Timing { first_step: Duration::from_secs_f64(self.step_timeout).max(derived.stuck), ..derived }
    }

    /// The policy for changes of the mesh. An update writes `state_bytes` of weights and optimizer state.
    pub fn policy(&self, wanted: Mesh, n_microbatches: usize, state_bytes: u64) -> Policy {
        Policy {
            wanted,
            dp_replicate_min: self.dp_replicate_min.min(wanted.dp_replicate),
            dp_shard_min: self.dp_shard_min.min(wanted.dp_shard),
            replace_patience: self.replace_patience.map_or(FOREVER, Duration::from_secs_f64),
            n_microbatches,
            uneven: true,
            evict_stragglers: self.evict_stragglers,
            shadows: self.shadows,
            incidents_max: self.incidents_max as u32,
            one_model: false,
            state_bytes,
            rest_bytes_max: self.rest_bytes_max as u64,
        }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let fits = self.timing().check();
        fits.map_err(|error| ConfigError::Conflict {
            first: "elastic.detection_time".into(),
            second: "a derived timeout".into(),
            why: error.to_string(),
        })
    }
}
