//! Process level: the real binaries, started against the fake NVML and fake kubelet sockets on loopback.
//!
//! Purpose: build what is under test, start it, find its ports, read its metrics.
//! Inputs: this workspace; cargo from the environment.
//! Invariants: binaries are those of the present sources (cargo builds them once per test process); ports are
//! chosen by the kernel and read from the log; children die with their guard.

mod adapter;
mod artefacts;
mod exporter;
mod kube_api;
mod program;
mod scrape;
mod target;

pub use adapter::{Adapter, CONFIG_HEAD, Reply};
pub use artefacts::{Artefacts, artefacts};
pub use exporter::{Exporter, ExporterOptions, control_path};
pub use kube_api::{KubeApi, World};
pub use program::Program;
pub use scrape::{Answer, Sample, Scrape, fetch, fetch_with};
pub use target::{Behaviour, Target};
