//! The exporter's own health on the admin port: calls, errors, withdrawals, rendering, scrapes, memory, CPU.
//!
//! Inputs: counts that live elsewhere are read when the registry is read, so they cannot drift.
//! Invariants: names come from `signals::own`; label values come from closed sets.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use forewarm_nvml::{BUCKETS, CallLog};
use forewarm_runtime::metrics::{register, registry};
use forewarm_signals::{Family as Names, Group, Kind, own};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::PROGRAM;
use crate::poll::PollCounts;
use crate::snapshot::{Fleet, LibraryState};
use crate::web_config::WebConfig;

/// Upper bounds for rendering, in seconds: the budget of a whole scrape is 2 ms.
const RENDER_BUCKETS: [f64; 6] = [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002, 0.01];

/// Counters that the server moves.
#[derive(Debug, Clone)]
pub struct Metrics {
    scrapes: Family<[(&'static str, &'static str); 2], Counter>,
    /// Time to make a page.
    pub render: Histogram,
}

/// What the registry reads when it is read.
#[derive(Debug)]
pub struct Sources {
    /// The GPUs.
    pub fleet: Arc<Fleet>,
    /// Calls.
    pub calls: Arc<CallLog>,
    /// Polling.
    pub counts: Arc<PollCounts>,
    /// Web config, where there is one.
    pub web: Option<Arc<WebConfig>>,
}

impl Metrics {
    /// A registry with everything but attribution's own.
    #[must_use]
    pub fn register(sources: Sources) -> (Self, Registry) {
        let mut registry = registry(PROGRAM, env!("CARGO_PKG_VERSION"));
        let metrics = Self {
            scrapes: Family::default(),
            render: Histogram::new(RENDER_BUCKETS),
        };
        register(&mut registry, &own::SCRAPES_TOTAL, metrics.scrapes.clone());
        register(&mut registry, &own::RENDER_SECONDS, metrics.render.clone());
        registry.register_collector(Box::new(sources));
        (metrics, registry)
    }

    /// Counts an answer.
    pub fn scraped(&self, path: &'static str, status: &'static str) {
        self.scrapes
            .get_or_create(&[("path", path), ("status", status)])
            .inc();
    }
}

impl Collector for Sources {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        let is_open = matches!(self.fleet.load().library, LibraryState::Open { .. });
        one(encoder, &own::NVML_UP, u64::from(is_open))?;
        one(encoder, &own::NVML_OPENS_TOTAL, self.counts.opens.load(Relaxed))?;
        one(encoder, &own::STUCK_GPUS, self.counts.stuck.load(Relaxed))?;
        one(
            encoder,
            &own::MISSED_TICKS_TOTAL,
            self.counts.missed_ticks.load(Relaxed),
        )?;
        one(
            encoder,
            &own::XIDS_DROPPED_TOTAL,
            self.counts.xids_dropped.load(Relaxed),
        )?;
        let mut rejected = open(encoder, &own::REJECTED_VALUES_TOTAL)?;
        for (reason, count) in self.counts.rejected() {
            number(
                &mut rejected,
                own::REJECTED_VALUES_TOTAL.kind,
                &[("reason", reason.as_str())],
                count,
            )?;
        }
        let mut withdrawn = open(encoder, &own::WITHDRAWN_TOTAL)?;
        for (group, count) in Group::ALL.into_iter().zip(&self.counts.withdrawn) {
            let count = count.load(Relaxed);
            number(
                &mut withdrawn,
                own::WITHDRAWN_TOTAL.kind,
                &[("group", group.as_str())],
                count,
            )?;
        }
        self.encode_calls(encoder)?;
        if let Some(web) = &self.web {
            let mut loads = open(encoder, &own::WEB_CONFIG_LOADS_TOTAL)?;
            for (outcome, count) in [("loaded", web.reloads()), ("refused", web.failures())] {
                number(
                    &mut loads,
                    own::WEB_CONFIG_LOADS_TOTAL.kind,
                    &[("outcome", outcome)],
                    count,
                )?;
            }
        }
        encode_process(encoder)
    }
}

impl Sources {
    fn encode_calls(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut errors = open(encoder, &own::NVML_ERRORS_TOTAL)?;
        for (call, code, count) in self.calls.failures() {
            let labels = [("call", call.symbol()), ("code", code.name())];
            number(&mut errors, own::NVML_ERRORS_TOTAL.kind, &labels, count)?;
        }
        let mut latency = open(encoder, &own::NVML_CALL_SECONDS)?;
        for figures in self.calls.figures() {
            let mut buckets = Vec::with_capacity(BUCKETS.len() + 1);
            let mut before = 0;
            for (bound, cumulative) in BUCKETS.into_iter().zip(figures.cumulative) {
                buckets.push((bound, cumulative.saturating_sub(before)));
                before = cumulative;
            }
            buckets.push((f64::MAX, figures.count.saturating_sub(before)));
            latency
                .encode_family(&[("call", figures.call.symbol())])?
                .encode_histogram::<NoLabelSet>(figures.seconds, figures.count, &buckets, None)?;
        }
        Ok(())
    }
}

/// Memory and CPU of this process, absent where `/proc` does not tell.
fn encode_process(encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    if let Some(bytes) = resident_bytes() {
        one(encoder, &own::RESIDENT_MEMORY_BYTES, bytes)?;
    }
    if let Some(seconds) = cpu_seconds() {
        open(encoder, &own::CPU_SECONDS_TOTAL)?.encode_counter::<NoLabelSet, _, u64>(&seconds, None)?;
    }
    Ok(())
}

/// Resident memory of this process.
#[must_use]
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// CPU time of this process, user and system.
#[must_use]
pub fn cpu_seconds() -> Option<f64> {
    /// `USER_HZ`, which Linux fixes at 100 for everything that user space sees.
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name in parentheses may hold anything; fields are counted after it: utime is the 12th, stime the 13th.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let user: u32 = fields.next()?.parse().ok()?;
    let system: u32 = fields.next()?.parse().ok()?;
    Some((f64::from(user) + f64::from(system)) / TICKS_PER_SECOND)
}

/// The client library appends `_total` itself.
fn open<'a>(
    encoder: &'a mut DescriptorEncoder<'_>,
    names: &'static Names,
) -> Result<MetricEncoder<'a>, fmt::Error> {
    let (kind, name) = match names.kind {
        Kind::Counter => (
            MetricType::Counter,
            names.name.strip_suffix("_total").unwrap_or(names.name),
        ),
        Kind::Histogram => (MetricType::Histogram, names.name),
        Kind::Gauge | Kind::Info => (MetricType::Gauge, names.name),
    };
    encoder.encode_descriptor(name, names.help, None, kind)
}

fn one(encoder: &mut DescriptorEncoder<'_>, names: &'static Names, value: u64) -> fmt::Result {
    let mut metric = open(encoder, names)?;
    match names.kind {
        Kind::Counter => metric.encode_counter::<NoLabelSet, _, u64>(&value, None),
        _ => metric.encode_gauge(&value),
    }
}

fn number(
    metric: &mut MetricEncoder<'_>,
    kind: Kind,
    labels: &impl EncodeLabelSet,
    value: u64,
) -> fmt::Result {
    let mut member = metric.encode_family(labels)?;
    match kind {
        Kind::Counter => member.encode_counter::<NoLabelSet, _, u64>(&value, None),
        _ => member.encode_gauge(&value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_of_the_vocabulary_is_told() {
        let sources = Sources {
            fleet: Fleet::new(std::time::Duration::from_secs(1)),
            calls: Arc::default(),
            counts: Arc::default(),
            web: None,
        };
        let (metrics, registry) = Metrics::register(sources);
        metrics.scraped("/metrics", "200");
        metrics.render.observe(0.001);
        let text = forewarm_runtime::metrics::text(&registry);
        let elsewhere = ["forewarm_exporter_attribution_", "forewarm_exporter_web_config_"];
        for family in own::EXPORTER {
            if elsewhere.iter().any(|prefix| family.name.starts_with(prefix)) {
                continue;
            }
            let name = family.name.strip_suffix("_total").unwrap_or(family.name);
            assert!(
                text.contains(&format!("# TYPE {name} ")),
                "{} is missing in\n{text}",
                family.name
            );
        }
        assert!(text.contains("forewarm_exporter_nvml_up 0\n"), "{text}");
    }

    #[test]
    fn the_process_knows_its_own_size() {
        assert!(resident_bytes().unwrap() > 100_000);
        assert!(cpu_seconds().unwrap() >= 0.0);
    }
}
