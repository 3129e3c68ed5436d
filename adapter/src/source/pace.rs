//! When to scrape a target next. Pure.
//!
//! Invariants: the mean time between scrapes is the interval; a target that tells how old its readings are is
//! met just after its tick, so that a value has waited as little as can be when it arrives.

use std::time::Duration;

/// How long after a tick to arrive: time for the target to publish what it read.
const AFTER_TICK: Duration = Duration::from_millis(50);
/// How much later to arrive after having come too early.
const LATER: Duration = Duration::from_millis(25);
/// Latest arrival after a tick.
const LATEST: Duration = Duration::from_millis(300);

/// How fast a late arrival creeps back, each scrape: slowly, because coming too early costs a whole tick.
const CREEP: Duration = Duration::from_micros(100);

/// The rhythm of one target.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    interval: Duration,
    after_tick: Duration,
    is_aimed: bool,
}

impl Pace {
    pub(super) fn new(interval: Duration) -> Self {
        Self {
            interval,
            after_tick: AFTER_TICK,
            is_aimed: false,
        }
    }

    /// Time from this scrape to the next, when its youngest reading was `youngest` old.
    pub(super) fn next(&mut self, youngest: Option<Duration>) -> Duration {
        // Without ages, or from a target that reads rarely or is stuck, there is no tick to follow.
        let Some(age) = youngest.filter(|age| *age < self.interval * 2) else {
            self.is_aimed = false;
            return self.interval;
        };
        if self.is_aimed && age > self.interval / 4 {
            // We aimed just after a tick and met the reading before: it was not published yet.
            self.after_tick = (self.after_tick + LATER).min(LATEST);
        } else {
            self.after_tick = self.after_tick.saturating_sub(CREEP).max(AFTER_TICK);
        }
        let delay = (self.interval + self.after_tick).saturating_sub(age);
        let legal = self.interval / 2..=self.interval + self.interval / 4;
        self.is_aimed = legal.contains(&delay);
        delay.clamp(*legal.start(), *legal.end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const INTERVAL: Duration = Duration::from_secs(2);

    /// A target that reads each `tick` and publishes `lag` later, seen from time zero.
    fn age_at(now: Duration, tick: Duration, phase: Duration, lag: Duration) -> Duration {
        let since = (now + tick * 2 - phase).saturating_sub(lag).as_nanos() % tick.as_nanos();
        Duration::from_nanos(u64::try_from(since).unwrap()) + lag
    }

    #[test]
    fn a_target_without_ages_is_met_each_interval() {
        let mut pace = Pace::new(INTERVAL);
        assert_eq!(pace.next(None), INTERVAL);
        assert_eq!(pace.next(Some(Duration::from_secs(30))), INTERVAL);
    }

    proptest! {
        #[test]
        fn it_falls_in_step_with_any_phase(phase in 0_u64..1000, lag in 0_u64..45, tick in prop_oneof![Just(1000_u64), Just(2000), Just(500)]) {
            let (phase, lag, tick) = (Duration::from_millis(phase % tick), Duration::from_millis(lag), Duration::from_millis(tick));
            let mut pace = Pace::new(INTERVAL);
            let mut now = Duration::from_secs(10);
            let mut ages = Vec::new();
            for _ in 0..20 {
                let age = age_at(now, tick, phase, lag);
                ages.push(age);
                now += pace.next(Some(age));
            }
            for age in &ages[6..] {
                prop_assert!(*age <= Duration::from_millis(110), "{ages:?}");
            }
        }

        #[test]
        fn a_slow_publisher_is_met_after_it_published(lag in 50_u64..200) {
            let (tick, lag) = (Duration::from_secs(1), Duration::from_millis(lag));
            let mut pace = Pace::new(INTERVAL);
            let mut now = Duration::from_millis(10_300);
            let mut last = Duration::ZERO;
            for _ in 0..40 {
                last = age_at(now, tick, Duration::ZERO, lag);
                now += pace.next(Some(last));
            }
            prop_assert!(last <= Duration::from_millis(350), "{last:?}");
        }
    }
}
