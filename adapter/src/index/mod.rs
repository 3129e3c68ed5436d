//! The one index of values: written by one task, read by every request.
//!
//! Purpose: keeps what was scraped, by pod UID and node, and publishes finished values per metric.
//! Inputs: [`Batch`]es from `source`, pod changes from a watch, a new configuration.
//! Invariants: [`Writer`] is the only place that changes anything; a [`State`] is immutable once published, so a
//! request sees one consistent moment and takes no lock. A pod is known by its UID: a name that was reused, a
//! pod that ended or one that runs on another node never lends its value to another.
//!
//! ```text
//!  Batch ──► identify (pod, node) ──► cells (one a container, device, way of measuring) ──► Entry ──► State
//! ```

mod batch;
mod cell;
mod claims;
mod evaluate;
mod fold;
mod identify;
mod pods;
mod task;
pub mod watch;
mod writer;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use batch::{Batch, Failure, Row};
pub use pods::{Pod, PodChange, PodMode};
pub use task::{Index, Message, Queue, start};
pub use writer::Writer;

use crate::config::{Config, Per};
use crate::provider::{Catalog, GroupResource};
use crate::quantity::Quantity;

/// Pods of one namespace by name.
pub type NamespacePods = BTreeMap<Arc<str>, Arc<Pod>>;

/// What requests read.
#[derive(Debug, Clone)]
pub struct State {
    /// The configuration that made it.
    pub config: Arc<Config>,
    /// What discovery shows of it.
    pub catalog: Arc<Catalog>,
    /// Whether the pods are known; without them nothing can be said about pods.
    pub pods_known: bool,
    /// Since when the watch of the pods is broken; `None` while it works.
    pub pods_silent_since: Option<Instant>,
    /// Running pods.
    pub pods: HashMap<Arc<str>, Arc<NamespacePods>>,
    /// Finished values, one for each metric of the configuration.
    pub custom: Vec<MetricState>,
    /// Series, one list for each external metric and target.
    pub external: Vec<HashMap<TargetId, Arc<Vec<ExternalSeries>>>>,
    /// How targets answer.
    pub targets: HashMap<TargetId, TargetState>,
}

/// Finished values of one metric.
#[derive(Debug, Clone, Default)]
pub struct MetricState {
    /// By namespace and pod UID.
    pub pods: HashMap<Arc<str>, Arc<HashMap<Arc<str>, Entry>>>,
    /// By node.
    pub nodes: HashMap<Arc<str>, Entry>,
}

/// A value, or why there is none.
#[derive(Debug, Clone, PartialEq)]
pub enum Entry {
    /// A value that is served until it is too old.
    Value(Value),
    /// Held back on purpose, because the pod is not ready; the text says so.
    Withheld(Arc<str>),
    /// Nothing can be said honestly; the text says why.
    Absent(Arc<str>),
}

/// A finished value.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    /// The number, scaled.
    pub quantity: Quantity,
    /// The oldest reading behind it.
    pub measured_at: Instant,
    /// How old it may become.
    pub max_age: Duration,
    /// What it looks back on.
    pub window: Option<Duration>,
    /// Who reported it.
    pub target: TargetId,
    /// What may be served once this is too old: measured in a less exact way, and valid for longer.
    pub then: Option<Arc<Value>>,
}

impl Value {
    /// Until when it may be served.
    #[must_use]
    pub fn end(&self) -> Instant {
        self.measured_at + self.max_age
    }
}

/// A series of an external metric.
#[derive(Debug, Clone, PartialEq)]
pub struct ExternalSeries {
    /// Its labels, the node included.
    pub labels: BTreeMap<String, String>,
    /// The number, scaled.
    pub value: f64,
    /// When it was measured.
    pub measured_at: Instant,
}

/// A target of a source.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TargetId {
    /// Source.
    pub source: Arc<str>,
    /// Pod name or address.
    pub name: Arc<str>,
}

/// How a target answers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TargetState {
    /// The node that it reports about.
    pub node: Option<Arc<str>>,
    /// The last body that was taken.
    pub last_ok: Option<Instant>,
    /// Why the last scrape failed; `None` after a good one.
    pub failure: Option<Failure>,
}

impl State {
    /// The state of a configuration before anything was scraped.
    #[must_use]
    pub fn empty(config: Arc<Config>) -> Self {
        Self {
            catalog: Arc::new(catalog(&config)),
            pods_known: false,
            pods_silent_since: None,
            pods: HashMap::new(),
            custom: vec![MetricState::default(); config.metrics.len()],
            external: vec![HashMap::new(); config.external.len()],
            targets: HashMap::new(),
            config,
        }
    }

    /// Position of a custom metric in the configuration.
    #[must_use]
    pub fn metric(&self, per: Per, name: &str) -> Option<usize> {
        self.config
            .metrics
            .iter()
            .position(|metric| metric.per == per && &*metric.name == name)
    }
}

/// The names that discovery shows: they come from the configuration and never depend on what answers.
fn catalog(config: &Config) -> Catalog {
    let mut catalog = Catalog::default();
    for metric in &config.metrics {
        let (resource, namespaced) = match metric.per {
            Per::Pods => ("pods", true),
            Per::Nodes => ("nodes", false),
            Per::Namespaces => ("namespaces", false),
        };
        let entry = catalog.custom.entry(GroupResource::parse(resource)).or_default();
        entry.namespaced = namespaced;
        entry.metrics.insert(metric.name.to_string());
    }
    catalog.external = config
        .external
        .iter()
        .map(|external| external.name.to_string())
        .collect();
    catalog
}

#[cfg(test)]
mod tests;
