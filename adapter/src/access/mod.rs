//! Who may read: identity, then an access review, both answered from short caches.
//!
//! Purpose: decides for each request whether it is served, the way a generic API server with delegated
//! authentication and authorisation does.
//! Inputs: certificate chain, headers, the attributes of the request; the ConfigMap with kube-apiserver's
//! CAs; TokenReview and SubjectAccessReview.
//! Invariants: identity is tried in the order front proxy, client certificate, bearer token, anonymous; a
//! credential that is shown and fails everywhere is 401, never anonymous; `system:masters` needs no review;
//! decisions live ten seconds; equal questions in flight are asked once; a review has two seconds and a
//! bounded number of companions.
//!
//! ```text
//!  certificate ─► identity ─┐
//!  bearer token ─► review ──┼─► user ─► masters? ─► review (cache) ─► served or 403
//!  nothing ─► anonymous ────┘
//! ```

pub mod attributes;
mod config_map;
mod identity;
mod metrics;
mod review;
mod trust;
mod user;
mod verifier;

pub use config_map::{NAME as CONFIG_MAP, NAMESPACE as CONFIG_MAP_NAMESPACE, watch};
pub use identity::PeerCertificate;
pub use metrics::Metrics;
pub use review::{Decision, KubeReviewer, ReviewError, Reviewer, Reviews};
pub use trust::{Trust, TrustError};
pub use user::User;
pub use verifier::AnyCertificate;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwapOption;
use http::{HeaderMap, header};

use self::attributes::Attributes;
use self::identity::Shown;
use crate::status::Status;

/// Why an identity was not accepted: the label of a counter, and words for a person.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// No CA of kube-apiserver signed the certificate.
    UnknownCa,
    /// Out of date, or not yet in date.
    Expired,
    /// The certificate may not identify a client (no clientAuth usage).
    WrongUsage,
    /// Verified as a front proxy, but its common name is not in the allowed list.
    NameNotAllowed,
    /// Verified as a front proxy, but it names no user.
    NoUserHeader,
    /// A client certificate without a common name.
    NoCommonName,
    /// The certificate cannot be read, or its signature is wrong.
    BadCertificate,
    /// kube-apiserver publishes no such CA.
    NotConfigured,
    /// The ConfigMap was not read yet, so no certificate can be checked.
    NotLoaded,
    /// The API server does not know the token.
    BadToken,
}

impl Reason {
    /// Label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::UnknownCa => "unknown_ca",
            Self::Expired => "expired",
            Self::WrongUsage => "wrong_usage",
            Self::NameNotAllowed => "name_not_allowed",
            Self::NoUserHeader => "no_user_header",
            Self::NoCommonName => "no_common_name",
            Self::BadCertificate => "bad_certificate",
            Self::NotConfigured => "not_configured",
            Self::NotLoaded => "not_loaded",
            Self::BadToken => "bad_token",
        }
    }

    const fn words(self) -> &'static str {
        match self {
            Self::UnknownCa => "the client certificate is signed by no CA that the API server publishes",
            Self::Expired => "the client certificate is out of date",
            Self::WrongUsage => "the client certificate lacks the extended key usage clientAuth",
            Self::NameNotAllowed => "the front proxy's common name is not in requestheader-allowed-names",
            Self::NoUserHeader => "the front proxy names no user",
            Self::NoCommonName => "the client certificate has no common name",
            Self::BadCertificate => "the client certificate cannot be verified",
            Self::NotConfigured => "the API server publishes no CA for client certificates",
            Self::NotLoaded => "the ConfigMap with the API server's CAs was not read yet",
            Self::BadToken => "the bearer token is not valid",
        }
    }

    fn of(error: &webpki::Error) -> Self {
        match error {
            webpki::Error::UnknownIssuer => Self::UnknownCa,
            webpki::Error::CertExpired { .. } | webpki::Error::CertNotValidYet { .. } => Self::Expired,
            webpki::Error::RequiredEkuNotFoundContext(_) | webpki::Error::EmptyEkuExtension => {
                Self::WrongUsage
            }
            _ => Self::BadCertificate,
        }
    }
}

/// The trust of the moment; nothing until the ConfigMap was read once.
pub type TrustStore = ArcSwapOption<Trust>;

/// Decides who may read.
pub struct Access {
    trust: Arc<TrustStore>,
    reviews: Reviews,
    metrics: Metrics,
}

impl Access {
    /// With the trust that `watch` keeps up to date.
    #[must_use]
    pub fn new(trust: Arc<TrustStore>, reviewer: Arc<dyn Reviewer>, metrics: Metrics) -> Self {
        Self {
            trust,
            reviews: Reviews::new(reviewer, metrics.clone()),
            metrics,
        }
    }

    /// The caller, if it may do what `attributes` say.
    ///
    /// # Errors
    /// 401 for credentials that do not hold, 403 for a denial, 503 or 504 where the API server cannot be asked.
    pub async fn admit(
        &self,
        peer: Option<&PeerCertificate>,
        headers: &HeaderMap,
        attributes: &Attributes,
    ) -> Result<User, Status> {
        let user = self.identify(peer, headers).await?;
        if user.is_master() {
            return Ok(user);
        }
        match self.reviews.access(&user, attributes).await {
            Ok(Decision::Allowed) => Ok(user),
            Ok(Decision::Denied(why)) => {
                let mut message = format!(
                    "forbidden: User \"{}\" cannot {}",
                    user.name,
                    attributes.describe()
                );
                if !why.is_empty() {
                    message.push_str(": ");
                    message.push_str(&why);
                }
                Err(Status::forbidden(message))
            }
            Err(error) => Err(error.status("SubjectAccessReview")),
        }
    }

    async fn identify(&self, peer: Option<&PeerCertificate>, headers: &HeaderMap) -> Result<User, Status> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or(Duration::ZERO);
        let shown = match self.trust.load_full() {
            Some(trust) => identity::shown(&trust, peer, headers, now),
            None if peer.is_some() => Shown::Rejected(Reason::NotLoaded),
            None => Shown::Nothing,
        };
        if let Shown::User(user) = shown {
            return Ok(user.authenticated());
        }
        // As in Go, a good token makes up for a certificate that says nothing here.
        if let Some(token) = bearer(headers) {
            match self.reviews.token(token).await {
                Ok(Some(user)) => return Ok(user.authenticated()),
                Ok(None) => return Err(self.reject(Reason::BadToken)),
                Err(error) => return Err(error.status("TokenReview")),
            }
        }
        match shown {
            Shown::Rejected(reason) => Err(self.reject(reason)),
            Shown::Nothing | Shown::User(_) => Ok(User::anonymous()),
        }
    }

    fn reject(&self, reason: Reason) -> Status {
        self.metrics.rejected(reason);
        tracing::debug!(reason = reason.as_str(), "identity rejected");
        match reason {
            Reason::NotLoaded => Status::unavailable(reason.words()),
            _ => Status::unauthorized(format!("Unauthorized: {}", reason.words())),
        }
    }
}

/// The bearer token, if the request carries one.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?.trim();
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

#[cfg(test)]
mod tests;
