//! The control file: what the simulated GPUs do right now, and which faults they have.
//!
//! A test writes it with [`Control::write`] (atomically); the library re-reads it within 100 ms. All fields are
//! optional: an empty object is a node of healthy idle GPUs. Rates are per second and are integrated by the
//! library, so a change of rate never makes a counter go back. Counts (ECC, NVLink errors, …) are totals since
//! driver load; the library keeps the highest total seen.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

pub use crate::counters::CounterControl;
pub use crate::damage::{EccErrors, NvlinkErrors, RemappedRows, RetiredPages};
pub use crate::event::{EventEntry, EventKind};
pub use crate::fault::{Block, Effect, Fault, Garbage};
pub use crate::mig::{MigControl, MigDeviceControl};
pub use crate::process::{Process, ProcessKind};

/// Why a control file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The file could not be read.
    #[error("control file {path}: {cause}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// The content is not a control.
    #[error("control file {path}: {cause}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Parser's message.
        cause: String,
    },
}

/// The whole control file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Control {
    /// Virtual time, milliseconds since the Unix epoch; used in virtual-time mode only, where time never goes back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub now_ms: Option<u64>,
    /// False makes `nvmlInit` answer DRIVER_NOT_LOADED and withdraws the driver from clients that hold it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_loaded: Option<bool>,
    /// Code that `nvmlInit` answers instead of success, for example 18 (driver and library versions differ).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_error: Option<u32>,
    /// Used memory of every GPU is the time of the call: see [`crate::memory_time`].
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub encode_time_in_memory: bool,
    /// The client may see over MIG instances and processes as an administrator does.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub privileged: bool,
    /// What each GPU does, by index.
    #[serde(with = "by_index", skip_serializing_if = "BTreeMap::is_empty")]
    pub gpus: BTreeMap<u32, GpuControl>,
    /// Faults in force.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
}

/// What one GPU does. Absent fields take the stated defaults.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GpuControl {
    /// Offered load in GPUs; above 1 the utilisation stays at 100 %. Default: the sum of the processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub busy: Option<f64>,
    /// Share of SM cycles with a warp resident, 0 to 1 (GPM 2). Default 0.8 × busy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_active: Option<f64>,
    /// Resident warps over the most possible, 0 to 1 (GPM 3). Default 0.5 × SM-active.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_occupancy: Option<f64>,
    /// Tensor pipe activity, 0 to 1 (GPM 5). Default 0.6 × SM-active.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<f64>,
    /// DRAM bandwidth share, 0 to 1 (GPM 10) and memory utilisation. Default 0.5 × busy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dram: Option<f64>,
    /// Video encoder share, 0 to 1. Default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encoder: Option<f64>,
    /// Video decoder share, 0 to 1. Default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoder: Option<f64>,
    /// Used frame buffer, without the reserved part. Default: the sum of the processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_used_bytes: Option<u64>,
    /// Used memory of this GPU is the time of the call: see [`crate::memory_time`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encode_time_in_memory: Option<bool>,
    /// Power draw. Default: between the profile's idle and load draw, by busy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_watts: Option<f64>,
    /// Core temperature. Default: between the profile's idle and load value, by busy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_celsius: Option<f64>,
    /// Memory temperature. Default: core + 6.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_temperature_celsius: Option<f64>,
    /// SM and graphics clock. Default: the profile's maximum when busy, else its idle clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_clock_mhz: Option<u32>,
    /// Memory clock. Default as above.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_clock_mhz: Option<u32>,
    /// Performance state 0 to 15. Default 0 when busy or on boards that idle in P0, else 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub performance_state: Option<u32>,
    /// Bytes sent over all NVLinks together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlink_tx_bytes_per_second: Option<f64>,
    /// Bytes received over all NVLinks together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlink_rx_bytes_per_second: Option<f64>,
    /// Bytes sent over PCIe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pcie_tx_bytes_per_second: Option<f64>,
    /// Bytes received over PCIe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pcie_rx_bytes_per_second: Option<f64>,
    /// PCIe replays, total.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pcie_replays: Option<u64>,
    /// Numbers of links that are down.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nvlink_links_down: Vec<u32>,
    /// NVLink error totals, over all links (reported on link 0).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlink_errors: Option<NvlinkErrors>,
    /// Reasons that hold the clocks down now; each adds to its cumulative time.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub throttle: Vec<Throttle>,
    /// ECC error totals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ecc: Option<EccErrors>,
    /// Row remapping (Ampere and newer).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remapped_rows: Option<RemappedRows>,
    /// Page retirement (before Ampere).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retired_pages: Option<RetiredPages>,
    /// Field 230: 0 none, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset, 5 IMEX domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recovery_action: Option<u32>,
    /// Fabric registration, over the profile's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fabric: Option<FabricControl>,
    /// Xids so far, oldest first; entries added since the last read are delivered once each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub xids: Vec<u64>,
    /// Processes on the GPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<Process>,
    /// Events other than Xids so far, oldest first; delivered as those are.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<EventEntry>,
    /// MIG layout. Absent: MIG is off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigControl>,
    /// The GPU has the driver. False: lost to clients that saw it, absent for those that initialise later, whose
    /// indices close up. Default true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<bool>,
    /// How counters misbehave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counters: Option<CounterControl>,
    /// Accounting is on: what processes used is kept after their exit.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub accounting: bool,
    /// Count that a sizing call for process utilisation claims whatever there is, as drivers do (100, 4096).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claimed_process_samples: Option<u32>,
}

/// Fabric registration, each field over the profile's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FabricControl {
    /// 0 not supported, 1 not started, 2 in progress, 3 completed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<u8>,
    /// Cluster UUID, 8-4-4-4-12.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_uuid: Option<String>,
    /// Clique within the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clique: Option<u32>,
    /// `healthMask`, raw. Default: every aspect healthy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health_mask: Option<u32>,
    /// `healthSummary`: 0 not supported, 1 healthy, 2 unhealthy, 3 limited capacity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health_summary: Option<u8>,
}

/// A reason that holds the clocks down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Throttle {
    /// Application clocks setting (0x2).
    ApplicationClocks,
    /// Software power cap (0x4).
    SwPowerCap,
    /// Hardware slowdown (0x8).
    HwSlowdown,
    /// Sync boost group (0x10).
    SyncBoost,
    /// Software thermal slowdown (0x20).
    SwThermal,
    /// Hardware thermal slowdown (0x40).
    HwThermal,
    /// Hardware power brake (0x80).
    HwPowerBrake,
    /// Display clock setting (0x100).
    DisplayClock,
}

impl Throttle {
    /// All reasons, in bit order.
    pub const ALL: [Self; 8] = [
        Self::ApplicationClocks,
        Self::SwPowerCap,
        Self::HwSlowdown,
        Self::SyncBoost,
        Self::SwThermal,
        Self::HwThermal,
        Self::HwPowerBrake,
        Self::DisplayClock,
    ];

    /// Bit of the clock event reasons mask.
    #[must_use]
    pub const fn bit(self) -> u64 {
        match self {
            Self::ApplicationClocks => 0x2,
            Self::SwPowerCap => 0x4,
            Self::HwSlowdown => 0x8,
            Self::SyncBoost => 0x10,
            Self::SwThermal => 0x20,
            Self::HwThermal => 0x40,
            Self::HwPowerBrake => 0x80,
            Self::DisplayClock => 0x100,
        }
    }
}

impl Control {
    /// Control of GPU `index`, created idle if absent.
    pub fn gpu(&mut self, index: u32) -> &mut GpuControl {
        self.gpus.entry(index).or_default()
    }

    /// Parses a control of the format that `path` ends in (`.toml`, else JSON).
    ///
    /// # Errors
    /// [`ControlError::Malformed`] with the parser's message.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ControlError> {
        let malformed = |cause: String| ControlError::Malformed {
            path: path.to_owned(),
            cause,
        };
        if is_toml(path) {
            toml::from_str(text).map_err(|cause| malformed(cause.to_string()))
        } else {
            serde_json::from_str(text).map_err(|cause| malformed(cause.to_string()))
        }
    }

    /// Reads a control file.
    ///
    /// # Errors
    /// [`ControlError`] names the file and what is wrong with it.
    pub fn read(path: &Path) -> Result<Self, ControlError> {
        let text = std::fs::read_to_string(path).map_err(|cause| ControlError::Unreadable {
            path: path.to_owned(),
            cause,
        })?;
        Self::parse(path, &text)
    }

    /// Writes the control file by an atomic rename, as TOML if `path` ends in `.toml`, else as JSON.
    ///
    /// # Errors
    /// The I/O error, or `InvalidData` where a value has no spelling in the format (NaN in JSON).
    pub fn write(&self, path: &Path) -> io::Result<()> {
        static WRITES: AtomicU64 = AtomicU64::new(0);
        let invalid = |cause: String| io::Error::new(io::ErrorKind::InvalidData, cause);
        let text = if is_toml(path) {
            toml::to_string(self).map_err(|cause| invalid(cause.to_string()))?
        } else {
            serde_json::to_string_pretty(self).map_err(|cause| invalid(cause.to_string()))?
        };
        let nth = WRITES.fetch_add(1, Ordering::Relaxed);
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.{nth}.tmp", std::process::id()));
        let temporary = path.with_file_name(name);
        std::fs::write(&temporary, text)?;
        std::fs::rename(&temporary, path)
    }
}

fn is_toml(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "toml")
}

/// Keys of a TOML or JSON object are text; indices are numbers.
mod by_index {
    use std::collections::BTreeMap;

    use serde::de::Error as _;
    use serde::ser::SerializeMap as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    use super::GpuControl;

    pub(super) fn serialize<S: Serializer>(
        gpus: &BTreeMap<u32, GpuControl>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(gpus.len()))?;
        for (index, gpu) in gpus {
            map.serialize_entry(&index.to_string(), gpu)?;
        }
        map.end()
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<u32, GpuControl>, D::Error> {
        BTreeMap::<String, GpuControl>::deserialize(deserializer)?
            .into_iter()
            .map(|(key, gpu)| {
                let index = key
                    .parse()
                    .map_err(|_| D::Error::custom(format!("gpus: {key:?} is not an index")))?;
                Ok((index, gpu))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn everything() -> Control {
        let mut control = Control {
            now_ms: Some(5),
            encode_time_in_memory: true,
            ..Control::default()
        };
        let gpu = control.gpu(3);
        gpu.busy = Some(1.5);
        gpu.throttle = vec![Throttle::SwThermal];
        gpu.xids = vec![79];
        gpu.processes = vec![Process {
            pid: 7,
            sm: 0.5,
            memory_bytes: 1 << 30,
            ..Process::default()
        }];
        gpu.events = vec![EventEntry {
            kind: EventKind::RecoveryAction,
            data: 1,
            gi: Some(2),
            ci: None,
        }];
        gpu.bound = Some(true);
        gpu.counters = Some(CounterControl {
            resets: 1,
            bits: Some(32),
            start: 9,
        });
        gpu.mig = Some(MigControl {
            enabled: Some(true),
            pending: Some(false),
            devices: vec![MigDeviceControl {
                gi: 1,
                ci: Some(0),
                profile: "3g.40gb".into(),
                processes: gpu.processes.clone(),
                busy: Some(0.25),
                ..MigDeviceControl::default()
            }],
        });
        control.faults = vec![
            Fault {
                mig: Some(1),
                after_calls: Some(1),
                times: Some(2),
                after_ms: Some(3),
                for_ms: Some(4),
                ..Fault::on_gpu(1, Effect::Grow(5))
            },
            Fault::on_gpu(1, Effect::Lost),
            Fault::on_call(2, "nvmlDeviceGetUtilizationRates", Effect::Block(Block::Ms(20))),
            Fault::on_call(2, "nvmlDeviceGetPowerUsage", Effect::Error(999)),
            Fault::on_call(2, "nvmlDeviceGetPowerUsage", Effect::Garbage(Garbage::Sentinel)),
        ];
        control
    }

    #[test]
    fn both_formats_carry_everything() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["control.json", "control.toml"] {
            let path = folder.path().join(name);
            everything().write(&path).unwrap();
            assert_eq!(Control::read(&path).unwrap(), everything(), "{name}");
        }
        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            2,
            "no temporary file is left"
        );
    }

    #[test]
    fn the_documented_spelling_is_read() {
        let text = r#"{"gpus": {"0": {"busy": 0.5, "throttle": ["sw_power_cap"]}},
            "faults": [{"gpu": 1, "effect": "lost"},
                       {"gpu": 2, "calls": ["nvmlDeviceGetFieldValues"], "effect": {"block": "forever"}},
                       {"calls": ["nvmlDeviceGetCount_v2"], "effect": {"error": 4}}]}"#;
        let control = Control::parse(Path::new("c.json"), text).unwrap();
        assert_eq!(control.gpus[&0].busy, Some(0.5));
        assert_eq!(control.faults[1].effect, Effect::Block(Block::Forever));
    }

    #[test]
    fn an_unknown_field_is_refused_by_name() {
        let error = Control::parse(Path::new("c.json"), r#"{"gpus": {"0": {"bussy": 1}}}"#).unwrap_err();
        assert!(error.to_string().contains("bussy"), "{error}");
    }
}
