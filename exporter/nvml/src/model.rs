//! The traits that stand for a library and a device, and the shapes of their readings.
//!
//! Invariants: every method makes at most one NVML call on its hot path (fallbacks are remembered), so a caller can
//! budget a tick by counting methods.

use std::sync::Arc;
use std::time::Duration;

use crate::call::InFlight;
use crate::field::FieldQuery;
use crate::quantity::{Bytes, Celsius, Hertz, Ratio, Watts};
use crate::reading::{Gap, Reading, Rejection};

/// An opened library.
pub trait Nvml: Send + Sync {
    /// Version of the kernel driver.
    fn driver_version(&self) -> Reading<String>;
    /// How many GPUs there are, also those that do not answer.
    fn device_count(&self) -> Reading<u32>;
    /// Takes hold of one GPU. `in_flight` shows which of its calls runs.
    fn device(&self, index: u32, in_flight: Arc<InFlight>) -> Reading<Box<dyn Device>>;
    /// Waits for an event of any device that subscribed; `None` once the time is over.
    fn wait_event(&self, patience: Duration) -> Reading<Option<Event>>;
}

/// One GPU. Used by one thread at a time.
pub trait Device: Send {
    /// What events name this device by.
    fn key(&self) -> DeviceKey;
    /// Constant facts. Fails only where the UUID cannot be read.
    fn facts(&mut self) -> Reading<Facts>;
    /// Share of time busy.
    fn utilization(&mut self) -> Reading<Utilization>;
    /// Memory.
    fn memory(&mut self) -> Reading<Memory>;
    /// Answers all queries with one call; each entry has its own reading.
    fn fields(&mut self, queries: &mut [FieldQuery]) -> Reading<()>;
    /// Takes a GPM sample and compares it with the one before.
    fn gpm(&mut self) -> Reading<Gpm>;
    /// Power by the old call, for devices without the power fields.
    fn power_usage(&mut self) -> Reading<Watts>;
    /// Temperature of the GPU.
    fn temperature(&mut self) -> Reading<Celsius>;
    /// Clock of a domain.
    fn clock(&mut self, domain: ClockDomain) -> Reading<Hertz>;
    /// Why clocks are held down right now.
    fn clock_events(&mut self) -> Reading<ClockEvents>;
    /// Remapped memory rows.
    fn remapped_rows(&mut self) -> Reading<RemappedRows>;
    /// NVLink fabric membership.
    fn fabric(&mut self) -> Reading<Fabric>;
    /// Whether one link is up, by the old call.
    fn link_is_up(&mut self, link: u32) -> Reading<bool>;
    /// Asks for events of this device on the library's event set.
    fn subscribe(&mut self) -> Reading<()>;
}

/// Identifies a device within one opened library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceKey(pub usize);

/// Constant facts of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// `GPU-` and a UUID.
    pub uuid: String,
    /// Marketing name.
    pub model: String,
    /// Lower-case architecture name, `unknown` for one newer than this build.
    pub architecture: &'static str,
    /// `domain:bus:device.function` as NVML spells it.
    pub pci_bus_id: Option<String>,
    /// Board serial number.
    pub serial: Option<String>,
    /// N of `/dev/nvidiaN`.
    pub minor: Option<u32>,
    /// CUDA compute capability, major and minor.
    pub compute_capability: Option<(u32, u32)>,
}

/// Shares of time over the driver's last sample window (1/6 to 1 s).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Utilization {
    /// At least one kernel was resident.
    pub busy: Reading<Ratio>,
    /// Device memory was read or written.
    pub memory_bandwidth: Reading<Ratio>,
}

/// Device memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Memory {
    /// All of it.
    pub total: Bytes,
    /// In use by clients.
    pub used: Bytes,
    /// Free.
    pub free: Bytes,
    /// Kept by driver and firmware; not told by old drivers, which count it as used.
    pub reserved: Option<Bytes>,
}

impl Memory {
    /// Checks the parts against the whole.
    pub fn checked(total: u64, used: u64, free: u64, reserved: Option<u64>) -> Reading<Self> {
        if [total, used, free].contains(&u64::MAX) || reserved == Some(u64::MAX) {
            return Err(Gap::Rejected(Rejection::Sentinel));
        }
        if total == 0 || used > total || free > total || reserved.is_some_and(|reserved| reserved > total) {
            return Err(Gap::Rejected(Rejection::Implausible));
        }
        Ok(Self {
            total: Bytes::new(total),
            used: Bytes::new(used),
            free: Bytes::new(free),
            reserved: reserved.map(Bytes::new),
        })
    }
}

/// GPU performance monitoring over the window between two samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gpm {
    /// SMs with at least one warp.
    pub sm_active: Reading<Ratio>,
    /// Resident warps over the most there can be.
    pub sm_occupancy: Reading<Ratio>,
    /// Any tensor pipe busy.
    pub tensor_active: Reading<Ratio>,
    /// Memory bandwidth used over the most there is.
    pub dram_active: Reading<Ratio>,
}

/// Clock domains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClockDomain {
    /// Graphics.
    Graphics,
    /// Streaming multiprocessors.
    Sm,
    /// Memory.
    Memory,
    /// Video engines.
    Video,
}

impl ClockDomain {
    /// Every domain.
    pub const ALL: [Self; 4] = [Self::Graphics, Self::Sm, Self::Memory, Self::Video];

    /// The value of label `domain`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Graphics => "graphics",
            Self::Sm => "sm",
            Self::Memory => "memory",
            Self::Video => "video",
        }
    }
}

/// Why clocks are held down at this moment: NVML's bit mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockEvents(pub u64);

impl ClockEvents {
    /// HW slowdown, HW thermal slowdown, HW power brake.
    const HARDWARE: u64 = 0x8 | 0x40 | 0x80;

    /// Whether hardware protects itself.
    #[must_use]
    pub const fn is_hardware_slowdown(self) -> bool {
        self.0 & Self::HARDWARE != 0
    }
}

/// Remapped memory rows (Ampere and newer).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemappedRows {
    /// Rows remapped for correctable errors.
    pub correctable: u32,
    /// Rows remapped for uncorrectable errors.
    pub uncorrectable: u32,
    /// A remapping waits for a reset.
    pub pending: bool,
    /// A remapping failed: the board is to be returned.
    pub failed: bool,
}

/// Whether a GPU has joined its NVLink fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FabricState {
    /// There is no fabric.
    NotSupported,
    /// Joining has not begun.
    NotStarted,
    /// Joining.
    InProgress,
    /// Joined, or failed for good.
    Completed,
}

impl FabricState {
    /// The value of label `state`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotSupported => "not-supported",
            Self::NotStarted => "not-started",
            Self::InProgress => "in-progress",
            Self::Completed => "completed",
        }
    }
}

/// NVLink fabric membership.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fabric {
    /// Where joining stands.
    pub state: FabricState,
    /// The cluster; `None` where NVML says all zeros, which means no domain.
    pub cluster: Option<[u8; 16]>,
    /// The clique within the cluster.
    pub clique: u32,
    /// Whether joining ended well; has meaning once completed.
    pub joined: bool,
}

/// Kind of an event, from NVML's bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// An Xid, in the event's data.
    Xid,
    /// Any other bit, as NVML gave it.
    Other(u64),
}

/// An event of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Which device.
    pub device: DeviceKey,
    /// What kind.
    pub kind: EventKind,
    /// NVML's data word: the Xid for [`EventKind::Xid`].
    pub data: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_contradicts_itself_is_rejected() {
        let implausible = Err(Gap::Rejected(Rejection::Implausible));
        assert_eq!(Memory::checked(0, 0, 0, None), implausible);
        assert_eq!(Memory::checked(10, 11, 0, None), implausible);
        assert_eq!(Memory::checked(10, 1, 11, None), implausible);
        assert_eq!(Memory::checked(10, 1, 9, Some(11)), implausible);
        assert_eq!(
            Memory::checked(10, u64::MAX, 1, None),
            Err(Gap::Rejected(Rejection::Sentinel))
        );
        assert_eq!(
            Memory::checked(10, 4, 5, Some(1)).map(|memory| memory.used.get()),
            Ok(4)
        );
    }
}
