//! Unit tests of the web config: bad fields name themselves, passwords, reloads.

use std::fs;

use base64::Engine as _;
use http::{HeaderMap, HeaderValue, header};

use super::{Denied, WebConfig};

/// Lowest cost bcrypt allows, so the tests stay quick.
const COST: u32 = 4;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, text: &str) -> std::path::PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    fn pair(&self, cert: &str, key: &str) {
        let made = rcgen::generate_simple_self_signed(["exporter".to_owned()]).unwrap();
        self.write(cert, &made.cert.pem());
        self.write(key, &made.signing_key.serialize_pem());
    }
}

fn login(user: &str, password: &str) -> HeaderMap {
    let encoded = base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}"));
    HeaderMap::from_iter([(
        header::AUTHORIZATION,
        HeaderValue::try_from(format!("Basic {encoded}")).unwrap(),
    )])
}

fn users(password: &str) -> String {
    format!(
        "basic_auth_users:\n  prometheus: {}\n",
        bcrypt::hash(password, COST).unwrap()
    )
}

fn refusal(text: &str) -> String {
    let folder = Folder::new();
    WebConfig::load(folder.write("web.yaml", text))
        .unwrap_err()
        .to_string()
}

#[test]
fn bad_fields_name_themselves_and_the_cure() {
    for (text, parts) in [
        ("tls_server_confg: {}\n", &["tls_server_confg"][..]),
        (
            "tls_server_config: {key_file: k}\n",
            &["tls_server_config.cert_file", "PEM"],
        ),
        (
            "tls_server_config: {cert_file: c, key_file: k, client_auth_type: RequestClientCert}\n",
            &[
                "client_auth_type",
                "RequestClientCert",
                "RequireAndVerifyClientCert",
            ],
        ),
        (
            "tls_server_config: {cert_file: c, key_file: k, client_auth_type: RequireAndVerifyClientCert}\n",
            &["client_ca_file", "missing"],
        ),
        (
            "tls_server_config: {cert_file: c, key_file: k, min_version: TLS10}\n",
            &["min_version", "TLS12"],
        ),
        (
            "http_server_config: {headers: {Server: x}}\n",
            &["headers.Server"],
        ),
        (
            "basic_auth_users: {me: secret}\n",
            &["basic_auth_users.me", "bcrypt", "htpasswd"],
        ),
    ] {
        let message = refusal(text);
        assert!(message.contains("web.yaml"), "{message}");
        for part in parts {
            assert!(message.contains(part), "{part} not in: {message}");
        }
    }
}

#[test]
fn a_key_of_another_certificate_is_refused() {
    let folder = Folder::new();
    folder.pair("a.crt", "a.key");
    folder.pair("b.crt", "b.key");
    let path = folder.write(
        "web.yaml",
        "tls_server_config: {cert_file: a.crt, key_file: b.key}\n",
    );
    let message = WebConfig::load(path).unwrap_err().to_string();
    assert!(
        message.contains("tls_server_config.key_file") && message.contains("a.crt"),
        "{message}"
    );
}

#[tokio::test]
async fn an_empty_file_lets_everybody_read_in_plain_http() {
    let folder = Folder::new();
    let config = WebConfig::load(folder.write("web.yaml", "")).unwrap();
    assert!(config.tls().is_none());
    assert_eq!(config.authorize(&HeaderMap::new()).await, Ok(()));
}

#[tokio::test]
async fn only_the_right_password_of_the_right_user_reads() {
    let folder = Folder::new();
    let config = WebConfig::load(folder.write("web.yaml", &users("right"))).unwrap();
    assert_eq!(
        config.authorize(&HeaderMap::new()).await,
        Err(Denied::Unauthorized)
    );
    assert_eq!(
        config.authorize(&login("prometheus", "wrong")).await,
        Err(Denied::Unauthorized)
    );
    assert_eq!(
        config.authorize(&login("stranger", "right")).await,
        Err(Denied::Unauthorized)
    );
    assert_eq!(config.authorize(&login("prometheus", "right")).await, Ok(()));
    assert_eq!(
        config.authorize(&login("prometheus", "right")).await,
        Ok(()),
        "remembered"
    );
    assert_eq!(
        config.authorize(&login("prometheus", "wrong")).await,
        Err(Denied::Unauthorized),
        "after remembering"
    );
    let odd = HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static("Bearer abc"))]);
    assert_eq!(config.authorize(&odd).await, Err(Denied::Unauthorized));
}

#[tokio::test]
async fn a_bad_file_later_keeps_the_old_settings_and_is_counted() {
    let folder = Folder::new();
    let path = folder.write("web.yaml", &users("first"));
    let config = WebConfig::load(path).unwrap();

    folder.write("web.yaml", "basic_auth_users: {prometheus: nonsense}\n");
    config.reload();
    config.reload();
    assert_eq!(
        (config.reloads(), config.failures()),
        (0, 1),
        "one bad file counts once"
    );
    assert_eq!(config.authorize(&login("prometheus", "first")).await, Ok(()));

    folder.write("web.yaml", &users("second"));
    config.reload();
    assert_eq!((config.reloads(), config.failures()), (1, 1));
    assert_eq!(
        config.authorize(&login("prometheus", "first")).await,
        Err(Denied::Unauthorized)
    );
    assert_eq!(config.authorize(&login("prometheus", "second")).await, Ok(()));
}

#[test]
fn a_rotated_certificate_is_served_and_tls_cannot_be_switched_off() {
    let folder = Folder::new();
    folder.pair("tls.crt", "tls.key");
    let path = folder.write(
        "web.yaml",
        "tls_server_config: {cert_file: tls.crt, key_file: tls.key}\n",
    );
    let config = WebConfig::load(path).unwrap();
    let before = config.tls().unwrap();

    config.reload();
    assert_eq!(config.reloads(), 0, "nothing changed");
    folder.pair("tls.crt", "tls.key");
    config.reload();
    assert_eq!(config.reloads(), 1);
    assert!(!std::sync::Arc::ptr_eq(&before, &config.tls().unwrap()));

    folder.write("web.yaml", "");
    config.reload();
    assert_eq!((config.reloads(), config.failures()), (1, 1));
    assert!(config.tls().is_some());
}
