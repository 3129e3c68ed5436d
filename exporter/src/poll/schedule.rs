//! When what is read: tiers by how fast a quantity changes, ticks on a monotonic grid.
//!
//! Invariants: ticks lie on the grid of one common start, so all GPUs are read at the same moment; a late tick is
//! left out, not made up for; tiers of several GPUs are spread so that not all read their slow groups at once.

use std::time::{Duration, Instant};

use forewarm_signals::Group;

/// How often a group of readings is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Every tick: what an autoscaler acts on.
    Fast,
    /// Temperatures, clocks, throttle times.
    Medium,
    /// Errors, links, health: events of hours.
    Slow,
}

impl Tier {
    /// The shortest time between two readings of this tier.
    #[must_use]
    pub fn period(self, interval: Duration) -> Duration {
        match self {
            Self::Fast => interval,
            Self::Medium => interval.max(Duration::from_secs(5)),
            Self::Slow => interval.max(Duration::from_secs(30)),
        }
    }

    /// Whether it is the turn of this tier at a tick of a device.
    #[must_use]
    pub fn is_due(self, tick: u64, device: u32, interval: Duration) -> bool {
        let every = self
            .period(interval)
            .as_nanos()
            .div_ceil(interval.as_nanos().max(1))
            .max(1);
        // The first tick reads everything; afterwards devices take turns.
        tick == 0 || (u128::from(tick) + u128::from(device)).is_multiple_of(every)
    }
}

/// The tier that reads a group.
#[must_use]
pub const fn tier(group: Group) -> Tier {
    match group {
        Group::Utilization | Group::Gpm | Group::Memory | Group::Nvlink | Group::Pcie | Group::Power => {
            Tier::Fast
        }
        Group::Thermal | Group::Clocks => Tier::Medium,
        Group::Links | Group::Ecc | Group::Health => Tier::Slow,
    }
}

/// Values older than this are withdrawn: three periods of the group's tier.
#[must_use]
pub fn age_limit(group: Group, interval: Duration) -> Duration {
    (3 * tier(group).period(interval)).max(SHORTEST_LIMIT)
}

/// A device that has not answered for this long is down: three intervals.
#[must_use]
pub fn silence_limit(interval: Duration) -> Duration {
    (3 * interval).max(SHORTEST_LIMIT)
}

/// At intervals below a third of a second a busy node's scheduling delays would look like a dead GPU.
const SHORTEST_LIMIT: Duration = Duration::from_secs(1);

/// Ticks of one device.
#[derive(Debug, Clone, Copy)]
pub struct Ticks {
    start: Instant,
    interval: Duration,
    next: u64,
}

impl Ticks {
    /// Ticks on the grid that begins at `start`.
    #[must_use]
    pub const fn new(start: Instant, interval: Duration) -> Self {
        Self {
            start,
            interval,
            next: 0,
        }
    }

    /// The next tick that lies at or after `now`, and how many were left out.
    pub fn advance(&mut self, now: Instant) -> (Instant, u64) {
        let since = now.saturating_duration_since(self.start).as_nanos();
        let reached = since.div_ceil(self.interval.as_nanos().max(1));
        let reached = u64::try_from(reached).unwrap_or(u64::MAX);
        let missed = reached.saturating_sub(self.next);
        let tick = self.next.max(reached);
        self.next = tick.saturating_add(1);
        let offset = self.interval.as_nanos().saturating_mul(u128::from(tick));
        let offset = Duration::from_nanos(u64::try_from(offset).unwrap_or(u64::MAX));
        (self.start.checked_add(offset).unwrap_or(now), missed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn every_tier_runs_again_and_again() {
        for (tier, every) in [(Tier::Fast, 1), (Tier::Medium, 5), (Tier::Slow, 30)] {
            for device in 0..8 {
                let due: Vec<u64> = (0..121)
                    .filter(|tick| tier.is_due(*tick, device, SECOND))
                    .collect();
                assert_eq!(due[0], 0);
                assert!(
                    due.windows(2).skip(1).all(|pair| pair[1] - pair[0] == every),
                    "{tier:?} {due:?}"
                );
                assert!(due.len() >= 4, "{tier:?} {due:?}");
            }
        }
    }

    #[test]
    fn slow_tiers_of_several_devices_are_spread() {
        let busiest = (1..200)
            .map(|tick| {
                (0..8)
                    .filter(|device| Tier::Slow.is_due(tick, *device, SECOND))
                    .count()
            })
            .max();
        assert_eq!(busiest, Some(1));
    }

    #[test]
    fn at_other_intervals_periods_stay_in_seconds() {
        let interval = Duration::from_millis(100);
        let due: Vec<u64> = (0..200)
            .filter(|tick| Tier::Medium.is_due(*tick, 0, interval))
            .collect();
        assert_eq!(due, [0, 50, 100, 150]);
        assert!(
            Tier::Slow.is_due(7, 0, Duration::from_secs(60)),
            "an interval above the period reads all each tick"
        );
    }

    #[test]
    fn a_late_tick_is_left_out() {
        let start = Instant::now();
        let mut ticks = Ticks::new(start, SECOND);
        assert_eq!(ticks.advance(start), (start, 0));
        assert_eq!(
            ticks.advance(start + Duration::from_millis(20)),
            (start + SECOND, 0)
        );
        let (at, missed) = ticks.advance(start + Duration::from_millis(4500));
        assert_eq!(at, start + 5 * SECOND);
        assert_eq!(missed, 3);
    }

    proptest! {
        #[test]
        fn ticks_lie_on_the_grid_and_move_on(works in proptest::collection::vec(0_u64..5_000, 1..50)) {
            let start = Instant::now();
            let mut ticks = Ticks::new(start, SECOND);
            let mut now = start;
            let mut last = None;
            for work in works {
                let (at, _) = ticks.advance(now);
                prop_assert!(at >= now);
                prop_assert_eq!((at - start).as_nanos() % SECOND.as_nanos(), 0);
                prop_assert!(last.is_none_or(|last| at > last));
                last = Some(at);
                now = at + Duration::from_millis(work);
            }
        }
    }
}
