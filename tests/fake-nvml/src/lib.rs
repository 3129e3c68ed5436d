//! A stand-in for `libnvidia-ml.so.1`, loadable by any NVML client.
//!
//! Built as a cdylib (what clients load) and as an rlib (what tests use to write control files and to put copies of
//! the library in place). Inputs: settings (environment or a file beside the library), a profile of a GPU model, a
//! control file that says what the GPUs do right now. See `README.md` for the use from outside.
//!
//! Invariants: no call ever unwinds into C; a handle is checked before use; counters never go back while a driver
//! stays loaded; utilisation saturates at 100; each call costs what the settings say.

// NVML is a C interface: exported functions take raw pointers from their client. Every unsafe block states why it is
// sound, and clients are tests and the exporter under test, never production.
#![allow(unsafe_code)]
// Readings are simulated within ranges far below where these casts lose anything that matters.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss
)]

mod abi;
mod accounting;
mod code;
pub mod control;
mod control_file;
mod counters;
mod damage;
pub mod driver_level;
pub mod elf;
mod event;
mod fault;
mod gate;
mod gpu;
mod handle;
pub mod identity;
pub mod library;
mod load;
mod loaded_from;
pub mod memory_time;
pub mod mig;
mod process;
pub mod profile;
pub mod settings;
mod state;

pub use control::{Control, GpuControl};
pub use identity::{gpu_uuid, mig_uuid, pci_bus_id};
