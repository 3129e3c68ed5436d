//! Faults: what goes wrong with which call on which GPU.
//!
//! A fault is in force while it stands in the control file. Where several strike one call, blocks come first, then
//! the first error, then garbage.

use serde::{Deserialize, Serialize};

/// A fault in force while it stands in the control file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// GPU index; absent means every GPU and calls that name none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// NVML names of the calls it strikes; empty means every call on a device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<String>,
    /// What happens.
    pub effect: Effect,
}

/// What a fault does to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// GPU_IS_LOST (15).
    Lost,
    /// NOT_SUPPORTED (3).
    NotSupported,
    /// Any NVML return code.
    Error(u32),
    /// The call blocks, then goes on.
    Block(Block),
    /// Success with values no healthy GPU has.
    Garbage(Garbage),
}

/// How long a call blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Block {
    /// As long as the fault stands.
    Forever,
    /// So many milliseconds.
    Ms(u64),
}

/// Kind of impossible values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Garbage {
    /// Beyond the range: percentages 129, GPM 129.0, other numbers far above what exists.
    OutOfRange,
    /// The blanks drivers use: all ones in integers, NaN in floating point.
    Sentinel,
}

impl Fault {
    /// A fault on every call of GPU `gpu`.
    #[must_use]
    pub const fn on_gpu(gpu: u32, effect: Effect) -> Self {
        Self {
            gpu: Some(gpu),
            calls: Vec::new(),
            effect,
        }
    }

    /// A fault on one call of GPU `gpu`, by its NVML name.
    #[must_use]
    pub fn on_call(gpu: u32, call: &str, effect: Effect) -> Self {
        Self {
            gpu: Some(gpu),
            calls: vec![call.to_owned()],
            effect,
        }
    }

    pub(crate) fn strikes(&self, gpu: Option<u32>, call: &str) -> bool {
        let gpu_hit = self.gpu.is_none() || self.gpu == gpu;
        gpu_hit
            && if self.calls.is_empty() {
                gpu.is_some()
            } else {
                self.calls.iter().any(|name| name == call)
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_without_calls_strikes_device_calls_only() {
        let lost = Fault::on_gpu(1, Effect::Lost);
        assert!(lost.strikes(Some(1), "nvmlDeviceGetName"));
        assert!(!lost.strikes(Some(0), "nvmlDeviceGetName"));
        assert!(!lost.strikes(None, "nvmlDeviceGetCount_v2"));
        let count = Fault {
            gpu: None,
            calls: vec!["nvmlDeviceGetCount_v2".into()],
            effect: Effect::Error(4),
        };
        assert!(count.strikes(None, "nvmlDeviceGetCount_v2"));
    }
}
