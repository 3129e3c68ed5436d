//! The C side: what every exported function has in common.
//!
//! Inputs: pointers from any NVML client. Each entry checks them for null, checks version words and buffer sizes,
//! catches panics (nothing unwinds into C) and burns the cost of a call. Everything else is decided in `state`
//! and answered by the modules here, one per area of NVML.

// The names are NVML's.
#![allow(non_snake_case)]

pub(crate) mod errors;
pub(crate) mod events;
pub(crate) mod fabric;
pub(crate) mod fields;
pub(crate) mod gpm;
pub(crate) mod identity;
pub(crate) mod link_fields;
pub(crate) mod links;
pub(crate) mod mig;
pub(crate) mod power;
pub(crate) mod processes;
pub(crate) mod system;
pub(crate) mod system_events;
pub(crate) mod utilization;

use std::cell::Cell;
use std::ffi::{c_char, c_uint};
use std::panic::AssertUnwindSafe;
use std::time::Instant;

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlReturn_t};

use crate::code::Code;
use crate::control::{Effect, Garbage};
use crate::gate;
use crate::gpu::Gpu;
use crate::load::Load;
use crate::mig::Device;
use crate::profile::Profile;
use crate::state::{State, Struck, Target};

/// A percentage no GPU has (nvtop#110 saw 129).
const IMPOSSIBLE_PERCENT: u32 = 129;
/// A number no GPU has: four ASCII zeros read as an integer, the "808 million" of DCGM#199.
const IMPOSSIBLE_NUMBER: u32 = 0x3030_3030;

/// The blanks of DCGM, which reach clients where a tool passes them on.
const BLANK_INT: u32 = 0x7fff_fff0;
const BLANK_LONG: u64 = 0x7fff_ffff_ffff_fff0;
const BLANK_DOUBLE: f64 = 140_737_488_355_328.0;

/// What the body of a device call sees.
pub(crate) struct View<'a> {
    pub(crate) state: &'a mut State,
    /// The GPU, or the one that the MIG device is on.
    pub(crate) at: usize,
    /// MIG index, where the call came through a MIG device's handle.
    pub(crate) mig: Option<u32>,
    struck: Struck,
    /// What strikes the entry that is being answered, of a call with many.
    entry: Cell<Option<Garbage>>,
}

impl View<'_> {
    pub(crate) fn gpu(&self) -> &Gpu {
        &self.state.gpus[self.at]
    }

    pub(crate) fn load(&self) -> &Load {
        &self.gpu().load
    }

    /// The MIG device that the call is about, if it is about one.
    pub(crate) fn mig_device(&self) -> Option<&Device> {
        self.mig.and_then(|index| self.gpu().mig_device(index))
    }

    pub(crate) fn profile(&self) -> &Profile {
        &self.gpu().profile
    }

    fn garbage(&self) -> Option<Garbage> {
        self.entry.get().or(self.struck.garbage)
    }

    /// Begins the answer of the entry with field or metric id `id`: the code that it is struck with, if it is.
    pub(crate) fn begin_entry(&self, id: u32) -> Result<(), Code> {
        self.entry.set(None);
        for (_, effect) in self.struck.entries.iter().filter(|(struck, _)| *struck == id) {
            gate::error_of(*effect)?;
            if let Effect::Garbage(kind) = effect {
                self.entry.set(Some(*kind));
            }
        }
        Ok(())
    }

    /// A share as a whole percentage.
    pub(crate) fn percent(&self, share: f64) -> u32 {
        match self.garbage() {
            None => (share * 100.0).round() as u32,
            Some(Garbage::OutOfRange) => IMPOSSIBLE_PERCENT,
            Some(Garbage::Sentinel) => u32::MAX,
            Some(Garbage::Blank) => BLANK_INT,
        }
    }

    pub(crate) fn int(&self, value: u32) -> u32 {
        match self.garbage() {
            None => value,
            Some(Garbage::OutOfRange) => IMPOSSIBLE_NUMBER,
            Some(Garbage::Sentinel) => u32::MAX,
            Some(Garbage::Blank) => BLANK_INT,
        }
    }

    pub(crate) fn long(&self, value: u64) -> u64 {
        match self.garbage() {
            None => value,
            Some(Garbage::OutOfRange) => 1 << 60,
            Some(Garbage::Sentinel) => u64::MAX,
            Some(Garbage::Blank) => BLANK_LONG,
        }
    }

    /// A floating-point reading.
    pub(crate) fn double(&self, value: f64) -> f64 {
        match self.garbage() {
            None => value,
            Some(Garbage::OutOfRange) => f64::from(IMPOSSIBLE_PERCENT),
            Some(Garbage::Sentinel) => f64::NAN,
            Some(Garbage::Blank) => BLANK_DOUBLE,
        }
    }

    /// A traffic or energy counter, which may be made to wrap.
    pub(crate) fn counter(&self, value: u64) -> u64 {
        let misbehaves = self.gpu().control.counters.as_ref();
        misbehaves.map_or(value, |counters| counters.shown(value))
    }

    /// Two-phase sizing as [`put_list`], over which a fault can make the list grow.
    ///
    /// # Safety
    /// As [`put_list`].
    pub(crate) unsafe fn put_list<T: Copy>(
        &self,
        array: *mut T,
        count: *mut c_uint,
        items: &[T],
    ) -> Result<(), Code> {
        if self.struck.growth > 0 && !array.is_null() && !count.is_null() {
            let grown = items.len() as c_uint + self.struck.growth;
            // SAFETY: not null; validity is the caller's promise.
            unsafe {
                if count.read() < grown {
                    count.write(grown);
                    return Err(Code::INSUFFICIENT_SIZE);
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { put_list(array, count, items) }
    }

    /// Total, reserved and used frame buffer of the GPU or the MIG device, or the time in place of the used part.
    pub(crate) fn memory(&self) -> (u64, u64, u64) {
        let (total, reserved, used) = match self.mig_device() {
            Some(device) => {
                let used = self.load().mig_memory_used.get(&device.gi).copied().unwrap_or(0);
                (device.profile.memory_mib << 20, 0, used)
            }
            None => {
                let profile = self.profile();
                (
                    profile.memory_total_bytes(),
                    profile.memory_reserved_bytes(),
                    self.load().memory_used,
                )
            }
        };
        if self.load().time_in_memory {
            let told = crate::memory_time::encode(self.state.now_us / 1000, total - reserved);
            (total, reserved, told)
        } else {
            (total, reserved, used)
        }
    }
}

/// Success is supported; anything else is NOT_SUPPORTED.
pub(crate) const fn supported(yes: bool) -> Result<(), Code> {
    if yes { Ok(()) } else { Err(Code::NOT_SUPPORTED) }
}

/// Turns an outcome into NVML's return code; a panic is UNKNOWN instead of unwinding into C.
pub(crate) fn guard(call: impl FnOnce() -> Result<(), Code>) -> nvmlReturn_t {
    match std::panic::catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => 0,
        Ok(Err(Code(code))) => code,
        Err(_) => Code::UNKNOWN.0,
    }
}

/// Burns what is left of the cost of call `name`: by spinning, because the real library computes.
fn burn(name: &str, started: Instant) {
    let cost = gate::cost(name);
    while started.elapsed() < cost {
        std::hint::spin_loop();
    }
}

/// A call about the GPU behind `device`.
pub(crate) fn about_device(
    name: &str,
    device: nvmlDevice_t,
    body: impl FnOnce(&mut View<'_>) -> Result<(), Code>,
) -> nvmlReturn_t {
    call_about(name, |state| state.target(device), body)
}

/// A call about the device that `find` yields.
pub(crate) fn call_about(
    name: &str,
    find: impl Fn(&State) -> Result<Target, Code>,
    body: impl FnOnce(&mut View<'_>) -> Result<(), Code>,
) -> nvmlReturn_t {
    guard(|| {
        let started = Instant::now();
        let outcome = gate::call(
            name,
            |state| find(state).map(Some),
            |state, target, struck| {
                let Target { gpu, mig } = target.ok_or(Code::INVALID_ARGUMENT)?;
                body(&mut View {
                    state,
                    at: gpu,
                    mig,
                    struck,
                    entry: Cell::new(None),
                })
            },
        );
        burn(name, started);
        outcome
    })
}

/// A call about no GPU in particular.
pub(crate) fn system_call(name: &str, body: impl FnOnce(&mut State) -> Result<(), Code>) -> nvmlReturn_t {
    guard(|| {
        let started = Instant::now();
        let outcome = gate::call(name, |_| Ok(None), |state, _, _| body(state));
        burn(name, started);
        outcome
    })
}

/// Writes an answer.
///
/// # Safety
/// A non-null `to` is valid for a write of `T`.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: not null; validity is the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes NUL-terminated text into a buffer of `length` bytes.
///
/// # Safety
/// A non-null `to` is valid for writes of `length` bytes.
pub(crate) unsafe fn put_text(to: *mut c_char, length: c_uint, text: &str) -> Result<(), Code> {
    if to.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    if text.len() >= length as usize {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    // SAFETY: text and its NUL fit into `length` bytes, which the caller promises to be writable.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// Two-phase sizing: writes the needed count; INSUFFICIENT_SIZE unless the array holds all items.
///
/// # Safety
/// A non-null `count` is valid for reads and writes, a non-null `array` for writes of `*count` items.
pub(crate) unsafe fn put_list<T: Copy>(array: *mut T, count: *mut c_uint, items: &[T]) -> Result<(), Code> {
    if count.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: not null; validity is the caller's promise.
    let capacity = unsafe { count.read() } as usize;
    // SAFETY: as above.
    unsafe { count.write(items.len() as c_uint) };
    if items.is_empty() {
        return Ok(());
    }
    if array.is_null() || capacity < items.len() {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    // SAFETY: `array` holds `capacity` items, at least as many as are copied; the two do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(items.as_ptr(), array, items.len()) };
    Ok(())
}

/// Version word of a struct: size in the low 24 bits, version above.
pub(crate) const fn version_word<T>(version: u32) -> u32 {
    size_of::<T>() as u32 | (version << 24)
}

/// Reads the version word that a versioned struct begins with.
///
/// # Safety
/// A non-null `from` is valid for reading its first four bytes.
pub(crate) unsafe fn version_of<T>(from: *const T) -> Result<u32, Code> {
    if from.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: not null; every versioned struct begins with an unsigned int.
    Ok(unsafe { from.cast::<c_uint>().read() })
}

/// VERSION_MISMATCH unless the struct says `version` of `T`.
///
/// # Safety
/// As [`version_of`].
pub(crate) unsafe fn expect_version<T>(from: *const T, version: u32) -> Result<(), Code> {
    // SAFETY: the caller's promise.
    if unsafe { version_of(from) }? == version_word::<T>(version) {
        Ok(())
    } else {
        Err(Code::VERSION_MISMATCH)
    }
}

/// Exports a call about one GPU: `device_call! { nvmlX(out: *mut c_uint) |view| put(out, …) }`.
macro_rules! device_call {
    ($($name:ident($($argument:ident: $type:ty),* $(,)?) |$view:ident| $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe, reason = "a call that is never answered writes nothing")]
        unsafe extern "C" fn $name(device: nvml_wrapper_sys::bindings::nvmlDevice_t, $($argument: $type),*)
            -> nvml_wrapper_sys::bindings::nvmlReturn_t
        {
            // SAFETY: the client keeps NVML's contract: a non-null pointer is valid for its documented type and count.
            $crate::abi::about_device(stringify!($name), device, |$view| unsafe {
                _ = &$view;
                $body
            })
        }
    )*};
}
pub(crate) use device_call;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_code() {
        assert_eq!(guard(|| panic!("a bug in the fake")), 999);
    }

    #[test]
    fn version_words_carry_size_and_version() {
        assert_eq!(
            version_word::<nvml_wrapper_sys::bindings::nvmlMemory_v2_t>(2),
            40 | (2 << 24)
        );
    }
}
