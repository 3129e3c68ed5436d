//! A replica of the standalone half: it exists here, in the stand-in kubelet and as load of one GPU.
//!
//! Invariants: it has no pod before it begins; it is ready once its loading time has passed.

use std::time::{Duration, Instant};

use forewarm_fake_nvml::control::GpuControl;

use super::NAMESPACE;
use crate::kubelet::Pod;
use crate::load::replica::{Activity, Replica};

/// A replica that exists only here and in the stand-in kubelet.
pub(super) struct Simulated {
    /// Name of its pod.
    pub(super) name: String,
    uid: String,
    gpu: String,
    life: Option<Life>,
}

struct Life {
    since: Instant,
    loading: Duration,
    replica: Replica,
    last: Instant,
    activity: Option<Activity>,
}

impl Simulated {
    pub(super) fn new(index: usize, gpu: &str) -> Self {
        Self {
            name: format!("llm-{index}"),
            uid: format!("demo-{index}"),
            gpu: gpu.to_owned(),
            life: None,
        }
    }

    pub(super) fn begin(&mut self, now: Instant, loading: Duration) {
        self.life.get_or_insert_with(|| Life {
            since: now,
            loading,
            replica: Replica::new(1, loading),
            last: now,
            activity: None,
        });
    }

    /// Whether its container has started.
    pub(super) fn has_begun(&self) -> bool {
        self.life.is_some()
    }

    pub(super) fn is_ready(&self, now: Instant) -> bool {
        self.life
            .as_ref()
            .is_some_and(|life| now.saturating_duration_since(life.since) >= life.loading)
    }

    pub(super) fn advance(&mut self, now: Instant, share: f64) -> Option<Activity> {
        let ready = self.is_ready(now);
        let life = self.life.as_mut()?;
        let offered = if ready { share } else { 0.0 };
        let step = now.saturating_duration_since(life.last);
        life.last = now;
        life.activity = Some(
            life.replica
                .advance(now.saturating_duration_since(life.since), step, offered),
        );
        life.activity
    }

    pub(super) fn pod(&self, now: Instant) -> Option<Pod> {
        self.life.as_ref()?;
        let mut pod = Pod::running(NAMESPACE, &self.name, &self.uid, &[&self.gpu]);
        pod.ready = self.is_ready(now);
        Some(pod)
    }

    pub(super) fn queue(&self) -> f64 {
        self.life
            .as_ref()
            .and_then(|life| life.activity)
            .map_or(0.0, |activity| activity.queue)
    }
}

/// Its activity as the fake driver takes it.
pub(super) fn gpu(activity: &Activity) -> GpuControl {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "bytes of one GPU"
    )]
    let memory_used_bytes = activity.memory_used_bytes as u64;
    GpuControl {
        busy: Some(activity.busy),
        sm_active: Some(activity.sm_active),
        memory_used_bytes: Some(memory_used_bytes),
        power_watts: Some(activity.power_watts),
        ..GpuControl::default()
    }
}
