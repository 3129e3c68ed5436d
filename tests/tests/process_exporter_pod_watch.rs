//! Process level: pods from the API server, where the kubelet has no Pods API.
//!
//! Inputs: a fake kubelet before 1.37 and a fake API server that serves one pod list and its watch on loopback.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "clippy exempts test functions only, and this file is all test"
)]
#![allow(clippy::float_cmp, reason = "values that are written and read back unchanged")]

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use forewarm_exporter::attribution::{AttributionView, Config, Gap, start};
use forewarm_runtime::tasks::Tasks;
use forewarm_tests::kubelet::{Api, Kubelet, Pod};
use forewarm_tests::wait::until;
use prometheus_client::registry::Registry;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::watch;

const GPU: &str = "GPU-0b5d8f3e-1c2d-4e5f-8a9b-0c1d2e3f4a5b";
const SOON: Duration = Duration::from_secs(20);

/// What the fake API server serves.
#[derive(Debug, Default)]
struct Served {
    /// The pods of node-a.
    pods: Vec<Value>,
    /// Events since, in order; the watch sends them all.
    events: Vec<Value>,
    /// Whether it answers at all.
    broken: bool,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Asked {
    #[serde(default)]
    watch: bool,
    #[serde(default)]
    field_selector: String,
}

type Shared = Arc<watch::Sender<Served>>;

async fn pods(State(served): State<Shared>, Query(asked): Query<Asked>) -> Response {
    if asked.field_selector != "spec.nodeName=node-a" {
        // A watch of the whole cluster from each node is what must not happen.
        return (StatusCode::FORBIDDEN, "not your node").into_response();
    }
    if served.borrow().broken {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    if !asked.watch {
        let list = json!({
            "apiVersion": "v1", "kind": "PodList",
            "metadata": {"resourceVersion": "1"},
            "items": served.borrow().pods,
        });
        return ([(header::CONTENT_TYPE, "application/json")], list.to_string()).into_response();
    }
    let events = futures::stream::unfold((served.subscribe(), 0), |(mut told, sent)| async move {
        loop {
            let next = {
                let served = told.borrow_and_update();
                if served.broken {
                    return None;
                }
                served.events.get(sent).map(|event| format!("{event}\n"))
            };
            match next {
                Some(line) => return Some((Ok::<_, Infallible>(line), (told, sent + 1))),
                None => told.changed().await.ok()?,
            }
        }
    });
    (
        [(header::CONTENT_TYPE, "application/json")],
        Body::from_stream(events),
    )
        .into_response()
}

fn pod(name: &str, uid: &str, phase: &str, ready: bool) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "ml", "uid": uid, "resourceVersion": "2"},
        "spec": {"nodeName": "node-a", "containers": [{"name": "main", "image": "i"}]},
        "status": {"phase": phase, "conditions": [
            {"type": "Ready", "status": if ready { "True" } else { "False" }},
        ]},
    })
}

/// Serves until the test ends and returns a kubeconfig for it.
async fn api_server(dir: &std::path::Path) -> (Shared, PathBuf) {
    let served: Shared = Arc::new(watch::Sender::new(Served::default()));
    let router = Router::new()
        .route("/api/v1/pods", get(pods))
        .with_state(Arc::clone(&served));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    #[allow(clippy::disallowed_methods, reason = "ends with the test's runtime")]
    tokio::spawn(async move { axum::serve(listener, router).await });
    let kubeconfig = dir.join("kubeconfig");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
         clusters: [{{name: c, cluster: {{server: '{url}'}}}}]\n\
         users: [{{name: u, user: {{token: t}}}}]\n"
    );
    std::fs::write(&kubeconfig, text).unwrap();
    (served, kubeconfig)
}

async fn until_told(view: &AttributionView, uid: Option<&str>, ready: Option<bool>) {
    until(&format!("{uid:?} ready {ready:?}"), SOON, || async {
        let told = view.load();
        match told.allocations.first() {
            Some(held) if held.pod_uid.as_deref() == uid && held.ready == ready => Ok(()),
            other => Err(format!("{other:?} {:?}", told.gaps)),
        }
    })
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_this_node_come_from_the_api_server_until_the_kubelet_tells_them() {
    forewarm_runtime::install_crypto();
    let dir = tempfile::tempdir().unwrap();
    let (served, kubeconfig) = api_server(dir.path()).await;
    served.send_modify(|served| served.pods.push(pod("web-0", "uid-1", "Running", false)));
    let kubelet = Kubelet::start_without_pods_api(dir.path()).unwrap();
    kubelet.put(Pod::running("ml", "web-0", "uid-1", &[GPU]));

    let mut config = Config::new(dir.path().to_owned(), Some("node-a".into()));
    config.interval = Duration::from_millis(300);
    config.api_server.kubeconfig = Some(kubeconfig);
    let (tasks, mut registry) = (Tasks::new(), Registry::default());
    let view = start(config, &tasks, &mut registry);
    until_told(&view, Some("uid-1"), Some(false)).await;

    // The watch brings readiness, and a pod recreated under the name.
    let event = |kind: &str, object: Value| json!({"type": kind, "object": object});
    served.send_modify(|served| {
        served
            .events
            .push(event("MODIFIED", pod("web-0", "uid-1", "Running", true)));
    });
    until_told(&view, Some("uid-1"), Some(true)).await;
    served.send_modify(|served| {
        served
            .events
            .push(event("DELETED", pod("web-0", "uid-1", "Running", true)));
        served
            .events
            .push(event("ADDED", pod("web-0", "uid-2", "Running", true)));
    });
    until_told(&view, Some("uid-2"), Some(true)).await;
    let health = forewarm_runtime::metrics::text(&registry);
    assert!(
        health.contains("forewarm_exporter_attribution_pod_source{source=\"api-server\"} 1"),
        "{health}"
    );

    // The API server breaks: names are withdrawn for a stated reason.
    served.send_modify(|served| served.broken = true);
    until_told(&view, None, None).await;
    assert!(
        view.load().gaps.contains_key(&Gap::PodsStale),
        "{:?}",
        view.load().gaps
    );

    // The kubelet is upgraded, and its own word is taken from then on.
    kubelet.remove("uid-1");
    kubelet.put(Pod::running("ml", "web-0", "uid-2", &[GPU]));
    kubelet.serve(Api::Pods).unwrap();
    until_told(&view, Some("uid-2"), Some(true)).await;
    let health = forewarm_runtime::metrics::text(&registry);
    assert!(
        health.contains("forewarm_exporter_attribution_pod_source{source=\"kubelet\"} 1"),
        "{health}"
    );
    tasks.token().cancel();
}
