//! The readings of one metric for one container and device (or node and device), obtained in one way.
//!
//! Invariants: readings are in order of time; a reading that is said again counts once; a ring never holds more
//! than its window needs; a counter that went down was reset, and grew by what it shows now. A cell of counters
//! is fed by one target: two targets count from different starts, and both saw the same growth.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::config::{Function, Window};

/// What two statements of one reading may differ by beyond their round trips: ages are rounded, and over an age
/// of minutes two clocks drift apart. A reading at the edge of a window is in it for the same reason.
const SLACK: Duration = Duration::from_millis(100);
/// Most readings kept: a ten-minute window at the shortest interval of 500 ms.
const RING: usize = 1200;
/// A rate's span must be this many times what is not known of it, so that the rate is off by a quarter at most.
const SPAN_TO_DOUBT: u32 = 4;
/// Counters remembered beyond those of the newest body: labels that come and go must not pile up.
const SPARE_COUNTERS: usize = 64;

/// When a reading was taken, as far as a scrape can tell: its target wrote the age somewhere between request and
/// answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Taken {
    earliest: Instant,
    latest: Instant,
}

impl Taken {
    /// Not before `earliest`, and at most a round trip later.
    pub(super) fn new(earliest: Instant, round_trip: Duration) -> Self {
        Self {
            earliest,
            latest: earliest + round_trip,
        }
    }

    fn is_before(&self, other: &Self) -> bool {
        self.latest < other.earliest
    }

    fn may_be(&self, other: &Self) -> bool {
        self.earliest <= other.latest + SLACK && other.earliest <= self.latest + SLACK
    }

    fn doubt(&self) -> Duration {
        self.latest.saturating_duration_since(self.earliest)
    }
}

/// What became of a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pushed {
    /// It is the newest now.
    Taken,
    /// A newer one is held.
    OutOfOrder,
}

/// Readings of one series: gauges as they are, counters as what they grew by since the reading before.
#[derive(Debug, Clone, Default)]
pub(super) struct Cell {
    ring: VecDeque<(Taken, f64)>,
    counters: HashMap<u64, f64>,
}

impl Cell {
    /// When the newest reading was taken, or earlier.
    pub(super) fn newest(&self) -> Option<Instant> {
        self.ring.back().map(|(taken, _)| taken.earliest)
    }

    /// Takes a reading of a gauge; `is_same_target` where the reading before came from the same one.
    pub(super) fn push(
        &mut self,
        taken: Taken,
        value: f64,
        is_same_target: bool,
        window: Option<Window>,
    ) -> Pushed {
        if let Some((last, held)) = self.ring.back_mut() {
            if taken.is_before(last) {
                return Pushed::OutOfOrder;
            }
            // One reading has one value. Where this is another of the same value, nothing is lost but its weight.
            if taken.may_be(last) && value.to_bits() == held.to_bits() {
                last.said_again(taken);
                return Pushed::Taken;
            }
            if taken.earliest < last.earliest && !is_same_target {
                // Nobody knows which of the two came first.
                return Pushed::OutOfOrder;
            }
        }
        self.append(taken, value, window);
        Pushed::Taken
    }

    /// Takes the counters behind a rate, all of one target: each by a hash of its labels.
    pub(super) fn count(&mut self, taken: Taken, counters: &[(u64, f64)], window: Option<Window>) -> Pushed {
        if self.ring.back().is_some_and(|(last, _)| taken.is_before(last)) {
            return Pushed::OutOfOrder;
        }
        let mut grown = 0.0;
        for (key, value) in counters {
            // A counter seen for the first time says nothing about when it grew.
            if let Some(before) = self.counters.insert(*key, *value) {
                grown += if *value >= before { value - before } else { *value };
            }
        }
        if self.counters.len() > counters.len() + SPARE_COUNTERS {
            self.counters
                .retain(|known, _| counters.iter().any(|(key, _)| key == known));
        }
        match self.ring.back_mut() {
            Some((last, _)) if grown <= 0.0 && taken.may_be(last) => last.said_again(taken),
            _ => self.append(taken, grown, window),
        }
        Pushed::Taken
    }

    /// Adds a reading that is not older than the last, whatever its round trip hides of that.
    fn append(&mut self, taken: Taken, value: f64, window: Option<Window>) {
        let earliest = self
            .newest()
            .map_or(taken.earliest, |last| last.max(taken.earliest));
        let taken = Taken {
            earliest,
            latest: taken.latest.max(earliest),
        };
        self.ring.push_back((taken, value));
        match window {
            None => {
                while self.ring.len() > 1 {
                    self.ring.pop_front();
                }
            }
            Some(window) => {
                while self.ring.len() > RING
                    || self.ring.front().is_some_and(|(first, _)| {
                        earliest.saturating_duration_since(first.earliest) > window.length + SLACK
                    })
                {
                    self.ring.pop_front();
                }
            }
        }
    }

    /// The value at the newest reading, over readings not before `since`. `None` where there is none yet.
    pub(super) fn value(&self, window: Option<Window>, since: Option<Instant>) -> Option<f64> {
        let inside = |taken: &Taken| since.is_none_or(|since| taken.earliest >= since);
        let (newest, value) = self.ring.back().filter(|(newest, _)| inside(newest))?;
        let Some(window) = window else {
            return Some(*value);
        };
        let readings = self.ring.iter().filter(|(taken, _)| inside(taken));
        let values = readings.clone().map(|(_, value)| *value);
        match window.function {
            Function::Mean => {
                let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
                Some(sum / count)
            }
            Function::Max => values.reduce(f64::max),
            Function::Min => values.reduce(f64::min),
            Function::Rate => {
                let (first, _) = readings.clone().next()?;
                let span = newest.earliest.saturating_duration_since(first.earliest);
                let is_known = span > (first.doubt() + newest.doubt()) * SPAN_TO_DOUBT;
                // The growth of the first reading happened before it.
                let grown: f64 = values.skip(1).sum();
                is_known.then(|| grown / span.as_secs_f64())
            }
        }
    }
}

impl Taken {
    /// The same reading, seen through another round trip: it lies where both say.
    fn said_again(&mut self, again: Self) {
        self.earliest = self.earliest.max(again.earliest);
        self.latest = self.latest.min(again.latest).max(self.earliest);
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

    /// A reading `at` milliseconds after the start, or up to `round_trip` later.
    fn taken(start: Instant, at: u64, round_trip: u64) -> Taken {
        Taken::new(
            start + Duration::from_millis(at),
            Duration::from_millis(round_trip),
        )
    }

    #[test]
    fn the_same_reading_counts_once_and_old_ones_are_refused() {
        let start = Instant::now();
        let mean = window(15, Function::Mean);
        let mut cell = Cell::default();
        cell.push(taken(start, 0, 5), 10.0, true, mean);
        cell.push(taken(start, 40, 5), 10.0, true, mean);
        cell.push(taken(start, 2000, 5), 40.0, true, mean);
        assert!(close(cell.value(mean, None), 25.0));
        assert_eq!(
            cell.push(taken(start, 1000, 5), 99.0, true, mean),
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
        cell.count(taken(start, 0, 0), &[(1, 100.0), (2, 7.0)], rate);
        assert_eq!(cell.value(rate, None), None);
        cell.count(taken(start, 10_000, 0), &[(1, 130.0), (2, 7.0)], rate);
        assert!(close(cell.value(rate, None), 3.0));
        // Reset: it grew by what it shows.
        cell.count(taken(start, 20_000, 0), &[(1, 10.0), (2, 7.0), (3, 50.0)], rate);
        assert!(close(cell.value(rate, None), 2.0));
    }

    #[test]
    fn a_reading_said_again_through_slow_round_trips_counts_once() {
        let start = Instant::now();
        let mean = window(60, Function::Mean);
        let mut cell = Cell::default();
        cell.push(taken(start, 0, 5), 10.0, true, mean);
        // Read at 30.0 s. Answers of up to 900 ms make it look as old as 29.1 s.
        for (at, round_trip) in [(29_100, 900), (29_998, 4), (29_400, 700), (29_995, 10)] {
            cell.push(taken(start, at, round_trip), 40.0, true, mean);
        }
        assert!(
            close(cell.value(mean, None), 25.0),
            "{:?}",
            cell.value(mean, None)
        );
        let known = start + Duration::from_millis(29_998);
        assert_eq!(
            cell.newest(),
            Some(known),
            "as young as can be sure, never younger than it is"
        );
    }

    #[test]
    fn another_value_is_another_reading_however_close() {
        let start = Instant::now();
        let mean = window(60, Function::Mean);
        let mut cell = Cell::default();
        cell.push(taken(start, 0, 5), 10.0, true, mean);
        cell.push(taken(start, 60, 5), 30.0, true, mean);
        assert!(close(cell.value(mean, None), 20.0));
        // From another target, with a round trip that hides which came first: the held one stays.
        assert_eq!(
            cell.push(taken(start, 20, 500), 90.0, false, mean),
            Pushed::OutOfOrder
        );
        assert!(close(cell.value(mean, None), 20.0));
    }

    #[test]
    fn a_span_that_round_trips_blur_makes_no_rate() {
        let start = Instant::now();
        let rate = window(60, Function::Rate);
        let mut cell = Cell::default();
        cell.count(taken(start, 0, 5), &[(1, 0.0)], rate);
        // Read at 2 s; a slow answer makes it look like 1 s, and 50 a second like 100.
        cell.count(taken(start, 1000, 1000), &[(1, 100.0)], rate);
        assert_eq!(cell.value(rate, None), None);
        cell.count(taken(start, 10_000, 5), &[(1, 500.0)], rate);
        assert!(close(cell.value(rate, None), 50.0));
    }

    #[test]
    fn counters_whose_labels_come_and_go_do_not_pile_up() {
        let start = Instant::now();
        let rate = window(60, Function::Rate);
        let mut cell = Cell::default();
        for i in 0..1000 {
            cell.count(taken(start, i * 2000, 0), &[(1, 5.0), (i + 2, 1.0)], rate);
        }
        assert!(
            cell.counters.len() <= SPARE_COUNTERS + 2,
            "{}",
            cell.counters.len()
        );
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
                    cell.push(taken(start, at * 1000, 5), *value, true, window);
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
