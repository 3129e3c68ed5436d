//! Tests of path and query reading.

use super::*;
use proptest::prelude::*;

const CUSTOM: &str = "/apis/custom.metrics.k8s.io/v1beta2";
const EXTERNAL: &str = "/apis/external.metrics.k8s.io/v1beta1";

fn route(path: &str) -> Route {
    Path::parse(path).unwrap().route()
}

fn custom_target(path: &str) -> Option<(Target, String)> {
    match route(&format!("{CUSTOM}{path}")) {
        Route::Custom { target, metric, .. } => Some((target, metric)),
        _ => None,
    }
}

#[test]
fn a_star_is_a_wildcard_however_it_is_escaped() {
    for star in ["*", "%2A", "%2a"] {
        assert_eq!(
            custom_target(&format!("/namespaces/ns/pods/{star}/gpu_busy_percent")),
            Some((
                Target::Pods {
                    namespace: "ns".into(),
                    name: None
                },
                "gpu_busy_percent".into()
            ))
        );
    }
}

#[test]
fn every_shape_is_told_apart() {
    let object = |namespace: Option<&str>, resource: &str, name: Option<&str>| Target::Object {
        namespace: namespace.map(str::to_owned),
        resource: GroupResource::parse(resource),
        name: name.map(str::to_owned),
    };
    let pod = |name: Option<&str>| Target::Pods {
        namespace: "ns".into(),
        name: name.map(str::to_owned),
    };
    for (path, expected) in [
        ("/namespaces/ns/pods/p/m", pod(Some("p"))),
        ("/namespaces/ns/pod/*/m", pod(None)),
        ("/namespaces/ns/metrics/m", Target::Namespace("ns".into())),
        (
            "/namespaces/ns/deployments.apps/d/m",
            object(Some("ns"), "deployments.apps", Some("d")),
        ),
        (
            "/namespaces/ns/ingresses.networking.k8s.io/*/m",
            object(Some("ns"), "ingresses.networking.k8s.io", None),
        ),
        ("/namespaces/ns/nodes/n/m", object(Some("ns"), "nodes", Some("n"))),
        ("/nodes/n/m", object(None, "nodes", Some("n"))),
        ("/nodes/*/m", object(None, "nodes", None)),
    ] {
        assert_eq!(custom_target(path), Some((expected, "m".into())), "{path}");
    }
    assert_eq!(
        route(&format!("{EXTERNAL}/namespaces/ns/queue:depth")),
        Route::External {
            namespace: "ns".into(),
            metric: "queue:depth".into()
        }
    );
}

#[test]
fn what_is_no_shape_is_unknown() {
    for path in [
        "/",
        "/api",
        "/apis/apps",
        "/apis/apps/v1",
        "/apis/custom.metrics.k8s.io/v1",
        "/apis/custom.metrics.k8s.io/v1beta2/blah",
        "/apis/custom.metrics.k8s.io/v1beta2/nodes/foo",
        "/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns",
        "/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/m",
        "/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/pods/bar",
        "/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/pods/bar/m/",
        "/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/pods/bar/with/slashes",
        "/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/pods/bar/with%2Fslash",
        "/apis/custom.metrics.k8s.io/v1beta2/namespaces//pods/bar/m",
        "/apis/external.metrics.k8s.io/v1beta1/m",
        "/apis/external.metrics.k8s.io/v1beta1/namespaces/ns",
        "/apis/external.metrics.k8s.io/v1beta1/namespaces/ns/m/x",
        "/apis/external.metrics.k8s.io/v1beta2",
        "/openapi/v3/apis/apps/v1",
    ] {
        assert_eq!(route(path), Route::Unknown, "{path}");
    }
}

#[test]
fn documents_and_probes() {
    assert_eq!(route("/apis"), Route::Groups);
    assert_eq!(route("/apis/"), Route::Groups);
    assert_eq!(route("/apis/custom.metrics.k8s.io"), Route::Group(CUSTOM_GROUP));
    for served in GroupVersion::ALL {
        let path = format!("/apis/{}/{}", served.group(), served.version());
        assert_eq!(route(&path), Route::Resources(served));
        assert_eq!(route(&format!("{path}/")), Route::Resources(served));
        assert_eq!(
            route(&format!("/openapi/v3{path}")),
            Route::OpenApiV3Document(served)
        );
    }
    assert_eq!(route("/openapi/v2"), Route::OpenApiV2);
    assert_eq!(route("/openapi/v3"), Route::OpenApiV3);
    assert_eq!(route("/livez"), Route::Probe(Probe::Live));
    assert_eq!(route("/healthz/ping"), Route::Probe(Probe::Live));
    assert_eq!(route("/readyz"), Route::Probe(Probe::Ready));
}

#[test]
fn selectors_are_decoded_and_the_rest_is_ignored() {
    let query = Query::parse(Some(
        "labelSelector=app%3Dllm%2Ctier+in+%28a%2Cb%29&limit=500&metricLabelSelector=x%21%3Dy&pretty&resourceVersion=0&selector=zzz&labelSelector=second",
    ))
    .unwrap();
    assert_eq!(query.label_selector, "app=llm,tier in (a,b)");
    assert_eq!(query.metric_label_selector, "x!=y");
    assert!(!query.verbose && !query.watch);
    assert_eq!(Query::parse(None), Ok(Query::default()));
    assert!(Query::parse(Some("verbose")).unwrap().verbose);
    assert_eq!(
        Query::parse(Some("labelSelector=%zz")),
        Err("labelSelector".to_owned())
    );
}

#[test]
fn a_broken_escape_is_refused() {
    for path in ["/apis/%", "/apis/%2", "/apis/%zz", "/apis/%ff"] {
        assert_eq!(Path::parse(path), Err(BadPath), "{path}");
    }
}

proptest! {
    #[test]
    fn no_path_panics(path in "(/[ -~]{0,12}){0,8}", query in "[ -~]{0,60}") {
        if let Ok(path) = Path::parse(&path) {
            let _route = path.route();
        }
        let _query = Query::parse(Some(&query));
    }

    #[test]
    fn an_escaped_segment_reads_back(namespace in "[a-z0-9-]{1,20}", pod in "[ -.0-~]{1,20}", metric in "[a-zA-Z_:]{1,20}") {
        prop_assume!(pod != "*");
        let escaped: String = pod.bytes().map(|byte| format!("%{byte:02X}")).collect();
        prop_assert_eq!(
            custom_target(&format!("/namespaces/{namespace}/pods/{escaped}/{metric}")),
            Some((Target::Pods { namespace, name: Some(pod) }, metric))
        );
    }
}
