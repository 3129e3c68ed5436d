//! The JSON of discovery documents.
//!
//! Purpose: `APIGroupList`, `APIGroup`, `APIResourceList` and the aggregated `APIGroupDiscoveryList`.
//! Inputs: the catalog.
//! Invariants: pure; the aggregated list and the resource lists say the same; a group without metrics still
//! lists a placeholder.

use serde_json::{Value, json};

use crate::provider::Catalog;
use crate::route::GroupVersion;
use crate::wire::{CUSTOM_GROUP, CUSTOM_KIND, EXTERNAL_GROUP, EXTERNAL_KIND};

/// Stands for the path `namespaces/<ns>/metrics/<metric>`, so that the custom group is never empty.
const CUSTOM_PLACEHOLDER: &str = "metrics";
/// Keeps the external group from being empty; the name that other adapters use for the same purpose.
const EXTERNAL_PLACEHOLDER: &str = "externalmetrics";

fn versions(group: &str) -> impl Iterator<Item = GroupVersion> {
    GroupVersion::ALL
        .into_iter()
        .filter(move |served| served.group() == group)
}

fn group_value(group: &str) -> Value {
    let versions: Vec<Value> = versions(group)
        .map(|served| {
            json!({
                "groupVersion": format!("{group}/{}", served.version()),
                "version": served.version(),
            })
        })
        .collect();
    json!({"name": group, "preferredVersion": versions.first(), "versions": versions})
}

/// `APIGroup`.
pub(super) fn group(group: &str) -> Value {
    let mut value = group_value(group);
    value["kind"] = "APIGroup".into();
    value["apiVersion"] = "v1".into();
    value
}

/// `APIGroupList`.
pub(super) fn groups() -> Value {
    json!({
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [group_value(CUSTOM_GROUP), group_value(EXTERNAL_GROUP)],
    })
}

/// `APIResourceList` of one group version.
pub(super) fn resources(catalog: &Catalog, served: GroupVersion) -> Value {
    let entry = |name: &str, namespaced: bool, kind: &str| {
        json!({
            "name": name, "singularName": "", "namespaced": namespaced, "kind": kind, "verbs": ["get"],
        })
    };
    let entries: Vec<Value> = match served {
        GroupVersion::Custom(_) => custom_placeholder(catalog)
            .map(|name| entry(name, true, CUSTOM_KIND))
            .chain(catalog.custom.iter().flat_map(|(resource, listed)| {
                listed
                    .metrics
                    .iter()
                    .map(move |metric| entry(&format!("{resource}/{metric}"), listed.namespaced, CUSTOM_KIND))
            }))
            .collect(),
        GroupVersion::ExternalV1Beta1 => external_names(catalog)
            .map(|name| entry(name, true, EXTERNAL_KIND))
            .collect(),
    };
    json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": format!("{}/{}", served.group(), served.version()),
        "resources": entries,
    })
}

/// The placeholder, unless a resource of that name is listed by itself.
fn custom_placeholder(catalog: &Catalog) -> impl Iterator<Item = &'static str> {
    let listed = catalog
        .custom
        .keys()
        .any(|resource| resource.group.is_empty() && resource.resource == CUSTOM_PLACEHOLDER);
    (!listed).then_some(CUSTOM_PLACEHOLDER).into_iter()
}

fn external_names(catalog: &Catalog) -> impl Iterator<Item = &str> {
    let placeholder = catalog.external.is_empty().then_some(EXTERNAL_PLACEHOLDER);
    placeholder
        .into_iter()
        .chain(catalog.external.iter().map(String::as_str))
}

/// `APIGroupDiscoveryList` of `apidiscovery.k8s.io/<version>`.
pub(super) fn aggregated(catalog: &Catalog, version: &str) -> Value {
    let group = |group: &'static str| {
        let versions: Vec<Value> = versions(group)
            .map(|served| {
                json!({
                    "version": served.version(),
                    "freshness": "Current",
                    "resources": aggregated_resources(catalog, served),
                })
            })
            .collect();
        json!({"metadata": {"name": group, "creationTimestamp": null}, "versions": versions})
    };
    json!({
        "kind": "APIGroupDiscoveryList",
        "apiVersion": format!("apidiscovery.k8s.io/{version}"),
        "metadata": {},
        "items": [group(CUSTOM_GROUP), group(EXTERNAL_GROUP)],
    })
}

fn aggregated_resources(catalog: &Catalog, served: GroupVersion) -> Vec<Value> {
    let response_kind =
        |kind: &str| json!({"group": served.group(), "version": served.version(), "kind": kind});
    let leaf = |name: &str, kind: &str| {
        json!({
            "resource": name,
            "responseKind": response_kind(kind),
            "scope": "Namespaced",
            "singularResource": "",
            "verbs": ["get"],
        })
    };
    match served {
        GroupVersion::Custom(_) => custom_placeholder(catalog)
            .map(|name| leaf(name, CUSTOM_KIND))
            .chain(catalog.custom.iter().map(|(resource, listed)| {
                let subresources: Vec<Value> = listed
                    .metrics
                    .iter()
                    .map(|metric| {
                        json!({
                            "subresource": metric,
                            "responseKind": response_kind(CUSTOM_KIND),
                            "verbs": ["get"],
                        })
                    })
                    .collect();
                json!({
                    "resource": resource.to_string(),
                    "responseKind": response_kind(CUSTOM_KIND),
                    "scope": if listed.namespaced { "Namespaced" } else { "Cluster" },
                    // A singular such as `pod` would compete with the real one in kubectl.
                    "singularResource": "",
                    // Nothing can be done with the parent itself: no verbs, so that no client tries.
                    "verbs": [],
                    "subresources": subresources,
                })
            }))
            .collect(),
        GroupVersion::ExternalV1Beta1 => external_names(catalog)
            .map(|name| leaf(name, EXTERNAL_KIND))
            .collect(),
    }
}
