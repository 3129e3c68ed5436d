//! Counters between two readings: rates, and totals that go on across wraps.
//!
//! Invariants: no rate is negative, none spans a reset, none exceeds what the hardware can carry; a continued total
//! never falls.

use std::time::{Duration, Instant};

use forewarm_nvml::{Bytes, BytesPerSecond, Gap, Number, Reading, Rejection};

/// Above every NVLink of 2026 (NVLink 5: 0.9 TB/s each way); a garbage counter jumps far higher.
const MOST_NVLINK: f64 = 2e12;
/// Above PCIe 6 x16 (0.126 TB/s each way).
const MOST_PCIE: f64 = 2.6e11;

/// A call that took more than this share of the window makes the window a guess: the counter may have been read at
/// either end of the call.
const UNSURE_SHARE: u32 = 5;

/// When a counter was read: somewhere between the moments before and after the call.
#[derive(Debug, Clone, Copy)]
pub(super) struct During {
    /// Just before the call.
    pub(super) before: Instant,
    /// Just after it.
    pub(super) after: Instant,
}

impl During {
    fn took(self) -> Duration {
        self.after.saturating_duration_since(self.before)
    }

    fn middle(self) -> Instant {
        self.before + self.took() / 2
    }
}

/// A byte counter seen at several moments.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rate {
    last: Option<(During, u64)>,
}

impl Rate {
    /// The mean rate since the reading before, where that is at most `longest` ago.
    pub(super) fn advance(&mut self, at: During, total: Bytes, longest: Duration) -> Reading<BytesPerSecond> {
        let total = total.get();
        let before = self.last.replace((at, total));
        let (then, was) = before.ok_or(Gap::NotYet)?;
        let window = at.middle().saturating_duration_since(then.middle());
        let unsure = at.took().max(then.took()).saturating_mul(UNSURE_SHARE);
        if window.is_zero() || window > longest || unsure > window {
            return Err(Gap::NotYet);
        }
        // A smaller total is a new start of the counter: nothing can be said of the time between.
        let grown = total.checked_sub(was).ok_or(Gap::NotYet)?;
        #[allow(clippy::cast_precision_loss, reason = "a rate needs no more than 53 bits")]
        let rate = grown as f64 / window.as_secs_f64();
        if rate > MOST_NVLINK {
            return Err(Gap::Rejected(Rejection::Implausible));
        }
        BytesPerSecond::new(rate)
    }

    /// Forgets the last reading, so that no rate spans a hole.
    pub(super) const fn forget(&mut self) {
        self.last = None;
    }
}

/// A device counter that wraps, continued as one that does not.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Continued {
    last: Option<(Instant, u64)>,
    total: u64,
}

impl Continued {
    /// The continued total after a reading of PCIe bytes.
    ///
    /// A fall of a 32-bit counter is a wrap; a fall of a wider one is a wrap only where the way over its end is one
    /// the bus can have gone in the time; else it is a new start.
    pub(super) fn advance(&mut self, at: Instant, number: Number) -> Reading<Bytes> {
        let value = number.unsigned()?;
        let grown = match self.last {
            None => value,
            Some((then, was)) => {
                let window = at.saturating_duration_since(then);
                let grown = growth(was, value, number.is_narrow());
                if !is_possible(grown, window) {
                    // Neither growth nor wrap: the counter began anew.
                    if value >= was {
                        return Err(Gap::Rejected(Rejection::Implausible));
                    }
                    self.last = Some((at, value));
                    self.total = self.total.saturating_add(value);
                    return Ok(Bytes::new(self.total));
                }
                grown
            }
        };
        self.last = Some((at, value));
        self.total = self.total.saturating_add(grown);
        Ok(Bytes::new(self.total))
    }
}

fn growth(was: u64, value: u64, is_narrow: bool) -> u64 {
    if value >= was {
        value - was
    } else if is_narrow || was <= u64::from(u32::MAX) {
        value + (1 << 32) - was
    } else {
        value.wrapping_sub(was)
    }
}

fn is_possible(grown: u64, window: Duration) -> bool {
    // A tick may be late, and the counter is read a little after the clock.
    let window = window.as_secs_f64() + 0.5;
    #[allow(
        clippy::cast_precision_loss,
        reason = "compared with a bound of the same coarseness"
    )]
    let grown = grown as f64;
    grown <= MOST_PCIE * window
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);
    const LONGEST: Duration = Duration::from_secs(30);

    fn moment(at: Instant) -> During {
        During {
            before: at,
            after: at,
        }
    }

    #[test]
    fn a_call_that_blocked_makes_no_rate_before_or_after_it() {
        let start = Instant::now();
        let mut rate = Rate::default();
        let at = |second: u32| start + second * SECOND;
        let mut read = |before, after, bytes| {
            let during = During {
                before: at(before),
                after: at(after),
            };
            rate.advance(during, Bytes::new(bytes), LONGEST)
                .map(BytesPerSecond::get)
        };
        // A steady 100 bytes a second; the second call comes back after five seconds.
        assert_eq!(read(0, 0, 0), Err(Gap::NotYet));
        assert_eq!(read(1, 6, 600), Err(Gap::NotYet), "not 600 bytes in one second");
        assert_eq!(read(7, 7, 700), Err(Gap::NotYet), "not 100 bytes in six seconds");
        assert_eq!(read(8, 8, 800), Ok(100.0));
    }

    #[test]
    fn a_rate_over_a_long_pause_is_not_told_as_the_present_one() {
        let start = Instant::now();
        let mut rate = Rate::default();
        let _ = rate.advance(moment(start), Bytes::new(0), 3 * SECOND);
        let late = rate.advance(moment(start + 4 * SECOND), Bytes::new(400), 3 * SECOND);
        assert_eq!(late, Err(Gap::NotYet));
        let next = rate.advance(moment(start + 5 * SECOND), Bytes::new(500), 3 * SECOND);
        assert_eq!(next.map(BytesPerSecond::get), Ok(100.0));
    }

    #[test]
    fn a_rate_needs_two_readings() {
        let start = Instant::now();
        let mut rate = Rate::default();
        assert_eq!(
            rate.advance(moment(start), Bytes::new(100), LONGEST),
            Err(Gap::NotYet)
        );
        assert_eq!(
            rate.advance(moment(start + 2 * SECOND), Bytes::new(300), LONGEST)
                .map(BytesPerSecond::get),
            Ok(100.0)
        );
    }

    #[test]
    fn a_reset_counter_gives_no_rate_once() {
        let start = Instant::now();
        let mut rate = Rate::default();
        let _ = rate.advance(moment(start), Bytes::new(1_000_000), LONGEST);
        assert_eq!(
            rate.advance(moment(start + SECOND), Bytes::new(10), LONGEST),
            Err(Gap::NotYet)
        );
        assert_eq!(
            rate.advance(moment(start + 2 * SECOND), Bytes::new(20), LONGEST)
                .map(BytesPerSecond::get),
            Ok(10.0)
        );
    }

    #[test]
    fn a_jump_no_link_can_make_is_rejected() {
        let start = Instant::now();
        let mut rate = Rate::default();
        let _ = rate.advance(moment(start), Bytes::new(0), LONGEST);
        assert_eq!(
            rate.advance(moment(start + SECOND), Bytes::new(1 << 60), LONGEST),
            Err(Gap::Rejected(Rejection::Implausible))
        );
    }

    proptest! {
        #[test]
        fn rates_are_never_negative_or_huge(steps in proptest::collection::vec((1_u64..5_000, any::<u64>()), 1..40)) {
            let mut rate = Rate::default();
            let mut now = Instant::now();
            for (wait, total) in steps {
                now += Duration::from_millis(wait);
                if let Ok(rate) = rate.advance(moment(now), Bytes::new(total), LONGEST) {
                    prop_assert!((0.0..=MOST_NVLINK).contains(&rate.get()));
                }
            }
        }

        #[test]
        fn a_narrow_counter_continues_exactly_across_wraps(grows in proptest::collection::vec(0_u64..4_000_000_000, 1..60)) {
            let mut continued = Continued::default();
            let mut now = Instant::now();
            let mut raw: u64 = 0;
            let mut truth: u64 = 0;
            let _ = continued.advance(now, Number::U32(0));
            for grow in grows {
                now += SECOND;
                truth += grow;
                raw = (raw + grow) % (1 << 32);
                let number = Number::U32(u32::try_from(raw).unwrap());
                match continued.advance(now, number) {
                    Ok(total) => prop_assert_eq!(total.get(), truth),
                    // The two blanks of a 32-bit value: no reading, and the next one catches up unless it wrapped.
                    Err(Gap::Rejected(Rejection::Sentinel)) => return Ok(()),
                    Err(gap) => prop_assert!(false, "{gap}"),
                }
            }
        }

        #[test]
        fn a_continued_total_never_falls(values in proptest::collection::vec(any::<u64>(), 1..60)) {
            let mut continued = Continued::default();
            let mut now = Instant::now();
            let mut last = 0;
            for value in values {
                now += SECOND;
                if let Ok(total) = continued.advance(now, Number::U64(value)) {
                    prop_assert!(total.get() >= last);
                    last = total.get();
                }
            }
        }
    }

    #[test]
    fn a_wide_counter_that_starts_anew_goes_on_from_there() {
        let start = Instant::now();
        let mut continued = Continued::default();
        let _ = continued.advance(start, Number::U64(1 << 50));
        let total = continued.advance(start + SECOND, Number::U64(7)).unwrap();
        assert_eq!(total.get(), (1 << 50) + 7);
    }
}
