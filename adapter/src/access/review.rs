//! Questions to the API server: whose token is this, may this user do that.
//!
//! Purpose: TokenReview and SubjectAccessReview behind caches, with deadlines and a cap.
//! Inputs: tokens, users, attributes.
//! Invariants: an answer, good or bad, lives ten seconds; a failure is never cached; equal questions in
//! flight become one call; a token is kept as a digest only; no call takes longer than its deadline, the
//! wait for a free slot included.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::{Api, PostParams};
use moka::future::Cache;
use tokio::sync::Semaphore;

use super::attributes::Attributes;
use super::metrics::Metrics;
use super::user::User;
use crate::status::Status;

/// As in Go's delegated authentication and authorisation: long enough that one HPA round costs one review,
/// short enough that a revoked right is gone soon.
const ANSWER_TTL: Duration = Duration::from_secs(10);
/// A reader waits for a review at most this long; the whole budget of a request is a few seconds.
const DEADLINE: Duration = Duration::from_secs(2);
/// Enough for every HPA of a large cluster in one round trip or two, small against the API server's limits.
const CONCURRENT: usize = 64;
/// Users times metrics in one cache lifetime; bounds memory against a flood of made-up names.
const CACHED: u64 = 20_000;

/// What a review says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// May.
    Allowed,
    /// May not, with the authoriser's reason if it gave one.
    Denied(String),
}

/// Why a review gave no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReviewError {
    /// The API server did not answer in time.
    #[error("the API server did not answer within {} s", DEADLINE.as_secs())]
    Timeout,
    /// This adapter may not ask.
    #[error("this adapter may not create the review: {0}")]
    Forbidden(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

impl ReviewError {
    /// The answer to the request that needed the review.
    #[must_use]
    pub fn status(&self, review: &str) -> Status {
        let message = format!("{review} failed: {self}");
        match self {
            Self::Timeout => Status::timeout(message),
            Self::Forbidden(_) | Self::Failed(_) => Status::unavailable(message),
        }
    }

    const fn label(&self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Forbidden(_) => "forbidden",
            Self::Failed(_) => "error",
        }
    }
}

/// Asks an API server.
pub trait Reviewer: Send + Sync + 'static {
    /// The user behind a token, if the API server knows one.
    fn token<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<Option<User>, ReviewError>>;

    /// Whether the user may.
    fn access<'a>(
        &'a self,
        user: &'a User,
        attributes: &'a Attributes,
    ) -> BoxFuture<'a, Result<Decision, ReviewError>>;
}

/// Reviews behind caches.
pub struct Reviews {
    reviewer: Arc<dyn Reviewer>,
    tokens: Cache<[u8; 32], Option<Arc<User>>>,
    decisions: Cache<(User, Attributes), Decision>,
    slots: Semaphore,
    metrics: Metrics,
}

impl fmt::Debug for Reviews {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reviews")
            .field("tokens", &self.tokens.entry_count())
            .field("decisions", &self.decisions.entry_count())
            .finish_non_exhaustive()
    }
}

impl Reviews {
    /// With empty caches.
    #[must_use]
    pub fn new(reviewer: Arc<dyn Reviewer>, metrics: Metrics) -> Self {
        Self {
            reviewer,
            tokens: Cache::builder()
                .max_capacity(CACHED)
                .time_to_live(ANSWER_TTL)
                .build(),
            decisions: Cache::builder()
                .max_capacity(CACHED)
                .time_to_live(ANSWER_TTL)
                .build(),
            slots: Semaphore::new(CONCURRENT),
            metrics,
        }
    }

    /// The user behind a token.
    ///
    /// # Errors
    /// Where the API server could not be asked.
    pub async fn token(&self, token: &str) -> Result<Option<User>, ReviewError> {
        let mut key = [0; 32];
        key.copy_from_slice(ring::digest::digest(&ring::digest::SHA256, token.as_bytes()).as_ref());
        let ask = self.limited("token", self.reviewer.token(token), |user| {
            if user.is_some() {
                "authenticated"
            } else {
                "unknown"
            }
        });
        let ask = async { ask.await.map(|user| user.map(Arc::new)) };
        match self.tokens.try_get_with(key, ask).await {
            Ok(user) => Ok(user.map(|user| (*user).clone())),
            Err(error) => Err((*error).clone()),
        }
    }

    /// Whether `user` may do what `attributes` say.
    ///
    /// # Errors
    /// Where the API server could not be asked.
    pub async fn access(&self, user: &User, attributes: &Attributes) -> Result<Decision, ReviewError> {
        let ask = self.limited(
            "access",
            self.reviewer.access(user, attributes),
            |decision| match decision {
                Decision::Allowed => "allowed",
                Decision::Denied(_) => "denied",
            },
        );
        self.decisions
            .try_get_with((user.clone(), attributes.clone()), ask)
            .await
            .map_err(|error| (*error).clone())
    }

    async fn limited<T>(
        &self,
        review: &'static str,
        call: BoxFuture<'_, Result<T, ReviewError>>,
        label: impl FnOnce(&T) -> &'static str,
    ) -> Result<T, ReviewError> {
        let call = async {
            let _slot = self.slots.acquire().await;
            call.await
        };
        let result = tokio::time::timeout(DEADLINE, call)
            .await
            .unwrap_or(Err(ReviewError::Timeout));
        match &result {
            Ok(answer) => self.metrics.reviewed(review, label(answer)),
            Err(error) => {
                self.metrics.reviewed(review, error.label());
                tracing::warn!(review, %error, "review failed");
            }
        }
        result
    }
}

/// Asks over a kube client.
pub struct KubeReviewer {
    client: kube::Client,
}

impl KubeReviewer {
    /// Over `client`.
    #[must_use]
    pub fn new(client: kube::Client) -> Self {
        Self { client }
    }

    async fn ask_token(&self, token: &str) -> Result<Option<User>, ReviewError> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                audiences: None,
            },
            ..TokenReview::default()
        };
        let reviews: Api<TokenReview> = Api::all(self.client.clone());
        let status = create(&reviews, &review).await?.status.unwrap_or_default();
        if status.authenticated != Some(true) {
            return Ok(None);
        }
        let user = status.user.unwrap_or_default();
        Ok(user.username.filter(|name| !name.is_empty()).map(|name| User {
            name,
            uid: user.uid.filter(|uid| !uid.is_empty()),
            groups: user.groups.unwrap_or_default(),
            extra: user.extra.unwrap_or_default(),
        }))
    }

    async fn ask_access(&self, user: &User, attributes: &Attributes) -> Result<Decision, ReviewError> {
        let review = SubjectAccessReview {
            spec: spec(user, attributes),
            ..SubjectAccessReview::default()
        };
        let reviews: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let status = create(&reviews, &review).await?.status.unwrap_or_default();
        if status.allowed && status.denied != Some(true) {
            return Ok(Decision::Allowed);
        }
        Ok(Decision::Denied(status.reason.unwrap_or_default()))
    }
}

impl Reviewer for KubeReviewer {
    fn token<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<Option<User>, ReviewError>> {
        Box::pin(self.ask_token(token))
    }

    fn access<'a>(
        &'a self,
        user: &'a User,
        attributes: &'a Attributes,
    ) -> BoxFuture<'a, Result<Decision, ReviewError>> {
        Box::pin(self.ask_access(user, attributes))
    }
}

/// Creates a review; a connection that broke under it (an API server that restarts) is tried once more.
async fn create<K>(api: &Api<K>, review: &K) -> Result<K, ReviewError>
where
    K: Clone + fmt::Debug + serde::de::DeserializeOwned + serde::Serialize,
{
    let mut result = api.create(&PostParams::default(), review).await;
    if matches!(result, Err(kube::Error::HyperError(_) | kube::Error::Service(_))) {
        result = api.create(&PostParams::default(), review).await;
    }
    result.map_err(|error| match error {
        kube::Error::Api(status) if status.code == 403 => ReviewError::Forbidden(status.message),
        other => ReviewError::Failed(forewarm_runtime::exit::chain(&other)),
    })
}

/// The question as the API server wants it.
fn spec(user: &User, attributes: &Attributes) -> SubjectAccessReviewSpec {
    let filled = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let mut spec = SubjectAccessReviewSpec {
        user: Some(user.name.clone()),
        uid: user.uid.clone(),
        groups: Some(user.groups.clone()),
        extra: (!user.extra.is_empty()).then(|| user.extra.clone()),
        ..SubjectAccessReviewSpec::default()
    };
    match attributes {
        Attributes::NonResource { path, verb } => {
            spec.non_resource_attributes = Some(NonResourceAttributes {
                path: Some(path.clone()),
                verb: Some((*verb).to_owned()),
            });
        }
        Attributes::Resource {
            verb,
            group,
            version,
            namespace,
            resource,
            name,
            subresource,
        } => {
            spec.resource_attributes = Some(ResourceAttributes {
                verb: Some((*verb).to_owned()),
                group: filled(group),
                version: filled(version),
                namespace: filled(namespace),
                resource: filled(resource),
                name: filled(name),
                subresource: filled(subresource),
                ..ResourceAttributes::default()
            });
        }
    }
    spec
}

#[cfg(test)]
mod tests;
