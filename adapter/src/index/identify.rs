//! Whom a sample is about.
//!
//! Invariants: a pod is found by UID, or by namespace and name where a target knows no UIDs; what a target says
//! about names must agree with the cluster; the node of a pod, where known, must be the node of the target.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use forewarm_signals::label;

use super::pods::{Pod, Pods};
use super::{Batch, Row};
use crate::metrics::Drop;

/// Spellings of the same label: ours, then Prometheus' renaming of clashing labels, then older exporters'.
const NAMESPACE: [&str; 3] = [label::NAMESPACE, "exported_namespace", "pod_namespace"];
const POD: [&str; 3] = [label::POD, "exported_pod", "pod_name"];
const CONTAINER: [&str; 3] = [label::CONTAINER, "exported_container", "container_name"];
/// The finest device first: a slice, then the GPU.
const DEVICE: [&str; 5] = ["mig_uuid", label::UUID, "UUID", label::GPU, "device"];

fn first<'a>(row: &'a Row, keys: &[&str]) -> Option<&'a str> {
    keys.iter().find_map(|key| row.label(key))
}

/// The device of a row, empty where it names none.
pub(super) fn device(row: &Row) -> &str {
    first(row, &DEVICE).unwrap_or_default()
}

/// The container of a row, empty where it names none.
pub(super) fn container(row: &Row) -> &str {
    first(row, &CONTAINER).unwrap_or_default()
}

/// The pod that a row is about.
pub(super) fn pod<'p>(row: &Row, batch: &Batch, pods: &'p Pods) -> Result<&'p Arc<Pod>, Drop> {
    let (namespace, name) = (first(row, &NAMESPACE), first(row, &POD));
    let pod = if let Some(uid) = row.label(label::POD_UID) {
        let pod = pods.get(uid).ok_or(Drop::UnknownPod)?;
        let is_same = |said: Option<&str>, known: &str| said.is_none_or(|said| said == known);
        if !is_same(namespace, &pod.namespace) || !is_same(name, &pod.name) {
            return Err(Drop::WrongPod);
        }
        pod
    } else {
        let (Some(namespace), Some(name)) = (namespace, name) else {
            return Err(Drop::NoIdentity);
        };
        pods.find(namespace, name).ok_or(Drop::UnknownPod)?
    };
    match (&pod.node, &batch.node) {
        (Some(of_pod), Some(of_target)) if of_pod != of_target => Err(Drop::Conflict),
        _ => Ok(pod),
    }
}

/// A hash of all labels, and one of those that are not summed over. The order of labels does not matter, and an
/// empty one counts as absent.
pub(super) fn hashes(row: &Row, sum: &[String]) -> (u64, u64) {
    let (mut all, mut rest) = (0_u64, 0_u64);
    for label in row.labels.iter().filter(|(_, value)| !value.is_empty()) {
        let mut hasher = DefaultHasher::new();
        label.hash(&mut hasher);
        let hash = hasher.finish();
        all = all.wrapping_add(hash);
        if !sum.iter().any(|summed| **summed == *label.0) {
            rest = rest.wrapping_add(hash);
        }
    }
    (all, rest)
}
