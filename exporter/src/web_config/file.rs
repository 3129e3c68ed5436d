//! The YAML of a web config: which fields are known, which are refused and why.
//!
//! Inputs: the file's text. Invariants: unknown fields are refused with their place; relative paths are taken
//! from the folder of the file, as exporter-toolkit does; a known field that this exporter cannot honour is an
//! error with the reason, never ignored.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use http::{HeaderMap, HeaderName, HeaderValue};
use serde::Deserialize;

use super::WebConfigError;

/// Headers exporter-toolkit allows to be set.
const ALLOWED_HEADERS: &[&str] = &[
    "strict-transport-security",
    "x-content-type-options",
    "x-xss-protection",
    "x-frame-options",
    "content-security-policy",
];

/// A checked web config.
#[derive(Debug)]
pub(super) struct File {
    pub(super) tls_server_config: Option<Tls>,
    pub(super) basic_auth_users: BTreeMap<String, String>,
    pub(super) http2: bool,
    pub(super) headers: HeaderMap,
}

/// Who must present a client certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClientAuth {
    None,
    IfGiven,
    Required,
}

/// The TLS section, paths resolved.
#[derive(Debug)]
pub(super) struct Tls {
    pub(super) cert: PathBuf,
    pub(super) key: PathBuf,
    pub(super) client_ca: Option<PathBuf>,
    pub(super) client_auth: ClientAuth,
    pub(super) tls13_only: bool,
}

impl Tls {
    /// Every file that the section names.
    pub(super) fn files(&self) -> impl Iterator<Item = PathBuf> + '_ {
        [Some(&self.cert), Some(&self.key), self.client_ca.as_ref()]
            .into_iter()
            .flatten()
            .cloned()
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    tls_server_config: Option<RawTls>,
    http_server_config: Option<RawHttp>,
    #[serde(default)]
    basic_auth_users: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTls {
    cert_file: Option<PathBuf>,
    key_file: Option<PathBuf>,
    client_auth_type: Option<String>,
    client_ca_file: Option<PathBuf>,
    min_version: Option<String>,
    max_version: Option<String>,
    #[serde(default)]
    prefer_server_cipher_suites: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawHttp {
    #[serde(default = "yes")]
    http2: bool,
    #[serde(default)]
    headers: BTreeMap<String, String>,
}

const fn yes() -> bool {
    true
}

/// Reads and checks a web config.
pub(super) fn parse(path: &Path) -> Result<File, WebConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| WebConfigError::new(path, format!("reading: {error}")))?;
    from_text(path, &text)
}

fn from_text(path: &Path, text: &str) -> Result<File, WebConfigError> {
    let fail = |reason: String| WebConfigError::new(path, reason);
    let raw: RawFile = if text.trim().is_empty() {
        RawFile {
            tls_server_config: None,
            http_server_config: None,
            basic_auth_users: BTreeMap::new(),
        }
    } else {
        serde_saphyr::from_str(text).map_err(|error| fail(error.to_string()))?
    };
    let http = raw.http_server_config.unwrap_or(RawHttp {
        http2: true,
        headers: BTreeMap::new(),
    });
    let folder = path.parent().unwrap_or(Path::new("."));
    Ok(File {
        tls_server_config: raw
            .tls_server_config
            .map(|tls| resolve_tls(folder, tls))
            .transpose()
            .map_err(fail)?,
        basic_auth_users: raw.basic_auth_users,
        http2: http.http2,
        headers: headers(&http.headers).map_err(fail)?,
    })
}

fn resolve_tls(folder: &Path, raw: RawTls) -> Result<Tls, String> {
    let wanted = |field: &str| format!("tls_server_config.{field}: missing; name a PEM file");
    let client_auth = match raw.client_auth_type.as_deref().unwrap_or("NoClientCert") {
        "NoClientCert" | "" => ClientAuth::None,
        "VerifyClientCertIfGiven" => ClientAuth::IfGiven,
        "RequireAndVerifyClientCert" => ClientAuth::Required,
        other => {
            return Err(format!(
                "tls_server_config.client_auth_type: {other} is not supported; use NoClientCert, VerifyClientCertIfGiven or RequireAndVerifyClientCert"
            ));
        }
    };
    if client_auth != ClientAuth::None && raw.client_ca_file.is_none() {
        return Err(
            "tls_server_config.client_ca_file: missing; client_auth_type asks to verify clients against it"
                .into(),
        );
    }
    if client_auth == ClientAuth::None && raw.client_ca_file.is_some() {
        return Err("tls_server_config.client_ca_file: set but client_auth_type does not use it; set RequireAndVerifyClientCert".into());
    }
    let tls13_only = match raw.min_version.as_deref().unwrap_or("TLS12") {
        "TLS12" => false,
        "TLS13" => true,
        other => {
            return Err(format!(
                "tls_server_config.min_version: {other} is not supported; use TLS12 or TLS13"
            ));
        }
    };
    match raw.max_version.as_deref().unwrap_or("TLS13") {
        "TLS13" => {}
        other => {
            return Err(format!(
                "tls_server_config.max_version: {other} is not supported; leave it out or use TLS13"
            ));
        }
    }
    // Deprecated in exporter-toolkit and without effect there since Go 1.17; accepted for old files.
    let _ = raw.prefer_server_cipher_suites;
    Ok(Tls {
        cert: folder.join(raw.cert_file.ok_or_else(|| wanted("cert_file"))?),
        key: folder.join(raw.key_file.ok_or_else(|| wanted("key_file"))?),
        client_ca: raw.client_ca_file.map(|file| folder.join(file)),
        client_auth,
        tls13_only,
    })
}

fn headers(raw: &BTreeMap<String, String>) -> Result<HeaderMap, String> {
    raw.iter()
        .map(|(name, value)| {
            let lower = name.to_ascii_lowercase();
            if !ALLOWED_HEADERS.contains(&lower.as_str()) {
                return Err(format!(
                    "http_server_config.headers.{name}: not one of {}",
                    ALLOWED_HEADERS.join(", ")
                ));
            }
            let name = HeaderName::try_from(lower).map_err(|error| error.to_string())?;
            let value = HeaderValue::try_from(value)
                .map_err(|error| format!("http_server_config.headers.{name}: {error}"))?;
            Ok((name, value))
        })
        .collect()
}
