//! What a client is willing to read.
//!
//! Purpose: picks JSON, or one form of a discovery document, from `Accept` headers.
//! Inputs: header values as sent.
//! Invariants: JSON is served to everybody who does not exclude it; a header that cannot be read counts as
//! absent, because an answer is more useful than a 406.

use http::{HeaderMap, header};

/// Forms of the discovery document at `/apis`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiscoveryForm {
    /// `APIGroupDiscoveryList` of `apidiscovery.k8s.io/v2`.
    V2,
    /// The same of v2beta1, asked for by kube-apiserver 1.26 to 1.29.
    V2Beta1,
    /// Unaggregated `APIGroupList`.
    Plain,
}

/// One clause of an `Accept` header.
struct Clause<'a> {
    media: &'a str,
    parameters: Vec<(&'a str, &'a str)>,
    quality: f32,
}

impl<'a> Clause<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(';').map(str::trim);
        let media = parts.next().filter(|media| !media.is_empty())?;
        let mut quality = 1.0;
        let mut parameters = Vec::new();
        for part in parts {
            let Some((key, value)) = part.split_once('=') else {
                continue;
            };
            let (key, value) = (key.trim(), value.trim().trim_matches('"'));
            if key.eq_ignore_ascii_case("q") {
                quality = value.parse().unwrap_or(1.0);
            } else {
                parameters.push((key, value));
            }
        }
        Some(Self {
            media,
            parameters,
            quality,
        })
    }

    fn parameter(&self, key: &str) -> Option<&'a str> {
        self.parameters
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(key))
            .map(|(_, value)| *value)
    }

    /// Covers plain `application/json`.
    fn takes_json(&self) -> bool {
        self.quality > 0.0
            && self.parameter("as").is_none()
            && ["*/*", "application/*", "application/json"]
                .iter()
                .any(|media| self.media.eq_ignore_ascii_case(media))
    }

    fn discovery_form(&self) -> Option<DiscoveryForm> {
        if self.takes_json() {
            return Some(DiscoveryForm::Plain);
        }
        let aggregated = self.quality > 0.0
            && self.media.eq_ignore_ascii_case("application/json")
            && self.parameter("g") == Some("apidiscovery.k8s.io")
            && self.parameter("as") == Some("APIGroupDiscoveryList");
        match self.parameter("v") {
            Some("v2") if aggregated => Some(DiscoveryForm::V2),
            Some("v2beta1") if aggregated => Some(DiscoveryForm::V2Beta1),
            _ => None,
        }
    }
}

/// All clauses of all `Accept` headers joined; `None` where there is none to speak of.
fn joined(headers: &HeaderMap) -> Option<String> {
    let values: Vec<_> = headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .filter(|value| !value.trim().is_empty())
        .collect();
    (!values.is_empty()).then(|| values.join(","))
}

fn clauses(text: &str) -> impl Iterator<Item = Clause<'_>> {
    text.split(',').filter_map(|clause| Clause::parse(clause.trim()))
}

/// Checks that the client takes JSON.
///
/// # Errors
/// The `Accept` text where it does not.
pub fn json(headers: &HeaderMap) -> Result<(), String> {
    match joined(headers) {
        Some(text) if !clauses(&text).any(|clause| clause.takes_json()) => Err(text),
        _ => Ok(()),
    }
}

/// The form of the discovery document that the client prefers: the first it lists that can be served.
///
/// # Errors
/// The `Accept` text where none can be served.
pub fn discovery(headers: &HeaderMap) -> Result<DiscoveryForm, String> {
    let Some(text) = joined(headers) else {
        return Ok(DiscoveryForm::Plain);
    };
    let mut best: Option<(f32, DiscoveryForm)> = None;
    for clause in clauses(&text) {
        if let Some(form) = clause.discovery_form()
            && best.is_none_or(|(quality, _)| clause.quality > quality)
        {
            best = Some((clause.quality, form));
        }
    }
    best.map(|(_, form)| form).ok_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn headers(values: &[&'static str]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for value in values {
            map.append(header::ACCEPT, HeaderValue::from_static(value));
        }
        map
    }

    #[test]
    fn the_matrix_of_value_requests() {
        for accepted in [
            &[][..],
            &[""],
            &["*/*"],
            &["application/json"],
            &["application/json; charset=utf-8"],
            &["application/vnd.kubernetes.protobuf, */*"],
            &["application/vnd.kubernetes.protobuf,application/json"],
            &["application/vnd.kubernetes.protobuf", "application/json"],
            &["text/html, application/*;q=0.5"],
        ] {
            assert_eq!(json(&headers(accepted)), Ok(()), "{accepted:?}");
        }
        for refused in [
            &["application/vnd.kubernetes.protobuf"][..],
            &["application/json;q=0"],
            &["application/json;as=Table;v=v1;g=meta.k8s.io"],
            &["text/html"],
        ] {
            assert!(json(&headers(refused)).is_err(), "{refused:?}");
        }
    }

    #[test]
    fn kubectl_that_prefers_a_table_still_gets_json() {
        let accept = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
        assert_eq!(json(&headers(&[accept])), Ok(()));
    }

    #[test]
    fn discovery_takes_the_first_form_that_can_be_served() {
        const V2: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
        const BETA: &str = "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList";
        const CLIENT_GO: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,\
             application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json";
        const FUTURE: &str =
            "application/json;g=apidiscovery.k8s.io;v=v3;as=APIGroupDiscoveryList,application/json";
        const PROTOBUF: &str =
            "application/vnd.kubernetes.protobuf;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,*/*";
        assert_eq!(discovery(&headers(&[])), Ok(DiscoveryForm::Plain));
        assert_eq!(discovery(&headers(&["*/*"])), Ok(DiscoveryForm::Plain));
        assert_eq!(
            discovery(&headers(&["application/json"])),
            Ok(DiscoveryForm::Plain)
        );
        assert_eq!(discovery(&headers(&[V2])), Ok(DiscoveryForm::V2));
        assert_eq!(discovery(&headers(&[BETA])), Ok(DiscoveryForm::V2Beta1));
        assert_eq!(discovery(&headers(&[CLIENT_GO])), Ok(DiscoveryForm::V2));
        assert_eq!(discovery(&headers(&[FUTURE])), Ok(DiscoveryForm::Plain));
        assert_eq!(discovery(&headers(&[PROTOBUF])), Ok(DiscoveryForm::Plain));
        assert!(discovery(&headers(&["application/vnd.kubernetes.protobuf"])).is_err());
    }
}
