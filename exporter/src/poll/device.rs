//! The thread of one GPU: takes hold of it, reads it tick by tick, takes hold anew when it was lost.
//!
//! Invariants: everything that may block on this GPU happens here and nowhere else; nobody waits for this thread.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forewarm_nvml::{Code, Device, DeviceKey, Gap, Nvml};

use super::collect::{Collector, Verdict};
use super::schedule::Ticks;
use super::stop::Stop;
use super::tally::PollCounts;
use crate::snapshot::{DeviceSlot, DeviceSnapshot, Fleet, Identity, Presence};

/// The first pause before a GPU that did not answer is tried again.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// The longest such pause: a GPU that comes back is seen within this time.
const LONGEST_RETRY: Duration = Duration::from_secs(5);
/// A try that takes long may hold locks of the driver that the other GPUs need: at most this share of the time goes
/// into tries.
const TRIES_SHARE: u32 = 10;

/// Pauses between tries to take hold of a GPU.
#[derive(Debug)]
struct Retry {
    next: Duration,
}

impl Retry {
    const fn new() -> Self {
        Self { next: FIRST_RETRY }
    }

    /// The pause after a try that took so long.
    fn pause(&mut self, took: Duration) -> Duration {
        let pause = self.next;
        self.next = (2 * pause).min(LONGEST_RETRY);
        pause.max(took.saturating_mul(TRIES_SHARE))
    }
}

/// What the threads of one opened library share.
pub(super) struct Generation {
    pub(super) nvml: Arc<dyn Nvml>,
    pub(super) fleet: Arc<Fleet>,
    pub(super) driver_version: String,
    pub(super) interval: Duration,
    /// Start of the tick grid.
    pub(super) start: Instant,
    pub(super) stop: Stop,
    /// Set by the first thread that finds the library unusable.
    pub(super) reopen: AtomicBool,
    /// Whose events are whose.
    pub(super) keys: Mutex<BTreeMap<DeviceKey, Arc<DeviceSlot>>>,
    pub(super) counts: Arc<PollCounts>,
}

impl Generation {
    pub(super) fn slot_of(&self, key: DeviceKey) -> Option<Arc<DeviceSlot>> {
        self.keys
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&key)
            .map(Arc::clone)
    }

    fn ask_reopening(&self, index: u32) {
        if !self.reopen.swap(true, Ordering::AcqRel) {
            tracing::warn!(gpu = index, "driver library lost its driver, opening it anew");
        }
    }
}

/// Reads one GPU until stopping is asked for.
pub(super) fn run(generation: &Arc<Generation>, index: u32, slot: &Arc<DeviceSlot>) {
    let mut retry = Retry::new();
    while !generation.stop.is_asked() {
        let tried = Instant::now();
        let mut took = Duration::ZERO;
        match take_hold(generation, index, slot) {
            Ok((mut device, identity)) => {
                retry = Retry::new();
                tracing::info!(
                    gpu = index,
                    uuid = identity.facts.uuid,
                    model = identity.facts.model,
                    "gpu found"
                );
                read_until_lost(generation, index, slot, device.as_mut(), identity);
            }
            Err(gap) => {
                took = tried.elapsed();
                tracing::warn!(gpu = index, error = %gap, "gpu does not answer");
                let presence = match gap.code() {
                    Some(Code::UNINITIALIZED) => {
                        generation.ask_reopening(index);
                        Presence::Failing
                    }
                    Some(code) if code.is_lost() => Presence::Lost,
                    Some(code) if code.is_refusal() => Presence::Refused,
                    _ => Presence::Failing,
                };
                slot.update(|before| DeviceSnapshot {
                    presence,
                    ..before.clone()
                });
            }
        }
        if generation.stop.wait_until(Instant::now() + retry.pause(took)) {
            return;
        }
    }
}

fn take_hold(
    generation: &Generation,
    index: u32,
    slot: &Arc<DeviceSlot>,
) -> Result<(Box<dyn Device>, Arc<Identity>), Gap> {
    let mut device = generation.nvml.device(index, Arc::clone(&slot.in_flight))?;
    let facts = device.facts()?;
    generation.fleet.assign(slot, &facts.uuid);
    generation
        .keys
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(device.key(), Arc::clone(slot));
    if let Err(gap) = device.subscribe() {
        tracing::info!(gpu = index, reason = %gap, "no xid events from this gpu");
    }
    let driver_version = generation.driver_version.clone();
    Ok((
        device,
        Arc::new(Identity {
            facts,
            driver_version,
        }),
    ))
}

fn read_until_lost(
    generation: &Generation,
    index: u32,
    slot: &DeviceSlot,
    device: &mut dyn Device,
    identity: Arc<Identity>,
) {
    let mut collector = Collector::new(
        index,
        identity,
        generation.interval,
        Arc::clone(&generation.counts),
    );
    let mut ticks = Ticks::new(generation.start, generation.interval);
    // The first reading does not wait for the grid.
    ticks.advance(Instant::now());
    loop {
        let last_hardware_xid = slot.with_xids(|xids| xids.last_hardware());
        let (snapshot, verdict) = collector.tick(device, last_hardware_xid, Instant::now);
        slot.store(snapshot);
        match verdict {
            Verdict::Continue => {}
            Verdict::Lost => {
                tracing::warn!(gpu = index, "gpu is lost");
                return;
            }
            Verdict::Refused => {
                tracing::warn!(gpu = index, "gpu refuses every call");
                return;
            }
            Verdict::Reopen => {
                generation.ask_reopening(index);
                return;
            }
        }
        let (next, missed) = ticks.advance(Instant::now());
        generation
            .counts
            .missed_ticks
            .fetch_add(missed, Ordering::Relaxed);
        if generation.stop.wait_until(next) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_comes_back_is_seen_within_five_seconds_however_long_it_was_lost() {
        let mut retry = Retry::new();
        let pauses: Vec<_> = (0..6)
            .map(|_| retry.pause(Duration::from_millis(3)).as_secs())
            .collect();
        assert_eq!(pauses, [1, 2, 4, 5, 5, 5]);
    }

    #[test]
    fn tries_that_take_long_are_made_less_often() {
        let mut retry = Retry::new();
        assert_eq!(retry.pause(Duration::from_secs(4)), Duration::from_secs(40));
    }
}
