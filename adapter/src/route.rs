//! From a URL to what is asked, without touching anything.
//!
//! Purpose: decodes and classifies paths and queries of the metrics APIs.
//! Inputs: the raw path and query of a request.
//! Invariants: pure; segments are split before they are decoded, so an encoded slash never becomes a
//! separator and authorisation and routing always see the same segments; unknown query parameters are
//! ignored.

use crate::provider::GroupResource;
use crate::wire::{CUSTOM_GROUP, CustomVersion, EXTERNAL_GROUP, EXTERNAL_VERSION};

/// The decoded path of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    segments: Vec<String>,
    trailing_slash: bool,
}

/// What a path asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// `/livez`, `/readyz`, `/healthz`, without or with the name of one check.
    Probe(Probe),
    /// `/apis`: the groups, in the form that the client prefers.
    Groups,
    /// `/apis/<group>`.
    Group(&'static str),
    /// `/apis/<group>/<version>`: its resources.
    Resources(GroupVersion),
    /// `/openapi/v2`.
    OpenApiV2,
    /// `/openapi/v3`: the list of documents.
    OpenApiV3,
    /// `/openapi/v3/apis/<group>/<version>`.
    OpenApiV3Document(GroupVersion),
    /// Values of a custom metric.
    Custom {
        /// Version of the answer.
        version: CustomVersion,
        /// What is described.
        target: Target,
        /// Metric name.
        metric: String,
    },
    /// Values of an external metric.
    External {
        /// Namespace of the HPA that asks.
        namespace: String,
        /// Metric name.
        metric: String,
    },
    /// No such path.
    Unknown,
}

/// Health checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probe {
    /// The process ticks.
    Live,
    /// Requests may be sent here.
    Ready,
}

/// The group versions that are always served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupVersion {
    /// `custom.metrics.k8s.io/…`.
    Custom(CustomVersion),
    /// `external.metrics.k8s.io/v1beta1`.
    ExternalV1Beta1,
}

/// What a custom metric describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// One or all pods of a namespace.
    Pods {
        /// Namespace.
        namespace: String,
        /// One pod, or `None` for the wildcard.
        name: Option<String>,
    },
    /// A namespace itself.
    Namespace(String),
    /// Any other object.
    Object {
        /// Namespace in the path.
        namespace: Option<String>,
        /// Kind of object.
        resource: GroupResource,
        /// One object, or `None` for the wildcard.
        name: Option<String>,
    },
}

/// The query parameters that this server reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query {
    /// `labelSelector`, over labels of the described objects or of an external metric.
    pub label_selector: String,
    /// `metricLabelSelector`, over labels of the metric.
    pub metric_label_selector: String,
    /// `verbose` of a probe.
    pub verbose: bool,
    /// `watch`, which turns a list into another verb for authorisation.
    pub watch: bool,
}

// === impl GroupVersion ===

impl GroupVersion {
    /// All, the preferred of each group first.
    pub const ALL: [Self; 3] = [
        Self::Custom(CustomVersion::V1Beta2),
        Self::Custom(CustomVersion::V1Beta1),
        Self::ExternalV1Beta1,
    ];

    /// Group name.
    #[must_use]
    pub const fn group(self) -> &'static str {
        match self {
            Self::Custom(_) => CUSTOM_GROUP,
            Self::ExternalV1Beta1 => EXTERNAL_GROUP,
        }
    }

    /// Version name.
    #[must_use]
    pub const fn version(self) -> &'static str {
        match self {
            Self::Custom(version) => version.as_str(),
            Self::ExternalV1Beta1 => EXTERNAL_VERSION,
        }
    }

    /// Finds a served group version.
    #[must_use]
    pub fn find(group: &str, version: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|served| served.group() == group && served.version() == version)
    }
}

// === impl Path ===

/// A path that holds no valid UTF-8 or a broken escape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the path holds a broken percent-escape or no UTF-8")]
pub struct BadPath;

impl Path {
    /// Splits and decodes.
    ///
    /// # Errors
    /// [`BadPath`] for a broken escape.
    pub fn parse(raw: &str) -> Result<Self, BadPath> {
        let inner = raw.strip_prefix('/').unwrap_or(raw);
        let (inner, trailing_slash) = match inner.strip_suffix('/') {
            Some(inner) => (inner, true),
            None => (inner, false),
        };
        let segments = if inner.is_empty() {
            Vec::new()
        } else {
            inner
                .split('/')
                .map(|segment| decode(segment, false))
                .collect::<Option<_>>()
                .ok_or(BadPath)?
        };
        Ok(Self {
            segments,
            trailing_slash,
        })
    }

    /// The decoded segments.
    #[must_use]
    pub fn segments(&self) -> &[String] {
        &self.segments
    }

    /// What the path asks for.
    #[must_use]
    pub fn route(&self) -> Route {
        // An empty or slash-bearing segment can name nothing.
        if self.segments.iter().any(|s| s.is_empty() || s.contains('/')) {
            return Route::Unknown;
        }
        let segments: Vec<&str> = self.segments.iter().map(String::as_str).collect();
        match segments.as_slice() {
            ["livez" | "healthz", ..] => Route::Probe(Probe::Live),
            ["readyz", ..] => Route::Probe(Probe::Ready),
            ["apis"] => Route::Groups,
            ["apis", group] => [CUSTOM_GROUP, EXTERNAL_GROUP]
                .into_iter()
                .find(|served| served == group)
                .map_or(Route::Unknown, Route::Group),
            ["apis", group, version, rest @ ..] => {
                GroupVersion::find(group, version).map_or(Route::Unknown, |served| self.below(served, rest))
            }
            ["openapi", "v2"] => Route::OpenApiV2,
            ["openapi", "v3"] => Route::OpenApiV3,
            ["openapi", "v3", "apis", group, version] => {
                GroupVersion::find(group, version).map_or(Route::Unknown, Route::OpenApiV3Document)
            }
            _ => Route::Unknown,
        }
    }

    fn below(&self, served: GroupVersion, rest: &[&str]) -> Route {
        if rest.is_empty() {
            return Route::Resources(served);
        }
        if self.trailing_slash {
            return Route::Unknown;
        }
        match (served, rest) {
            (GroupVersion::ExternalV1Beta1, ["namespaces", namespace, metric]) => Route::External {
                namespace: (*namespace).to_owned(),
                metric: (*metric).to_owned(),
            },
            (GroupVersion::Custom(version), rest) => custom(version, rest),
            (GroupVersion::ExternalV1Beta1, _) => Route::Unknown,
        }
    }
}

fn custom(version: CustomVersion, rest: &[&str]) -> Route {
    let (target, metric) = match *rest {
        ["namespaces", namespace, "metrics", metric] => (Target::Namespace(namespace.to_owned()), metric),
        ["namespaces", namespace, "pods" | "pod", name, metric] => (
            Target::Pods {
                namespace: namespace.to_owned(),
                name: wildcard(name),
            },
            metric,
        ),
        ["namespaces", namespace, resource, name, metric] => (
            Target::Object {
                namespace: Some(namespace.to_owned()),
                resource: GroupResource::parse(resource),
                name: wildcard(name),
            },
            metric,
        ),
        // `namespaces/<name>/<metric>` would be a resource of its own in authorisation; the API spells it
        // `namespaces/<name>/metrics/<metric>`.
        ["namespaces", ..] => return Route::Unknown,
        [resource, name, metric] => (
            Target::Object {
                namespace: None,
                resource: GroupResource::parse(resource),
                name: wildcard(name),
            },
            metric,
        ),
        _ => return Route::Unknown,
    };
    Route::Custom {
        version,
        target,
        metric: metric.to_owned(),
    }
}

fn wildcard(name: &str) -> Option<String> {
    (name != "*").then(|| name.to_owned())
}

// === impl Query ===

impl Query {
    /// Reads the parameters that matter; of a repeated one the first counts, as in Go.
    ///
    /// # Errors
    /// The name of a parameter whose value cannot be decoded.
    pub fn parse(raw: Option<&str>) -> Result<Self, String> {
        let mut query = Self::default();
        let mut seen = [false; 2];
        for pair in raw.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let Some(key) = decode(key, true) else { continue };
            let slot = match key.as_str() {
                "labelSelector" => (&mut query.label_selector, 0),
                "metricLabelSelector" => (&mut query.metric_label_selector, 1),
                "verbose" => {
                    query.verbose = true;
                    continue;
                }
                "watch" => {
                    query.watch = !matches!(value, "false" | "0");
                    continue;
                }
                _ => continue,
            };
            let (field, index) = slot;
            if !std::mem::replace(&mut seen[index], true) {
                *field = decode(value, true).ok_or(key)?;
            }
        }
        Ok(query)
    }
}

/// Percent-decoding; `+` is a space in queries only.
fn decode(text: &str, plus_is_space: bool) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let high = char::from(rest.next()?).to_digit(16)?;
                let low = char::from(rest.next()?).to_digit(16)?;
                u8::try_from(high * 16 + low).ok()?
            }
            b'+' if plus_is_space => b' ',
            other => other,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests;
