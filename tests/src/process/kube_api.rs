//! A small API server for tests of the adapter's doors: pods, one ConfigMap, reviews; and one exporter's body.
//!
//! Inputs: what a test puts there. Invariants: everything that is asked is counted; lists and watches behave
//! as the real ones do as far as a watcher can tell. Where the real API server's behaviour matters, the
//! apiserver level is the place.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What the server knows and has been asked.
#[derive(Debug, Default)]
pub struct World {
    /// Data of `kube-system/extension-apiserver-authentication`.
    pub authentication: BTreeMap<String, String>,
    /// Pods, as objects.
    pub pods: Vec<Value>,
    /// Users who may do everything.
    pub allowed: BTreeSet<String>,
    /// Tokens and their users.
    pub tokens: BTreeMap<String, String>,
    /// Time that an access review takes.
    pub review_delay: Duration,
    /// Whether the adapter has no rights at all.
    pub forbids: bool,
    /// Body of the exporter.
    pub exposition: String,
    /// Access reviews so far, their specs.
    pub access_reviews: Vec<Value>,
    /// Token reviews so far.
    pub token_reviews: usize,
}

/// A running server; it ends when dropped.
#[derive(Debug)]
pub struct KubeApi {
    shared: Shared,
    addr: SocketAddr,
    token: CancellationToken,
}

#[derive(Debug, Clone)]
struct Shared {
    world: Arc<Mutex<World>>,
    /// Counts changes; watches wait for it.
    version: watch::Sender<u64>,
}

#[derive(Debug, Deserialize)]
struct Asked {
    #[serde(default)]
    watch: bool,
}

impl KubeApi {
    /// Serves `world` on a port of the kernel's choice.
    ///
    /// # Errors
    /// The port cannot be bound.
    pub async fn start(world: World) -> std::io::Result<Self> {
        Self::start_at("127.0.0.1:0", world).await
    }

    /// Serves `world` at an address, for a server that comes back.
    ///
    /// # Errors
    /// The port cannot be bound.
    pub async fn start_at(addr: &str, world: World) -> std::io::Result<Self> {
        let shared = Shared {
            world: Arc::new(Mutex::new(world)),
            version: watch::Sender::new(1),
        };
        let router = Router::new()
            .route("/api/v1/pods", get(pods))
            .route("/api/v1/namespaces/kube-system/configmaps", get(config_maps))
            .route("/apis/authentication.k8s.io/v1/tokenreviews", post(token_review))
            .route(
                "/apis/authorization.k8s.io/v1/subjectaccessreviews",
                post(access_review),
            )
            .route(
                "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
                post(self_review),
            )
            .route("/metrics", get(exposition))
            .with_state(shared.clone());
        let listener = tokio::net::TcpListener::bind(addr).await?;
        let addr = listener.local_addr()?;
        let token = CancellationToken::new();
        let stop = token.clone();
        #[allow(
            clippy::disallowed_methods,
            reason = "ends with the guard or the test's runtime"
        )]
        tokio::spawn(async move {
            tokio::select! {
                result = async { axum::serve(listener, router).await } => result,
                () = stop.cancelled() => Ok(()),
            }
        });
        Ok(Self { shared, addr, token })
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Reads or changes the world without telling watches.
    pub fn world(&self) -> MutexGuard<'_, World> {
        lock(&self.shared.world)
    }

    /// Changes the world; watches see it.
    pub fn change(&self, change: impl FnOnce(&mut World)) {
        change(&mut self.world());
        self.shared.version.send_modify(|version| *version += 1);
    }

    /// Writes a kubeconfig for it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn kubeconfig(&self, folder: &Path) -> std::io::Result<PathBuf> {
        let path = folder.join("kubeconfig");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             contexts: [{{name: c, context: {{cluster: c, user: u, namespace: forewarm}}}}]\n\
             clusters: [{{name: c, cluster: {{server: 'http://{}'}}}}]\n\
             users: [{{name: u, user: {{token: t}}}}]\n",
            self.addr
        );
        std::fs::write(&path, text)?;
        Ok(path)
    }
}

impl Drop for KubeApi {
    fn drop(&mut self) {
        self.token.cancel();
    }
}

fn lock(world: &Mutex<World>) -> MutexGuard<'_, World> {
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

fn answer(code: StatusCode, value: &Value) -> Response {
    (
        code,
        [(header::CONTENT_TYPE, "application/json")],
        value.to_string(),
    )
        .into_response()
}

fn read(body: &Bytes) -> Value {
    serde_json::from_slice(body).unwrap_or_default()
}

fn forbidden() -> Response {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": 403,
        "message": "the adapter has no rights",
    });
    answer(StatusCode::FORBIDDEN, &status)
}

async fn pods(State(shared): State<Shared>, Query(asked): Query<Asked>) -> Response {
    listed(&shared, asked.watch, "Pod", |world| world.pods.clone())
}

async fn config_maps(State(shared): State<Shared>, Query(asked): Query<Asked>) -> Response {
    listed(&shared, asked.watch, "ConfigMap", |world| {
        if world.authentication.is_empty() {
            return Vec::new();
        }
        vec![json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {
                "name": "extension-apiserver-authentication", "namespace": "kube-system", "uid": "cm",
                "resourceVersion": "1",
            },
            "data": world.authentication,
        })]
    })
}

/// A list, or a watch that tells every object again after each change.
fn listed(shared: &Shared, is_watch: bool, kind: &str, of: fn(&World) -> Vec<Value>) -> Response {
    if lock(&shared.world).forbids {
        return forbidden();
    }
    if !is_watch {
        let list = json!({
            "apiVersion": "v1", "kind": format!("{kind}List"), "metadata": {"resourceVersion": "1"},
            "items": of(&lock(&shared.world)),
        });
        return answer(StatusCode::OK, &list);
    }
    let told = shared.version.subscribe();
    let events = futures::stream::unfold(
        (told, Arc::clone(&shared.world)),
        move |(mut told, world)| async move {
            told.changed().await.ok()?;
            let lines: String = of(&lock(&world))
                .into_iter()
                .map(|object| format!("{}\n", json!({"type": "MODIFIED", "object": object})))
                .collect();
            Some((Ok::<_, Infallible>(lines), (told, world)))
        },
    );
    (
        [(header::CONTENT_TYPE, "application/json")],
        Body::from_stream(events),
    )
        .into_response()
}

async fn token_review(State(shared): State<Shared>, body: Bytes) -> Response {
    let mut review = read(&body);
    let mut world = lock(&shared.world);
    if world.forbids {
        return forbidden();
    }
    world.token_reviews += 1;
    let token = review["spec"]["token"].as_str().unwrap_or_default();
    review["status"] = match world.tokens.get(token) {
        Some(user) => json!({"authenticated": true, "user": {"username": user, "groups": ["robots"]}}),
        None => json!({"authenticated": false, "error": "unknown"}),
    };
    answer(StatusCode::CREATED, &review)
}

async fn access_review(State(shared): State<Shared>, body: Bytes) -> Response {
    let mut review = read(&body);
    let delay = {
        let mut world = lock(&shared.world);
        if world.forbids {
            return forbidden();
        }
        world.access_reviews.push(review["spec"].clone());
        world.review_delay
    };
    tokio::time::sleep(delay).await;
    let user = review["spec"]["user"].as_str().unwrap_or_default();
    let allowed = lock(&shared.world).allowed.contains(user);
    review["status"] = json!({"allowed": allowed});
    answer(StatusCode::CREATED, &review)
}

async fn self_review(State(shared): State<Shared>, body: Bytes) -> Response {
    let mut review = read(&body);
    review["status"] = json!({"allowed": !lock(&shared.world).forbids});
    answer(StatusCode::CREATED, &review)
}

async fn exposition(State(shared): State<Shared>) -> Response {
    let body = lock(&shared.world).exposition.clone();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], body).into_response()
}
