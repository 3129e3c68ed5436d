//! One request from its head to a complete answer.
//!
//! Purpose: the order of checks (method, path, identity, access, Accept, selectors) and the call of the
//! provider or the choice of a document.
//! Inputs: the request head and the certificate of its connection; bodies are never read.
//! Invariants: touches memory only, an access review on a cache miss excepted; every answer is complete in
//! memory; every failure is a `Status`; probes need no credentials.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use forewarm_runtime::status as health;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header, request::Parts};
use http_body_util::Full;

use crate::access::attributes::Attributes;
use crate::access::{Access, PeerCertificate};
use crate::discovery::{Discovery, openapi};
use crate::provider::{Catalog, GroupResource, ObjectQuery, Provider, Refusal};
use crate::route::{GroupVersion, Path, Probe, Query, Route, Target};
use crate::selector::Selector;
use crate::server::metrics::{Kind, Metrics, Subject};
use crate::status::{Answer, Status, json};
use crate::wire::{accept, custom_list, external_list};

/// Answers requests.
pub struct Api {
    provider: Arc<dyn Provider>,
    discovery: Discovery,
    access: Option<Access>,
    health: health::Status,
    metrics: Metrics,
}

impl Api {
    /// Without `access` everybody may read: only for loopback.
    #[must_use]
    pub fn new(
        provider: Arc<dyn Provider>,
        access: Option<Access>,
        health: health::Status,
        metrics: Metrics,
    ) -> Self {
        let discovery = Discovery::new(provider.catalog());
        Self {
            provider,
            discovery,
            access,
            health,
            metrics,
        }
    }

    /// Answers one request.
    pub async fn answer(&self, request: &Parts, peer: Option<&PeerCertificate>) -> Answer {
        let parsed = Path::parse(request.uri.path());
        let route = parsed.as_ref().map_or(Route::Unknown, Path::route);
        let timer = self.metrics.start(subject(&route));
        let answer = match parsed {
            Err(error) => Err(Status::bad_request(error.to_string())),
            Ok(path) => self.checked(request, peer, &path, route).await,
        };
        let answer = answer.unwrap_or_else(|status| {
            tracing::debug!(
                code = status.code().as_u16(),
                message = status.message(),
                path = request.uri.path(),
                "request refused"
            );
            let mut answer = status.answer();
            if status.code() == StatusCode::METHOD_NOT_ALLOWED {
                answer
                    .headers_mut()
                    .insert(header::ALLOW, HeaderValue::from_static("GET"));
            }
            answer
        });
        timer.done(answer.status());
        answer
    }

    async fn checked(
        &self,
        request: &Parts,
        peer: Option<&PeerCertificate>,
        path: &Path,
        route: Route,
    ) -> Result<Answer, Status> {
        if request.method != Method::GET {
            return Err(Status::method_not_allowed(&request.method));
        }
        let query = Query::parse(request.uri.query())
            .map_err(|key| Status::bad_request(format!("query parameter {key} holds a broken escape")))?;
        if let Route::Probe(probe) = route {
            return Ok(self.probe(probe, &query));
        }
        if let Some(access) = &self.access {
            let attributes = Attributes::of(path, &query);
            access.admit(peer, &request.headers, &attributes).await?;
        }
        self.routed(&request.headers, path, route, &query)
    }

    fn probe(&self, probe: Probe, query: &Query) -> Answer {
        let verdict = match probe {
            Probe::Live => self.health.liveness.verdict(),
            Probe::Ready => self.health.readiness.verdict(),
        };
        let mut answer = Answer::new(Full::new(verdict.body(query.verbose).into()));
        if !verdict.passed {
            *answer.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        }
        answer.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("text/plain; charset=utf-8"),
        );
        answer
    }

    fn routed(
        &self,
        headers: &HeaderMap,
        path: &Path,
        route: Route,
        query: &Query,
    ) -> Result<Answer, Status> {
        let unknown = || {
            Status::not_found(format!(
                "the server could not find the requested resource /{}",
                path.segments().join("/")
            ))
        };
        let not_acceptable = |accept: String| Status::not_acceptable(&accept);
        if let Route::Groups = route {
            let form = accept::discovery(headers).map_err(not_acceptable)?;
            let catalog = self.provider.catalog();
            return Ok(self
                .discovery
                .of(catalog, |documents| documents.groups(form).answer(headers)));
        }
        if let Route::Unknown = route {
            return Err(unknown());
        }
        accept::json(headers).map_err(not_acceptable)?;
        let document = match route {
            Route::Group(group) => self.discovery.of(self.provider.catalog(), |documents| {
                documents.group(group).map(|document| document.answer(headers))
            }),
            Route::Resources(served) => self.discovery.of(self.provider.catalog(), |documents| {
                documents
                    .resources(served)
                    .map(|document| document.answer(headers))
            }),
            Route::OpenApiV2 => Some(openapi::v2(headers)),
            Route::OpenApiV3 => Some(openapi::v3_list(headers)),
            Route::OpenApiV3Document(served) => openapi::v3(served, headers),
            Route::Custom {
                version,
                target,
                metric,
            } => {
                let body = self.custom(&target, &metric, query, |values| {
                    custom_list(version, &metric, values)
                })?;
                return Ok(json(StatusCode::OK, body));
            }
            Route::External { namespace, metric } => {
                let body = self.external(&namespace, &metric, query)?;
                return Ok(json(StatusCode::OK, body));
            }
            Route::Groups | Route::Unknown | Route::Probe(_) => None,
        };
        document.ok_or_else(unknown)
    }

    fn custom(
        &self,
        target: &Target,
        metric: &str,
        query: &Query,
        write: impl FnOnce(&[crate::provider::CustomValue]) -> Bytes,
    ) -> Result<Bytes, Status> {
        let selector = read_selector("labelSelector", &query.label_selector)?;
        let metric_selector = read_selector("metricLabelSelector", &query.metric_label_selector)?;
        let now = Instant::now();
        let ask = |object: ObjectQuery<'_>| {
            self.provider
                .custom(&object, metric, &metric_selector, now)
                .map_err(Status::from)
        };
        let values = match target {
            Target::Pods { namespace, name } => ask(ObjectQuery::Pods {
                namespace,
                name: name.as_deref(),
                selector: &selector,
            }),
            Target::Namespace(namespace) => ask(ObjectQuery::Namespace { namespace }),
            Target::Object {
                namespace,
                resource,
                name,
            } => {
                let resource = listed(&self.provider.catalog(), resource);
                if namespace.is_none() && resource.resource == "pods" && resource.group.is_empty() {
                    return Err(Status::from(Refusal::UnknownMetric {
                        metric: metric.to_owned(),
                        resource: "pods outside a namespace".to_owned(),
                    }));
                }
                ask(ObjectQuery::Object {
                    namespace: namespace.as_deref(),
                    resource: &resource,
                    name: name.as_deref(),
                    selector: &selector,
                })
            }
        }?;
        Ok(write(&values))
    }

    fn external(&self, namespace: &str, metric: &str, query: &Query) -> Result<Bytes, Status> {
        // HPA sends the metric's selector as `labelSelector` here.
        let selector = read_selector("labelSelector", &query.label_selector)?;
        let values = self
            .provider
            .external(namespace, metric, &selector, Instant::now())?;
        Ok(external_list(metric, &values))
    }
}

/// The resource as the catalog spells it; a singular is tolerated, as Go adapters do.
fn listed(catalog: &Catalog, asked: &GroupResource) -> GroupResource {
    if catalog.custom.contains_key(asked) {
        return asked.clone();
    }
    let plural_of = |suffix: &str, cut: usize| GroupResource {
        group: asked.group.clone(),
        resource: format!(
            "{}{suffix}",
            asked
                .resource
                .get(..asked.resource.len().saturating_sub(cut))
                .unwrap_or_default()
        ),
    };
    let mut plurals = vec![plural_of("s", 0), plural_of("es", 0)];
    if asked.resource.ends_with('y') {
        plurals.push(plural_of("ies", 1));
    }
    plurals
        .into_iter()
        .find(|plural| catalog.custom.contains_key(plural))
        .unwrap_or_else(|| asked.clone())
}

fn read_selector(parameter: &str, text: &str) -> Result<Selector, Status> {
    Selector::parse(text)
        .map_err(|error| Status::bad_request(format!("unable to parse {parameter} \"{text}\": {error}")))
}

/// What a request counts as.
fn subject(route: &Route) -> Subject {
    let of = |served: Option<GroupVersion>, kind| Subject { served, kind };
    match route {
        Route::Probe(_) => of(None, Kind::Probe),
        Route::Groups | Route::Group(_) => of(None, Kind::Discovery),
        Route::Resources(served) => of(Some(*served), Kind::Discovery),
        Route::OpenApiV2 | Route::OpenApiV3 | Route::OpenApiV3Document(_) => of(None, Kind::OpenApi),
        Route::Custom { version, target, .. } => of(
            Some(GroupVersion::Custom(*version)),
            match target {
                Target::Pods { .. } => Kind::Pods,
                Target::Namespace(_) => Kind::Namespaces,
                Target::Object { .. } => Kind::Objects,
            },
        ),
        Route::External { .. } => of(Some(GroupVersion::ExternalV1Beta1), Kind::External),
        Route::Unknown => of(None, Kind::Unknown),
    }
}

#[cfg(test)]
pub(crate) mod tests;
