//! Prometheus text format 0.0.4.
//!
//! Invariants: the last line ends in a line feed (a body cut short is refused); `# TYPE` and `# HELP` appear at
//! most once a family, `# TYPE` before its samples; other comments and empty lines are skipped.

use std::collections::HashSet;

use super::line::{Blanks, Cursor, emit};
use super::{Exposition, ParseError, Parsed, Sample, utf8};

/// Reader for `text/plain; version=0.0.4`.
#[derive(Debug, Clone, Copy, Default)]
pub struct PrometheusText;

const TYPES: [&str; 5] = ["counter", "gauge", "histogram", "summary", "untyped"];

impl Exposition for PrometheusText {
    fn parse<'b>(
        &self,
        body: &'b [u8],
        on_sample: &mut dyn FnMut(Sample<'_, 'b>),
    ) -> Result<Parsed, ParseError> {
        let body = utf8(body)?;
        let mut parsed = Parsed::default();
        let mut families = Families::default();
        let mut labels = Vec::with_capacity(16);
        let mut from = 0;
        for to in memchr::memchr_iter(b'\n', body.as_bytes()) {
            let line = &body[from..to];
            from = to + 1;
            parsed.lines += 1;
            let mut cursor = Cursor::new(line, Blanks::Free);
            cursor.skip_blanks();
            let outcome = match cursor.byte() {
                None => Ok(()),
                Some(b'#') => families.comment(&line[cursor.at + 1..]),
                Some(_) => cursor.series(&mut labels).and_then(|(name, value)| {
                    families.sample(name);
                    let timestamp = timestamp(&mut cursor, name)?;
                    emit(on_sample, name, &labels, value, timestamp);
                    parsed.samples += 1;
                    Ok(())
                }),
            };
            if let Err(cause) = outcome {
                return Err(ParseError::new(parsed.lines, cause));
            }
        }
        if from < body.len() {
            return Err(ParseError {
                line: parsed.lines + 1,
                cause: "the last line does not end in a line feed: the body was cut short".to_owned(),
            });
        }
        Ok(parsed)
    }
}

/// An optional timestamp in milliseconds, then the end of the line.
fn timestamp(cursor: &mut Cursor<'_>, name: &str) -> Result<Option<i64>, String> {
    cursor.skip_blanks();
    if cursor.is_done() {
        return Ok(None);
    }
    let text = cursor.token();
    let millis = text
        .parse()
        .map_err(|_| format!("metric {name}: timestamp '{text}' is not a whole number of milliseconds"))?;
    cursor.skip_blanks();
    if cursor.is_done() {
        Ok(Some(millis))
    } else {
        Err(format!(
            "metric {name}: found {} after the timestamp",
            cursor.rest_shown()
        ))
    }
}

/// What has been said about families so far.
#[derive(Default)]
struct Families<'b> {
    typed: HashSet<&'b str>,
    helped: HashSet<&'b str>,
    sampled: HashSet<&'b str>,
    current: &'b str,
}

impl<'b> Families<'b> {
    fn sample(&mut self, name: &'b str) {
        // Rows of a family follow each other, so the set is touched once a family, not once a line.
        if self.current != name {
            self.current = name;
            self.sampled.insert(name);
        }
    }

    /// A line after its `#`.
    fn comment(&mut self, rest: &'b str) -> Result<(), String> {
        let mut cursor = Cursor::new(rest, Blanks::Free);
        cursor.skip_blanks();
        let keyword = cursor.token();
        if keyword != "TYPE" && keyword != "HELP" {
            return Ok(());
        }
        cursor.skip_blanks();
        if cursor.is_done() {
            // A keyword with nothing after it is an ordinary comment.
            return Ok(());
        }
        let Some(name) = cursor.metric_name() else {
            return Err(format!(
                "# {keyword}: expected a metric name, found {}",
                cursor.rest_shown()
            ));
        };
        let separated = cursor.separator();
        if keyword == "HELP" {
            if !separated && !cursor.is_done() {
                return Err(format!(
                    "# HELP {name}: expected a blank, found {}",
                    cursor.rest_shown()
                ));
            }
            return if self.helped.insert(name) {
                Ok(())
            } else {
                Err(format!("# HELP {name} is given twice"))
            };
        }
        let kind = cursor.token();
        cursor.skip_blanks();
        if !separated || !TYPES.contains(&kind) || !cursor.is_done() {
            return Err(format!("# TYPE {name}: '{kind}' is none of {}", TYPES.join(", ")));
        }
        if !self.typed.insert(name) {
            return Err(format!("# TYPE {name} is given twice"));
        }
        if self.sampled.contains(name) {
            return Err(format!("# TYPE {name} comes after samples of {name}"));
        }
        Ok(())
    }
}
