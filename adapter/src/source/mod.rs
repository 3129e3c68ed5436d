//! Reads targets and hands what they said to the index.
//!
//! Purpose: one supervised loop for each target of each source, found by a fixed list or by a watch of pods.
//! Inputs: the configuration in force, HTTP answers, pods of exporters.
//! Invariants: a target that fails or lies harms no other; a body is taken whole or not at all; what was read
//! carries the time of its measurement on our own monotonic clock, so no clock of a target matters; credentials
//! and certificates are read again when their files change.

mod client;
mod discover;
mod manager;
mod pace;
mod read;
mod target;

use std::sync::Arc;

pub use manager::{Cluster, run};

use crate::index::TargetId;

/// A target as found.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Spec {
    id: TargetId,
    /// `host:port`.
    address: String,
    /// The node that it runs on, as the cluster (or the file) says.
    node: Option<Arc<str>>,
    /// What tells a replaced pod of the same name from its predecessor.
    incarnation: Arc<str>,
}
