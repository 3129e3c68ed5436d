//! The seam between the metrics API and the values behind it.
//!
//! Purpose: what the HTTP side asks, what the index answers, and why it may refuse.
//! Inputs: decoded path and query of one request; answers come from memory.
//! Invariants: a [`Provider`] never blocks and never performs I/O; a value always says when it was measured;
//! what cannot be served is a [`Refusal`] with a reason that a person can act on, never a zero. A
//! [`Catalog`] gives each resource exactly one scope, because kube-apiserver drops the whole group when one
//! resource is listed both namespaced and cluster-scoped.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::quantity::Quantity;
use crate::selector::Selector;

/// Answers questions about metrics from memory.
pub trait Provider: Send + Sync + 'static {
    /// Values of `metric` for the objects that `query` describes, one item each.
    ///
    /// # Errors
    /// A [`Refusal`] where not a single honest value can be given.
    fn custom(
        &self,
        query: &ObjectQuery<'_>,
        metric: &str,
        metric_selector: &Selector,
        now: Instant,
    ) -> Result<Vec<CustomValue>, Refusal>;

    /// Values of the external metric `metric` as `namespace` may see them.
    ///
    /// # Errors
    /// A [`Refusal`] where not a single honest value can be given.
    fn external(
        &self,
        namespace: &str,
        metric: &str,
        selector: &Selector,
        now: Instant,
    ) -> Result<Vec<ExternalValue>, Refusal>;

    /// The names to advertise in discovery; the same `Arc` until they change.
    fn catalog(&self) -> Arc<Catalog>;
}

/// The objects that a custom-metrics request asks about.
#[derive(Debug, Clone, Copy)]
pub enum ObjectQuery<'a> {
    /// Pods of a namespace: one by name, or all (`*`) that match the selector.
    Pods {
        /// Namespace of the pods.
        namespace: &'a str,
        /// One pod, or `None` for the wildcard.
        name: Option<&'a str>,
        /// `labelSelector`, over pod labels.
        selector: &'a Selector,
    },
    /// A namespace itself (`namespaces/<ns>/metrics/<metric>`).
    Namespace {
        /// Its name.
        namespace: &'a str,
    },
    /// Any other kind of object.
    Object {
        /// Namespace in the path. Present for cluster-scoped kinds too when HPA asks: it always goes through
        /// its own namespace, so a provider ignores it for kinds such as nodes.
        namespace: Option<&'a str>,
        /// What kind of object, as written in the path.
        resource: &'a GroupResource,
        /// One object, or `None` for the wildcard.
        name: Option<&'a str>,
        /// `labelSelector`, over the objects' labels.
        selector: &'a Selector,
    },
}

/// Plural (a singular is tolerated) resource name and API group, as in `deployments.apps`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupResource {
    /// API group, empty for the core group.
    pub group: String,
    /// Resource name, lower case.
    pub resource: String,
}

impl GroupResource {
    /// Reads `plural` or `plural.group`; the group may itself hold dots.
    #[must_use]
    pub fn parse(segment: &str) -> Self {
        let (resource, group) = segment.split_once('.').unwrap_or((segment, ""));
        Self {
            group: group.to_owned(),
            resource: resource.to_owned(),
        }
    }
}

impl fmt::Display for GroupResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.resource)?;
        if self.group.is_empty() {
            Ok(())
        } else {
            write!(f, ".{}", self.group)
        }
    }
}

/// Names the object that a custom value describes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectRef {
    /// Kind, such as `Pod`.
    pub kind: String,
    /// API version, such as `v1` or `apps/v1`.
    pub api_version: String,
    /// Namespace; `None` for cluster-scoped objects.
    pub namespace: Option<String>,
    /// Object name.
    pub name: String,
}

/// One item of a custom-metrics answer.
#[derive(Debug, Clone, PartialEq)]
pub struct CustomValue {
    /// What the value describes.
    pub object: ObjectRef,
    /// The value, exact to a thousandth.
    pub value: Quantity,
    /// End of the interval that the value covers: the time of the reading, never "now".
    pub measured_at: SystemTime,
    /// Length of that interval; `None` for a gauge read at one instant.
    pub window: Option<Duration>,
}

/// One item of an external-metrics answer.
#[derive(Debug, Clone, PartialEq)]
pub struct ExternalValue {
    /// Labels that tell this series from its siblings.
    pub labels: BTreeMap<String, String>,
    /// The value, exact to a thousandth.
    pub value: Quantity,
    /// End of the interval that the value covers.
    pub measured_at: SystemTime,
    /// Length of that interval; `None` for a gauge read at one instant.
    pub window: Option<Duration>,
}

/// Why no honest value can be given. Mapped once, in `status`, to a code and reason of the API.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No such metric is configured for this kind of object.
    #[error("the server could not find the metric {metric} for {resource}")]
    UnknownMetric {
        /// Requested metric.
        metric: String,
        /// Requested resource and object, as a person would name it; for external metrics, `namespace <ns>`.
        resource: String,
    },
    /// The metric exists, but the namespace holds no pod (or object) that the selector or name matches.
    #[error("no {resource} in namespace {namespace} matches {selector}, so there is no value of {metric}")]
    NoPodsMatch {
        /// Requested metric.
        metric: String,
        /// What was looked for, such as `running pod`.
        resource: String,
        /// Namespace looked at.
        namespace: String,
        /// The selector, or the name, as asked.
        selector: String,
    },
    /// Objects match, but none has a fresh sample. The text names metric, selector, age and cause.
    #[error("{0}")]
    NoSample(String),
    /// The selector cannot be read, or cannot be applied to this metric.
    #[error("{0}")]
    BadSelector(String),
    /// More than one series where exactly one was promised.
    #[error("{0}")]
    Ambiguous(String),
    /// What answers this metric is not reachable, or not yet synced.
    #[error("{0}")]
    Unavailable(String),
    /// What answers this metric did not do so within the budget of the request.
    #[error("{0}")]
    Timeout(String),
}

/// What discovery advertises.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Catalog {
    /// Custom metrics by resource.
    pub custom: BTreeMap<GroupResource, ResourceMetrics>,
    /// External metrics.
    pub external: BTreeSet<String>,
}

/// The custom metrics of one resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResourceMetrics {
    /// Whether objects of this resource live in namespaces.
    pub namespaced: bool,
    /// Metric names.
    pub metrics: BTreeSet<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_resource_keeps_all_dots_of_its_group() {
        let parsed = GroupResource::parse("ingresses.networking.k8s.io");
        assert_eq!(parsed.resource, "ingresses");
        assert_eq!(parsed.group, "networking.k8s.io");
        assert_eq!(parsed.to_string(), "ingresses.networking.k8s.io");
        assert_eq!(GroupResource::parse("nodes").to_string(), "nodes");
    }
}
