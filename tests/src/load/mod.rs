//! The load that the demo and the HPA tests offer, and how replicas of a serving workload take it.
//!
//! Load is measured in GPUs: 1.0 keeps every SM of one GPU busy. It comes from [`shape`] (a small
//! seeded generator, which is what the repository carries) or from [`trace`] (a recording replayed),
//! both pure functions of the time since start; [`clock`] adds stopping and going on. [`replica`] is
//! the pure model of one replica, and [`serving`] divides the load over the replicas that are ready.
//!
//! ```text
//! shape | trace ──► clock ──► serving ──► replica × n ──► GPU load per container
//! ```
//!
//! Invariants: no clock and no randomness but the seed in `shape`, `trace` and `replica`; a load is
//! finite and never negative.

pub mod clock;
pub mod replica;
pub mod serving;
pub mod shape;
pub mod trace;

use std::time::Duration;

/// An offered load as a function of the time since its start.
pub trait OfferedLoad: Send + Sync {
    /// The load in GPUs: finite, never negative.
    fn gpus(&self, since_start: Duration) -> f64;

    /// How long it lasts; later times repeat the last value.
    fn length(&self) -> Duration;
}

/// When the load first exceeds `level` GPUs: what a reaction time is measured from. To within 20 ms.
#[must_use]
pub fn first_above(load: &dyn OfferedLoad, level: f64) -> Option<Duration> {
    const STEP: Duration = Duration::from_millis(20);
    std::iter::successors(Some(Duration::ZERO), |at| at.checked_add(STEP))
        .take_while(|at| *at <= load.length().min(LONGEST_SEARCH))
        .find(|at| load.gpus(*at) > level)
}

/// A load that has not stepped up after this long is taken as one that never does.
const LONGEST_SEARCH: Duration = Duration::from_secs(24 * 3600);

/// The same load at every moment, for tests and standalone demos.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Constant(pub f64);

impl OfferedLoad for Constant {
    fn gpus(&self, _since_start: Duration) -> f64 {
        self.0.max(0.0)
    }

    fn length(&self) -> Duration {
        Duration::MAX
    }
}
