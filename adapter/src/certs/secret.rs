//! The Secret that all replicas share.
//!
//! Purpose: reads and writes the material with optimistic locking.
//! Inputs: the Secret by name.
//! Invariants: a write succeeds only on the version that was read (or on absence); other keys, labels and the
//! type of an existing Secret stay.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ObjectMeta, PostParams};

use super::Error;
use super::material::Material;

const CA: &str = "ca.crt";
const CA_KEY: &str = "ca.key";
const CERT: &str = "tls.crt";
const KEY: &str = "tls.key";

/// The Secret as read.
pub(super) struct Stored {
    secret: Option<Secret>,
    /// Its material, empty where absent.
    pub(super) material: Material,
}

/// Outcome of a write.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// It holds our material now.
    Ours,
    /// Somebody else was faster: read again and adopt.
    Lost,
}

/// Reads the Secret.
pub(super) async fn read(api: &Api<Secret>, name: &str) -> Result<Stored, Error> {
    let secret = api
        .get_opt(name)
        .await
        .map_err(|source| refused("get", name, source))?;
    let text = |key: &str| {
        secret
            .as_ref()
            .and_then(|secret| secret.data.as_ref())
            .and_then(|data| data.get(key))
            .map(|bytes| String::from_utf8_lossy(&bytes.0).into_owned())
            .unwrap_or_default()
    };
    let material = Material {
        ca: text(CA),
        ca_key: text(CA_KEY),
        cert: text(CERT),
        key: text(KEY),
    };
    Ok(Stored { secret, material })
}

/// Writes new material over what was read.
pub(super) async fn write(
    api: &Api<Secret>,
    name: &str,
    stored: Stored,
    material: &Material,
) -> Result<Written, Error> {
    let data = BTreeMap::from([
        (CA.to_owned(), bytes(&material.ca)),
        (CA_KEY.to_owned(), bytes(&material.ca_key)),
        (CERT.to_owned(), bytes(&material.cert)),
        (KEY.to_owned(), bytes(&material.key)),
    ]);
    let (verb, result) = match stored.secret {
        Some(mut secret) => {
            // The resource version that was read travels along, so a change in between is a conflict.
            secret.data.get_or_insert_default().extend(data);
            ("update", api.replace(name, &PostParams::default(), &secret).await)
        }
        None => {
            let secret = Secret {
                metadata: ObjectMeta {
                    name: Some(name.to_owned()),
                    labels: Some(BTreeMap::from([
                        ("app.kubernetes.io/name".to_owned(), "forewarm-adapter".to_owned()),
                        ("app.kubernetes.io/part-of".to_owned(), "forewarm".to_owned()),
                    ])),
                    ..ObjectMeta::default()
                },
                type_: Some("kubernetes.io/tls".to_owned()),
                data: Some(data),
                ..Secret::default()
            };
            ("create", api.create(&PostParams::default(), &secret).await)
        }
    };
    match result {
        Ok(_) => Ok(Written::Ours),
        // Conflict, already created, or deleted in between.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(Written::Lost),
        Err(source) => Err(refused(verb, name, source)),
    }
}

fn bytes(text: &str) -> ByteString {
    ByteString(text.as_bytes().to_vec())
}

fn refused(verb: &str, name: &str, source: kube::Error) -> Error {
    Error::Api {
        action: format!("{verb} secret {name}"),
        source: Box::new(source),
    }
}
