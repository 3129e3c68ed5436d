//! What the server tells about its requests and connections.
//!
//! Purpose: requests by group, version, kind and code, their latency, abandoned ones, connections.
//! Inputs: requests as they start and end.
//! Invariants: label values come from closed sets; a request whose client leaves is counted as abandoned and
//! never as an error.

use std::sync::Arc;
use std::time::Instant;

use forewarm_runtime::metrics::register;
use forewarm_signals::serving;
use http::StatusCode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::route::GroupVersion;

/// From a document out of memory to the budget of an access review and beyond.
const BUCKETS: [f64; 12] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.0, 5.0,
];

/// Kinds of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Custom metrics of pods.
    Pods,
    /// Custom metrics of a namespace.
    Namespaces,
    /// Custom metrics of other objects.
    Objects,
    /// External metrics.
    External,
    /// Groups and resource lists.
    Discovery,
    /// OpenAPI documents.
    OpenApi,
    /// Health checks.
    Probe,
    /// Paths that nothing is behind.
    Unknown,
}

impl Kind {
    /// Label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pods => "pods",
            Self::Namespaces => "namespaces",
            Self::Objects => "objects",
            Self::External => "external",
            Self::Discovery => "discovery",
            Self::OpenApi => "openapi",
            Self::Probe => "probe",
            Self::Unknown => "unknown",
        }
    }
}

/// What a request is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subject {
    /// Group version, where the path names one.
    pub served: Option<GroupVersion>,
    /// Kind of request.
    pub kind: Kind,
}

/// Why a connection ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionFailure {
    /// The TLS handshake failed.
    Handshake,
    /// The TLS handshake took too long.
    SlowHandshake,
}

type Labels = [(&'static str, String); 4];

/// Metrics of the server. Clones share them.
#[derive(Debug, Clone)]
pub struct Metrics {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    requests: Family<Labels, Counter>,
    seconds: Family<[(&'static str, &'static str); 1], Histogram>,
    abandoned: Counter,
    connections: Gauge,
    failures: Family<[(&'static str, &'static str); 1], Counter>,
}

/// Measures one request until it is done or dropped.
#[derive(Debug)]
pub struct Timer<'a> {
    metrics: &'a Metrics,
    subject: Subject,
    started: Instant,
    done: bool,
}

/// Counts one open connection until dropped.
#[derive(Debug)]
pub struct OpenConnection {
    connections: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            inner: Arc::new(Inner {
                requests: Family::default(),
                seconds: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
                abandoned: Counter::default(),
                connections: Gauge::default(),
                failures: Family::default(),
            }),
        }
    }
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        register(registry, &serving::REQUESTS_TOTAL, self.inner.requests.clone());
        register(registry, &serving::REQUEST_SECONDS, self.inner.seconds.clone());
        register(
            registry,
            &serving::REQUESTS_ABANDONED_TOTAL,
            self.inner.abandoned.clone(),
        );
        register(registry, &serving::CONNECTIONS, self.inner.connections.clone());
        register(
            registry,
            &serving::CONNECTION_FAILURES_TOTAL,
            self.inner.failures.clone(),
        );
    }

    /// A request begins.
    #[must_use]
    pub fn start(&self, subject: Subject) -> Timer<'_> {
        Timer {
            metrics: self,
            subject,
            started: Instant::now(),
            done: false,
        }
    }

    /// A connection is open.
    #[must_use]
    pub fn connection(&self) -> OpenConnection {
        self.inner.connections.inc();
        OpenConnection {
            connections: self.inner.connections.clone(),
        }
    }

    /// A connection ended before its first request.
    pub fn failed(&self, failure: ConnectionFailure) {
        let reason = match failure {
            ConnectionFailure::Handshake => "tls_handshake",
            ConnectionFailure::SlowHandshake => "tls_handshake_timeout",
        };
        self.inner.failures.get_or_create(&[("reason", reason)]).inc();
    }
}

impl Timer<'_> {
    /// The answer is complete.
    pub fn done(mut self, code: StatusCode) {
        self.done = true;
        let (group, version) = self
            .subject
            .served
            .map_or(("", ""), |served| (served.group(), served.version()));
        let kind = self.subject.kind.as_str();
        self.metrics
            .inner
            .requests
            .get_or_create(&[
                ("group", group.to_owned()),
                ("version", version.to_owned()),
                ("kind", kind.to_owned()),
                ("code", code.as_str().to_owned()),
            ])
            .inc();
        self.metrics
            .inner
            .seconds
            .get_or_create(&[("kind", kind)])
            .observe(self.started.elapsed().as_secs_f64());
    }
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.metrics.inner.abandoned.inc();
        }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.connections.dec();
    }
}
