//! Processes on a GPU, as the control file tells them.
//!
//! A process lives from `start_ms` to `exit_ms`; without them as long as it stands in the file. Its utilisation
//! samples are taken once a second at a moment of its own and become visible `lag_ms` later.

use serde::{Deserialize, Serialize};

/// A process on a GPU or on a MIG device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Process {
    /// Process id, as the host sees it.
    pub pid: u32,
    /// Share of the device's time, 0 to 1.
    pub sm: f64,
    /// Share of the memory's time, 0 to 1. Default 0.5 × sm.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<f64>,
    /// Share of the video encoder, 0 to 1. Default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encoder: Option<f64>,
    /// Share of the video decoder, 0 to 1. Default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoder: Option<f64>,
    /// Memory held, bytes.
    pub memory_bytes: u64,
    /// Listed as compute, graphics or MPS client.
    pub kind: ProcessKind,
    /// How far the newest visible utilisation sample is behind, at least; up to 10 000. Default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lag_ms: Option<u64>,
    /// Pid that the process lists show instead, as newer drivers translate it into the caller's pid namespace;
    /// utilisation keeps `pid` (HAMi-core#112). Default: the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listed_pid: Option<u32>,
    /// The memory is not known: listed as all ones (WDDM, confidential computing).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub memory_unknown: bool,
    /// First moment of the process, milliseconds since the epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_ms: Option<u64>,
    /// First moment without the process, milliseconds since the epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_ms: Option<u64>,
}

/// The list a process is in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessKind {
    /// Compute.
    #[default]
    Compute,
    /// Graphics.
    Graphics,
    /// Client of an MPS server.
    Mps,
}

/// A share as a healthy driver tells it: 0 to 1, 0 where it is no number.
pub(crate) fn share(value: f64) -> f64 {
    if value.is_finite() {
        value.clamp(0.0, 1.0)
    } else {
        0.0
    }
}

impl Process {
    /// Whether the process is there at `at_us`.
    pub(crate) fn alive_at(&self, at_us: u64) -> bool {
        let at = |ms: u64| ms.saturating_mul(1000);
        self.start_ms.is_none_or(|start| at(start) <= at_us)
            && self.exit_ms.is_none_or(|exit| at_us < at(exit))
    }

    /// Moments at which the process comes or goes, µs since the epoch.
    pub(crate) fn turns(&self) -> impl Iterator<Item = u64> {
        [self.start_ms, self.exit_ms]
            .into_iter()
            .flatten()
            .map(|ms| ms.saturating_mul(1000))
    }

    /// Share of the memory's time.
    pub(crate) fn memory_share(&self) -> f64 {
        share(self.memory.unwrap_or(0.5 * self.sm))
    }

    /// Whether a driver samples the process: it used some engine.
    pub(crate) fn uses_an_engine(&self) -> bool {
        share(self.sm) > 0.0 || self.encoder.unwrap_or(0.0) > 0.0 || self.decoder.unwrap_or(0.0) > 0.0
    }

    /// µs by which its samples are late.
    pub(crate) fn lag_us(&self) -> u64 {
        self.lag_ms.unwrap_or(0).saturating_mul(1000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_lives_from_its_start_to_its_exit() {
        let process = Process {
            start_ms: Some(2),
            exit_ms: Some(5),
            ..Process::default()
        };
        let alive: Vec<bool> = [1_999, 2_000, 4_999, 5_000].map(|at| process.alive_at(at)).into();
        assert_eq!(alive, [false, true, true, false]);
        assert_eq!(process.turns().collect::<Vec<_>>(), [2_000, 5_000]);
        assert!(Process::default().alive_at(0));
    }
}
