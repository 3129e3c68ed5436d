//! Where snapshots lie: a place per GPU, and the GPUs of the node.
//!
//! Invariants: readers never wait for a writer; a version grows with each change, so that a reader can tell whether
//! anything is new; Xids are bounded.

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
