//! Samples of processes, which come late and each at its own time: the newest of each process that lives.
//!
//! Purpose: turn what one GPU's driver answers each tick into the present sample of each process.
//! Inputs: the processes listed, samples with the driver's wall-clock times, and what `/proc` says of a pid.
//! Invariants: pure; the clocks are arguments. A sample is taken once, and only if it is newer than the last of its
//! pid; it goes when it is too old, and at once when its process has ended. One from before the start of the process
//! that has the pid now is an earlier process's and is dropped. A wall clock that is set makes samples absent or older
//! than they are, never younger. Everything is bounded, and what is dropped is counted.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use forewarm_nvml::{Gap, Ratio, Reading};

use super::proc;

/// A sample is withdrawn at this age; adapters trust readings of processes as long by default. Drivers are late by up
/// to 10 s.
pub const OLDEST: Duration = Duration::from_secs(20);
/// A process that has been named for so long without a sample had none to give: it was idle. Drivers sample only
/// processes that use an engine.
pub const LATEST: Duration = Duration::from_secs(10);
/// 64 processes in each of 64 shares.
const MOST_PIDS: usize = 4_096;
/// Reading two clocks is not one moment.
const AHEAD: Duration = Duration::from_millis(250);
/// A start is told in hundredths of a second.
const START_PRECISION: Duration = Duration::from_millis(20);
/// A clock that is slewed is off by less between two ticks.
const STEP_US: i64 = 500_000;

/// One moment in the three clocks that matter.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    /// The program's clock.
    pub now: Instant,
    /// The driver's clock: microseconds since the epoch.
    pub wall_us: u64,
    /// The clock of process starts; absent where `/proc` does not tell.
    pub uptime: Option<Duration>,
}

/// A sample as the driver tells it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Process id.
    pub pid: u32,
    /// When it was taken: the driver's wall clock, microseconds since the epoch.
    pub at_us: u64,
    /// Share of time with a kernel of this process resident.
    pub busy: Reading<Ratio>,
    /// Share of time in which it used memory.
    pub memory_bandwidth: Reading<Ratio>,
}

/// What `/proc` says of a pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// Nothing: it is not the host's, or cannot be read.
    Unknown,
    /// There is no such process.
    Gone,
    /// A process that started then: field 22 of its `stat`.
    Since(u64),
}

/// The present sample of a process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimedSample {
    /// Process id, as the driver names it.
    pub pid: u32,
    /// Start of the process that it is of; absent where `/proc` does not tell.
    pub start_ticks: Option<u64>,
    /// When the driver took it.
    pub at: Instant,
    /// Share of time with a kernel of this process resident.
    pub busy: Ratio,
    /// Share of time in which it used memory.
    pub memory_bandwidth: Option<Ratio>,
}

/// A process on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    /// Process id, as the driver names it.
    pub pid: u32,
    /// Its start; absent where `/proc` does not tell.
    pub start_ticks: Option<u64>,
    /// Since when it has been named without a break.
    pub since: Instant,
}

/// Why a sample was dropped. The value of label `reason` of `forewarm_exporter_process_samples_dropped_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Drop {
    /// More processes than are kept.
    TooMany,
    /// It is of an earlier process of this pid.
    EarlierProcess,
    /// The wall clock was set, so that its time says nothing.
    ClockSet,
}

impl Drop {
    /// Every reason.
    pub const ALL: [Self; 3] = [Self::TooMany, Self::EarlierProcess, Self::ClockSet];

    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TooMany => "too-many",
            Self::EarlierProcess => "earlier-process",
            Self::ClockSet => "clock-set",
        }
    }
}

/// What a tick came to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tracked {
    /// The present sample of each process that has one.
    pub samples: Vec<TimedSample>,
    /// Every process that was named lately and has not ended.
    pub processes: Vec<Known>,
    /// Shares that the driver gave and that cannot be true, each once.
    pub rejected: Vec<Gap>,
    /// Samples that were dropped in this tick.
    pub dropped: Vec<Drop>,
}

#[derive(Debug)]
struct Entry {
    start_ticks: Option<u64>,
    since: Instant,
    named_at: Instant,
    /// Time of the newest sample seen, in today's wall clock.
    last_us: Option<u64>,
    sample: Option<TimedSample>,
}

/// The processes of one GPU.
#[derive(Debug, Default)]
pub struct Tracker {
    entries: HashMap<u32, Entry>,
    clock: Option<Clock>,
}

/// How wall clock and program clock stood to each other.
#[derive(Debug, Clone, Copy)]
struct Clock {
    at: Moment,
    /// Samples stamped until then may be from before the clock was set back.
    doubtful_until_us: u64,
}

impl Tracker {
    /// Samples from before this are not asked for. Not a look-back of a second or two: that would never see a process
    /// whose samples are later than that.
    #[must_use]
    pub fn since_us(moment: Moment) -> u64 {
        moment.wall_us.saturating_sub(micros(OLDEST))
    }

    /// Takes in what the driver answered at `moment`: pids that it lists, and samples. `life` is asked once for each.
    pub fn advance(
        &mut self,
        moment: Moment,
        listed: impl IntoIterator<Item = u32>,
        samples: &[Sample],
        mut life: impl FnMut(u32) -> Life,
    ) -> Tracked {
        self.follow_clock(moment);
        let mut tracked = Tracked::default();
        for pid in listed {
            self.name(pid, moment.now, &mut tracked);
        }
        for sample in samples {
            if self.is_news(sample) {
                self.name(sample.pid, moment.now, &mut tracked);
            }
        }
        self.entries.retain(|pid, entry| {
            moment.now.saturating_duration_since(entry.named_at) <= OLDEST
                && entry.lives(life(*pid), moment.now)
        });
        for sample in samples {
            self.take(sample, moment, &mut tracked);
        }
        for (pid, entry) in &mut self.entries {
            entry.sample = entry
                .sample
                .filter(|sample| moment.now.saturating_duration_since(sample.at) <= OLDEST);
            tracked.samples.extend(entry.sample);
            tracked.processes.push(Known {
                pid: *pid,
                start_ticks: entry.start_ticks,
                since: entry.since,
            });
        }
        tracked
    }

    fn is_news(&self, sample: &Sample) -> bool {
        let last_us = self.entries.get(&sample.pid).and_then(|entry| entry.last_us);
        last_us.is_none_or(|last_us| sample.at_us > last_us)
    }

    fn name(&mut self, pid: u32, now: Instant, tracked: &mut Tracked) {
        if let Some(entry) = self.entries.get_mut(&pid) {
            entry.named_at = now;
        } else if self.entries.len() < MOST_PIDS {
            self.entries.insert(pid, Entry::new(now));
        } else {
            tracked.dropped.push(Drop::TooMany);
        }
    }

    fn take(&mut self, sample: &Sample, moment: Moment, tracked: &mut Tracked) {
        if !self.is_news(sample) {
            return;
        }
        let Some(entry) = self.entries.get_mut(&sample.pid) else {
            return; // it has ended, or found no room
        };
        let doubtful_until_us = self.clock.map_or(0, |clock| clock.doubtful_until_us);
        if sample.at_us > moment.wall_us.saturating_add(micros(AHEAD)) || sample.at_us <= doubtful_until_us {
            tracked.dropped.push(Drop::ClockSet);
            return;
        }
        entry.last_us = Some(sample.at_us);
        let age = Duration::from_micros(moment.wall_us.saturating_sub(sample.at_us));
        if let (Some(start_ticks), Some(uptime)) = (entry.start_ticks, moment.uptime)
            && age > proc::age(start_ticks, uptime) + START_PRECISION
        {
            tracked.dropped.push(Drop::EarlierProcess);
            return;
        }
        let (Some(at), true) = (moment.now.checked_sub(age), age <= OLDEST) else {
            return;
        };
        match sample.busy {
            Ok(busy) => {
                entry.sample = Some(TimedSample {
                    pid: sample.pid,
                    start_ticks: entry.start_ticks,
                    at,
                    busy,
                    memory_bandwidth: sample.memory_bandwidth.ok(),
                });
            }
            Err(gap) => tracked.rejected.push(gap),
        }
    }

    /// Moves the times that were seen along when the wall clock was set.
    fn follow_clock(&mut self, moment: Moment) {
        let mut doubtful_until_us = 0;
        if let Some(before) = self.clock {
            doubtful_until_us = before.doubtful_until_us;
            let passed = micros(moment.now.saturating_duration_since(before.at.now));
            let expected = before.at.wall_us.saturating_add(passed);
            let step = i64::try_from(i128::from(moment.wall_us) - i128::from(expected)).unwrap_or(i64::MAX);
            if step.abs() > STEP_US {
                for entry in self.entries.values_mut() {
                    entry.last_us = entry.last_us.map(|last_us| last_us.saturating_add_signed(step));
                }
                doubtful_until_us = doubtful_until_us.saturating_add_signed(step);
                // Stamps from before a small step back can pass for new ones. After a large one they lie ahead of the
                // clock for as long as a driver may tell them.
                if step < 0 && step.unsigned_abs() < 2 * micros(OLDEST) {
                    doubtful_until_us = doubtful_until_us.max(expected);
                }
            }
        }
        self.clock = Some(Clock {
            at: moment,
            doubtful_until_us,
        });
    }
}

impl Entry {
    const fn new(now: Instant) -> Self {
        Self {
            start_ticks: None,
            since: now,
            named_at: now,
            last_us: None,
            sample: None,
        }
    }

    /// Whether the process is there; where it is another one than before, it begins anew.
    fn lives(&mut self, life: Life, now: Instant) -> bool {
        match life {
            Life::Unknown => true,
            Life::Gone => false,
            Life::Since(start_ticks) => {
                if self.start_ticks.is_some_and(|known| known != start_ticks) {
                    self.since = now;
                    self.sample = None;
                }
                self.start_ticks = Some(start_ticks);
                true
            }
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
