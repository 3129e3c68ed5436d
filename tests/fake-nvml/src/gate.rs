//! The door that every call goes through: one lock, one reference count, faults, waiting.
//!
//! Invariants: the lock is never held while a call spins or blocks; a call is counted once for each fault, however
//! often it looks again while it is blocked.

use std::io::{self, Write as _};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::code::Code;
use crate::control::{Block, Effect};
use crate::settings::Resolved;
use crate::state::{LOOK_EVERY, State, Struck, Target};

/// Time between looks of a caller that waits for an event: long enough to cost nothing, within the same promise.
const LOOK_WHILE_WAITING: Duration = Duration::from_millis(80);

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

fn lock() -> MutexGuard<'static, Library> {
    LIBRARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a change of the control or `at_most`, without the lock.
fn wait(library: MutexGuard<'static, Library>, at_most: Duration) -> MutexGuard<'static, Library> {
    CHANGED
        .wait_timeout(library, at_most)
        .map_or_else(|poisoned| poisoned.into_inner().0, |(library, _)| library)
}

/// Lets the life cycle calls through their faults: waits while they block, then fails as they say.
fn pass(mut library: MutexGuard<'static, Library>, name: &str) -> Result<MutexGuard<'static, Library>, Code> {
    let started = Instant::now();
    let mut counted = true;
    while let Some(state) = library.state.as_mut() {
        if state.refresh() {
            CHANGED.notify_all();
        }
        let effects = state.strike(None, name, std::mem::take(&mut counted));
        if still_blocked(&effects, started) {
            library = wait(library, LOOK_EVERY);
            continue;
        }
        for effect in effects {
            error_of(effect)?;
        }
        break;
    }
    Ok(library)
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
    if let Some(state) = library.state.as_mut() {
        state.looked = None;
    }
    library = pass(library, "nvmlInit_v2")?;
    if library.references > 0 {
        // Another thread came first while this one was held up.
        library.references += 1;
        return Ok(());
    }
    let state = library.state.as_mut().ok_or(Code::UNKNOWN)?;
    if !state.driver_loaded() {
        return Err(Code::DRIVER_NOT_LOADED);
    }
    if let Some(code) = state.control.init_error {
        return Err(Code(code));
    }
    state.withdrawn = false;
    state.gone.clear();
    state.order = (0..state.gpus.len())
        .filter(|at| state.gpus[*at].is_bound())
        .collect();
    library.references = 1;
    Ok(())
}

/// `nvmlShutdown`: gives a reference back.
pub(crate) fn shutdown() -> Result<(), Code> {
    let mut library = pass(lock(), "nvmlShutdown")?;
    library.references = library.references.checked_sub(1).ok_or(Code::UNINITIALIZED)?;
    if library.references == 0
        && let Some(state) = &mut library.state
    {
        state.samples.clear();
        state.event_sets.clear();
        state.system_sets.clear();
        state.given.clear();
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
        if state.refresh() {
            CHANGED.notify_all();
        }
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

/// The code that an effect makes a call answer.
pub(crate) fn error_of(effect: Effect) -> Result<(), Code> {
    match effect {
        Effect::Lost => Err(Code::GPU_IS_LOST),
        Effect::NotSupported => Err(Code::NOT_SUPPORTED),
        Effect::NoPermission => Err(Code::NO_PERMISSION),
        Effect::ResetRequired => Err(Code::RESET_REQUIRED),
        Effect::Error(code) => Err(Code(code)),
        Effect::Block(_) | Effect::Garbage(_) | Effect::Grow(_) => Ok(()),
    }
}

/// Whether the effects block a call that began at `started` even now.
pub(crate) fn still_blocked(effects: &[Effect], started: Instant) -> bool {
    effects.iter().any(|effect| match effect {
        Effect::Block(Block::Forever) => true,
        Effect::Block(Block::Ms(ms)) => started.elapsed() < Duration::from_millis(*ms),
        _ => false,
    })
}

/// Runs one call: `target` finds what it is about, faults strike, then `body` answers. No spinning here.
pub(crate) fn call(
    name: &str,
    target: impl Fn(&State) -> Result<Option<Target>, Code>,
    body: impl FnOnce(&mut State, Option<Target>, Struck) -> Result<(), Code>,
) -> Result<(), Code> {
    let started = Instant::now();
    let mut library = lock();
    let mut counted = true;
    loop {
        let state = library.ready()?;
        let target = target(state)?;
        let effects = state.strike(target, name, counted);
        counted = false;
        if still_blocked(&effects, started) {
            library = wait(library, LOOK_EVERY);
            continue;
        }
        let mut struck = Struck {
            entries: state.strike_entries(target, name),
            ..Struck::default()
        };
        for effect in effects {
            error_of(effect)?;
            match effect {
                Effect::Garbage(kind) => struck.garbage = Some(kind),
                Effect::Grow(by) => struck.growth = by,
                _ => {}
            }
        }
        state.refusal(target, name)?;
        if let Some(gpu) = target.and_then(|target| state.gpus.get_mut(target.gpu)) {
            gpu.advance(state.now_us);
        }
        return body(state, target, struck);
    }
}

/// What a wait found when it looked.
pub(crate) enum Found<T> {
    /// What it waits for.
    Item(T),
    /// Nothing so far.
    Nothing,
    /// A fault holds the call up, past its timeout.
    Held,
}

/// Calls `look` until it finds something or `timeout` is over; wakes on every change of the control.
pub(crate) fn wait_for<T>(
    timeout: Duration,
    mut look: impl FnMut(&mut State) -> Result<Found<T>, Code>,
) -> Result<T, Code> {
    let started = Instant::now();
    let mut library = lock();
    loop {
        let left = match look(library.ready()?)? {
            Found::Item(item) => return Ok(item),
            Found::Nothing => timeout.saturating_sub(started.elapsed()),
            Found::Held => LOOK_EVERY,
        };
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
