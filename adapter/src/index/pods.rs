//! The pods that may be served: running ones, by UID.
//!
//! Invariants: in a cluster the watch is the only authority; without one, pods exist as long as a target
//! reports them. A pod's readiness carries since when it holds, so that readings from before (a model that
//! still loads) are never averaged into a ready pod's value.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use forewarm_signals::{label, pod as pod_families};

use super::{Batch, NamespacePods, TargetId};

/// A running pod.
#[derive(Debug, Clone, PartialEq)]
pub struct Pod {
    /// UID.
    pub uid: Arc<str>,
    /// Namespace.
    pub namespace: Arc<str>,
    /// Name.
    pub name: Arc<str>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Node, where known.
    pub node: Option<Arc<str>>,
    /// Readiness; `None` where nobody says.
    pub ready: Option<bool>,
    /// Since when it is ready, where the change was seen.
    pub ready_since: Option<Instant>,
}

/// A change of the pods.
#[derive(Debug, Clone)]
pub enum PodChange {
    /// The whole truth after a (re)list; everything else is gone.
    Replace(Vec<Pod>),
    /// Added or changed.
    Apply(Pod),
    /// No longer running, or deleted.
    Remove(Arc<str>),
    /// The watch is broken since then: what is known stays, and is no longer known to be true.
    Silent(Instant),
    /// The watch works, though nothing changed.
    Heard,
}

/// Who knows the pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodMode {
    /// A watch of the cluster.
    Watched,
    /// The targets' own rows.
    Reported,
}

/// All pods.
#[derive(Debug, Default)]
pub(super) struct Pods {
    by_uid: HashMap<Arc<str>, Arc<Pod>>,
    by_namespace: HashMap<Arc<str>, Arc<NamespacePods>>,
    reported: HashMap<TargetId, HashSet<Arc<str>>>,
    pub(super) known: bool,
    /// Since when the watch is broken.
    pub(super) silent_since: Option<Instant>,
}

/// UIDs whose values must be looked at again, and those that are gone.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Touched {
    pub(super) changed: Vec<Arc<str>>,
    pub(super) gone: Vec<Arc<Pod>>,
}

impl Pods {
    pub(super) fn get(&self, uid: &str) -> Option<&Arc<Pod>> {
        self.by_uid.get(uid)
    }

    pub(super) fn find(&self, namespace: &str, name: &str) -> Option<&Arc<Pod>> {
        self.by_namespace.get(namespace)?.get(name)
    }

    pub(super) fn len(&self) -> usize {
        self.by_uid.len()
    }

    pub(super) fn published(&self) -> HashMap<Arc<str>, Arc<NamespacePods>> {
        self.by_namespace.clone()
    }

    /// Applies a change of the watch.
    pub(super) fn apply(&mut self, change: PodChange, now: Instant) -> Touched {
        let mut touched = Touched::default();
        self.silent_since = match &change {
            PodChange::Silent(at) => Some(*at),
            _ => None,
        };
        match change {
            PodChange::Silent(_) | PodChange::Heard => {}
            PodChange::Apply(pod) => self.insert(pod, now, &mut touched),
            PodChange::Remove(uid) => self.remove(&uid, &mut touched),
            PodChange::Replace(pods) => {
                let kept: HashSet<Arc<str>> = pods.iter().map(|pod| Arc::clone(&pod.uid)).collect();
                let gone: Vec<_> = self
                    .by_uid
                    .keys()
                    .filter(|uid| !kept.contains(*uid))
                    .cloned()
                    .collect();
                for uid in gone {
                    self.remove(&uid, &mut touched);
                }
                for pod in pods {
                    self.insert(pod, now, &mut touched);
                }
                self.known = true;
            }
        }
        touched
    }

    /// Takes what a target says about pods, where nobody else does.
    pub(super) fn report(&mut self, target: &TargetId, pods: Vec<Pod>, now: Instant) -> Touched {
        let mut touched = Touched::default();
        let uids: HashSet<Arc<str>> = pods.iter().map(|pod| Arc::clone(&pod.uid)).collect();
        let before = self
            .reported
            .insert(target.clone(), uids.clone())
            .unwrap_or_default();
        for uid in before.difference(&uids) {
            if !self.reported.values().any(|reported| reported.contains(uid)) {
                self.remove(uid, &mut touched);
            }
        }
        for pod in pods {
            self.insert(pod, now, &mut touched);
        }
        self.known = true;
        touched
    }

    /// A target is gone, and with it what only it reported.
    pub(super) fn forget(&mut self, target: &TargetId) -> Touched {
        let mut touched = Touched::default();
        for uid in self.reported.remove(target).unwrap_or_default() {
            if !self.reported.values().any(|reported| reported.contains(&uid)) {
                self.remove(&uid, &mut touched);
            }
        }
        touched
    }

    fn insert(&mut self, mut pod: Pod, now: Instant, touched: &mut Touched) {
        let old = self.by_uid.get(&pod.uid);
        if old.is_some_and(|old| old.namespace != pod.namespace || old.name != pod.name) {
            // A UID never changes its name: this is a target that mixes pods up, and its rows will not match.
            return;
        }
        pod.ready_since = match (old, pod.ready) {
            (_, None | Some(false)) => None,
            (Some(old), Some(true)) if old.ready == Some(true) => old.ready_since,
            (Some(_), Some(true)) => Some(now),
            // First seen ready: it was so before we looked.
            (None, Some(true)) => None,
        };
        if old.is_some_and(|old| **old == pod) {
            return;
        }
        // A name that was reused belongs to the newcomer; the old UID's deletion may come later.
        let namesake = self
            .find(&pod.namespace, &pod.name)
            .filter(|other| other.uid != pod.uid)
            .map(|other| Arc::clone(&other.uid));
        if let Some(uid) = namesake {
            self.remove(&uid, touched);
        }
        let pod = Arc::new(pod);
        let namespace = self.by_namespace.entry(Arc::clone(&pod.namespace)).or_default();
        Arc::make_mut(namespace).insert(Arc::clone(&pod.name), Arc::clone(&pod));
        touched.changed.push(Arc::clone(&pod.uid));
        self.by_uid.insert(Arc::clone(&pod.uid), pod);
    }

    fn remove(&mut self, uid: &Arc<str>, touched: &mut Touched) {
        let Some(pod) = self.by_uid.remove(uid) else {
            return;
        };
        if let Some(namespace) = self.by_namespace.get_mut(&pod.namespace) {
            let pods = Arc::make_mut(namespace);
            if pods.get(&pod.name).is_some_and(|other| other.uid == *uid) {
                pods.remove(&pod.name);
            }
            if pods.is_empty() {
                self.by_namespace.remove(&pod.namespace);
            }
        }
        touched.gone.push(pod);
    }
}

/// The pods that a body speaks of, where no cluster does.
pub(super) fn reported_pods(batch: &Batch) -> Vec<Pod> {
    let mut pods: HashMap<&str, Pod> = HashMap::new();
    for row in &batch.rows {
        let is_ready_row = &*row.family == pod_families::READY.name;
        if !is_ready_row && &*row.family != pod_families::ALLOCATION.name {
            continue;
        }
        let (Some(uid), Some(namespace), Some(name)) = (
            row.label(label::POD_UID),
            row.label(label::NAMESPACE),
            row.label(label::POD),
        ) else {
            continue;
        };
        let pod = pods.entry(uid).or_insert_with(|| Pod {
            uid: Arc::from(uid),
            namespace: Arc::from(namespace),
            name: Arc::from(name),
            labels: BTreeMap::new(),
            node: None,
            ready: None,
            ready_since: None,
        });
        if is_ready_row {
            pod.ready = Some(row.value > 0.5);
        }
    }
    pods.into_values().collect()
}
