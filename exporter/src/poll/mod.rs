//! Reading the GPUs: one thread each, a supervisor that opens the library, a thread for events.
//!
//! Purpose: keep every GPU's snapshot at most one interval old, and one sick GPU from holding up the others.
//! Inputs: a way to open the library; the interval.
//! ```text
//! supervisor ── opens ──► Nvml ──► gpu-0 … gpu-n threads ──► DeviceSlot (snapshot swapped whole) ──► readers
//!     ▲  watches ages        └───► events thread ──────────► DeviceSlot (xids)
//!     └── reopens when a thread finds the driver gone, or when every GPU refuses
//! ```
//! Invariants: nothing waits for a thread that may sit inside the driver; the library is dropped only by its last
//! user; without a driver the supervisor goes on trying and everything else goes on serving.

mod access;
mod batch;
mod capability;
pub mod collect;
mod counter;
mod device;
mod links;
mod report;
pub mod schedule;
mod stop;
mod supervisor;
mod tally;

pub use supervisor::{Opener, Supervision, start};
pub use tally::PollCounts;
