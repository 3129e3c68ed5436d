//! Whom to believe: the ConfigMap `kube-system/extension-apiserver-authentication` as values.
//!
//! Purpose: reads the CAs, names and header names that kube-apiserver publishes for aggregated servers.
//! Inputs: the ConfigMap's data.
//! Invariants: immutable once built, swapped whole; a certificate is checked against one CA set at a time,
//! so a certificate of the client CA never passes as a front proxy; a uid header counts only where named.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, TrustAnchor, UnixTime};
use webpki::{EndEntityCert, KeyUsage};

use super::Reason;

/// What kube-apiserver says about how it and its clients prove themselves.
#[derive(Debug, Default)]
pub struct Trust {
    /// CAs of client certificates.
    pub clients: Option<Anchors>,
    /// Front proxies, that is kube-apiserver itself.
    pub front_proxy: Option<FrontProxy>,
}

/// How a front proxy proves itself and which headers it then speaks through.
#[derive(Debug)]
pub struct FrontProxy {
    /// CAs of its certificate.
    pub anchors: Anchors,
    /// Common names that may be a proxy; empty means any.
    pub allowed_names: Vec<String>,
    /// Headers that may carry the user name, the first filled one counts.
    pub username_headers: Vec<HeaderName>,
    /// Headers that may carry the uid.
    pub uid_headers: Vec<HeaderName>,
    /// Headers that carry groups, repeated.
    pub group_headers: Vec<HeaderName>,
    /// Lower-case prefixes of headers that carry further facts.
    pub extra_prefixes: Vec<String>,
}

/// A set of CA certificates.
#[derive(Debug, Clone)]
pub struct Anchors(Arc<[TrustAnchor<'static>]>);

/// Why the ConfigMap cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {cause}")]
pub struct TrustError {
    key: &'static str,
    cause: String,
}

/// Keys of the ConfigMap.
mod key {
    pub(super) const CLIENT_CA: &str = "client-ca-file";
    pub(super) const PROXY_CA: &str = "requestheader-client-ca-file";
    pub(super) const ALLOWED_NAMES: &str = "requestheader-allowed-names";
    pub(super) const USERNAME: &str = "requestheader-username-headers";
    pub(super) const UID: &str = "requestheader-uid-headers";
    pub(super) const GROUP: &str = "requestheader-group-headers";
    pub(super) const EXTRA: &str = "requestheader-extra-headers-prefix";
}

// === impl Trust ===

impl Trust {
    /// Reads the data of the ConfigMap. Absent keys mean that kube-apiserver runs without that feature.
    ///
    /// # Errors
    /// [`TrustError`] where a key is present and cannot be read.
    pub fn read(data: &BTreeMap<String, String>) -> Result<Self, TrustError> {
        let anchors = |key: &'static str| {
            data.get(key)
                .filter(|pem| !pem.trim().is_empty())
                .map(|pem| Anchors::from_pem(pem).map_err(|cause| TrustError { key, cause }))
                .transpose()
        };
        let names = |key: &'static str| match data.get(key) {
            None => Ok(Vec::new()),
            Some(text) => serde_json::from_str::<Vec<String>>(text).map_err(|error| TrustError {
                key,
                cause: format!("not a JSON list of strings: {error}"),
            }),
        };
        let headers = |key: &'static str| {
            names(key)?
                .iter()
                .map(|name| {
                    HeaderName::try_from(name.as_str()).map_err(|_| TrustError {
                        key,
                        cause: format!("\"{name}\" is no header name"),
                    })
                })
                .collect::<Result<Vec<_>, _>>()
        };
        let front_proxy = match anchors(key::PROXY_CA)? {
            None => None,
            Some(anchors) => Some(FrontProxy {
                anchors,
                allowed_names: names(key::ALLOWED_NAMES)?,
                username_headers: headers(key::USERNAME)?,
                uid_headers: headers(key::UID)?,
                group_headers: headers(key::GROUP)?,
                extra_prefixes: names(key::EXTRA)?
                    .iter()
                    .map(|prefix| prefix.to_ascii_lowercase())
                    .filter(|prefix| !prefix.is_empty())
                    .collect(),
            }),
        };
        Ok(Self {
            clients: anchors(key::CLIENT_CA)?,
            front_proxy,
        })
    }
}

// === impl Anchors ===

impl Anchors {
    /// Reads a PEM bundle.
    ///
    /// # Errors
    /// A text where a section is broken or there is none.
    pub fn from_pem(pem: &str) -> Result<Self, String> {
        let mut anchors = Vec::new();
        for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
            let certificate = certificate.map_err(|error| format!("broken PEM: {error}"))?;
            let anchor = webpki::anchor_from_trusted_cert(&certificate)
                .map_err(|error| format!("certificate {} cannot be a CA: {error}", anchors.len() + 1))?;
            anchors.push(anchor.to_owned());
        }
        if anchors.is_empty() {
            return Err("no certificate".to_owned());
        }
        Ok(Self(anchors.into()))
    }

    /// Checks that `chain` (end entity first) leads to one of these CAs, is in date, and may identify a client.
    ///
    /// # Errors
    /// The reason, for a counter and a message.
    pub fn verify(&self, chain: &[CertificateDer<'_>], now: Duration) -> Result<(), Reason> {
        let (end_entity, intermediates) = chain.split_first().ok_or(Reason::BadCertificate)?;
        EndEntityCert::try_from(end_entity)
            .map_err(|_| Reason::BadCertificate)?
            .verify_for_usage(
                webpki::ALL_VERIFICATION_ALGS,
                &self.0,
                intermediates,
                UnixTime::since_unix_epoch(now),
                KeyUsage::client_auth(),
                None,
                None,
            )
            .map(drop)
            .map_err(|error| Reason::of(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn ca() -> String {
        rcgen::generate_simple_self_signed(vec!["ca".into()])
            .unwrap()
            .cert
            .pem()
    }

    #[test]
    fn an_empty_map_trusts_nobody() {
        let trust = Trust::read(&BTreeMap::new()).unwrap();
        assert!(trust.clients.is_none() && trust.front_proxy.is_none());
    }

    #[test]
    fn headers_come_from_the_map_in_any_case() {
        let ca = ca();
        let trust = Trust::read(&data(&[
            ("requestheader-client-ca-file", &ca),
            ("requestheader-allowed-names", r#"["front-proxy-client"]"#),
            ("requestheader-username-headers", r#"["X-Remote-User"]"#),
            ("requestheader-group-headers", r#"["X-Remote-Group"]"#),
            ("requestheader-extra-headers-prefix", r#"["X-Remote-Extra-"]"#),
        ]))
        .unwrap();
        let proxy = trust.front_proxy.unwrap();
        assert_eq!(proxy.username_headers, ["x-remote-user"]);
        assert_eq!(proxy.extra_prefixes, ["x-remote-extra-"]);
        assert_eq!(proxy.allowed_names, ["front-proxy-client"]);
        assert!(proxy.uid_headers.is_empty());
    }

    #[test]
    fn a_broken_key_is_named() {
        for (key, value) in [
            (
                "client-ca-file",
                "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            ),
            ("client-ca-file", "nonsense"),
        ] {
            let error = Trust::read(&data(&[(key, value)])).unwrap_err();
            assert!(error.to_string().starts_with(key), "{error}");
        }
        let ca = ca();
        let error = Trust::read(&data(&[
            ("requestheader-client-ca-file", &ca),
            ("requestheader-allowed-names", "front-proxy-client"),
        ]))
        .unwrap_err();
        assert!(
            error.to_string().contains("requestheader-allowed-names"),
            "{error}"
        );
    }
}
