//! The closed set of failures and the Kubernetes `Status` that each becomes.
//!
//! Purpose: one place where a refusal turns into a code, a reason and a text that shows up in an HPA's
//! condition.
//! Inputs: refusals of the provider, failures of access checks and of routing.
//! Invariants: every failure body is a `Status` with a JSON content type; no answer ever carries
//! `Retry-After`, because client-go would then retry up to ten times inside the worker of the HPA controller.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde::Serialize;

use crate::provider::Refusal;

/// A complete response: every body of this server is already in memory.
pub type Answer = Response<Full<Bytes>>;

/// Content type of every JSON body. A client that finds none tries protobuf.
pub const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// A failed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    code: StatusCode,
    reason: &'static str,
    message: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    kind: &'static str,
    api_version: &'static str,
    metadata: Metadata,
    status: &'static str,
    message: &'a str,
    reason: &'static str,
    code: u16,
}

#[derive(Serialize)]
struct Metadata {}

impl Status {
    fn new(code: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
        }
    }

    /// 404: no such path, metric, object or fresh sample.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", message)
    }

    /// 400: the request itself is wrong.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    /// 401: credentials were shown and are not good.
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "Unauthorized", message)
    }

    /// 403: known, and not allowed.
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "Forbidden", message)
    }

    /// 405: this API is read with GET.
    #[must_use]
    pub fn method_not_allowed(method: &http::Method) -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "MethodNotAllowed",
            format!("{method} is not supported: metrics are read with GET"),
        )
    }

    /// 406: the client takes nothing that this server can write.
    #[must_use]
    pub fn not_acceptable(accept: &str) -> Self {
        Self::new(
            StatusCode::NOT_ACCEPTABLE,
            "NotAcceptable",
            format!("only application/json can be served, which \"{accept}\" does not accept"),
        )
    }

    /// 503: a part that this answer needs cannot be reached.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", message)
    }

    /// 504: a part that this answer needs was too slow.
    pub fn timeout(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "Timeout", message)
    }

    /// HTTP code.
    #[must_use]
    pub fn code(&self) -> StatusCode {
        self.code
    }

    /// Text for a person.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The HTTP response.
    #[must_use]
    pub fn answer(&self) -> Answer {
        let body = Body {
            kind: "Status",
            api_version: "v1",
            metadata: Metadata {},
            status: "Failure",
            message: &self.message,
            reason: self.reason,
            code: self.code.as_u16(),
        };
        // Strings and integers always serialise.
        json(self.code, serde_json::to_vec(&body).unwrap_or_default().into())
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        match refusal {
            Refusal::UnknownMetric { .. } | Refusal::NoPodsMatch { .. } | Refusal::NoSample(_) => {
                Self::not_found(message)
            }
            Refusal::BadSelector(_) | Refusal::Ambiguous(_) => Self::bad_request(message),
            Refusal::Unavailable(_) => Self::unavailable(message),
            Refusal::Timeout(_) => Self::timeout(message),
        }
    }
}

/// A JSON response.
#[must_use]
pub fn json(code: StatusCode, body: Bytes) -> Answer {
    let mut answer = Response::new(Full::new(body));
    *answer.status_mut() = code;
    answer.headers_mut().insert(header::CONTENT_TYPE, JSON);
    // Values and discovery change at any time; a cache between a client and this server would hide that.
    answer.headers_mut().insert(
        header::CACHE_CONTROL,
        HeaderValue::from_static("no-cache, private"),
    );
    answer
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt as _;

    fn refusals() -> Vec<(Refusal, u16, &'static str)> {
        let text = || "why".to_owned();
        vec![
            (
                Refusal::UnknownMetric {
                    metric: "m".into(),
                    resource: "pods".into(),
                },
                404,
                "NotFound",
            ),
            (
                Refusal::NoPodsMatch {
                    metric: "m".into(),
                    resource: "running pod".into(),
                    namespace: "ns".into(),
                    selector: "a=b".into(),
                },
                404,
                "NotFound",
            ),
            (Refusal::NoSample(text()), 404, "NotFound"),
            (Refusal::BadSelector(text()), 400, "BadRequest"),
            (Refusal::Ambiguous(text()), 400, "BadRequest"),
            (Refusal::Unavailable(text()), 503, "ServiceUnavailable"),
            (Refusal::Timeout(text()), 504, "Timeout"),
        ]
    }

    #[tokio::test]
    async fn every_refusal_is_a_status_without_retry_after() {
        for (refusal, code, reason) in refusals() {
            let text = refusal.to_string();
            let answer = Status::from(refusal).answer();
            assert_eq!(answer.status().as_u16(), code);
            assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/json");
            assert!(!answer.headers().contains_key(header::RETRY_AFTER));
            let body = answer.into_body().collect().await.unwrap().to_bytes();
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(
                body,
                serde_json::json!({
                    "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                    "message": text, "reason": reason, "code": code,
                })
            );
        }
    }

    #[test]
    fn a_refusal_names_metric_and_selector() {
        let text = Refusal::NoPodsMatch {
            metric: "gpu_busy_percent".into(),
            resource: "running pod".into(),
            namespace: "serving".into(),
            selector: "app=llm".into(),
        }
        .to_string();
        assert!(text.contains("gpu_busy_percent") && text.contains("app=llm") && text.contains("serving"));
    }
}
