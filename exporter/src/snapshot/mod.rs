//! What is known of the GPUs at one moment: immutable, swapped whole, read by anybody.
//!
//! Purpose: the only thing that poll threads and readers share.
//! Inputs: poll threads store; the renderer and the watchdog load.
//! Invariants: a snapshot never changes; each group of readings carries the moment before its first call, so an age
//! is never too small; what a reader may show is decided by [`Standing`], a pure function of snapshot and clock.

mod fleet;
mod readings;

use std::sync::Arc;
use std::time::{Duration, Instant};

use forewarm_nvml::Memory;
use forewarm_signals::Group;

pub use self::fleet::{DeviceSlot, Fleet, FleetState, LibraryState, Xids};
pub use self::readings::{
    Clocks, Directions, Ecc, Gpm, Health, Identity, Link, LinkErrors, Links, Nvlink, Pcie, Power, Presence,
    Support, THROTTLE_REASONS, Thermal, Timed, Utilization,
};
use crate::poll::schedule;

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
}
