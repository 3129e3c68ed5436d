//! OpenMetrics text format 1.0.
//!
//! Invariants: the body ends in `# EOF`, so one cut short is refused; families are not interleaved; `# TYPE`,
//! `# HELP` and `# UNIT` appear at most once a family, before its samples; a counter's samples end in `_total` or
//! `_created`; exemplars are checked and skipped; timestamps are seconds.

use std::collections::HashSet;

use super::labels::{self, LabelError};
use super::line::{Blanks, Cursor, emit, number};
use super::{Exposition, Label, ParseError, Parsed, Sample, utf8};

/// Reader for `application/openmetrics-text; version=1.0.0`.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenMetrics;

const TYPES: [&str; 8] = [
    "unknown",
    "gauge",
    "counter",
    "stateset",
    "info",
    "histogram",
    "gaugehistogram",
    "summary",
];

/// Longest exemplar, in characters of names and values together.
const MAX_EXEMPLAR: usize = 128;

impl Exposition for OpenMetrics {
    fn parse<'b>(
        &self,
        body: &'b [u8],
        on_sample: &mut dyn FnMut(Sample<'_, 'b>),
    ) -> Result<Parsed, ParseError> {
        let body = utf8(body)?;
        let mut parsed = Parsed::default();
        let mut families = Families::default();
        let mut labels = Vec::with_capacity(16);
        let mut exemplar = Vec::new();
        let mut ended = false;
        let mut from = 0;
        while from < body.len() {
            let to = memchr::memchr(b'\n', &body.as_bytes()[from..]).map_or(body.len(), |at| from + at);
            let line = &body[from..to];
            from = to + 1;
            parsed.lines += 1;
            let outcome = if ended {
                Err("found text after # EOF".to_owned())
            } else if line == "# EOF" {
                ended = true;
                Ok(())
            } else if to == body.len() {
                Err("the body was cut short".to_owned())
            } else if let Some(rest) = line.strip_prefix("# ") {
                families.descriptor(rest)
            } else if line.is_empty() {
                Err("empty lines are not allowed".to_owned())
            } else {
                sample(line, &mut families, &mut labels, &mut exemplar).map(|(name, value, timestamp)| {
                    emit(on_sample, name, &labels, value, timestamp);
                    parsed.samples += 1;
                })
            };
            if let Err(cause) = outcome {
                return Err(ParseError::new(parsed.lines, cause));
            }
        }
        if ended {
            Ok(parsed)
        } else {
            Err(ParseError {
                line: parsed.lines + 1,
                cause: "# EOF is missing: the body was cut short".to_owned(),
            })
        }
    }
}

fn sample<'b>(
    line: &'b str,
    families: &mut Families<'b>,
    labels: &mut Vec<Label<'b>>,
    exemplar: &mut Vec<Label<'b>>,
) -> Result<(&'b str, f64, Option<i64>), String> {
    let mut cursor = Cursor::new(line, Blanks::Single);
    let (name, value) = cursor.series(labels)?;
    families.sample(name)?;
    let mut timestamp = None;
    if cursor.is_done() {
        return Ok((name, value, None));
    }
    if !cursor.separator() {
        return Err(format!(
            "metric {name}: expected a blank, found {}",
            cursor.rest_shown()
        ));
    }
    if cursor.byte() != Some(b'#') {
        timestamp = Some(
            seconds(cursor.token())
                .ok_or_else(|| format!("metric {name}: the timestamp is not a number of seconds"))?,
        );
        if cursor.is_done() {
            return Ok((name, value, timestamp));
        }
        if !cursor.separator() || cursor.byte() != Some(b'#') {
            return Err(format!(
                "metric {name}: expected an exemplar, found {}",
                cursor.rest_shown()
            ));
        }
    }
    read_exemplar(&mut cursor, exemplar).map_err(|cause| format!("metric {name}: exemplar: {cause}"))?;
    Ok((name, value, timestamp))
}

/// `# {labels} value [timestamp]`
fn read_exemplar<'b>(cursor: &mut Cursor<'b>, scratch: &mut Vec<Label<'b>>) -> Result<(), String> {
    cursor.at += 1;
    if !cursor.separator() || cursor.byte() != Some(b'{') {
        return Err(format!("expected '{{', found {}", cursor.rest_shown()));
    }
    cursor.at += 1;
    scratch.clear();
    labels::read(cursor, false, scratch).map_err(|LabelError::Grammar(cause)| cause)?;
    let length: usize = scratch
        .iter()
        .map(|label| label.key.chars().count() + label.value.chars().count())
        .sum();
    if length > MAX_EXEMPLAR {
        return Err(format!("longer than {MAX_EXEMPLAR} characters"));
    }
    if !cursor.separator() || number(cursor.token()).is_none() {
        return Err("the value is not a number".to_owned());
    }
    if cursor.is_done() {
        return Ok(());
    }
    if !cursor.separator() || seconds(cursor.token()).is_none() || !cursor.is_done() {
        return Err("the timestamp is not a number of seconds".to_owned());
    }
    Ok(())
}

/// Seconds with decimals, as milliseconds.
fn seconds(text: &str) -> Option<i64> {
    let millis = number(text)? * 1000.0;
    // Beyond 2^53 a double no longer tells milliseconds apart; no clock is there.
    if millis.abs() < 9_007_199_254_740_992.0 {
        #[allow(clippy::cast_possible_truncation, reason = "range checked above")]
        Some(millis.round() as i64)
    } else {
        None
    }
}

/// What has been said about families so far.
#[derive(Default)]
struct Families<'b> {
    seen: HashSet<&'b str>,
    current: &'b str,
    kind: &'b str,
    said: Vec<&'b str>,
    sampled: bool,
}

impl<'b> Families<'b> {
    fn enter(&mut self, name: &'b str) -> Result<(), String> {
        if self.current != name {
            if !self.seen.insert(name) {
                return Err(format!("family {name} is interleaved with others"));
            }
            self.current = name;
            self.kind = "unknown";
            self.said.clear();
            self.sampled = false;
        }
        Ok(())
    }

    /// A line after its `# `.
    fn descriptor(&mut self, rest: &'b str) -> Result<(), String> {
        let mut cursor = Cursor::new(rest, Blanks::Single);
        let keyword = cursor.token();
        if !matches!(keyword, "TYPE" | "HELP" | "UNIT") {
            return Err(format!("'# {keyword}' is none of TYPE, HELP, UNIT, EOF"));
        }
        let named = cursor.separator().then(|| cursor.metric_name()).flatten();
        let Some(name) = named else {
            return Err(format!(
                "# {keyword}: expected a metric name, found {}",
                cursor.rest_shown()
            ));
        };
        if !cursor.separator() {
            return Err(format!(
                "# {keyword} {name}: expected a blank, found {}",
                cursor.rest_shown()
            ));
        }
        self.enter(name)?;
        if self.sampled {
            return Err(format!("# {keyword} {name} comes after samples of {name}"));
        }
        if self.said.contains(&keyword) {
            return Err(format!("# {keyword} {name} is given twice"));
        }
        self.said.push(keyword);
        let said = &rest[cursor.at..];
        match keyword {
            "TYPE" if TYPES.contains(&said) => self.kind = said,
            "TYPE" => return Err(format!("# TYPE {name}: '{said}' is none of {}", TYPES.join(", "))),
            "UNIT" if !said.is_empty() && !name.ends_with(&format!("_{said}")) => {
                return Err(format!("# UNIT {name}: the name does not end in _{said}"));
            }
            _ => {}
        }
        Ok(())
    }

    fn sample(&mut self, name: &'b str) -> Result<(), String> {
        let suffixes: &[&str] = match self.kind {
            "counter" => &["_total", "_created"],
            "info" => &["_info"],
            "summary" => &["", "_count", "_sum", "_created"],
            "histogram" => &["_bucket", "_count", "_sum", "_created"],
            "gaugehistogram" => &["_bucket", "_gcount", "_gsum"],
            _ => &[""],
        };
        let inside = name
            .strip_prefix(self.current)
            .is_some_and(|suffix| !self.current.is_empty() && suffixes.contains(&suffix));
        if !inside {
            if name == self.current {
                return Err(format!(
                    "a sample of {} {name} must end in {}",
                    self.kind,
                    suffixes.join(" or ")
                ));
            }
            self.enter(name)?;
        }
        self.sampled = true;
        Ok(())
    }
}
