//! Messages, clients and servers of the kubelet's local gRPC APIs.
//!
//! Purpose: one place that includes the generated code, so the rest names APIs and not files.
//! Inputs: `generated/`, written by `cargo xtask generate` from `proto/`.
//! Invariants: nothing here is written by hand.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    reason = "generated from the kubelet's protos, which carry their own comments"
)]

/// PodResources v1: which container holds which device.
pub mod podresources {
    include!("generated/v1.rs");
}

/// Pods v1alpha1: the pods the kubelet runs, as serialised `v1.Pod`.
pub mod pods {
    include!("generated/v1alpha1.rs");
}

/// The few fields of `v1.Pod` that attribution reads.
pub mod corev1 {
    include!("generated/corev1.rs");
}
