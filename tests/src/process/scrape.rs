//! A small reader of exposition text, for assertions only: independent of the programs' own writers and parsers.
//!
//! Inputs: HTTP on loopback. Invariants: a line it cannot read fails the test; a series that appears twice too.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

/// No answer on loopback takes longer, unless the program hangs.
const TIMEOUT: Duration = Duration::from_secs(10);

/// An HTTP answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Status code.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    /// Body as sent.
    pub body: Bytes,
}

impl Answer {
    /// The body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Gets a path over plain HTTP.
///
/// # Errors
/// No connection, or no whole answer in time.
pub async fn fetch(addr: SocketAddr, path: &str) -> Result<Answer> {
    fetch_with(addr, path, &[]).await
}

/// Gets a path over plain HTTP with request headers.
///
/// # Errors
/// No connection, or no whole answer in time.
pub async fn fetch_with(addr: SocketAddr, path: &str, headers: &[(&str, &str)]) -> Result<Answer> {
    let mut request = Request::get(format!("http://{addr}{path}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Empty::<Bytes>::new())?;
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let whole = async {
        let response = client.request(request).await?;
        let (head, body) = response.into_parts();
        anyhow::Ok(Answer {
            status: head.status,
            headers: head.headers,
            body: body.collect().await?.to_bytes(),
        })
    };
    tokio::time::timeout(TIMEOUT, whole)
        .await
        .with_context(|| format!("no answer from {addr}{path} within {TIMEOUT:?}"))?
        .with_context(|| format!("get {addr}{path}"))
}

/// One line of an exposition.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Name with suffixes, as written.
    pub name: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Value.
    pub value: f64,
}

impl Sample {
    /// A label's value, empty where absent.
    #[must_use]
    pub fn label(&self, key: &str) -> &str {
        self.labels.get(key).map_or("", String::as_str)
    }
}

/// A whole exposition.
#[derive(Debug, Clone, Default)]
pub struct Scrape {
    samples: Vec<Sample>,
}

impl Scrape {
    /// Gets and reads `/metrics`, or another path with the same format.
    ///
    /// # Errors
    /// No answer, a status other than 200, or text that is not an exposition.
    pub async fn get(addr: SocketAddr, path: &str) -> Result<Self> {
        let answer = fetch(addr, path).await?;
        ensure!(
            answer.status == StatusCode::OK,
            "{path}: {}\n{}",
            answer.status,
            answer.text()
        );
        Self::read(&answer.text())
    }

    /// Reads text.
    ///
    /// # Errors
    /// Names the first line that is not a sample or comment, or is there twice.
    pub fn read(text: &str) -> Result<Self> {
        let mut samples = Vec::new();
        let mut identities = BTreeSet::new();
        for line in text
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            let sample = sample(line).with_context(|| format!("not a sample: {line}"))?;
            ensure!(
                identities.insert((sample.name.clone(), sample.labels.clone())),
                "twice: {line}"
            );
            samples.push(sample);
        }
        Ok(Self { samples })
    }

    /// All samples of a name whose labels contain the given ones.
    pub fn all<'a>(
        &'a self,
        name: &'a str,
        labels: &'a [(&'a str, &'a str)],
    ) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |sample| {
            sample.name == name && labels.iter().all(|(key, value)| sample.label(key) == *value)
        })
    }

    /// The value of the one sample of a name whose labels contain the given ones; none when there is no such sample.
    ///
    /// # Panics
    /// When more than one matches: the test asked an ambiguous question.
    #[must_use]
    #[allow(clippy::panic, reason = "an ambiguous question is a mistake in the test")]
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let mut found = self.all(name, labels);
        let first = found.next()?;
        match found.next() {
            None => Some(first.value),
            Some(second) => panic!("{name} {labels:?} names more than one series: {first:?}, {second:?}"),
        }
    }

    /// The same, as an error that names what is missing.
    ///
    /// # Errors
    /// No such sample.
    pub fn need(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64, String> {
        self.value(name, labels).ok_or_else(|| {
            format!(
                "no {name} {labels:?}; there is {:?}",
                self.all(name, &[]).collect::<Vec<_>>()
            )
        })
    }

    /// The sum of the values of all matching samples; 0 for none.
    #[must_use]
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.all(name, labels).map(|sample| sample.value).sum()
    }

    /// How many samples there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// All samples in order.
    pub fn iter(&self) -> impl Iterator<Item = &Sample> {
        self.samples.iter()
    }
}

fn sample(line: &str) -> Result<Sample> {
    let end = line
        .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'))
        .context("no value")?;
    let (name, mut rest) = line.split_at(end);
    ensure!(!name.is_empty(), "no name");
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (key, value) = rest.split_once("=\"").context("label without value")?;
            let (value, after) = unescape(value)?;
            ensure!(
                labels.insert(key.to_owned(), value).is_none(),
                "label {key} twice"
            );
            rest = after.strip_prefix(',').unwrap_or(after);
            ensure!(
                after.starts_with(',') || after.starts_with('}'),
                "text after label {key}"
            );
        }
        rest = rest.get(1..).unwrap_or_default();
    }
    let mut words = rest.split_whitespace();
    let value = words.next().context("no value")?;
    ensure!(words.next().is_none(), "text after the value");
    let value = match value {
        "+Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        number => number.parse().context("value")?,
    };
    Ok(Sample {
        name: name.to_owned(),
        labels,
        value,
    })
}

fn unescape(text: &str) -> Result<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Ok((value, text.get(at + 1..).unwrap_or_default())),
            '\\' => match chars.next() {
                Some((_, 'n')) => value.push('\n'),
                Some((_, c @ ('\\' | '"'))) => value.push(c),
                other => bail!("unknown escape {other:?}"),
            },
            c => value.push(c),
        }
    }
    bail!("label value without end")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_labels() {
        let scrape = Scrape::read("# HELP a b\na{x=\"p,q\",y=\"\\\"\"} 1.5\na{x=\"r\"} NaN\nb 2\n").unwrap();
        assert_eq!(scrape.value("a", &[("x", "p,q")]), Some(1.5));
        assert_eq!(scrape.value("a", &[("y", "\"")]), Some(1.5));
        assert_eq!(scrape.value("b", &[]), Some(2.0));
        assert_eq!(scrape.value("c", &[]), None);
        assert_eq!(scrape.all("a", &[]).count(), 2);
    }

    #[test]
    fn what_is_no_exposition_is_refused() {
        for text in [
            "a",
            "a{",
            "a{b=c} 1",
            "a{b=\"c} 1",
            "a 1 2 3",
            "a x",
            "{} 1",
            "a 1\na 2",
        ] {
            assert!(Scrape::read(text).is_err(), "{text}");
        }
    }
}
