//! Families that the adapter exposes about itself.

use super::own;
use crate::family::{Family, Kind, Unit};

macro_rules! families {
    ($( $(#[$doc:meta])* $ident:ident = $name:literal, $kind:ident, $unit:expr, [$($label:literal),*], $help:literal; )*) => {
        $( $(#[$doc])* pub const $ident: Family = own($name, Kind::$kind, $unit, &[$($label),*], $help); )*
        /// All of them.
        pub const FAMILIES: &[&Family] = &[$(&$ident),*];
    };
}

families! {
    /// Scrapes by outcome.
    SCRAPES_TOTAL = "forewarm_adapter_scrapes_total", Counter, None, ["source", "result"], "Scrapes of targets, by source and result";
    /// Time a scrape takes.
    SCRAPE_SECONDS = "forewarm_adapter_scrape_seconds", Histogram, Some(Unit::Seconds), ["source"], "Time from sending a scrape to having read its body";
    /// Whether the last scrape of a target was taken.
    TARGET_UP = "forewarm_adapter_target_up", Gauge, None, ["source", "target"], "1 while the last scrape of the target was taken, 0 while it failed";
    /// Targets of a source.
    TARGETS = "forewarm_adapter_targets", Gauge, None, ["source"], "Targets that a source has now";
    /// Time to read a body.
    PARSE_SECONDS = "forewarm_adapter_parse_seconds", Histogram, Some(Unit::Seconds), [], "Time to read one body, from text to samples";
    /// Samples left out.
    SAMPLES_DROPPED_TOTAL = "forewarm_adapter_samples_dropped_total", Counter, None, ["reason"], "Samples that were read and left out, by reason";
    /// Bodies that no longer fit the queue.
    BATCHES_DROPPED_TOTAL = "forewarm_adapter_batches_dropped_total", Counter, None, [], "Scraped bodies that were thrown away because the index was behind";
    /// Two exporters claim one pod.
    SAMPLE_CONFLICTS_TOTAL = "forewarm_adapter_sample_conflicts_total", Counter, None, [], "Samples refused because another target answers for the pod, or because the pod runs on another node";
    /// Series that are held.
    SERIES = "forewarm_adapter_series", Gauge, None, [], "Series held in memory, one a metric and container or node and device";
    /// Pods that are known.
    PODS = "forewarm_adapter_pods", Gauge, None, [], "Running pods that are known";
    /// Watches that broke.
    WATCH_ERRORS_TOTAL = "forewarm_adapter_watch_errors_total", Counter, None, ["watch"], "Errors of watches on the API server, each followed by a retry";
    /// Age of what is served.
    VALUE_AGE_SECONDS = "forewarm_adapter_value_age_seconds", Histogram, Some(Unit::Seconds), ["metric"], "Age of the values that were served, at the moment of the answer";
    /// Outcome of the last reload.
    CONFIG_LAST_RELOAD_SUCCESS = "forewarm_adapter_config_last_reload_success", Gauge, None, [], "1 while the newest content of the configuration file is in force, 0 while it was rejected";
}
