//! Event sets: register, then wait until an Xid comes or time is up.

use std::ffi::{c_uint, c_ulonglong};
use std::time::Duration;

use nvml_wrapper_sys::bindings::{
    nvmlEventData_t, nvmlEventSet_t, nvmlEventTypeClock, nvmlEventTypeDoubleBitEccError, nvmlEventTypePState,
    nvmlEventTypeSingleBitEccError, nvmlEventTypeXidCriticalError, nvmlReturn_t,
};

use super::{device_call, guard, put, system_call};
use crate::code::Code;
use crate::control::Effect;
use crate::state::{self, Event, EventSet, State};

/// Event bit of an Xid.
pub(crate) const XID: u64 = nvmlEventTypeXidCriticalError as u64;

/// Bits these boards can be registered for.
const SUPPORTED: u64 = XID
    | nvmlEventTypeSingleBitEccError as u64
    | nvmlEventTypeDoubleBitEccError as u64
    | nvmlEventTypePState as u64
    | nvmlEventTypeClock as u64;

/// Sets a client can hold: far above any use, so that a leak is noticed.
const MOST_SETS: usize = 4096;
/// No MIG instance.
const NO_INSTANCE: u32 = u32::MAX;

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
    nvmlDeviceGetSupportedEventTypes(kinds: *mut c_ulonglong) |view| put(kinds, SUPPORTED);
    nvmlDeviceRegisterEvents(kinds: c_ulonglong, set: nvmlEventSet_t) |view| {
        if kinds & !SUPPORTED != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let at = view.at;
        let set = view.state.event_sets.get_mut(&token(set)).ok_or(Code::INVALID_ARGUMENT)?;
        set.registered.push((at, kinds));
        Ok(())
    };
}

/// Next event of the set; a set with a GPU that is lost says so once nothing is left in it.
fn next(state: &mut State, set: usize) -> Result<Option<Event>, Code> {
    let events = state.event_sets.get_mut(&set).ok_or(Code::INVALID_ARGUMENT)?;
    if let Some(event) = events.queue.pop_front() {
        return Ok(Some(event));
    }
    let registered = events.registered.clone();
    for (at, _) in registered {
        for effect in state.effects(Some(at), "nvmlEventSetWait_v2") {
            match effect {
                Effect::Lost => return Err(Code::GPU_IS_LOST),
                Effect::Error(code) => return Err(Code(code)),
                _ => {}
            }
        }
    }
    Ok(None)
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
        let event = state::wait_for(timeout, |state| next(state, token(set)))?;
        let instance = if with_instance { NO_INSTANCE } else { 0 };
        // SAFETY: not null; valid by NVML's contract.
        unsafe {
            put(
                data,
                nvmlEventData_t {
                    device: state::handle(event.gpu),
                    eventType: event.kind,
                    eventData: event.data,
                    gpuInstanceId: instance,
                    computeInstanceId: instance,
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
