//! Typed readings from the NVIDIA management library (NVML).
//!
//! Purpose: the one place that talks to `libnvidia-ml.so.1`, and so the only unsafe code of the programs. What
//! leaves this crate has a unit (newtypes in base units) and is plausible: a value the device cannot have measured
//! is a [`Gap::Rejected`] with its reason, never clamped and never passed on.
//! Inputs: a library path; the driver behind it.
//! Invariants:
//! - "cannot" ([`Gap::Unsupported`]) stays apart from "did not" ([`Gap::Failed`], with code and call);
//! - the library is closed only after the last device, event wait or call that uses it is gone: every handle holds
//!   a count, so a thread stuck inside the driver keeps its code mapped;
//! - dropping never panics, also where the library lacks the symbol that would release something;
//! - every call is timed and visible while it runs ([`CallLog`], [`InFlight`]), so a stuck one can be named.
//!
//! ```text
//! trait Nvml ── trait Device        real: nvml-wrapper for cold facts, nvml-wrapper-sys for hot and scoped calls
//!      │            │               fake: in process, feature `test-util`
//!   wait_event   readings of quantities
//! ```
#![allow(
    unsafe_code,
    reason = "NVML is a C library: each call is one unsafe block with the argument for its soundness"
)]

mod call;
#[cfg(any(test, feature = "test-util"))]
pub mod fake;
mod field;
mod model;
mod quantity;
mod reading;
mod real;

pub use call::{BUCKETS, Call, CallFigures, CallLog, InFlight};
pub use field::{Field, FieldQuery, Number, Numbering, Scope};
pub use model::{
    ClockDomain, ClockEvents, Device, DeviceKey, Event, EventKind, Fabric, FabricState, Facts, Gpm, Memory,
    Nvml, RemappedRows, Utilization,
};
pub use quantity::{Bytes, BytesPerSecond, Celsius, Hertz, Joules, Ratio, Seconds, Watts};
pub use reading::{Code, Gap, Reading, Rejection};
pub use real::{DEFAULT_LIBRARY, Library, OpenError};
