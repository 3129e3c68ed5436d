//! What access control tells about itself.
//!
//! Purpose: counters of rejected identities by reason and of reviews by outcome.
//! Inputs: decisions as they are made.
//! Invariants: label values come from closed sets.

use std::sync::Arc;

use forewarm_runtime::metrics::register;
use forewarm_signals::serving;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::Reason;

type ByLabels<const N: usize> = Family<[(&'static str, &'static str); N], Counter>;

/// Counters of access control. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    rejections: ByLabels<1>,
    reviews: ByLabels<2>,
}

impl Metrics {
    /// Registers the counters.
    pub fn register(&self, registry: &mut Registry) {
        register(
            registry,
            &serving::IDENTITY_REJECTIONS_TOTAL,
            self.inner.rejections.clone(),
        );
        register(
            registry,
            &serving::ACCESS_REVIEWS_TOTAL,
            self.inner.reviews.clone(),
        );
    }

    pub(super) fn rejected(&self, reason: Reason) {
        self.inner
            .rejections
            .get_or_create(&[("reason", reason.as_str())])
            .inc();
    }

    pub(super) fn reviewed(&self, review: &'static str, result: &'static str) {
        self.inner
            .reviews
            .get_or_create(&[("review", review), ("result", result)])
            .inc();
    }
}
