//! The readings of one metric for one container and device (or node and device), obtained in one way.
//!
//! Invariants: readings are in order of time; two scrapes of the same reading count once; a ring never holds
//! more than its window needs; a counter that went down was reset, and grew by what it shows now.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::config::{Function, Window};

/// Two measured-at times this close are the same reading: they differ by the round trips of two scrapes.
const SAME_READING: Duration = Duration::from_millis(100);
/// Most readings kept: a ten-minute window at the shortest interval of 500 ms.
const RING: usize = 1200;

/// What became of a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pushed {
    /// It is the newest now.
    Taken,
    /// A newer one is held.
    OutOfOrder,
}

/// Readings of one series.
#[derive(Debug, Clone, Default)]
pub(super) struct Cell {
    ring: VecDeque<(Instant, f64)>,
    counters: HashMap<u64, f64>,
}

impl Cell {
    /// When the newest reading was taken.
    pub(super) fn newest(&self) -> Option<Instant> {
        self.ring.back().map(|(at, _)| *at)
    }

    /// Takes a reading of a gauge.
    pub(super) fn push(&mut self, at: Instant, value: f64, window: Option<Window>) -> Pushed {
        match self.ring.back_mut() {
            Some((last, _)) if at + SAME_READING < *last => return Pushed::OutOfOrder,
            Some((last, held)) if at <= *last + SAME_READING => {
                *held = value;
                *last = (*last).min(at);
            }
            _ => self.ring.push_back((at, value)),
        }
        self.trim(window);
        Pushed::Taken
    }

    /// Takes the counters behind a rate: each by a hash of its labels.
    pub(super) fn count(&mut self, at: Instant, counters: &[(u64, f64)], window: Option<Window>) -> Pushed {
        if self
            .ring
            .back()
            .is_some_and(|(last, _)| at + SAME_READING < *last)
        {
            return Pushed::OutOfOrder;
        }
        let mut grown = 0.0;
        for (key, value) in counters {
            // A counter seen for the first time says nothing about when it grew.
            if let Some(before) = self.counters.insert(*key, *value) {
                grown += if *value >= before { value - before } else { *value };
            }
        }
        match self.ring.back_mut() {
            Some((last, growth)) if at <= *last + SAME_READING => *growth += grown,
            _ => self.ring.push_back((at, grown)),
        }
        self.trim(window);
        Pushed::Taken
    }

    fn trim(&mut self, window: Option<Window>) {
        let Some(newest) = self.newest() else { return };
        match window {
            None => {
                while self.ring.len() > 1 {
                    self.ring.pop_front();
                }
            }
            Some(window) => {
                while self.ring.len() > RING
                    || self.ring.front().is_some_and(|(at, _)| {
                        newest.saturating_duration_since(*at) > window.length + SAME_READING
                    })
                {
                    self.ring.pop_front();
                }
            }
        }
    }

    /// The value at the newest reading, over readings not before `since`. `None` where there is none yet.
    pub(super) fn value(&self, window: Option<Window>, since: Option<Instant>) -> Option<f64> {
        let newest = self.newest()?;
        let inside = |at: &Instant| since.is_none_or(|since| *at >= since);
        if !inside(&newest) {
            return None;
        }
        let Some(window) = window else {
            return self.ring.back().map(|(_, value)| *value);
        };
        let readings = self.ring.iter().filter(|(at, _)| inside(at));
        let values = readings.clone().map(|(_, value)| *value);
        match window.function {
            Function::Mean => {
                let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
                Some(sum / count)
            }
            Function::Max => values.reduce(f64::max),
            Function::Min => values.reduce(f64::min),
            Function::Rate => {
                let first = readings.clone().next()?.0;
                let span = newest.saturating_duration_since(first).as_secs_f64();
                // The growth of the first reading happened before it.
                let grown: f64 = values.skip(1).sum();
                (span > 0.0).then(|| grown / span)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn window(seconds: u64, function: Function) -> Option<Window> {
        Some(Window {
            length: Duration::from_secs(seconds),
            function,
        })
    }

    fn close(left: Option<f64>, right: f64) -> bool {
        left.is_some_and(|left| (left - right).abs() < 1e-9)
    }

    #[test]
    fn the_same_reading_counts_once_and_old_ones_are_refused() {
        let start = Instant::now();
        let mean = window(15, Function::Mean);
        let mut cell = Cell::default();
        cell.push(start, 10.0, mean);
        cell.push(start + Duration::from_millis(40), 10.0, mean);
        cell.push(start + Duration::from_secs(2), 40.0, mean);
        assert!(close(cell.value(mean, None), 25.0));
        assert_eq!(
            cell.push(start + Duration::from_secs(1), 99.0, mean),
            Pushed::OutOfOrder
        );
        assert!(close(cell.value(mean, None), 25.0));
        assert!(close(
            cell.value(mean, Some(start + Duration::from_secs(1))),
            40.0
        ));
        assert_eq!(cell.value(mean, Some(start + Duration::from_secs(3))), None);
    }

    #[test]
    fn a_rate_survives_resets_and_needs_two_readings() {
        let start = Instant::now();
        let rate = window(60, Function::Rate);
        let mut cell = Cell::default();
        cell.count(start, &[(1, 100.0), (2, 7.0)], rate);
        assert_eq!(cell.value(rate, None), None);
        cell.count(start + Duration::from_secs(10), &[(1, 130.0), (2, 7.0)], rate);
        assert!(close(cell.value(rate, None), 3.0));
        // Reset: it grew by what it shows.
        cell.count(
            start + Duration::from_secs(20),
            &[(1, 10.0), (2, 7.0), (3, 50.0)],
            rate,
        );
        assert!(close(cell.value(rate, None), 2.0));
    }

    proptest! {
        #[test]
        fn windows_agree_with_a_naive_model(steps in proptest::collection::vec((1_u64..5, -100.0_f64..100.0), 1..40), length in 2_u64..20) {
            let start = Instant::now();
            for function in [Function::Mean, Function::Max, Function::Min] {
                let window = window(length, function);
                let mut cell = Cell::default();
                let mut at = 0;
                let mut all = Vec::new();
                for (gap, value) in &steps {
                    at += gap;
                    all.push((at, *value));
                    cell.push(start + Duration::from_secs(at), *value, window);
                    let inside: Vec<f64> = all.iter().filter(|(t, _)| at - t <= length).map(|(_, v)| *v).collect();
                    let expected = match function {
                        Function::Max => inside.iter().copied().fold(f64::MIN, f64::max),
                        Function::Min => inside.iter().copied().fold(f64::MAX, f64::min),
                        _ => inside.iter().sum::<f64>() / inside.len() as f64,
                    };
                    prop_assert!(close(cell.value(window, None), expected));
                }
                prop_assert!(cell.ring.len() <= 21);
            }
        }
    }
}
