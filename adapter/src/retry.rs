//! How watches of the API server are retried.
//!
//! Purpose: after an API server was away, every replica sees the same pods again within moments; the kube
//! crate's default waits up to half a minute between tries, in which one replica answers what another denies.
//! Inputs: none.
//! Invariants: a try costs one request for each of a handful of watches, and there are two replicas, so a short
//! limit burdens no API server; jitter keeps replicas apart.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::Duration;

use kube::runtime::utils::{Backoff, ResetTimerBackoff};

/// First pause.
const FIRST: Duration = Duration::from_millis(250);
/// Longest pause, before jitter.
const LONGEST: Duration = Duration::from_secs(2);
/// A watch that worked for this long starts over with the first pause.
const FORGIVEN_AFTER: Duration = Duration::from_secs(10);

/// Pauses that double up to a limit, each shortened by up to a half at random.
#[derive(Debug, Clone)]
pub struct Pauses {
    next: Duration,
}

/// Pauses between tries of one watch.
#[must_use]
pub fn watch_backoff() -> ResetTimerBackoff<Pauses> {
    ResetTimerBackoff::new(Pauses { next: FIRST }, FORGIVEN_AFTER)
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let pause = self.next;
        self.next = (pause * 2).min(LONGEST);
        // A hasher's random seed is random enough to keep two replicas apart.
        let eighths = u32::try_from(RandomState::new().build_hasher().finish() % 5).unwrap_or_default();
        Some(pause - pause * eighths / 8)
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        self.next = FIRST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_stay_short() {
        let pauses: Vec<_> = watch_backoff().take(50).collect();
        assert!(pauses[0] <= FIRST && pauses[0] >= FIRST / 2);
        assert!(pauses.iter().all(|pause| *pause <= LONGEST));
        assert!(pauses[40..].iter().all(|pause| *pause >= LONGEST / 2));
    }
}
