//! Tests of discovery documents.

use super::*;
use crate::provider::{GroupResource, ResourceMetrics};
use crate::wire::CustomVersion;
use http_body_util::BodyExt as _;
use proptest::prelude::*;
use serde_json::Value;

fn catalog() -> Catalog {
    let listed = |namespaced, names: &[&str]| ResourceMetrics {
        namespaced,
        metrics: names.iter().map(|name| (*name).to_owned()).collect(),
    };
    Catalog {
        custom: [
            ("pods", listed(true, &["gpu_busy_percent", "gpu_power_watts"])),
            ("nodes", listed(false, &["gpu_health_score"])),
            ("deployments.apps", listed(true, &["gpu_busy_percent"])),
        ]
        .into_iter()
        .map(|(resource, listed)| (GroupResource::parse(resource), listed))
        .collect(),
        external: ["forewarm_queue_gpus".to_owned()].into(),
    }
}

fn read(document: &Document) -> Value {
    serde_json::from_slice(document.body()).unwrap()
}

fn pretty(document: &Document) -> String {
    serde_json::to_string_pretty(&read(document)).unwrap()
}

#[test]
fn the_aggregated_list_is_as_recorded() {
    insta::assert_snapshot!(pretty(Documents::new(&catalog()).groups(DiscoveryForm::V2)));
}

#[test]
fn the_plain_lists_are_as_recorded() {
    let documents = Documents::new(&catalog());
    let mut text = pretty(documents.groups(DiscoveryForm::Plain));
    text.push_str(&pretty(documents.group(CUSTOM_GROUP).unwrap()));
    for served in GroupVersion::ALL {
        text.push_str(&pretty(documents.resources(served).unwrap()));
    }
    insta::assert_snapshot!(text);
}

#[test]
fn v2beta1_differs_from_v2_in_its_version_only() {
    let documents = Documents::new(&catalog());
    let mut beta = read(documents.groups(DiscoveryForm::V2Beta1));
    assert_eq!(beta["apiVersion"], "apidiscovery.k8s.io/v2beta1");
    beta["apiVersion"] = "apidiscovery.k8s.io/v2".into();
    assert_eq!(beta, read(documents.groups(DiscoveryForm::V2)));
}

#[test]
fn without_a_single_metric_every_group_version_is_served_and_not_empty() {
    let documents = Documents::new(&Catalog::default());
    for served in GroupVersion::ALL {
        let list = read(documents.resources(served).unwrap());
        assert_eq!(list["resources"].as_array().unwrap().len(), 1, "{served:?}");
    }
    let v2 = read(documents.groups(DiscoveryForm::V2));
    let versions: Vec<_> = v2["items"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|group| group["versions"].as_array().unwrap())
        .collect();
    assert_eq!(versions.len(), 3);
    assert!(
        versions
            .iter()
            .all(|version| version["resources"].as_array().unwrap().len() == 1)
    );
}

#[tokio::test]
async fn a_known_etag_is_answered_with_304() {
    let documents = Documents::new(&catalog());
    let document = documents.groups(DiscoveryForm::V2);
    let first = document.answer(&HeaderMap::new());
    assert_eq!(first.status(), 200);
    assert_eq!(
        first.headers()[header::CONTENT_TYPE],
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    );
    assert_eq!(first.headers()[header::VARY], "Accept");
    let etag = first.headers()[header::ETAG].clone();
    assert!(etag.as_bytes().starts_with(b"\"") && etag.as_bytes().ends_with(b"\""));

    let mut request = HeaderMap::new();
    request.insert(header::IF_NONE_MATCH, etag.clone());
    let second = document.answer(&request);
    assert_eq!(second.status(), 304);
    assert_eq!(second.headers()[header::ETAG], etag);
    assert!(second.into_body().collect().await.unwrap().to_bytes().is_empty());

    request.insert(header::IF_NONE_MATCH, HeaderValue::from_static("\"other\""));
    assert_eq!(document.answer(&request).status(), 200);
}

#[test]
fn documents_are_rebuilt_only_for_another_catalog() {
    let one = Arc::new(catalog());
    let discovery = Discovery::new(Arc::clone(&one));
    let body = |documents: &Documents| documents.groups(DiscoveryForm::V2).body().clone();
    let first = discovery.of(Arc::clone(&one), body);
    assert_eq!(first.as_ptr(), discovery.of(one, body).as_ptr());

    let mut other = catalog();
    other.external.insert("another".to_owned());
    assert_ne!(first, discovery.of(Arc::new(other), body));
}

#[tokio::test]
async fn openapi_lists_only_its_own_documents() {
    let list = openapi::v3_list(&HeaderMap::new());
    let list = list.into_body().collect().await.unwrap().to_bytes();
    let list: Value = serde_json::from_slice(&list).unwrap();
    let keys: Vec<_> = list["paths"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(
        keys,
        [
            "apis/custom.metrics.k8s.io/v1beta1",
            "apis/custom.metrics.k8s.io/v1beta2",
            "apis/external.metrics.k8s.io/v1beta1"
        ]
    );
    for served in GroupVersion::ALL {
        assert_eq!(openapi::v3(served, &HeaderMap::new()).unwrap().status(), 200);
    }
    assert_eq!(
        openapi::v2(&HeaderMap::new()).headers()[header::CONTENT_TYPE],
        "application/json"
    );
}

fn catalogs() -> impl Strategy<Value = Catalog> {
    let names = proptest::collection::btree_set("[a-z_]{1,8}", 0..4);
    let resource = ("[a-z]{1,8}", proptest::option::of("[a-z]{1,5}\\.[a-z]{1,3}"));
    (
        proptest::collection::btree_map(resource, (any::<bool>(), names.clone()), 0..5),
        names,
    )
        .prop_map(|(custom, external)| Catalog {
            custom: custom
                .into_iter()
                .map(|((resource, group), (namespaced, metrics))| {
                    let group = group.unwrap_or_default();
                    (
                        GroupResource { group, resource },
                        ResourceMetrics { namespaced, metrics },
                    )
                })
                .collect(),
            external,
        })
}

proptest! {
    /// kube-apiserver refuses a whole group where one resource has two scopes, and old clients crash on a
    /// missing response kind.
    #[test]
    fn every_resource_has_one_scope_and_every_kind_is_filled(catalog in catalogs()) {
        let documents = Documents::new(&catalog);
        let v2 = read(documents.groups(DiscoveryForm::V2));
        for group in v2["items"].as_array().unwrap() {
            for version in group["versions"].as_array().unwrap() {
                prop_assert_eq!(&version["freshness"], "Current");
                let mut names = std::collections::BTreeSet::new();
                for resource in version["resources"].as_array().unwrap() {
                    prop_assert!(names.insert(resource["resource"].as_str().unwrap().to_owned()));
                    let subresources = resource["subresources"].as_array();
                    for entry in std::iter::once(resource).chain(subresources.into_iter().flatten()) {
                        let kind = &entry["responseKind"];
                        prop_assert_eq!(&kind["group"], &group["metadata"]["name"]);
                        prop_assert_eq!(&kind["version"], &version["version"]);
                        prop_assert!(kind["kind"].as_str().unwrap().ends_with("MetricValueList"));
                    }
                }
            }
        }
        let v1 = read(documents.resources(GroupVersion::Custom(CustomVersion::V1Beta1)).unwrap());
        let mut scopes = std::collections::BTreeMap::new();
        for entry in v1["resources"].as_array().unwrap() {
            let parent = entry["name"].as_str().unwrap().split('/').next().unwrap().to_owned();
            let scope = entry["namespaced"].as_bool().unwrap();
            prop_assert_eq!(*scopes.entry(parent).or_insert(scope), scope);
        }
    }
}
