//! Who a certificate and headers say the caller is.
//!
//! Purpose: front-proxy headers, then client certificates, as a pure function of trust, chain and headers.
//! Inputs: the certificate chain whose key the TLS handshake proved, the request's headers, the trust of
//! the moment.
//! Invariants: identity headers count only with a front-proxy certificate that verifies against the
//! requestheader CA and whose name is allowed; a certificate that is shown and verifies nowhere is a failure,
//! never "anonymous".

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::HeaderMap;
use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::Reason;
use super::trust::{FrontProxy, Trust};
use super::user::User;

/// A certificate may expire while its connection lives: a verdict is good for this long.
const VERDICT_TTL: Duration = Duration::from_secs(30);

/// The certificate chain of one connection, with what was last found out about it.
#[derive(Debug)]
pub struct PeerCertificate {
    chain: Vec<CertificateDer<'static>>,
    verdict: Mutex<Option<Cached>>,
}

#[derive(Debug, Clone)]
struct Cached {
    /// Which trust the verdict is about; kept so that its address cannot be reused.
    trust: Arc<Trust>,
    at: Instant,
    verdict: Verdict,
}

/// What the chain alone says.
#[derive(Debug, Clone)]
struct Verdict {
    proxy: Result<(), Reason>,
    client: Result<User, Reason>,
}

/// What certificate and headers say together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Shown {
    /// An identity.
    User(User),
    /// Neither certificate nor identity headers that count.
    Nothing,
    /// A certificate that verifies nowhere.
    Rejected(Reason),
}

// === impl PeerCertificate ===

impl PeerCertificate {
    /// A chain, end entity first.
    #[must_use]
    pub fn new(chain: Vec<CertificateDer<'static>>) -> Self {
        Self {
            chain,
            verdict: Mutex::new(None),
        }
    }

    fn verdict(&self, trust: &Arc<Trust>, now: Duration) -> Verdict {
        let mut cached = self.verdict.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = cached.as_ref()
            && Arc::ptr_eq(&known.trust, trust)
            && known.at.elapsed() < VERDICT_TTL
        {
            return known.verdict.clone();
        }
        let verdict = judge(&self.chain, trust, now);
        *cached = Some(Cached {
            trust: Arc::clone(trust),
            at: Instant::now(),
            verdict: verdict.clone(),
        });
        verdict
    }
}

/// Who the caller is, by certificate and headers; `now` is the time since the Unix epoch.
#[must_use]
pub(super) fn shown(
    trust: &Arc<Trust>,
    peer: Option<&PeerCertificate>,
    headers: &HeaderMap,
    now: Duration,
) -> Shown {
    let Some(peer) = peer else { return Shown::Nothing };
    let verdict = peer.verdict(trust, now);
    if verdict.proxy.is_ok()
        && let Some(proxy) = &trust.front_proxy
        && let Some(user) = from_headers(proxy, headers)
    {
        return Shown::User(user);
    }
    match (verdict.client, verdict.proxy) {
        (Ok(user), _) => Shown::User(user),
        (Err(_), Ok(())) => Shown::Rejected(Reason::NoUserHeader),
        // The more telling of the two: a certificate of one CA is always unknown to the other.
        (Err(client), Err(Reason::UnknownCa | Reason::NotConfigured)) => Shown::Rejected(client),
        (Err(_), Err(proxy)) => Shown::Rejected(proxy),
    }
}

fn judge(chain: &[CertificateDer<'static>], trust: &Trust, now: Duration) -> Verdict {
    let subject = chain.first().and_then(|leaf| Subject::read(leaf));
    let proxy = trust
        .front_proxy
        .as_ref()
        .map_or(Err(Reason::NotConfigured), |proxy| {
            proxy.anchors.verify(chain, now)?;
            let name = subject
                .as_ref()
                .map_or("", |subject| subject.common_name.as_str());
            let allowed =
                proxy.allowed_names.is_empty() || proxy.allowed_names.iter().any(|known| known == name);
            if allowed {
                Ok(())
            } else {
                Err(Reason::NameNotAllowed)
            }
        });
    let client = trust
        .clients
        .as_ref()
        .map_or(Err(Reason::NotConfigured), |anchors| {
            anchors.verify(chain, now)?;
            match subject {
                Some(subject) if !subject.common_name.is_empty() => Ok(User {
                    name: subject.common_name,
                    groups: subject.organizations,
                    ..User::default()
                }),
                _ => Err(Reason::NoCommonName),
            }
        });
    Verdict { proxy, client }
}

struct Subject {
    common_name: String,
    organizations: Vec<String>,
}

impl Subject {
    fn read(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let subject = parsed.subject();
        Some(Self {
            // Of several common names the last counts, as in Go.
            common_name: subject
                .iter_common_name()
                .filter_map(|name| name.as_str().ok())
                .last()
                .unwrap_or_default()
                .to_owned(),
            organizations: subject
                .iter_organization()
                .filter_map(|name| name.as_str().ok())
                .map(str::to_owned)
                .collect(),
        })
    }
}

fn from_headers(proxy: &FrontProxy, headers: &HeaderMap) -> Option<User> {
    let text = |value: &http::HeaderValue| std::str::from_utf8(value.as_bytes()).ok().map(str::to_owned);
    let first = |names: &[http::HeaderName]| {
        names
            .iter()
            .filter_map(|name| headers.get(name))
            .filter_map(text)
            .find(|value| !value.is_empty())
    };
    let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, value) in headers {
        let key = proxy
            .extra_prefixes
            .iter()
            .find_map(|prefix| name.as_str().strip_prefix(prefix.as_str()));
        if let (Some(key), Some(value)) = (key, text(value)) {
            extra.entry(unescape(key)).or_default().push(value);
        }
    }
    Some(User {
        name: first(&proxy.username_headers)?,
        uid: first(&proxy.uid_headers),
        groups: proxy
            .group_headers
            .iter()
            .flat_map(|name| headers.get_all(name))
            .filter_map(text)
            .collect(),
        extra,
    })
}

/// Keys are percent-encoded in header names; one that is not stays as it is.
fn unescape(key: &str) -> String {
    let mut bytes = Vec::with_capacity(key.len());
    let mut rest = key.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| byte.and_then(|byte| char::from(byte).to_digit(16));
        let (Some(high), Some(low)) = (digit(rest.next()), digit(rest.next())) else {
            return key.to_owned();
        };
        bytes.push(u8::try_from(high * 16 + low).unwrap_or_default());
    }
    String::from_utf8(bytes).unwrap_or_else(|_| key.to_owned())
}

#[cfg(test)]
mod tests;
