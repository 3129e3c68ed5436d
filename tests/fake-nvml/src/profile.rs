//! GPU profiles: what a model of GPU is and what it can answer.
//!
//! Inputs: a built-in name (one of [`BUILT_IN`]) or the path of a TOML file of the same shape. A profile holds
//! constants only; everything that moves comes from the control file.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::mig::MigProfile;

macro_rules! built_in {
    ($($name:literal),* $(,)?) => {
        /// Names of the built-in profiles.
        pub const BUILT_IN: [&str; [$($name),*].len()] = [$($name),*];

        fn built_in(name: &str) -> Option<&'static str> {
            match name {
                $($name => Some(include_str!(concat!("../profiles/", $name, ".toml"))),)*
                _ => None,
            }
        }
    };
}

built_in![
    "t4",
    "v100-sxm2-32gb",
    "a100-sxm4-40gb",
    "l40s",
    "l40s-24c-vgpu",
    "rtx-4090",
    "h100-sxm",
    "h200-sxm",
    "gb200-nvl72",
];

const MIB: u64 = 1024 * 1024;

/// Why a profile could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The value is neither a built-in name nor a readable file.
    #[error("profile {name:?} is neither one of {BUILT_IN:?} nor a readable file: {cause}")]
    Unreadable {
        /// What was asked for.
        name: String,
        /// Why the file could not be read.
        cause: std::io::Error,
    },
    /// The TOML does not have the shape of a profile.
    #[error("profile {name:?}: {cause}")]
    Malformed {
        /// What was asked for.
        name: String,
        /// Parser's message, with line and column.
        cause: toml::de::Error,
    },
}

/// One GPU model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Product name, as `nvmlDeviceGetName` answers it.
    pub name: String,
    /// Product brand.
    pub brand: Brand,
    /// Chip generation.
    pub architecture: Architecture,
    /// CUDA compute capability, major and minor.
    pub compute_capability: [i32; 2],
    /// GPUs of a node when the settings do not say.
    pub gpus: u32,
    /// PCI device id: device in the high half, vendor in the low half.
    pub pci_device_id: u32,
    /// PCI subsystem id.
    pub pci_subsystem_id: u32,
    /// VBIOS version string.
    pub vbios: String,
    /// CUDA cores.
    pub cores: u32,
    /// Frame buffer, MiB.
    pub memory_total_mib: u64,
    /// Frame buffer kept by the driver and firmware, MiB.
    pub memory_reserved_mib: u64,
    /// Width of the memory bus, bits.
    pub memory_bus_width_bits: u32,
    /// BAR1 aperture, MiB.
    pub bar1_total_mib: u64,
    /// GPM (SM, tensor, DRAM activity) is answered.
    #[serde(default)]
    pub gpm: bool,
    /// MIG can be switched on.
    #[serde(default)]
    pub mig: bool,
    /// GPU instance profiles, where MIG can be switched on.
    #[serde(default)]
    pub mig_profiles: Vec<MigProfile>,
    /// Bare metal, or a guest with a share of a board.
    #[serde(default)]
    pub virtualization: Virtualization,
    /// Power figures.
    pub power: Power,
    /// Clock figures.
    pub clocks: Clocks,
    /// Temperature figures.
    pub temperature: Temperature,
    /// PCIe link.
    pub pcie: Pcie,
    /// NVLink, absent where the board has none.
    #[serde(default)]
    pub nvlink: Option<Nvlink>,
    /// Fabric registration, absent where the board has none.
    #[serde(default)]
    pub fabric: Option<Fabric>,
    /// Links to the CPU's coherent memory, absent where the board has none.
    #[serde(default)]
    pub c2c: Option<C2c>,
    /// Place in a rack, absent where the board tells none.
    #[serde(default)]
    pub platform: Option<Platform>,
    /// Memory error protection.
    pub ecc: Ecc,
    /// NVML calls that answer NOT_SUPPORTED on this model beyond what the fields above imply.
    #[serde(default)]
    pub unsupported_calls: Vec<String>,
}

/// Product brand, `nvmlBrandType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Brand {
    /// Tesla (2).
    Tesla,
    /// GeForce (5).
    Geforce,
    /// Virtual compute server (12): a vGPU guest.
    VirtualCompute,
    /// NVIDIA (14), data-centre boards since Ampere.
    Nvidia,
}

impl Brand {
    /// Number in the NVML header.
    #[must_use]
    pub const fn code(self) -> u32 {
        match self {
            Self::Tesla => 2,
            Self::Geforce => 5,
            Self::VirtualCompute => 12,
            Self::Nvidia => 14,
        }
    }
}

/// Chip generation, `nvmlDeviceArchitecture_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Architecture {
    /// Volta (5).
    Volta,
    /// Turing (6).
    Turing,
    /// Ampere (7).
    Ampere,
    /// Ada (8).
    Ada,
    /// Hopper (9).
    Hopper,
    /// Blackwell (10).
    Blackwell,
}

impl Architecture {
    /// Number in the NVML header.
    #[must_use]
    pub const fn code(self) -> u32 {
        match self {
            Self::Volta => 5,
            Self::Turing => 6,
            Self::Ampere => 7,
            Self::Ada => 8,
            Self::Hopper => 9,
            Self::Blackwell => 10,
        }
    }
}

/// `nvmlGpuVirtualizationMode_t`, as far as a guest or a bare machine can see it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Virtualization {
    /// Bare metal (0).
    #[default]
    None = 0,
    /// A virtual machine that holds the whole board (1).
    Passthrough = 1,
    /// A virtual machine with a share of the board (2).
    Vgpu = 2,
}

/// Power figures, watts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Power {
    /// Draw without load.
    pub idle_watts: f64,
    /// Draw at full load.
    pub load_watts: f64,
    /// Default and enforced limit.
    pub limit_watts: f64,
    /// Lowest limit that can be set.
    pub min_limit_watts: f64,
    /// Highest limit that can be set.
    pub max_limit_watts: f64,
    /// The one-second average (field 185) is answered.
    pub average_supported: bool,
    /// Draw of the whole module (GPU and CPU) without load, where it is told.
    #[serde(default)]
    pub module_idle_watts: Option<f64>,
    /// Draw of the whole module at full load, where it is told.
    #[serde(default)]
    pub module_load_watts: Option<f64>,
}

/// Clocks, MHz.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clocks {
    /// SM and graphics clock without load.
    pub sm_idle_mhz: u32,
    /// Highest SM and graphics clock.
    pub sm_max_mhz: u32,
    /// Memory clock without load.
    pub memory_idle_mhz: u32,
    /// Highest memory clock.
    pub memory_max_mhz: u32,
    /// Video clock without load.
    pub video_idle_mhz: u32,
    /// Highest video clock.
    pub video_max_mhz: u32,
}

/// Temperatures, degrees Celsius.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Temperature {
    /// GPU core without load.
    pub idle_celsius: f64,
    /// GPU core at full load.
    pub load_celsius: f64,
    /// Hardware slows down from here.
    pub slowdown_celsius: u32,
    /// Hardware shuts down from here.
    pub shutdown_celsius: u32,
    /// Software slows down from here.
    pub gpu_max_celsius: u32,
    /// Memory limit, where the board tells one.
    #[serde(default)]
    pub memory_max_celsius: Option<u32>,
    /// The memory sensor (field 82) is answered.
    pub memory_sensor: bool,
    /// Margins to the limits (fields 193 to 196, `GetMarginTemperature`) are answered.
    pub margins: bool,
}

/// PCIe link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pcie {
    /// Generation, 1 to 6.
    pub generation: u32,
    /// Lanes.
    pub width: u32,
}

/// NVLink of the board.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nvlink {
    /// `nvmlNvlinkVersion_t`.
    pub version: u32,
    /// Links, at most 18.
    pub links: u32,
    /// Speed of one link, MB/s.
    pub speed_mbps: u32,
    /// Links end on switches, not on other GPUs.
    pub switched: bool,
}

/// Fabric registration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fabric {
    /// 0 not supported, 1 not started, 2 in progress, 3 completed.
    pub state: u8,
    /// Clique within the cluster.
    pub clique: u32,
    /// Cluster UUID; all zero means that there is no domain.
    pub cluster_uuid: String,
}

/// C2C links between GPU and CPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct C2c {
    /// Links.
    pub links: u32,
    /// Speed of one link, MB/s.
    pub speed_mbps: u32,
}

/// Place of a compute tray in its rack, `nvmlPlatformInfo_t`; the module id is the GPU's index + 1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Platform {
    /// Serial of the chassis, at most 15 characters.
    pub chassis_serial: String,
    /// Slot in the rack.
    pub slot: u8,
    /// Tray among the compute trays.
    pub tray: u8,
    /// Host on the tray.
    pub host: u8,
    /// 0 direct, 1 switch connected.
    pub peer_type: u8,
}

/// Memory error protection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ecc {
    /// ECC mode and counters are answered.
    pub supported: bool,
    /// Row remapping (Ampere and newer).
    pub row_remapping: bool,
    /// Page retirement (before Ampere).
    pub retired_pages: bool,
    /// SRAM error status with its threshold flag (Hopper and newer).
    pub sram_status: bool,
}

impl Profile {
    /// Loads a built-in profile by name, or a profile file by path.
    ///
    /// # Errors
    /// [`ProfileError`] names the profile and what is wrong with it.
    pub fn load(name: &str) -> Result<Self, ProfileError> {
        let text = match built_in(name) {
            Some(text) => text.to_owned(),
            None => std::fs::read_to_string(Path::new(name)).map_err(|cause| ProfileError::Unreadable {
                name: name.to_owned(),
                cause,
            })?,
        };
        toml::from_str(&text).map_err(|cause| ProfileError::Malformed {
            name: name.to_owned(),
            cause,
        })
    }

    /// Frame buffer, bytes.
    #[must_use]
    pub const fn memory_total_bytes(&self) -> u64 {
        self.memory_total_mib * MIB
    }

    /// Frame buffer kept by driver and firmware, bytes.
    #[must_use]
    pub const fn memory_reserved_bytes(&self) -> u64 {
        self.memory_reserved_mib * MIB
    }

    /// Frame buffer that processes can use, bytes.
    #[must_use]
    pub const fn memory_usable_bytes(&self) -> u64 {
        (self.memory_total_mib - self.memory_reserved_mib) * MIB
    }

    /// NVLink count, 0 where there is none.
    #[must_use]
    pub fn nvlink_links(&self) -> u32 {
        self.nvlink.as_ref().map_or(0, |nvlink| nvlink.links)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_profiles_load() {
        for name in BUILT_IN {
            let profile = Profile::load(name).unwrap();
            assert!(profile.memory_total_mib > profile.memory_reserved_mib, "{name}");
            assert!(profile.nvlink_links() <= 18, "{name}");
            assert_eq!(profile.mig, !profile.mig_profiles.is_empty(), "{name}");
            for table in &profile.mig_profiles {
                let memory: u64 = table.memory_mib * u64::from(table.instances);
                assert!(memory <= profile.memory_total_mib, "{name} {}", table.name);
                assert!(table.starts.iter().all(|start| start + table.size <= 8), "{name}");
            }
        }
    }

    #[test]
    fn a_profile_is_loaded_from_a_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mine.toml");
        std::fs::write(&path, built_in("t4").unwrap().replace("Tesla T4", "My GPU")).unwrap();
        assert_eq!(Profile::load(path.to_str().unwrap()).unwrap().name, "My GPU");
    }

    #[test]
    fn an_unknown_profile_field_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mine.toml");
        std::fs::write(&path, format!("speed = 1\n{}", built_in("t4").unwrap())).unwrap();
        let message = Profile::load(path.to_str().unwrap()).unwrap_err().to_string();
        assert!(message.contains("speed"), "{message}");
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let message = Profile::load("h900").unwrap_err().to_string();
        assert!(
            message.contains("h900") && message.contains("h100-sxm"),
            "{message}"
        );
    }
}
