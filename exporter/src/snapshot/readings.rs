//! The shapes of what is known of a GPU, group by group.
//!
//! Invariants: every quantity has a unit by its type; what a device did not tell is `None`, never zero.

use std::time::Instant;

use forewarm_nvml::{
    Bytes, BytesPerSecond, Celsius, ClockDomain, Fabric, Facts, Hertz, Joules, Ratio, RemappedRows, Watts,
};
use forewarm_signals::health::Reason;

/// Readings that were taken together.
#[derive(Debug, Clone, PartialEq)]
pub struct Timed<T> {
    /// Just before the first call.
    pub at: Instant,
    /// The readings.
    pub value: T,
}

/// Received and sent, where known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Directions<T> {
    /// Received by the GPU.
    pub rx: Option<T>,
    /// Sent by the GPU.
    pub tx: Option<T>,
}

/// NVML utilisation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Utilization {
    /// Share of time with a kernel resident.
    pub busy: Option<Ratio>,
    /// Share of time with memory traffic.
    pub memory_bandwidth: Option<Ratio>,
}

/// GPM shares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gpm {
    /// SMs with a warp.
    pub sm_active: Option<Ratio>,
    /// Warps over the most there can be.
    pub sm_occupancy: Option<Ratio>,
    /// Tensor pipes.
    pub tensor_active: Option<Ratio>,
    /// Memory bandwidth.
    pub dram_active: Option<Ratio>,
}

/// NVLink traffic over all links.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Nvlink {
    /// Since the driver was loaded.
    pub bytes: Directions<Bytes>,
    /// Over the window since the reading before.
    pub rate: Directions<BytesPerSecond>,
}

/// One NVLink link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Whether it is up.
    pub up: Option<bool>,
    /// Data bytes.
    pub bytes: Directions<Bytes>,
    /// Its errors.
    pub errors: LinkErrors,
}

/// NVLink errors by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinkErrors {
    /// Replays.
    pub replay: Option<u64>,
    /// Recoveries.
    pub recovery: Option<u64>,
    /// Checksum errors.
    pub crc: Option<u64>,
}

impl LinkErrors {
    /// Kinds with their label values.
    #[must_use]
    pub const fn kinds(&self) -> [(&'static str, Option<u64>); 3] {
        [
            ("crc", self.crc),
            ("recovery", self.recovery),
            ("replay", self.replay),
        ]
    }
}

/// NVLink links.
#[derive(Debug, Clone, PartialEq)]
pub struct Links {
    /// By number.
    pub links: Vec<Link>,
    /// How many are up.
    pub up: Option<u32>,
    /// Over all links.
    pub errors: LinkErrors,
}

/// PCIe counters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pcie {
    /// Bytes, continued across wraps.
    pub bytes: Directions<Bytes>,
    /// Replays.
    pub replays: Option<u64>,
}

/// Power and energy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Power {
    /// Drawn now, averaged as the device does.
    pub power: Option<Watts>,
    /// Since the driver was loaded.
    pub energy: Option<Joules>,
}

/// Temperatures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thermal {
    /// The GPU.
    pub gpu: Option<Celsius>,
    /// Its memory.
    pub memory: Option<Celsius>,
}

/// How many throttle reasons there are.
pub const THROTTLE_REASONS: usize = 8;

/// Clocks and what held them down.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clocks {
    /// By domain, in the order of [`ClockDomain::ALL`].
    pub clocks: [Option<Hertz>; ClockDomain::ALL.len()],
    /// Nanoseconds by reason, in the order of [`crate::poll::collect::THROTTLES`].
    pub throttled: [Option<u64>; THROTTLE_REASONS],
}

/// Memory errors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ecc {
    /// Corrected, over the life of the device.
    pub corrected: Option<u64>,
    /// Uncorrected, over the life of the device.
    pub uncorrected: Option<u64>,
    /// Uncorrected since the driver was loaded.
    pub uncorrected_volatile: Option<u64>,
    /// Remapped rows.
    pub rows: Option<RemappedRows>,
}

/// Health as the driver and we see it.
#[derive(Debug, Clone, PartialEq)]
pub struct Health {
    /// What the driver asks for.
    pub recovery_action: Option<u64>,
    /// Fabric membership.
    pub fabric: Option<Fabric>,
    /// What speaks against the device.
    pub reasons: Vec<Reason>,
}

/// Whether the last tick found the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// It has not answered yet.
    Unseen,
    /// It answers.
    Answering,
    /// NVML says it is gone.
    Lost,
    /// Every call fails.
    Failing,
    /// Every call is refused again and again: unknown error or no permission.
    Refused,
}

/// Constant facts, with the driver's version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// What NVML told.
    pub facts: Facts,
    /// Version of the kernel driver.
    pub driver_version: String,
}

/// Whether a device offers a reading: name, and yes or no.
pub type Support = Vec<(&'static str, bool)>;
