//! What is known of the GPUs at one moment: immutable, swapped whole, read by anybody.
//!
//! Purpose: the only thing that poll threads and readers share.
//! Inputs: poll threads store; the renderer and the watchdog load.
//! Invariants: a snapshot never changes; each group of readings carries the moment before its first call, so an age
//! is never too small; what a reader may show is decided by [`Standing`], a pure function of snapshot and clock.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use forewarm_nvml::{
    Bytes, BytesPerSecond, Celsius, ClockDomain, Fabric, Facts, Hertz, InFlight, Joules, Memory, Ratio,
    RemappedRows, Watts,
};
use forewarm_signals::Group;
use forewarm_signals::health::{HARDWARE_XIDS, Reason};

use crate::poll::schedule;

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

/// All that is known of one GPU.
#[derive(Debug, Clone)]
pub struct DeviceSnapshot {
    /// NVML index.
    pub index: u32,
    /// Who it is; absent until its UUID could be read once.
    pub identity: Option<Arc<Identity>>,
    /// Whether it answers.
    pub presence: Presence,
    /// Ticks since the GPU was taken hold of.
    pub ticks: u64,
    /// When a call last succeeded.
    pub answered_at: Option<Instant>,
    /// Utilisation.
    pub utilization: Option<Timed<Utilization>>,
    /// GPM.
    pub gpm: Option<Timed<Gpm>>,
    /// Memory.
    pub memory: Option<Timed<Memory>>,
    /// NVLink traffic.
    pub nvlink: Option<Timed<Nvlink>>,
    /// NVLink links.
    pub links: Option<Timed<Arc<Links>>>,
    /// PCIe.
    pub pcie: Option<Timed<Pcie>>,
    /// Power.
    pub power: Option<Timed<Power>>,
    /// Temperatures.
    pub thermal: Option<Timed<Thermal>>,
    /// Clocks.
    pub clocks: Option<Timed<Clocks>>,
    /// Memory errors.
    pub ecc: Option<Timed<Ecc>>,
    /// Health.
    pub health: Option<Timed<Arc<Health>>>,
    /// What the device offers, for `/metrics/detail`.
    pub support: Arc<Support>,
}

impl DeviceSnapshot {
    /// A GPU that nothing is known of but its index.
    #[must_use]
    pub fn unseen(index: u32) -> Self {
        Self {
            index,
            identity: None,
            presence: Presence::Unseen,
            ticks: 0,
            answered_at: None,
            utilization: None,
            gpm: None,
            memory: None,
            nvlink: None,
            links: None,
            pcie: None,
            power: None,
            thermal: None,
            clocks: None,
            ecc: None,
            health: None,
            support: Arc::default(),
        }
    }

    /// UUID, empty until known.
    #[must_use]
    pub fn uuid(&self) -> &str {
        self.identity
            .as_ref()
            .map_or("", |identity| identity.facts.uuid.as_str())
    }

    /// When the newest readings of a group were taken.
    #[must_use]
    pub fn measured_at(&self, group: Group) -> Option<Instant> {
        match group {
            Group::Utilization => self.utilization.as_ref().map(|timed| timed.at),
            Group::Gpm => self.gpm.as_ref().map(|timed| timed.at),
            Group::Memory => self.memory.as_ref().map(|timed| timed.at),
            Group::Nvlink => self.nvlink.as_ref().map(|timed| timed.at),
            Group::Links => self.links.as_ref().map(|timed| timed.at),
            Group::Pcie => self.pcie.as_ref().map(|timed| timed.at),
            Group::Power => self.power.as_ref().map(|timed| timed.at),
            Group::Thermal => self.thermal.as_ref().map(|timed| timed.at),
            Group::Clocks => self.clocks.as_ref().map(|timed| timed.at),
            Group::Ecc => self.ecc.as_ref().map(|timed| timed.at),
            Group::Health => self.health.as_ref().map(|timed| timed.at),
        }
    }
}

/// What a reader may show of a snapshot at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// The device answers in time.
    pub up: bool,
    fresh: u16,
}

impl Standing {
    /// Judges a snapshot.
    ///
    /// A device is up while it answers and its last answer is at most three intervals old. A group is fresh while
    /// its device is up and its readings are at most three periods of its tier old.
    #[must_use]
    pub fn of(snapshot: &DeviceSnapshot, now: Instant, interval: Duration) -> Self {
        let age = |at: Instant| now.saturating_duration_since(at);
        let up = snapshot.presence == Presence::Answering
            && snapshot
                .answered_at
                .is_some_and(|at| age(at) <= schedule::silence_limit(interval));
        let mut fresh = 0;
        for (bit, group) in Group::ALL.into_iter().enumerate() {
            let limit = schedule::age_limit(group, interval);
            if up && snapshot.measured_at(group).is_some_and(|at| age(at) <= limit) {
                fresh |= 1 << bit;
            }
        }
        Self { up, fresh }
    }

    /// Whether values of this group may be shown.
    #[must_use]
    pub fn is_fresh(self, group: Group) -> bool {
        Group::ALL
            .iter()
            .position(|of_all| *of_all == group)
            .is_some_and(|bit| self.fresh >> bit & 1 == 1)
    }
}

/// How many different Xids one GPU may show before further ones are only counted as dropped.
const XIDS_KEPT: usize = 64;

/// Xids of one GPU since the exporter started.
#[derive(Debug, Default)]
pub struct Xids {
    counts: BTreeMap<u64, u64>,
    last_hardware: Option<Instant>,
}

impl Xids {
    /// Counts one. False where there are too many different ones.
    pub fn note(&mut self, xid: u64, now: Instant) -> bool {
        if HARDWARE_XIDS.contains(&xid) {
            self.last_hardware = Some(now);
        }
        if self.counts.len() >= XIDS_KEPT && !self.counts.contains_key(&xid) {
            return false;
        }
        *self.counts.entry(xid).or_insert(0) += 1;
        true
    }

    /// When the last one came that points to hardware.
    #[must_use]
    pub const fn last_hardware(&self) -> Option<Instant> {
        self.last_hardware
    }

    /// Xids and how often each came.
    pub fn counts(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.counts.iter().map(|(xid, count)| (*xid, *count))
    }
}

/// One GPU's place: its latest snapshot, its events, and the call its thread is in.
#[derive(Debug)]
pub struct DeviceSlot {
    latest: ArcSwap<DeviceSnapshot>,
    xids: Mutex<Xids>,
    /// The call that runs now.
    pub in_flight: Arc<InFlight>,
    version: Arc<AtomicU64>,
}

impl DeviceSlot {
    /// A place for the GPU of this index. `version` grows with each change.
    #[must_use]
    pub fn new(index: u32, version: Arc<AtomicU64>) -> Self {
        Self {
            latest: ArcSwap::from_pointee(DeviceSnapshot::unseen(index)),
            xids: Mutex::default(),
            in_flight: Arc::default(),
            version,
        }
    }

    /// The latest snapshot.
    #[must_use]
    pub fn load(&self) -> Arc<DeviceSnapshot> {
        self.latest.load_full()
    }

    /// Swaps the snapshot.
    pub fn store(&self, snapshot: DeviceSnapshot) {
        self.latest.store(Arc::new(snapshot));
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Looks at or changes the Xids.
    pub fn with_xids<T>(&self, look: impl FnOnce(&mut Xids) -> T) -> T {
        look(&mut self.xids.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts an Xid.
    pub fn note_xid(&self, xid: u64, now: Instant) -> bool {
        let kept = self.with_xids(|xids| xids.note(xid, now));
        self.version.fetch_add(1, Ordering::Release);
        kept
    }
}

/// Where the driver's library stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LibraryState {
    /// It is not open, and why.
    Waiting(String),
    /// It is open.
    Open {
        /// Version of the kernel driver, empty where it did not tell.
        driver_version: String,
    },
}

/// The GPUs of this node at one moment.
#[derive(Debug, Clone)]
pub struct FleetState {
    /// The library.
    pub library: LibraryState,
    /// One place per GPU, by index.
    pub devices: Vec<Arc<DeviceSlot>>,
}

/// The GPUs of this node.
#[derive(Debug)]
pub struct Fleet {
    state: ArcSwap<FleetState>,
    version: Arc<AtomicU64>,
    interval: Duration,
}

impl Fleet {
    /// A node whose driver has not been asked yet.
    #[must_use]
    pub fn new(interval: Duration) -> Arc<Self> {
        Arc::new(Self {
            state: ArcSwap::from_pointee(FleetState {
                library: LibraryState::Waiting("not tried yet".to_owned()),
                devices: Vec::new(),
            }),
            version: Arc::default(),
            interval,
        })
    }

    /// The present state.
    #[must_use]
    pub fn load(&self) -> Arc<FleetState> {
        self.state.load_full()
    }

    /// Swaps the state.
    pub fn store(&self, state: FleetState) {
        self.state.store(Arc::new(state));
        self.version.fetch_add(1, Ordering::Release);
    }

    /// A place for one GPU.
    #[must_use]
    pub fn slot(&self, index: u32) -> Arc<DeviceSlot> {
        Arc::new(DeviceSlot::new(index, Arc::clone(&self.version)))
    }

    /// Grows with each change of anything below.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Time between two ticks.
    #[must_use]
    pub const fn interval(&self) -> Duration {
        self.interval
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn seen(at: Instant) -> DeviceSnapshot {
        let mut snapshot = DeviceSnapshot::unseen(0);
        snapshot.presence = Presence::Answering;
        snapshot.answered_at = Some(at);
        snapshot.memory = Memory::checked(10, 1, 9, None)
            .ok()
            .map(|value| Timed { at, value });
        snapshot.ecc = Some(Timed {
            at,
            value: Ecc {
                corrected: Some(0),
                uncorrected: None,
                uncorrected_volatile: None,
                rows: None,
            },
        });
        snapshot
    }

    #[test]
    fn a_silent_device_is_down_after_three_intervals_and_takes_all_its_values_along() {
        let start = Instant::now();
        let snapshot = seen(start);
        let before = Standing::of(&snapshot, start + 3 * SECOND, SECOND);
        assert!(before.up && before.is_fresh(Group::Memory) && before.is_fresh(Group::Ecc));
        let after = Standing::of(&snapshot, start + 3 * SECOND + Duration::from_millis(1), SECOND);
        assert!(!after.up);
        assert!(Group::ALL.into_iter().all(|group| !after.is_fresh(group)));
    }

    #[test]
    fn a_slow_tier_may_be_older_than_a_fast_one() {
        let start = Instant::now();
        let mut snapshot = seen(start);
        snapshot.answered_at = Some(start + 10 * SECOND);
        let standing = Standing::of(&snapshot, start + 10 * SECOND, SECOND);
        assert!(standing.up);
        assert!(!standing.is_fresh(Group::Memory), "memory is read every tick");
        assert!(standing.is_fresh(Group::Ecc), "ecc is read every 30 s");
    }

    #[test]
    fn a_lost_device_is_down_at_once() {
        let start = Instant::now();
        let mut snapshot = seen(start);
        snapshot.presence = Presence::Lost;
        let standing = Standing::of(&snapshot, start, SECOND);
        assert!(!standing.up && !standing.is_fresh(Group::Memory));
    }

    proptest! {
        #[test]
        fn what_is_fresh_is_never_older_than_its_limit(age_ms in 0_u64..200_000, silence_ms in 0_u64..10_000) {
            let start = Instant::now() + Duration::from_secs(1000);
            let mut snapshot = seen(start - Duration::from_millis(age_ms));
            snapshot.answered_at = Some(start - Duration::from_millis(silence_ms));
            let standing = Standing::of(&snapshot, start, SECOND);
            for group in Group::ALL {
                if standing.is_fresh(group) {
                    let at = snapshot.measured_at(group).unwrap();
                    prop_assert!(start - at <= schedule::age_limit(group, SECOND));
                    prop_assert!(standing.up);
                }
            }
        }
    }

    #[test]
    fn xids_are_bounded() {
        let mut xids = Xids::default();
        let now = Instant::now();
        for xid in 1000..1064 {
            assert!(xids.note(xid, now));
        }
        assert!(!xids.note(1, now));
        assert!(xids.note(1000, now));
        assert_eq!(xids.last_hardware(), None);
        assert!(!xids.note(79, now), "too many to list");
        assert_eq!(xids.last_hardware(), Some(now), "yet it counts for health");
    }
}
