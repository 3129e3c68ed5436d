//! Running pods of the cluster, as a watch tells.
//!
//! Inputs: pods with `status.phase=Running`, of all namespaces, cut down to what the index needs.
//! Invariants: while the API server is away the last state stays in force, the index knows since when, and the watch
//! is retried with backoff; after a gap the list replaces everything at once, so a pod that ended meanwhile is gone.
//! A watch that broke is believed again once it has said something: a quiet cluster says nothing when it comes
//! back, so a watch that stays quiet after its last failure is replaced by one that lists.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use kube::api::{Api, ApiResource, Object};
use kube::runtime::{WatchStreamExt as _, watcher};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::{Message, Pod, PodChange, Queue};
use crate::metrics::Metrics;
use crate::retry::watch_backoff;

/// A watch that has neither failed nor spoken for this long after a failure probably works, and is made to prove it.
const PROOF: Duration = Duration::from_secs(10);

/// What a watch says.
type Events = BoxStream<'static, Result<watcher::Event<SlimPod>, watcher::Error>>;

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
    let watch = move || -> Events {
        let config = watcher::Config::default().fields("status.phase=Running");
        watcher(slim_pods(client.clone(), None), config)
            .backoff(watch_backoff())
            .boxed()
    };
    relay(watch, queue, metrics, token).await;
    Ok(())
}

/// A watch that broke and has not spoken since.
struct Lapse {
    /// When to list; `None` while a list is under way.
    list_at: Option<tokio::time::Instant>,
}

/// Brings what watches say to the index; `watch` starts one, which lists first.
async fn relay(
    mut watch: impl FnMut() -> Events + Send,
    queue: Queue,
    metrics: Arc<Metrics>,
    token: CancellationToken,
) {
    let mut events = watch();
    let mut listed = Vec::new();
    let mut lapse: Option<Lapse> = None;
    loop {
        let list_at = lapse.as_ref().and_then(|lapse| lapse.list_at);
        let event = tokio::select! {
            () = token.cancelled() => return,
            event = events.next() => event,
            () = due(list_at) => {
                lapse = Some(Lapse { list_at: None });
                listed.clear();
                events = watch();
                continue;
            }
        };
        let change = match event {
            None => return,
            Some(Err(error)) => {
                metrics.watch_failed("pods");
                let now = tokio::time::Instant::now();
                if lapse.is_none() {
                    tracing::warn!(error = %error, "pod watch failed, the last pods stay in force");
                    queue.send(Message::Pods(PodChange::Silent(now.into_std()))).await;
                }
                let is_listing = lapse.as_ref().is_some_and(|lapse| lapse.list_at.is_none());
                let list_at = (!is_listing).then(|| now + PROOF);
                lapse = Some(Lapse { list_at });
                continue;
            }
            Some(Ok(watcher::Event::Init)) => {
                listed.clear();
                if let Some(lapse) = &mut lapse {
                    lapse.list_at = None;
                }
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
        let was_broken = lapse.take().is_some();
        if was_broken {
            tracing::info!("pod watch works again");
        }
        // Any change says so too; only what changes nothing needs a word of its own.
        if let Some(change) = change.or_else(|| was_broken.then_some(PodChange::Heard)) {
            queue.send(Message::Pods(change)).await;
        }
    }
}

async fn due(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
