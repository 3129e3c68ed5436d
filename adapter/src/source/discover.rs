//! Targets among the pods of one namespace.
//!
//! Invariants: the watch is of one namespace, so a pod elsewhere cannot pose as a target, whatever its labels
//! say; a target's node is the one in its pod's spec, which its container cannot change.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::StreamExt as _;
use kube::runtime::{WatchStreamExt as _, watcher};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::Spec;
use super::manager::Event;
use crate::index::TargetId;
use crate::index::watch::{SlimPod, slim_pods};
use crate::metrics::Metrics;
use crate::retry::watch_backoff;

/// What to look for.
#[derive(Debug, Clone)]
pub(super) struct Search {
    pub(super) source: Arc<str>,
    pub(super) namespace: String,
    pub(super) selector: String,
    pub(super) port: String,
    /// Which start of the source this is, so that answers of an earlier one are told apart.
    pub(super) generation: u64,
}

/// Tells the targets, again after each change, until the token is cancelled.
pub(super) async fn follow(
    client: kube::Client,
    search: Search,
    events: mpsc::Sender<Event>,
    metrics: Arc<Metrics>,
    token: CancellationToken,
) {
    let config = watcher::Config::default()
        .labels(&search.selector)
        .fields("status.phase=Running");
    let mut stream = watcher(slim_pods(client, Some(&search.namespace)), config)
        .backoff(watch_backoff())
        .boxed();
    let mut known: BTreeMap<String, Spec> = BTreeMap::new();
    let mut listed: BTreeMap<String, Spec> = BTreeMap::new();
    let mut is_failing = false;
    loop {
        let event = tokio::select! {
            () = token.cancelled() => return,
            event = stream.next() => event,
        };
        match event {
            None => return,
            Some(Err(error)) => {
                metrics.watch_failed("targets");
                if !is_failing {
                    tracing::warn!(source = &*search.source, error = %error, "watch of targets failed, the known ones stay");
                }
                is_failing = true;
                continue;
            }
            Some(Ok(watcher::Event::Init)) => {
                listed.clear();
                continue;
            }
            Some(Ok(watcher::Event::InitApply(pod))) => {
                if let Some(spec) = spec(&pod, &search) {
                    listed.insert(spec.id.name.to_string(), spec);
                }
                continue;
            }
            Some(Ok(watcher::Event::InitDone)) => known = std::mem::take(&mut listed),
            Some(Ok(watcher::Event::Apply(pod))) => match spec(&pod, &search) {
                Some(spec) => {
                    known.insert(spec.id.name.to_string(), spec);
                }
                None => {
                    known.remove(pod.metadata.name.as_deref().unwrap_or_default());
                }
            },
            Some(Ok(watcher::Event::Delete(pod))) => {
                let name = pod.metadata.name.as_deref().unwrap_or_default();
                // A successor of the same name may be known already.
                if known
                    .get(name)
                    .is_some_and(|spec| Some(&*spec.incarnation) == pod.metadata.uid.as_deref())
                {
                    known.remove(name);
                }
            }
        }
        is_failing = false;
        let targets = Event::Targets {
            source: Arc::clone(&search.source),
            generation: search.generation,
            specs: known.values().cloned().collect(),
        };
        if events.send(targets).await.is_err() {
            return;
        }
    }
}

/// A pod as a target, once it has an address and the named port.
fn spec(pod: &SlimPod, search: &Search) -> Option<Spec> {
    let ip = pod.status.as_ref()?.pod_ip.as_deref()?;
    let port = pod
        .spec
        .containers
        .iter()
        .flat_map(|container| &container.ports)
        .find(|port| port.name.as_deref() == Some(&search.port))?
        .container_port;
    let address = if ip.contains(':') {
        format!("[{ip}]:{port}")
    } else {
        format!("{ip}:{port}")
    };
    Some(Spec {
        id: TargetId {
            source: Arc::clone(&search.source),
            name: Arc::from(pod.metadata.name.as_deref()?),
        },
        address,
        node: pod.spec.node_name.as_deref().map(Arc::from),
        incarnation: Arc::from(pod.metadata.uid.as_deref()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_a_target_once_it_has_address_and_port() {
        let search = Search {
            source: Arc::from("exporters"),
            namespace: "forewarm".to_owned(),
            selector: String::new(),
            port: "metrics".to_owned(),
            generation: 1,
        };
        let mut document = serde_json::json!({
            "metadata": {"name": "exporter-x", "uid": "u1", "namespace": "forewarm"},
            "spec": {"nodeName": "node-a", "containers": [
                {"name": "a", "ports": [{"name": "admin", "containerPort": 9411}]},
                {"name": "b", "ports": [{"name": "metrics", "containerPort": 9410}]},
            ]},
            "status": {"phase": "Running", "podIP": "10.0.0.7"},
        });
        let read =
            |document: &serde_json::Value| spec(&serde_json::from_value(document.clone()).unwrap(), &search);
        let found = read(&document).unwrap();
        assert_eq!(
            (found.address.as_str(), found.node.as_deref()),
            ("10.0.0.7:9410", Some("node-a"))
        );
        document["status"]["podIP"] = "fd00::7".into();
        assert_eq!(read(&document).unwrap().address, "[fd00::7]:9410");
        document["status"] = serde_json::json!({});
        assert_eq!(read(&document), None);
    }
}
