//! Who may read the metrics API, and what happens to it when rights, certificates, replicas or the API server
//! itself go and come back.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use forewarm_tests::controlplane::certs::{FRONT_PROXY_NAME, Pair};
use forewarm_tests::install::{self, Mode};
use forewarm_tests::wait::until;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{DeleteParams, ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::api_discovery::{gpu_pod, named_path};
use crate::fixture::{Case, Fixture, case, disturbing};
use crate::stack::{self, API_SERVICES, NAMESPACE};

const PATIENCE: Duration = Duration::from_secs(90);
/// The name that kube-apiserver verifies.
const SERVER: &str = "forewarm-adapter.forewarm.svc";

pub(crate) fn cases() -> Vec<Case> {
    vec![
        case(
            "api_forged_identity_is_refused_through_and_around_the_api_server",
            forged,
        ),
        case("api_rights_are_those_that_rbac_grants_by_verb", rights),
        case("api_replicas_share_one_certificate", shared_certificate),
        disturbing(
            "api_certificate_management_repairs_ours_and_leaves_others_alone",
            registrations,
        ),
        disturbing("api_without_rights_says_what_is_missing", without_rights),
        disturbing("api_survives_an_api_server_restart", api_server_restart),
        disturbing("api_serves_throughout_a_rolling_update", rolling_update),
    ]
}

/// The adapter's own door, past kube-apiserver.
struct Direct {
    address: SocketAddr,
    ca: String,
}

impl Direct {
    async fn all(client: &Client) -> anyhow::Result<Vec<Self>> {
        let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
        let secret = secrets.get("forewarm-adapter-certs").await?;
        let ca = secret.data.context("data")?.remove("ca.crt").context("ca.crt")?;
        let ca = String::from_utf8(ca.0)?;
        let mut doors = Vec::new();
        for pod in stack::adapter_pods(client).await? {
            let deleted = pod.metadata.deletion_timestamp.is_some();
            if let Some(ip) = pod.status.and_then(|status| status.pod_ip).filter(|_| !deleted) {
                doors.push(Self {
                    address: SocketAddr::new(ip.parse()?, 6443),
                    ca: ca.clone(),
                });
            }
        }
        ensure!(!doors.is_empty(), "no adapter has an address");
        Ok(doors)
    }

    async fn first(client: &Client) -> anyhow::Result<Self> {
        Self::all(client).await?.into_iter().next().context("an adapter")
    }

    fn client(&self, pair: Option<&Pair>) -> anyhow::Result<reqwest::Client> {
        let mut builder = reqwest::Client::builder()
            .tls_certs_only([reqwest::Certificate::from_pem(self.ca.as_bytes())?])
            .tls_info(true)
            .resolve(SERVER, self.address)
            .no_proxy()
            .timeout(Duration::from_secs(10));
        if let Some(pair) = pair {
            builder = builder.identity(reqwest::Identity::from_pem(
                format!("{}{}", pair.cert, pair.key).as_bytes(),
            )?);
        }
        Ok(builder.build()?)
    }

    /// Code and message (or body) of a GET.
    async fn get(
        &self,
        pair: Option<&Pair>,
        path: &str,
        headers: &[(&str, &str)],
    ) -> anyhow::Result<(u16, String)> {
        let url = format!("https://{SERVER}:{}{path}", self.address.port());
        let mut request = self.client(pair)?.get(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = request.send().await?;
        let code = answer.status().as_u16();
        let text = answer.text().await?;
        let message = serde_json::from_str::<Value>(&text)
            .ok()
            .and_then(|body| body["message"].as_str().map(str::to_owned));
        Ok((code, message.unwrap_or(text)))
    }
}

async fn forged(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    fixture.stack().await?;
    let plane = fixture.plane().await?;
    let client = plane.client();
    let namespace = fixture.namespace("forged").await?;
    gpu_pod(&client, &namespace, "a", json!({})).await?;
    let path = named_path("v1beta2", &namespace, "a", "gpu_busy_percent");
    let forged = [
        ("X-Remote-User", "system:admin"),
        ("X-Remote-Group", "system:masters"),
    ];
    let (cluster, requestheader) = (&plane.certs().cluster, &plane.certs().requestheader);
    let mallory = cluster.client("mallory", &[])?;

    // Through the API server: it knows mallory by her certificate and drops the headers.
    let mut request = http::Request::get(&path);
    for (name, value) in forged {
        request = request.header(name, value);
    }
    let through = plane.access().client(&mallory)?;
    match through.request::<Value>(request.body(Vec::new())?).await {
        Err(kube::Error::Api(status)) => {
            ensure!(
                status.code == 403 && status.message.contains("mallory"),
                "{status:?}"
            );
        }
        other => anyhow::bail!("mallory was let in: {other:?}"),
    }

    // Around it.
    for door in Direct::all(&client).await? {
        let proxy = requestheader.client(FRONT_PROXY_NAME, &[])?;
        let (code, body) = door.get(Some(&proxy), &path, &forged).await?;
        ensure!(
            code == 200,
            "kube-apiserver's own certificate is the one that counts: {code} {body}"
        );

        let (code, message) = door.get(None, &path, &forged).await?;
        ensure!(
            code == 403 && message.contains("system:anonymous"),
            "{code} {message}"
        );
        let (code, message) = door.get(Some(&mallory), &path, &forged).await?;
        ensure!(code == 403 && message.contains("mallory"), "{code} {message}");
        // The right name from the wrong authority is a user of that name, no proxy.
        let namesake = cluster.client(FRONT_PROXY_NAME, &[])?;
        let (code, message) = door.get(Some(&namesake), &path, &forged).await?;
        ensure!(
            code == 403 && message.contains(FRONT_PROXY_NAME),
            "{code} {message}"
        );
        let wrong_name = requestheader.client("somebody-else", &[])?;
        let (code, message) = door.get(Some(&wrong_name), &path, &forged).await?;
        ensure!(
            code == 401 && message.contains("requestheader-allowed-names"),
            "{code} {message}"
        );
        let wrong_usage = requestheader.server(&[FRONT_PROXY_NAME], &[])?;
        let (code, message) = door.get(Some(&wrong_usage), &path, &forged).await?;
        ensure!(code == 401 && message.contains("clientAuth"), "{code} {message}");
        let (code, _) = door.get(None, "/readyz", &[]).await?;
        ensure!(code == 200, "probes need no credentials: {code}");
    }
    Ok(())
}

/// The same rules decide in front of and behind kube-apiserver; external metrics are a `list`.
async fn rights(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    fixture.stack().await?;
    let plane = fixture.plane().await?;
    let client = plane.client();
    let namespace = fixture.namespace("rights").await?;
    gpu_pod(&client, &namespace, "a", json!({})).await?;
    let rule = |group: &str, resource: &str, verb: &str| json!({"apiGroups": [group], "resources": [resource], "verbs": [verb]});
    let (custom, external) = ("custom.metrics.k8s.io", "external.metrics.k8s.io");
    let mut objects = vec![json!({
        "apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "reader", "namespace": namespace},
    })];
    for (name, rules, subject) in [
        (
            "reader",
            json!([
                rule(custom, "pods/gpu_busy_percent", "get"),
                rule(external, "gpu_health_reason", "list")
            ]),
            json!({"kind": "ServiceAccount", "name": "reader", "namespace": namespace}),
        ),
        (
            "getter",
            json!([rule(external, "gpu_health_reason", "get")]),
            json!({"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "getter"}),
        ),
    ] {
        objects.push(json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
            "metadata": {"name": name, "namespace": namespace}, "rules": rules,
        }));
        objects.push(json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": {"name": name, "namespace": namespace}, "subjects": [subject],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        }));
    }
    install::apply(&client, &objects, Mode::Apply).await?;
    let token = token(&client, &namespace, "reader").await?;
    let bearer = format!("Bearer {token}");
    let as_reader = [("Authorization", bearer.as_str())];
    let door = Direct::first(&client).await?;
    let through = plane.access().client_with_token(&token)?;

    let busy = named_path("v1beta2", &namespace, "a", "gpu_busy_percent");
    let memory = named_path("v1beta2", &namespace, "a", "gpu_memory_used_bytes");
    let reason = format!("/apis/external.metrics.k8s.io/v1beta1/namespaces/{namespace}/gpu_health_reason");
    until(
        "the token reads what its role names, around the API server",
        PATIENCE,
        || async {
            match door.get(None, &busy, &as_reader).await {
                Ok((200, _)) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        },
    )
    .await?;
    stack::get(&through, &busy).await.context("and through it")?;
    let (code, message) = door.get(None, &memory, &as_reader).await?;
    ensure!(
        code == 403 && message.contains("gpu_memory_used_bytes"),
        "{code} {message}"
    );
    // Whether the metric has series does not matter here; that the door opens does.
    let (code, message) = door.get(None, &reason, &as_reader).await?;
    ensure!(code == 200 || code == 404, "{code} {message}");
    let getter = plane.certs().cluster.client("getter", &[])?;
    let (code, message) = door.get(Some(&getter), &reason, &[]).await?;
    ensure!(
        code == 403 && message.contains("cannot list"),
        "get is not list: {code} {message}"
    );
    let (code, _) = door
        .get(None, &busy, &[("Authorization", "Bearer nonsense")])
        .await?;
    ensure!(code == 401, "{code}");
    Ok(())
}

async fn token(client: &Client, namespace: &str, account: &str) -> anyhow::Result<String> {
    let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
    let body =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}});
    let request = http::Request::post(path)
        .header("Content-Type", "application/json")
        .body(serde_json::to_vec(&body)?)?;
    let answer: Value = client.request(request).await?;
    Ok(answer["status"]["token"].as_str().context("a token")?.to_owned())
}

/// The certificate that a door shows, DER.
async fn shown(door: &Direct) -> anyhow::Result<Vec<u8>> {
    let url = format!("https://{SERVER}:{}/readyz", door.address.port());
    let answer = door.client(None)?.get(url).send().await?;
    let info = answer
        .extensions()
        .get::<reqwest::tls::TlsInfo>()
        .context("TLS")?;
    Ok(info.peer_certificate().context("a certificate")?.to_vec())
}

async fn shared_certificate(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    fixture.stack().await?;
    let client = fixture.client().await?;
    // Both verify against the CA of the one Secret by the Service's name, or `shown` fails.
    let doors = Direct::all(&client).await?;
    ensure!(doors.len() >= 2, "{} replicas", doors.len());
    let first = shown(&doors[0]).await?;
    for door in &doors[1..] {
        ensure!(
            shown(door).await? == first,
            "replicas serve different certificates"
        );
    }
    let services: Api<APIService> = Api::all(client);
    for name in API_SERVICES {
        let spec = services.get(name).await?.spec.context("spec")?;
        ensure!(
            spec.insecure_skip_tls_verify != Some(true),
            "{name} skips verification"
        );
        let bundle = spec.ca_bundle.context("caBundle")?;
        ensure!(bundle.0 == doors[0].ca.as_bytes(), "{name} trusts something else");
    }
    Ok(())
}

async fn patch_service(client: &Client, name: &str, spec: Value) -> anyhow::Result<()> {
    let services: Api<APIService> = Api::all(client.clone());
    services
        .patch(
            name,
            &PatchParams::default(),
            &Patch::Merge(json!({"spec": spec})),
        )
        .await?;
    Ok(())
}

async fn bundle(client: &Client, name: &str) -> Result<Vec<u8>, String> {
    let services: Api<APIService> = Api::all(client.clone());
    let service = services.get(name).await.map_err(|error| error.to_string())?;
    Ok(service
        .spec
        .and_then(|spec| spec.ca_bundle)
        .map(|bundle| bundle.0)
        .unwrap_or_default())
}

async fn registrations(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    fixture.stack().await?;
    let client = fixture.client().await?;
    let ca = Direct::first(&client).await?.ca;
    let [ours, _, taken] = API_SERVICES;

    // Somebody else takes one group over; somebody breaks another one of ours.
    let theirs = json!({"service": {"namespace": "default", "name": "kubernetes"}, "caBundle": "VEhFSVJT"});
    patch_service(&client, taken, theirs).await?;
    patch_service(&client, ours, json!({"caBundle": "QlJPS0VO"})).await?;
    let outcome = async {
        until("our caBundle is repaired", PATIENCE, || async {
            let now = bundle(&client, ours).await?;
            if now == ca.as_bytes() {
                Ok(())
            } else {
                Err(String::from_utf8_lossy(&now).into_owned())
            }
        })
        .await?;
        until("it is available", PATIENCE, || {
            stack::available(client.clone(), ours)
        })
        .await?;
        // The round that repaired ours has seen theirs too.
        let now = bundle(&client, taken).await.map_err(anyhow::Error::msg)?;
        ensure!(
            now == b"THEIRS",
            "touched what points elsewhere: {}",
            String::from_utf8_lossy(&now)
        );
        Ok(())
    }
    .await;
    let back = json!({"service": {"namespace": NAMESPACE, "name": "forewarm-adapter"}});
    patch_service(&client, taken, back).await?;
    until("it is ours again and available", PATIENCE, || {
        stack::available(client.clone(), taken)
    })
    .await?;
    outcome
}

async fn without_rights(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    fixture.stack().await?;
    let plane = fixture.plane().await?;
    let client = plane.client();
    let namespace = fixture.namespace("no-rights").await?;
    gpu_pod(&client, &namespace, "a", json!({})).await?;
    let path = named_path("v1beta2", &namespace, "a", "gpu_busy_percent");
    let door = Direct::first(&client).await?;
    let reader = plane.certs().cluster.client("nobody-in-particular", &[])?;
    let (code, _) = door.get(Some(&reader), &path, &[]).await?;
    ensure!(code == 403, "with rights, a denial is a denial: {code}");

    let bindings: Api<ClusterRoleBinding> = Api::all(client.clone());
    let name = "forewarm-adapter-auth-delegator";
    let binding = bindings.get(name).await?;
    bindings.delete(name, &DeleteParams::default()).await?;
    let outcome = async {
        until(
            "requests that need a review say why there is none",
            PATIENCE,
            || async {
                match door.get(Some(&reader), &path, &[]).await {
                    Ok((503, message)) if message.contains("SubjectAccessReview") => Ok(()),
                    other => Err(format!("{other:?}")),
                }
            },
        )
        .await?;
        until(
            "readiness names the missing right and holds",
            PATIENCE,
            || async {
                match door.get(None, "/readyz?verbose", &[]).await {
                    Ok((200, body)) if body.contains("may not create subjectaccessreviews") => Ok(()),
                    other => Err(format!("{other:?}")),
                }
            },
        )
        .await?;
        // kube-apiserver's own probes and administrators need no review.
        stack::get(&client, &path).await.context("an administrator")?;
        for service in API_SERVICES {
            stack::available(client.clone(), service)
                .await
                .map_err(anyhow::Error::msg)?;
        }
        Ok(())
    }
    .await;
    let again = ClusterRoleBinding {
        metadata: ObjectMeta {
            name: binding.metadata.name,
            labels: binding.metadata.labels,
            ..ObjectMeta::default()
        },
        ..binding
    };
    bindings.create(&PostParams::default(), &again).await?;
    until("the right is back", PATIENCE, || async {
        match door.get(Some(&reader), &path, &[]).await {
            Ok((403, _)) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await?;
    outcome
}

async fn api_server_restart(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    fixture.stack().await?;
    let plane = fixture.plane().await?;
    let namespace = fixture.namespace("restart").await?;
    gpu_pod(&plane.client(), &namespace, "a", json!({})).await?;
    let path = named_path("v1beta2", &namespace, "a", "gpu_busy_percent");
    let door = Direct::first(&plane.client()).await?;
    let proxy = plane.certs().requestheader.client(FRONT_PROXY_NAME, &[])?;
    let as_master = [
        ("X-Remote-User", "system:kube-aggregator"),
        ("X-Remote-Group", "system:masters"),
    ];

    let mut seen = Vec::new();
    plane
        .restart_api_server(async {
            // Longer than a scrape and a review live.
            let until = Instant::now() + Duration::from_secs(12);
            while Instant::now() < until {
                seen.push(door.get(Some(&proxy), &path, &as_master).await);
                seen.push(door.get(None, "/readyz", &[]).await);
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
        })
        .await?;
    for answer in seen {
        let (code, body) = answer.context("while the API server was away")?;
        ensure!(code == 200, "while the API server was away: {code} {body}");
    }
    let client = plane.access().client(plane.admin())?;
    for name in API_SERVICES {
        until(&format!("{name} is available"), PATIENCE, || {
            stack::available(client.clone(), name)
        })
        .await?;
    }
    until("the value is served through the API server", PATIENCE, || async {
        stack::get(&client, &path)
            .await
            .map(drop)
            .map_err(|error| error.to_string())
    })
    .await?;
    // The pod watches live again: every replica sees a new pod.
    gpu_pod(&client, &namespace, "b", json!({})).await?;
    let new = named_path("v1beta2", &namespace, "b", "gpu_busy_percent");
    served_by_all(&client, &proxy, &new, Duration::from_secs(10)).await
}

/// What every replica answers an administrator, for evidence.
async fn answers_of_all(client: &Client, proxy: &Pair, path: &str) -> Vec<String> {
    let as_master = [
        ("X-Remote-User", "system:admin"),
        ("X-Remote-Group", "system:masters"),
    ];
    let mut answers = Vec::new();
    for door in Direct::all(client).await.unwrap_or_default() {
        let answer = door.get(Some(proxy), path, &as_master).await;
        answers.push(format!("{}: {answer:?}", door.address));
    }
    answers
}

/// Waits until every replica serves `path` to an administrator.
async fn served_by_all(client: &Client, proxy: &Pair, path: &str, within: Duration) -> anyhow::Result<()> {
    let as_master = [
        ("X-Remote-User", "system:admin"),
        ("X-Remote-Group", "system:masters"),
    ];
    let doors = Direct::all(client).await?;
    ensure!(doors.len() >= 2, "{} replicas", doors.len());
    for door in doors {
        until(&format!("{} serves {path}", door.address), within, || async {
            match door.get(Some(proxy), path, &as_master).await {
                Ok((200, _)) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await?;
    }
    Ok(())
}

async fn rolling_update(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    fixture.stack().await?;
    let client = fixture.client().await?;
    let namespace = fixture.namespace("rollout").await?;
    gpu_pod(&client, &namespace, "a", json!({})).await?;
    let path = named_path("v1beta2", &namespace, "a", "gpu_busy_percent");
    let proxy = fixture
        .plane()
        .await?
        .certs()
        .requestheader
        .client(FRONT_PROXY_NAME, &[])?;
    // Each replica scrapes for itself: one may know a new pod two seconds before the other.
    served_by_all(&client, &proxy, &path, PATIENCE).await?;
    let before: Vec<_> = Direct::all(&client)
        .await?
        .iter()
        .map(|door| door.address)
        .collect();
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), NAMESPACE);
    let restart = json!({"spec": {"template": {"metadata": {"annotations": {"restarted": namespace}}}}});
    deployments
        .patch(
            "forewarm-adapter",
            &PatchParams::default(),
            &Patch::Merge(restart),
        )
        .await?;
    let (mut asked, started) = (0_u32, Instant::now());
    loop {
        if let Err(error) = stack::get(&client, &path).await {
            let replicas = answers_of_all(&client, &proxy, &path).await;
            return Err(error)
                .with_context(|| format!("request {asked}, {:?} into the rollout", started.elapsed()))
                .with_context(|| format!("the replicas say {replicas:?}"));
        }
        asked += 1;
        for name in API_SERVICES {
            if asked.is_multiple_of(10) {
                stack::available(client.clone(), name)
                    .await
                    .map_err(anyhow::Error::msg)?;
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        let settled = asked.is_multiple_of(20) && stack::adapters_ready(client.clone()).await.is_ok();
        if settled
            && Direct::all(&client)
                .await?
                .iter()
                .all(|door| !before.contains(&door.address))
        {
            break;
        }
        ensure!(
            started.elapsed() < Duration::from_secs(240),
            "the rollout does not end"
        );
    }
    ensure!(asked > 50, "only {asked} requests");
    Ok(())
}
