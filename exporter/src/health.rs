//! Why a GPU is not in perfect health: windows over readings, pure.
//!
//! Purpose: turn readings into the reasons that `signals::health` weighs.
//! Inputs: one [`Observation`] per evaluation, with its own clock.
//! Invariants: no I/O and no clock of its own; memory is bounded; what a device does not tell is no complaint.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use forewarm_nvml::RemappedRows;
use forewarm_signals::health::Reason;

/// How long an Xid that points to hardware counts.
const XID_WINDOW: Duration = Duration::from_secs(3600);
/// How long growing NVLink errors count.
const LINK_ERROR_WINDOW: Duration = Duration::from_secs(600);
/// Over which time hardware slowdown is judged.
const SLOWDOWN_WINDOW: Duration = Duration::from_secs(300);
/// Share of that time from which slowdown is a complaint.
const SLOWDOWN_SHARE: f64 = 0.1;
/// Entries of the slowdown window: one a medium tier, with room for short intervals.
const SLOWDOWN_ENTRIES: usize = 64;

/// What is known of a device at one moment. `None`: not told.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Observation {
    /// NVML's recovery action.
    pub recovery_action: Option<u64>,
    /// Remapped rows.
    pub rows: Option<RemappedRows>,
    /// Uncorrected ECC errors since the driver was loaded.
    pub uncorrected_volatile: Option<u64>,
    /// When an Xid last pointed to hardware.
    pub last_hardware_xid: Option<Instant>,
    /// Links that are up.
    pub links_up: Option<u32>,
    /// Links that are expected to be up: all of them, where the fabric is complete.
    pub links_expected: Option<u32>,
    /// NVLink errors of all kinds.
    pub link_errors: Option<u64>,
    /// Time in which hardware held clocks down, a counter.
    pub hardware_slowdown: Option<Duration>,
}

/// What the windows remember of one device.
#[derive(Debug, Default)]
pub struct Windows {
    most_links_up: u32,
    link_errors: Option<u64>,
    link_errors_grew: Option<Instant>,
    slowdown: VecDeque<(Instant, Duration)>,
}

impl Windows {
    /// The reasons that hold at `now`, in the order of [`Reason::ALL`].
    pub fn advance(&mut self, now: Instant, seen: &Observation) -> Vec<Reason> {
        let mut reasons = Vec::new();
        match seen.recovery_action {
            Some(1 | 2 | 4) => reasons.push(Reason::RecoveryNeeded),
            Some(3 | 5) => reasons.push(Reason::RecoveryPeers),
            _ => {}
        }
        if seen.rows.is_some_and(|rows| rows.failed) {
            reasons.push(Reason::RowRemapFailure);
        }
        if seen.rows.is_some_and(|rows| rows.pending) {
            reasons.push(Reason::RowRemapPending);
        }
        if seen.uncorrected_volatile.is_some_and(|count| count > 0) {
            reasons.push(Reason::EccUncorrected);
        }
        if seen
            .last_hardware_xid
            .is_some_and(|at| is_within(now, at, XID_WINDOW))
        {
            reasons.push(Reason::XidHardware);
        }
        if self.is_link_down(seen) {
            reasons.push(Reason::NvlinkDown);
        }
        if self.did_link_errors_grow(now, seen.link_errors) {
            reasons.push(Reason::NvlinkErrors);
        }
        if self.is_slowed_down(now, seen.hardware_slowdown) {
            reasons.push(Reason::HardwareSlowdown);
        }
        reasons
    }

    /// Down means fewer than were up before, or fewer than a complete fabric has. A board whose links were never
    /// bridged is not broken.
    fn is_link_down(&mut self, seen: &Observation) -> bool {
        let Some(up) = seen.links_up else { return false };
        self.most_links_up = self.most_links_up.max(up);
        up < self.most_links_up.max(seen.links_expected.unwrap_or(0))
    }

    fn did_link_errors_grow(&mut self, now: Instant, errors: Option<u64>) -> bool {
        if let Some(errors) = errors {
            if self.link_errors.is_some_and(|before| errors > before) {
                self.link_errors_grew = Some(now);
            }
            self.link_errors = Some(errors);
        }
        self.link_errors_grew
            .is_some_and(|at| is_within(now, at, LINK_ERROR_WINDOW))
    }

    fn is_slowed_down(&mut self, now: Instant, total: Option<Duration>) -> bool {
        if let Some(total) = total {
            if self.slowdown.back().is_some_and(|(_, before)| *before > total) {
                self.slowdown.clear(); // the driver was loaded anew
            }
            let spacing = SLOWDOWN_WINDOW / u32::try_from(SLOWDOWN_ENTRIES).unwrap_or(1);
            // The newest entry is provisional until it lies far enough from the one before.
            let mut newest = self.slowdown.iter().rev().map(|(at, _)| *at);
            if let (Some(last), Some(before)) = (newest.next(), newest.next())
                && last.saturating_duration_since(before) < spacing
            {
                self.slowdown.pop_back();
            }
            self.slowdown.push_back((now, total));
        }
        while self.slowdown.len() > 1
            && self
                .slowdown
                .front()
                .is_some_and(|(at, _)| !is_within(now, *at, SLOWDOWN_WINDOW))
        {
            self.slowdown.pop_front();
        }
        let (Some((_, oldest)), Some((_, newest))) = (self.slowdown.front(), self.slowdown.back()) else {
            return false;
        };
        newest.saturating_sub(*oldest) > SLOWDOWN_WINDOW.mul_f64(SLOWDOWN_SHARE)
    }
}

fn is_within(now: Instant, at: Instant, window: Duration) -> bool {
    now.saturating_duration_since(at) <= window
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn reasons(seen: &Observation) -> Vec<Reason> {
        Windows::default().advance(Instant::now(), seen)
    }

    #[test]
    fn what_is_not_told_is_no_complaint() {
        assert!(reasons(&Observation::default()).is_empty());
    }

    #[test]
    fn the_drivers_advice_is_a_reason() {
        for (action, reason) in [
            (1, Some(Reason::RecoveryNeeded)),
            (2, Some(Reason::RecoveryNeeded)),
            (4, Some(Reason::RecoveryNeeded)),
            (3, Some(Reason::RecoveryPeers)),
            (5, Some(Reason::RecoveryPeers)),
            (0, None),
        ] {
            let seen = Observation {
                recovery_action: Some(action),
                ..Default::default()
            };
            assert_eq!(reasons(&seen), reason.into_iter().collect::<Vec<_>>(), "{action}");
        }
    }

    #[test]
    fn a_hardware_xid_counts_for_an_hour() {
        let start = Instant::now();
        let seen = Observation {
            last_hardware_xid: Some(start),
            ..Default::default()
        };
        let mut windows = Windows::default();
        assert_eq!(windows.advance(start + XID_WINDOW, &seen), [Reason::XidHardware]);
        assert!(windows.advance(start + XID_WINDOW + SECOND, &seen).is_empty());
    }

    #[test]
    fn links_that_were_never_up_are_not_down() {
        let mut windows = Windows::default();
        let now = Instant::now();
        let up = |links_up, links_expected| Observation {
            links_up: Some(links_up),
            links_expected,
            ..Default::default()
        };
        assert!(windows.advance(now, &up(0, None)).is_empty());
        assert!(windows.advance(now, &up(12, None)).is_empty());
        assert_eq!(windows.advance(now, &up(11, None)), [Reason::NvlinkDown]);
        assert!(windows.advance(now, &up(12, None)).is_empty());
        assert_eq!(
            Windows::default().advance(now, &up(17, Some(18))),
            [Reason::NvlinkDown],
            "a complete fabric has all links"
        );
    }

    #[test]
    fn link_errors_count_while_they_grow_and_ten_minutes_on() {
        let start = Instant::now();
        let mut windows = Windows::default();
        let errors = |count| Observation {
            link_errors: Some(count),
            ..Default::default()
        };
        assert!(
            windows.advance(start, &errors(5)).is_empty(),
            "old errors are history"
        );
        assert_eq!(
            windows.advance(start + SECOND, &errors(6)),
            [Reason::NvlinkErrors]
        );
        assert_eq!(
            windows.advance(start + SECOND + LINK_ERROR_WINDOW, &errors(6)),
            [Reason::NvlinkErrors]
        );
        assert!(
            windows
                .advance(start + 2 * SECOND + LINK_ERROR_WINDOW, &errors(6))
                .is_empty()
        );
        assert!(
            windows
                .advance(start + 3 * SECOND + LINK_ERROR_WINDOW, &errors(0))
                .is_empty(),
            "a reset is no growth"
        );
    }

    #[test]
    fn slowdown_counts_above_a_tenth_of_five_minutes() {
        let start = Instant::now();
        let mut windows = Windows::default();
        let mut held = Duration::ZERO;
        let mut first = None;
        for second in 0..300 {
            held += SECOND / 5;
            let seen = Observation {
                hardware_slowdown: Some(held),
                ..Default::default()
            };
            if !windows.advance(start + second * SECOND, &seen).is_empty() && first.is_none() {
                first = Some(second);
            }
        }
        let first = first.unwrap();
        assert!(
            (149..=156).contains(&first),
            "a fifth of the time passes 30 s after 150 s, not {first}"
        );
        let calm = Observation {
            hardware_slowdown: Some(held),
            ..Default::default()
        };
        let mut last = None;
        for second in 300..900 {
            if !windows.advance(start + second * SECOND, &calm).is_empty() {
                last = Some(second);
            }
        }
        let last = last.unwrap();
        assert!((440..=460).contains(&last), "{last}");
        assert!(windows.slowdown.len() <= SLOWDOWN_ENTRIES + 2);
    }

    proptest! {
        #[test]
        fn a_device_that_holds_no_clocks_down_is_never_slowed(gaps in proptest::collection::vec(1_u64..100, 1..80)) {
            let mut windows = Windows::default();
            let mut now = Instant::now();
            for gap in gaps {
                now += Duration::from_secs(gap);
                let seen = Observation { hardware_slowdown: Some(7 * SECOND), ..Default::default() };
                prop_assert!(windows.advance(now, &seen).is_empty());
            }
        }
    }
}
