//! Attribution's own health: failures, ages, gaps, and who tells about pods.
//!
//! Inputs: the tasks count failures; ages and gaps are read from the live state when the registry is read.
//! Invariants: names come from `signals::own`; every label value comes from a closed set.

use std::fmt;
use std::time::Instant;

use forewarm_runtime::metrics::register;
use forewarm_signals::{Family as Names, own};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::allocation::Gap;
use super::call::Reason;
use super::pods::PodSource;
use super::view::AttributionView;

/// A question that is asked of the kubelet or the API server. The value of label `api`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Api {
    /// PodResources List: who holds what.
    Allocations,
    /// PodResources GetAllocatableResources: what there is.
    Allocatable,
    /// The kubelet's Pods API.
    Pods,
    /// The pod watch at the API server.
    ApiServerPods,
}

impl Api {
    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allocations => "allocations",
            Self::Allocatable => "allocatable",
            Self::Pods => "pods",
            Self::ApiServerPods => "api-server-pods",
        }
    }
}

type Labels = [(&'static str, &'static str); 2];

/// Counters that the tasks move.
#[derive(Debug, Clone, Default)]
pub(super) struct Metrics {
    errors: Family<Labels, Counter>,
}

impl Metrics {
    /// Registers the counters, and the gauges that are read from the view.
    pub(super) fn register(registry: &mut Registry, view: AttributionView) -> Self {
        let metrics = Self::default();
        register(registry, &own::ATTRIBUTION_ERRORS_TOTAL, metrics.errors.clone());
        registry.register_collector(Box::new(State(view)));
        metrics
    }

    pub(super) fn failed(&self, api: Api, reason: Reason) {
        self.errors
            .get_or_create(&[("api", api.as_str()), ("reason", reason.as_str())])
            .inc();
    }
}

/// Gauges read from the live state, so that they cannot drift.
#[derive(Debug)]
struct State(AttributionView);

impl Collector for State {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let now = Instant::now();
        let health = self.0.health();
        let ages = [
            (Api::Allocations, self.0.load().answered_at),
            (Api::Allocatable, health.allocatable_at),
            // A connected stream is as old as the last look at it: now.
            (Api::Pods, health.pods.map(|(_, lost_at)| lost_at.unwrap_or(now))),
        ];
        let ages = ages.into_iter().filter_map(|(api, at)| {
            at.map(|at| (api.as_str(), now.saturating_duration_since(at).as_secs_f64()))
        });
        gauges(&mut encoder, &own::ATTRIBUTION_AGE_SECONDS, ages)?;

        let gaps = self.0.gaps();
        let gaps = Gap::ALL
            .into_iter()
            .map(|gap| (gap.as_str(), gaps.get(&gap).copied().unwrap_or_default() as f64));
        gauges(&mut encoder, &own::ATTRIBUTION_GAPS, gaps)?;

        let connected = health
            .pods
            .and_then(|(source, lost_at)| lost_at.is_none().then_some(source));
        let sources = PodSource::ALL
            .into_iter()
            .map(|source| (source.as_str(), f64::from(u8::from(connected == Some(source)))));
        gauges(&mut encoder, &own::ATTRIBUTION_POD_SOURCE, sources)
    }
}

/// Writes a family of gauges with its one label.
fn gauges(
    encoder: &mut DescriptorEncoder<'_>,
    family: &'static Names,
    values: impl Iterator<Item = (&'static str, f64)>,
) -> fmt::Result {
    let label = family.labels.first().copied().unwrap_or_default();
    let mut metric = encoder.encode_descriptor(
        family.name,
        family.help,
        None,
        prometheus_client::metrics::MetricType::Gauge,
    )?;
    for (value, number) in values {
        ConstGauge::new(number).encode(metric.encode_family(&[(label, value)])?)?;
    }
    Ok(())
}
