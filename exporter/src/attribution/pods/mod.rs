//! Which pods are on this node: UID, name, whether they ended, whether they are Ready.
//!
//! Purpose: the facts that turn the kubelet's (namespace, name) into a pod UID.
//! Inputs: the kubelet's Pods API, or the API server where the kubelet does not serve it.
//! Invariants: one writer at a time; a set of facts is whole (published after its first sync only); a name that two
//! living pods bear resolves to neither.

mod api_server;
mod kubelet;
mod source;

pub(super) use source::Watch;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::allocation::Gap;

/// Facts older than this do not name a pod any more: a stateful pod can be replaced under its name within seconds.
const TRUSTED_AFTER_LOSS: Duration = Duration::from_secs(5);
/// Ten times the pods a kubelet runs by default; a source that tells more is cut off here.
const MOST_PODS: usize = 1_100;

/// What is known of one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pod {
    pub(super) uid: String,
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) phase: Phase,
    pub(super) ready: bool,
}

/// What matters of a pod's phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Running.
    Running,
    /// Succeeded or Failed: it holds nothing any more.
    Ended,
    /// Pending or Unknown.
    Other,
}

impl Phase {
    fn read(text: &str) -> Self {
        match text {
            "Running" => Self::Running,
            "Succeeded" | "Failed" => Self::Ended,
            _ => Self::Other,
        }
    }
}

impl Pod {
    pub(super) fn has_ended(&self) -> bool {
        self.phase == Phase::Ended
    }
}

/// Who tells about pods. The value of label `source` of `forewarm_exporter_attribution_pod_source`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PodSource {
    /// The kubelet's Pods API.
    Kubelet,
    /// A pod watch at the API server.
    ApiServer,
}

impl PodSource {
    /// Every source.
    pub const ALL: [Self; 2] = [Self::Kubelet, Self::ApiServer];

    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Kubelet => "kubelet",
            Self::ApiServer => "api-server",
        }
    }
}

/// A whole set of pods at one moment.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    by_uid: HashMap<String, Arc<Pod>>,
    /// Who told; absent before the first sync.
    pub(super) source: Option<PodSource>,
    /// When the source was lost; absent while it is connected.
    pub(super) lost_at: Option<Instant>,
    /// Pods that were not kept.
    pub(super) dropped: u64,
    /// Grows with each set that says something new, over all sources, so that a reader can tell whether anything
    /// happened: see [`Facts::follows`].
    pub(super) changes: u64,
}

impl Facts {
    /// An empty set that a source is about to fill.
    pub(super) fn of(source: PodSource) -> Self {
        Self {
            source: Some(source),
            ..Self::default()
        }
    }

    pub(super) fn apply(&mut self, pod: Pod) {
        match self.by_uid.get(&pod.uid) {
            Some(known) if **known == pod => return,
            None if self.by_uid.len() >= MOST_PODS => {
                self.dropped += 1;
                return;
            }
            _ => {}
        }
        self.by_uid.insert(pod.uid.clone(), Arc::new(pod));
    }

    pub(super) fn remove(&mut self, uid: &str) {
        self.by_uid.remove(uid);
    }

    /// These facts after `told`, with the count carried on; absent when they say nothing new. Compared whole: a set
    /// that was read again must replace the one before even if it is as large and came by as many events.
    pub(super) fn follows(mut self, told: &Self) -> Option<Self> {
        let is_same = told.source == self.source
            && told.lost_at.is_none()
            && told.dropped == self.dropped
            && told.by_uid == self.by_uid;
        self.changes = told.changes + 1;
        (!is_same).then_some(self)
    }

    pub(super) fn by_uid(&self, uid: &str) -> Option<&Pod> {
        self.by_uid.get(uid).map(AsRef::as_ref)
    }

    /// Whether two living pods bear one name, which does not last unless an event was lost.
    pub(super) fn has_ambiguous_names(&self) -> bool {
        let mut names = std::collections::HashSet::new();
        self.by_uid
            .values()
            .filter(|pod| !pod.has_ended())
            .any(|pod| !names.insert((&pod.namespace, &pod.name)))
    }

    /// The pod of a name: the living one, or else one that ended.
    pub(super) fn by_name(&self, namespace: &str, name: &str, now: Instant) -> Result<&Pod, Gap> {
        if self.source.is_none() {
            return Err(Gap::PodsUnknown);
        }
        if self
            .lost_at
            .is_some_and(|lost_at| now.saturating_duration_since(lost_at) > TRUSTED_AFTER_LOSS)
        {
            return Err(Gap::PodsStale);
        }
        let mut living = self.bearers(namespace, name).filter(|pod| !pod.has_ended());
        match (living.next(), living.next()) {
            (Some(pod), None) => Ok(pod),
            (Some(_), Some(_)) => Err(Gap::PodAmbiguous),
            (None, _) => self.bearers(namespace, name).next().ok_or(Gap::PodUnknown),
        }
    }

    /// The one living pod of a name, however old the facts are.
    pub(super) fn living(&self, namespace: &str, name: &str) -> Option<&Pod> {
        let mut living = self.bearers(namespace, name).filter(|pod| !pod.has_ended());
        living.next().filter(|_| living.next().is_none())
    }

    fn bearers<'a, 'n>(
        &'a self,
        namespace: &'n str,
        name: &'n str,
    ) -> impl Iterator<Item = &'a Pod> + use<'a, 'n> {
        self.by_uid
            .values()
            .map(AsRef::as_ref)
            .filter(move |pod| pod.namespace == namespace && pod.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str, name: &str, ended: bool) -> Pod {
        Pod {
            uid: uid.into(),
            namespace: "ml".into(),
            name: name.into(),
            phase: if ended { Phase::Ended } else { Phase::Running },
            ready: !ended,
        }
    }

    fn uid<'a>(facts: &'a Facts, name: &str, now: Instant) -> Result<&'a str, Gap> {
        facts.by_name("ml", name, now).map(|pod| pod.uid.as_str())
    }

    #[test]
    fn a_name_resolves_to_the_living_pod() {
        let now = Instant::now();
        let mut facts = Facts::of(PodSource::Kubelet);
        facts.apply(pod("1", "web-0", true));
        assert_eq!(uid(&facts, "web-0", now), Ok("1"));
        facts.apply(pod("2", "web-0", false));
        assert_eq!(uid(&facts, "web-0", now), Ok("2"));
        assert_eq!(uid(&facts, "web-1", now), Err(Gap::PodUnknown));
        assert_eq!(facts.by_name("other", "web-0", now), Err(Gap::PodUnknown));
    }

    #[test]
    fn a_name_of_two_living_pods_resolves_to_neither() {
        let now = Instant::now();
        let mut facts = Facts::of(PodSource::Kubelet);
        facts.apply(pod("1", "web-0", false));
        facts.apply(pod("2", "web-0", false));
        assert!(facts.has_ambiguous_names());
        assert_eq!(uid(&facts, "web-0", now), Err(Gap::PodAmbiguous));
        facts.remove("1");
        assert!(!facts.has_ambiguous_names());
        assert_eq!(uid(&facts, "web-0", now), Ok("2"));
    }

    #[test]
    fn a_set_that_was_read_again_is_news_when_a_pod_of_it_is_another() {
        let set = |uid: &str| {
            let mut facts = Facts::of(PodSource::Kubelet);
            facts.apply(pod(uid, "web-0", false));
            facts
        };
        let first = set("1").follows(&Facts::default()).unwrap();
        assert!(set("1").follows(&first).is_none());
        // Both events of a replacement were lost, and the pods were read again.
        let second = set("2").follows(&first).unwrap();
        assert!(second.changes > first.changes);
        assert_eq!(uid(&second, "web-0", Instant::now()), Ok("2"));
        // A source that is back is news, whatever it tells.
        let mut lost = second.clone();
        lost.lost_at = Some(Instant::now());
        assert!(set("2").follows(&lost).unwrap().changes > second.changes);
    }

    #[test]
    fn facts_of_a_lost_source_name_pods_for_seconds_only() {
        let now = Instant::now();
        let mut facts = Facts::of(PodSource::Kubelet);
        facts.apply(pod("1", "web-0", false));
        facts.lost_at = Some(now);
        assert_eq!(uid(&facts, "web-0", now + TRUSTED_AFTER_LOSS), Ok("1"));
        assert_eq!(
            uid(&facts, "web-0", now + TRUSTED_AFTER_LOSS * 2),
            Err(Gap::PodsStale)
        );
        assert_eq!(uid(&Facts::default(), "web-0", now), Err(Gap::PodsUnknown));
    }

    #[test]
    fn the_set_is_bounded_and_counts_what_it_drops() {
        let mut facts = Facts::of(PodSource::Kubelet);
        for n in 0..MOST_PODS + 5 {
            facts.apply(pod(&n.to_string(), "p", true));
        }
        facts.apply(pod("0", "renamed", true));
        assert_eq!((facts.by_uid.len(), facts.dropped), (MOST_PODS, 5));
    }
}
