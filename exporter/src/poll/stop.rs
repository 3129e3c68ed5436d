//! A flag that threads wait on: the only way poll threads sleep.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

/// Tells threads to stop, waking those that wait.
#[derive(Debug, Default)]
pub(super) struct Stop {
    asked: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    /// Asks all threads to stop.
    pub(super) fn ask(&self) {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Whether stopping was asked for.
    #[must_use]
    pub(super) fn is_asked(&self) -> bool {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the moment comes (false) or stopping is asked for (true).
    #[must_use]
    pub(super) fn wait_until(&self, moment: Instant) -> bool {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if *asked {
                return true;
            }
            let left = moment.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            asked = self
                .changed
                .wait_timeout(asked, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn a_waiting_thread_wakes_when_asked_to_stop() {
        let stop = Arc::new(Stop::default());
        let waiting = Arc::clone(&stop);
        let thread = std::thread::spawn(move || waiting.wait_until(Instant::now() + Duration::from_secs(60)));
        stop.ask();
        assert!(thread.join().unwrap());
        assert!(stop.is_asked());
    }

    #[test]
    fn a_moment_that_comes_ends_the_wait() {
        assert!(!Stop::default().wait_until(Instant::now()));
    }
}
