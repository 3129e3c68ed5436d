//! What one scrape brought, cut down to what the configuration needs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::TargetId;

/// A body that was taken whole.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Who answered.
    pub target: TargetId,
    /// The node that it reports about, as the cluster says, never as the target says.
    pub node: Option<Arc<str>>,
    /// When the request was sent: nothing in the body was measured later than it was written, and it was
    /// written after this.
    pub at: Instant,
    /// How long the answer took to begin: the target took the ages in it somewhere in between, so a reading may be
    /// this much younger than its `measured_at`.
    pub round_trip: Duration,
    /// Samples of needed families.
    pub rows: Vec<Row>,
}

/// One sample with the time of its reading.
#[derive(Debug, Clone)]
pub struct Row {
    /// Family.
    pub family: Arc<str>,
    /// Labels as written.
    pub labels: Vec<(Box<str>, Box<str>)>,
    /// Value; may be NaN or infinite, which the writer drops and counts.
    pub value: f64,
    /// When it was measured, by our own clock; never later than the truth.
    pub measured_at: Instant,
}

impl Row {
    /// Value of a label; an empty one counts as absent, as in Prometheus.
    #[must_use]
    pub fn label(&self, key: &str) -> Option<&str> {
        self.labels
            .iter()
            .find(|(name, value)| &**name == key && !value.is_empty())
            .map(|(_, value)| &**value)
    }
}

/// A scrape that brought nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// When it failed.
    pub at: Instant,
    /// `unreachable`, `timeout` and so on, with the detail, for messages.
    pub text: Arc<str>,
}
