//! Bodies of the metrics APIs as they travel.
//!
//! Purpose: the JSON of `custom.metrics.k8s.io` v1beta1 and v1beta2 and of `external.metrics.k8s.io` v1beta1.
//! Inputs: values from the provider.
//! Invariants: `items` is never null; timestamps are RFC 3339 seconds in UTC and never later than the
//! measurement; the body names the group version of the URL it answers; a described object of the core group
//! has apiVersion `v1`.

pub mod accept;
mod custom;
mod external;
mod time;

pub use custom::{CustomVersion, custom_list};
pub use external::external_list;

/// Group of per-object metrics.
pub const CUSTOM_GROUP: &str = "custom.metrics.k8s.io";
/// Group of metrics that belong to no Kubernetes object.
pub const EXTERNAL_GROUP: &str = "external.metrics.k8s.io";
/// The one version of the external group.
pub const EXTERNAL_VERSION: &str = "v1beta1";
/// Kind of a list of custom values.
pub const CUSTOM_KIND: &str = "MetricValueList";
/// Kind of a list of external values.
pub const EXTERNAL_KIND: &str = "ExternalMetricValueList";

use std::time::Duration;

use serde::Serialize;

/// `metadata: {}`.
#[derive(Serialize)]
struct ListMeta {}

/// Whole seconds of a window, at least one: zero would read as "no window".
fn window_seconds(window: Option<Duration>) -> Option<u64> {
    window.map(|length| (length.as_secs() + u64::from(length.subsec_millis() >= 500)).max(1))
}
