//! The loop of one target: scrape, read, hand over, wait.
//!
//! Invariants: one scrape at a time, never longer than the timeout; every outcome is counted by a closed set
//! of results and told to the index with its cause.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use reqwest::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, DATE};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::Spec;
use super::client::ClientCell;
use super::manager::Event;
use super::pace::Pace;
use super::read::{Moment, Refused, Wanted, read};
use crate::config::Source;
use crate::exposition;
use crate::index::{Batch, Failure, Message, Queue};
use crate::metrics::{Drop, Metrics};

/// What every loop of a source shares.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) source: Source,
    pub(super) wanted: Wanted,
    pub(super) client: Arc<ClientCell>,
    pub(super) queue: Queue,
    pub(super) metrics: Arc<Metrics>,
    pub(super) events: mpsc::Sender<Event>,
}

/// Why a scrape brought nothing.
#[derive(Debug, PartialEq, Eq)]
struct Failed {
    result: &'static str,
    text: String,
}

fn failed(result: &'static str, text: impl Into<String>) -> Failed {
    Failed {
        result,
        text: text.into(),
    }
}

/// Scrapes a target until the token is cancelled.
pub(super) async fn follow(spec: Spec, shared: Arc<Shared>, token: CancellationToken) {
    let source = &shared.source;
    let scheme = if source.tls.is_some() { "https" } else { "http" };
    let url = format!(
        "{scheme}://{}{}{}",
        spec.address,
        source.path,
        shared.wanted.query()
    );
    let mut pace = Pace::new(source.interval);
    let mut last_length = 0;
    let mut was_failing = false;
    loop {
        let sent = Instant::now();
        let outcome = tokio::select! {
            () = token.cancelled() => break,
            outcome = scrape(&url, &shared, &mut last_length) => outcome,
        };
        let took = sent.elapsed();
        let result = outcome.as_ref().map_or_else(|failed| failed.result, |_| "ok");
        shared
            .metrics
            .scraped(&source.name, &spec.id.name, result, outcome.is_ok(), took);
        let delay = match outcome {
            Ok(read) => {
                if was_failing {
                    tracing::info!(
                        source = &*source.name,
                        target = &*spec.id.name,
                        "target answers again"
                    );
                }
                was_failing = false;
                shared.queue.offer(Message::Batch(Batch {
                    target: spec.id.clone(),
                    node: spec.node.clone(),
                    at: sent,
                    round_trip: read.round_trip,
                    rows: read.rows,
                }));
                pace.next(read.youngest)
            }
            Err(failure) => {
                if !was_failing {
                    tracing::warn!(
                        source = &*source.name,
                        target = &*spec.id.name,
                        result = failure.result,
                        error = failure.text,
                        "scrape failed"
                    );
                }
                was_failing = true;
                shared.queue.offer(Message::Failed {
                    target: spec.id.clone(),
                    node: spec.node.clone(),
                    failure: Failure {
                        at: Instant::now(),
                        text: Arc::from(failure.text),
                    },
                });
                pace.next(None)
            }
        };
        // Only the first try matters to readiness, and a full channel means that many are told already.
        let _told = shared.events.try_send(Event::Tried(spec.id.clone()));
        let wait = delay.saturating_sub(sent.elapsed());
        tokio::select! {
            () = token.cancelled() => break,
            () = tokio::time::sleep(wait) => {}
        }
    }
    shared.metrics.target_removed(&source.name, &spec.id.name);
}

async fn scrape(url: &str, shared: &Shared, last_length: &mut usize) -> Result<super::read::Read, Failed> {
    let limit = shared.source.timeout;
    match tokio::time::timeout(limit, fetch(url, shared, last_length)).await {
        Err(_) => Err(failed(
            "timeout",
            format!("timeout: no complete answer within {}", shown(limit)),
        )),
        Ok(Err(failure)) => Err(failure),
        Ok(Ok((moment, format, body))) => {
            let start = Instant::now();
            let outcome = read(format, &body, &shared.wanted, moment);
            shared.metrics.parsed(start.elapsed());
            match outcome {
                Ok(read) => {
                    for (reason, count) in &read.dropped {
                        shared.metrics.dropped(*reason, *count);
                    }
                    Ok(read)
                }
                Err(refused @ Refused::Format(_)) => {
                    shared
                        .metrics
                        .dropped(Drop::BadBody, memchr::memchr_iter(b'\n', &body).count().max(1));
                    Err(failed("parse", format!("the answer is not valid: {refused}")))
                }
                Err(refused @ Refused::TooManySeries(_)) => {
                    shared
                        .metrics
                        .dropped(Drop::TooManySeries, memchr::memchr_iter(b'\n', &body).count());
                    Err(failed(
                        "too-many-series",
                        format!("the answer is too large: {refused}"),
                    ))
                }
            }
        }
    }
}

type Fetched = (Moment, &'static dyn exposition::Exposition, Vec<u8>);

async fn fetch(url: &str, shared: &Shared, last_length: &mut usize) -> Result<Fetched, Failed> {
    let client = shared.client.current();
    let client = match client.as_ref() {
        Ok(client) => client,
        Err(error) => return Err(failed("credentials", format!("credentials: {error}"))),
    };
    let sent = Instant::now();
    let request = client.get(url).header(
        ACCEPT,
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4",
    );
    let mut response = request.send().await.map_err(unreachable)?;
    let round_trip = sent.elapsed();
    let status = response.status();
    if status.as_u16() != 200 {
        return Err(failed(
            "status",
            format!("the answer has status {}", status.as_u16()),
        ));
    }
    let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
    let content_type = header(CONTENT_TYPE).map(str::to_owned);
    let Some(format) = exposition::for_content_type(content_type.as_deref()) else {
        return Err(failed(
            "content-type",
            format!("the answer has content type {}", content_type.unwrap_or_default()),
        ));
    };
    let date = header(DATE).and_then(http_date);
    let limit = shared.source.max_body_bytes;
    let too_large = || {
        shared.metrics.dropped(Drop::TooManySeries, 1);
        failed("too-large", format!("the answer is larger than {limit} bytes"))
    };
    if header(CONTENT_LENGTH)
        .and_then(|length| length.parse::<usize>().ok())
        .is_some_and(|length| length > limit)
    {
        return Err(too_large());
    }
    let mut body = Vec::with_capacity(*last_length + *last_length / 8);
    while let Some(chunk) = response.chunk().await.map_err(unreachable)? {
        if body.len() + chunk.len() > limit {
            return Err(too_large());
        }
        body.extend_from_slice(&chunk);
    }
    *last_length = body.len();
    let moment = Moment {
        sent,
        round_trip,
        date,
    };
    Ok((moment, format, body))
}

/// The innermost cause is what a person needs: `connection refused`, `certificate not valid for name`.
#[allow(clippy::needless_pass_by_value, reason = "shape of map_err")]
fn unreachable(error: reqwest::Error) -> Failed {
    if error.is_timeout() {
        return failed("timeout", "timeout: no connection in time");
    }
    let mut cause: &dyn std::error::Error = &error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    failed("unreachable", format!("unreachable: {cause}"))
}

fn http_date(text: &str) -> Option<SystemTime> {
    let parsed = jiff::fmt::rfc2822::DateTimeParser::new()
        .parse_timestamp(text)
        .ok()?;
    let seconds = u64::try_from(parsed.as_second()).ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

fn shown(duration: Duration) -> String {
    format!("{} s", duration.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_date_header_is_read() {
        let date = http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        assert_eq!(
            date.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs(),
            784_111_777
        );
        assert_eq!(http_date("yesterday"), None);
    }
}
