//! The seam between the simulated node and what runs in its simulated containers.
//!
//! Containers of images that the node's image map calls [`Run::Workload`] have no process: the node
//! asks a [`WorkloadFactory`] for one [`Workload`] per container and calls [`Workload::tick`] about ten
//! times a second for as long as the container runs. What `tick` returns becomes the load of the
//! container's GPUs in the fake driver's control file and the readiness of its pod.
//!
//! Invariants: one factory serves all nodes of a testbed, so it can divide an offered load over the
//! replicas that are ready; `tick` never blocks; a workload is dropped when its container has ended.
//!
//! [`Run::Workload`]: super::Run::Workload

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What a workload is told once, when its container starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkloadContext {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// UID of the pod.
    pub pod_uid: String,
    /// Name of the container.
    pub container: String,
    /// Name of the node.
    pub node: String,
    /// Labels of the pod when the container started.
    pub labels: BTreeMap<String, String>,
    /// Arguments of the container, `command` then `args`, with `$(VAR)` expanded.
    pub args: Vec<String>,
    /// Environment of the container.
    pub env: BTreeMap<String, String>,
    /// UUIDs of the GPUs it holds, in device order; empty for a container without GPUs.
    pub gpu_uuids: Vec<String>,
}

/// What a workload is told at each tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tick {
    /// The time of this tick.
    pub now: Instant,
    /// Time since the container started.
    pub running_for: Duration,
    /// Whether the API server has the pod as Ready, that is whether a Service would send to it.
    pub ready: bool,
    /// Whether the container was asked to end (SIGTERM); it may drain until its grace period is over.
    pub terminating: bool,
}

/// Load on one GPU. `None` leaves the device's idle value. Ratios are 0–1, the rest in base units.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GpuLoad {
    /// Share of time with a kernel resident; above 1 is offered load that saturates at 1.
    pub busy: Option<f64>,
    /// Share of SMs with work, on GPUs with GPM.
    pub sm_active: Option<f64>,
    /// Resident warps over the maximum.
    pub sm_occupancy: Option<f64>,
    /// Share of time that tensor cores are busy.
    pub tensor: Option<f64>,
    /// Share of time that device memory is read or written.
    pub dram: Option<f64>,
    /// Device memory in use, bytes.
    pub memory_used_bytes: Option<u64>,
    /// NVLink received, bytes per second.
    pub nvlink_rx_bytes_per_second: Option<f64>,
    /// NVLink sent, bytes per second.
    pub nvlink_tx_bytes_per_second: Option<f64>,
    /// Power drawn, watts.
    pub power_watts: Option<f64>,
}

/// What a workload does between this tick and the next.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Progress {
    /// Load per GPU held, in the order of [`WorkloadContext::gpu_uuids`]; missing ones are idle.
    pub gpus: Vec<GpuLoad>,
    /// Whether its readiness probe would pass (false while it loads weights).
    pub ready: bool,
    /// Ends the container with this exit code.
    pub exit: Option<i32>,
}

/// A program in a simulated container.
pub trait Workload: Send {
    /// Advances to `tick.now` and tells the load until the next tick.
    fn tick(&mut self, tick: &Tick) -> Progress;
}

/// Starts workloads of one image.
pub trait WorkloadFactory: Send + Sync {
    /// Starts one container.
    ///
    /// # Errors
    /// A message for the container's status: the node reports it as a container that cannot start.
    fn start(&self, context: WorkloadContext) -> Result<Box<dyn Workload>, String>;
}

/// A workload without load that is ready after `loading` and ends at SIGTERM: for containers whose
/// presence matters and whose work does not.
#[derive(Debug, Clone, Copy, Default)]
pub struct Idle {
    /// Time from start to ready.
    pub loading: Duration,
}

impl WorkloadFactory for Idle {
    fn start(&self, _context: WorkloadContext) -> Result<Box<dyn Workload>, String> {
        Ok(Box::new(*self))
    }
}

impl Workload for Idle {
    fn tick(&mut self, tick: &Tick) -> Progress {
        Progress {
            gpus: Vec::new(),
            ready: tick.running_for >= self.loading,
            exit: tick.terminating.then_some(0),
        }
    }
}
