//! Families that the adapter exposes about its API server.

use crate::family::{Family, Kind, MeasuredAt, Unit};

const fn serving(
    name: &'static str,
    kind: Kind,
    unit: Option<Unit>,
    labels: &'static [&'static str],
    help: &'static str,
) -> Family {
    Family {
        name,
        help,
        kind,
        unit,
        labels,
        measured: MeasuredAt::Now,
    }
}

/// Answered requests.
pub const REQUESTS_TOTAL: Family = serving(
    "forewarm_adapter_requests_total",
    Kind::Counter,
    None,
    &["group", "version", "kind", "code"],
    "Requests answered, by API group, version, kind of request and HTTP code",
);
/// Latency of answers.
pub const REQUEST_SECONDS: Family = serving(
    "forewarm_adapter_request_seconds",
    Kind::Histogram,
    Some(Unit::Seconds),
    &["kind"],
    "Time from a request's headers to its complete answer, by kind of request",
);
/// Requests whose client left before the answer was ready.
pub const REQUESTS_ABANDONED_TOTAL: Family = serving(
    "forewarm_adapter_requests_abandoned_total",
    Kind::Counter,
    None,
    &[],
    "Requests whose client went away before the answer was ready",
);
/// Open connections.
pub const CONNECTIONS: Family = serving(
    "forewarm_adapter_connections",
    Kind::Gauge,
    None,
    &[],
    "Open connections to the metrics API",
);
/// Connections that never got as far as a request.
pub const CONNECTION_FAILURES_TOTAL: Family = serving(
    "forewarm_adapter_connection_failures_total",
    Kind::Counter,
    None,
    &["reason"],
    "Connections that ended early: TLS handshake failed or too slow, no certificate to serve yet",
);
/// Identities that were not accepted.
pub const IDENTITY_REJECTIONS_TOTAL: Family = serving(
    "forewarm_adapter_identity_rejections_total",
    Kind::Counter,
    None,
    &["reason"],
    "Requests answered with 401, by what was wrong with the credentials",
);
/// Reviews asked of the API server.
pub const ACCESS_REVIEWS_TOTAL: Family = serving(
    "forewarm_adapter_access_reviews_total",
    Kind::Counter,
    None,
    &["review", "result"],
    "TokenReviews and SubjectAccessReviews asked of the API server, by result; cached answers do not count",
);
/// Rights that the adapter lacks.
pub const MISSING_RIGHTS: Family = serving(
    "forewarm_adapter_missing_rights",
    Kind::Gauge,
    None,
    &[],
    "Rights that the adapter needs and does not have; /readyz?verbose and the log name them",
);
/// When the managed serving certificate ends.
pub const CERTIFICATE_EXPIRY_TIMESTAMP_SECONDS: Family = serving(
    "forewarm_adapter_certificate_expiry_timestamp_seconds",
    Kind::Gauge,
    Some(Unit::Seconds),
    &[],
    "End of validity of the serving certificate that the adapter manages, as Unix time",
);
/// Rounds of certificate management.
pub const CERTIFICATE_ROUNDS_TOTAL: Family = serving(
    "forewarm_adapter_certificate_rounds_total",
    Kind::Counter,
    None,
    &["outcome"],
    "Rounds of certificate management, by outcome",
);

/// All of them.
pub const FAMILIES: &[&Family] = &[
    &REQUESTS_TOTAL,
    &REQUEST_SECONDS,
    &REQUESTS_ABANDONED_TOTAL,
    &CONNECTIONS,
    &CONNECTION_FAILURES_TOTAL,
    &IDENTITY_REJECTIONS_TOTAL,
    &ACCESS_REVIEWS_TOTAL,
    &MISSING_RIGHTS,
    &CERTIFICATE_EXPIRY_TIMESTAMP_SECONDS,
    &CERTIFICATE_ROUNDS_TOTAL,
];
