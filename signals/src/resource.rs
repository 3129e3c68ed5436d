//! Extended resource names of NVIDIA devices.

/// Whole GPUs as NVIDIA's device plugin names them.
pub const GPU: &str = "nvidia.com/gpu";
/// Whole GPUs when the plugin renames shared ones.
pub const GPU_SHARED: &str = "nvidia.com/gpu.shared";
/// Prefix of MIG resources in the mixed strategy, followed by the profile.
pub const MIG_PREFIX: &str = "nvidia.com/mig-";

/// Whether a resource name is one of NVIDIA's (whole, shared, MIG or renamed under its domain).
#[must_use]
pub fn is_nvidia(resource: &str) -> bool {
    resource.starts_with("nvidia.com/")
}
