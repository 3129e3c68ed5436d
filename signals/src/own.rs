//! Families that the programs expose about themselves.

pub mod adapter;

use crate::family::{Family, Kind, MeasuredAt, Unit};

const fn own(
    name: &'static str,
    kind: Kind,
    unit: Option<Unit>,
    labels: &'static [&'static str],
    help: &'static str,
) -> Family {
    Family {
        name,
        help,
        kind,
        unit,
        labels,
        measured: MeasuredAt::Now,
    }
}

/// Version of the running program.
pub const BUILD_INFO: Family = own(
    "forewarm_build_info",
    Kind::Info,
    None,
    &["version", "program"],
    "Version of the running program",
);

/// Failed questions of the exporter about pods and allocations.
pub const ATTRIBUTION_ERRORS_TOTAL: Family = own(
    "forewarm_exporter_attribution_errors_total",
    Kind::Counter,
    None,
    &["api", "reason"],
    "Failed questions to the kubelet or the API server about pods and allocations",
);
/// Allocations without row or readings.
pub const ATTRIBUTION_GAPS: Family = own(
    "forewarm_exporter_attribution_gaps",
    Kind::Gauge,
    None,
    &["reason"],
    "Allocations that have no pod row, or no readings in it, by reason",
);
/// Age of the answers behind attribution.
pub const ATTRIBUTION_AGE_SECONDS: Family = own(
    "forewarm_exporter_attribution_age_seconds",
    Kind::Gauge,
    Some(Unit::Seconds),
    &["api"],
    "Time since the last good answer about pods and allocations",
);
/// Who tells about pods.
pub const ATTRIBUTION_POD_SOURCE: Family = own(
    "forewarm_exporter_attribution_pod_source",
    Kind::Gauge,
    None,
    &["source"],
    "1 for the source that tells UID and readiness of pods at the moment",
);

/// Every program.
pub const PROCESS: &[&Family] = &[&BUILD_INFO];

/// Whether the driver's library is open.
pub const NVML_UP: Family = own(
    "forewarm_exporter_nvml_up",
    Kind::Gauge,
    None,
    &[],
    "1 while the driver's management library is open, 0 while the exporter waits for the driver",
);
/// Times the library was opened.
pub const NVML_OPENS_TOTAL: Family = own(
    "forewarm_exporter_nvml_opens_total",
    Kind::Counter,
    None,
    &[],
    "Times the driver's management library was opened; more than one after a driver reload",
);
/// Latency of NVML calls.
pub const NVML_CALL_SECONDS: Family = own(
    "forewarm_exporter_nvml_call_seconds",
    Kind::Histogram,
    Some(Unit::Seconds),
    &["call"],
    "Time spent in NVML calls, by call",
);
/// Failed NVML calls.
pub const NVML_ERRORS_TOTAL: Family = own(
    "forewarm_exporter_nvml_errors_total",
    Kind::Counter,
    None,
    &["call", "code"],
    "NVML calls and batch entries that failed, by call and return code",
);
/// GPUs whose calls do not come back.
pub const STUCK_GPUS: Family = own(
    "forewarm_exporter_stuck_gpus",
    Kind::Gauge,
    None,
    &[],
    "GPUs with an NVML call that has not returned for three intervals",
);
/// Values that could not be true.
pub const REJECTED_VALUES_TOTAL: Family = own(
    "forewarm_exporter_rejected_values_total",
    Kind::Counter,
    None,
    &["reason"],
    "Values that the driver gave and that cannot be true, by reason; they are left out, never clamped",
);
/// Groups of readings that went stale.
pub const WITHDRAWN_TOTAL: Family = own(
    "forewarm_exporter_withdrawn_total",
    Kind::Counter,
    None,
    &["group"],
    "Times a group of a GPU's readings was withdrawn because it was too old or its GPU did not answer",
);
/// Ticks that were left out.
pub const MISSED_TICKS_TOTAL: Family = own(
    "forewarm_exporter_missed_ticks_total",
    Kind::Counter,
    None,
    &[],
    "Ticks of a GPU that were left out because the one before took too long",
);
/// Xid numbers that were not kept apart.
pub const XIDS_DROPPED_TOTAL: Family = own(
    "forewarm_exporter_xids_dropped_total",
    Kind::Counter,
    None,
    &[],
    "Xid events that were not counted, because their GPU is unknown or shows too many different numbers",
);
/// Time to render.
pub const RENDER_SECONDS: Family = own(
    "forewarm_exporter_render_seconds",
    Kind::Histogram,
    Some(Unit::Seconds),
    &[],
    "Time to turn one tick's readings into text",
);
/// Answers on the metrics port.
pub const SCRAPES_TOTAL: Family = own(
    "forewarm_exporter_scrapes_total",
    Kind::Counter,
    None,
    &["path", "status"],
    "Answers on the metrics port, by path and status",
);
/// Memory of the exporter.
pub const RESIDENT_MEMORY_BYTES: Family = own(
    "forewarm_exporter_resident_memory_bytes",
    Kind::Gauge,
    Some(Unit::Bytes),
    &[],
    "Resident memory of the exporter",
);
/// CPU time of the exporter.
pub const CPU_SECONDS_TOTAL: Family = own(
    "forewarm_exporter_cpu_seconds_total",
    Kind::Counter,
    Some(Unit::Seconds),
    &[],
    "CPU time that the exporter used",
);
/// Loads of the web configuration.
pub const WEB_CONFIG_LOADS_TOTAL: Family = own(
    "forewarm_exporter_web_config_loads_total",
    Kind::Counter,
    None,
    &["outcome"],
    "Times the web configuration changed and was loaded or refused",
);

/// The exporter.
pub const EXPORTER: &[&Family] = &[
    &NVML_UP,
    &NVML_OPENS_TOTAL,
    &NVML_CALL_SECONDS,
    &NVML_ERRORS_TOTAL,
    &STUCK_GPUS,
    &REJECTED_VALUES_TOTAL,
    &WITHDRAWN_TOTAL,
    &MISSED_TICKS_TOTAL,
    &XIDS_DROPPED_TOTAL,
    &RENDER_SECONDS,
    &SCRAPES_TOTAL,
    &RESIDENT_MEMORY_BYTES,
    &CPU_SECONDS_TOTAL,
    &WEB_CONFIG_LOADS_TOTAL,
    &ATTRIBUTION_ERRORS_TOTAL,
    &ATTRIBUTION_GAPS,
    &ATTRIBUTION_AGE_SECONDS,
    &ATTRIBUTION_POD_SOURCE,
];
/// Families of the exporter about itself that stand on its metrics port beside the readings, because readers of
/// readings need them; all others are on the admin port alone.
pub const BESIDE_READINGS: [&Family; 5] = [
    &BUILD_INFO,
    &NVML_UP,
    &NVML_OPENS_TOTAL,
    &STUCK_GPUS,
    &REJECTED_VALUES_TOTAL,
];
/// The adapter.
pub const ADAPTER: &[&Family] = adapter::FAMILIES;
