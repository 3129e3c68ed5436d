//! Which rights the adapter has.
//!
//! Purpose: asks the API server whether the adapter may do what it needs, and says what is missing before
//! anybody has to guess from an error elsewhere.
//! Inputs: SelfSubjectAccessReviews, which every service account may create.
//! Invariants: a missing right is reported with verb, resource and consequence, and fails nothing by itself;
//! the check repeats, so a right that is granted later is noticed.

use std::time::Duration;

use forewarm_runtime::BoxError;
use forewarm_runtime::exit::chain;
use forewarm_runtime::metrics::register;
use forewarm_runtime::status::Condition;
use forewarm_signals::serving;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::api::{Api, PostParams};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::access;
use crate::certs;
use crate::route::GroupVersion;

/// While something is missing: somebody is probably about to grant it.
const MISSING_EVERY: Duration = Duration::from_secs(15);
/// Otherwise: a right that is taken away is named before the person who took it has left.
const COMPLETE_EVERY: Duration = Duration::from_secs(60);

/// One right that is needed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Right {
    verb: &'static str,
    group: &'static str,
    resource: &'static str,
    namespace: Option<String>,
    name: Option<String>,
    /// What does not work without it.
    without: &'static str,
}

impl Right {
    fn describe(&self) -> String {
        let mut text = format!("may not {} {}", self.verb, self.resource);
        if !self.group.is_empty() {
            text.push_str(&format!(".{}", self.group));
        }
        if let Some(name) = &self.name {
            text.push_str(&format!(" {name}"));
        }
        if let Some(namespace) = &self.namespace {
            text.push_str(&format!(" in {namespace}"));
        }
        format!("{text} ({})", self.without)
    }

    fn review(&self) -> SelfSubjectAccessReview {
        SelfSubjectAccessReview {
            spec: SelfSubjectAccessReviewSpec {
                resource_attributes: Some(ResourceAttributes {
                    verb: Some(self.verb.to_owned()),
                    group: Some(self.group.to_owned()),
                    resource: Some(self.resource.to_owned()),
                    namespace: self.namespace.clone(),
                    name: self.name.clone(),
                    ..ResourceAttributes::default()
                }),
                ..SelfSubjectAccessReviewSpec::default()
            },
            ..SelfSubjectAccessReview::default()
        }
    }
}

/// The rights that a serving adapter needs; those of certificate management only where it manages one.
#[must_use]
pub fn needed(managed: Option<(&certs::Settings, &str)>) -> Vec<Right> {
    let right = |verb, group, resource, without| Right {
        verb,
        group,
        resource,
        namespace: None,
        name: None,
        without,
    };
    let mut rights = vec![
        right("list", "", "pods", "no value of any pod can be served"),
        right("watch", "", "pods", "no value of any pod can be served"),
        right(
            "create",
            "authorization.k8s.io",
            "subjectaccessreviews",
            "only system:masters can be let in",
        ),
        right(
            "create",
            "authentication.k8s.io",
            "tokenreviews",
            "callers with tokens are turned away",
        ),
    ];
    for verb in ["list", "watch"] {
        rights.push(Right {
            namespace: Some(access::CONFIG_MAP_NAMESPACE.to_owned()),
            name: Some(access::CONFIG_MAP.to_owned()),
            ..right(verb, "", "configmaps", "the API server cannot prove itself")
        });
    }
    if let Some((settings, namespace)) = managed {
        for verb in ["get", "update"] {
            rights.push(Right {
                namespace: Some(namespace.to_owned()),
                name: Some(settings.secret.clone()),
                ..right(verb, "", "secrets", "no certificate can be shared or renewed")
            });
        }
        for served in GroupVersion::ALL {
            for verb in ["get", "patch"] {
                rights.push(Right {
                    name: Some(format!("{}.{}", served.version(), served.group())),
                    ..right(
                        verb,
                        "apiregistration.k8s.io",
                        "apiservices",
                        "the API server cannot learn our CA",
                    )
                });
            }
        }
    }
    rights
}

/// Checks again and again until cancelled; `condition` says what is missing.
///
/// # Errors
/// Never.
pub async fn check(
    client: kube::Client,
    rights: Vec<Right>,
    condition: Condition,
    missing: Missing,
    token: CancellationToken,
) -> Result<(), BoxError> {
    let api: Api<SelfSubjectAccessReview> = Api::all(client);
    loop {
        let result = tokio::select! {
            () = token.cancelled() => return Ok(()),
            result = absent(&api, &rights) => result,
        };
        let pause = match result {
            Ok(absent) => {
                missing.0.set(i64::try_from(absent.len()).unwrap_or(i64::MAX));
                if absent.is_empty() {
                    condition.ready();
                    COMPLETE_EVERY
                } else {
                    condition.degraded(absent.join("; "));
                    MISSING_EVERY
                }
            }
            Err(error) => {
                condition.degraded(format!("could not be checked: {}", chain(&error)));
                MISSING_EVERY
            }
        };
        tokio::select! {
            () = token.cancelled() => return Ok(()),
            () = tokio::time::sleep(pause) => {}
        }
    }
}

async fn absent(api: &Api<SelfSubjectAccessReview>, rights: &[Right]) -> Result<Vec<String>, kube::Error> {
    let mut absent = Vec::new();
    for right in rights {
        let answer = api.create(&PostParams::default(), &right.review()).await?;
        if !answer.status.is_some_and(|status| status.allowed) {
            absent.push(right.describe());
        }
    }
    Ok(absent)
}

/// Number of missing rights. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Missing(Gauge);

impl Missing {
    /// Registers the gauge.
    pub fn register(&self, registry: &mut Registry) {
        register(registry, &serving::MISSING_RIGHTS, self.0.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_right_is_named_with_its_consequence() {
        let settings = certs::Settings {
            secret: "s".into(),
            service: "svc".into(),
        };
        let texts: Vec<_> = needed(Some((&settings, "forewarm")))
            .iter()
            .map(Right::describe)
            .collect();
        assert!(texts.contains(&"may not list pods (no value of any pod can be served)".to_owned()));
        assert!(texts.contains(
            &"may not update secrets s in forewarm (no certificate can be shared or renewed)".to_owned()
        ));
        assert!(
            texts
                .iter()
                .any(|text| text.contains("apiservices.apiregistration.k8s.io v1beta1.external"))
        );
        assert!(needed(None).iter().all(|right| right.resource != "secrets"));
    }
}
