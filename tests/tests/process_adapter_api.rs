//! Process level: who may ask the adapter, over real TLS, with certificates of each kind.
//!
//! Inputs: the real adapter; a small API server that counts reviews; an exporter's body. The same doors are
//! tried with the real API server in front at the apiserver level.

#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forewarm_tests::controlplane::certs::{Authority, FRONT_PROXY_NAME, Pair};
use forewarm_tests::process::{KubeApi, Program, World, artefacts, fetch};
use forewarm_tests::wait::until;
use nix::sys::signal::Signal;
use reqwest::StatusCode;
use serde_json::{Value, json};
use tempfile::TempDir;

const SOON: Duration = Duration::from_secs(20);
const NAME: &str = "forewarm-adapter.forewarm.svc";
const PODS: &str = "/apis/custom.metrics.k8s.io/v1beta2/namespaces/serving/pods/*/gpu_busy_percent";
const HPA: &str = "system:serviceaccount:kube-system:horizontal-pod-autoscaler";

/// Certificates, the small API server, and an adapter in front of a value of 42 %.
struct Rig {
    clients: Authority,
    proxies: Authority,
    serving: Authority,
    kube: KubeApi,
    adapter: Program,
    api: SocketAddr,
    admin: SocketAddr,
    files: ServingFiles,
    _folder: TempDir,
}

/// A Secret volume as the kubelet lays it out.
struct ServingFiles {
    folder: PathBuf,
    version: AtomicUsize,
}

impl ServingFiles {
    fn new(folder: PathBuf, pair: &Pair) -> Self {
        std::fs::create_dir_all(&folder).unwrap();
        let files = Self {
            folder,
            version: AtomicUsize::new(0),
        };
        files.rotate(pair);
        for file in ["tls.crt", "tls.key"] {
            symlink(Path::new("..data").join(file), files.folder.join(file)).unwrap();
        }
        files
    }

    fn rotate(&self, pair: &Pair) {
        let version = self.version.fetch_add(1, Ordering::SeqCst);
        let name = format!("..v{version}");
        let folder = self.folder.join(&name);
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("tls.crt"), &pair.cert).unwrap();
        std::fs::write(folder.join("tls.key"), &pair.key).unwrap();
        symlink(&name, self.folder.join("..next")).unwrap();
        std::fs::rename(self.folder.join("..next"), self.folder.join("..data")).unwrap();
    }
}

fn pod() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "llm-0", "namespace": "serving", "uid": "uid-1", "resourceVersion": "1",
            "labels": {"app": "llm"},
        },
        "spec": {"nodeName": "node-a", "containers": []},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

const EXPOSITION: &str = "\
# TYPE gpu_pod_busy_ratio gauge
gpu_pod_busy_ratio{namespace=\"serving\",pod=\"llm-0\",container=\"main\",pod_uid=\"uid-1\",gpu=\"0\",\
uuid=\"GPU-1\",source=\"exclusive\"} 0.42
# TYPE gpu_pod_sample_age_seconds gauge
gpu_pod_sample_age_seconds{pod_uid=\"uid-1\",source=\"exclusive\"} 0.1
";

fn authentication(clients: &Authority, proxies: &Authority) -> std::collections::BTreeMap<String, String> {
    [
        ("client-ca-file", clients.pem()),
        ("requestheader-client-ca-file", proxies.pem()),
        ("requestheader-allowed-names", format!("[\"{FRONT_PROXY_NAME}\"]")),
        ("requestheader-username-headers", "[\"X-Remote-User\"]".to_owned()),
        ("requestheader-group-headers", "[\"X-Remote-Group\"]".to_owned()),
        (
            "requestheader-extra-headers-prefix",
            "[\"X-Remote-Extra-\"]".to_owned(),
        ),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect()
}

impl Rig {
    async fn start() -> Self {
        Self::start_with(&[], |_| {}).await
    }

    /// The adapter is ready and has the value when this returns, unless the world was changed.
    async fn start_with(args: &[&str], change: impl FnOnce(&mut World)) -> Self {
        forewarm_runtime::install_crypto();
        let folder = tempfile::tempdir().unwrap();
        let (clients, proxies) = (
            Authority::new("clients").unwrap(),
            Authority::new("proxies").unwrap(),
        );
        let serving = Authority::new("serving").unwrap();
        let mut world = World {
            authentication: authentication(&clients, &proxies),
            pods: vec![pod()],
            allowed: [HPA.to_owned()].into(),
            tokens: [("good".to_owned(), HPA.to_owned())].into(),
            exposition: EXPOSITION.to_owned(),
            ..World::default()
        };
        change(&mut world);
        let is_complete = !world.forbids && !world.authentication.is_empty();
        let kube = KubeApi::start(world).await.unwrap();
        let files = ServingFiles::new(folder.path().join("tls"), &serving.server(&[NAME], &[]).unwrap());
        let config = folder.path().join("adapter.yaml");
        let text = format!(
            "apiVersion: forewarm.dev/v1alpha1\nkind: AdapterConfig\nsources:\n- name: exporters\n  scrape:\n    \
             targets: [\"{}\"]\n    scheme: http\n    interval: 1s\n    timeout: 500ms\n",
            kube.addr()
        );
        std::fs::write(&config, text).unwrap();
        let mut command = Command::new(&artefacts().unwrap().adapter);
        command
            .args(["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"])
            .arg("--config")
            .arg(&config)
            .arg("--kubeconfig")
            .arg(kube.kubeconfig(folder.path()).unwrap())
            .arg("--tls-cert")
            .arg(files.folder.join("tls.crt"))
            .arg("--tls-key")
            .arg(files.folder.join("tls.key"))
            .args(args);
        let mut adapter = Program::start("forewarm-adapter", command, folder.path()).unwrap();
        let rig = Self {
            api: adapter.listening("\"api\"").await.unwrap(),
            admin: adapter.listening("\"admin\"").await.unwrap(),
            clients,
            proxies,
            serving,
            kube,
            adapter,
            files,
            _folder: folder,
        };
        if is_complete {
            until("it is ready and serves the value to the HPA", SOON, || async {
                let (code, body) = rig.hpa().await;
                let ready = fetch(rig.admin, "/readyz?verbose")
                    .await
                    .map_err(|error| error.to_string())?;
                if code == 200 && body["items"][0]["value"] == "42" && ready.status == 200 {
                    Ok(())
                } else {
                    Err(format!("{code} {body} {}", ready.text()))
                }
            })
            .await
            .unwrap();
        }
        rig
    }

    /// A client that shows `pair`, or no certificate.
    fn client(&self, pair: Option<&Pair>) -> reqwest::Client {
        self.client_that_trusts(&[&self.serving], pair)
    }

    fn client_that_trusts(&self, roots: &[&Authority], pair: Option<&Pair>) -> reqwest::Client {
        let roots = roots
            .iter()
            .map(|root| reqwest::Certificate::from_pem(root.pem().as_bytes()).unwrap());
        let mut builder = reqwest::Client::builder()
            .tls_certs_only(roots)
            .resolve(NAME, self.api)
            .no_proxy()
            .timeout(Duration::from_secs(10));
        if let Some(pair) = pair {
            let pem = format!("{}{}", pair.cert, pair.key);
            builder = builder.identity(reqwest::Identity::from_pem(pem.as_bytes()).unwrap());
        }
        builder.build().unwrap()
    }

    fn url(&self, path: &str) -> String {
        format!("https://{NAME}:{}{path}", self.api.port())
    }

    async fn get(&self, client: &reqwest::Client, path: &str, headers: &[(&str, &str)]) -> (u16, Value) {
        let mut request = client.get(self.url(path));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        match request.send().await {
            Ok(answer) => {
                assert!(!answer.headers().contains_key("retry-after"));
                let code = answer.status().as_u16();
                let text = answer.text().await.unwrap_or_default();
                (code, serde_json::from_str(&text).unwrap_or(Value::String(text)))
            }
            Err(error) => (0, Value::String(format!("{error:?}"))),
        }
    }

    fn front_proxy(&self) -> Pair {
        self.proxies.client(FRONT_PROXY_NAME, &[]).unwrap()
    }

    /// As kube-apiserver asks for the HPA controller.
    async fn hpa(&self) -> (u16, Value) {
        let client = self.client(Some(&self.front_proxy()));
        self.get(&client, PODS, &[("X-Remote-User", HPA)]).await
    }

    async fn own_metric(&self, line_start: &str) -> Option<f64> {
        let answer = fetch(self.admin, "/metrics").await.unwrap();
        answer
            .text()
            .lines()
            .find_map(|line| line.strip_prefix(line_start)?.trim().parse().ok())
    }

    fn access_reviews(&self) -> Vec<Value> {
        std::mem::take(&mut self.kube.world().access_reviews)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_identity_headers_count_for_nothing_without_a_front_proxy_certificate() {
    let rig = Rig::start().await;
    let forged = [
        ("X-Remote-User", HPA),
        ("X-Remote-Group", "system:masters"),
        ("X-Remote-Extra-Scopes", "all"),
    ];
    rig.access_reviews();
    let (code, body) = rig.get(&rig.client(None), PODS, &forged).await;
    assert_eq!(
        (code, body["reason"].as_str()),
        (403, Some("Forbidden")),
        "{body}"
    );
    assert!(
        body["message"].as_str().unwrap().contains("system:anonymous"),
        "{body}"
    );

    // A user of the cluster CA is that user, whatever the headers say.
    let alice = rig.clients.client("alice", &["team"]).unwrap();
    let (code, body) = rig.get(&rig.client(Some(&alice)), PODS, &forged).await;
    assert_eq!(code, 403, "{body}");
    assert!(body["message"].as_str().unwrap().contains("\"alice\""), "{body}");
    let asked = rig.access_reviews();
    let users: Vec<_> = asked.iter().map(|spec| spec["user"].as_str().unwrap()).collect();
    assert_eq!(users, ["system:anonymous", "alice"]);
    assert_eq!(asked[1]["groups"], json!(["team", "system:authenticated"]));
    assert!(asked.iter().all(|spec| spec.get("extra").is_none()));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_wrong_proxy_certificate_is_401_and_counted_by_its_reason() {
    let rig = Rig::start().await;
    let stranger = Authority::new("stranger").unwrap();
    let as_hpa = [("X-Remote-User", HPA), ("X-Remote-Group", "system:masters")];
    rig.access_reviews();
    for (what, pair, reason) in [
        (
            "wrong CN",
            rig.proxies.client("somebody-else", &[]).unwrap(),
            "name_not_allowed",
        ),
        (
            "wrong EKU",
            rig.proxies.server(&[FRONT_PROXY_NAME], &[]).unwrap(),
            "wrong_usage",
        ),
        (
            "wrong CA",
            stranger.client(FRONT_PROXY_NAME, &[]).unwrap(),
            "unknown_ca",
        ),
    ] {
        let (code, body) = rig.get(&rig.client(Some(&pair)), PODS, &as_hpa).await;
        assert_eq!(
            (code, body["reason"].as_str()),
            (401, Some("Unauthorized")),
            "{what}: {body}"
        );
        let line = format!("forewarm_adapter_identity_rejections_total{{reason=\"{reason}\"}}");
        assert_eq!(rig.own_metric(&line).await, Some(1.0), "{what}");
    }
    assert!(
        rig.access_reviews().is_empty(),
        "nobody is asked about a rejected identity"
    );
    assert_eq!(rig.hpa().await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn reviews_ask_what_a_generic_api_server_would_ask() {
    let rig = Rig::start().await;
    let client = rig.client(Some(&rig.front_proxy()));
    rig.access_reviews();
    let as_hpa = [
        ("X-Remote-User", HPA),
        ("X-Remote-Group", "one"),
        ("X-Remote-Group", "two"),
        ("X-Remote-Extra-acme.org%2Fproject", "llm"),
    ];
    let external = "/apis/external.metrics.k8s.io/v1beta1/namespaces/serving/queue?labelSelector=a%3Db";
    assert_eq!(rig.get(&client, PODS, &as_hpa).await.0, 200);
    assert_eq!(rig.get(&client, external, &as_hpa).await.0, 404);
    assert_eq!(
        rig.get(&client, "/apis/custom.metrics.k8s.io/v1beta1", &as_hpa)
            .await
            .0,
        200
    );
    let asked = rig.access_reviews();
    assert_eq!(asked.len(), 3);
    assert_eq!(asked[0]["groups"], json!(["one", "two", "system:authenticated"]));
    assert_eq!(asked[0]["extra"], json!({"acme.org/project": ["llm"]}));
    assert_eq!(
        asked[0]["resourceAttributes"],
        json!({
            "verb": "get", "group": "custom.metrics.k8s.io", "version": "v1beta2", "namespace": "serving",
            "resource": "pods", "name": "*", "subresource": "gpu_busy_percent",
        })
    );
    assert_eq!(
        asked[1]["resourceAttributes"],
        json!({
            "verb": "list", "group": "external.metrics.k8s.io", "version": "v1beta1", "namespace": "serving",
            "resource": "queue",
        })
    );
    assert_eq!(
        asked[2]["nonResourceAttributes"],
        json!({"verb": "get", "path": "/apis/custom.metrics.k8s.io/v1beta1"})
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_requests_cost_one_review_of_each_kind() {
    let rig = Rig::start().await;
    let client = rig.client(None);
    rig.access_reviews();
    let with_token = [("Authorization", "Bearer good")];
    let started = Instant::now();
    let answers = futures::future::join_all((0..100).map(|_| rig.get(&client, PODS, &with_token))).await;
    assert!(answers.iter().all(|(code, _)| *code == 200), "{:?}", answers[0]);
    assert!(
        started.elapsed() < Duration::from_secs(10),
        "longer than a cache entry lives"
    );
    assert!(rig.access_reviews().len() <= 2);
    assert!(rig.kube.world().token_reviews <= 2);

    let (code, body) = rig.get(&client, PODS, &[("Authorization", "Bearer bad")]).await;
    assert_eq!((code, body["reason"].as_str()), (401, Some("Unauthorized")));
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_need_nothing_and_tolerate_any_certificate() {
    let rig = Rig::start().await;
    let stranger = Authority::new("kubelets").unwrap().client("node-a", &[]).unwrap();
    for client in [rig.client(None), rig.client(Some(&stranger))] {
        for path in ["/livez", "/readyz", "/healthz", "/readyz?verbose&exclude=x"] {
            assert_eq!(rig.get(&client, path, &[]).await.0, 200, "{path}");
        }
    }
    let (_, verbose) = rig.get(&rig.client(None), "/readyz?verbose", &[]).await;
    for condition in ["pods", "rights", "server", "targets", "trust"] {
        assert!(
            verbose.as_str().unwrap().contains(&format!("[+]{condition} ok")),
            "{verbose}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_front_proxy_ca_takes_over_on_open_connections() {
    let rig = Rig::start().await;
    let old = rig.client(Some(&rig.front_proxy()));
    let as_hpa = [("X-Remote-User", HPA)];
    assert_eq!(rig.get(&old, PODS, &as_hpa).await.0, 200);

    let renewed = Authority::new("renewed").unwrap();
    let new = rig.client(Some(&renewed.client(FRONT_PROXY_NAME, &[]).unwrap()));
    assert_eq!(rig.get(&new, PODS, &as_hpa).await.0, 401);
    rig.kube
        .change(|world| world.authentication = authentication(&rig.clients, &renewed));
    until("the new CA counts and the old one does not", SOON, || async {
        let codes = (
            rig.get(&new, PODS, &as_hpa).await.0,
            rig.get(&old, PODS, &as_hpa).await.0,
        );
        if codes == (200, 401) {
            Ok(())
        } else {
            Err(format!("{codes:?}"))
        }
    })
    .await
    .unwrap();

    // A map that cannot be read changes nothing.
    rig.kube.change(|world| {
        world
            .authentication
            .insert("requestheader-client-ca-file".to_owned(), "nonsense".to_owned());
    });
    until("the refusal is logged", SOON, || async {
        let log = rig.adapter.log();
        log.contains("authentication ConfigMap cannot be used")
            .then_some(())
            .ok_or(log)
    })
    .await
    .unwrap();
    assert_eq!(rig.get(&new, PODS, &as_hpa).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rotated_serving_certificate_is_used_without_a_failed_request() {
    let rig = Arc::new(Rig::start().await);
    let renewed = Authority::new("renewed-serving").unwrap();
    let pair = rig.front_proxy();
    let stop = Arc::new(AtomicBool::new(false));
    let load = {
        let (rig, stop) = (Arc::clone(&rig), Arc::clone(&stop));
        let client = rig.client_that_trusts(&[&rig.serving, &renewed], Some(&pair));
        let fresh = rig.client_that_trusts(&[&rig.serving, &renewed], Some(&pair));
        async move {
            let mut done = 0;
            while !stop.load(Ordering::SeqCst) {
                // One connection that stays open, and one that is new each time.
                let (code, body) = rig.get(&client, PODS, &[("X-Remote-User", HPA)]).await;
                assert_eq!(code, 200, "{body}");
                let close = [("X-Remote-User", HPA), ("Connection", "close")];
                let (code, body) = rig.get(&fresh, PODS, &close).await;
                assert_eq!(code, 200, "{body}");
                done += 2;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            done
        }
    };
    let rotate = async {
        rig.files.rotate(&renewed.server(&[NAME], &[]).unwrap());
        let result = until("the new certificate is served", SOON, || async {
            // Trusts the new authority only, so the old certificate fails the handshake.
            let client = rig.client_that_trusts(&[&renewed], Some(&pair));
            match rig.get(&client, PODS, &[("X-Remote-User", HPA)]).await {
                (200, _) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
        stop.store(true, Ordering::SeqCst);
        result
    };
    let (done, rotated) = tokio::join!(load, rotate);
    rotated.unwrap();
    assert!(done >= 10, "{done} requests under load");
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_drains_without_a_failed_request() {
    let mut rig = Rig::start_with(&["--shutdown-delay", "2s"], |_| {}).await;
    let client = rig.client(Some(&rig.front_proxy()));
    let probe = rig.client(None);
    rig.adapter.signal(Signal::SIGTERM);
    // As a load balancer: traffic ends a second after readiness is off, in the middle of the delay.
    let mut unready_since = None;
    let mut done = 0;
    loop {
        let (code, body) = rig.get(&client, PODS, &[("X-Remote-User", HPA)]).await;
        assert_eq!(code, 200, "after {done} requests: {body}");
        done += 1;
        if unready_since.is_none() {
            let (code, body) = rig.get(&probe, "/readyz", &[]).await;
            if code == 500 {
                assert!(body.as_str().unwrap().contains("stopping"), "{body}");
                unready_since = Some(Instant::now());
            }
        }
        if unready_since.is_some_and(|since: Instant| since.elapsed() > Duration::from_secs(1)) {
            break;
        }
    }
    assert!(done > 10, "{done}");
    let status = rig.adapter.ended(SOON).await.unwrap();
    assert!(status.success(), "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_in_flight_at_sigterm_is_answered() {
    let mut rig = Rig::start_with(&["--shutdown-delay", "0s"], |_| {}).await;
    rig.kube.world().review_delay = Duration::from_millis(1500);
    rig.kube.world().allowed.insert("slow".to_owned());
    rig.access_reviews();
    let client = rig.client(Some(&rig.front_proxy()));
    let url = rig.url(PODS);
    #[allow(clippy::disallowed_methods, reason = "awaited below")]
    let request = tokio::spawn(client.get(url).header("X-Remote-User", "slow").send());
    until("the review is under way", SOON, || async {
        let asked = rig.kube.world().access_reviews.len();
        (asked > 0)
            .then_some(())
            .ok_or_else(|| "not asked yet".to_owned())
    })
    .await
    .unwrap();
    rig.adapter.signal(Signal::SIGTERM);
    let answer = request.await.unwrap().unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    let status = rig.adapter.ended(SOON).await.unwrap();
    assert!(status.success(), "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_rights_probes_answer_and_say_what_is_missing() {
    let rig = Rig::start_with(&[], |world| world.forbids = true).await;
    until("the missing rights are named", SOON, || async {
        let (code, body) = rig.get(&rig.client(None), "/readyz?verbose", &[]).await;
        let body = body.as_str().unwrap_or_default().to_owned();
        let named = [
            "[!]rights degraded",
            "may not list pods",
            "may not create subjectaccessreviews.authorization.k8s.io",
            "[-]trust waiting",
        ];
        if code == 500 && named.iter().all(|text| body.contains(text)) {
            Ok(())
        } else {
            Err(format!("{code} {body}"))
        }
    })
    .await
    .unwrap();
    assert_eq!(rig.get(&rig.client(None), "/livez", &[]).await.0, 200);
    assert!(
        rig.own_metric("forewarm_adapter_missing_rights")
            .await
            .is_some_and(|count| count >= 4.0)
    );
    let (code, body) = rig.get(&rig.client(None), PODS, &[]).await;
    assert_eq!(
        (code, body["reason"].as_str()),
        (503, Some("ServiceUnavailable")),
        "{body}"
    );
    assert!(
        body["message"].as_str().unwrap().contains("SubjectAccessReview"),
        "{body}"
    );

    // Rights that are granted later are noticed without a restart.
    rig.kube.change(|world| world.forbids = false);
    until("everything works", Duration::from_secs(60), || async {
        match rig.hpa().await {
            (200, _) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_early_is_no_error() {
    let rig = Rig::start().await;
    rig.kube.world().review_delay = Duration::from_secs(1);
    let client = rig.client(Some(&rig.front_proxy()));
    let request = client.get(rig.url(PODS)).header("X-Remote-User", "impatient");
    let gone = tokio::time::timeout(Duration::from_millis(200), request.send()).await;
    assert!(gone.is_err(), "answered too fast to leave");
    until("it counts as abandoned", SOON, || async {
        match rig.own_metric("forewarm_adapter_requests_abandoned_total").await {
            Some(1.0) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
    assert!(!rig.adapter.log().contains("ERROR"), "{}", rig.adapter.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn both_http_versions_are_served() {
    let rig = Rig::start().await;
    let client = rig.client(Some(&rig.front_proxy()));
    let answer = client.get(rig.url("/readyz")).send().await.unwrap();
    assert_eq!(answer.version(), reqwest::Version::HTTP_2);
    let root = reqwest::Certificate::from_pem(rig.serving.pem().as_bytes()).unwrap();
    let old = reqwest::Client::builder()
        .tls_certs_only([root])
        .resolve(NAME, rig.api)
        .no_proxy()
        .http1_only()
        .build()
        .unwrap();
    let answer = old.get(rig.url("/readyz")).send().await.unwrap();
    assert_eq!(answer.version(), reqwest::Version::HTTP_11);
}
