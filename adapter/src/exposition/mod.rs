//! Reads what a target exposes: Prometheus text 0.0.4 and OpenMetrics 1.0, strictly.
//!
//! Purpose: turns a scraped body into samples without copying it.
//! Inputs: the bytes of one response and the format its content type announces.
//! Invariants: a body is taken whole or not at all: any line that breaks the format rejects the body and is
//! named with its number and the cause, because a half-read body would be a wrong sum. Names and label values
//! borrow from the body; only values with escapes are copied. Samples are handed out before the last line is
//! seen, so a reader keeps them aside until [`Exposition::parse`] returns `Ok`.

mod labels;
mod line;
mod openmetrics;
mod text;

use std::borrow::Cow;

pub use openmetrics::OpenMetrics;
pub use text::PrometheusText;

/// One sample, borrowed from the body.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'s, 'b> {
    /// Series name as written, with `_total`, `_bucket` and so on.
    pub name: &'b str,
    /// Labels in the order they were written, each key once.
    pub labels: &'s [Label<'b>],
    /// The value; NaN and infinities are legal here.
    pub value: f64,
    /// Explicit timestamp, in milliseconds since the epoch of the target's clock.
    pub timestamp_ms: Option<i64>,
}

impl<'s, 'b> Sample<'s, 'b> {
    /// Value of a label.
    #[must_use]
    pub fn label(&self, key: &str) -> Option<&'s str> {
        self.labels
            .iter()
            .find(|label| label.key == key)
            .map(|label| label.value.as_ref())
    }
}

/// A label; the value is owned only where it was written with escapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label<'b> {
    /// Key.
    pub key: &'b str,
    /// Value, unescaped.
    pub value: Cow<'b, str>,
}

/// What a whole body held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Parsed {
    /// Lines, comments and empty ones included.
    pub lines: usize,
    /// Samples.
    pub samples: usize,
}

/// The line that breaks the format, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {cause}")]
pub struct ParseError {
    /// Line number, from 1.
    pub line: usize,
    /// What is wrong with it, lower case.
    pub cause: String,
}

/// Longest cause, in characters: it is logged and told to clients, whatever a target writes.
const LONGEST_CAUSE: usize = 200;

impl ParseError {
    fn new(line: usize, mut cause: String) -> Self {
        if let Some((cut, _)) = cause.char_indices().nth(LONGEST_CAUSE) {
            cause.truncate(cut);
            cause.push('…');
        }
        Self { line, cause }
    }
}

/// A text format that a target may answer in.
pub trait Exposition: Send + Sync {
    /// Hands out every sample of a body, in order.
    ///
    /// # Errors
    /// The first line that breaks the format; the samples handed out so far must then be thrown away.
    fn parse<'b>(
        &self,
        body: &'b [u8],
        on_sample: &mut dyn FnMut(Sample<'_, 'b>),
    ) -> Result<Parsed, ParseError>;
}

/// The reader for a `Content-Type`, or `None` where the body is something else (an HTML error page, protobuf).
///
/// A missing content type is read as Prometheus text, as Prometheus 2 did; `text/plain` is what old clients say.
#[must_use]
pub fn for_content_type(content_type: Option<&str>) -> Option<&'static dyn Exposition> {
    let Some(content_type) = content_type else {
        return Some(&PrometheusText);
    };
    let media = content_type.split(';').next().unwrap_or_default().trim();
    if media.eq_ignore_ascii_case("application/openmetrics-text") {
        Some(&OpenMetrics)
    } else if media.eq_ignore_ascii_case("text/plain") {
        Some(&PrometheusText)
    } else {
        None
    }
}

/// The body as text, or the line that is not UTF-8.
fn utf8(body: &[u8]) -> Result<&str, ParseError> {
    std::str::from_utf8(body).map_err(|error| ParseError {
        line: 1 + memchr::memchr_iter(b'\n', &body[..error.valid_up_to()]).count(),
        cause: "not UTF-8".to_owned(),
    })
}

#[cfg(test)]
mod tests;
