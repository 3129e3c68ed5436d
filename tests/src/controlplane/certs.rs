//! Fresh certificates and keys for one control plane.
//!
//! Two authorities, as in a real cluster: the cluster CA signs servers and users, the requestheader CA
//! signs only the certificate with which the API server proves itself to aggregated servers. One CA for
//! both would hide mistakes in an aggregated server's identity checks.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, SanType,
};

/// Name in the certificate that the API server shows to aggregated servers.
pub const FRONT_PROXY_NAME: &str = "front-proxy-client";

/// Why certificates could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A key or certificate could not be generated.
    #[error("cannot generate a certificate: {0}")]
    Generate(#[from] rcgen::Error),
    /// A file could not be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A certificate authority with its key.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl std::fmt::Debug for Authority {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Authority")
    }
}

/// A certificate and its key, both PEM.
#[derive(Debug, Clone)]
pub struct Pair {
    /// The certificate.
    pub cert: String,
    /// Its private key, PKCS#8.
    pub key: String,
}

impl Authority {
    /// A new authority.
    ///
    /// # Errors
    /// When the generator fails.
    pub fn new(name: &str) -> Result<Self, Error> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::CrlSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        Ok(Self(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?))
    }

    /// Its certificate, PEM.
    #[must_use]
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate for a user: `name` is the user, `groups` the groups.
    ///
    /// # Errors
    /// When the generator fails.
    pub fn client(&self, name: &str, groups: &[&str]) -> Result<Pair, Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        for group in groups {
            params.distinguished_name.push(DnType::OrganizationName, *group);
        }
        self.sign(params, ExtendedKeyUsagePurpose::ClientAuth)
    }

    /// A certificate for a server with these names and addresses.
    ///
    /// # Errors
    /// When a name is not a DNS name or the generator fails.
    pub fn server(&self, names: &[&str], addresses: &[Ipv4Addr]) -> Result<Pair, Error> {
        let mut params =
            CertificateParams::new(names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>())?;
        params
            .distinguished_name
            .push(DnType::CommonName, names.first().copied().unwrap_or("server"));
        params.subject_alt_names.extend(
            addresses
                .iter()
                .map(|&address| SanType::IpAddress(IpAddr::V4(address))),
        );
        self.sign(params, ExtendedKeyUsagePurpose::ServerAuth)
    }

    fn sign(&self, mut params: CertificateParams, usage: ExtendedKeyUsagePurpose) -> Result<Pair, Error> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.0)?;
        Ok(Pair {
            cert: cert.pem(),
            key: key.serialize_pem(),
        })
    }
}

/// Everything that one control plane's programs read, written under one folder.
#[derive(Debug)]
pub struct Certs {
    folder: PathBuf,
    /// The cluster CA.
    pub cluster: Authority,
    /// The requestheader CA.
    pub requestheader: Authority,
}

impl Certs {
    /// Generates and writes all files.
    ///
    /// # Errors
    /// When the generator or a write fails.
    pub fn generate(folder: &Path, address: Ipv4Addr, service_address: Ipv4Addr) -> Result<Self, Error> {
        let certs = Self {
            folder: folder.to_owned(),
            cluster: Authority::new("forewarm-test-cluster")?,
            requestheader: Authority::new("forewarm-test-requestheader")?,
        };
        fs::create_dir_all(folder).map_err(|source| Error::Write {
            path: folder.to_owned(),
            source,
        })?;
        certs.write("ca.crt", &certs.cluster.pem())?;
        certs.write("requestheader-ca.crt", &certs.requestheader.pem())?;
        let names = [
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
            "localhost",
        ];
        // 127.0.0.1: the demo's proxy for a KUBECONFIG outside the private network.
        let addresses = [address, service_address, Ipv4Addr::LOCALHOST];
        certs.write_pair("server", &certs.cluster.server(&names, &addresses)?)?;
        certs.write_pair("front-proxy", &certs.requestheader.client(FRONT_PROXY_NAME, &[])?)?;
        let signer = KeyPair::generate()?;
        certs.write("service-account.key", &signer.serialize_pem())?;
        certs.write("service-account.pub", &signer.public_key_pem())?;
        Ok(certs)
    }

    /// Path of one of the files.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn write_pair(&self, name: &str, pair: &Pair) -> Result<(), Error> {
        self.write(&format!("{name}.crt"), &pair.cert)?;
        self.write(&format!("{name}.key"), &pair.key)
    }

    fn write(&self, name: &str, content: &str) -> Result<(), Error> {
        let path = self.path(name);
        fs::write(&path, content).map_err(|source| Error::Write { path, source })
    }
}
