//! Library life cycle and the node: init, shutdown, versions, count, handles.

use std::ffi::{CStr, c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlReturn_t};

use super::{guard, put, put_text, system_call};
use crate::code::Code;
use crate::identity;
use crate::state::{self, State};

/// Flags of `nvmlInitWithFlags` that exist: no GPUs needed, do not attach.
const KNOWN_INIT_FLAGS: c_uint = 0b11;

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> nvmlReturn_t {
    guard(state::init)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> nvmlReturn_t {
    guard(state::init)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(flags: c_uint) -> nvmlReturn_t {
    guard(|| {
        if flags & !KNOWN_INIT_FLAGS == 0 {
            state::init()
        } else {
            Err(Code::INVALID_ARGUMENT)
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> nvmlReturn_t {
    guard(state::shutdown)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: nvmlReturn_t) -> *const c_char {
    Code::text(code).as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> nvmlReturn_t {
    system_call("nvmlSystemGetDriverVersion", |state| {
        // SAFETY: the client passes a buffer of `length` bytes.
        unsafe { put_text(version, length, &state.settings.driver.to_string()) }
    })
}

/// The one system getter that works without init.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) -> nvmlReturn_t {
    guard(|| {
        let text = crate::settings::Resolved::load()
            .map_or_else(|_| "13".to_owned(), |all| all.driver.nvml_version());
        // SAFETY: the client passes a buffer of `length` bytes.
        unsafe { put_text(version, length, &text) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> nvmlReturn_t {
    system_call("nvmlSystemGetCudaDriverVersion_v2", |state| {
        // SAFETY: a non-null pointer is valid by NVML's contract.
        unsafe { put(version, state.settings.driver.cuda_version()) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion(version: *mut c_int) -> nvmlReturn_t {
    // SAFETY: same contract.
    unsafe { nvmlSystemGetCudaDriverVersion_v2(version) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetProcessName(
    pid: c_uint,
    name: *mut c_char,
    length: c_uint,
) -> nvmlReturn_t {
    system_call("nvmlSystemGetProcessName", |_| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/comm")).map_err(|_| Code::NOT_FOUND)?;
        // SAFETY: the client passes a buffer of `length` bytes.
        unsafe { put_text(name, length, text.trim_end()) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> nvmlReturn_t {
    system_call("nvmlDeviceGetCount_v2", |state| {
        // SAFETY: a non-null pointer is valid by NVML's contract.
        unsafe { put(count, state.gpus.len() as c_uint) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount(count: *mut c_uint) -> nvmlReturn_t {
    // SAFETY: same contract.
    unsafe { nvmlDeviceGetCount_v2(count) }
}

/// Answers a handle; a lost GPU has none, as with the real library.
fn give_handle(
    name: &str,
    device: *mut nvmlDevice_t,
    find: impl Fn(&State) -> Result<usize, Code>,
) -> nvmlReturn_t {
    super::call_about(name, find, |view| {
        // SAFETY: a non-null pointer is valid by NVML's contract.
        unsafe { put(device, state::handle(view.at)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut nvmlDevice_t) -> nvmlReturn_t {
    give_handle("nvmlDeviceGetHandleByIndex_v2", device, |state| {
        if (index as usize) < state.gpus.len() {
            Ok(index as usize)
        } else {
            Err(Code::INVALID_ARGUMENT)
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex(index: c_uint, device: *mut nvmlDevice_t) -> nvmlReturn_t {
    // SAFETY: same contract.
    unsafe { nvmlDeviceGetHandleByIndex_v2(index, device) }
}

/// Text that a client passed.
///
/// # Safety
/// A non-null `text` is NUL-terminated.
unsafe fn client_text<'a>(text: *const c_char) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByUUID(
    uuid: *const c_char,
    device: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    // SAFETY: NVML takes NUL-terminated text.
    let uuid = unsafe { client_text(uuid) };
    give_handle("nvmlDeviceGetHandleByUUID", device, |state| {
        let uuid = uuid.ok_or(Code::INVALID_ARGUMENT)?;
        state
            .gpus
            .iter()
            .position(|gpu| gpu.uuid == uuid)
            .ok_or(Code::NOT_FOUND)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(
    bus_id: *const c_char,
    device: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    // SAFETY: NVML takes NUL-terminated text.
    let bus_id = unsafe { client_text(bus_id) };
    give_handle("nvmlDeviceGetHandleByPciBusId_v2", device, |state| {
        let asked = bus_id.ok_or(Code::INVALID_ARGUMENT)?;
        // Both the eight-digit and the four-digit domain are accepted, in either case.
        let matches = |long: &str| long.eq_ignore_ascii_case(asked) || long[4..].eq_ignore_ascii_case(asked);
        state
            .gpus
            .iter()
            .position(|gpu| matches(&identity::pci_bus_id(gpu.index)))
            .ok_or(Code::NOT_FOUND)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleBySerial(
    serial: *const c_char,
    device: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    // SAFETY: NVML takes NUL-terminated text.
    let serial = unsafe { client_text(serial) };
    give_handle("nvmlDeviceGetHandleBySerial", device, |state| {
        let asked = serial.ok_or(Code::INVALID_ARGUMENT)?;
        let seed = &state.settings.uuid_seed;
        state
            .gpus
            .iter()
            .position(|gpu| identity::serial(seed, gpu.index) == asked)
            .ok_or(Code::NOT_FOUND)
    })
}
