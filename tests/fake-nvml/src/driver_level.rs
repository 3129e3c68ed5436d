//! Driver levels: what a driver of a given version knows.
//!
//! Three things depend on it: which symbols the library has (see [`absent_symbols`]), up to which number field
//! ids are known, and how the ids that moved between 12.x and 13.0 Update 1 are numbered.

use std::fmt;

use crate::profile::Architecture;

/// A driver version, for example `535.183.06`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Driver {
    major: u32,
    minor: u32,
    patch: Option<String>,
}

impl Driver {
    /// Parses `major.minor` or `major.minor.patch`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().splitn(3, '.');
        let major = parts.next()?.parse().ok()?;
        let minor = parts.next()?.parse().ok()?;
        Some(Self {
            major,
            minor,
            patch: parts.next().map(str::to_owned),
        })
    }

    /// Major number, which names the branch.
    #[must_use]
    pub const fn major(&self) -> u32 {
        self.major
    }

    /// True from 580.82 on, where ids 251 to 273 are numbered as in 13.0 Update 1.
    #[must_use]
    pub fn renumbered_fields(&self) -> bool {
        (self.major, self.minor) >= (580, 82)
    }

    /// True before R470, where MIG UUIDs were the GPU's with both instance ids behind it.
    #[must_use]
    pub const fn legacy_mig_uuids(&self) -> bool {
        self.major < 470
    }

    /// First field id that this driver does not know (`NVML_FI_MAX` of its header; the older ones from headers of
    /// about that time).
    #[must_use]
    pub const fn field_id_end(&self) -> u32 {
        match self.major {
            ..510 => 161,
            510..520 => 167,
            520..525 => 170,
            525..535 => 173,
            535..550 => 197,
            550..565 => 224,
            565..570 => 235,
            570.. => 274,
        }
    }

    /// Highest CUDA version the driver supports, as NVML encodes it (12020 is 12.2).
    #[must_use]
    pub const fn cuda_version(&self) -> i32 {
        match self.major {
            ..525 => 11060,
            525..535 => 12000,
            535..550 => 12020,
            550..560 => 12040,
            560..570 => 12060,
            570..580 => 12080,
            580.. => 13000,
        }
    }

    /// Version of the NVML library that comes with the driver.
    #[must_use]
    pub fn nvml_version(&self) -> String {
        format!("{}.{self}", self.cuda_version() / 1000)
    }

    /// Highest layout of `nvmlDeviceGetGpuFabricInfoV`. When the third one came is not documented; taken as R575.
    pub(crate) const fn newest_fabric_info(&self) -> u32 {
        if self.major >= 575 { 3 } else { 2 }
    }

    /// Highest layout of `nvmlDeviceGetPlatformInfo`; the same holds for R570.
    pub(crate) const fn newest_platform_info(&self) -> u32 {
        if self.major >= 570 { 2 } else { 1 }
    }

    /// Calls that this driver still has and no longer answers on a chip (HAMi-core PR 218).
    pub(crate) fn dropped(&self, architecture: Architecture, call: &str) -> bool {
        self.major >= 580
            && architecture == Architecture::Blackwell
            && call == "nvmlDeviceGetProcessUtilization"
    }

    fn has(&self, introduced: (u32, u32)) -> bool {
        (self.major, self.minor) >= introduced
    }
}

impl fmt::Display for Driver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // NVIDIA pads the minor to two digits: 535.54.03, but also 580.05.
        write!(formatter, "{}.{:02}", self.major, self.minor)?;
        self.patch
            .as_ref()
            .map_or(Ok(()), |patch| write!(formatter, ".{patch}"))
    }
}

/// Symbols by the driver that introduced them; whatever is not listed is older than any level modelled here.
/// Sources: the nvml-mock registry of NVIDIA's k8s-test-infra and the change logs of the NVML reference.
const INTRODUCED: [(&str, (u32, u32)); 49] = [
    ("nvmlDeviceGetMigMode", (450, 0)),
    ("nvmlDeviceGetMaxMigDeviceCount", (450, 0)),
    ("nvmlDeviceGetMigDeviceHandleByIndex", (450, 0)),
    ("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", (450, 0)),
    ("nvmlDeviceIsMigDeviceHandle", (450, 0)),
    ("nvmlDeviceGetGpuInstanceId", (450, 0)),
    ("nvmlDeviceGetComputeInstanceId", (450, 0)),
    ("nvmlDeviceGetAttributes_v2", (450, 0)),
    ("nvmlDeviceGetGpuInstanceProfileInfo", (450, 0)),
    ("nvmlDeviceGetGpuInstances", (450, 0)),
    ("nvmlDeviceGetGpuInstanceById", (450, 0)),
    ("nvmlDeviceGetGpuInstanceRemainingCapacity", (450, 0)),
    ("nvmlGpuInstanceGetInfo", (450, 0)),
    ("nvmlDeviceGetGpuInstancePossiblePlacements_v2", (470, 0)),
    ("nvmlDeviceGetGpuInstanceProfileInfoV", (510, 0)),
    ("nvmlDeviceGetNumGpuCores", (495, 0)),
    ("nvmlDeviceGetMemoryBusWidth", (495, 0)),
    ("nvmlDeviceGetPcieSpeed", (495, 0)),
    ("nvmlDeviceGetPcieLinkMaxSpeed", (495, 0)),
    ("nvmlSystemEventSetCreate", (580, 0)),
    ("nvmlSystemEventSetFree", (580, 0)),
    ("nvmlSystemEventSetWait", (580, 0)),
    ("nvmlSystemRegisterEvents", (580, 0)),
    ("nvmlDeviceGetProcessUtilization", (418, 0)),
    ("nvmlDeviceGetRemappedRows", (450, 0)),
    ("nvmlDeviceGetMemoryInfo_v2", (510, 0)),
    ("nvmlDeviceGetComputeRunningProcesses_v3", (510, 0)),
    ("nvmlDeviceGetGraphicsRunningProcesses_v3", (510, 0)),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v3", (510, 0)),
    ("nvmlGpmQueryDeviceSupport", (525, 0)),
    ("nvmlGpmSampleAlloc", (525, 0)),
    ("nvmlGpmSampleFree", (525, 0)),
    ("nvmlGpmSampleGet", (525, 0)),
    ("nvmlGpmMigSampleGet", (525, 0)),
    ("nvmlGpmMetricsGet", (525, 0)),
    ("nvmlDeviceGetGpuFabricInfo", (525, 0)),
    ("nvmlDeviceGetCurrentClocksEventReasons", (535, 0)),
    ("nvmlDeviceGetSupportedClocksEventReasons", (535, 0)),
    ("nvmlDeviceGetModuleId", (535, 0)),
    ("nvmlDeviceGetNumaNodeId", (545, 0)),
    ("nvmlDeviceGetGpuFabricInfoV", (545, 0)),
    ("nvmlDeviceGetProcessesUtilizationInfo", (550, 0)),
    ("nvmlDeviceGetSramEccErrorStatus", (550, 0)),
    ("nvmlGpmQueryIfStreamingEnabled", (555, 0)),
    ("nvmlGpmSetStreamingEnabled", (555, 0)),
    ("nvmlDeviceGetPlatformInfo", (560, 0)),
    ("nvmlDeviceGetTemperatureV", (565, 0)),
    ("nvmlDeviceGetMarginTemperature", (565, 0)),
    ("nvmlDeviceGetC2cModeInfoV", (530, 0)),
];

/// Symbols of the fake that the library of driver `driver` does not have.
#[must_use]
pub fn absent_symbols(driver: &Driver) -> Vec<&'static str> {
    INTRODUCED
        .iter()
        .filter(|(_, introduced)| !driver.has(*introduced))
        .map(|(name, _)| *name)
        .collect()
}

/// What a field id in 251 to 273 means, independent of the numbering of the driver.
///
/// Returns the id in the numbering of 12.x: callers then match on one set of numbers. Ids outside the range that
/// moved are the same in both.
#[must_use]
pub const fn canonical_field_id(renumbered: bool, id: u32) -> u32 {
    if !renumbered {
        return id;
    }
    match id {
        251..=268 => id + 5,
        269..=273 => id - 18,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_print_as_nvidia_prints_them() {
        for text in ["535.183.06", "580.95.05", "535.54.03", "580.05"] {
            assert_eq!(Driver::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(
            Driver::parse("535.183.06").unwrap().nvml_version(),
            "12.535.183.06"
        );
        assert!(Driver::parse("535").is_none() && Driver::parse("a.b").is_none());
    }

    #[test]
    fn the_numbering_changes_within_580() {
        assert!(!Driver::parse("580.65.06").unwrap().renumbered_fields());
        assert!(Driver::parse("580.82.07").unwrap().renumbered_fields());
        assert!(Driver::parse("590.10").unwrap().renumbered_fields());
    }

    #[test]
    fn renumbering_is_a_bijection_on_the_range_that_moved() {
        let mut seen: Vec<u32> = (251..=273).map(|id| canonical_field_id(true, id)).collect();
        seen.sort_unstable();
        assert_eq!(seen, (251..=273).collect::<Vec<_>>());
        assert_eq!(canonical_field_id(true, 269), 251, "software thermal slowdown");
        assert_eq!(canonical_field_id(true, 271), 253, "hardware power brake");
        assert_eq!(canonical_field_id(true, 250), 250);
    }

    #[test]
    fn old_drivers_lack_symbols() {
        let r535 = absent_symbols(&Driver::parse("535.183.06").unwrap());
        assert!(r535.contains(&"nvmlDeviceGetProcessesUtilizationInfo"));
        assert!(!r535.contains(&"nvmlGpmSampleGet"));
        assert!(absent_symbols(&Driver::parse("580.95.05").unwrap()).is_empty());
        assert!(absent_symbols(&Driver::parse("470.57.02").unwrap()).contains(&"nvmlDeviceGetMemoryInfo_v2"));
    }
}
