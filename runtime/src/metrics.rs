//! The registry of a program's own metrics and its text.
//!
//! Inputs: the program's name and version. Invariants: names come from `signals::own`; a counter's registered
//! name is the family's name without `_total`, because the client library appends it.

use forewarm_signals::{Family, Kind, own};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry};

/// Content type of what [`text`] returns.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A registry that already tells the program's name and version.
#[must_use]
pub fn registry(program: &'static str, version: &'static str) -> Registry {
    let mut registry = Registry::default();
    let info = Info::new(vec![("version", version), ("program", program)]);
    register(&mut registry, &own::BUILD_INFO, info);
    registry
}

/// Registers a metric under the name and help of its family.
pub fn register(registry: &mut Registry, family: &'static Family, metric: impl Metric) {
    registry.register(registered_name(family), family.help, metric);
}

/// The client library appends `_total` and `_info` itself.
fn registered_name(family: &'static Family) -> &'static str {
    let suffix = match family.kind {
        Kind::Counter => "_total",
        Kind::Info => "_info",
        Kind::Gauge | Kind::Histogram => "",
    };
    family.name.strip_suffix(suffix).unwrap_or(family.name)
}

/// The registry as OpenMetrics text; empty if a metric cannot be formatted, which is logged.
#[must_use]
pub fn text(registry: &Registry) -> String {
    let mut body = String::new();
    if let Err(error) = encode(&mut body, registry) {
        tracing::error!(%error, "metrics cannot be written as text");
        body.clear();
    }
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_build_is_told_under_the_vocabulary_name() {
        let body = text(&registry("forewarm-test", "1.2.3"));
        assert!(
            body.contains("forewarm_build_info{version=\"1.2.3\",program=\"forewarm-test\"} 1"),
            "{body}"
        );
        assert!(body.ends_with("# EOF\n"));
    }
}
