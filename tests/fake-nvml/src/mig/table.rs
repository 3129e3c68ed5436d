//! The instance profiles of a GPU model: what `nvidia-smi mig -lgip` lists.

use serde::{Deserialize, Serialize};

/// One GPU instance profile of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigProfile {
    /// Name without the leading `MIG `, for example `3g.20gb` or `1g.5gb+me`.
    pub name: String,
    /// `NVML_GPU_INSTANCE_PROFILE_*`, the number that `GetGpuInstanceProfileInfo` is asked by.
    pub profile: u32,
    /// The profile's id on this model, as `nvidia-smi` shows it.
    pub id: u32,
    /// Compute slices.
    pub slices: u32,
    /// Instances that fit into a GPU.
    pub instances: u32,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Frame buffer, MiB.
    pub memory_mib: u64,
    /// Memory slices that an instance takes: the size of its placement.
    pub size: u32,
    /// Memory slices that it can start at.
    pub starts: Vec<u32>,
    /// Copy engines, decoders, encoders, JPEG engines, optical flow engines.
    pub engines: [u32; 5],
}

impl MigProfile {
    /// Streaming multiprocessors of a compute instance of `slices` slices.
    #[must_use]
    pub const fn sms_of(&self, slices: u32) -> u32 {
        if slices >= self.slices {
            self.sms
        } else {
            self.sms / self.slices * slices
        }
    }
}
