//! The three APIServices, as far as certificates are concerned.
//!
//! Purpose: finds which APIServices point to our Service and gives them our CAs.
//! Inputs: the APIServices by name.
//! Invariants: one that is absent or points elsewhere is left alone and reported; a patch carries the version
//! that was judged, so it cannot hit an APIService that was taken over in between.

use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use super::Error;
use crate::route::GroupVersion;

/// What an APIService has to do with us.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Standing {
    /// It points to us and trusts our CAs.
    Trusting,
    /// It points to us and trusts something else.
    Outdated {
        /// Version that was read.
        version: Option<String>,
    },
    /// It points to another Service, named here.
    Foreign(String),
    /// It does not exist.
    Absent,
}

/// Names of the APIServices of all served group versions.
pub(super) fn names() -> impl Iterator<Item = String> {
    GroupVersion::ALL
        .into_iter()
        .map(|served| format!("{}.{}", served.version(), served.group()))
}

/// Judges one APIService.
pub(super) fn standing(found: Option<&APIService>, namespace: &str, service: &str, ca: &str) -> Standing {
    let Some(found) = found else {
        return Standing::Absent;
    };
    let Some(spec) = &found.spec else {
        return Standing::Absent;
    };
    let reference = spec.service.clone().unwrap_or_default();
    let (at, name) = (
        reference.namespace.unwrap_or_default(),
        reference.name.unwrap_or_default(),
    );
    if at != namespace || name != service {
        return Standing::Foreign(format!("{at}/{name}"));
    }
    let trusting = spec
        .ca_bundle
        .as_ref()
        .is_some_and(|bundle| bundle.0 == ca.as_bytes())
        && spec.insecure_skip_tls_verify != Some(true);
    if trusting {
        Standing::Trusting
    } else {
        Standing::Outdated {
            version: found.metadata.resource_version.clone(),
        }
    }
}

/// Reads one APIService and judges it.
pub(super) async fn read(
    api: &Api<APIService>,
    name: &str,
    namespace: &str,
    service: &str,
    ca: &str,
) -> Result<Standing, Error> {
    let found = api.get_opt(name).await.map_err(|source| Error::Api {
        action: format!("get apiservice {name}"),
        source: Box::new(source),
    })?;
    Ok(standing(found.as_ref(), namespace, service, ca))
}

/// Gives an outdated APIService our CAs. Returns whether it took them; a conflict means that it changed.
pub(super) async fn trust(
    api: &Api<APIService>,
    name: &str,
    version: Option<&str>,
    ca: &str,
) -> Result<bool, Error> {
    let patch = json!({
        "metadata": {"resourceVersion": version},
        "spec": {
            "caBundle": k8s_openapi::ByteString(ca.as_bytes().to_vec()),
            // Both together are refused by the API server; verified TLS replaces whatever was there.
            "insecureSkipTLSVerify": null,
        },
    });
    let params = PatchParams {
        field_manager: Some("forewarm-adapter".to_owned()),
        ..PatchParams::default()
    };
    match api.patch(name, &params, &Patch::Merge(&patch)).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(false),
        Err(source) => Err(Error::Api {
            action: format!("patch apiservice {name}"),
            source: Box::new(source),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(spec: &serde_json::Value) -> APIService {
        serde_json::from_value(json!({
            "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
            "metadata": {"name": "x", "resourceVersion": "7"}, "spec": spec,
        }))
        .unwrap()
    }

    #[allow(clippy::needless_pass_by_value, reason = "reads better where it is called")]
    fn judge(spec: serde_json::Value) -> Standing {
        standing(Some(&service(&spec)), "forewarm", "forewarm-adapter", "CA")
    }

    #[test]
    fn only_our_own_apiservices_are_touched() {
        let base = |extra: serde_json::Value| {
            let mut spec = json!({
                "groupPriorityMinimum": 100, "versionPriority": 100,
                "service": {"namespace": "forewarm", "name": "forewarm-adapter", "port": 443},
            });
            spec.as_object_mut()
                .unwrap()
                .extend(extra.as_object().unwrap().clone());
            spec
        };
        let outdated = Standing::Outdated {
            version: Some("7".into()),
        };
        assert_eq!(judge(base(json!({}))), outdated);
        assert_eq!(judge(base(json!({"caBundle": "Q0E="}))), Standing::Trusting);
        assert_eq!(judge(base(json!({"caBundle": "T0xE"}))), outdated);
        assert_eq!(judge(base(json!({"insecureSkipTLSVerify": true}))), outdated);
        assert_eq!(
            judge(base(json!({"service": {"namespace": "keda", "name": "keda"}}))),
            Standing::Foreign("keda/keda".into())
        );
        assert_eq!(
            standing(None, "forewarm", "forewarm-adapter", "CA"),
            Standing::Absent
        );
    }

    #[test]
    fn there_is_one_apiservice_for_each_group_version() {
        let names: Vec<_> = names().collect();
        assert_eq!(
            names,
            [
                "v1beta2.custom.metrics.k8s.io",
                "v1beta1.custom.metrics.k8s.io",
                "v1beta1.external.metrics.k8s.io"
            ]
        );
    }
}
