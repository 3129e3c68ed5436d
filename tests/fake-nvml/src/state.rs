//! The one state of a loaded library: settings, control, GPUs, samples and event sets behind one lock.
//!
//! Invariants: the lock is never held while a call spins or blocks; handles point into a static table and are
//! checked before use; sample and event-set tokens are never reused, so a freed one is unknown, not another's.
//! There is no thread of our own: whoever calls next looks at the control file, at most [`LOOK_EVERY`] apart.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Write as _};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings::nvmlDevice_t;

use crate::code::Code;
use crate::control::{Control, Effect, Garbage};
use crate::control_file::{ControlFile, epoch_us};
use crate::gpu::{Gpu, Integrals};
use crate::identity;
use crate::settings::{MAX_GPUS, Resolved};

/// Time between looks at the control file: well within the promised 100 ms.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Time between looks of a caller that waits for an event: long enough to cost nothing, within the same promise.
const LOOK_WHILE_WAITING: Duration = Duration::from_millis(80);

/// Events kept by a set that nobody waits on; older ones are dropped first.
const EVENT_QUEUE: usize = 1024;

/// Slots that device handles point at. Only their addresses matter.
static SLOTS: [u64; MAX_GPUS as usize] = [0; MAX_GPUS as usize];

static LIBRARY: Mutex<Library> = Mutex::new(Library {
    references: 0,
    state: None,
});
static CHANGED: Condvar = Condvar::new();

/// Process-wide: the reference count outlives the state.
struct Library {
    references: u32,
    state: Option<State>,
}

/// A filled GPM sample.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pub(crate) gpu: usize,
    pub(crate) at_us: u64,
    pub(crate) integrals: Integrals,
}

/// An event on its way to a waiter.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub(crate) gpu: usize,
    pub(crate) kind: u64,
    pub(crate) data: u64,
}

/// An event set: what it is registered for and what waits in it.
#[derive(Debug, Default)]
pub(crate) struct EventSet {
    pub(crate) registered: Vec<(usize, u64)>,
    pub(crate) queue: VecDeque<Event>,
}

/// Everything behind the lock.
pub(crate) struct State {
    pub(crate) settings: Resolved,
    pub(crate) control: Control,
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) samples: BTreeMap<usize, Option<Sample>>,
    pub(crate) event_sets: BTreeMap<usize, EventSet>,
    pub(crate) now_us: u64,
    file: Option<ControlFile>,
    looked: Option<Instant>,
    next_token: usize,
    /// The driver went away while a client held it: that client has to shut down and start anew.
    withdrawn: bool,
}

/// Handle of GPU `index`.
pub(crate) fn handle(index: usize) -> nvmlDevice_t {
    SLOTS.get(index).map_or(std::ptr::null_mut(), |slot| {
        std::ptr::from_ref(slot).cast_mut().cast()
    })
}

impl State {
    fn new(settings: Resolved) -> Self {
        let now_us = if settings.virtual_time { 0 } else { epoch_us() };
        let gpus = (0..settings.gpus)
            .map(|index| {
                Gpu::new(
                    index,
                    identity::gpu_uuid(&settings.uuid_seed, index),
                    &settings.profile,
                    now_us,
                )
            })
            .collect();
        Self {
            file: settings.control.clone().map(ControlFile::new),
            settings,
            control: Control::default(),
            gpus,
            samples: BTreeMap::new(),
            event_sets: BTreeMap::new(),
            now_us,
            looked: None,
            // Nowhere near null, and odd multiples of 16 as an allocator would give.
            next_token: 0x4e56_0010,
            withdrawn: false,
        }
    }

    fn driver_loaded(&self) -> bool {
        self.control.driver_loaded.unwrap_or(true)
    }

    /// Brings time and control up to date.
    fn refresh(&mut self) {
        if !self.settings.virtual_time {
            self.now_us = self.now_us.max(epoch_us());
        }
        let due =
            self.settings.virtual_time || self.looked.is_none_or(|looked| looked.elapsed() >= LOOK_EVERY);
        if !due {
            return;
        }
        self.looked = Some(Instant::now());
        let Some(change) = self.file.as_mut().and_then(ControlFile::changed) else {
            return;
        };
        if self.settings.virtual_time {
            let begins = self.now_us == 0;
            let told = change.control.now_ms.unwrap_or(0);
            self.now_us = self.now_us.max(told.saturating_mul(1000));
            if begins {
                self.gpus.iter_mut().for_each(|gpu| gpu.begin(self.now_us));
            }
        }
        let from_us = if self.settings.virtual_time {
            self.now_us
        } else {
            change.written_us.min(self.now_us)
        };
        self.control = change.control;
        self.withdrawn |= !self.driver_loaded();
        let idle = crate::control::GpuControl::default();
        for (at, gpu) in self.gpus.iter_mut().enumerate() {
            let control = self.control.gpus.get(&gpu.index).unwrap_or(&idle);
            let xids = gpu.apply(
                control,
                &self.settings.profile,
                self.control.encode_time_in_memory,
                from_us,
            );
            for xid in xids {
                let event = Event {
                    gpu: at,
                    kind: crate::abi::events::XID,
                    data: xid,
                };
                deliver(&mut self.event_sets, event);
            }
        }
        CHANGED.notify_all();
    }

    /// Index of the GPU behind `device`.
    pub(crate) fn index_of(&self, device: nvmlDevice_t) -> Result<usize, Code> {
        (0..self.gpus.len())
            .find(|index| handle(*index) == device)
            .ok_or(Code::INVALID_ARGUMENT)
    }

    /// A token that was never given before.
    pub(crate) fn token(&mut self) -> usize {
        self.next_token += 32;
        self.next_token
    }

    /// What faults do to `call` on GPU `gpu`.
    pub(crate) fn effects(&self, gpu: Option<usize>, call: &str) -> impl Iterator<Item = Effect> {
        let index = gpu.and_then(|at| self.gpus.get(at)).map(|gpu| gpu.index);
        self.control
            .faults
            .iter()
            .filter(move |fault| fault.strikes(index, call))
            .map(|fault| fault.effect)
    }
}

/// Puts an event into every set registered for it; with none registered it is lost, as with the real library.
fn deliver(sets: &mut BTreeMap<usize, EventSet>, event: Event) {
    for set in sets.values_mut() {
        if set
            .registered
            .iter()
            .any(|(gpu, kinds)| *gpu == event.gpu && kinds & event.kind != 0)
        {
            if set.queue.len() >= EVENT_QUEUE {
                set.queue.pop_front();
            }
            set.queue.push_back(event);
        }
    }
}

fn lock() -> MutexGuard<'static, Library> {
    LIBRARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a change of the control or `at_most`, without the lock.
fn wait(library: MutexGuard<'static, Library>, at_most: Duration) -> MutexGuard<'static, Library> {
    CHANGED
        .wait_timeout(library, at_most)
        .map_or_else(|poisoned| poisoned.into_inner().0, |(library, _)| library)
}

/// `nvmlInit`: counts a reference, or says why there is no driver.
pub(crate) fn init() -> Result<(), Code> {
    let mut library = lock();
    if library.references > 0 {
        library.references += 1;
        return Ok(());
    }
    let settings = Resolved::load().map_err(|cause| {
        // Nothing to do if stderr is closed.
        _ = writeln!(io::stderr(), "fake-nvml: {cause}");
        Code::UNKNOWN
    })?;
    let fresh = library
        .state
        .as_ref()
        .is_none_or(|state| state.withdrawn || state.settings != settings);
    if fresh {
        library.state = Some(State::new(settings));
    }
    let state = library.state.as_mut().ok_or(Code::UNKNOWN)?;
    state.looked = None;
    state.refresh();
    if !state.driver_loaded() {
        return Err(Code::DRIVER_NOT_LOADED);
    }
    if let Some(code) = state.control.init_error {
        return Err(Code(code));
    }
    state.withdrawn = false;
    library.references = 1;
    Ok(())
}

/// `nvmlShutdown`: gives a reference back.
pub(crate) fn shutdown() -> Result<(), Code> {
    let mut library = lock();
    library.references = library.references.checked_sub(1).ok_or(Code::UNINITIALIZED)?;
    if library.references == 0
        && let Some(state) = &mut library.state
    {
        state.samples.clear();
        state.event_sets.clear();
    }
    CHANGED.notify_all();
    Ok(())
}

impl Library {
    /// The state of an initialised library with a driver beneath, brought up to date.
    fn ready(&mut self) -> Result<&mut State, Code> {
        if self.references == 0 {
            return Err(Code::UNINITIALIZED);
        }
        let state = self.state.as_mut().ok_or(Code::UNINITIALIZED)?;
        state.refresh();
        if state.withdrawn {
            return Err(if state.driver_loaded() {
                Code::UNINITIALIZED
            } else {
                Code::UNKNOWN
            });
        }
        Ok(state)
    }
}

/// Runs one call: `gpu` finds what it is about, faults strike, then `body` answers. No spinning here.
pub(crate) fn call(
    name: &str,
    gpu: impl Fn(&State) -> Result<Option<usize>, Code>,
    body: impl FnOnce(&mut State, Option<usize>, Option<Garbage>) -> Result<(), Code>,
) -> Result<(), Code> {
    let started = Instant::now();
    let mut library = lock();
    loop {
        let state = library.ready()?;
        let at = gpu(state)?;
        let mut longest = None;
        for effect in state.effects(at, name) {
            if let Effect::Block(block) = effect {
                longest = longest.max(Some(match block {
                    crate::control::Block::Forever => Duration::MAX,
                    crate::control::Block::Ms(ms) => Duration::from_millis(ms),
                }));
            }
        }
        if let Some(left) = longest.and_then(|longest| longest.checked_sub(started.elapsed()))
            && !left.is_zero()
        {
            library = wait(library, left.min(LOOK_EVERY));
            continue;
        }
        let mut garbage = None;
        for effect in state.effects(at, name) {
            match effect {
                Effect::Lost => return Err(Code::GPU_IS_LOST),
                Effect::NotSupported => return Err(Code::NOT_SUPPORTED),
                Effect::Error(code) => return Err(Code(code)),
                Effect::Garbage(kind) => garbage = Some(kind),
                Effect::Block(_) => {}
            }
        }
        if state
            .settings
            .profile
            .unsupported_calls
            .iter()
            .any(|call| call == name)
        {
            return Err(Code::NOT_SUPPORTED);
        }
        if let Some(gpu) = at.and_then(|at| state.gpus.get_mut(at)) {
            gpu.advance(state.now_us);
        }
        return body(state, at, garbage);
    }
}

/// Calls `take` until it yields or `timeout` is over; wakes on every change of the control.
pub(crate) fn wait_for<T>(
    timeout: Duration,
    mut take: impl FnMut(&mut State) -> Result<Option<T>, Code>,
) -> Result<T, Code> {
    let started = Instant::now();
    let mut library = lock();
    loop {
        if let Some(taken) = take(library.ready()?)? {
            return Ok(taken);
        }
        let left = timeout.saturating_sub(started.elapsed());
        if left.is_zero() {
            return Err(Code::TIMEOUT);
        }
        library = wait(library, left.min(LOOK_WHILE_WAITING));
    }
}

/// Sleeps without the lock, as a call that waits for the hardware.
pub(crate) fn sleep(time: Duration) {
    let started = Instant::now();
    let mut library = lock();
    while let Some(left) = time.checked_sub(started.elapsed())
        && !left.is_zero()
    {
        library = wait(library, left);
    }
}

/// What a call of this name costs.
pub(crate) fn cost(name: &str) -> Duration {
    let library = lock();
    let us = library.state.as_ref().map_or(0, |state| {
        state
            .settings
            .call_costs_us
            .get(name)
            .copied()
            .unwrap_or(state.settings.call_cost_us)
    });
    Duration::from_micros(us)
}
