//! Which calls make sense on which handle while MIG is on.
//!
//! From the notes of the NVML reference at each call; where it has none, from what `nvidia-smi` prints as not
//! available. Unverified on a card: what exactly the others answer on a MIG handle; here NOT_SUPPORTED.

/// Calls that a MIG device's handle answers.
const ON_MIG_DEVICE: [&str; 24] = [
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetAttributes_v2",
    "nvmlDeviceGetBAR1MemoryInfo",
    "nvmlDeviceGetBrand",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetIndex",
    "nvmlDeviceGetMPSComputeRunningProcesses_v2",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetMemoryErrorCounter",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceIsMigDeviceHandle",
    "nvmlGpmQueryDeviceSupport",
];
/// As above, on Hopper and newer.
const GPM_ON_MIG_DEVICE: [&str; 2] = ["nvmlGpmSampleGet", "nvmlGpmMetricsGet"];

/// Calls that the GPU's own handle no longer answers while MIG is on.
const NOT_WITH_MIG: [&str; 7] = [
    "nvmlDeviceGetDecoderUtilization",
    "nvmlDeviceGetEncoderUtilization",
    "nvmlDeviceGetJpgUtilization",
    "nvmlDeviceGetOfaUtilization",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetProcessesUtilizationInfo",
    "nvmlDeviceGetUtilizationRates",
];

/// Whether `call` is answered on a handle of a GPU whose MIG mode is `enabled`, or of a MIG device of it.
pub(crate) fn answered(call: &str, mig_device: bool, enabled: bool) -> bool {
    if mig_device {
        ON_MIG_DEVICE.contains(&call) || GPM_ON_MIG_DEVICE.contains(&call)
    } else {
        !(enabled && NOT_WITH_MIG.contains(&call))
    }
}
