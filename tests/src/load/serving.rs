//! A serving workload for simulated nodes: the offered load, divided over the replicas that are ready.
//!
//! One [`Serving`] is the factory for every container of the workload's image on all nodes, and so
//! stands for the Service in front of them: a replica gets a share once the API server has it as Ready,
//! and none from the moment it is asked to end, when it finishes what it has and exits.
//!
//! Invariants: shares add up to the offered load whenever a replica is ready; a replica whose
//! container has ended is forgotten at once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::clock::LoadClock;
use super::replica::{Activity, Replica};
use super::shape::unit;
use crate::simnode::workload::{GpuLoad, Progress, Tick, Workload, WorkloadContext, WorkloadFactory};

/// How much loading times differ: up to this share of the setting, either way.
const LOADING_SPREAD: f64 = 0.2;

/// Where a replica is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Weights are on their way into memory.
    Loading,
    /// Loaded; the API server does not have it as Ready yet.
    Loaded,
    /// Takes a share of the load.
    Ready,
    /// Finishes its queue before it ends.
    Draining,
}

/// A replica as its own node sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicaView {
    /// Name of the pod.
    pub pod: String,
    /// Name of the node.
    pub node: String,
    /// Where it is in its life.
    pub phase: Phase,
    /// Share of its SM time in use.
    pub sm_active: f64,
    /// Requests waiting.
    pub queue: f64,
}

/// The workload; cheap to clone, all clones are one.
#[derive(Debug, Clone)]
pub struct Serving {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    load: Arc<LoadClock>,
    loading: Duration,
    seed: u64,
    replicas: Mutex<BTreeMap<String, ReplicaView>>,
}

impl Serving {
    /// A workload under `load` whose replicas take about `loading` to load their weights.
    #[must_use]
    pub fn new(load: Arc<LoadClock>, loading: Duration, seed: u64) -> Self {
        Self {
            shared: Arc::new(Shared {
                load,
                loading,
                seed,
                replicas: Mutex::new(BTreeMap::new()),
            }),
        }
    }

    /// All replicas whose containers run.
    #[must_use]
    pub fn replicas(&self) -> Vec<ReplicaView> {
        self.shared.replicas().values().cloned().collect()
    }
}

impl Shared {
    fn replicas(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, ReplicaView>> {
        // Views are replaced whole, so a panic elsewhere leaves none half written.
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The share of one more or one of the ready replicas, in GPUs.
    fn share(&self, now: Instant) -> f64 {
        let ready = self
            .replicas()
            .values()
            .filter(|view| view.phase == Phase::Ready)
            .count()
            .max(1);
        self.load.gpus(now) / u32::try_from(ready).map_or(1.0, f64::from)
    }
}

impl WorkloadFactory for Serving {
    fn start(&self, context: WorkloadContext) -> Result<Box<dyn Workload>, String> {
        if context.gpu_uuids.is_empty() {
            return Err("the serving workload needs a GPU: set limits `nvidia.com/gpu`".to_owned());
        }
        // FNV-1a of the UID: the same pods load as long in every run with these UIDs.
        let index = context
            .pod_uid
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
            });
        let stretch = 1.0 + LOADING_SPREAD * (unit(self.shared.seed, index) * 2.0 - 1.0);
        Ok(Box::new(Running {
            shared: Arc::clone(&self.shared),
            replica: Replica::new(context.gpu_uuids.len(), self.shared.loading.mul_f64(stretch)),
            last: None,
            context,
        }))
    }
}

/// One container of the workload.
struct Running {
    shared: Arc<Shared>,
    context: WorkloadContext,
    replica: Replica,
    last: Option<Instant>,
}

impl Running {
    fn note(&self, phase: Phase, activity: &Activity) {
        let view = ReplicaView {
            pod: self.context.pod.clone(),
            node: self.context.node.clone(),
            phase,
            sm_active: activity.sm_active,
            queue: activity.queue,
        };
        self.shared.replicas().insert(self.context.pod_uid.clone(), view);
    }
}

impl Workload for Running {
    fn tick(&mut self, tick: &Tick) -> Progress {
        let step = tick.now.saturating_duration_since(self.last.unwrap_or(tick.now));
        self.last = Some(tick.now);
        let takes_requests = tick.ready && !tick.terminating;
        let offered = if takes_requests {
            self.shared.share(tick.now)
        } else {
            0.0
        };
        let activity = self.replica.advance(tick.running_for, step, offered);
        let phase = match (tick.terminating, activity.loaded, tick.ready) {
            (true, ..) => Phase::Draining,
            (_, false, _) => Phase::Loading,
            (_, true, false) => Phase::Loaded,
            (_, true, true) => Phase::Ready,
        };
        self.note(phase, &activity);
        Progress {
            gpus: self
                .context
                .gpu_uuids
                .iter()
                .map(|_| gpu_load(&activity))
                .collect(),
            ready: activity.loaded,
            exit: (tick.terminating && self.replica.is_drained()).then_some(0),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.replicas().remove(&self.context.pod_uid);
    }
}

fn gpu_load(activity: &Activity) -> GpuLoad {
    // A few tens of gigabytes, never negative.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "bytes of one GPU"
    )]
    let memory_used_bytes = activity.memory_used_bytes as u64;
    GpuLoad {
        busy: Some(activity.busy),
        sm_active: Some(activity.sm_active),
        sm_occupancy: Some(activity.sm_active * 0.5),
        tensor: Some(activity.sm_active * 0.6),
        dram: Some(activity.sm_active * 0.8),
        memory_used_bytes: Some(memory_used_bytes),
        power_watts: Some(activity.power_watts),
        ..GpuLoad::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Constant;
    use super::*;

    fn context(number: usize) -> WorkloadContext {
        WorkloadContext {
            namespace: "demo".into(),
            pod: format!("llm-{number}"),
            pod_uid: format!("uid-{number}"),
            container: "server".into(),
            node: "gpu-1".into(),
            labels: BTreeMap::new(),
            args: Vec::new(),
            env: BTreeMap::new(),
            gpu_uuids: vec![format!("GPU-{number}")],
        }
    }

    fn run(
        workloads: &mut [Box<dyn Workload>],
        start: Instant,
        seconds: std::ops::Range<u64>,
        ready: &[bool],
    ) -> Vec<Progress> {
        let mut last = Vec::new();
        for tenth in seconds.start * 10..seconds.end * 10 {
            let running_for = Duration::from_millis(tenth * 100);
            last = workloads
                .iter_mut()
                .zip(ready)
                .map(|(workload, ready)| {
                    workload.tick(&Tick {
                        now: start + running_for,
                        running_for,
                        ready: *ready,
                        terminating: false,
                    })
                })
                .collect();
        }
        last
    }

    fn sm(progress: &Progress) -> f64 {
        progress.gpus[0].sm_active.unwrap()
    }

    #[test]
    fn load_is_divided_over_ready_replicas_only() {
        let clock = Arc::new(LoadClock::new(Arc::new(Constant(1.2))));
        let serving = Serving::new(clock, Duration::from_secs(5), 7);
        let mut workloads: Vec<_> = (0..3)
            .map(|number| serving.start(context(number)).unwrap())
            .collect();
        let start = Instant::now();
        let loading = run(&mut workloads, start, 0..3, &[false; 3]);
        assert!(
            loading
                .iter()
                .all(|progress| !progress.ready && sm(progress).abs() < f64::EPSILON)
        );
        let two = run(&mut workloads, start, 7..20, &[true, true, false]);
        assert!(two.iter().all(|progress| progress.ready));
        assert!((sm(&two[0]) - 0.6).abs() < 0.01 && (sm(&two[1]) - 0.6).abs() < 0.01);
        assert!(
            sm(&two[2]).abs() < f64::EPSILON,
            "not Ready, so no Service sends to it"
        );
        let three = run(&mut workloads, start, 20..30, &[true; 3]);
        assert!(three.iter().all(|progress| (sm(progress) - 0.4).abs() < 0.01));
        drop(workloads);
        assert!(serving.replicas().is_empty());
    }

    #[test]
    fn a_replica_that_must_end_drains_first() {
        let clock = Arc::new(LoadClock::new(Arc::new(Constant(3.0))));
        let serving = Serving::new(clock, Duration::ZERO, 7);
        let mut workload = serving.start(context(0)).unwrap();
        let start = Instant::now();
        let tick = |tenth: u64, ready, terminating| {
            let running_for = Duration::from_millis(tenth * 100);
            Tick {
                now: start + running_for,
                running_for,
                ready,
                terminating,
            }
        };
        for tenth in 0..30 {
            let _ = workload.tick(&tick(tenth, true, false));
        }
        let first = workload.tick(&tick(30, true, true));
        assert!(first.exit.is_none() && serving.replicas()[0].phase == Phase::Draining);
        let ended = (31..400).find(|tenth| workload.tick(&tick(*tenth, false, true)).exit.is_some());
        assert!(ended.is_some());
    }

    #[test]
    fn a_container_without_a_gpu_is_refused_with_the_cure() {
        let clock = Arc::new(LoadClock::new(Arc::new(Constant(1.0))));
        let mut context = context(0);
        context.gpu_uuids.clear();
        let error = Serving::new(clock, Duration::ZERO, 7)
            .start(context)
            .err()
            .unwrap();
        assert!(error.contains("nvidia.com/gpu"));
    }
}
