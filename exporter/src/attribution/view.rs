//! What readers hold: the latest attribution, without waiting.
//!
//! Inputs: the poller swaps whole values in. Invariants: `load` never waits; clones see the same state.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::Notify;

use super::allocation::{Attribution, Gap, Gaps};
use super::pods::PodSource;

/// The latest attribution.
#[derive(Debug, Clone, Default)]
pub struct AttributionView {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    latest: ArcSwap<Attribution>,
    health: ArcSwap<Health>,
    joined_gaps: ArcSwapOption<Gaps>,
    changed: Notify,
}

/// State behind the gauges besides the attribution itself.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Health {
    pub(super) allocatable_at: Option<Instant>,
    /// Who told about pods, and since when they are lost.
    pub(super) pods: Option<(PodSource, Option<Instant>)>,
}

impl AttributionView {
    /// A view of a fixed attribution, for tests of readers.
    #[must_use]
    pub fn of(attribution: Attribution) -> Self {
        let view = Self::default();
        view.inner.latest.store(Arc::new(attribution));
        view
    }

    /// The latest attribution. Never waits.
    #[must_use]
    pub fn load(&self) -> Arc<Attribution> {
        self.inner.latest.load_full()
    }

    /// Tells what a join could not attribute, so that the gaps gauge covers it: see [`super::join::Joined::gaps`].
    pub fn record_gaps(&self, gaps: &Gaps) {
        if self.inner.joined_gaps.load().as_deref() != Some(gaps) {
            self.inner.joined_gaps.store(Some(Arc::new(gaps.clone())));
        }
    }

    /// Waits until the kubelet has told allocations and somebody has told pods; false when `limit` passes before.
    /// For one-shot output: a server renders what is there.
    pub async fn settled(&self, limit: Duration) -> bool {
        let settled = async {
            loop {
                let changed = self.inner.changed.notified();
                if self.is_settled() {
                    return;
                }
                changed.await;
            }
        };
        tokio::time::timeout(limit, settled).await.is_ok()
    }

    fn is_settled(&self) -> bool {
        let latest = self.load();
        latest.answered_at.is_some()
            && latest.allocatable.is_some()
            && self.health().pods.is_some()
            && !latest.gaps.contains_key(&Gap::PodsUnknown)
    }

    pub(super) fn store(&self, attribution: Attribution, health: Health) {
        self.inner.health.store(Arc::new(health));
        self.inner.latest.store(Arc::new(attribution));
        self.inner.changed.notify_waiters();
    }

    pub(super) fn health(&self) -> Health {
        **self.inner.health.load()
    }

    pub(super) fn gaps(&self) -> Arc<Gaps> {
        self.inner
            .joined_gaps
            .load_full()
            .unwrap_or_else(|| Arc::new(self.load().gaps.clone()))
    }
}
