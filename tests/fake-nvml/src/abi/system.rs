//! Library life cycle and the node: init, shutdown, versions, count, handles.

use std::ffi::{CStr, c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlReturn_t};

use super::{View, guard, put, put_text, system_call};
use crate::code::Code;
use crate::gate;
use crate::handle::Handle;
use crate::identity;
use crate::state::{State, Target};

/// Flags of `nvmlInitWithFlags` that exist: no GPUs needed, do not attach.
const KNOWN_INIT_FLAGS: c_uint = 0b11;

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> nvmlReturn_t {
    guard(gate::init)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> nvmlReturn_t {
    guard(gate::init)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(flags: c_uint) -> nvmlReturn_t {
    guard(|| {
        if flags & !KNOWN_INIT_FLAGS == 0 {
            gate::init()
        } else {
            Err(Code::INVALID_ARGUMENT)
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> nvmlReturn_t {
    guard(gate::shutdown)
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
        unsafe { put(count, state.order.len() as c_uint) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount(count: *mut c_uint) -> nvmlReturn_t {
    // SAFETY: same contract.
    unsafe { nvmlDeviceGetCount_v2(count) }
}

/// Handle of what the call found; a MIG device's is given out by that.
fn handle(view: &mut View<'_>) -> Result<Handle, Code> {
    match view.mig {
        Some(index) => view.state.give_mig(view.at, index),
        None => Ok(Handle::Gpu(view.at)),
    }
}

/// Answers a handle; a lost GPU has none, as with the real library.
fn give_handle(
    name: &str,
    device: *mut nvmlDevice_t,
    find: impl Fn(&State) -> Result<Target, Code>,
) -> nvmlReturn_t {
    super::call_about(name, find, |view| {
        // SAFETY: a non-null pointer is valid by NVML's contract.
        unsafe { put(device, handle(view)?.pointer()) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut nvmlDevice_t) -> nvmlReturn_t {
    give_handle("nvmlDeviceGetHandleByIndex_v2", device, |state| {
        state
            .by_index(index)
            .map(Target::gpu)
            .ok_or(Code::INVALID_ARGUMENT)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex(index: c_uint, device: *mut nvmlDevice_t) -> nvmlReturn_t {
    // SAFETY: same contract.
    unsafe { nvmlDeviceGetHandleByIndex_v2(index, device) }
}

/// The visible GPU that fits.
fn find(state: &State, fits: impl Fn(u32) -> bool) -> Result<Target, Code> {
    let found = state.order.iter().find(|at| fits(state.gpus[**at].index));
    found.map(|at| Target::gpu(*at)).ok_or(Code::NOT_FOUND)
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
        let known = state.order.iter().find_map(|at| {
            let gpu = &state.gpus[*at];
            if gpu.uuid == uuid {
                return Some(Target::gpu(*at));
            }
            let device = gpu.layout.devices.iter().find(|device| device.uuid == uuid)?;
            Some(Target {
                gpu: *at,
                mig: Some(device.index),
            })
        });
        known.ok_or(Code::NOT_FOUND)
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
        find(state, |index| matches(&identity::pci_bus_id(index)))
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
        find(state, |index| identity::serial(seed, index) == asked)
    })
}
