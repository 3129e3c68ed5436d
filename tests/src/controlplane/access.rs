//! How to reach the API server: clients and kubeconfigs for any identity, and a way in from outside.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Context as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kube::Client;
use kube::config::{AuthInfo, Config, Kubeconfig};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};

use super::certs::Pair;

/// Address and trust anchor of the API server.
#[derive(Debug, Clone)]
pub struct Access {
    /// Its address.
    pub address: Ipv4Addr,
    /// Its port.
    pub port: u16,
    /// The cluster CA, PEM.
    pub ca: String,
}

impl Access {
    pub(super) fn new(address: Ipv4Addr, port: u16, ca: String) -> Self {
        Self { address, port, ca }
    }

    /// Base URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://{}:{}", self.address, self.port)
    }

    /// A client with a certificate of the cluster CA.
    ///
    /// # Errors
    /// When the certificate cannot be used.
    pub fn client(&self, pair: &Pair) -> anyhow::Result<Client> {
        let kubeconfig: Kubeconfig = serde_json::from_value(self.kubeconfig(pair))?;
        let auth = kubeconfig
            .auth_infos
            .into_iter()
            .next()
            .and_then(|named| named.auth_info)
            .unwrap_or_default();
        self.client_with(auth)
    }

    /// A client with a bearer token.
    ///
    /// # Errors
    /// When the CA cannot be used.
    pub fn client_with_token(&self, token: &str) -> anyhow::Result<Client> {
        self.client_with(AuthInfo {
            token: Some(token.to_owned().into()),
            ..AuthInfo::default()
        })
    }

    fn client_with(&self, auth: AuthInfo) -> anyhow::Result<Client> {
        install_crypto();
        let uri: http::Uri = self.url().parse().context("the API server's address")?;
        let mut config = Config::new(uri);
        let anchors = rustls_pki_types::pem::PemObject::pem_slice_iter(self.ca.as_bytes())
            .map(|cert: Result<rustls_pki_types::CertificateDer<'static>, _>| cert.map(|cert| cert.to_vec()))
            .collect::<Result<Vec<_>, _>>()
            .context("the cluster CA")?;
        config.root_cert = Some(anchors);
        config.auth_info = auth;
        // Tests look at every answer; a client that retries a 503 for a minute hides it.
        config.default_retry = false;
        Ok(Client::try_from(config)?)
    }

    /// A kubeconfig (JSON, which is YAML) for a certificate.
    #[must_use]
    pub fn kubeconfig(&self, pair: &Pair) -> Value {
        self.kubeconfig_at(&format!("{}:{}", self.address, self.port), pair)
    }

    /// The same, with the API server at another `host:port`.
    #[must_use]
    pub fn kubeconfig_at(&self, at: &str, pair: &Pair) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "forewarm", "cluster": {
                "server": format!("https://{at}"),
                "certificate-authority-data": STANDARD.encode(&self.ca),
            }}],
            "users": [{"name": "user", "user": {
                "client-certificate-data": STANDARD.encode(&pair.cert),
                "client-key-data": STANDARD.encode(&pair.key),
            }}],
            "contexts": [{"name": "forewarm", "context": {"cluster": "forewarm", "user": "user"}}],
            "current-context": "forewarm",
        })
    }
}

/// Passes connections of a listener on to an address inside the private network, until the runtime ends.
#[allow(
    clippy::disallowed_methods,
    reason = "a test's forwarder: its connections end with the runtime"
)]
pub(super) fn forward(listener: TcpListener, inside: SocketAddr) {
    tokio::spawn(async move {
        while let Ok((mut outer, _)) = listener.accept().await {
            tokio::spawn(async move {
                if let Ok(mut inner) = TcpStream::connect(inside).await {
                    let _ = tokio::io::copy_bidirectional(&mut outer, &mut inner).await;
                }
            });
        }
    });
}

/// rustls needs a process-wide provider before the first client; a second install is harmless.
pub(crate) fn install_crypto() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}
