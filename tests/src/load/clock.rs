//! An offered load that can be held: acts that judge an HPA need a load that stands still.
//!
//! Invariants: while held, the level is constant and the load's own time stands still; going on
//! continues where it stopped. Times come from the caller.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::OfferedLoad;

/// A load with a start, which can be held and let go on.
pub struct LoadClock {
    load: Arc<dyn OfferedLoad>,
    state: Mutex<State>,
}

#[derive(Debug, Clone, Copy)]
struct State {
    /// `None` before the start: the load is that of its first moment.
    started: Option<Instant>,
    /// Time spent held, over and done with.
    paused: Duration,
    /// Since when it is held, and at which level.
    held: Option<(Instant, f64)>,
}

impl std::fmt::Debug for LoadClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadClock")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl LoadClock {
    /// A load that has not started.
    #[must_use]
    pub fn new(load: Arc<dyn OfferedLoad>) -> Self {
        Self {
            load,
            state: Mutex::new(State {
                started: None,
                paused: Duration::ZERO,
                held: None,
            }),
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        // Plain numbers: a panic elsewhere cannot leave them half written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts it, once.
    pub fn start(&self, now: Instant) {
        self.state().started.get_or_insert(now);
    }

    /// The load's own time.
    #[must_use]
    pub fn position(&self, now: Instant) -> Duration {
        self.state().position(now)
    }

    /// The load in GPUs.
    #[must_use]
    pub fn gpus(&self, now: Instant) -> f64 {
        let state = *self.state();
        state
            .held
            .map_or_else(|| self.load.gpus(state.position(now)), |(_, level)| level)
    }

    /// The mean load of the last `window`, the moment included.
    #[must_use]
    pub fn recent_mean(&self, now: Instant, window: Duration) -> f64 {
        const STEPS: u32 = 20;
        let position = self.position(now);
        let sum: f64 = (0..=STEPS)
            .map(|step| self.load.gpus(position.saturating_sub(window * step / STEPS)))
            .sum();
        sum / f64::from(STEPS + 1)
    }

    /// Holds the load at `level` GPUs.
    pub fn hold(&self, now: Instant, level: f64) {
        let mut state = self.state();
        let since = state.held.map_or(now, |(since, _)| since);
        state.held = Some((since, level.max(0.0)));
    }

    /// Lets it go on from where it was held.
    pub fn go_on(&self, now: Instant) {
        let mut state = self.state();
        if let Some((since, _)) = state.held.take() {
            state.paused += now.saturating_duration_since(since);
        }
    }

    /// Whether it is held.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.state().held.is_some()
    }

    /// Whether it has come to its end.
    #[must_use]
    pub fn is_over(&self, now: Instant) -> bool {
        let state = *self.state();
        state.started.is_some() && state.held.is_none() && state.position(now) >= self.load.length()
    }

    /// The moment the load first exceeds `level` GPUs, in real time, once started. Holding before it moves it.
    #[must_use]
    pub fn first_above(&self, level: f64) -> Option<Instant> {
        let state = *self.state();
        Some(state.started? + state.paused + super::first_above(self.load.as_ref(), level)?)
    }

    /// Its length without holds.
    #[must_use]
    pub fn length(&self) -> Duration {
        self.load.length()
    }
}

impl State {
    fn position(&self, now: Instant) -> Duration {
        let until = self.held.map_or(now, |(since, _)| since);
        self.started.map_or(Duration::ZERO, |started| {
            until
                .saturating_duration_since(started)
                .saturating_sub(self.paused)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One GPU more each second, for ten seconds.
    struct Climb;

    impl OfferedLoad for Climb {
        fn gpus(&self, since_start: Duration) -> f64 {
            since_start.as_secs_f64()
        }

        fn length(&self) -> Duration {
            Duration::from_secs(10)
        }
    }

    #[test]
    fn a_held_load_stands_still_and_goes_on_where_it_stopped() {
        let clock = LoadClock::new(Arc::new(Climb));
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        assert!(clock.gpus(at(5.0)).abs() < 1e-9, "not started");
        clock.start(start);
        clock.start(at(3.0)); // once
        assert!((clock.gpus(at(4.0)) - 4.0).abs() < 1e-9);
        clock.hold(at(4.0), 4.5);
        clock.hold(at(5.0), 4.25);
        assert!((clock.gpus(at(9.0)) - 4.25).abs() < 1e-9);
        assert!(clock.is_held() && !clock.is_over(at(99.0)));
        clock.go_on(at(10.0));
        clock.go_on(at(11.0));
        assert!((clock.gpus(at(11.0)) - 5.0).abs() < 1e-9);
        assert!(!clock.is_over(at(15.9)) && clock.is_over(at(16.0)));
    }

    #[test]
    fn the_recent_mean_lags_a_climb() {
        let clock = LoadClock::new(Arc::new(Climb));
        let start = Instant::now();
        clock.start(start);
        let mean = clock.recent_mean(start + Duration::from_secs(8), Duration::from_secs(4));
        assert!((mean - 6.0).abs() < 1e-6, "{mean}");
        let above = clock.first_above(2.0).unwrap() - start;
        assert!((2.0..2.05).contains(&above.as_secs_f64()), "{above:?}");
        assert_eq!(clock.first_above(11.0), None);
    }
}
