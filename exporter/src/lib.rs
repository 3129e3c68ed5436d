//! The node agent: reads GPUs through NVML, asks the kubelet who holds them, serves both as text.
//!
//! ```text
//! nvml ──► poll (a thread per GPU) ──► snapshot ──┐
//! kubelet sockets ──► attribution ────────────────┼──► render (once a tick, on the first scrape) ──► server
//! ```
//! Inputs: the driver's library, the kubelet's sockets, flags.
//! Invariants: a scrape touches memory only; a value that is stale, refused or unsupported is absent; one sick GPU,
//! field or socket takes nothing else along.

pub mod args;
pub mod attribution;
pub mod health;
pub mod metrics;
mod once;
pub mod poll;
pub mod process;
pub mod render;
mod run;
pub mod server;
pub mod snapshot;
pub mod web_config;

pub use run::run;

/// Name of the program, as logs and build info tell it.
pub const PROGRAM: &str = "forewarm-exporter";
