//! Discovery and OpenAPI documents, built once per catalog and served as bytes.
//!
//! Purpose: tells kube-apiserver and direct clients which groups, versions and metrics there are.
//! Inputs: the provider's catalog.
//! Invariants: every group version is served at all times and is never empty, whatever the catalog holds,
//! because one missing version makes the whole APIService unavailable and an empty one makes every kubectl
//! print a warning; each `responseKind` is filled; a resource has one scope; serving a document takes
//! constant time and touches neither backends nor the API server.

mod documents;
pub mod openapi;

use std::sync::Arc;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body_util::Full;

use crate::provider::Catalog;
use crate::route::GroupVersion;
use crate::status::{Answer, JSON, json};
use crate::wire::accept::DiscoveryForm;
use crate::wire::{CUSTOM_GROUP, EXTERNAL_GROUP};

const AGGREGATED_V2: HeaderValue =
    HeaderValue::from_static("application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList");
const AGGREGATED_V2BETA1: HeaderValue =
    HeaderValue::from_static("application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList");

/// Bytes of one document with what identifies them.
#[derive(Debug, Clone)]
pub struct Document {
    body: Bytes,
    etag: HeaderValue,
    content_type: HeaderValue,
}

/// All documents that follow from one catalog.
#[derive(Debug)]
pub struct Documents {
    plain: Document,
    v2: Document,
    v2beta1: Document,
    custom_group: Document,
    external_group: Document,
    resources: Vec<(GroupVersion, Document)>,
}

/// The documents of the current catalog.
#[derive(Debug)]
pub struct Discovery {
    current: ArcSwap<(Arc<Catalog>, Documents)>,
}

// === impl Document ===

impl Document {
    /// Wraps a value as a document.
    #[must_use]
    pub fn new(value: &serde_json::Value, content_type: HeaderValue) -> Self {
        let body: Bytes = serde_json::to_vec(value).unwrap_or_default().into();
        let digest = ring::digest::digest(&ring::digest::SHA256, &body);
        let mut etag = String::with_capacity(2 + 2 * digest.as_ref().len());
        etag.push('"');
        for byte in digest.as_ref() {
            etag.push_str(&format!("{byte:02X}"));
        }
        etag.push('"');
        Self {
            body,
            // Quotes and hex digits are always a valid header value.
            etag: HeaderValue::from_str(&etag).unwrap_or(HeaderValue::from_static("\"\"")),
            content_type,
        }
    }

    /// 200 with the document, or 304 where the client has it.
    #[must_use]
    pub fn answer(&self, request: &HeaderMap) -> Answer {
        let known = request.get_all(header::IF_NONE_MATCH).iter().any(|value| {
            value.to_str().is_ok_and(|value| {
                value.split(',').map(str::trim).any(|tag| {
                    let tag = tag.strip_prefix("W/").unwrap_or(tag);
                    tag == "*" || tag.as_bytes() == self.etag.as_bytes()
                })
            })
        });
        let mut answer = if known {
            let mut answer = Answer::new(Full::new(Bytes::new()));
            *answer.status_mut() = StatusCode::NOT_MODIFIED;
            answer
        } else {
            let mut answer = json(StatusCode::OK, self.body.clone());
            answer
                .headers_mut()
                .insert(header::CONTENT_TYPE, self.content_type.clone());
            answer
        };
        answer.headers_mut().insert(header::ETAG, self.etag.clone());
        answer
            .headers_mut()
            .insert(header::VARY, HeaderValue::from_static("Accept"));
        answer
    }

    /// The bytes.
    #[must_use]
    pub fn body(&self) -> &Bytes {
        &self.body
    }
}

// === impl Documents ===

impl Documents {
    /// Builds all documents.
    #[must_use]
    pub fn new(catalog: &Catalog) -> Self {
        let of = |value: serde_json::Value| Document::new(&value, JSON);
        Self {
            plain: of(documents::groups()),
            v2: Document::new(&documents::aggregated(catalog, "v2"), AGGREGATED_V2),
            v2beta1: Document::new(&documents::aggregated(catalog, "v2beta1"), AGGREGATED_V2BETA1),
            custom_group: of(documents::group(CUSTOM_GROUP)),
            external_group: of(documents::group(EXTERNAL_GROUP)),
            resources: GroupVersion::ALL
                .into_iter()
                .map(|served| (served, of(documents::resources(catalog, served))))
                .collect(),
        }
    }

    /// `/apis` in one of its forms.
    #[must_use]
    pub fn groups(&self, form: DiscoveryForm) -> &Document {
        match form {
            DiscoveryForm::Plain => &self.plain,
            DiscoveryForm::V2 => &self.v2,
            DiscoveryForm::V2Beta1 => &self.v2beta1,
        }
    }

    /// `/apis/<group>`.
    #[must_use]
    pub fn group(&self, group: &str) -> Option<&Document> {
        match group {
            CUSTOM_GROUP => Some(&self.custom_group),
            EXTERNAL_GROUP => Some(&self.external_group),
            _ => None,
        }
    }

    /// `/apis/<group>/<version>`.
    #[must_use]
    pub fn resources(&self, served: GroupVersion) -> Option<&Document> {
        self.resources
            .iter()
            .find(|(group_version, _)| *group_version == served)
            .map(|(_, document)| document)
    }
}

// === impl Discovery ===

impl Discovery {
    /// Documents of a first catalog.
    #[must_use]
    pub fn new(catalog: Arc<Catalog>) -> Self {
        let documents = Documents::new(&catalog);
        Self {
            current: ArcSwap::from_pointee((catalog, documents)),
        }
    }

    /// The documents of `catalog`, rebuilt only when it is another one than last time.
    pub fn of<T>(&self, catalog: Arc<Catalog>, read: impl FnOnce(&Documents) -> T) -> T {
        let current = self.current.load();
        if Arc::ptr_eq(&current.0, &catalog) {
            return read(&current.1);
        }
        let documents = Documents::new(&catalog);
        let result = read(&documents);
        self.current.store(Arc::new((catalog, documents)));
        result
    }
}

#[cfg(test)]
mod tests;
