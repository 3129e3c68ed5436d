//! Small static OpenAPI documents.
//!
//! Purpose: kube-apiserver asks for them every minute and logs an error for each failure.
//! Inputs: none.
//! Invariants: the v3 list names only the group versions that this server owns, because kube-apiserver merges
//! by key and a foreign key would hijack somebody else's document; each answer carries an ETag.

use std::sync::LazyLock;

use http::HeaderMap;
use serde_json::{Value, json};

use super::Document;
use crate::route::GroupVersion;
use crate::status::{Answer, JSON};
use crate::wire::{CUSTOM_KIND, EXTERNAL_KIND};

static V2: LazyLock<Document> = LazyLock::new(|| {
    Document::new(
        &json!({"swagger": "2.0", "info": info(), "paths": {}, "definitions": {}}),
        JSON,
    )
});

static V3: LazyLock<Vec<(GroupVersion, Document)>> = LazyLock::new(|| {
    GroupVersion::ALL
        .into_iter()
        .map(|served| (served, Document::new(&v3_value(served), JSON)))
        .collect()
});

static V3_LIST: LazyLock<Document> = LazyLock::new(|| {
    let paths: serde_json::Map<String, Value> = V3
        .iter()
        .map(|(served, document)| {
            let key = format!("apis/{}/{}", served.group(), served.version());
            let hash = document.etag.to_str().unwrap_or_default().trim_matches('"');
            let url = format!("/openapi/v3/{key}?hash={hash}");
            (key, json!({"serverRelativeURL": url}))
        })
        .collect();
    Document::new(&json!({"paths": paths}), JSON)
});

/// `/openapi/v2`.
#[must_use]
pub fn v2(request: &HeaderMap) -> Answer {
    V2.answer(request)
}

/// `/openapi/v3`.
#[must_use]
pub fn v3_list(request: &HeaderMap) -> Answer {
    V3_LIST.answer(request)
}

/// `/openapi/v3/apis/<group>/<version>`.
#[must_use]
pub fn v3(served: GroupVersion, request: &HeaderMap) -> Option<Answer> {
    V3.iter()
        .find(|(group_version, _)| *group_version == served)
        .map(|(_, document)| document.answer(request))
}

fn info() -> Value {
    json!({"title": "forewarm-adapter", "version": env!("CARGO_PKG_VERSION")})
}

fn v3_value(served: GroupVersion) -> Value {
    let prefix = format!("/apis/{}/{}", served.group(), served.version());
    let (kind, paths) = match served {
        GroupVersion::Custom(_) => (
            CUSTOM_KIND,
            vec![
                "/namespaces/{namespace}/{resource}/{name}/{metric}",
                "/namespaces/{namespace}/metrics/{metric}",
                "/{resource}/{name}/{metric}",
            ],
        ),
        GroupVersion::ExternalV1Beta1 => (EXTERNAL_KIND, vec!["/namespaces/{namespace}/{metric}"]),
    };
    let schema = schema_name(served, kind);
    let paths: serde_json::Map<String, Value> = paths
        .into_iter()
        .map(|path| (format!("{prefix}{path}"), operation(served, path, kind, &schema)))
        .collect();
    json!({
        "openapi": "3.0.0",
        "info": info(),
        "paths": paths,
        "components": {"schemas": {schema: {
            "type": "object",
            "required": ["items"],
            "properties": {
                "apiVersion": {"type": "string"},
                "kind": {"type": "string"},
                "metadata": {"type": "object"},
                "items": {"type": "array", "items": {"type": "object"}},
            },
            "x-kubernetes-group-version-kind": [
                {"group": served.group(), "version": served.version(), "kind": kind},
            ],
        }}},
    })
}

fn schema_name(served: GroupVersion, kind: &str) -> String {
    let group = match served {
        GroupVersion::Custom(_) => "custom_metrics",
        GroupVersion::ExternalV1Beta1 => "external_metrics",
    };
    format!("io.k8s.metrics.pkg.apis.{group}.{}.{kind}", served.version())
}

fn operation(served: GroupVersion, path: &str, kind: &str, schema: &str) -> Value {
    let parameter = |name: &str, place: &str, required: bool| json!({"name": name, "in": place, "required": required, "schema": {"type": "string"}});
    let mut parameters: Vec<Value> = path
        .split(['{', '}'])
        .skip(1)
        .step_by(2)
        .map(|name| parameter(name, "path", true))
        .collect();
    parameters.push(parameter("labelSelector", "query", false));
    if matches!(served, GroupVersion::Custom(_)) {
        parameters.push(parameter("metricLabelSelector", "query", false));
    }
    let reference = format!("#/components/schemas/{schema}");
    json!({"get": {
        "description": format!("values of a metric, as {kind}"),
        "parameters": parameters,
        "responses": {"200": {
            "description": "OK",
            "content": {"application/json": {"schema": {"$ref": reference}}},
        }},
        "x-kubernetes-action": "get",
        "x-kubernetes-group-version-kind": {"group": served.group(), "version": served.version(), "kind": kind},
    }})
}
