//! Pods of this node as the API server tells them, for kubelets without the Pods API.
//!
//! Inputs: a node-scoped watch. Invariants: metadata and status are read, never the spec; a set of facts is
//! published only after its sync.

use std::pin::pin;

use forewarm_runtime::kube::{ClientArgs, client};
use futures::TryStreamExt as _;
use k8s_openapi::api::core::v1;
use kube::core::{NotUsed, Object};
use kube::runtime::watcher;
use kube::{Api, api::ApiResource};
use serde::Deserialize;

use super::{Facts, Phase, Pod, PodSource};
use crate::attribution::call::{CallError, Reason};

/// As the exporter calls itself in the API server's audit log.
const USER_AGENT: &str = concat!("forewarm-exporter/", env!("CARGO_PKG_VERSION"));

/// The part of a pod that is read; the spec's fields are skipped.
type SlimPod = Object<NotUsed, Status>;

#[derive(Debug, Clone, Default, Deserialize)]
struct Status {
    #[serde(default)]
    phase: String,
    #[serde(default)]
    conditions: Vec<Condition>,
}

#[derive(Debug, Clone, Deserialize)]
struct Condition {
    r#type: String,
    status: String,
}

/// Watches the pods of one node and publishes each change, until the watch fails.
pub(super) async fn follow(
    args: &ClientArgs,
    node: &str,
    mut publish: impl FnMut(Facts),
) -> Result<(), CallError> {
    let client = client(args, USER_AGENT)
        .await
        .map_err(|error| CallError::new(Reason::NoApiServer, error.to_string()))?;
    let api: Api<SlimPod> = Api::all_with(client, &ApiResource::erase::<v1::Pod>(&()));
    let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    let mut events = pin!(watcher(api, config));

    let mut facts = Facts::of(PodSource::ApiServer);
    let mut synced = false;
    while let Some(event) = events
        .try_next()
        .await
        .map_err(|error| CallError::new(Reason::ConnectionFailed, format!("{error:.200}")))?
    {
        match event {
            watcher::Event::Init => {
                facts = Facts::of(PodSource::ApiServer);
                synced = false;
            }
            watcher::Event::InitApply(pod) => facts.apply(read(pod)),
            watcher::Event::Apply(pod) => facts.apply(read(pod)),
            watcher::Event::Delete(pod) => facts.remove(&read(pod).uid),
            watcher::Event::InitDone => synced = true,
        }
        if synced {
            publish(facts.clone());
        }
    }
    Err(CallError::new(Reason::StreamEnded, "the watch ended"))
}

fn read(pod: SlimPod) -> Pod {
    let status = pod.status.unwrap_or_default();
    Pod {
        uid: pod.metadata.uid.unwrap_or_default(),
        namespace: pod.metadata.namespace.unwrap_or_default(),
        name: pod.metadata.name.unwrap_or_default(),
        phase: Phase::read(&status.phase),
        ready: status
            .conditions
            .iter()
            .any(|condition| condition.r#type == "Ready" && condition.status == "True"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_pod_is_read_without_its_spec() {
        let pod: SlimPod = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "web-0", "namespace": "ml", "uid": "1"},
            "spec": {"nodeName": "node-a", "containers": [{"name": "c", "image": "i"}]},
            "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            ]},
        }))
        .unwrap();
        let pod = read(pod);
        assert!(pod.ready && !pod.has_ended());
        assert_eq!(
            (pod.namespace.as_str(), pod.name.as_str(), pod.uid.as_str()),
            ("ml", "web-0", "1")
        );
    }
}
