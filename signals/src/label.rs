//! Label keys, and the closed sets of values that some of them take.

/// NVML index of the physical GPU on its node.
pub const GPU: &str = "gpu";
/// UUID of the physical GPU, also on rows about its slices.
pub const UUID: &str = "uuid";
/// Freshness group of a device reading.
pub const GROUP: &str = "group";
/// `rx` or `tx`, seen from the GPU.
pub const DIRECTION: &str = "direction";
/// Kind of an error or row.
pub const KIND: &str = "kind";
/// Number of an NVLink link.
pub const LINK: &str = "link";
/// Name of a reading that a device may or may not offer.
pub const READING: &str = "reading";
/// Where a temperature is taken.
pub const SENSOR: &str = "sensor";
/// Clock domain.
pub const DOMAIN: &str = "domain";
/// Why something happened, from a closed set.
pub const REASON: &str = "reason";
/// NVIDIA Xid number.
pub const XID: &str = "xid";
/// Namespace of the workload's pod.
pub const NAMESPACE: &str = "namespace";
/// Name of the workload's pod.
pub const POD: &str = "pod";
/// Name of the container.
pub const CONTAINER: &str = "container";
/// UID of the workload's pod.
pub const POD_UID: &str = "pod_uid";
/// How a per-pod value was obtained.
pub const SOURCE: &str = "source";
/// Extended resource name, such as `nvidia.com/gpu`.
pub const RESOURCE: &str = "resource";
/// Replica number of a shared device id (`<id>::<n>`), empty where there is none.
pub const REPLICA: &str = "replica";
/// How a device is shared.
pub const SHARING: &str = "sharing";
/// Who handed the device out.
pub const ALLOCATOR: &str = "allocator";

/// The value of label `source`: how a per-pod value was obtained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// Measured per process; a share of the physical device.
    Process,
    /// The device belongs to this container alone, so the device's reading is the pod's.
    Exclusive,
    /// Measured per MIG GPU instance; a share of the slice.
    MigGpm,
}

impl Source {
    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Exclusive => "exclusive",
            Self::MigGpm => "mig-gpm",
        }
    }

    /// Reads a label value back.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Process, Self::Exclusive, Self::MigGpm]
            .into_iter()
            .find(|source| source.as_str() == text)
    }
}

/// The value of label `sharing`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Sharing {
    /// One container holds the whole device.
    None,
    /// Contexts take turns.
    TimeSlicing,
    /// CUDA Multi-Process Service.
    Mps,
    /// A MIG slice.
    Mig,
}

impl Sharing {
    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::TimeSlicing => "time-slicing",
            Self::Mps => "mps",
            Self::Mig => "mig",
        }
    }
}

/// The value of label `allocator`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Allocator {
    /// kubelet device plugin.
    DevicePlugin,
    /// Dynamic Resource Allocation.
    Dra,
}

impl Allocator {
    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::DevicePlugin => "device-plugin",
            Self::Dra => "dra",
        }
    }
}

/// The value of label `direction`, seen from the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// Received by the GPU.
    Rx,
    /// Sent by the GPU.
    Tx,
}

impl Direction {
    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Rx => "rx",
            Self::Tx => "tx",
        }
    }
}
