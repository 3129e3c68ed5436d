//! Event sets: register, then wait until an Xid comes or time is up.

use std::ffi::{c_uint, c_ulonglong};
use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings::{nvmlEventData_t, nvmlEventSet_t, nvmlReturn_t};

use super::{View, device_call, guard, put, system_call};
use crate::code::Code;
use crate::control::Effect;
use crate::event::{Event, EventKind, EventSet};
use crate::gate::{self, Found, error_of, still_blocked};
use crate::handle::Handle;
use crate::state::{State, Target};

/// Sets a client can hold: far above any use, so that a leak is noticed.
const MOST_SETS: usize = 4096;
/// No MIG instance.
const NO_INSTANCE: u32 = u32::MAX;

/// Bits this board can be registered for under this driver. Which driver brought the later ones is not documented;
/// here the levels at which the header has them.
fn supported_kinds(view: &View<'_>) -> u64 {
    use EventKind as Kind;
    let profile = view.profile();
    let major = view.state.settings.driver.major();
    let with = |known: bool, kinds: &[EventKind]| {
        let bits = kinds.iter().fold(0, |bits, kind| bits | kind.bit());
        if known { bits } else { 0 }
    };
    with(true, &[Kind::Xid, Kind::Pstate, Kind::Clock])
        | with(profile.ecc.supported, &[Kind::SingleBitEcc, Kind::DoubleBitEcc])
        | with(profile.mig, &[Kind::MigConfig])
        | with(
            profile.ecc.row_remapping && major >= 550,
            &[
                Kind::SingleBitEccStorm,
                Kind::DramRetirement,
                Kind::DramRetirementFailure,
            ],
        )
        | with(
            profile.ecc.sram_status && major >= 550,
            &[Kind::NonFatalPoison, Kind::FatalPoison],
        )
        | with(major >= 570, &[Kind::GpuUnavailable, Kind::RecoveryAction])
}

fn token(set: nvmlEventSet_t) -> usize {
    set.addr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetCreate(set: *mut nvmlEventSet_t) -> nvmlReturn_t {
    system_call("nvmlEventSetCreate", |state| {
        if set.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        if state.event_sets.len() >= MOST_SETS {
            return Err(Code::INSUFFICIENT_RESOURCES);
        }
        let token = state.token();
        state.event_sets.insert(token, EventSet::default());
        // SAFETY: not null; valid by NVML's contract.
        unsafe { put(set, std::ptr::without_provenance_mut(token)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetFree(set: nvmlEventSet_t) -> nvmlReturn_t {
    system_call("nvmlEventSetFree", |state| {
        state
            .event_sets
            .remove(&token(set))
            .map(drop)
            .ok_or(Code::INVALID_ARGUMENT)
    })
}

device_call! {
    nvmlDeviceGetSupportedEventTypes(kinds: *mut c_ulonglong) |view| put(kinds, supported_kinds(view));
    nvmlDeviceRegisterEvents(kinds: c_ulonglong, set: nvmlEventSet_t) |view| {
        if kinds & !supported_kinds(view) != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let at = view.at;
        let set = view.state.event_sets.get_mut(&token(set)).ok_or(Code::INVALID_ARGUMENT)?;
        set.registered.push((at, kinds));
        Ok(())
    };
}

/// Next event of the set; a set with a GPU that is lost says so once nothing is left in it.
fn next(state: &mut State, set: usize, counted: bool, started: Instant) -> Result<Found<Event>, Code> {
    let events = state.event_sets.get_mut(&set).ok_or(Code::INVALID_ARGUMENT)?;
    let waiting = events.queue.pop_front();
    let mut targets: Vec<Target> = events.registered.iter().map(|(at, _)| Target::gpu(*at)).collect();
    targets.dedup();
    let effects: Vec<Effect> = targets
        .into_iter()
        .flat_map(|target| state.strike(Some(target), "nvmlEventSetWait_v2", counted))
        .collect();
    if still_blocked(&effects, started) {
        let events = state.event_sets.get_mut(&set).ok_or(Code::INVALID_ARGUMENT)?;
        waiting
            .into_iter()
            .for_each(|event| events.queue.push_front(event));
        return Ok(Found::Held);
    }
    if let Some(event) = waiting {
        return Ok(Found::Item(event));
    }
    for effect in effects {
        error_of(effect)?;
    }
    Ok(Found::Nothing)
}

/// Waits really block, and cost nothing while they do.
fn wait(
    set: nvmlEventSet_t,
    data: *mut nvmlEventData_t,
    timeout_ms: c_uint,
    with_instance: bool,
) -> nvmlReturn_t {
    guard(|| {
        if data.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        let timeout = Duration::from_millis(u64::from(timeout_ms));
        let (mut counted, started) = (true, Instant::now());
        let (event, privileged) = gate::wait_for(timeout, |state| {
            let found = next(state, token(set), std::mem::take(&mut counted), started)?;
            Ok(match found {
                Found::Item(event) => Found::Item((event, state.control.privileged)),
                Found::Nothing => Found::Nothing,
                Found::Held => Found::Held,
            })
        })?;
        let (gi, ci) = match event.instance {
            _ if !with_instance => (0, 0),
            Some(ids) if privileged => ids,
            _ => (NO_INSTANCE, NO_INSTANCE),
        };
        // SAFETY: not null; valid by NVML's contract.
        unsafe {
            put(
                data,
                nvmlEventData_t {
                    device: Handle::Gpu(event.gpu).pointer(),
                    eventType: event.kind,
                    eventData: event.data,
                    gpuInstanceId: gi,
                    computeInstanceId: ci,
                },
            )
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetWait_v2(
    set: nvmlEventSet_t,
    data: *mut nvmlEventData_t,
    timeout_ms: c_uint,
) -> nvmlReturn_t {
    wait(set, data, timeout_ms, true)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetWait(
    set: nvmlEventSet_t,
    data: *mut nvmlEventData_t,
    timeout_ms: c_uint,
) -> nvmlReturn_t {
    wait(set, data, timeout_ms, false)
}
