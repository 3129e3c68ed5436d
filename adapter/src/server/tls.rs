//! TLS settings of the metrics API.
//!
//! Purpose: one configuration for all connections.
//! Inputs: whatever resolves the serving certificate of the moment.
//! Invariants: TLS 1.2 or newer; HTTP/2 preferred; every client is asked for a certificate and none is turned
//! away for it here.

use std::sync::Arc;

use rustls::server::ResolvesServerCert;
use rustls::version::{TLS12, TLS13};

use crate::access::AnyCertificate;

/// The configuration.
///
/// # Errors
/// Where the crypto provider supports neither protocol version.
pub fn config(certificate: Arc<dyn ResolvesServerCert>) -> Result<Arc<rustls::ServerConfig>, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Arc::new(AnyCertificate::new(Arc::clone(&provider)));
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13, &TLS12])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(certificate);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
