//! Reasons that several rows of the table give.

pub(super) const MODEL_CONFIG: &str = "the model is as its config.json says; change it there, and remove the line";

pub(super) const NO_EXPERTS: &str = "models have no experts; one that has is refused";
