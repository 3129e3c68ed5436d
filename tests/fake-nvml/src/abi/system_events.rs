//! System event sets: which GPUs lose their driver, which get one (13.x).

use std::time::Duration;

use nvml_wrapper_sys::bindings::{
    nvmlReturn_t, nvmlSystemEventData_v1_t, nvmlSystemEventSetCreateRequest_t,
    nvmlSystemEventSetFreeRequest_t, nvmlSystemEventSetWaitRequest_t, nvmlSystemRegisterEventRequest_t,
};

use super::{expect_version, guard, system_call};
use crate::code::Code;
use crate::event::SystemSet;
use crate::gate::{self, Found};
use crate::state::{BIND, UNBIND};

/// Sets a client can hold: far above any use, so that a leak is noticed.
const MOST_SETS: usize = 4096;

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemEventSetCreate(
    request: *mut nvmlSystemEventSetCreateRequest_t,
) -> nvmlReturn_t {
    system_call("nvmlSystemEventSetCreate", |state| {
        // SAFETY: a non-null pointer is valid by NVML's contract; null is refused here.
        unsafe { expect_version(request, 1) }?;
        if state.system_sets.len() >= MOST_SETS {
            return Err(Code::INSUFFICIENT_RESOURCES);
        }
        let token = state.token();
        state.system_sets.insert(token, SystemSet::default());
        // SAFETY: not null, as the version was read.
        unsafe { (*request).set = std::ptr::without_provenance_mut(token) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemEventSetFree(request: *mut nvmlSystemEventSetFreeRequest_t) -> nvmlReturn_t {
    system_call("nvmlSystemEventSetFree", |state| {
        // SAFETY: a non-null pointer is valid by NVML's contract; null is refused here.
        let token = unsafe {
            expect_version(request, 1)?;
            (*request).set.addr()
        };
        let removed = state.system_sets.remove(&token);
        removed.map(drop).ok_or(Code::INVALID_ARGUMENT)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemRegisterEvents(
    request: *mut nvmlSystemRegisterEventRequest_t,
) -> nvmlReturn_t {
    system_call("nvmlSystemRegisterEvents", |state| {
        // SAFETY: a non-null pointer is valid by NVML's contract; null is refused here.
        let (token, kinds) = unsafe {
            expect_version(request, 1)?;
            ((*request).set.addr(), (*request).eventTypes)
        };
        if kinds & !(BIND | UNBIND) != 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        let set = state.system_sets.get_mut(&token).ok_or(Code::INVALID_ARGUMENT)?;
        set.kinds |= kinds;
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemEventSetWait(request: *mut nvmlSystemEventSetWaitRequest_t) -> nvmlReturn_t {
    guard(|| {
        // SAFETY: a non-null pointer is valid by NVML's contract; null is refused here.
        let (token, timeout_ms, data, room) = unsafe {
            expect_version(request, 1)?;
            let request = &*request;
            (
                request.set.addr(),
                request.timeoutms,
                request.data,
                request.dataSize as usize,
            )
        };
        if data.is_null() || room == 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        let timeout = Duration::from_millis(u64::from(timeout_ms));
        let taken: Vec<(u64, u32)> = gate::wait_for(timeout, |state| {
            let set = state.system_sets.get_mut(&token).ok_or(Code::INVALID_ARGUMENT)?;
            let some = set.queue.len().min(room);
            if some == 0 {
                return Ok(Found::Nothing);
            }
            Ok(Found::Item(set.queue.drain(..some).collect()))
        })?;
        for (nth, (kind, gpu_id)) in taken.iter().enumerate() {
            // SAFETY: the client's array has room for `dataSize` entries, and no more were taken.
            unsafe {
                data.add(nth).write(nvmlSystemEventData_v1_t {
                    eventType: *kind,
                    gpuId: *gpu_id,
                });
            }
        }
        // SAFETY: not null, as the version was read.
        unsafe { (*request).numEvent = taken.len() as u32 };
        Ok(())
    })
}
