//! Which pod a process on a GPU belongs to.
//!
//! Purpose: turn the process ids that a driver names into pods, and their late samples into what each uses now.
//! Inputs: process lists and samples of the driver, `/proc` of the host.
//! ```text
//! driver ──► tracker (in the GPU's thread) ──► snapshot ──► owners (thread pid-owners) ──► Owners ──► join
//!                 ▲ starts                                      ▲ cgroups
//!               proc ────────────────────────────────────────── proc
//! ```
//! Invariants: a process is a pid *and* its start; nothing is attributed by a pid alone; where `/proc` is not the
//! host's nothing is attributed at all.

pub mod cgroup;
pub mod owners;
pub mod proc;
pub mod tracker;
