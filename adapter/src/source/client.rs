//! The HTTP client of a source: roots, client certificate and credentials out of files.
//!
//! Invariants: files are compared by content and read again while running; a file that became unreadable
//! or wrong leaves the client before in force. Certificates are always verified. One connection a target is
//! kept open; no proxies, no redirects, no compression.

use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use base64::Engine as _;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

use crate::config::Source;

/// Builds and rebuilds a client.
#[derive(Debug)]
pub(super) struct ClientCell {
    source: Source,
    current: ArcSwap<Result<reqwest::Client, String>>,
    contents: std::sync::Mutex<Option<Contents>>,
}

/// What the files of a source hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Contents {
    roots: Option<Vec<u8>>,
    client: Option<(Vec<u8>, Vec<u8>)>,
    authorization: Option<String>,
}

impl ClientCell {
    pub(super) fn new(source: &Source) -> Arc<Self> {
        let cell = Arc::new(Self {
            source: source.clone(),
            current: ArcSwap::from_pointee(Err("not built yet".to_owned())),
            contents: std::sync::Mutex::new(None),
        });
        cell.refresh();
        cell
    }

    /// The client in force, or why there is none.
    pub(super) fn current(&self) -> Arc<Result<reqwest::Client, String>> {
        self.current.load_full()
    }

    /// Reads the files again and rebuilds the client where they changed.
    pub(super) fn refresh(&self) {
        let built = contents(&self.source).and_then(|contents| {
            let mut known = self
                .contents
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            if known.as_ref() == Some(&contents) {
                return Ok(None);
            }
            let client = build(&self.source, &contents)?;
            *known = Some(contents);
            Ok(Some(client))
        });
        match built {
            Ok(None) => {}
            Ok(Some(client)) => self.current.store(Arc::new(Ok(client))),
            Err(error) => {
                if self.current.load().is_err() {
                    self.current.store(Arc::new(Err(error)));
                } else {
                    tracing::warn!(
                        source = &*self.source.name,
                        error,
                        "credentials of a source cannot be read, the ones before stay in force"
                    );
                }
            }
        }
    }
}

fn file(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn contents(source: &Source) -> Result<Contents, String> {
    let mut contents = Contents::default();
    if let Some(tls) = &source.tls {
        contents.roots = tls.ca_file.as_deref().map(file).transpose()?;
        if let Some((cert, key)) = &tls.client {
            contents.client = Some((file(cert)?, file(key)?));
        }
    }
    let secret = |path: &Path| -> Result<String, String> {
        let text = String::from_utf8(file(path)?).map_err(|_| format!("{}: not text", path.display()))?;
        Ok(text.trim_end_matches(['\n', '\r']).to_owned())
    };
    if let Some(path) = &source.bearer_token_file {
        contents.authorization = Some(format!("Bearer {}", secret(path)?));
    } else if let Some(basic) = &source.basic_auth {
        let pair = format!("{}:{}", basic.username, secret(&basic.password_file)?);
        let encoded = base64::engine::general_purpose::STANDARD.encode(pair);
        contents.authorization = Some(format!("Basic {encoded}"));
    }
    Ok(contents)
}

fn build(source: &Source, contents: &Contents) -> Result<reqwest::Client, String> {
    let mut headers = HeaderMap::new();
    if let Some(authorization) = &contents.authorization {
        let mut value = HeaderValue::from_str(authorization)
            .map_err(|_| "the credentials hold characters that no header may have".to_owned())?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    let name = source.tls.as_ref().and_then(|tls| tls.server_name.clone());
    reqwest::Client::builder()
        .tls_backend_preconfigured(tls(contents, name)?)
        .default_headers(headers)
        .user_agent(concat!("forewarm-adapter/", env!("CARGO_PKG_VERSION")))
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .http1_only()
        .tcp_nodelay(true)
        .pool_max_idle_per_host(1)
        .connect_timeout(source.timeout)
        .build()
        .map_err(|error| format!("no client: {error}"))
}

fn tls(contents: &Contents, server_name: Option<String>) -> Result<rustls::ClientConfig, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let mut roots = RootCertStore::empty();
    if let Some(pem) = &contents.roots {
        for certificate in certificates(pem, "caFile")? {
            roots
                .add(certificate)
                .map_err(|error| format!("caFile: {error}"))?;
        }
    }
    let builder = match server_name {
        // Plain http: nothing is ever verified against the empty roots.
        _ if roots.is_empty() => builder.with_root_certificates(roots),
        None => builder.with_root_certificates(roots),
        Some(name) => {
            let inner = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| format!("caFile: {error}"))?;
            let name = ServerName::try_from(name.clone())
                .map_err(|_| format!("serverName '{name}' is not a name"))?;
            builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(Named { inner, name }))
        }
    };
    match &contents.client {
        None => Ok(builder.with_no_client_auth()),
        Some((cert, key)) => {
            let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| format!("keyFile: {error}"))?;
            builder
                .with_client_auth_cert(certificates(cert, "certFile")?, key)
                .map_err(|error| format!("certFile: {error}"))
        }
    }
}

fn certificates(pem: &[u8], field: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(format!("{field}: holds no certificate")),
        Err(error) => Err(format!("{field}: {error}")),
    }
}

/// Verifies a certificate in full, against a name that is not the address.
#[derive(Debug)]
struct Named {
    inner: Arc<WebPkiServerVerifier>,
    name: ServerName<'static>,
}

impl ServerCertVerifier for Named {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _address: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.inner
            .verify_server_cert(end_entity, intermediates, &self.name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
