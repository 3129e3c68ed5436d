//! Running pods of the cluster, as a watch tells.
//!
//! Inputs: pods with `status.phase=Running`, of all namespaces, cut down to what the index needs.
//! Invariants: while the API server is away the last state stays in force and the watch is retried with
//! backoff; after a gap the list replaces everything at once, so a pod that ended meanwhile is gone.

use std::sync::Arc;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use kube::api::{Api, ApiResource, Object};
use kube::runtime::{WatchStreamExt as _, watcher};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::{Message, Pod, PodChange, Queue};
use crate::metrics::Metrics;
use crate::retry::watch_backoff;

/// The part of a pod's spec that is kept.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SlimSpec {
    /// Where it runs.
    pub node_name: Option<String>,
    /// Its containers, for named ports.
    pub containers: Vec<SlimContainer>,
    /// Whether it sees its node's own address and ports.
    pub host_network: Option<bool>,
}

/// The part of a container that is kept.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SlimContainer {
    /// Its ports.
    pub ports: Vec<SlimPort>,
}

/// A container port.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SlimPort {
    /// Its name.
    pub name: Option<String>,
    /// Its number.
    pub container_port: u16,
}

/// The part of a pod's status that is kept.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SlimStatus {
    /// Phase.
    pub phase: Option<String>,
    /// Address.
    #[serde(rename = "podIP")]
    pub pod_ip: Option<String>,
    /// Conditions.
    pub conditions: Vec<SlimCondition>,
}

/// A condition.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SlimCondition {
    /// Type.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
}

/// A pod cut down to what the adapter needs.
pub type SlimPod = Object<SlimSpec, SlimStatus>;

/// Pods of one namespace, or of all, cut down.
#[must_use]
pub fn slim_pods(client: kube::Client, namespace: Option<&str>) -> Api<SlimPod> {
    let resource = ApiResource::erase::<ApiPod>(&());
    match namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, &resource),
        None => Api::all_with(client, &resource),
    }
}

/// A pod of the API as the index keeps it.
#[must_use]
pub fn pod(object: SlimPod) -> Option<Pod> {
    let status = object.status.unwrap_or_default();
    let ready = status
        .conditions
        .iter()
        .any(|condition| condition.kind == "Ready" && condition.status == "True");
    Some(Pod {
        uid: Arc::from(object.metadata.uid?),
        namespace: Arc::from(object.metadata.namespace?),
        name: Arc::from(object.metadata.name?),
        labels: object.metadata.labels.unwrap_or_default(),
        node: object.spec.node_name.map(Arc::from),
        ready: Some(ready),
        ready_since: None,
    })
}

/// Follows the pods of the cluster until the token is cancelled.
///
/// # Errors
/// Never: a broken watch is retried.
pub async fn follow(
    client: kube::Client,
    queue: Queue,
    metrics: Arc<Metrics>,
    token: CancellationToken,
) -> Result<(), std::convert::Infallible> {
    let config = watcher::Config::default().fields("status.phase=Running");
    let mut events = watcher(slim_pods(client, None), config)
        .backoff(watch_backoff())
        .boxed();
    let mut listed = Vec::new();
    let mut is_failing = false;
    loop {
        let event = tokio::select! {
            () = token.cancelled() => return Ok(()),
            event = events.next() => event,
        };
        let change = match event {
            None => return Ok(()),
            Some(Err(error)) => {
                metrics.watch_failed("pods");
                if !is_failing {
                    tracing::warn!(error = %error, "pod watch failed, the last pods stay in force");
                }
                is_failing = true;
                continue;
            }
            Some(Ok(watcher::Event::Init)) => {
                listed.clear();
                continue;
            }
            Some(Ok(watcher::Event::InitApply(object))) => {
                listed.extend(pod(object));
                continue;
            }
            Some(Ok(watcher::Event::InitDone)) => Some(PodChange::Replace(std::mem::take(&mut listed))),
            Some(Ok(watcher::Event::Apply(object))) => pod(object).map(PodChange::Apply),
            Some(Ok(watcher::Event::Delete(object))) => {
                object.metadata.uid.map(|uid| PodChange::Remove(Arc::from(uid)))
            }
        };
        if is_failing {
            tracing::info!("pod watch works again");
            is_failing = false;
        }
        if let Some(change) = change {
            queue.send(Message::Pods(change)).await;
        }
    }
}
