//! What a request is about, in the words of an access review.
//!
//! Purpose: derives verb, resource, name and subresource exactly as a generic API server does, so that RBAC
//! rules written for any metrics adapter mean the same here.
//! Inputs: the decoded path and query.
//! Invariants: pure; looks at the same segments as the router. External metrics are a `list` of the resource
//! `<metric>`, although discovery advertises `get`.

use crate::route::{Path, Query};

/// The attributes of one request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Attributes {
    /// A path outside any group version: discovery, OpenAPI.
    NonResource {
        /// The path.
        path: String,
        /// Always `get`.
        verb: &'static str,
    },
    /// Something inside a group version.
    Resource {
        /// `get`, or `list` where no name is given.
        verb: &'static str,
        /// API group.
        group: String,
        /// API version.
        version: String,
        /// Namespace, empty at the root.
        namespace: String,
        /// Resource.
        resource: String,
        /// Object name, `*` for the wildcard, empty for a list.
        name: String,
        /// Metric of a custom-metrics request.
        subresource: String,
    },
}

impl Attributes {
    /// The attributes of a GET.
    #[must_use]
    pub fn of(path: &Path, query: &Query) -> Self {
        let segments = path.segments();
        let [apis, group, version, rest @ ..] = segments else {
            return Self::non_resource(segments);
        };
        if apis != "apis" || rest.is_empty() {
            return Self::non_resource(segments);
        }
        let (namespace, parts) = match rest {
            [namespaces, namespace, parts @ ..] if namespaces == "namespaces" && !parts.is_empty() => {
                // `status` and `finalize` are subresources of the namespace itself.
                if matches!(parts[0].as_str(), "status" | "finalize") {
                    (namespace.clone(), rest)
                } else {
                    (namespace.clone(), parts)
                }
            }
            [namespaces, namespace] if namespaces == "namespaces" => (namespace.clone(), rest),
            _ => (String::new(), rest),
        };
        let part = |index: usize| parts.get(index).cloned().unwrap_or_default();
        let name = part(1);
        Self::Resource {
            verb: match (name.is_empty(), query.watch) {
                (false, _) => "get",
                (true, false) => "list",
                (true, true) => "watch",
            },
            group: group.clone(),
            version: version.clone(),
            namespace,
            resource: part(0),
            name,
            subresource: part(2),
        }
    }

    fn non_resource(segments: &[String]) -> Self {
        Self::NonResource {
            path: format!("/{}", segments.join("/")),
            verb: "get",
        }
    }

    /// For a message: `get pods/gpu_busy_percent in namespace serving`.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::NonResource { path, verb } => format!("{verb} path \"{path}\""),
            Self::Resource {
                verb,
                group,
                namespace,
                resource,
                name,
                subresource,
                ..
            } => {
                let mut text = format!("{verb} resource \"{resource}");
                if !subresource.is_empty() {
                    text.push('/');
                    text.push_str(subresource);
                }
                text.push_str(&format!("\" in API group \"{group}\""));
                if !name.is_empty() {
                    text.push_str(&format!(" named \"{name}\""));
                }
                if !namespace.is_empty() {
                    text.push_str(&format!(" in the namespace \"{namespace}\""));
                }
                text
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(path: &str) -> Attributes {
        Attributes::of(&Path::parse(path).unwrap(), &Query::default())
    }

    fn resource(
        verb: &'static str,
        group: &str,
        version: &str,
        namespace: &str,
        (resource, name, subresource): (&str, &str, &str),
    ) -> Attributes {
        Attributes::Resource {
            verb,
            group: group.into(),
            version: version.into(),
            namespace: namespace.into(),
            resource: resource.into(),
            name: name.into(),
            subresource: subresource.into(),
        }
    }

    #[test]
    fn pods_are_a_get_of_the_metric_as_subresource() {
        const GROUP: &str = "custom.metrics.k8s.io";
        for path in ["*", "%2A"] {
            assert_eq!(
                of(&format!("/apis/{GROUP}/v1beta2/namespaces/ns/pods/{path}/m")),
                resource("get", GROUP, "v1beta2", "ns", ("pods", "*", "m"))
            );
        }
        assert_eq!(
            of("/apis/custom.metrics.k8s.io/v1beta1/namespaces/ns/deployments.apps/web/m"),
            resource("get", GROUP, "v1beta1", "ns", ("deployments.apps", "web", "m"))
        );
        assert_eq!(
            of("/apis/custom.metrics.k8s.io/v1beta1/nodes/n1/m"),
            resource("get", GROUP, "v1beta1", "", ("nodes", "n1", "m"))
        );
        assert_eq!(
            of("/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/metrics/m"),
            resource("get", GROUP, "v1beta2", "ns", ("metrics", "m", ""))
        );
    }

    #[test]
    fn external_metrics_are_a_list() {
        assert_eq!(
            of("/apis/external.metrics.k8s.io/v1beta1/namespaces/ns/queue"),
            resource(
                "list",
                "external.metrics.k8s.io",
                "v1beta1",
                "ns",
                ("queue", "", "")
            )
        );
    }

    #[test]
    fn documents_are_paths() {
        for path in [
            "/apis",
            "/apis/custom.metrics.k8s.io",
            "/apis/custom.metrics.k8s.io/v1beta1",
            "/openapi/v2",
            "/openapi/v3/apis/custom.metrics.k8s.io/v1beta1",
        ] {
            assert_eq!(
                of(path),
                Attributes::NonResource {
                    path: path.into(),
                    verb: "get"
                }
            );
        }
    }

    #[test]
    fn a_namespace_by_itself_is_a_get_of_that_namespace() {
        assert_eq!(
            of("/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns"),
            resource(
                "get",
                "custom.metrics.k8s.io",
                "v1beta2",
                "ns",
                ("namespaces", "ns", "")
            )
        );
    }
}
