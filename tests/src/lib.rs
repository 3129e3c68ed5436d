//! The testbed: a real control plane, simulated GPU nodes and what the level tests and the demo share.

pub mod bench;
pub mod child;
pub mod contain;
pub mod controlplane;
pub mod demo;
pub mod install;
pub mod kubelet;
pub mod kustomize;
pub mod load;
pub mod netns;
pub mod process;
pub mod scratch;
pub mod simnode;
pub mod wait;
