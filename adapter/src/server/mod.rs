//! Stub: filled next.
pub mod metrics;
