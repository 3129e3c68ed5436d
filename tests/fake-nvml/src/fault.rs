//! Faults: what goes wrong with which call on which device, from when and for how long.
//!
//! A fault is in force while it stands in the control file and its own bounds allow: calls that pass first, calls it
//! strikes, time from when it was written. Where several strike one call, blocks come first, then the first error,
//! then garbage and growth.

use serde::{Deserialize, Serialize};

/// A fault of the control file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// GPU index; absent means every GPU and calls that name none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// MIG index on that GPU: calls through that MIG device's handle only. Absent: calls on the GPU and on its MIG
    /// devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<u32>,
    /// NVML names of the calls it strikes; empty means every call on a device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<String>,
    /// Field ids of `nvmlDeviceGetFieldValues` or metric ids of `nvmlGpmMetricsGet`: these entries are struck, the call
    /// goes through. Absent: the whole call.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ids: Vec<u32>,
    /// Calls that pass before it strikes. Default 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_calls: Option<u64>,
    /// Calls that it strikes. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<u64>,
    /// Time that passes before it strikes. Default 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_ms: Option<u64>,
    /// Time for which it strikes. Default: for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
    /// What happens.
    pub effect: Effect,
}

/// What a fault does to a call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// GPU_IS_LOST (15).
    #[default]
    Lost,
    /// NOT_SUPPORTED (3).
    NotSupported,
    /// NO_PERMISSION (4).
    NoPermission,
    /// RESET_REQUIRED (16).
    ResetRequired,
    /// Any NVML return code.
    Error(u32),
    /// The call blocks, then goes on.
    Block(Block),
    /// Success with values no healthy GPU has.
    Garbage(Garbage),
    /// Lists grow by so many between sizing and filling: a buffer without that much headroom is too small.
    Grow(u32),
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
    /// All ones in integers, NaN in floating point.
    Sentinel,
    /// The blanks of DCGM: 2147483632, 9223372036854775792, 140737488355328.0.
    Blank,
}

impl Fault {
    /// A fault on every call of GPU `gpu`.
    #[must_use]
    pub fn on_gpu(gpu: u32, effect: Effect) -> Self {
        Self {
            gpu: Some(gpu),
            effect,
            ..Self::default()
        }
    }

    /// A fault on one call of GPU `gpu`, by its NVML name.
    #[must_use]
    pub fn on_call(gpu: u32, call: &str, effect: Effect) -> Self {
        Self {
            calls: vec![call.to_owned()],
            ..Self::on_gpu(gpu, effect)
        }
    }

    /// Whether the fault is about this device and call; its bounds aside.
    fn concerns(&self, gpu: Option<u32>, mig: Option<u32>, call: &str) -> bool {
        let device_hit = (self.gpu.is_none() || self.gpu == gpu) && (self.mig.is_none() || self.mig == mig);
        device_hit
            && if self.calls.is_empty() {
                gpu.is_some()
            } else {
                self.calls.iter().any(|name| name == call)
            }
    }
}

/// A fault with what it has seen so far.
#[derive(Debug, Clone)]
struct Seen {
    fault: Fault,
    calls: u64,
    since_us: u64,
}

impl Seen {
    fn in_force(&self, now_us: u64) -> bool {
        let begins = self
            .since_us
            .saturating_add(self.fault.after_ms.unwrap_or(0).saturating_mul(1000));
        let ends = self
            .fault
            .for_ms
            .map_or(u64::MAX, |ms| begins.saturating_add(ms.saturating_mul(1000)));
        let first = self.fault.after_calls.unwrap_or(0);
        let last = self
            .fault
            .times
            .map_or(u64::MAX, |times| first.saturating_add(times));
        (begins..ends).contains(&now_us) && self.calls > first && self.calls <= last
    }
}

/// The faults of the control file with what each has seen.
#[derive(Debug, Clone, Default)]
pub(crate) struct Faults(Vec<Seen>);

impl Faults {
    /// Takes a new list, written at `now_us`; a fault that stays goes on counting.
    pub(crate) fn replace(&mut self, faults: &[Fault], now_us: u64) {
        let mut before = std::mem::take(&mut self.0);
        self.0 = faults
            .iter()
            .map(|fault| {
                let known = before.iter().position(|seen| seen.fault == *fault);
                known.map_or_else(
                    || Seen {
                        fault: fault.clone(),
                        calls: 0,
                        since_us: now_us,
                    },
                    |at| before.swap_remove(at),
                )
            })
            .collect();
    }

    /// What strikes `call` on a device now, as a whole. `counted` the first time that a call asks.
    pub(crate) fn strike(
        &mut self,
        device: (Option<u32>, Option<u32>),
        call: &str,
        now_us: u64,
        counted: bool,
    ) -> Vec<Effect> {
        self.in_force(device, call, now_us, counted)
            .filter(|fault| fault.ids.is_empty())
            .map(|fault| fault.effect)
            .collect()
    }

    /// What strikes single entries of `call` on a device now, by field or metric id.
    pub(crate) fn strike_entries(
        &mut self,
        device: (Option<u32>, Option<u32>),
        call: &str,
        now_us: u64,
    ) -> Vec<(u32, Effect)> {
        self.in_force(device, call, now_us, false)
            .flat_map(|fault| fault.ids.iter().map(|id| (*id, fault.effect)))
            .collect()
    }

    fn in_force<'faults>(
        &'faults mut self,
        (gpu, mig): (Option<u32>, Option<u32>),
        call: &'faults str,
        now_us: u64,
        counted: bool,
    ) -> impl Iterator<Item = &'faults Fault> {
        self.0
            .iter_mut()
            .filter(move |seen| seen.fault.concerns(gpu, mig, call))
            .filter_map(move |seen| {
                seen.calls += u64::from(counted);
                seen.in_force(now_us).then_some(&seen.fault)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strikes(fault: Fault, gpu: Option<u32>, mig: Option<u32>, call: &str) -> bool {
        let mut faults = Faults::default();
        faults.replace(&[fault], 0);
        !faults.strike((gpu, mig), call, 0, true).is_empty()
    }

    #[test]
    fn a_fault_without_calls_strikes_device_calls_only() {
        let lost = Fault::on_gpu(1, Effect::Lost);
        assert!(strikes(lost.clone(), Some(1), None, "nvmlDeviceGetName"));
        assert!(strikes(lost.clone(), Some(1), Some(0), "nvmlDeviceGetName"));
        assert!(!strikes(lost.clone(), Some(0), None, "nvmlDeviceGetName"));
        assert!(!strikes(lost, None, None, "nvmlDeviceGetCount_v2"));
        let count = Fault {
            calls: vec!["nvmlDeviceGetCount_v2".into()],
            effect: Effect::Error(4),
            ..Fault::default()
        };
        assert!(strikes(count, None, None, "nvmlDeviceGetCount_v2"));
    }

    #[test]
    fn a_fault_can_strike_one_mig_device() {
        let fault = Fault {
            mig: Some(2),
            ..Fault::on_gpu(0, Effect::Error(999))
        };
        assert!(strikes(fault.clone(), Some(0), Some(2), "nvmlDeviceGetName"));
        assert!(!strikes(fault.clone(), Some(0), Some(1), "nvmlDeviceGetName"));
        assert!(!strikes(fault, Some(0), None, "nvmlDeviceGetName"));
    }

    #[test]
    fn calls_are_counted_once_each_and_over_rewrites() {
        let fault = Fault {
            after_calls: Some(2),
            times: Some(1),
            ..Fault::on_gpu(0, Effect::ResetRequired)
        };
        let mut faults = Faults::default();
        faults.replace(std::slice::from_ref(&fault), 0);
        let mut hit = |counted| !faults.strike((Some(0), None), "x", 5, counted).is_empty();
        assert_eq!([hit(true), hit(true), hit(false)], [false, false, false]);
        faults.replace(&[Fault::on_gpu(1, Effect::Lost), fault], 9);
        let mut hit = |counted| !faults.strike((Some(0), None), "x", 9, counted).is_empty();
        assert_eq!([hit(true), hit(false), hit(true)], [true, true, false]);
    }

    #[test]
    fn time_begins_when_the_fault_was_written() {
        let fault = Fault {
            after_ms: Some(100),
            for_ms: Some(50),
            ..Fault::on_gpu(0, Effect::NoPermission)
        };
        let mut faults = Faults::default();
        faults.replace(&[fault], 1_000_000);
        let at = [1_000_000, 1_099_999, 1_100_000, 1_149_999, 1_150_000]
            .map(|now| !faults.strike((Some(0), None), "x", now, true).is_empty());
        assert_eq!(at, [false, false, true, true, false]);
    }
}
