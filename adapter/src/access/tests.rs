//! Tests of admission as a whole: order of identities, codes, what is asked of the API server.

use super::*;
use crate::access::review::ReviewError;
use crate::route::{Path, Query};
use futures::future::BoxFuture;
use http::HeaderValue;
use std::sync::Mutex;

#[derive(Default)]
struct Asked {
    accesses: Mutex<Vec<User>>,
}

impl Reviewer for Asked {
    fn token<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<Option<User>, ReviewError>> {
        Box::pin(async move {
            Ok((token == "good").then(|| User {
                name: "robot".into(),
                groups: vec!["system:serviceaccounts".into()],
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
            self.accesses.lock().unwrap().push(user.clone());
            Ok(match user.name.as_str() {
                "robot" => Decision::Allowed,
                _ => Decision::Denied(String::new()),
            })
        })
    }
}

fn access(trust: Option<Trust>) -> (Arc<Asked>, Access) {
    let asked = Arc::new(Asked::default());
    let store = Arc::new(TrustStore::new(trust.map(Arc::new)));
    let access = Access::new(store, Arc::clone(&asked) as Arc<dyn Reviewer>, Metrics::default());
    (asked, access)
}

fn pods() -> Attributes {
    let path = "/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/pods/*/m";
    Attributes::of(&Path::parse(path).unwrap(), &Query::default())
}

fn token(text: &'static str) -> HeaderMap {
    HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static(text))])
}

fn stranger() -> PeerCertificate {
    let made = rcgen::generate_simple_self_signed(vec!["stranger".into()]).unwrap();
    PeerCertificate::new(vec![made.cert.der().clone()])
}

#[tokio::test]
async fn nothing_shown_is_anonymous_and_denied() {
    let (asked, access) = access(Some(Trust::default()));
    let mut forged = HeaderMap::new();
    forged.insert("x-remote-user", HeaderValue::from_static("admin"));
    forged.insert("x-remote-group", HeaderValue::from_static("system:masters"));
    let status = access.admit(None, &forged, &pods()).await.unwrap_err();
    assert_eq!(status.code(), 403);
    assert!(
        status.message().contains("system:anonymous"),
        "{}",
        status.message()
    );
    assert!(status.message().contains("pods/m"), "{}", status.message());
    assert_eq!(*asked.accesses.lock().unwrap(), [User::anonymous()]);
}

#[tokio::test]
async fn a_token_is_reviewed_and_its_user_authenticated() {
    let (asked, access) = access(Some(Trust::default()));
    let user = access.admit(None, &token("Bearer good"), &pods()).await.unwrap();
    assert_eq!(user.name, "robot");
    assert_eq!(user.groups, ["system:serviceaccounts", "system:authenticated"]);
    assert_eq!(asked.accesses.lock().unwrap().len(), 1);
    for bad in ["Bearer bad", "bearer  bad"] {
        let status = access.admit(None, &token(bad), &pods()).await.unwrap_err();
        assert_eq!(status.code(), 401, "{bad}");
    }
    assert_eq!(
        access
            .admit(None, &token("Basic eDp5"), &pods())
            .await
            .unwrap_err()
            .code(),
        403
    );
}

#[tokio::test]
async fn a_certificate_that_verifies_nowhere_is_401_unless_a_token_is_good() {
    let (asked, access) = access(Some(Trust::default()));
    let stranger = stranger();
    let status = access
        .admit(Some(&stranger), &HeaderMap::new(), &pods())
        .await
        .unwrap_err();
    assert_eq!(status.code(), 401);
    assert!(asked.accesses.lock().unwrap().is_empty());
    let user = access
        .admit(Some(&stranger), &token("Bearer good"), &pods())
        .await
        .unwrap();
    assert_eq!(user.name, "robot");
}

#[tokio::test]
async fn before_the_trust_is_read_certificates_are_503_and_tokens_work() {
    let (_, access) = access(None);
    let stranger = stranger();
    let status = access
        .admit(Some(&stranger), &HeaderMap::new(), &pods())
        .await
        .unwrap_err();
    assert_eq!(status.code(), 503);
    assert!(status.message().contains("not read yet"));
    assert!(access.admit(None, &token("Bearer good"), &pods()).await.is_ok());
}

#[test]
fn masters_are_masters() {
    let user = User {
        name: "system:kube-aggregator".into(),
        groups: vec!["system:masters".into()],
        ..User::default()
    };
    assert!(user.is_master());
    assert!(!User::anonymous().is_master());
}
