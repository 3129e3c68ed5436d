//! MIG as the control file tells it.

use serde::{Deserialize, Serialize};

use crate::process::Process;

/// MIG of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MigControl {
    /// Mode now. Default: on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Mode after the next reset. Default: as now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pending: Option<bool>,
    /// Compute instances, and GPU instances without one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<MigDeviceControl>,
}

/// A compute instance (a MIG device), or a GPU instance that has none.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MigDeviceControl {
    /// GPU instance id, 0 to 14. Several devices with one id share the instance.
    pub gi: u32,
    /// Compute instance id, 0 to 7; absent: a GPU instance without a compute instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ci: Option<u32>,
    /// Profile of the GPU instance, for example `1g.10gb`.
    pub profile: String,
    /// Memory slice that the GPU instance starts at. Default: the first that is free.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<u32>,
    /// MIG index, 0 to 6; what is left out in between is a hole. Default: the next after the one before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// Default: a function of the GPU's UUID and the ids, see [`crate::mig_uuid`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Compute slices of the compute instance. Default: all of the GPU instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_slices: Option<u32>,
    /// Share of time with a kernel resident. Default: the sum of the processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub busy: Option<f64>,
    /// Share of this device's SM cycles with a warp resident. Default 0.8 × busy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_active: Option<f64>,
    /// Resident warps over the most possible. Default 0.5 × SM-active.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_occupancy: Option<f64>,
    /// Tensor pipe activity. Default 0.6 × SM-active.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<f64>,
    /// Share of the instance's DRAM bandwidth. Default 0.5 × busy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dram: Option<f64>,
    /// Used frame buffer. Default: the sum of the processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_used_bytes: Option<u64>,
    /// Processes on the device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<Process>,
}
