//! Basic authentication against bcrypt hashes.
//!
//! Inputs: user names with bcrypt hashes, and the `Authorization` header of a request. Invariants: a password is
//! hashed on the blocking pool and at most [`AT_ONCE`] at a time, so a flood of guesses cannot starve scrapes;
//! the password that was accepted for a user is remembered, because bcrypt at cost 10 takes about 70 ms and a
//! scraper sends the same one each time; an unknown user costs as much as a wrong password.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine as _;
use http::{HeaderMap, header};
use tokio::sync::Semaphore;

/// Passwords checked at the same time; further requests are told to come back.
const AT_ONCE: usize = 2;

/// Why a request may not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// No credentials, or wrong ones: 401.
    #[error("wrong or missing credentials")]
    Unauthorized,
    /// Too many passwords are being checked: 503.
    #[error("too many logins at once")]
    Busy,
}

#[derive(Debug)]
struct User {
    hash: String,
    accepted: Mutex<Option<Vec<u8>>>,
}

/// Users who may read.
#[derive(Debug)]
pub(super) struct BasicAuth {
    users: BTreeMap<String, Arc<User>>,
    checks: Arc<Semaphore>,
}

impl BasicAuth {
    pub(super) fn new(users: BTreeMap<String, String>) -> Result<Self, String> {
        let users = users
            .into_iter()
            .map(|(name, hash)| {
                hash.parse::<bcrypt::HashParts>().map_err(|error| {
                    format!("basic_auth_users.{name}: not a bcrypt hash ({error}); make one with htpasswd -nBC 10 {name}")
                })?;
                Ok((name, Arc::new(User { hash, accepted: Mutex::new(None) })))
            })
            .collect::<Result<_, String>>()?;
        Ok(Self {
            users,
            checks: Arc::new(Semaphore::new(AT_ONCE)),
        })
    }

    pub(super) async fn check(&self, headers: &HeaderMap) -> Result<(), Denied> {
        if self.users.is_empty() {
            return Ok(());
        }
        let (name, password) = credentials(headers).ok_or(Denied::Unauthorized)?;
        let known = self.users.get(&name).cloned();
        if let Some(user) = &known
            && user
                .accepted
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .as_deref()
                .is_some_and(|old| same(old, &password))
        {
            return Ok(());
        }
        let permit = Arc::clone(&self.checks)
            .try_acquire_owned()
            .map_err(|_| Denied::Busy)?;
        // An unknown user is checked against somebody's hash, so that names cannot be told apart by time.
        let Some(user) = known.clone().or_else(|| self.users.values().next().cloned()) else {
            return Err(Denied::Unauthorized);
        };
        let verified = tokio::task::spawn_blocking(move || {
            let good = bcrypt::verify(&password, &user.hash).unwrap_or(false);
            drop(permit);
            good.then_some((user, password))
        });
        match (verified.await, known) {
            (Ok(Some((user, password))), Some(_)) => {
                *user.accepted.lock().unwrap_or_else(PoisonError::into_inner) = Some(password);
                Ok(())
            }
            _ => Err(Denied::Unauthorized),
        }
    }
}

fn credentials(headers: &HeaderMap) -> Option<(String, Vec<u8>)> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, encoded) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = base64::engine::general_purpose::STANDARD
        .decode(encoded.trim())
        .ok()?;
    let colon = decoded.iter().position(|byte| *byte == b':')?;
    let name = String::from_utf8(decoded.get(..colon)?.to_vec()).ok()?;
    Some((name, decoded.get(colon + 1..)?.to_vec()))
}

/// Compares in time that depends on the lengths only.
fn same(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len()
        && left
            .iter()
            .zip(right)
            .fold(0_u8, |differ, (a, b)| differ | (a ^ b))
            == 0
}
