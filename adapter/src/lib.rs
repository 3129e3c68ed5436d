//! Aggregated API server for custom and external metrics.
//!
//! Purpose: what an HPA asks of `custom.metrics.k8s.io` and `external.metrics.k8s.io`, answered from memory
//! with values that say when they were measured.
//! Inputs: scrapes of exporters, a watch of pods, a config file, requests of kube-apiserver.
//! Invariants: a request touches memory only (an access review on a cache miss excepted); a value that is
//! stale, non-finite or unattributable is absent with a reason; every group version is served at all times.
//!
//! ```text
//!  exporters ──► source ──► index ◄── pods (watch)
//!                             │ provider
//!  kube-apiserver ─► server ─► access ─► routes ─► query ─► wire
//!                                   └──► discovery, openapi (bytes built once per catalog)
//! ```

pub mod access;
pub mod api;
pub mod args;
pub mod certs;
pub mod config;
pub mod discovery;
pub mod exposition;
pub mod index;
pub mod metrics;
pub mod provider;
pub mod quantity;
pub mod query;
pub mod retry;
pub mod rights;
pub mod route;
pub mod run;
pub mod selector;
pub mod server;
pub mod source;
pub mod status;
pub mod wire;
