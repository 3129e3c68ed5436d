//! What the HPA wanted, over time.
//!
//! Invariants: one entry per change; a moment's wish is the last entry at or before it.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Every change of `status.desiredReplicas`.
#[derive(Debug, Default)]
pub struct Wishes(Mutex<Vec<(Instant, i32)>>);

impl Wishes {
    fn entries(&self) -> std::sync::MutexGuard<'_, Vec<(Instant, i32)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what it wants now; whether that is a change.
    pub fn note(&self, at: Instant, desired: i32) -> bool {
        let mut entries = self.entries();
        let changed = entries.last().is_none_or(|(_, last)| *last != desired);
        if changed {
            entries.push((at, desired));
        }
        changed
    }

    /// The wishes from `from` on, the one then in force first.
    #[must_use]
    pub fn since(&self, from: Instant) -> Vec<i32> {
        let entries = self.entries();
        let in_force = entries.partition_point(|(at, _)| *at <= from).saturating_sub(1);
        entries
            .iter()
            .skip(in_force)
            .map(|(_, desired)| *desired)
            .collect()
    }

    /// When, from `from` on, it first wanted more than `replicas`.
    #[must_use]
    pub fn first_above(&self, replicas: i32, from: Instant) -> Option<Instant> {
        self.entries()
            .iter()
            .find(|(at, desired)| *at >= from && *desired > replicas)
            .map(|(at, _)| *at)
    }

    /// The largest wish.
    #[must_use]
    pub fn most(&self) -> i32 {
        self.entries()
            .iter()
            .map(|(_, desired)| *desired)
            .max()
            .unwrap_or(0)
    }

    /// The newest wish.
    #[must_use]
    pub fn last(&self) -> i32 {
        self.entries().last().map_or(0, |(_, desired)| *desired)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_wish_in_force_counts() {
        let wishes = Wishes::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        for (seconds, desired) in [(0, 1), (1, 1), (5, 3), (9, 2)] {
            let _ = wishes.note(at(seconds), desired);
        }
        assert_eq!(wishes.since(at(2)), [1, 3, 2]);
        assert_eq!(wishes.since(at(6)), [3, 2]);
        assert_eq!(wishes.since(at(20)), [2]);
        assert_eq!(wishes.first_above(1, at(1)), Some(at(5)));
        assert_eq!(wishes.first_above(3, at(1)), None);
        assert_eq!((wishes.most(), wishes.last()), (3, 2));
    }
}
