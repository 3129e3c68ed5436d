//! Which target speaks for a pod, where several of one source do.
//!
//! Invariants: a target that is known to run on the pod's own node is believed; where nobody knows the node, the
//! first to speak holds the claim as long as it keeps speaking, and a second one makes the pod disputed. How long
//! a claim lasts follows the rhythm of its source, so that two targets that are read rarely still meet.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::pods::Pod;
use super::{Batch, TargetId};
use crate::config::Config;

/// A claim lasts at least this long without a new body.
const SHORTEST: Duration = Duration::from_secs(10);
/// A claim outlives this many intervals of its source: one scrape may fail, and a slow one may come late.
const INTERVALS: u32 = 3;
/// Claims without a new body for this long are dropped.
const FORGET: Duration = Duration::from_secs(120);

/// Who answers for a pod.
#[derive(Debug)]
struct Claim {
    target: TargetId,
    at: Instant,
    /// Whether the node of the pod and of the target are known, and the same.
    is_judged: bool,
    rival: Option<(TargetId, Instant)>,
}

/// All claims, by source and pod UID.
#[derive(Debug, Default)]
pub(super) struct Claims {
    by_pod: HashMap<(Arc<str>, Arc<str>), Claim>,
}

/// How long a claim lasts without a new body.
fn lasting(config: &Config, source: &str) -> Duration {
    config
        .sources
        .iter()
        .find(|known| *known.name == *source)
        .map_or(SHORTEST, |source| SHORTEST.max(source.interval * INTERVALS))
}

impl Claims {
    /// Whether the batch's target may speak for the pod.
    pub(super) fn claim(&mut self, pod: &Pod, batch: &Batch, config: &Config) -> bool {
        // That both are the same was checked when the row was identified.
        let is_judged = pod.node.is_some() && batch.node.is_some();
        let key = (Arc::clone(&batch.target.source), Arc::clone(&pod.uid));
        let fresh = Claim {
            target: batch.target.clone(),
            at: batch.at,
            is_judged,
            rival: None,
        };
        let Some(claim) = self.by_pod.get_mut(&key) else {
            self.by_pod.insert(key, fresh);
            return true;
        };
        if claim.target == batch.target {
            claim.at = batch.at;
            claim.is_judged = is_judged;
            return true;
        }
        let silence = batch.at.saturating_duration_since(claim.at);
        // Two exporters on the pod's own node, as during a rolling update, both tell the truth.
        if is_judged || silence > lasting(config, &batch.target.source) {
            *claim = fresh;
            return true;
        }
        // Nobody knows where this one runs, so it says nothing against one on the pod's own node.
        if !claim.is_judged {
            claim.rival = Some((batch.target.clone(), batch.at));
        }
        false
    }

    /// The two targets that both claim a pod now.
    pub(super) fn dispute(
        &self,
        source: &Arc<str>,
        uid: &Arc<str>,
        config: &Config,
        now: Instant,
    ) -> Option<(&TargetId, &TargetId)> {
        let claim = self.by_pod.get(&(Arc::clone(source), Arc::clone(uid)))?;
        let (rival, at) = claim.rival.as_ref()?;
        (now.saturating_duration_since(*at) <= lasting(config, source)).then_some((&claim.target, rival))
    }

    /// A pod is gone.
    pub(super) fn forget_pod(&mut self, uid: &Arc<str>, config: &Config) {
        for source in &config.sources {
            self.by_pod.remove(&(Arc::clone(&source.name), Arc::clone(uid)));
        }
    }

    /// A target is gone.
    pub(super) fn forget_target(&mut self, target: &TargetId) {
        self.by_pod.retain(|_, claim| claim.target != *target);
        for claim in self.by_pod.values_mut() {
            claim.rival.take_if(|(rival, _)| rival == target);
        }
    }

    /// Drops what nobody has claimed for long, and claims of sources that are no more.
    pub(super) fn tidy(&mut self, config: &Config, now: Instant) {
        self.by_pod.retain(|(source, _), claim| {
            let limit = FORGET.max(lasting(config, source));
            now.saturating_duration_since(claim.at) < limit
        });
    }
}
