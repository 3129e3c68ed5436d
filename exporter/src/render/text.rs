//! The text formats: headers, samples, labels, numbers.
//!
//! Invariants: label values are escaped; a number that is not finite is never written; samples look the same in
//! both formats, only headers differ.

use forewarm_signals::{Family, Kind};

/// An exposition format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Format {
    /// Prometheus text 0.0.4.
    Text,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// What the answer says it is.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// What ends a body.
    #[must_use]
    pub const fn end(self) -> &'static [u8] {
        match self {
            Self::Text => b"",
            Self::OpenMetrics => b"# EOF\n",
        }
    }
}

/// Writes the header lines of a family.
pub fn header(out: &mut Vec<u8>, format: Format, family: &Family) {
    let (name, kind) = match format {
        Format::Text => (family.name, family.kind.text_type()),
        Format::OpenMetrics => (openmetrics_name(family), family.kind.openmetrics_type()),
    };
    line(out, &["# HELP ", name, " "]);
    help(out, format, family.help);
    line(out, &["\n# TYPE ", name, " ", kind, "\n"]);
    if let (Format::OpenMetrics, Some(unit)) = (format, family.unit) {
        line(out, &["# UNIT ", name, " ", unit.suffix(), "\n"]);
    }
}

/// OpenMetrics names a family without the suffixes that its samples carry.
fn openmetrics_name(family: &Family) -> &str {
    let suffix = match family.kind {
        Kind::Counter => "_total",
        Kind::Info => "_info",
        Kind::Gauge | Kind::Histogram => "",
    };
    family.name.strip_suffix(suffix).unwrap_or(family.name)
}

fn line(out: &mut Vec<u8>, parts: &[&str]) {
    for part in parts {
        out.extend_from_slice(part.as_bytes());
    }
}

fn help(out: &mut Vec<u8>, format: Format, text: &str) {
    for byte in text.bytes() {
        match byte {
            b'\\' => out.extend_from_slice(b"\\\\"),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'"' if format == Format::OpenMetrics => out.extend_from_slice(b"\\\""),
            other => out.push(other),
        }
    }
}

/// Writes `key="value"` pairs with commas between, the value escaped.
pub fn labels<'a>(out: &mut Vec<u8>, pairs: impl IntoIterator<Item = (&'a str, &'a str)>) {
    for (at, (key, value)) in pairs.into_iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        out.extend_from_slice(key.as_bytes());
        out.extend_from_slice(b"=\"");
        for byte in value.bytes() {
            match byte {
                b'\\' => out.extend_from_slice(b"\\\\"),
                b'"' => out.extend_from_slice(b"\\\""),
                b'\n' => out.extend_from_slice(b"\\n"),
                other => out.push(other),
            }
        }
        out.push(b'"');
    }
}

/// Largest magnitude below which a whole double is written as an integer.
const WHOLE: f64 = 1e15;

/// Writes a number. The caller has checked that it is finite.
pub fn number(out: &mut Vec<u8>, value: f64) {
    if value.abs() < WHOLE && value.fract().abs() < f64::MIN_POSITIVE {
        #[allow(clippy::cast_possible_truncation, reason = "whole and below 10^15")]
        let whole = value as i64;
        out.extend_from_slice(itoa::Buffer::new().format(whole).as_bytes());
    } else {
        out.extend_from_slice(ryu::Buffer::new().format(value).as_bytes());
    }
}

/// Samples of one family.
#[derive(Debug)]
pub struct Samples<'a> {
    out: &'a mut Vec<u8>,
    name: &'static str,
    /// Labels that every sample of the subject carries, already escaped.
    identity: &'a [u8],
}

impl<'a> Samples<'a> {
    /// Samples of a family about one subject.
    pub const fn new(out: &'a mut Vec<u8>, family: &'static Family, identity: &'a [u8]) -> Self {
        Self {
            out,
            name: family.name,
            identity,
        }
    }

    /// One sample with the identity labels alone.
    pub fn value(&mut self, value: f64) {
        self.with(&[], value);
    }

    /// One sample with further labels.
    pub fn with(&mut self, extra: &[(&str, &str)], value: f64) {
        if !value.is_finite() {
            return;
        }
        self.open(extra);
        number(self.out, value);
        self.out.push(b'\n');
    }

    /// One sample of a count, exact in all its digits.
    pub fn count(&mut self, extra: &[(&str, &str)], count: u64) {
        self.open(extra);
        self.out
            .extend_from_slice(itoa::Buffer::new().format(count).as_bytes());
        self.out.push(b'\n');
    }

    fn open(&mut self, extra: &[(&str, &str)]) {
        self.out.extend_from_slice(self.name.as_bytes());
        if !self.identity.is_empty() || !extra.is_empty() {
            self.out.push(b'{');
            self.out.extend_from_slice(self.identity);
            if !self.identity.is_empty() && !extra.is_empty() {
                self.out.push(b',');
            }
            labels(self.out, extra.iter().copied());
            self.out.push(b'}');
        }
        self.out.push(b' ');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forewarm_signals::gpu;
    use proptest::prelude::*;

    fn written(write: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = Vec::new();
        write(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn headers_follow_each_format() {
        let text = written(|out| header(out, Format::Text, &gpu::ENERGY_JOULES_TOTAL));
        assert!(
            text.contains("# TYPE gpu_energy_joules_total counter\n"),
            "{text}"
        );
        assert!(!text.contains("# UNIT"));
        let open = written(|out| header(out, Format::OpenMetrics, &gpu::ENERGY_JOULES_TOTAL));
        assert!(
            open.contains("# TYPE gpu_energy_joules counter\n# UNIT gpu_energy_joules joules\n"),
            "{open}"
        );
        let info = written(|out| header(out, Format::OpenMetrics, &gpu::INFO));
        assert!(info.contains("# TYPE gpu info\n"), "{info}");
        assert!(written(|out| header(out, Format::Text, &gpu::INFO)).contains("# TYPE gpu_info gauge\n"));
    }

    #[test]
    fn label_values_are_escaped() {
        let text = written(|out| labels(out, [("pod", "a\"b\\c\nd"), ("x", "é,}")]));
        assert_eq!(text, "pod=\"a\\\"b\\\\c\\nd\",x=\"é,}\"");
    }

    #[test]
    fn numbers_that_are_not_finite_are_left_out() {
        let text = written(|out| {
            let mut samples = Samples::new(out, &gpu::POWER_WATTS, b"gpu=\"0\"");
            samples.value(f64::NAN);
            samples.value(f64::INFINITY);
            samples.value(71.5);
            samples.with(&[("a", "b")], 3.0);
            samples.count(&[], u64::MAX);
        });
        assert_eq!(
            text,
            "gpu_power_watts{gpu=\"0\"} 71.5\ngpu_power_watts{gpu=\"0\",a=\"b\"} 3\n\
             gpu_power_watts{gpu=\"0\"} 18446744073709551615\n"
        );
    }

    /// Reads an escaped label value back, as the format's specification says.
    fn unescape(text: &str) -> String {
        let mut out = String::new();
        let mut chars = text.chars();
        while let Some(c) = chars.next() {
            match c {
                '\\' => match chars.next() {
                    Some('n') => out.push('\n'),
                    Some(other) => out.push(other),
                    None => panic!("dangling escape in {text}"),
                },
                '"' | '\n' => panic!("bare {c:?} in {text}"),
                other => out.push(other),
            }
        }
        out
    }

    proptest! {
        #[test]
        fn any_label_value_survives(value in any::<String>()) {
            let text = written(|out| labels(out, [("k", value.as_str())]));
            let inner = text.strip_prefix("k=\"").unwrap().strip_suffix('"').unwrap();
            prop_assert_eq!(unescape(inner), value);
        }

        #[test]
        fn any_finite_number_survives(value in proptest::num::f64::NORMAL | proptest::num::f64::ZERO) {
            let text = written(|out| number(out, value));
            let back: f64 = text.parse().unwrap();
            prop_assert!(back.to_bits() == value.to_bits() || (back + value).abs() < f64::MIN_POSITIVE, "{value} {text}");
        }
    }
}
