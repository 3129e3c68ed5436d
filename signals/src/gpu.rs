//! Families about physical GPUs: identity `gpu, uuid`, one row a device (design §4.3).

use crate::family::{Family, Group, Kind, MeasuredAt, Unit};
use crate::label::{DIRECTION, DOMAIN, GPU, GROUP, KIND, LINK, READING, REASON, SENSOR, UUID, XID};

macro_rules! families {
    ($(#[$table_doc:meta])* $table:ident: $( $(#[$doc:meta])* $ident:ident = $name:literal, $kind:ident, $unit:expr, $measured:expr, [$($extra:expr),*], $help:literal; )*) => {
        $(
            $(#[$doc])*
            pub const $ident: Family = Family {
                name: $name, help: $help, kind: Kind::$kind, unit: $unit,
                labels: &[GPU, UUID, $($extra),*], measured: $measured,
            };
        )*
        $(#[$table_doc])*
        pub const $table: &[&Family] = &[$(&$ident),*];
    };
}

use Group::{Clocks, Ecc, Gpm, Health, Links, Memory, Nvlink, Pcie, Power, Thermal, Utilization};
use MeasuredAt::{Device, Now};

families! {
    /// All device families of `/metrics`, in the order they are written.
    FAMILIES:
    /// 1 while the device answers, 0 once it is lost, blocked or failing.
    UP = "gpu_up", Gauge, None, Now, [], "1 while the GPU answers NVML in time, 0 when it is lost, blocked or failing";
    /// Age of the newest reading of a group, written at response time.
    SAMPLE_AGE_SECONDS = "gpu_sample_age_seconds", Gauge, Some(Unit::Seconds), Now, [GROUP], "Age of the newest successful reading of this group, at the moment of the response";
    /// Constant facts of the device.
    INFO = "gpu_info", Info, None, Now, ["model", "architecture", "driver_version", "pci_bus_id", "serial", "minor", "compute_capability"], "Constant facts of the GPU";
    /// Share of time with at least one kernel resident.
    BUSY_RATIO = "gpu_busy_ratio", Gauge, Some(Unit::Ratio), Device(Utilization), [], "Share of time in which at least one kernel was resident (NVML utilisation), not how full the SMs are";
    /// Share of time in which device memory was read or written.
    MEMORY_BANDWIDTH_BUSY_RATIO = "gpu_memory_bandwidth_busy_ratio", Gauge, Some(Unit::Ratio), Device(Utilization), [], "Share of time in which device memory was being read or written (NVML utilisation)";
    /// Share of SMs that were busy.
    SM_ACTIVE_RATIO = "gpu_sm_active_ratio", Gauge, Some(Unit::Ratio), Device(Gpm), [], "Share of SM time with at least one warp resident, averaged over SMs (GPM, Hopper and newer)";
    /// Resident warps over the maximum.
    SM_OCCUPANCY_RATIO = "gpu_sm_occupancy_ratio", Gauge, Some(Unit::Ratio), Device(Gpm), [], "Resident warps over the most the SMs can hold (GPM)";
    /// Share of time the tensor pipes were busy.
    TENSOR_ACTIVE_RATIO = "gpu_tensor_active_ratio", Gauge, Some(Unit::Ratio), Device(Gpm), [], "Share of time in which any tensor pipe was busy (GPM)";
    /// DRAM bandwidth used over the most there is.
    DRAM_ACTIVE_RATIO = "gpu_dram_active_ratio", Gauge, Some(Unit::Ratio), Device(Gpm), [], "Device memory bandwidth used over the most there is (GPM)";
    /// Used device memory, without the reserved part.
    MEMORY_USED_BYTES = "gpu_memory_used_bytes", Gauge, Some(Unit::Bytes), Device(Memory), [], "Device memory in use by clients, without the driver's reserved part";
    /// Free device memory.
    MEMORY_FREE_BYTES = "gpu_memory_free_bytes", Gauge, Some(Unit::Bytes), Device(Memory), [], "Device memory free";
    /// Device memory the driver keeps for itself.
    MEMORY_RESERVED_BYTES = "gpu_memory_reserved_bytes", Gauge, Some(Unit::Bytes), Device(Memory), [], "Device memory reserved by the driver and firmware";
    /// All device memory.
    MEMORY_TOTAL_BYTES = "gpu_memory_total_bytes", Gauge, Some(Unit::Bytes), Device(Memory), [], "All device memory";
    /// NVLink data bytes, all links.
    NVLINK_BYTES_TOTAL = "gpu_nvlink_bytes_total", Counter, Some(Unit::Bytes), Device(Nvlink), [DIRECTION], "NVLink data bytes summed over all links since the driver was loaded";
    /// NVLink data rate, all links.
    NVLINK_BYTES_PER_SECOND = "gpu_nvlink_bytes_per_second", Gauge, Some(Unit::BytesPerSecond), Device(Nvlink), [DIRECTION], "NVLink data rate summed over all links, over the exporter's own window between two readings";
    /// NVLink errors by kind.
    NVLINK_ERRORS_TOTAL = "gpu_nvlink_errors_total", Counter, None, Device(Links), [KIND], "NVLink errors by kind, all links";
    /// Links that are active.
    NVLINK_LINKS_UP = "gpu_nvlink_links_up", Gauge, None, Device(Links), [], "NVLink links that are active";
    /// PCIe bytes.
    PCIE_BYTES_TOTAL = "gpu_pcie_bytes_total", Counter, Some(Unit::Bytes), Device(Pcie), [DIRECTION], "PCIe bytes, continued across wraps of the device's counter";
    /// PCIe replays.
    PCIE_REPLAY_TOTAL = "gpu_pcie_replay_total", Counter, None, Device(Pcie), [], "PCIe replays";
    /// Power drawn.
    POWER_WATTS = "gpu_power_watts", Gauge, Some(Unit::Watts), Device(Power), [], "Power drawn by the board, averaged as the device does";
    /// Energy since driver load.
    ENERGY_JOULES_TOTAL = "gpu_energy_joules_total", Counter, Some(Unit::Joules), Device(Power), [], "Energy used since the driver was loaded; its rate is the mean power over any window";
    /// Temperatures by sensor.
    TEMPERATURE_CELSIUS = "gpu_temperature_celsius", Gauge, Some(Unit::Celsius), Device(Thermal), [SENSOR], "Temperature by sensor";
    /// Clocks by domain.
    CLOCK_HERTZ = "gpu_clock_hertz", Gauge, Some(Unit::Hertz), Device(Clocks), [DOMAIN], "Current clock by domain";
    /// Time spent throttled.
    THROTTLE_SECONDS_TOTAL = "gpu_throttle_seconds_total", Counter, Some(Unit::Seconds), Device(Clocks), [REASON], "Time in which clocks were held down, by reason";
    /// ECC errors.
    ECC_ERRORS_TOTAL = "gpu_ecc_errors_total", Counter, None, Device(Ecc), [KIND], "ECC errors over the life of the device, by kind";
    /// Remapped rows.
    REMAPPED_ROWS = "gpu_remapped_rows", Gauge, None, Device(Ecc), [KIND], "Memory rows remapped by cause; pending and failure are 0 or 1";
    /// Xid events.
    XID_TOTAL = "gpu_xid_total", Counter, None, Now, [XID], "Xid events since the exporter started";
    /// What the driver asks for.
    RECOVERY_ACTION = "gpu_recovery_action", Gauge, None, Device(Health), [], "Recovery the driver asks for: 0 none, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset, 5 recover IMEX domain";
    /// Health score.
    HEALTH_SCORE = "gpu_health_score", Gauge, None, Device(Health), [], "Health from 0 (do not use) to 1 (no complaint): product of (1 - weight) over active reasons";
    /// Active health reasons.
    HEALTH_REASON = "gpu_health_reason", Gauge, None, Device(Health), [REASON], "Share by which this reason lowers the health score; absent while the reason is not active";
    /// Fabric membership.
    FABRIC_INFO = "gpu_fabric_info", Info, None, Device(Health), ["cluster_uuid", "clique", "state"], "NVLink fabric membership; no cluster UUID means no domain";
}

families! {
    /// Families of `/metrics/detail`: what would be too many series for every scrape.
    DETAIL:
    /// Whether one link is up.
    NVLINK_LINK_UP = "gpu_nvlink_link_up", Gauge, None, Device(Links), [LINK], "1 while this NVLink link is up";
    /// Data bytes of one link.
    NVLINK_LINK_BYTES_TOTAL = "gpu_nvlink_link_bytes_total", Counter, Some(Unit::Bytes), Device(Links), [LINK, DIRECTION], "NVLink data bytes of one link since the driver was loaded";
    /// Errors of one link.
    NVLINK_LINK_ERRORS_TOTAL = "gpu_nvlink_link_errors_total", Counter, None, Device(Links), [LINK, KIND], "NVLink errors of one link by kind";
    /// Whether the device offers a reading.
    READING_SUPPORTED = "gpu_reading_supported", Gauge, None, Now, [READING], "1 where device and driver offer this reading, 0 where they do not; absent while it fails for another reason";
}
