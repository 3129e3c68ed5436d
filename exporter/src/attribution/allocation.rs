//! What the kubelet has handed to whom: the value that readers see.
//!
//! Purpose: the immutable result of attribution, and the reasons why parts of it are missing.
//! Inputs: none; `assemble` makes these values.
//! Invariants: a pod UID is the present pod's or absent; what is absent is counted in `gaps` under one reason.

use std::collections::BTreeMap;
use std::time::Instant;

use forewarm_signals::label::{Allocator, Sharing};

use super::device_id::DeviceRef;

/// One container's hold on one device, as the kubelet tells it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Allocation {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// UID of the pod that bears this name now; absent when it cannot be told for sure.
    pub pod_uid: Option<String>,
    /// Whether the pod is Ready; absent when the pod is not known.
    pub ready: Option<bool>,
    /// Resource name for a device plugin (`nvidia.com/gpu`), driver name for DRA (`gpu.nvidia.com`).
    pub resource: String,
    /// The id as the kubelet said it.
    pub device_id: String,
    /// The device the id names; absent for a form that is not known.
    pub device: Option<DeviceRef>,
    /// Replica of a shared device.
    pub replica: Option<String>,
    /// How the device is shared, as far as the id tells.
    pub sharing: Sharing,
    /// Who handed it out.
    pub allocator: Allocator,
}

/// Which containers hold which devices, at the last time the kubelet said so.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attribution {
    /// Every hold on an NVIDIA device by a pod that has not ended.
    pub allocations: Vec<Allocation>,
    /// Devices handed out by resource (device plugins only, which are the ones with an inventory); absent until
    /// the kubelet answered, when that is too long ago, and when the answer was too large to be kept whole.
    pub handed_out: Option<BTreeMap<String, u64>>,
    /// Devices the kubelet may hand out by resource; absent until the kubelet answered and when that is too long ago.
    pub allocatable: Option<BTreeMap<String, u64>>,
    /// Devices the kubelet may hand out and has not, by resource; absent where one of the two is. Not their difference:
    /// a device that turned unhealthy is handed out still and not allocatable any more.
    pub idle: Option<BTreeMap<String, u64>>,
    /// Allocations that cannot be attributed, by reason.
    pub gaps: Gaps,
    /// When the kubelet last answered which container holds what.
    pub answered_at: Option<Instant>,
}

/// Counts by reason.
pub type Gaps = BTreeMap<Gap, u64>;

/// Why an allocation has no row, or no readings. The value of label `reason` of
/// `forewarm_exporter_attribution_gaps`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Gap {
    /// Neither the kubelet's Pods API nor the API server has told about pods yet.
    PodsUnknown,
    /// What is known about pods is too old to trust a name.
    PodsStale,
    /// The kubelet lists an allocation of a pod that nobody knows (yet).
    PodUnknown,
    /// Two pods bear the same name at this moment.
    PodAmbiguous,
    /// The pod of this name is another one than when the kubelet listed the allocation.
    PodReplaced,
    /// The kubelet has not said for too long who holds what.
    AllocationsStale,
    /// More allocations than are kept.
    TooMany,
    /// The id has no known form.
    IdUnknown,
    /// NVML shows no such GPU.
    DeviceUnknown,
    /// NVML shows no such MIG device.
    SliceUnknown,
    /// More than one container holds the device without saying which share.
    ClaimedTwice,
    /// Two ids of one container name the same device.
    NamedTwice,
}

impl Gap {
    /// Every reason.
    pub const ALL: [Self; 12] = [
        Self::PodsUnknown,
        Self::PodsStale,
        Self::PodUnknown,
        Self::PodAmbiguous,
        Self::PodReplaced,
        Self::AllocationsStale,
        Self::TooMany,
        Self::IdUnknown,
        Self::DeviceUnknown,
        Self::SliceUnknown,
        Self::ClaimedTwice,
        Self::NamedTwice,
    ];

    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::PodsUnknown => "pods-unknown",
            Self::PodsStale => "pods-stale",
            Self::PodUnknown => "pod-unknown",
            Self::PodAmbiguous => "pod-ambiguous",
            Self::PodReplaced => "pod-replaced",
            Self::AllocationsStale => "allocations-stale",
            Self::TooMany => "too-many",
            Self::IdUnknown => "id-unknown",
            Self::DeviceUnknown => "device-unknown",
            Self::SliceUnknown => "slice-unknown",
            Self::ClaimedTwice => "claimed-twice",
            Self::NamedTwice => "named-twice",
        }
    }
}
