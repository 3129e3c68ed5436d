//! Tests of whole requests against a scripted provider, without sockets.

use super::*;
use crate::provider::{CustomValue, ExternalValue, ObjectRef, ResourceMetrics};
use crate::quantity::Quantity;
use http::Request;
use http_body_util::BodyExt as _;
use std::collections::BTreeMap;
use std::time::SystemTime;

const CUSTOM: &str = "/apis/custom.metrics.k8s.io/v1beta2";
const EXTERNAL: &str = "/apis/external.metrics.k8s.io/v1beta1";

/// Sixteen pods in `ns`, half of them labelled foo=bar; four nodes, two labelled; one namespace metric.
struct Scripted {
    catalog: Arc<Catalog>,
}

fn value(kind: &str, namespace: Option<&str>, name: &str) -> CustomValue {
    CustomValue {
        object: ObjectRef {
            kind: kind.to_owned(),
            api_version: "v1".to_owned(),
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
        },
        value: Quantity::from_millis(42_000),
        measured_at: SystemTime::UNIX_EPOCH,
        window: None,
    }
}

impl Scripted {
    fn many(
        kind: &str,
        namespace: Option<&str>,
        count: usize,
        name: Option<&str>,
        selector: &Selector,
    ) -> Vec<CustomValue> {
        if let Some(name) = name {
            return vec![value(kind, namespace, name)];
        }
        let wanted = if selector.to_string().is_empty() {
            count
        } else {
            count / 2
        };
        (0..wanted)
            .map(|index| value(kind, namespace, &format!("{kind}-{index}")))
            .collect()
    }
}

impl Provider for Scripted {
    fn custom(
        &self,
        query: &ObjectQuery<'_>,
        metric: &str,
        _: &Selector,
        _: Instant,
    ) -> Result<Vec<CustomValue>, Refusal> {
        if metric != "some-metric" {
            return Err(Refusal::UnknownMetric {
                metric: metric.to_owned(),
                resource: "pods".to_owned(),
            });
        }
        match *query {
            ObjectQuery::Pods {
                namespace: "empty",
                selector,
                ..
            } => Err(Refusal::NoPodsMatch {
                metric: metric.to_owned(),
                resource: "running pod".to_owned(),
                namespace: "empty".to_owned(),
                selector: selector.to_string(),
            }),
            ObjectQuery::Pods {
                namespace: "stale", ..
            } => Err(Refusal::NoSample("some-metric: last sample 31 s ago".to_owned())),
            ObjectQuery::Pods {
                namespace,
                name,
                selector,
            } => Ok(Self::many("Pod", Some(namespace), 16, name, selector)),
            ObjectQuery::Namespace { namespace } => Ok(vec![value("Namespace", None, namespace)]),
            ObjectQuery::Object {
                resource,
                name,
                selector,
                ..
            } if resource.resource == "nodes" => Ok(Self::many("Node", None, 4, name, selector)),
            ObjectQuery::Object {
                namespace: Some(namespace),
                resource,
                name,
                selector,
            } if resource.to_string() == "deployments.apps" => {
                Ok(Self::many("Deployment", Some(namespace), 2, name, selector))
            }
            ObjectQuery::Object { resource, .. } => Err(Refusal::UnknownMetric {
                metric: metric.to_owned(),
                resource: resource.to_string(),
            }),
        }
    }

    fn external(
        &self,
        namespace: &str,
        metric: &str,
        selector: &Selector,
        _: Instant,
    ) -> Result<Vec<ExternalValue>, Refusal> {
        match metric {
            "queue" => Ok(vec![ExternalValue {
                labels: BTreeMap::from([("asked".to_owned(), selector.to_string())]),
                value: Quantity::from_millis(7_500),
                measured_at: SystemTime::UNIX_EPOCH,
                window: None,
            }]),
            "slow" => Err(Refusal::Timeout("slow: no answer within 2 s".to_owned())),
            "down" => Err(Refusal::Unavailable(
                "down: source prometheus is out of reach".to_owned(),
            )),
            "two" => Err(Refusal::Ambiguous("two: 2 series where 1 is expected".to_owned())),
            _ => Err(Refusal::UnknownMetric {
                metric: metric.to_owned(),
                resource: format!("namespace {namespace}"),
            }),
        }
    }

    fn catalog(&self) -> Arc<Catalog> {
        Arc::clone(&self.catalog)
    }
}

pub(crate) fn api() -> Api {
    let listed = |namespaced| ResourceMetrics {
        namespaced,
        metrics: ["some-metric".to_owned()].into(),
    };
    let catalog = Catalog {
        custom: [("pods", true), ("nodes", false), ("deployments.apps", true)]
            .into_iter()
            .map(|(resource, namespaced)| (GroupResource::parse(resource), listed(namespaced)))
            .collect(),
        external: ["queue".to_owned()].into(),
    };
    let provider = Arc::new(Scripted {
        catalog: Arc::new(catalog),
    });
    Api::new(provider, None, health::Status::new(), Metrics::default())
}

async fn send(
    api: &Api,
    method: Method,
    path: &str,
    accept: Option<&'static str>,
) -> (Answer, serde_json::Value) {
    let mut request = Request::builder().method(method).uri(path);
    if let Some(accept) = accept {
        request = request.header(header::ACCEPT, accept);
    }
    let (parts, ()) = request.body(()).unwrap().into_parts();
    let answer = api.answer(&parts, None).await;
    let (parts, body) = answer.into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    assert!(!parts.headers.contains_key(header::RETRY_AFTER), "{path}");
    let value = serde_json::from_slice(&bytes).unwrap_or(serde_json::Value::Null);
    (Answer::from_parts(parts, Full::new(bytes)), value)
}

async fn get(api: &Api, path: &str) -> (u16, serde_json::Value) {
    let (answer, body) = send(api, Method::GET, path, None).await;
    (answer.status().as_u16(), body)
}

/// The paths, codes and counts of `TestCustomMetricsAPI` and `TestExternalMetricsAPI` of
/// custom-metrics-apiserver, for both custom versions.
#[tokio::test]
async fn the_routing_table_of_custom_metrics_apiserver_holds() {
    let api = api();
    for version in ["v1beta1", "v1beta2"] {
        let base = format!("/apis/custom.metrics.k8s.io/{version}");
        for (path, code, count) in [
            ("/blah", 404, 0),
            ("/nodes/foo", 404, 0),
            ("/namespaces/ns/pods/bar", 404, 0),
            ("/nodes/*/some-metric", 200, 4),
            ("/namespaces/ns/pods/*/some-metric", 200, 16),
            ("/namespaces/ns/metrics/some-metric", 200, 1),
            ("/nodes/*/some-metric?labelSelector=foo%3Dbar", 200, 2),
            (
                "/namespaces/ns/pods/*/some-metric?labelSelector=foo%3Dbar",
                200,
                8,
            ),
            ("/nodes/foo/some-metric", 200, 1),
            ("/namespaces/ns/pods/foo/some-metric", 200, 1),
            ("/namespaces/ns/pods/foo/other-metric", 404, 0),
        ] {
            let (got, body) = get(&api, &format!("{base}{path}")).await;
            assert_eq!(got, code, "{version}{path}: {body}");
            if code == 200 {
                assert_eq!(body["items"].as_array().unwrap().len(), count, "{version}{path}");
                assert_eq!(body["apiVersion"], format!("custom.metrics.k8s.io/{version}"));
                assert_eq!(body["kind"], "MetricValueList");
            } else {
                assert_eq!(body["kind"], "Status", "{version}{path}");
            }
        }
    }
    for (path, code) in [
        ("/apis/", 200),
        ("/apis/external.metrics.k8s.io/v1beta1", 200),
        ("/apis/external.metrics.k8s.io/v1beta1/queue", 404),
        ("/apis/external.metrics.k8s.io/v1beta1/namespaces/ns", 404),
        ("/apis/external.metrics.k8s.io/v1beta1/namespaces/ns/queue", 200),
        (
            "/apis/external.metrics.k8s.io/v1beta1/namespaces/ns/queue?labelSelector=foo%3Dbar",
            200,
        ),
        (
            "/apis/external.metrics.k8s.io/v1beta1/namespaces/ns/queue/with/slashes",
            404,
        ),
        ("/apis/external.metrics.k8s.io/v1beta1/namespaces/ns/unknown", 404),
    ] {
        assert_eq!(get(&api, path).await.0, code, "{path}");
    }
}

#[tokio::test]
async fn every_shape_an_hpa_asks_for_is_answered() {
    let api = api();
    for (path, kind, count) in [
        ("/namespaces/ns/pods/%2A/some-metric", "Pod", 16),
        (
            "/namespaces/ns/pods/%2a/some-metric?limit=5&resourceVersion=0&timeout=1s&selector=x",
            "Pod",
            16,
        ),
        ("/namespaces/ns/pod/p/some-metric", "Pod", 1),
        (
            "/namespaces/ns/deployments.apps/web/some-metric?metricLabelSelector=a%3Db",
            "Deployment",
            1,
        ),
        ("/namespaces/ns/deployment.apps/web/some-metric", "Deployment", 1),
        ("/namespaces/ns/nodes/n1/some-metric", "Node", 1),
        ("/namespaces/ns/node/n1/some-metric", "Node", 1),
        ("/namespaces/ns/metrics/some-metric", "Namespace", 1),
    ] {
        let (code, body) = get(&api, &format!("{CUSTOM}{path}")).await;
        assert_eq!(code, 200, "{path}: {body}");
        let items = body["items"].as_array().unwrap();
        assert_eq!(items.len(), count, "{path}");
        assert_eq!(items[0]["describedObject"]["kind"], kind, "{path}");
        assert_eq!(items[0]["describedObject"]["apiVersion"], "v1");
    }
    let (code, body) = get(
        &api,
        &format!("{EXTERNAL}/namespaces/ns/queue?labelSelector=pool%20in%20(a,b)"),
    )
    .await;
    assert_eq!(code, 200);
    assert_eq!(body["items"][0]["value"], "7500m");
    assert!(
        body["items"][0]["metricLabels"]["asked"]
            .as_str()
            .unwrap()
            .contains("pool in")
    );
}

#[tokio::test]
async fn each_fault_has_its_code_and_says_why() {
    let api = api();
    let pods = |namespace: &str, rest: &str| format!("{CUSTOM}/namespaces/{namespace}/pods/*/{rest}");
    for (path, code, reason, says) in [
        (pods("ns", "unknown"), 404, "NotFound", "unknown"),
        (
            pods("empty", "some-metric?labelSelector=app%3Dllm"),
            404,
            "NotFound",
            "app=llm",
        ),
        (pods("stale", "some-metric"), 404, "NotFound", "31 s ago"),
        (
            pods("ns", "some-metric?labelSelector=a%3D%3D%3Db"),
            400,
            "BadRequest",
            "labelSelector",
        ),
        (
            pods("ns", "some-metric?metricLabelSelector=%21%21"),
            400,
            "BadRequest",
            "metricLabelSelector",
        ),
        (
            format!("{EXTERNAL}/namespaces/ns/queue?labelSelector=a+in+("),
            400,
            "BadRequest",
            "labelSelector",
        ),
        (
            format!("{EXTERNAL}/namespaces/ns/queue?labelSelector=%zz"),
            400,
            "BadRequest",
            "labelSelector",
        ),
        (
            format!("{EXTERNAL}/namespaces/ns/other"),
            404,
            "NotFound",
            "other",
        ),
        (format!("{EXTERNAL}/namespaces/ns/slow"), 504, "Timeout", "2 s"),
        (
            format!("{EXTERNAL}/namespaces/ns/down"),
            503,
            "ServiceUnavailable",
            "prometheus",
        ),
        (
            format!("{EXTERNAL}/namespaces/ns/two"),
            400,
            "BadRequest",
            "2 series",
        ),
        (
            format!("{CUSTOM}/pods/*/some-metric"),
            404,
            "NotFound",
            "outside a namespace",
        ),
        (
            format!("{CUSTOM}/namespaces/ns/secrets/x/some-metric"),
            404,
            "NotFound",
            "secrets",
        ),
        (
            format!("{CUSTOM}/namespaces/ns/pods/%ff/m"),
            400,
            "BadRequest",
            "escape",
        ),
        ("/".to_owned(), 404, "NotFound", "could not find"),
        ("/metrics".to_owned(), 404, "NotFound", "/metrics"),
    ] {
        let (got, body) = get(&api, &path).await;
        assert_eq!(got, code, "{path}: {body}");
        assert_eq!(body["kind"], "Status", "{path}");
        assert_eq!(body["status"], "Failure");
        assert_eq!(body["code"], code);
        assert_eq!(body["reason"], reason, "{path}");
        let message = body["message"].as_str().unwrap();
        assert!(message.contains(says), "{path}: {message}");
    }
}

#[tokio::test]
async fn only_get_is_answered() {
    let api = api();
    for method in [
        Method::POST,
        Method::PUT,
        Method::DELETE,
        Method::PATCH,
        Method::HEAD,
    ] {
        for path in [
            "/apis",
            "/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/pods/*/some-metric",
        ] {
            let (answer, _) = send(&api, method.clone(), path, None).await;
            assert_eq!(answer.status(), 405, "{method} {path}");
            assert_eq!(answer.headers()[header::ALLOW], "GET");
        }
    }
}

#[tokio::test]
async fn json_is_served_to_everybody_who_takes_it() {
    let api = api();
    let path = format!("{CUSTOM}/namespaces/ns/pods/*/some-metric");
    for accept in [
        None,
        Some("*/*"),
        Some("application/json"),
        Some("application/vnd.kubernetes.protobuf, */*"),
        Some("application/vnd.kubernetes.protobuf,application/json"),
    ] {
        let (answer, body) = send(&api, Method::GET, &path, accept).await;
        assert_eq!(answer.status(), 200, "{accept:?}");
        assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/json");
        assert_eq!(body["items"].as_array().unwrap().len(), 16);
    }
    let (answer, body) = send(
        &api,
        Method::GET,
        &path,
        Some("application/vnd.kubernetes.protobuf"),
    )
    .await;
    assert_eq!(answer.status(), 406);
    assert_eq!(body["reason"], "NotAcceptable");
}

#[tokio::test]
async fn discovery_is_negotiated_and_never_406_for_the_api_server() {
    const V2: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
    let api = api();
    let (answer, body) = send(&api, Method::GET, "/apis", Some(V2)).await;
    assert_eq!(answer.headers()[header::CONTENT_TYPE], V2);
    assert_eq!(body["kind"], "APIGroupDiscoveryList");
    let (_, plain) = send(&api, Method::GET, "/apis", Some("application/json")).await;
    assert_eq!(plain["kind"], "APIGroupList");
    for path in [
        "/apis/custom.metrics.k8s.io",
        "/apis/custom.metrics.k8s.io/v1beta1",
        "/apis/custom.metrics.k8s.io/v1beta2",
        "/apis/external.metrics.k8s.io/v1beta1",
        "/openapi/v2",
        "/openapi/v3",
        "/openapi/v3/apis/external.metrics.k8s.io/v1beta1",
    ] {
        let (answer, _) = send(&api, Method::GET, path, None).await;
        assert_eq!(answer.status(), 200, "{path}");
        assert!(answer.headers().contains_key(header::ETAG), "{path}");
    }
}

#[tokio::test]
async fn probes_tell_health() {
    let api = api();
    assert_eq!(get(&api, "/livez").await.0, 200);
    assert_eq!(get(&api, "/readyz").await.0, 500);
    api.health.readiness.condition("pods").ready();
    assert_eq!(get(&api, "/readyz").await.0, 200);
    let (answer, _) = send(&api, Method::GET, "/readyz?verbose", None).await;
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "[+]pods ok\nok\n");
}
