//! Samples late, twice, of the dead, under set clocks; the driver simulated by what it shows each second.

use std::collections::BTreeMap;

use forewarm_nvml::Rejection;
use proptest::prelude::*;

use super::*;

const SECOND_US: u64 = 1_000_000;
/// Some moment, far from both ends.
const EPOCH_US: u64 = 1_800_000_000 * SECOND_US;

fn ratio(percent: f64) -> Ratio {
    Ratio::from_percent(percent).unwrap()
}

fn sample(pid: u32, at_us: u64, percent: f64) -> Sample {
    Sample {
        pid,
        at_us,
        busy: Ratio::from_percent(percent),
        memory_bandwidth: Err(Gap::Unsupported),
    }
}

/// A machine that has been up for 1000 s, and its clocks after some seconds.
struct Machine {
    start: Instant,
}

impl Machine {
    fn new() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    fn after(&self, seconds: f64) -> Moment {
        let passed = Duration::from_secs_f64(seconds);
        Moment {
            now: self.start + passed,
            wall_us: EPOCH_US + micros(passed),
            uptime: Some(Duration::from_secs(1000) + passed),
        }
    }
}

fn at_us(seconds: f64) -> u64 {
    EPOCH_US.saturating_add_signed((seconds * 1e6) as i64)
}

fn ticks(seconds: f64) -> u64 {
    ((1000.0 + seconds) * 100.0) as u64
}

fn old(_: u32) -> Life {
    Life::Since(1)
}

fn busy(tracked: &Tracked) -> Vec<(u32, f64)> {
    let mut busy: Vec<_> = tracked
        .samples
        .iter()
        .map(|sample| (sample.pid, sample.busy.get()))
        .collect();
    busy.sort_by_key(|(pid, _)| *pid);
    busy
}

#[test]
fn the_newest_sample_of_each_pid_counts_and_carries_its_time() {
    let (machine, mut tracker) = (Machine::new(), Tracker::default());
    let samples = [
        sample(1, at_us(9.0), 50.0),
        sample(1, at_us(8.0), 90.0),
        sample(2, at_us(1.0), 30.0),
    ];
    let tracked = tracker.advance(machine.after(10.0), [1, 2, 3], &samples, old);
    assert_eq!(busy(&tracked), [(1, 0.5), (2, 0.3)]);
    let of = |pid| tracked.samples.iter().find(|sample| sample.pid == pid).unwrap();
    assert_eq!(of(1).at, machine.after(9.0).now);
    assert_eq!(of(2).at, machine.after(1.0).now, "nine seconds late");
    assert_eq!(tracked.processes.len(), 3);

    // An older or equal one changes nothing; the sample ages.
    let again = [sample(1, at_us(9.0), 99.0), sample(1, at_us(8.5), 99.0)];
    let tracked = tracker.advance(machine.after(12.0), [1, 2, 3], &again, old);
    assert_eq!(busy(&tracked), [(1, 0.5), (2, 0.3)]);
    // Each goes when it is too old.
    let tracked = tracker.advance(machine.after(21.5), [1, 2, 3], &[], old);
    assert_eq!(busy(&tracked), [(1, 0.5)]);
}

#[test]
fn a_process_that_ended_is_gone_at_once_though_the_driver_still_tells_of_it() {
    let (machine, mut tracker) = (Machine::new(), Tracker::default());
    let samples = [sample(1, at_us(9.0), 50.0), sample(2, at_us(9.0), 30.0)];
    let _ = tracker.advance(machine.after(10.0), [1, 2], &samples, old);
    let tracked = tracker.advance(machine.after(11.0), [1, 2], &samples, |pid| match pid {
        1 => Life::Gone,
        _ => Life::Since(1),
    });
    assert_eq!(busy(&tracked), [(2, 0.3)]);
    assert!(tracked.processes.iter().all(|known| known.pid == 2));
    assert!(tracked.dropped.is_empty(), "that is no fault");
}

#[test]
fn a_pid_that_is_used_again_does_not_inherit_samples() {
    let (machine, mut tracker) = (Machine::new(), Tracker::default());
    let first = [sample(1, at_us(9.0), 50.0)];
    let tracked = tracker.advance(machine.after(10.0), [1], &first, old);
    assert_eq!(busy(&tracked), [(1, 0.5)]);
    // Process 1 ended at 10.5 with a sample at 10.4 that comes late; another one has its id since 11.
    let late = [sample(1, at_us(10.4), 60.0)];
    let second = |_| Life::Since(ticks(11.0));
    let tracked = tracker.advance(machine.after(12.0), [1], &late, second);
    assert_eq!(busy(&tracked), []);
    assert_eq!(tracked.dropped, [Drop::EarlierProcess]);
    assert_eq!(tracked.processes[0].since, machine.after(12.0).now);
    let tracked = tracker.advance(machine.after(13.0), [1], &late, second);
    assert!(tracked.dropped.is_empty(), "counted once");
    let own = [sample(1, at_us(12.5), 70.0)];
    let tracked = tracker.advance(machine.after(14.0), [1], &own, second);
    assert_eq!(busy(&tracked), [(1, 0.7)]);
    assert_eq!(tracked.samples[0].start_ticks, Some(ticks(11.0)));
}

#[test]
fn without_the_hosts_proc_samples_stand_by_age_alone_and_name_no_process() {
    let (machine, mut tracker) = (Machine::new(), Tracker::default());
    let unknown = |_| Life::Unknown;
    let samples = [sample(1, at_us(9.0), 50.0)];
    let tracked = tracker.advance(machine.after(10.0), [], &samples, unknown);
    assert_eq!(tracked.samples[0].start_ticks, None);
    let tracked = tracker.advance(machine.after(29.0), [], &samples, unknown);
    assert_eq!(busy(&tracked), [(1, 0.5)]);
    let tracked = tracker.advance(machine.after(29.1), [], &samples, unknown);
    assert_eq!(busy(&tracked), []);
    let tracked = tracker.advance(machine.after(31.0), [], &[], unknown);
    assert!(tracked.processes.is_empty());
}

#[test]
fn shares_that_cannot_be_are_told_once_and_do_not_replace_a_good_one() {
    let (machine, mut tracker) = (Machine::new(), Tracker::default());
    let _ = tracker.advance(machine.after(1.0), [1], &[sample(1, at_us(0.5), 50.0)], old);
    let garbage = [sample(1, at_us(1.5), 129.0)];
    let tracked = tracker.advance(machine.after(2.0), [1], &garbage, old);
    assert_eq!(tracked.rejected, [Gap::Rejected(Rejection::AboveFull)]);
    assert_eq!(busy(&tracked), [(1, 0.5)]);
    let tracked = tracker.advance(machine.after(3.0), [1], &garbage, old);
    assert!(tracked.rejected.is_empty());
}

#[test]
fn pids_are_bounded() {
    let (machine, mut tracker) = (Machine::new(), Tracker::default());
    let many = 0..u32::try_from(MOST_PIDS).unwrap() + 3;
    let tracked = tracker.advance(machine.after(1.0), many, &[], old);
    assert_eq!(tracked.processes.len(), MOST_PIDS);
    assert_eq!(tracked.dropped, [Drop::TooMany; 3]);
    let tracked = tracker.advance(machine.after(2.0), [], &[], |_| Life::Gone);
    assert!(tracked.processes.is_empty(), "room again");
}

/// The driver's view after the wall clock was set by so many seconds at second 10.
fn set(machine: &Machine, seconds: f64, step: f64) -> Moment {
    let mut moment = machine.after(seconds);
    moment.wall_us = moment.wall_us.saturating_add_signed((step * 1e6) as i64);
    moment
}

#[test]
fn a_clock_that_is_set_never_makes_a_sample_younger_and_is_overcome() {
    for step in [3600.0, 8.0, -3.0, -3600.0] {
        let (machine, mut tracker) = (Machine::new(), Tracker::default());
        let before = [sample(1, at_us(9.0), 50.0), sample(2, at_us(2.0), 30.0)];
        let tracked = tracker.advance(machine.after(10.0), [1, 2], &before, old);
        assert_eq!(busy(&tracked).len(), 2, "{step}");
        // The ring still holds stamps of the old clock: the same ones, and one that was late.
        let ring = [before[0], before[1], sample(2, at_us(8.0), 40.0)];
        let tracked = tracker.advance(set(&machine, 11.0, step), [1, 2], &ring, old);
        for taken in &tracked.samples {
            let truth = if taken.busy == ratio(50.0) {
                9.0
            } else if taken.busy == ratio(30.0) {
                2.0
            } else {
                8.0
            };
            assert!(taken.at <= machine.after(truth).now, "{step}: {taken:?}");
        }
        // Samples of the new clock are taken again, after a small step back once the clock has caught up.
        let later = 16.0;
        let fresh = [sample(1, at_us(later - 0.5 + step), 60.0)];
        let tracked = tracker.advance(set(&machine, later, step), [1, 2], &fresh, old);
        assert!(busy(&tracked).contains(&(1, 0.6)), "{step}: {tracked:?}");
        let age =
            machine.after(later).now - tracked.samples.iter().find(|sample| sample.pid == 1).unwrap().at;
        assert!((age.as_secs_f64() - 0.5).abs() < 0.01, "{step}: {age:?}");
    }
}

/// A process of the simulated node.
#[derive(Debug, Clone)]
struct Truth {
    pid: u32,
    percent: f64,
    lag: f64,
    phase: f64,
    from: f64,
    until: f64,
}

impl Truth {
    /// The newest sample that the driver shows at a moment: taken each second, shown after the lag.
    fn shown(&self, now: f64) -> Option<Sample> {
        let visible = (now - self.lag).min(self.until);
        let taken = (visible - self.phase).floor() + self.phase;
        // Drivers tell whole percents, and not the same one each time.
        let noise = if (taken as i64) % 2 == 0 { 1.0 } else { -1.0 };
        (taken > self.from && taken < self.until)
            .then(|| sample(self.pid, at_us(taken), (self.percent + noise).round()))
    }

    fn lives(&self, now: f64) -> bool {
        (self.from..self.until).contains(&now)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Three pods at 50, 30 and 10 %, each as late as a driver may be; the third ends and a fourth gets its pid.
    #[test]
    fn each_process_has_its_own_share_however_late_and_one_that_ended_has_none(
        lags in proptest::array::uniform4(0.0_f64..10.0),
        phases in proptest::array::uniform4(0.0_f64..1.0),
        ends in 15.0_f64..25.0,
        pause in 0.05_f64..3.0,
    ) {
        let of = |n: usize, pid, percent, from, until| Truth { pid, percent, lag: lags[n], phase: phases[n], from, until };
        let truths = [
            of(0, 11, 50.0, -500.0, 1000.0),
            of(1, 12, 30.0, -500.0, 1000.0),
            of(2, 13, 10.0, -500.0, ends),
            of(3, 13, 70.0, ends + pause, 1000.0),
        ];
        let (machine, mut tracker) = (Machine::new(), Tracker::default());
        for tick in 0..60_i32 {
            let now = f64::from(tick);
            let moment = machine.after(now);
            let since_us = Tracker::since_us(moment);
            // One answer per pid: the newest, of whichever process.
            let mut shown: BTreeMap<u32, Sample> = BTreeMap::new();
            for sample in truths.iter().filter_map(|truth| truth.shown(now)).filter(|s| s.at_us > since_us) {
                shown.entry(sample.pid).and_modify(|known| if sample.at_us > known.at_us { *known = sample }).or_insert(sample);
            }
            let shown: Vec<_> = shown.into_values().collect();
            let living = |pid| truths.iter().find(|truth| truth.pid == pid && truth.lives(now));
            let listed: Vec<_> = truths.iter().filter(|truth| truth.lives(now)).map(|truth| truth.pid).collect();
            let life = |pid| living(pid).map_or(Life::Gone, |truth| Life::Since(ticks(truth.from)));
            let tracked = tracker.advance(moment, listed, &shown, life);

            for taken in &tracked.samples {
                let truth = living(taken.pid).expect("no value of a process that ended");
                prop_assert!((taken.busy.get() * 100.0 - truth.percent).abs() <= 2.0, "at {now}: {taken:?} of {truth:?}");
                prop_assert_eq!(taken.start_ticks, Some(ticks(truth.from)));
                prop_assert!(moment.now.saturating_duration_since(taken.at) <= OLDEST);
            }
            for truth in truths.iter().filter(|truth| truth.lives(now) && now > truth.from + truth.lag + 2.0) {
                prop_assert!(tracked.samples.iter().any(|taken| taken.pid == truth.pid), "at {now}: {truth:?} is missing");
            }
        }
    }
}
