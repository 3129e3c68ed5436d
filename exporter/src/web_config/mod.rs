//! `--web-config`: TLS and basic authentication of the metrics port, in exporter-toolkit's file format.
//!
//! Purpose: files written for other exporters work here unchanged, or are refused with the field that does not.
//! Inputs: the YAML file and the PEM files it names. Invariants: a bad file at start ends the program with the
//! place and the cure; a bad file later keeps the old settings and is counted; whether TLS is on is fixed at
//! start, because the listener's clients would see a protocol change as garbage; the files' content is compared
//! on each look, never an inode watched. The admin port is never behind this: the kubelet's probes cannot
//! authenticate.
//!
//! Source of the format: prometheus/exporter-toolkit, docs/web-configuration.md.

mod auth;
mod file;
mod tls;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use http::HeaderMap;
use tokio_util::sync::CancellationToken;

pub use auth::Denied;

/// How often the files are looked at: the kubelet refreshes mounted Secrets about once a minute.
const RELOAD_EVERY: Duration = Duration::from_secs(5);

/// Why a web config cannot be used. Says the file, the field and the cure.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct WebConfigError {
    path: PathBuf,
    reason: String,
}

impl WebConfigError {
    fn new(path: &Path, reason: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            reason: reason.into(),
        }
    }
}

/// Settings of the metrics port that follow their file.
#[derive(Debug)]
pub struct WebConfig {
    path: PathBuf,
    current: ArcSwap<Settings>,
    seen: Mutex<Seen>,
    reloads: AtomicU64,
    failures: AtomicU64,
}

/// What the last looks found, so that one bad file is counted and told once.
#[derive(Debug)]
struct Seen {
    served: Vec<Vec<u8>>,
    refused: Option<String>,
}

#[derive(Debug)]
struct Settings {
    tls: Option<Arc<rustls::ServerConfig>>,
    auth: auth::BasicAuth,
    headers: HeaderMap,
}

impl WebConfig {
    /// Reads the file and every file it names.
    ///
    /// # Errors
    /// [`WebConfigError`] naming the file, the field and the cure.
    pub fn load(path: impl Into<PathBuf>) -> Result<Arc<Self>, WebConfigError> {
        let path = path.into();
        let (settings, contents) = read(&path)?;
        Ok(Arc::new(Self {
            path,
            current: ArcSwap::from_pointee(settings),
            seen: Mutex::new(Seen {
                served: contents,
                refused: None,
            }),
            reloads: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }))
    }

    /// What to hand to a TLS acceptor for the next connection; `None` where the port speaks plain HTTP.
    #[must_use]
    pub fn tls(&self) -> Option<Arc<rustls::ServerConfig>> {
        self.current.load().tls.clone()
    }

    /// Headers that every answer carries.
    #[must_use]
    pub fn headers(&self) -> HeaderMap {
        self.current.load().headers.clone()
    }

    /// Checks the `Authorization` header of a request. Without users in the file everybody may read.
    ///
    /// # Errors
    /// [`Denied`]: 401 for missing or wrong credentials, 503 while too many passwords are being checked.
    pub async fn authorize(&self, headers: &HeaderMap) -> Result<(), Denied> {
        let settings = self.current.load_full();
        settings.auth.check(headers).await
    }

    /// How often new settings came into use after the first ones.
    #[must_use]
    pub fn reloads(&self) -> u64 {
        self.reloads.load(Ordering::Relaxed)
    }

    /// How often changed files were unusable.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Looks at the files once and swaps the settings if they changed and are good.
    pub fn reload(&self) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if contents(&self.path).is_ok_and(|contents| contents == seen.served) {
            seen.refused = None;
            return;
        }
        let outcome = read(&self.path).and_then(|(settings, contents)| {
            if settings.tls.is_some() == self.current.load().tls.is_some() {
                Ok((settings, contents))
            } else {
                Err(WebConfigError::new(
                    &self.path,
                    "tls_server_config: TLS cannot be switched on or off while running; restart the exporter",
                ))
            }
        });
        match outcome {
            Ok((settings, contents)) => {
                self.current.store(Arc::new(settings));
                *seen = Seen {
                    served: contents,
                    refused: None,
                };
                self.reloads.fetch_add(1, Ordering::Relaxed);
                tracing::info!(path = %self.path.display(), "web config reloaded");
            }
            Err(error) => {
                let error = error.to_string();
                if seen.refused.as_ref() != Some(&error) {
                    self.failures.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(error, "web config not reloaded, keeping the old one");
                    seen.refused = Some(error);
                }
            }
        }
    }

    /// Looks at the files until the program stops.
    ///
    /// # Errors
    /// None today; the type is what supervised tasks return.
    pub async fn follow(self: Arc<Self>, token: CancellationToken) -> Result<(), std::convert::Infallible> {
        let mut tick = tokio::time::interval(RELOAD_EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = token.cancelled() => return Ok(()),
                _ = tick.tick() => self.reload(),
            }
        }
    }
}

fn read(path: &Path) -> Result<(Settings, Vec<Vec<u8>>), WebConfigError> {
    let contents = contents(path)?;
    let file = file::parse(path)?;
    let tls = file
        .tls_server_config
        .as_ref()
        .map(|section| tls::server_config(path, section, file.http2))
        .transpose()?;
    let auth =
        auth::BasicAuth::new(file.basic_auth_users).map_err(|reason| WebConfigError::new(path, reason))?;
    Ok((
        Settings {
            tls,
            auth,
            headers: file.headers,
        },
        contents,
    ))
}

/// The bytes of the web config and of each file it names, to notice changes whatever way they come.
fn contents(path: &Path) -> Result<Vec<Vec<u8>>, WebConfigError> {
    let file = file::parse(path)?;
    let named = file.tls_server_config.iter().flat_map(file::Tls::files);
    std::iter::once(path.to_owned())
        .chain(named)
        .map(|name| {
            std::fs::read(&name)
                .map_err(|error| WebConfigError::new(path, format!("reading {}: {error}", name.display())))
        })
        .collect()
}

#[cfg(test)]
mod tests;
