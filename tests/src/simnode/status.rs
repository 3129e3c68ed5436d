//! A simulated pod's status, as a kubelet would report it.
//!
//! Pure: containers' parts in, status out. Invariant: a condition's time changes only with its value.

use std::net::Ipv4Addr;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::container::seconds;

/// What the worker knows of its pod.
#[derive(Debug, Clone)]
pub(super) struct Observed {
    /// `status.phase`.
    pub(super) phase: &'static str,
    /// When the node took the pod.
    pub(super) started: Timestamp,
    /// The pod's address; absent until it has one.
    pub(super) address: Option<Ipv4Addr>,
    /// The node's address.
    pub(super) host: Ipv4Addr,
    /// All init containers have succeeded.
    pub(super) initialized: bool,
    /// All containers are ready.
    pub(super) ready: bool,
    /// Parts of the containers.
    pub(super) containers: Vec<Value>,
    /// Parts of the init containers.
    pub(super) init_containers: Vec<Value>,
    /// Why the whole pod is refused.
    pub(super) refusal: Option<(&'static str, String)>,
}

/// The status to write, given the one in `pod`.
pub(super) fn status(pod: &Pod, observed: &Observed) -> Value {
    let now = seconds(Timestamp::now());
    let known = serde_json::to_value(pod.status.as_ref().and_then(|status| status.conditions.as_ref()))
        .ok()
        .and_then(|conditions| conditions.as_array().cloned())
        .unwrap_or_default();
    let ours = [
        ("PodReadyToStartContainers", observed.address.is_some(), None),
        (
            "Initialized",
            observed.initialized,
            Some("ContainersNotInitialized"),
        ),
        ("Ready", observed.ready, Some("ContainersNotReady")),
        ("ContainersReady", observed.ready, Some("ContainersNotReady")),
    ];
    let mut conditions: Vec<Value> = ours
        .iter()
        .map(|&(kind, holds, reason)| {
            let value = if holds { "True" } else { "False" };
            let before = known.iter().find(|condition| condition["type"] == kind);
            let since = before
                .filter(|before| before["status"] == value)
                .map_or_else(|| json!(now), |before| before["lastTransitionTime"].clone());
            let mut condition = json!({"type": kind, "status": value, "lastTransitionTime": since});
            if let (false, Some(reason)) = (holds, reason) {
                condition["reason"] = json!(reason);
            }
            condition
        })
        .collect();
    // Others' conditions (scheduled, disrupted) stay.
    conditions.extend(
        known
            .into_iter()
            .filter(|condition| ours.iter().all(|&(kind, _, _)| condition["type"] != kind)),
    );
    let mut status = json!({
        "phase": observed.phase,
        "startTime": seconds(observed.started),
        "hostIP": observed.host,
        "hostIPs": [{"ip": observed.host}],
        "conditions": conditions,
        "containerStatuses": observed.containers,
    });
    if !observed.init_containers.is_empty() {
        status["initContainerStatuses"] = json!(observed.init_containers);
    }
    if let Some(address) = observed.address {
        status["podIP"] = json!(address);
        status["podIPs"] = json!([{"ip": address}]);
    }
    if let Some((reason, message)) = &observed.refusal {
        status["reason"] = json!(reason);
        status["message"] = json!(message);
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(ready: bool) -> Observed {
        Observed {
            phase: "Running",
            started: Timestamp::UNIX_EPOCH,
            address: Some(Ipv4Addr::new(10, 77, 1, 10)),
            host: Ipv4Addr::new(10, 77, 1, 1),
            initialized: true,
            ready,
            containers: Vec::new(),
            init_containers: Vec::new(),
            refusal: None,
        }
    }

    fn condition<'a>(status: &'a Value, kind: &str) -> &'a Value {
        status["conditions"]
            .as_array()
            .unwrap()
            .iter()
            .find(|condition| condition["type"] == kind)
            .unwrap()
    }

    #[test]
    fn a_conditions_time_moves_only_with_its_value() {
        let pod: Pod = serde_json::from_value(json!({"status": {"conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z"},
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z"},
        ]}}))
        .unwrap();
        let same = status(&pod, &observed(true));
        assert_eq!(
            condition(&same, "Ready")["lastTransitionTime"],
            "2020-01-01T00:00:00Z"
        );
        assert_eq!(condition(&same, "PodScheduled")["status"], "True");
        let changed = status(&pod, &observed(false));
        assert_ne!(
            condition(&changed, "Ready")["lastTransitionTime"],
            "2020-01-01T00:00:00Z"
        );
        assert_eq!(condition(&changed, "Ready")["reason"], "ContainersNotReady");
    }
}
