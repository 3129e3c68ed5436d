//! What the adapter says about its own values: scrapes, drops, conflicts, ages.
//!
//! Inputs: calls from source, index, query and config. Names come from `signals`.
//! Invariants: reasons and results are closed sets; series of a vanished target are removed with it.

use std::time::Duration;

use forewarm_signals::own::adapter as names;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Why a sample that was read is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Drop {
    /// NaN or an infinity.
    NotFinite,
    /// No age line says when it was measured.
    NoAge,
    /// Its age line is negative, not finite or absurd.
    BadAge,
    /// A needed label is missing.
    NoIdentity,
    /// Its pod is not running, or not known.
    UnknownPod,
    /// Its pod's UID belongs to another name.
    WrongPod,
    /// Its pod runs on another node, or another target answers for it.
    Conflict,
    /// The same series stands twice in one body.
    Duplicate,
    /// A newer reading is already held.
    OutOfOrder,
    /// The body was not taken: the format is broken.
    BadBody,
    /// The body was not taken: too many samples.
    TooManySeries,
    /// The number does not fit a quantity.
    Unservable,
}

impl Drop {
    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotFinite => "not-finite",
            Self::NoAge => "no-age",
            Self::BadAge => "bad-age",
            Self::NoIdentity => "no-identity",
            Self::UnknownPod => "unknown-pod",
            Self::WrongPod => "wrong-pod",
            Self::Conflict => "conflict",
            Self::Duplicate => "duplicate",
            Self::OutOfOrder => "out-of-order",
            Self::BadBody => "bad-body",
            Self::TooManySeries => "too-many-series",
            Self::Unservable => "unservable",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BySource {
    source: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByResult {
    source: String,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByTarget {
    source: String,
    target: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByReason {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByWatch {
    watch: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByMetric {
    metric: String,
}

fn scrape_histogram() -> Histogram {
    Histogram::new([0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
}

fn parse_histogram() -> Histogram {
    Histogram::new([0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.05])
}

/// Around the two seconds that a fresh value may have, and up to what `maxAge` usually allows.
fn age_histogram() -> Histogram {
    Histogram::new([0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 10.0, 20.0, 30.0])
}

/// The adapter's own series, except those of its HTTP side.
#[derive(Debug)]
pub struct Metrics {
    scrapes: Family<ByResult, Counter>,
    scrape_seconds: Family<BySource, Histogram, fn() -> Histogram>,
    target_up: Family<ByTarget, Gauge>,
    targets: Family<BySource, Gauge>,
    parse_seconds: Histogram,
    dropped: Family<ByReason, Counter>,
    batches_dropped: Counter,
    conflicts: Counter,
    series: Gauge,
    pods: Gauge,
    watch_errors: Family<ByWatch, Counter>,
    value_age: Family<ByMetric, Histogram, fn() -> Histogram>,
    config_ok: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            scrapes: Family::default(),
            scrape_seconds: Family::new_with_constructor(scrape_histogram),
            target_up: Family::default(),
            targets: Family::default(),
            parse_seconds: parse_histogram(),
            dropped: Family::default(),
            batches_dropped: Counter::default(),
            conflicts: Counter::default(),
            series: Gauge::default(),
            pods: Gauge::default(),
            watch_errors: Family::default(),
            value_age: Family::new_with_constructor(age_histogram),
            config_ok: Gauge::default(),
        }
    }
}

impl Metrics {
    /// Registers every series under its name in `signals`.
    pub fn register(&self, registry: &mut Registry) {
        use forewarm_runtime::metrics::register;
        register(registry, &names::SCRAPES_TOTAL, self.scrapes.clone());
        register(registry, &names::SCRAPE_SECONDS, self.scrape_seconds.clone());
        register(registry, &names::TARGET_UP, self.target_up.clone());
        register(registry, &names::TARGETS, self.targets.clone());
        register(registry, &names::PARSE_SECONDS, self.parse_seconds.clone());
        register(registry, &names::SAMPLES_DROPPED_TOTAL, self.dropped.clone());
        register(
            registry,
            &names::BATCHES_DROPPED_TOTAL,
            self.batches_dropped.clone(),
        );
        register(registry, &names::SAMPLE_CONFLICTS_TOTAL, self.conflicts.clone());
        register(registry, &names::SERIES, self.series.clone());
        register(registry, &names::PODS, self.pods.clone());
        register(registry, &names::WATCH_ERRORS_TOTAL, self.watch_errors.clone());
        register(registry, &names::VALUE_AGE_SECONDS, self.value_age.clone());
        register(
            registry,
            &names::CONFIG_LAST_RELOAD_SUCCESS,
            self.config_ok.clone(),
        );
    }

    /// One scrape ended with `result`, after `took`.
    pub fn scraped(&self, source: &str, target: &str, result: &'static str, is_up: bool, took: Duration) {
        let source = source.to_owned();
        self.scrapes
            .get_or_create(&ByResult {
                source: source.clone(),
                result,
            })
            .inc();
        self.scrape_seconds
            .get_or_create(&BySource {
                source: source.clone(),
            })
            .observe(took.as_secs_f64());
        self.target_up
            .get_or_create(&ByTarget {
                source,
                target: target.to_owned(),
            })
            .set(i64::from(is_up));
    }

    /// A target is gone.
    pub fn target_removed(&self, source: &str, target: &str) {
        self.target_up.remove(&ByTarget {
            source: source.to_owned(),
            target: target.to_owned(),
        });
    }

    /// A source has this many targets.
    pub fn targets(&self, source: &str, count: usize) {
        let source = source.to_owned();
        self.targets
            .get_or_create(&BySource { source })
            .set(signed(count));
    }

    /// A body was read in this time.
    pub fn parsed(&self, took: Duration) {
        self.parse_seconds.observe(took.as_secs_f64());
    }

    /// Samples were left out.
    pub fn dropped(&self, reason: Drop, count: usize) {
        if count > 0 {
            let labels = ByReason {
                reason: reason.as_str(),
            };
            self.dropped.get_or_create(&labels).inc_by(count as u64);
            if reason == Drop::Conflict {
                self.conflicts.inc_by(count as u64);
            }
        }
    }

    /// A body did not fit the queue of the index.
    pub fn batch_dropped(&self) {
        self.batches_dropped.inc();
    }

    /// What is held now.
    pub fn held(&self, series: usize, pods: usize) {
        self.series.set(signed(series));
        self.pods.set(signed(pods));
    }

    /// A watch broke and is retried.
    pub fn watch_failed(&self, watch: &'static str) {
        self.watch_errors.get_or_create(&ByWatch { watch }).inc();
    }

    /// A value of this age was served.
    pub fn served(&self, metric: &str, age: Duration) {
        let metric = metric.to_owned();
        self.value_age
            .get_or_create(&ByMetric { metric })
            .observe(age.as_secs_f64());
    }

    /// The file was read again and is in force, or not.
    pub fn config_reloaded(&self, is_in_force: bool) {
        self.config_ok.set(i64::from(is_in_force));
    }
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_series_stands_in_the_vocabulary() {
        let metrics = Metrics::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        metrics.scraped("s", "t", "ok", true, Duration::from_millis(3));
        metrics.dropped(Drop::Conflict, 2);
        metrics.served("m", Duration::from_secs(1));
        metrics.watch_failed("pods");
        metrics.targets("s", 1);
        let body = forewarm_runtime::metrics::text(&registry);
        for family in names::FAMILIES {
            assert!(body.contains(family.name), "{}\n{body}", family.name);
        }
        assert!(body.contains("forewarm_adapter_samples_dropped_total{reason=\"conflict\"} 2"));
        assert!(body.contains("forewarm_adapter_sample_conflicts_total 2"));
        metrics.target_removed("s", "t");
        assert!(!forewarm_runtime::metrics::text(&registry).contains("target=\"t\""));
    }
}
