//! Rows of one body that make one reading.
//!
//! Invariants: a reading is made of all its rows or not at all: a part that is no number, stands there twice or
//! cannot be told from another spoils it, and is counted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cell::Taken;
use super::{Row, identify};
use crate::metrics::{Drop, Metrics};

/// Rows of one body that fall into one cell.
#[derive(Debug)]
pub(super) struct Fold {
    above: Vec<(u64, u64, f64)>,
    below: Vec<(u64, u64, f64)>,
    pub(super) measured_at: Instant,
    pub(super) is_spoilt: bool,
    pub(super) problem: Option<Arc<str>>,
}

impl Fold {
    pub(super) fn new(measured_at: Instant) -> Self {
        Self {
            above: Vec::new(),
            below: Vec::new(),
            measured_at,
            is_spoilt: false,
            problem: None,
        }
    }

    pub(super) fn add(&mut self, row: &Row, is_numerator: bool, sum: &[String], drops: &mut Drops) {
        self.measured_at = self.measured_at.min(row.measured_at);
        if !row.value.is_finite() {
            drops.add(Drop::NotFinite);
            // A sum without one of its parts would be a wrong value.
            self.is_spoilt = true;
            return;
        }
        let (all, rest) = identify::hashes(row, sum);
        let parts = if is_numerator {
            &mut self.above
        } else {
            &mut self.below
        };
        if parts.iter().any(|(other, ..)| *other == all) {
            drops.add(Drop::Duplicate);
            self.problem = Some(Arc::from(format!("has series {} twice in one body", row.family)));
        } else if parts.iter().any(|(_, other, _)| *other != rest) {
            drops.add(Drop::Duplicate);
            self.problem = Some(Arc::from(format!(
                "has several series {} for one device; name the labels that differ in sum",
                row.family
            )));
        } else {
            parts.push((all, rest, row.value));
        }
    }

    /// When the reading was taken, as far as an answer after `round_trip` tells.
    pub(super) fn taken(&self, round_trip: Duration) -> Taken {
        Taken::new(self.measured_at, round_trip)
    }

    pub(super) fn value(&self, is_ratio: bool) -> Option<f64> {
        let total = |parts: &[(u64, u64, f64)]| {
            (!parts.is_empty()).then(|| parts.iter().map(|(.., value)| value).sum::<f64>())
        };
        let above = total(&self.above)?;
        if !is_ratio {
            return Some(above);
        }
        let below = total(&self.below)?;
        (below.abs() > 0.0).then(|| above / below)
    }

    pub(super) fn counters(&self) -> Vec<(u64, f64)> {
        self.above.iter().map(|(all, _, value)| (*all, *value)).collect()
    }
}

/// Counts reasons while a batch is taken, to touch the shared counters once.
#[derive(Debug, Default)]
pub(super) struct Drops {
    counts: Vec<(Drop, usize)>,
}

impl Drops {
    pub(super) fn add(&mut self, reason: Drop) {
        match self.counts.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, count)) => *count += 1,
            None => self.counts.push((reason, 1)),
        }
    }

    pub(super) fn count(self, metrics: &Metrics) {
        for (reason, count) in self.counts {
            metrics.dropped(reason, count);
        }
    }
}
