//! Families about pods and node inventory: identity `namespace, pod, container, pod_uid` and the device.

use crate::family::{Family, Kind, MeasuredAt, Unit};
use crate::label::{
    ALLOCATOR, CONTAINER, DIRECTION, GPU, NAMESPACE, POD, POD_UID, REPLICA, RESOURCE, SHARING, SOURCE, UUID,
};

/// One row per container and device that the kubelet has handed out.
pub const ALLOCATION: Family = Family {
    name: "gpu_pod_allocation",
    help: "1 for each container and device that the kubelet has handed out",
    kind: Kind::Gauge,
    unit: None,
    labels: &[
        NAMESPACE, POD, CONTAINER, POD_UID, GPU, UUID, RESOURCE, REPLICA, SHARING, ALLOCATOR,
    ],
    measured: MeasuredAt::Now,
};

/// Readiness of the pod that holds the device.
pub const READY: Family = Family {
    name: "gpu_pod_ready",
    help: "1 while the pod that holds the device is Ready, 0 while it is not",
    kind: Kind::Gauge,
    unit: None,
    labels: &[NAMESPACE, POD, CONTAINER, POD_UID, GPU, UUID],
    measured: MeasuredAt::Now,
};

/// Age of the oldest reading behind a pod's values.
pub const SAMPLE_AGE_SECONDS: Family = Family {
    name: "gpu_pod_sample_age_seconds",
    help: "Age of the oldest reading behind this pod's values of this source, at the moment of the response",
    kind: Kind::Gauge,
    unit: Some(Unit::Seconds),
    labels: &[POD_UID, SOURCE],
    measured: MeasuredAt::Now,
};

macro_rules! readings {
    ($( $(#[$doc:meta])* $ident:ident = $name:literal, $unit:expr, [$($extra:expr),*], $help:literal; )*) => {
        $(
            $(#[$doc])*
            pub const $ident: Family = Family {
                name: $name, help: $help, kind: Kind::Gauge, unit: Some($unit),
                labels: &[NAMESPACE, POD, CONTAINER, POD_UID, GPU, UUID, SOURCE, $($extra),*],
                measured: MeasuredAt::Pod,
            };
        )*
        /// Families that carry a pod's own readings.
        pub const READINGS: &[&Family] = &[$(&$ident),*];
        /// All families of this module, in the order they are written.
        pub const FAMILIES: &[&Family] = &[
            &ALLOCATION, &READY, &SAMPLE_AGE_SECONDS, $(&$ident),*,
            &NODE_ALLOCATABLE, &NODE_ALLOCATED, &NODE_IDLE,
        ];
    };
}

readings! {
    /// Share of time the pod kept the device busy.
    BUSY_RATIO = "gpu_pod_busy_ratio", Unit::Ratio, [], "Share of time in which the pod had a kernel resident on the device";
    /// SM activity of the pod.
    SM_ACTIVE_RATIO = "gpu_pod_sm_active_ratio", Unit::Ratio, [], "Share of SM time the pod kept busy (GPM)";
    /// Memory in use by the pod.
    MEMORY_USED_BYTES = "gpu_pod_memory_used_bytes", Unit::Bytes, [], "Device memory in use by the pod";
    /// Memory the pod could use at most.
    MEMORY_TOTAL_BYTES = "gpu_pod_memory_total_bytes", Unit::Bytes, [], "Device memory the pod could use at most";
    /// NVLink data rate of the pod.
    NVLINK_BYTES_PER_SECOND = "gpu_pod_nvlink_bytes_per_second", Unit::BytesPerSecond, [DIRECTION], "NVLink data rate of a device the pod holds alone";
    /// Power of the pod.
    POWER_WATTS = "gpu_pod_power_watts", Unit::Watts, [], "Power drawn by a device the pod holds alone";
}

const fn node(name: &'static str, help: &'static str) -> Family {
    Family {
        name,
        help,
        kind: Kind::Gauge,
        unit: None,
        labels: &[RESOURCE],
        measured: MeasuredAt::Now,
    }
}

/// Devices the kubelet may hand out.
pub const NODE_ALLOCATABLE: Family = node(
    "gpu_node_allocatable",
    "Devices the kubelet may hand out, by resource",
);
/// Devices handed out.
pub const NODE_ALLOCATED: Family = node(
    "gpu_node_allocated",
    "Devices handed out to containers, by resource",
);
/// Devices not handed out.
pub const NODE_IDLE: Family = node("gpu_node_idle", "Devices that no container holds, by resource");
