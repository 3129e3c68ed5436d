//! Collects complaints while fields are read, and falls back to a default so that reading goes on.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::config::{Complaint, raw, scalar};

#[derive(Default)]
pub(super) struct Complaints {
    pub(super) errors: Vec<Complaint>,
    pub(super) warnings: Vec<Complaint>,
}

impl Complaints {
    pub(super) fn error(&mut self, path: &str, cause: impl Into<String>, cure: impl Into<String>) {
        self.errors.push(Complaint {
            path: path.to_owned(),
            cause: cause.into(),
            cure: cure.into(),
        });
    }

    pub(super) fn warn(&mut self, path: &str, cause: impl Into<String>, cure: impl Into<String>) {
        self.warnings.push(Complaint {
            path: path.to_owned(),
            cause: cause.into(),
            cure: cure.into(),
        });
    }

    /// A time, or its default.
    pub(super) fn duration(
        &mut self,
        path: &str,
        written: Option<&raw::Scalar>,
        default: Duration,
        range: &RangeInclusive<Duration>,
    ) -> Duration {
        let Some(written) = written else { return default };
        scalar::duration(written, range).unwrap_or_else(|(cause, cure)| {
            self.error(path, cause, cure);
            default
        })
    }

    pub(super) fn size(
        &mut self,
        path: &str,
        written: Option<&raw::Scalar>,
        default: usize,
        range: &RangeInclusive<usize>,
    ) -> usize {
        let Some(written) = written else { return default };
        scalar::size(written, range).unwrap_or_else(|(cause, cure)| {
            self.error(path, cause, cure);
            default
        })
    }

    pub(super) fn factor(&mut self, path: &str, written: Option<&raw::Scalar>) -> f64 {
        let Some(written) = written else { return 1.0 };
        scalar::factor(written).unwrap_or_else(|(cause, cure)| {
            self.error(path, cause, cure);
            1.0
        })
    }

    /// One word out of a closed set, or its default.
    pub(super) fn word<T: Copy>(
        &mut self,
        path: &str,
        written: Option<&str>,
        default: T,
        known: &[(&str, T)],
    ) -> T {
        let Some(written) = written else { return default };
        if let Some((_, value)) = known.iter().find(|(word, _)| *word == written) {
            return *value;
        }
        let words: Vec<_> = known.iter().map(|(word, _)| *word).collect();
        self.error(
            path,
            format!("'{written}' is not known"),
            format!("write one of: {}", words.join(", ")),
        );
        default
    }

    /// Text that must be there and not be empty.
    pub(super) fn required(&mut self, path: &str, written: Option<&String>, example: &str) -> Option<String> {
        match written.map(|text| text.trim()) {
            Some(text) if !text.is_empty() => Some(text.to_owned()),
            _ => {
                self.error(path, "is missing", format!("write {example}"));
                None
            }
        }
    }
}
