//! Keys and certificates: making them and reading them back.
//!
//! Purpose: a CA, a serving certificate, and what can be learned from stored ones.
//! Inputs: names, a clock value, PEM.
//! Invariants: no clock of its own; what is read back is checked as a client would check it: in date for the
//! names, signed by a listed CA, key and certificate a pair.

use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use webpki::{EndEntityCert, KeyUsage};
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

use super::Error;

/// Long, because a new CA has to reach every APIService before it can be used.
pub(super) const CA_LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Short enough that renewal is an everyday event, long enough to survive weeks without an API server.
pub(super) const CERT_LIFE: Duration = Duration::from_secs(90 * 24 * 3600);
/// Clocks of other machines may be behind ours.
const BACKDATE: Duration = Duration::from_secs(3600);

/// Everything in the Secret, as PEM.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Material {
    /// CAs that clients trust: the signing one first, then earlier ones still in use.
    pub(super) ca: String,
    /// Key of the first CA.
    pub(super) ca_key: String,
    /// Serving certificate.
    pub(super) cert: String,
    /// Its key.
    pub(super) key: String,
}

/// A validity as time since the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// Start.
    pub from: Duration,
    /// End.
    pub until: Duration,
}

/// What stored material is worth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The signing CA, if certificate and key are there and belong together.
    pub ca: Option<Validity>,
    /// The serving certificate, if it and its key can be served.
    pub cert: Option<HeldCert>,
}

/// What a stored serving certificate is worth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldCert {
    /// When it is valid.
    pub validity: Validity,
    /// Whether it is for all wanted names.
    pub names_match: bool,
    /// Whether the signing CA signed it, rather than an earlier one.
    pub by_signing_ca: bool,
}

/// A CA and its key, as PEM.
pub(super) fn make_ca(now: Duration) -> Result<(String, String), Error> {
    let key = KeyPair::generate().map_err(Error::Make)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    // Two CAs of one name could be mistaken for each other where a client picks by name.
    let name = format!("forewarm-adapter-ca-{}", now.as_secs());
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    set_validity(&mut params, now, CA_LIFE);
    let certificate = params.self_signed(&key).map_err(Error::Make)?;
    Ok((certificate.pem(), key.serialize_pem()))
}

/// A serving certificate for `names` and its key, as PEM, signed by the first CA of `ca`.
pub(super) fn make_cert(
    ca: &str,
    ca_key: &str,
    names: &[String],
    now: Duration,
) -> Result<(String, String), Error> {
    let ca_key = KeyPair::from_pem(ca_key).map_err(Error::Make)?;
    let issuer = Issuer::from_ca_cert_pem(ca, ca_key).map_err(Error::Make)?;
    let key = KeyPair::generate().map_err(Error::Make)?;
    let mut params = CertificateParams::new(names.to_vec()).map_err(Error::Make)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(
        DnType::CommonName,
        names.first().map_or("forewarm-adapter", String::as_str),
    );
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    set_validity(&mut params, now, CERT_LIFE);
    let certificate = params.signed_by(&key, &issuer).map_err(Error::Make)?;
    Ok((certificate.pem(), key.serialize_pem()))
}

fn set_validity(params: &mut CertificateParams, now: Duration, life: Duration) {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    params.not_before = epoch + now.saturating_sub(BACKDATE);
    params.not_after = epoch + (now + life);
}

impl Material {
    /// What this is worth for `names`.
    pub(super) fn appraise(&self, names: &[String]) -> Held {
        let cas = certificates(&self.ca);
        let ca = cas
            .first()
            .filter(|first| is_pair(&[(*first).clone()], &self.ca_key))
            .and_then(|first| validity(first));
        Held {
            ca,
            cert: self.appraise_cert(&cas, names),
        }
    }

    fn appraise_cert(&self, cas: &[CertificateDer<'static>], names: &[String]) -> Option<HeldCert> {
        let chain = certificates(&self.cert);
        let leaf = chain.first()?;
        if !is_pair(&chain, &self.key) {
            return None;
        }
        let validity = validity(leaf)?;
        let signer = cas.iter().position(|ca| is_signed_by(leaf, ca, validity))?;
        let held = dns_names(leaf)?;
        Some(HeldCert {
            validity,
            names_match: names.iter().all(|name| held.contains(name)),
            by_signing_ca: signer == 0,
        })
    }

    /// The CA list without those out of date.
    pub(super) fn live_cas(&self, now: Duration) -> String {
        pem_sections(&self.ca)
            .filter(|section| {
                certificates(section)
                    .first()
                    .and_then(validity)
                    .is_some_and(|validity| validity.until > now)
            })
            .flat_map(|section| [section, "\n"])
            .collect()
    }
}

/// The certificates of a PEM text; broken sections end the list.
pub(super) fn certificates(pem: &str) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem.as_bytes())
        .map_while(Result::ok)
        .collect()
}

fn pem_sections(pem: &str) -> impl Iterator<Item = &str> {
    const END: &str = "-----END CERTIFICATE-----";
    pem.split_inclusive(END)
        .filter(|section| section.ends_with(END))
        .map(|section| section.trim_start_matches(['\r', '\n']))
}

/// Chain and key as rustls serves them.
pub(super) fn served(cert: &str, key: &str) -> Result<rustls::sign::CertifiedKey, Error> {
    let key =
        PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|error| Error::Unusable(error.to_string()))?;
    rustls::sign::CertifiedKey::from_der(certificates(cert), key, &rustls::crypto::ring::default_provider())
        .map_err(|error| Error::Unusable(error.to_string()))
}

fn is_pair(chain: &[CertificateDer<'static>], key: &str) -> bool {
    PrivateKeyDer::from_pem_slice(key.as_bytes()).is_ok_and(|key| {
        rustls::sign::CertifiedKey::from_der(chain.to_vec(), key, &rustls::crypto::ring::default_provider())
            .is_ok()
    })
}

fn is_signed_by(leaf: &CertificateDer<'_>, ca: &CertificateDer<'_>, validity: Validity) -> bool {
    let Ok(anchor) = webpki::anchor_from_trusted_cert(ca) else {
        return false;
    };
    EndEntityCert::try_from(leaf).is_ok_and(|leaf| {
        leaf.verify_for_usage(
            webpki::ALL_VERIFICATION_ALGS,
            &[anchor],
            &[],
            // Whether it is in date now is another question.
            UnixTime::since_unix_epoch(validity.from),
            KeyUsage::server_auth(),
            None,
            None,
        )
        .is_ok()
    })
}

fn validity(certificate: &CertificateDer<'_>) -> Option<Validity> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let since_epoch = |seconds: i64| u64::try_from(seconds).ok().map(Duration::from_secs);
    Some(Validity {
        from: since_epoch(parsed.validity().not_before.timestamp())?,
        until: since_epoch(parsed.validity().not_after.timestamp())?,
    })
}

fn dns_names(certificate: &CertificateDer<'_>) -> Option<Vec<String>> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let names = parsed.subject_alternative_name().ok()??;
    Some(
        names
            .value
            .general_names
            .iter()
            .filter_map(|name| match name {
                GeneralName::DNSName(name) => Some((*name).to_owned()),
                _ => None,
            })
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1_790_000_000);

    fn names() -> Vec<String> {
        vec![
            "forewarm-adapter.forewarm.svc".to_owned(),
            "forewarm-adapter.forewarm".to_owned(),
        ]
    }

    fn fresh() -> Material {
        let (ca, ca_key) = make_ca(NOW).unwrap();
        let (cert, key) = make_cert(&ca, &ca_key, &names(), NOW).unwrap();
        Material {
            ca,
            ca_key,
            cert,
            key,
        }
    }

    #[test]
    fn what_is_made_reads_back_as_good() {
        let held = fresh().appraise(&names());
        assert_eq!(held.ca.unwrap().until, NOW + CA_LIFE);
        let cert = held.cert.unwrap();
        assert!(cert.names_match && cert.by_signing_ca);
        assert_eq!(cert.validity.until, NOW + CERT_LIFE);
        assert!(cert.validity.from < NOW);
        assert!(
            served(&fresh().cert, &fresh().key).is_err(),
            "keys of another pair"
        );
        let one = fresh();
        assert!(served(&one.cert, &one.key).is_ok());
    }

    #[test]
    fn each_defect_is_seen() {
        let (good, other) = (fresh(), fresh());
        let wrong_names = good.appraise(&["elsewhere.svc".to_owned()]);
        assert!(!wrong_names.cert.unwrap().names_match);
        let swapped_key = Material {
            key: other.key.clone(),
            ..good.clone()
        };
        assert_eq!(swapped_key.appraise(&names()).cert, None);
        let foreign_ca = Material {
            ca: other.ca,
            ..good.clone()
        };
        let held = foreign_ca.appraise(&names());
        assert_eq!(
            (held.ca, held.cert),
            (None, None),
            "neither key nor signature fit"
        );
        for empty in [
            Material::default(),
            Material {
                cert: "x".into(),
                ..good
            },
        ] {
            assert_eq!(empty.appraise(&names()).cert, None);
        }
    }

    #[test]
    fn a_certificate_of_an_earlier_ca_is_told_apart() {
        let old = fresh();
        let (ca, ca_key) = make_ca(NOW + Duration::from_secs(60)).unwrap();
        let both = Material {
            ca: format!("{ca}{}", old.ca),
            ca_key,
            ..old
        };
        let held = both.appraise(&names());
        assert!(held.ca.is_some());
        assert!(!held.cert.unwrap().by_signing_ca);
        assert_eq!(certificates(&both.live_cas(NOW)).len(), 2);
        assert_eq!(
            certificates(&both.live_cas(NOW + CA_LIFE + Duration::from_secs(30))).len(),
            1
        );
    }
}
