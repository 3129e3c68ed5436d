//! Which format and encoding a client wants, from its headers.
//!
//! Invariants: whoever asks for nothing special gets text 0.0.4, uncompressed; OpenMetrics is given only to those
//! who name it in the version we speak.

use super::text::Format;

/// The format for an `Accept` header.
#[must_use]
pub fn format(accept: Option<&str>) -> Format {
    let mut best_open: f64 = 0.0;
    let mut best_text: f64 = 0.0;
    for entry in accept.unwrap_or_default().split(',') {
        let (kind, quality, version) = parse(entry);
        match (kind.as_str(), version.as_deref()) {
            ("application/openmetrics-text", None | Some("1.0.0")) => best_open = best_open.max(quality),
            ("text/plain", None | Some("0.0.4")) | ("text/*" | "*/*", _) => {
                best_text = best_text.max(quality);
            }
            _ => {}
        }
    }
    if best_open > 0.0 && best_open >= best_text {
        Format::OpenMetrics
    } else {
        Format::Text
    }
}

/// Whether an `Accept-Encoding` header takes gzip.
#[must_use]
pub fn takes_gzip(accept_encoding: Option<&str>) -> bool {
    let mut named = None;
    let mut any = None;
    for entry in accept_encoding.unwrap_or_default().split(',') {
        let (coding, quality, _) = parse(entry);
        match coding.as_str() {
            "gzip" | "x-gzip" => named = Some(quality > 0.0),
            "*" => any = Some(quality > 0.0),
            _ => {}
        }
    }
    named.or(any).unwrap_or(false)
}

/// Name, quality and version of one entry.
fn parse(entry: &str) -> (String, f64, Option<String>) {
    let mut parts = entry.split(';').map(str::trim);
    let name = parts.next().unwrap_or_default().to_ascii_lowercase();
    let mut quality = 1.0;
    let mut version = None;
    for part in parts {
        let Some((key, value)) = part.split_once('=') else {
            continue;
        };
        let value = value.trim().trim_matches('"');
        match key.trim().to_ascii_lowercase().as_str() {
            "q" => quality = value.parse().unwrap_or(0.0),
            "version" => version = Some(value.to_owned()),
            _ => {}
        }
    }
    (name, quality, version)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Prometheus 3 sends.
    const PROMETHEUS: &str = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
        application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,\
        text/plain;version=0.0.4;q=0.3,*/*;q=0.2";

    #[test]
    fn formats_are_negotiated() {
        assert_eq!(format(None), Format::Text);
        assert_eq!(format(Some("*/*")), Format::Text);
        assert_eq!(
            format(Some("text/html,application/xhtml+xml,*/*;q=0.8")),
            Format::Text
        );
        assert_eq!(format(Some(PROMETHEUS)), Format::OpenMetrics);
        assert_eq!(
            format(Some("application/openmetrics-text; version=1.0.0")),
            Format::OpenMetrics
        );
        assert_eq!(
            format(Some(
                "application/openmetrics-text;version=2.0.0,text/plain;q=0.1"
            )),
            Format::Text
        );
        assert_eq!(
            format(Some("application/openmetrics-text;q=0.1,text/plain;q=0.9")),
            Format::Text
        );
        assert_eq!(format(Some("application/openmetrics-text;q=0")), Format::Text);
    }

    #[test]
    fn gzip_is_given_only_to_those_who_take_it() {
        assert!(!takes_gzip(None));
        assert!(takes_gzip(Some("gzip")));
        assert!(takes_gzip(Some("deflate, GZIP;q=1.0, *;q=0.5")));
        assert!(takes_gzip(Some("*")));
        assert!(!takes_gzip(Some("gzip;q=0")));
        assert!(!takes_gzip(Some("identity")));
        assert!(!takes_gzip(Some("gzip;q=0, *")));
    }
}
