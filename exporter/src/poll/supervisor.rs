//! Opens the driver's library, starts the threads, watches them, and starts over after a driver reload.
//!
//! Invariants: the supervisor itself calls only init, count and driver version; it never joins a thread.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use forewarm_nvml::{Code, Gap, InFlight, Nvml, OpenError};
use forewarm_runtime::status::{Condition, Fault, Heartbeat};
use forewarm_signals::Group;

use super::access::Look;
use super::device::{self, Generation};
use super::report::{Report, Tried};
use super::schedule;
use super::stop::Stop;
use super::tally::PollCounts;
use crate::snapshot::{DeviceSlot, DeviceSnapshot, Fleet, FleetState, LibraryState, Presence, Standing};

/// Only touched pages count; half a MiB leaves the driver room for buffers on the stack.
const STACK: usize = 512 * 1024;
/// Opening moves the table of some 400 symbols through several frames.
const SUPERVISOR_STACK: usize = 2 * 1024 * 1024;
/// The first pause between attempts to open the library.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// The longest: a driver that comes up late is seen within this time.
const LONGEST_RETRY: Duration = Duration::from_secs(15);
/// A library that lived this long was sound when it was opened.
const SOUND_AFTER: Duration = Duration::from_secs(30);
/// How often the number of GPUs is asked for while there are none.
const RECOUNT: Duration = Duration::from_secs(15);
/// How long threads may take to end before a reopening goes on without them.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long an event wait lasts: bounds how late the events thread sees a stop.
const EVENT_WAIT: Duration = Duration::from_secs(1);

/// Opens the library. Called again after a driver reload.
pub type Opener = Box<dyn Fn(&InFlight) -> Result<Arc<dyn Nvml>, OpenError> + Send>;

/// What the supervisor reports to.
pub struct Supervision {
    /// Where snapshots go.
    pub fleet: Arc<Fleet>,
    /// Counts.
    pub counts: Arc<PollCounts>,
    /// Beats while the supervisor ticks.
    pub heartbeat: Heartbeat,
    /// Ready or degraded once the driver was tried for the first time.
    pub driver: Condition,
    /// Told when the driver refuses this process for good.
    pub lost_access: Fault,
}

/// Starts the supervisor's thread. It ends with the process.
pub fn start(opener: Opener, supervision: Supervision) -> std::io::Result<()> {
    thread::Builder::new()
        .name("supervisor".to_owned())
        .stack_size(SUPERVISOR_STACK)
        .spawn(move || {
            let in_flight = InFlight::default();
            let pacing = Stop::default();
            let mut report = Report::new(supervision.driver.clone(), supervision.lost_access.clone());
            let mut pause = FIRST_RETRY;
            loop {
                let opened = Instant::now();
                let generation = open(&opener, &in_flight, &supervision, &mut report);
                serve(&generation, &supervision, &mut report);
                drop(generation);
                // A library that a stuck thread keeps mapped may open and fail at once, again and again.
                pause = if opened.elapsed() > SOUND_AFTER {
                    FIRST_RETRY
                } else {
                    (2 * pause).min(LONGEST_RETRY)
                };
                let _ = pacing.wait_until(Instant::now() + pause);
            }
        })?;
    Ok(())
}

/// Tries until the library opens.
fn open(
    opener: &Opener,
    in_flight: &InFlight,
    supervision: &Supervision,
    report: &mut Report,
) -> Arc<Generation> {
    let never = Stop::default();
    let mut retry = FIRST_RETRY;
    let mut told = String::new();
    loop {
        supervision.heartbeat.beat();
        match opener(in_flight) {
            Ok(nvml) => {
                let driver_version = nvml.driver_version().unwrap_or_default();
                supervision.counts.opens.fetch_add(1, Ordering::Relaxed);
                tracing::info!(driver_version, "driver library opened");
                return Arc::new(Generation {
                    nvml,
                    fleet: Arc::clone(&supervision.fleet),
                    driver_version,
                    interval: supervision.fleet.interval(),
                    start: Instant::now(),
                    stop: Stop::default(),
                    reopen: AtomicBool::new(false),
                    keys: Mutex::new(BTreeMap::new()),
                    counts: Arc::clone(&supervision.counts),
                });
            }
            Err(error) => {
                let reason = error.to_string();
                if reason != told {
                    tracing::warn!(error = reason, "driver library does not open, trying on");
                    told.clone_from(&reason);
                }
                close(&reason, look(error.gap), supervision, report);
            }
        }
        if never.wait_until(Instant::now() + retry) {
            continue;
        }
        retry = (2 * retry).min(LONGEST_RETRY);
    }
}

/// What a failure of the library as a whole says about access.
fn look(gap: Gap) -> Look {
    if gap.code().is_some_and(Code::is_refusal) {
        Look::Refused
    } else {
        Look::Absent
    }
}

/// Notes that the library is not open. GPUs that were known stay, and go down by the age of their readings.
fn close(reason: &str, look: Look, supervision: &Supervision, report: &mut Report) {
    let devices = supervision.fleet.load().devices.clone();
    supervision.fleet.store(FleetState {
        library: LibraryState::Waiting(reason.to_owned()),
        devices,
    });
    report.closed(reason, look, Instant::now());
}

/// Runs the threads of one opened library until it has to be opened anew.
fn serve(generation: &Arc<Generation>, supervision: &Supervision, report: &mut Report) {
    let slots = match enumerate(generation, supervision) {
        Ok(slots) => slots,
        Err(gap) => {
            tracing::warn!(error = %gap, "gpus cannot be counted");
            close(
                &format!("gpus cannot be counted: {gap}"),
                look(gap),
                supervision,
                report,
            );
            return;
        }
    };
    // Before the threads start: what they store from here on is of this opening.
    let watched = slots.iter().map(|slot| Watched::new(slot)).collect();
    let mut threads = Vec::new();
    for (index, slot) in (0_u32..).zip(&slots) {
        let (generation, slot) = (Arc::clone(generation), Arc::clone(slot));
        let spawned = thread::Builder::new()
            .name(format!("gpu-{index}"))
            .stack_size(STACK)
            .spawn(move || device::run(&generation, index, &slot));
        match spawned {
            Ok(thread) => threads.push(thread),
            Err(error) => tracing::error!(gpu = index, %error, "no thread for this gpu"),
        }
    }
    let events = Arc::clone(generation);
    match thread::Builder::new()
        .name("events".to_owned())
        .stack_size(STACK)
        .spawn(move || watch_events(&events))
    {
        Ok(thread) => threads.push(thread),
        Err(error) => tracing::error!(%error, "no thread for xid events"),
    }
    watch(generation, &slots, watched, supervision, report);
    generation.stop.ask();
    let reason = if slots.is_empty() {
        "no gpus, counting anew"
    } else {
        "the driver went away, opening anew"
    };
    close(reason, Look::Unclear, supervision, report);
    let deadline = Instant::now() + PATIENCE;
    let pacing = Stop::default();
    while threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
        let _ = pacing.wait_until(Instant::now() + Duration::from_millis(20));
    }
    let stuck = threads.iter().filter(|thread| !thread.is_finished()).count();
    if stuck > 0 {
        tracing::warn!(threads = stuck, "left behind threads that sit inside the driver");
    }
}

fn enumerate(generation: &Generation, supervision: &Supervision) -> Result<Vec<Arc<DeviceSlot>>, Gap> {
    let count = generation.nvml.device_count()?;
    let library = LibraryState::Open {
        driver_version: generation.driver_version.clone(),
    };
    let known = supervision.fleet.load();
    // Slots of an earlier opening are taken over, so Xid counts and identities live on.
    let reused = |index: u32| {
        let at = usize::try_from(index).ok()?;
        let slot = known.devices.get(at)?;
        // A thread that is stuck in the old library may still write to its slot.
        slot.in_flight
            .current(Instant::now())
            .is_none()
            .then(|| Arc::clone(slot))
    };
    let slots: Vec<_> = (0..count)
        .map(|index| reused(index).unwrap_or_else(|| supervision.fleet.slot(index)))
        .collect();
    supervision.fleet.store(FleetState {
        library,
        devices: slots.clone(),
    });
    tracing::info!(gpus = count, "gpus counted");
    Ok(slots)
}

/// Watches ages and stuck calls until the library has to be opened anew.
fn watch(
    generation: &Generation,
    slots: &[Arc<DeviceSlot>],
    mut watched: Vec<Watched>,
    supervision: &Supervision,
    report: &mut Report,
) {
    let interval = generation.interval;
    let pacing = Stop::default();
    let recount_at = Instant::now() + RECOUNT;
    loop {
        supervision.heartbeat.beat();
        let now = Instant::now();
        let mut gpus = Vec::with_capacity(slots.len());
        for (slot, watched) in slots.iter().zip(&mut watched) {
            gpus.push(watched.look(slot, now, interval, &supervision.counts));
        }
        let stuck = watched.iter().filter(|watched| watched.is_stuck).count();
        let stuck = u64::try_from(stuck).unwrap_or(u64::MAX);
        supervision.counts.stuck.store(stuck, Ordering::Relaxed);
        let look = report.open(&generation.driver_version, &gpus, now);
        if look == Look::Refused {
            tracing::warn!("every gpu refuses every call, opening the library anew");
            return;
        }
        if generation.reopen.load(Ordering::Acquire) || (slots.is_empty() && now >= recount_at) {
            return;
        }
        let _ = pacing.wait_until(now + interval.max(Duration::from_millis(200)));
    }
}

/// What was last seen of one GPU, to tell changes once.
#[derive(Debug)]
struct Watched {
    /// What an earlier opening left behind: says nothing about this one.
    inherited: Arc<DeviceSnapshot>,
    was: Option<Standing>,
    is_stuck: bool,
}

impl Watched {
    fn new(slot: &DeviceSlot) -> Self {
        Self {
            inherited: slot.load(),
            was: None,
            is_stuck: false,
        }
    }

    /// Looks at one GPU: tells what changed, and yields where it stands.
    fn look(&mut self, slot: &DeviceSlot, now: Instant, interval: Duration, counts: &PollCounts) -> Tried {
        let snapshot = slot.load();
        let standing = Standing::of(&snapshot, now, interval);
        if let Some(was) = self.was {
            for (group, count) in Group::ALL.into_iter().zip(&counts.withdrawn) {
                if was.is_fresh(group) && !standing.is_fresh(group) {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
            if was.up && !standing.up {
                tracing::warn!(
                    gpu = snapshot.index,
                    uuid = snapshot.uuid(),
                    "gpu is down, its values are withdrawn"
                );
            } else if !was.up && standing.up {
                tracing::info!(gpu = snapshot.index, uuid = snapshot.uuid(), "gpu is up");
            }
        }
        self.was = Some(standing);
        let call = slot
            .in_flight
            .current(now)
            .filter(|(_, age)| *age > schedule::silence_limit(interval));
        if let Some((call, age)) = call
            && !self.is_stuck
        {
            tracing::error!(gpu = snapshot.index, %call, seconds = age.as_secs(), "nvml call does not come back");
        }
        self.is_stuck = call.is_some();
        let is_tried = !Arc::ptr_eq(&snapshot, &self.inherited) && snapshot.presence != Presence::Unseen;
        if is_tried && standing.up {
            Tried::Up
        } else if is_tried || self.is_stuck {
            Tried::Down(snapshot.presence)
        } else {
            Tried::NotYet
        }
    }
}

fn watch_events(generation: &Generation) {
    let mut retry = FIRST_RETRY;
    while !generation.stop.is_asked() {
        match generation.nvml.wait_event(EVENT_WAIT) {
            Ok(None) => retry = FIRST_RETRY,
            Ok(Some(event)) => {
                retry = FIRST_RETRY;
                let forewarm_nvml::EventKind::Xid = event.kind else {
                    continue;
                };
                let Some(slot) = generation.slot_of(event.device) else {
                    generation.counts.xids_dropped.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(xid = event.data, "xid of an unknown gpu");
                    continue;
                };
                tracing::warn!(gpu = slot.load().index, xid = event.data, "xid");
                if !slot.note_xid(event.data, Instant::now()) {
                    generation.counts.xids_dropped.fetch_add(1, Ordering::Relaxed);
                }
            }
            Err(forewarm_nvml::Gap::Unsupported) => {
                tracing::info!("the driver offers no xid events");
                return;
            }
            Err(gap) => {
                tracing::debug!(error = %gap, "waiting for events failed");
                if generation.stop.wait_until(Instant::now() + retry) {
                    return;
                }
                retry = (2 * retry).min(LONGEST_RETRY);
            }
        }
    }
}
