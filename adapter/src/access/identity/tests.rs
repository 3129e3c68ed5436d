//! Tests of certificates and headers with real chains.

use super::*;
use http::HeaderValue;
use proptest::prelude::*;
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};

struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Ca {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            issuer: Issuer::new(params, key),
            pem,
        }
    }

    fn issue(
        &self,
        common_name: &str,
        organizations: &[&str],
        usage: &[ExtendedKeyUsagePurpose],
    ) -> PeerCertificate {
        self.issue_with(common_name, organizations, usage, |_| {})
    }

    fn issue_with(
        &self,
        common_name: &str,
        organizations: &[&str],
        usage: &[ExtendedKeyUsagePurpose],
        change: impl FnOnce(&mut CertificateParams),
    ) -> PeerCertificate {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for organization in organizations {
            params
                .distinguished_name
                .push(DnType::OrganizationName, *organization);
        }
        if !common_name.is_empty() {
            params.distinguished_name.push(DnType::CommonName, common_name);
        }
        params.extended_key_usages = usage.to_vec();
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        PeerCertificate::new(vec![certificate.der().clone()])
    }
}

struct World {
    clients: Ca,
    proxies: Ca,
    trust: Arc<Trust>,
}

const CLIENT: [ExtendedKeyUsagePurpose; 1] = [ExtendedKeyUsagePurpose::ClientAuth];

fn world_with(uid_headers: &str) -> World {
    let (clients, proxies) = (Ca::new("clients"), Ca::new("proxies"));
    let data = [
        ("client-ca-file", clients.pem.as_str()),
        ("requestheader-client-ca-file", proxies.pem.as_str()),
        ("requestheader-allowed-names", r#"["front-proxy-client"]"#),
        ("requestheader-username-headers", r#"["X-Remote-User"]"#),
        ("requestheader-group-headers", r#"["X-Remote-Group"]"#),
        ("requestheader-extra-headers-prefix", r#"["X-Remote-Extra-"]"#),
        ("requestheader-uid-headers", uid_headers),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .collect();
    let trust = Arc::new(Trust::read(&data).unwrap());
    World {
        clients,
        proxies,
        trust,
    }
}

fn world() -> World {
    world_with("[]")
}

fn now() -> Duration {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
}

fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in pairs {
        map.append(*name, HeaderValue::from_static(value));
    }
    map
}

fn remote() -> HeaderMap {
    headers(&[
        ("x-remote-user", "hpa"),
        ("x-remote-group", "one"),
        ("x-remote-group", "two"),
        ("x-remote-extra-acme.org%2fproject", "llm"),
        ("x-remote-uid", "forged-or-not"),
    ])
}

#[test]
fn a_front_proxy_speaks_for_the_user_in_the_headers() {
    let world = world();
    let proxy = world.proxies.issue("front-proxy-client", &[], &CLIENT);
    let Shown::User(user) = shown(&world.trust, Some(&proxy), &remote(), now()) else {
        panic!("not accepted")
    };
    assert_eq!(user.name, "hpa");
    assert_eq!(user.groups, ["one", "two"]);
    assert_eq!(user.extra["acme.org/project"], ["llm"]);
    assert_eq!(user.uid, None, "no uid header is named in the ConfigMap");
}

#[test]
fn a_uid_header_counts_only_where_it_is_named() {
    let world = world_with(r#"["X-Remote-Uid"]"#);
    let proxy = world.proxies.issue("front-proxy-client", &[], &CLIENT);
    let Shown::User(user) = shown(&world.trust, Some(&proxy), &remote(), now()) else {
        panic!("not accepted")
    };
    assert_eq!(user.uid.as_deref(), Some("forged-or-not"));
}

#[test]
fn forged_headers_mean_nothing_without_a_front_proxy_certificate() {
    let world = world();
    assert_eq!(shown(&world.trust, None, &remote(), now()), Shown::Nothing);
    let alice = world.clients.issue("alice", &["team"], &CLIENT);
    let Shown::User(user) = shown(&world.trust, Some(&alice), &remote(), now()) else {
        panic!("not accepted")
    };
    assert_eq!(
        (user.name.as_str(), user.groups.as_slice()),
        ("alice", ["team".to_owned()].as_slice())
    );
    assert!(user.extra.is_empty());
}

#[test]
fn each_defect_of_a_proxy_certificate_is_rejected_by_its_own_reason() {
    let world = world();
    let stranger = Ca::new("proxies");
    for (certificate, reason) in [
        (
            world.proxies.issue("somebody-else", &[], &CLIENT),
            Reason::NameNotAllowed,
        ),
        (
            world
                .proxies
                .issue("front-proxy-client", &[], &[ExtendedKeyUsagePurpose::ServerAuth]),
            Reason::WrongUsage,
        ),
        (
            world
                .proxies
                .issue_with("front-proxy-client", &[], &CLIENT, |params| {
                    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
                    params.not_after = rcgen::date_time_ymd(2020, 2, 1);
                }),
            Reason::Expired,
        ),
        // Same names, another key: what counts is the signature.
        (
            stranger.issue("front-proxy-client", &[], &CLIENT),
            Reason::BadCertificate,
        ),
        (
            Ca::new("other").issue("front-proxy-client", &[], &CLIENT),
            Reason::UnknownCa,
        ),
        (world.clients.issue("", &["team"], &CLIENT), Reason::NoCommonName),
        (
            PeerCertificate::new(vec![CertificateDer::from(vec![1, 2, 3])]),
            Reason::BadCertificate,
        ),
    ] {
        let result = shown(&world.trust, Some(&certificate), &remote(), now());
        match (&result, reason) {
            // A wrong signature under a known name reads as one or the other.
            (Shown::Rejected(Reason::UnknownCa), Reason::BadCertificate) => {}
            _ => assert_eq!(result, Shown::Rejected(reason)),
        }
    }
}

#[test]
fn a_proxy_that_names_no_user_is_rejected() {
    let world = world();
    let proxy = world.proxies.issue("front-proxy-client", &[], &CLIENT);
    let nobody = headers(&[("x-remote-user", ""), ("x-remote-group", "system:masters")]);
    assert_eq!(
        shown(&world.trust, Some(&proxy), &nobody, now()),
        Shown::Rejected(Reason::NoUserHeader)
    );
}

#[test]
fn new_trust_ends_an_old_verdict_on_the_same_connection() {
    let (old, new) = (world(), world());
    let proxy = old.proxies.issue("front-proxy-client", &[], &CLIENT);
    assert!(matches!(
        shown(&old.trust, Some(&proxy), &remote(), now()),
        Shown::User(_)
    ));
    assert!(matches!(
        shown(&new.trust, Some(&proxy), &remote(), now()),
        Shown::Rejected(_)
    ));
    assert!(matches!(
        shown(&old.trust, Some(&proxy), &remote(), now()),
        Shown::User(_)
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_set_of_headers_makes_a_caller_without_a_proxy_certificate_somebody(
        pairs in proptest::collection::vec(("[a-z-]{1,20}", "[ -~]{0,20}"), 0..10),
    ) {
        let trust = Arc::new(Trust::default());
        let mut map = remote();
        for (name, value) in pairs {
            map.append(http::HeaderName::try_from(name).unwrap(), HeaderValue::from_str(&value).unwrap());
        }
        prop_assert_eq!(shown(&trust, None, &map, now()), Shown::Nothing);
    }
}
