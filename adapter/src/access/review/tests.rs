//! Tests of review caching against a scripted reviewer.

use super::*;
use crate::route::{Path, Query};
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Default)]
struct Scripted {
    tokens: AtomicUsize,
    accesses: AtomicUsize,
    delay: Duration,
    fail: bool,
}

impl Reviewer for Scripted {
    fn token<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<Option<User>, ReviewError>> {
        Box::pin(async move {
            self.tokens.fetch_add(1, Ordering::SeqCst);
            Ok(token.strip_prefix("good-").map(|name| User {
                name: name.to_owned(),
                ..User::default()
            }))
        })
    }

    fn access<'a>(
        &'a self,
        user: &'a User,
        _: &'a Attributes,
    ) -> BoxFuture<'a, Result<Decision, ReviewError>> {
        Box::pin(async move {
            self.accesses.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(self.delay).await;
            if self.fail {
                return Err(ReviewError::Failed("away".into()));
            }
            Ok(if user.name == "alice" {
                Decision::Allowed
            } else {
                Decision::Denied("no rule".into())
            })
        })
    }
}

fn attributes(path: &str) -> Attributes {
    Attributes::of(&Path::parse(path).unwrap(), &Query::default())
}

fn user(name: &str) -> User {
    User {
        name: name.into(),
        ..User::default()
    }
}

fn reviews(scripted: Scripted) -> (Arc<Scripted>, Reviews) {
    let scripted = Arc::new(scripted);
    let reviews = Reviews::new(Arc::clone(&scripted) as Arc<dyn Reviewer>, Metrics::default());
    (scripted, reviews)
}

#[tokio::test]
async fn a_hundred_equal_questions_are_asked_once() {
    let (scripted, reviews) = reviews(Scripted {
        delay: Duration::from_millis(20),
        ..Scripted::default()
    });
    let (alice, pods) = (user("alice"), attributes("/apis/g/v/namespaces/ns/pods/*/m"));
    let answers = futures::future::join_all((0..100).map(|_| reviews.access(&alice, &pods))).await;
    assert!(answers.iter().all(|answer| *answer == Ok(Decision::Allowed)));
    assert_eq!(scripted.accesses.load(Ordering::SeqCst), 1);

    let denied = reviews.access(&user("bob"), &pods).await;
    assert_eq!(denied, Ok(Decision::Denied("no rule".into())));
    let _again = reviews.access(&user("bob"), &pods).await;
    assert_eq!(scripted.accesses.load(Ordering::SeqCst), 2);
    let _other_metric = reviews
        .access(&alice, &attributes("/apis/g/v/namespaces/ns/pods/*/n"))
        .await;
    assert_eq!(scripted.accesses.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn the_same_name_in_other_groups_is_another_question() {
    let (scripted, reviews) = reviews(Scripted::default());
    let pods = attributes("/apis/g/v/namespaces/ns/pods/*/m");
    let mut alice = user("alice");
    let _first = reviews.access(&alice, &pods).await;
    alice.groups.push("team".into());
    let _second = reviews.access(&alice, &pods).await;
    assert_eq!(scripted.accesses.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn tokens_are_cached_whether_known_or_not() {
    let (scripted, reviews) = reviews(Scripted::default());
    for _ in 0..3 {
        assert_eq!(reviews.token("good-alice").await.unwrap().unwrap().name, "alice");
        assert_eq!(reviews.token("bad").await, Ok(None));
    }
    assert_eq!(scripted.tokens.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn a_review_has_two_seconds_and_a_failure_is_not_kept() {
    let (scripted, reviews) = reviews(Scripted {
        delay: Duration::from_secs(60),
        ..Scripted::default()
    });
    let (alice, pods) = (user("alice"), attributes("/apis/g/v/namespaces/ns/pods/*/m"));
    let started = tokio::time::Instant::now();
    let error = reviews.access(&alice, &pods).await.unwrap_err();
    assert_eq!(error, ReviewError::Timeout);
    assert_eq!(started.elapsed(), DEADLINE);
    assert_eq!(error.status("SubjectAccessReview").code(), 504);
    let _again = reviews.access(&alice, &pods).await;
    assert_eq!(scripted.accesses.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn an_api_server_out_of_reach_is_503() {
    let (_, reviews) = reviews(Scripted {
        fail: true,
        ..Scripted::default()
    });
    let error = reviews
        .access(&user("alice"), &attributes("/apis"))
        .await
        .unwrap_err();
    let status = error.status("SubjectAccessReview");
    assert_eq!(status.code(), 503);
    assert!(status.message().contains("SubjectAccessReview") && status.message().contains("away"));
}

#[test]
fn the_question_carries_the_attributes_of_a_generic_api_server() {
    let alice = User {
        name: "alice".into(),
        uid: Some("u".into()),
        groups: vec!["team".into()],
        extra: [("k".to_owned(), vec!["v".to_owned()])].into(),
    };
    let pods = spec(
        &alice,
        &attributes("/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/pods/%2A/m"),
    );
    assert_eq!(
        serde_json::to_value(&pods).unwrap(),
        serde_json::json!({
            "user": "alice", "uid": "u", "groups": ["team"], "extra": {"k": ["v"]},
            "resourceAttributes": {
                "verb": "get", "group": "custom.metrics.k8s.io", "version": "v1beta2", "namespace": "ns",
                "resource": "pods", "name": "*", "subresource": "m",
            },
        })
    );
    let external = spec(
        &alice,
        &attributes("/apis/external.metrics.k8s.io/v1beta1/namespaces/ns/m"),
    );
    let external = external.resource_attributes.unwrap();
    assert_eq!(external.verb.as_deref(), Some("list"));
    assert_eq!(external.resource.as_deref(), Some("m"));
    assert_eq!((external.name, external.subresource), (None, None));
    let document = spec(&alice, &attributes("/apis"))
        .non_resource_attributes
        .unwrap();
    assert_eq!(document.path.as_deref(), Some("/apis"));
}
