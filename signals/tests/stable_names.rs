//! Names that dashboards, HPAs and configurations outside this repository rely on.
//!
//! A family that is missing here was renamed or removed: that needs an ADR, a line in the changelog and a
//! release that serves both. New families join the list when they are released.

use forewarm_signals::{Kind, by_name};

const GAUGES: &[&str] = &[
    "gpu_up",
    "gpu_sample_age_seconds",
    "gpu_busy_ratio",
    "gpu_memory_bandwidth_busy_ratio",
    "gpu_sm_active_ratio",
    "gpu_sm_occupancy_ratio",
    "gpu_tensor_active_ratio",
    "gpu_dram_active_ratio",
    "gpu_memory_used_bytes",
    "gpu_memory_free_bytes",
    "gpu_memory_reserved_bytes",
    "gpu_memory_total_bytes",
    "gpu_nvlink_bytes_per_second",
    "gpu_nvlink_links_up",
    "gpu_power_watts",
    "gpu_temperature_celsius",
    "gpu_clock_hertz",
    "gpu_remapped_rows",
    "gpu_recovery_action",
    "gpu_health_score",
    "gpu_health_reason",
    "gpu_pod_allocation",
    "gpu_pod_ready",
    "gpu_pod_sample_age_seconds",
    "gpu_pod_busy_ratio",
    "gpu_pod_sm_active_ratio",
    "gpu_pod_memory_used_bytes",
    "gpu_pod_memory_total_bytes",
    "gpu_pod_nvlink_bytes_per_second",
    "gpu_pod_power_watts",
    "gpu_node_allocatable",
    "gpu_node_allocated",
    "gpu_node_idle",
];

const COUNTERS: &[&str] = &[
    "gpu_nvlink_bytes_total",
    "gpu_nvlink_errors_total",
    "gpu_pcie_bytes_total",
    "gpu_pcie_replay_total",
    "gpu_energy_joules_total",
    "gpu_throttle_seconds_total",
    "gpu_ecc_errors_total",
    "gpu_xid_total",
];

fn kinds(names: &[&'static str]) -> Vec<(&'static str, Option<Kind>)> {
    names
        .iter()
        .map(|&name| (name, by_name(name).map(|family| family.kind)))
        .collect()
}

#[test]
fn released_gauges_keep_their_names() {
    for (name, kind) in kinds(GAUGES) {
        assert_eq!(kind, Some(Kind::Gauge), "{name}");
    }
}

#[test]
fn released_counters_keep_their_names() {
    for (name, kind) in kinds(COUNTERS) {
        assert_eq!(kind, Some(Kind::Counter), "{name}");
    }
}

#[test]
fn identity_labels_come_first() {
    let labels = |name| by_name(name).map(|family| family.labels).unwrap_or_default();
    assert_eq!(labels("gpu_busy_ratio")[..2], ["gpu", "uuid"]);
    assert_eq!(labels("gpu_sample_age_seconds"), ["gpu", "uuid", "group"]);
    for label in [
        "namespace",
        "pod",
        "container",
        "pod_uid",
        "source",
        "gpu",
        "uuid",
    ] {
        assert!(labels("gpu_pod_busy_ratio").contains(&label), "{label}");
    }
}
