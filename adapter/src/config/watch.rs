//! Follows the file while the program runs.
//!
//! Purpose: a changed file is checked and then swapped in whole; one that does not pass leaves the old one in
//! force and says why.
//! Inputs: the file, read once a second. Content is compared, never inodes or times, because the kubelet swaps
//! a symlink several directories up.
//! Invariants: a receiver never sees an unchecked configuration; the outcome of the last reload is a metric and,
//! while it failed, a reason in the log and in [`Handle::complaint`].

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forewarm_runtime::status::Condition;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Config, Options, Rejected, load, parse};
use crate::metrics::Metrics;

/// The kubelet takes up to a minute to project a change, so a second more is not felt.
const POLL: Duration = Duration::from_secs(1);

/// The configuration in force.
#[derive(Debug, Clone)]
pub struct Handle {
    current: watch::Receiver<Arc<Config>>,
    complaint: Arc<Mutex<Option<String>>>,
}

impl Handle {
    /// A configuration that never changes.
    #[must_use]
    pub fn fixed(config: Config) -> Self {
        let (_, current) = watch::channel(Arc::new(config));
        Self {
            current,
            complaint: Arc::default(),
        }
    }

    /// The configuration in force now.
    #[must_use]
    pub fn current(&self) -> Arc<Config> {
        Arc::clone(&self.current.borrow())
    }

    /// A receiver that sees every later one.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Arc<Config>> {
        self.current.clone()
    }

    /// Why the newest content of the file is not in force, where that is so.
    #[must_use]
    pub fn complaint(&self) -> Option<String> {
        self.complaint
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// Follows one file.
#[derive(Debug)]
pub struct Watcher {
    path: PathBuf,
    options: Options,
    seen: Option<String>,
    out: watch::Sender<Arc<Config>>,
    complaint: Arc<Mutex<Option<String>>>,
    metrics: Arc<Metrics>,
    condition: Option<Condition>,
}

impl Watcher {
    /// Reads the file for the first time.
    ///
    /// # Errors
    /// Everything that is wrong with it: a program does not start on a bad file.
    pub fn new(path: &Path, options: Options, metrics: Arc<Metrics>) -> Result<(Self, Handle), Rejected> {
        let config = load(path, options)?;
        report_warnings(&config);
        let (out, current) = watch::channel(Arc::new(config));
        let complaint = Arc::default();
        metrics.config_reloaded(true);
        let handle = Handle {
            current,
            complaint: Arc::clone(&complaint),
        };
        let watcher = Self {
            path: path.to_owned(),
            options,
            seen: std::fs::read_to_string(path).ok(),
            out,
            complaint,
            metrics,
            condition: None,
        };
        Ok((watcher, handle))
    }

    /// Tells `/readyz?verbose` too while the newest content is not in force; readiness never falls for it.
    #[must_use]
    pub fn reporting(mut self, condition: Condition) -> Self {
        condition.ready();
        self.condition = Some(condition);
        self
    }

    /// Looks at the file once. Returns whether its content had changed.
    pub fn look(&mut self) -> bool {
        let file = self.path.display().to_string();
        let outcome = match std::fs::read_to_string(&self.path) {
            Ok(text) if self.seen.as_ref() == Some(&text) => return false,
            Ok(text) => {
                let outcome = parse(&file, &text, self.options).map_err(|rejected| rejected.to_string());
                self.seen = Some(text);
                outcome
            }
            Err(error) => {
                if self.seen.is_none() {
                    return false;
                }
                self.seen = None;
                Err(format!("{file}: cannot be read: {error}"))
            }
        };
        self.metrics.config_reloaded(outcome.is_ok());
        let complaint = match outcome {
            Ok(config) => {
                tracing::info!(file, "configuration reloaded");
                report_warnings(&config);
                self.out.send_replace(Arc::new(config));
                None
            }
            Err(error) => {
                tracing::error!(file, error, "configuration rejected, the old one stays in force");
                Some(error)
            }
        };
        if let Some(condition) = &self.condition {
            match &complaint {
                None => condition.ready(),
                Some(error) => condition.degraded(error.replace('\n', "; ")),
            }
        }
        *self.complaint.lock().unwrap_or_else(PoisonError::into_inner) = complaint;
        true
    }

    /// Looks at the file each second until the token is cancelled.
    ///
    /// # Errors
    /// Never.
    pub async fn follow(mut self, token: CancellationToken) -> Result<(), std::convert::Infallible> {
        let mut ticks = tokio::time::interval(POLL);
        loop {
            tokio::select! {
                () = token.cancelled() => return Ok(()),
                _ = ticks.tick() => {
                    self.look();
                }
            }
        }
    }
}

fn report_warnings(config: &Config) {
    for warning in &config.warnings {
        tracing::warn!(
            path = warning.path,
            cause = warning.cause,
            cure = warning.cure,
            "configuration warning"
        );
    }
}
