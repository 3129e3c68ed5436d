//! Cursor over one line: names, numbers and blanks, shared by both formats.
//!
//! Invariants: positions are byte offsets into the line and always lie on character boundaries, because only
//! ASCII is ever stepped over outside of label values.

use super::labels::{self, LabelError};
use super::{Label, Sample};

/// Byte classes for names.
const NAME: u8 = 1;
const NAME_START: u8 = 2;
const LABEL: u8 = 4;
const LABEL_START: u8 = 8;

/// One table look-up a byte is what keeps a line under a microsecond.
static CLASS: [u8; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        #[allow(clippy::cast_possible_truncation, reason = "below 256")]
        let b = byte as u8;
        if b.is_ascii_alphabetic() || b == b'_' {
            table[byte] = NAME | NAME_START | LABEL | LABEL_START;
        } else if b == b':' {
            table[byte] = NAME | NAME_START;
        } else if b.is_ascii_digit() {
            table[byte] = NAME | LABEL;
        }
        byte += 1;
    }
    table
};

/// How strict blanks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Blanks {
    /// Any run of blanks and tabs between tokens, and after the last one (text 0.0.4).
    Free,
    /// Exactly one blank where one is due, none elsewhere (OpenMetrics).
    Single,
}

/// A position in a line.
#[derive(Debug)]
pub(super) struct Cursor<'b> {
    pub(super) line: &'b str,
    pub(super) at: usize,
    blanks: Blanks,
}

impl<'b> Cursor<'b> {
    pub(super) fn new(line: &'b str, blanks: Blanks) -> Self {
        Self { line, at: 0, blanks }
    }

    pub(super) fn byte(&self) -> Option<u8> {
        self.line.as_bytes().get(self.at).copied()
    }

    pub(super) fn is_done(&self) -> bool {
        self.at == self.line.len()
    }

    /// What is left, for messages: at most 20 characters.
    pub(super) fn rest_shown(&self) -> String {
        let rest = &self.line[self.at..];
        if rest.is_empty() {
            return "the end of the line".to_owned();
        }
        let mut shown: String = rest.chars().take(20).collect();
        if shown.len() < rest.len() {
            shown.push('…');
        }
        format!("'{}'", shown.escape_debug())
    }

    /// Skips blanks where any number is allowed.
    pub(super) fn skip_blanks(&mut self) {
        if self.blanks == Blanks::Free {
            while matches!(self.byte(), Some(b' ' | b'\t')) {
                self.at += 1;
            }
        }
    }

    /// Steps over the blank that separates two tokens. False where there is none.
    pub(super) fn separator(&mut self) -> bool {
        if !matches!(self.byte(), Some(b' ' | b'\t'))
            || (self.blanks == Blanks::Single && self.byte() != Some(b' '))
        {
            return false;
        }
        self.at += 1;
        self.skip_blanks();
        true
    }

    fn word(&mut self, start: u8, inner: u8) -> Option<&'b str> {
        let bytes = self.line.as_bytes();
        let from = self.at;
        if CLASS[usize::from(*bytes.get(from)?)] & start == 0 {
            return None;
        }
        let mut to = from + 1;
        while to < bytes.len() && CLASS[usize::from(bytes[to])] & inner != 0 {
            to += 1;
        }
        self.at = to;
        Some(&self.line[from..to])
    }

    /// `[a-zA-Z_:][a-zA-Z0-9_:]*`
    pub(super) fn metric_name(&mut self) -> Option<&'b str> {
        self.word(NAME_START, NAME)
    }

    /// `[a-zA-Z_][a-zA-Z0-9_]*`
    pub(super) fn label_name(&mut self) -> Option<&'b str> {
        self.word(LABEL_START, LABEL)
    }

    /// Everything up to the next blank.
    pub(super) fn token(&mut self) -> &'b str {
        let from = self.at;
        let bytes = self.line.as_bytes();
        while self.at < bytes.len() && !matches!(bytes[self.at], b' ' | b'\t') {
            self.at += 1;
        }
        &self.line[from..self.at]
    }

    /// The part of a sample that both formats share: name, labels and value.
    pub(super) fn series(&mut self, labels: &mut Vec<Label<'b>>) -> Result<(&'b str, f64), String> {
        labels.clear();
        let Some(name) = self.metric_name() else {
            return Err(if self.byte() == Some(b'{') {
                "a metric name in quotes is not part of this format".to_owned()
            } else {
                format!("expected a metric name, found {}", self.rest_shown())
            });
        };
        let mut separated = self.blanks == Blanks::Free && {
            let before = self.at;
            self.skip_blanks();
            self.at > before
        };
        if self.byte() == Some(b'{') {
            self.at += 1;
            labels::read(self, self.blanks == Blanks::Free, labels).map_err(|error| match error {
                LabelError::Grammar(cause) => format!("metric {name}: {cause}"),
            })?;
            let before = self.at;
            self.skip_blanks();
            separated = self.at > before || self.blanks == Blanks::Free;
        }
        if self.blanks == Blanks::Single {
            separated = self.separator();
        }
        if !separated {
            return Err(format!(
                "metric {name}: expected a blank before the value, found {}",
                self.rest_shown()
            ));
        }
        if self.is_done() {
            return Err(format!("metric {name}: the value is missing"));
        }
        let text = self.token();
        let value = number(text).ok_or_else(|| format!("metric {name}: value '{text}' is not a number"))?;
        Ok((name, value))
    }
}

/// A sample value: decimal, `NaN` or a signed infinity, as Go's `ParseFloat` reads them.
pub(super) fn number(text: &str) -> Option<f64> {
    let bytes = text.as_bytes();
    // Small whole numbers are most of a body; they need no general parser.
    if (1..=15).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_digit) {
        let whole = bytes.iter().fold(0_u64, |sum, b| sum * 10 + u64::from(b - b'0'));
        #[allow(
            clippy::cast_precision_loss,
            reason = "below 10^15, which a double holds exactly"
        )]
        return Some(whole as f64);
    }
    text.parse().ok()
}

/// Hands a finished sample out.
pub(super) fn emit<'b>(
    on_sample: &mut dyn FnMut(Sample<'_, 'b>),
    name: &'b str,
    labels: &[Label<'b>],
    value: f64,
    timestamp_ms: Option<i64>,
) {
    on_sample(Sample {
        name,
        labels,
        value,
        timestamp_ms,
    });
}
