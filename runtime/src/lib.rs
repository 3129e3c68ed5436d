//! What every program wires: logs, admin endpoints, supervised tasks, TLS reload, kube client.
//!
//! Purpose: the process scaffolding that two programs need in the same way. A `main` installs the crypto
//! provider, parses its arguments through [`exit`] and calls one function of its library.
//! Inputs: command-line arguments and their environment twins, certificate files, signals.
//! Invariants: knows nothing of GPUs, pods or metric families of one program; never decides trust (that is
//! `adapter::access`); [`tasks`] is the only module that spawns onto the async runtime.

pub mod admin;
pub mod exit;
#[cfg(feature = "kube")]
pub mod kube;
pub mod listen;
pub mod logs;
pub mod metrics;
pub mod status;
pub mod tasks;
pub mod tls;

/// An error of any kind that may cross threads.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// Makes ring the process-wide crypto provider of rustls; later calls change nothing.
pub fn install_crypto() {
    // An error means that a provider is installed already, which is what we want.
    let _already_installed = rustls::crypto::ring::default_provider().install_default();
}
