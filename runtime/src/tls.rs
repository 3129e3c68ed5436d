//! A serving certificate that is read again when its files change.
//!
//! Inputs: paths of a PEM chain and a PEM key, usually in a mounted Secret. Invariants: the files' content is
//! compared, never a file watched, because the kubelet rotates a Secret by swapping a symlink and a watch on
//! the old inode goes deaf; a pair is used only when chain and key belong together; on any failure the old
//! pair stays and the failure is counted. Trust decisions about clients are not made here.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio_util::sync::CancellationToken;

use crate::exit::chain;

/// The kubelet refreshes a mounted Secret about once a minute; reading two small files this often costs
/// nothing and keeps the old pair in use for seconds only.
pub const RELOAD_EVERY: Duration = Duration::from_secs(5);

/// Why a certificate pair cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("reading {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A file holds no usable PEM.
    #[error("{path} holds no {what}: {reason}")]
    Pem {
        /// The file.
        path: PathBuf,
        /// What was looked for.
        what: &'static str,
        /// What the parser said.
        reason: String,
    },
    /// Chain and key do not belong together, or the key type is unknown.
    #[error("{cert} and {key} are no usable pair")]
    Pair {
        /// The chain's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What rustls said.
        #[source]
        source: rustls::Error,
    },
}

/// What one look at the files led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reload {
    /// The files are as they were.
    Unchanged,
    /// A new pair is served.
    Reloaded,
    /// The files are unusable; the old pair is still served.
    Failed,
}

/// A certificate resolver whose pair follows its files.
#[derive(Debug)]
pub struct ReloadingCert {
    cert_path: PathBuf,
    key_path: PathBuf,
    current: ArcSwap<CertifiedKey>,
    seen: Mutex<Contents>,
    reloads: AtomicU64,
    failures: AtomicU64,
}

#[derive(Debug, PartialEq, Eq)]
struct Contents {
    cert: Vec<u8>,
    key: Vec<u8>,
}

impl ReloadingCert {
    /// Reads the pair for the first time.
    ///
    /// # Errors
    /// [`TlsError`] when there is no usable pair to start with.
    pub fn new(cert_path: impl Into<PathBuf>, key_path: impl Into<PathBuf>) -> Result<Arc<Self>, TlsError> {
        let (cert_path, key_path) = (cert_path.into(), key_path.into());
        let contents = read(&cert_path, &key_path)?;
        let pair = parse(&contents, &cert_path, &key_path)?;
        Ok(Arc::new(Self {
            cert_path,
            key_path,
            current: ArcSwap::from_pointee(pair),
            seen: Mutex::new(contents),
            reloads: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }))
    }

    /// The pair served now.
    #[must_use]
    pub fn current(&self) -> Arc<CertifiedKey> {
        self.current.load_full()
    }

    /// How often a new pair came into use after the first one.
    #[must_use]
    pub fn reloads(&self) -> u64 {
        self.reloads.load(Ordering::Relaxed)
    }

    /// How often changed files were unusable.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Looks at the files once. Blocking reads of two small files.
    pub fn reload(&self) -> Reload {
        match self.try_reload() {
            Ok(false) => Reload::Unchanged,
            Ok(true) => {
                self.reloads.fetch_add(1, Ordering::Relaxed);
                tracing::info!(cert = %self.cert_path.display(), "serving certificate reloaded");
                Reload::Reloaded
            }
            Err(error) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(
                    error = chain(&error),
                    "serving certificate not reloaded, keeping the old one"
                );
                Reload::Failed
            }
        }
    }

    fn try_reload(&self) -> Result<bool, TlsError> {
        let contents = read(&self.cert_path, &self.key_path)?;
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if *seen == contents {
            return Ok(false);
        }
        let pair = parse(&contents, &self.cert_path, &self.key_path)?;
        self.current.store(Arc::new(pair));
        *seen = contents;
        Ok(true)
    }

    /// Looks at the files each `every` until cancelled.
    pub async fn follow(self: Arc<Self>, every: Duration, token: CancellationToken) {
        let mut ticks = tokio::time::interval(every);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = token.cancelled() => return,
                _ = ticks.tick() => { self.reload(); }
            }
        }
    }
}

impl ResolvesServerCert for ReloadingCert {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }
}

fn read(cert: &Path, key: &Path) -> Result<Contents, TlsError> {
    let bytes = |path: &Path| {
        std::fs::read(path).map_err(|source| TlsError::Read {
            path: path.to_owned(),
            source,
        })
    };
    Ok(Contents {
        cert: bytes(cert)?,
        key: bytes(key)?,
    })
}

fn parse(contents: &Contents, cert_path: &Path, key_path: &Path) -> Result<CertifiedKey, TlsError> {
    let refused = |path: &Path, what, reason: String| TlsError::Pem {
        path: path.to_owned(),
        what,
        reason,
    };
    let certs = CertificateDer::pem_slice_iter(&contents.cert)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| refused(cert_path, "certificate", error.to_string()))?;
    if certs.is_empty() {
        return Err(refused(cert_path, "certificate", "no PEM section".to_owned()));
    }
    let key = PrivateKeyDer::from_pem_slice(&contents.key)
        .map_err(|error| refused(key_path, "private key", error.to_string()))?;
    CertifiedKey::from_der(certs, key, &rustls::crypto::ring::default_provider()).map_err(|source| {
        TlsError::Pair {
            cert: cert_path.to_owned(),
            key: key_path.to_owned(),
            source,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    struct Pem {
        cert: String,
        key: String,
    }

    fn pem(name: &str) -> Pem {
        let made = rcgen::generate_simple_self_signed(vec![name.to_owned()]).unwrap();
        Pem {
            cert: made.cert.pem(),
            key: made.signing_key.serialize_pem(),
        }
    }

    /// A Secret volume as the kubelet lays it out: files → ..data → a dated folder.
    struct SecretVolume {
        dir: tempfile::TempDir,
        version: u32,
    }

    impl SecretVolume {
        fn new(pem: &Pem) -> Self {
            let mut volume = Self {
                dir: tempfile::tempdir().unwrap(),
                version: 0,
            };
            volume.rotate(pem);
            for file in ["tls.crt", "tls.key"] {
                symlink(Path::new("..data").join(file), volume.path(file)).unwrap();
            }
            volume
        }

        fn path(&self, file: &str) -> PathBuf {
            self.dir.path().join(file)
        }

        fn rotate(&mut self, pem: &Pem) {
            let old = format!("..v{}", self.version);
            self.version += 1;
            let new = format!("..v{}", self.version);
            std::fs::create_dir(self.path(&new)).unwrap();
            std::fs::write(self.path(&new).join("tls.crt"), &pem.cert).unwrap();
            std::fs::write(self.path(&new).join("tls.key"), &pem.key).unwrap();
            symlink(&new, self.path("..data_tmp")).unwrap();
            std::fs::rename(self.path("..data_tmp"), self.path("..data")).unwrap();
            let _first_time = std::fs::remove_dir_all(self.path(&old));
        }

        fn cert(&self) -> Arc<ReloadingCert> {
            ReloadingCert::new(self.path("tls.crt"), self.path("tls.key")).unwrap()
        }
    }

    #[test]
    fn every_symlink_swap_is_noticed() {
        let mut volume = SecretVolume::new(&pem("first"));
        let cert = volume.cert();
        let first = cert.current();
        assert_eq!(cert.reload(), Reload::Unchanged);
        assert!(Arc::ptr_eq(&first, &cert.current()));

        for round in 1..=2 {
            let before = cert.current();
            volume.rotate(&pem("later"));
            assert_eq!(cert.reload(), Reload::Reloaded);
            assert_ne!(before.cert, cert.current().cert);
            assert_eq!(cert.reloads(), round);
        }
        assert_eq!(cert.failures(), 0);
    }

    #[test]
    fn an_unmatched_pair_keeps_the_old_one() {
        let mut volume = SecretVolume::new(&pem("first"));
        let cert = volume.cert();
        let before = cert.current();
        let (one, other) = (pem("one"), pem("other"));
        volume.rotate(&Pem {
            cert: one.cert.clone(),
            key: other.key,
        });
        assert_eq!(cert.reload(), Reload::Failed);
        assert!(Arc::ptr_eq(&before, &cert.current()));
        assert_eq!((cert.reloads(), cert.failures()), (0, 1));

        volume.rotate(&one);
        assert_eq!(cert.reload(), Reload::Reloaded);
    }

    #[test]
    fn vanished_or_empty_files_keep_the_old_pair() {
        let mut volume = SecretVolume::new(&pem("first"));
        let cert = volume.cert();
        volume.rotate(&Pem {
            cert: String::new(),
            key: String::new(),
        });
        assert_eq!(cert.reload(), Reload::Failed);
        std::fs::remove_file(volume.path("..data")).unwrap();
        assert_eq!(cert.reload(), Reload::Failed);
        assert_eq!(cert.failures(), 2);
    }

    #[test]
    fn a_bad_first_pair_is_an_error_with_its_path() {
        let error = ReloadingCert::new("/nonexistent/tls.crt", "/nonexistent/tls.key").unwrap_err();
        assert!(
            chain(&error).contains("/nonexistent/tls.crt"),
            "{}",
            chain(&error)
        );
    }

    #[tokio::test]
    async fn following_runs_more_than_once() {
        let mut volume = SecretVolume::new(&pem("first"));
        let cert = volume.cert();
        let token = CancellationToken::new();
        let follow = Arc::clone(&cert).follow(Duration::from_millis(1), token.clone());
        let rotate = async {
            for round in 1..=2 {
                volume.rotate(&pem("later"));
                while cert.reloads() < round {
                    tokio::task::yield_now().await;
                }
            }
            token.cancel();
        };
        tokio::time::timeout(Duration::from_secs(60), futures::future::join(follow, rotate))
            .await
            .unwrap();
    }
}
