//! The model of one replica that serves a large language model from one or more GPUs.
//!
//! ```text
//!            loading            ready                       draining
//! memory  ▁▂▃▄▅▆▇█      █ + cache that grows with load      █
//! busy    0             saturates early: one stream of requests keeps a kernel resident
//! SMs     0             follow the load up to a ceiling; what does not fit waits in a queue
//! ```
//! The difference between the second and third line is why an HPA wants SM activity: at 40 % of what
//! a GPU can do, its utilisation already reads 100 % and says nothing about how far to scale.
//!
//! Invariants: pure, no clock; work is neither lost nor made up (what is offered is served or queued);
//! every output is finite and within its unit's range.

use std::time::Duration;

/// Share of SM time that a replica can use at most: launches and copies take the rest.
pub const SM_CEILING: f64 = 0.95;

/// SM share at which a kernel is always resident, so that utilisation reads 100 %.
pub const BUSY_FROM: f64 = 0.35;

/// Time in which a replica works off its queue when it has room.
const DRAIN: Duration = Duration::from_secs(2);

/// Requests in each GPU-second of work: what turns queued work into a queue length.
const REQUESTS_PER_GPU_SECOND: f64 = 8.0;

/// Device memory of the weights, and of the cache at full load, bytes: a 30 B model in 16 bits.
const WEIGHTS: f64 = 60e9;
const CACHE: f64 = 14e9;

/// Board power without load and with all SMs in use, watts, as of an H100 SXM.
const IDLE_WATTS: f64 = 75.0;
const FULL_WATTS: f64 = 650.0;

/// One replica.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Replica {
    gpus: f64,
    loading: Duration,
    /// GPU-seconds of work accepted and not done.
    backlog: f64,
}

/// What a replica does at a moment; ratios are per GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Activity {
    /// Weights are in memory and requests are taken.
    pub loaded: bool,
    /// Share of time with a kernel resident.
    pub busy: f64,
    /// Share of SM time in use.
    pub sm_active: f64,
    /// Memory in use, bytes, each GPU.
    pub memory_used_bytes: f64,
    /// Power, watts, each GPU.
    pub power_watts: f64,
    /// Requests waiting.
    pub queue: f64,
}

impl Replica {
    /// A replica on `gpus` GPUs whose weights take `loading` to load.
    #[must_use]
    pub fn new(gpus: usize, loading: Duration) -> Self {
        // No node has more than a few GPUs.
        let gpus = u32::try_from(gpus.max(1)).map_or(1.0, f64::from);
        Self {
            gpus,
            loading,
            backlog: 0.0,
        }
    }

    /// Lives through `step`, `age` after its start, while `offered` GPUs of load arrive.
    #[must_use]
    pub fn advance(&mut self, age: Duration, step: Duration, offered: f64) -> Activity {
        if age < self.loading {
            let share = age.as_secs_f64() / self.loading.as_secs_f64();
            return Activity {
                loaded: false,
                busy: 0.0,
                sm_active: 0.0,
                memory_used_bytes: WEIGHTS / self.gpus * share,
                power_watts: IDLE_WATTS,
                queue: 0.0,
            };
        }
        let step = step.as_secs_f64();
        let arrived = offered.max(0.0) * step;
        let wanted = arrived + self.backlog * (step / DRAIN.as_secs_f64()).min(1.0);
        let done = wanted
            .min(SM_CEILING * self.gpus * step)
            .min(arrived + self.backlog);
        self.backlog = (self.backlog + arrived - done).max(0.0);
        let sm_active = if step > 0.0 {
            (done / step / self.gpus).clamp(0.0, SM_CEILING)
        } else {
            0.0
        };
        Activity {
            loaded: true,
            busy: (sm_active / BUSY_FROM).min(1.0),
            sm_active,
            memory_used_bytes: (WEIGHTS + CACHE * sm_active) / self.gpus,
            power_watts: IDLE_WATTS + (FULL_WATTS - IDLE_WATTS) * sm_active,
            queue: self.backlog * REQUESTS_PER_GPU_SECOND,
        }
    }

    /// Whether all accepted work is done, to within a request.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.backlog * REQUESTS_PER_GPU_SECOND < 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TICK: Duration = Duration::from_millis(100);

    fn settle(replica: &mut Replica, offered: f64, ticks: u32) -> Activity {
        let mut last = replica.advance(Duration::from_secs(99), TICK, offered);
        for _ in 1..ticks {
            last = replica.advance(Duration::from_secs(99), TICK, offered);
        }
        last
    }

    #[test]
    fn busy_saturates_while_sm_active_tells_loads_apart() {
        let at = |offered| settle(&mut Replica::new(1, Duration::ZERO), offered, 50);
        let (light, middle, heavy) = (at(0.2), at(0.5), at(0.9));
        assert!(light.busy < 0.6 && (middle.busy - 1.0).abs() < 1e-9 && (heavy.busy - 1.0).abs() < 1e-9);
        for (activity, offered) in [(light, 0.2), (middle, 0.5), (heavy, 0.9)] {
            assert!((activity.sm_active - offered).abs() < 1e-6);
        }
    }

    #[test]
    fn overload_queues_and_the_queue_drains_later() {
        let mut replica = Replica::new(1, Duration::ZERO);
        let overloaded = settle(&mut replica, 2.0, 50);
        assert!((overloaded.sm_active - SM_CEILING).abs() < 1e-9);
        assert!(overloaded.queue > 30.0, "{}", overloaded.queue);
        let relieved = settle(&mut replica, 0.3, 300);
        assert!(replica.is_drained() && relieved.queue < 1.0);
        assert!((relieved.sm_active - 0.3).abs() < 0.05);
    }

    #[test]
    fn loading_fills_memory_and_takes_no_requests() {
        let mut replica = Replica::new(1, Duration::from_secs(8));
        let early = replica.advance(Duration::from_secs(2), TICK, 5.0);
        let late = replica.advance(Duration::from_secs(6), TICK, 5.0);
        assert!(!early.loaded && !late.loaded && late.busy.abs() < f64::EPSILON);
        assert!(late.memory_used_bytes > early.memory_used_bytes);
        assert!(replica.advance(Duration::from_secs(8), TICK, 0.5).loaded);
    }

    proptest! {
        #[test]
        fn work_is_neither_lost_nor_made_up(loads in prop::collection::vec(0.0_f64..4.0, 1..80), gpus in 1_usize..8) {
            let mut replica = Replica::new(gpus, Duration::ZERO);
            let (mut offered, mut served) = (0.0, 0.0);
            let mut queued = 0.0;
            for load in loads {
                let activity = replica.advance(Duration::from_secs(1), TICK, load);
                offered += load * TICK.as_secs_f64();
                served += activity.sm_active * TICK.as_secs_f64() * f64::from(u32::try_from(gpus).unwrap());
                queued = activity.queue / REQUESTS_PER_GPU_SECOND;
                prop_assert!((0.0..=1.0).contains(&activity.busy));
                prop_assert!((0.0..=SM_CEILING).contains(&activity.sm_active));
                prop_assert!(activity.memory_used_bytes <= 80e9 && activity.power_watts <= 700.0);
            }
            prop_assert!((offered - served - queued).abs() < 1e-6, "{offered} {served} {queued}");
        }
    }
}
