//! The rustls configuration behind `tls_server_config`.
//!
//! Inputs: PEM files. Invariants: chain and key must belong together; client certificates are verified against
//! the named CA alone.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use super::WebConfigError;
use super::file::{ClientAuth, Tls};

/// Builds the server side of TLS for the metrics port.
pub(super) fn server_config(
    web_config: &Path,
    tls: &Tls,
    http2: bool,
) -> Result<Arc<ServerConfig>, WebConfigError> {
    let fail = |field: &str, file: &Path, reason: &dyn std::fmt::Display| {
        WebConfigError::new(
            web_config,
            format!("tls_server_config.{field}: {}: {reason}", file.display()),
        )
    };
    let chain = certificates(&tls.cert).map_err(|reason| fail("cert_file", &tls.cert, &reason))?;
    let key = PrivateKeyDer::from_pem_file(&tls.key).map_err(|reason| fail("key_file", &tls.key, &reason))?;
    let versions: &[&rustls::SupportedProtocolVersion] = if tls.tls13_only {
        &[&rustls::version::TLS13]
    } else {
        rustls::ALL_VERSIONS
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(versions)
        .map_err(|reason| fail("min_version", web_config, &reason))?;
    let builder = match &tls.client_ca {
        None => builder.with_no_client_auth(),
        Some(file) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(file).map_err(|reason| fail("client_ca_file", file, &reason))? {
                roots
                    .add(certificate)
                    .map_err(|reason| fail("client_ca_file", file, &reason))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            let verifier = if tls.client_auth == ClientAuth::IfGiven {
                verifier.allow_unauthenticated()
            } else {
                verifier
            };
            builder.with_client_cert_verifier(
                verifier
                    .build()
                    .map_err(|reason| fail("client_ca_file", file, &reason))?,
            )
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(|reason| {
        fail(
            "key_file",
            &tls.key,
            &format!("does not fit {}: {reason}", tls.cert.display()),
        )
    })?;
    config.alpn_protocols = if http2 {
        vec![b"h2".to_vec(), b"http/1.1".to_vec()]
    } else {
        vec![b"http/1.1".to_vec()]
    };
    Ok(Arc::new(config))
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let found = CertificateDer::pem_file_iter(file)
        .map_err(|error| error.to_string())?
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| error.to_string())?;
    if found.is_empty() {
        Err("holds no certificate".into())
    } else {
        Ok(found)
    }
}
