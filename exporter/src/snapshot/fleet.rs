//! Where snapshots lie: a place per GPU, and the GPUs of the node.
//!
//! Invariants: readers never wait for a writer; a version grows with each change, so that a reader can tell whether
//! anything is new; Xids are bounded, and belong to a UUID, not to an index, which a driver may give to another GPU.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use forewarm_nvml::InFlight;
use forewarm_signals::health::HARDWARE_XIDS;

use super::DeviceSnapshot;

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

/// Xids by UUID, over the life of the exporter: one entry per GPU that was ever in this node.
type Ledger = Mutex<BTreeMap<String, Arc<Mutex<Xids>>>>;

/// One GPU's place: its latest snapshot, its events, and the call its thread is in.
#[derive(Debug)]
pub struct DeviceSlot {
    latest: ArcSwap<DeviceSnapshot>,
    xids: ArcSwap<Mutex<Xids>>,
    ledger: Arc<Ledger>,
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
            xids: ArcSwap::default(),
            ledger: Arc::default(),
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

    /// Changes the snapshot, whatever another thread stores meanwhile.
    pub fn update(&self, change: impl Fn(&DeviceSnapshot) -> DeviceSnapshot) {
        self.latest.rcu(|before| change(before));
        self.version.fetch_add(1, Ordering::Release);
    }

    /// From now on this place is that GPU's: its Xids of before come along, another GPU's stay behind.
    pub fn assign(&self, uuid: &str) {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let xids = Arc::clone(ledger.entry(uuid.to_owned()).or_default());
        drop(ledger);
        self.xids.store(xids);
    }

    /// Looks at or changes the Xids.
    pub fn with_xids<T>(&self, look: impl FnOnce(&mut Xids) -> T) -> T {
        let xids = self.xids.load();
        let mut xids = xids.lock().unwrap_or_else(PoisonError::into_inner);
        look(&mut xids)
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
    ledger: Arc<Ledger>,
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
            ledger: Arc::default(),
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
        Arc::new(DeviceSlot {
            ledger: Arc::clone(&self.ledger),
            ..DeviceSlot::new(index, Arc::clone(&self.version))
        })
    }

    /// Gives a place to the GPU of this UUID, and takes the UUID from any other place that still shows it: the driver
    /// has numbered its GPUs anew.
    pub fn assign(&self, slot: &Arc<DeviceSlot>, uuid: &str) {
        slot.assign(uuid);
        for other in &self.load().devices {
            if !Arc::ptr_eq(other, slot) && other.load().uuid() == uuid {
                other.update(|before| {
                    if before.uuid() == uuid {
                        DeviceSnapshot::unseen(before.index)
                    } else {
                        before.clone()
                    }
                });
            }
        }
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
    use crate::snapshot::Identity;

    fn shows(slot: &DeviceSlot, uuid: &str) {
        let mut snapshot = DeviceSnapshot::unseen(slot.load().index);
        snapshot.identity = Some(Arc::new(Identity {
            facts: forewarm_nvml::fake::Answers::bare(uuid, "Test").facts.unwrap(),
            driver_version: String::new(),
        }));
        slot.store(snapshot);
    }

    #[test]
    fn xids_stay_with_their_gpu_when_the_driver_numbers_gpus_anew() {
        let fleet = Fleet::new(Duration::from_secs(1));
        let slots = [fleet.slot(0), fleet.slot(1)];
        fleet.store(FleetState {
            library: LibraryState::Waiting(String::new()),
            devices: slots.to_vec(),
        });
        let counts = |slot: &DeviceSlot| slot.with_xids(|xids| xids.counts().collect::<Vec<_>>());
        for (slot, uuid) in slots.iter().zip(["GPU-a", "GPU-b"]) {
            fleet.assign(slot, uuid);
            shows(slot, uuid);
        }
        slots[0].note_xid(79, Instant::now());
        slots[1].note_xid(31, Instant::now());
        // GPU-a is gone, GPU-b takes its index.
        fleet.assign(&slots[0], "GPU-b");
        assert_eq!(counts(&slots[0]), [(31, 1)]);
        assert_eq!(slots[0].with_xids(|xids| xids.last_hardware()), None);
        assert_eq!(slots[1].load().uuid(), "", "no uuid is shown in two places");
        assert_eq!(
            slots[0].load().uuid(),
            "GPU-a",
            "until the first reading of the new one"
        );
        // A place that is new because a thread is stuck in the old one goes on counting, too.
        let renewed = fleet.slot(0);
        fleet.assign(&renewed, "GPU-a");
        assert_eq!(counts(&renewed), [(79, 1)]);
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
