//! Supervised tasks: each has a name, its end is an event, shutdown drains.
//!
//! Inputs: futures from the programs; SIGTERM and SIGINT. Invariants: a task that ends while the program runs
//! ends the program with the task's name and cause; after cancellation the tasks have the drain time to end;
//! these are the only calls of `tokio::spawn` in the programs.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::BoxError;
use crate::exit::{Failure, chain};

/// Only the first end matters (it stops the program); the rest are logged as they happen.
const ENDS_KEPT: usize = 1;

/// The supervised tasks of one program. Clones share them.
#[derive(Debug, Clone)]
pub struct Tasks {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    token: CancellationToken,
    tracker: TaskTracker,
    running: Mutex<BTreeMap<u64, &'static str>>,
    next_id: AtomicU64,
    ended: mpsc::Sender<Ended>,
    first_end: tokio::sync::Mutex<mpsc::Receiver<Ended>>,
}

#[derive(Debug)]
struct Ended {
    name: &'static str,
    cause: Option<BoxError>,
}

/// Why [`Tasks::run_until_stopped`] returned.
#[derive(Debug)]
pub enum Exit {
    /// A signal asked for it: SIGTERM or SIGINT.
    Signal(&'static str),
    /// The program cancelled its own token.
    Stopped,
    /// A task ended although nobody asked it to.
    TaskEnded {
        /// Its name.
        name: &'static str,
        /// Its error; none when it returned without one.
        cause: Option<BoxError>,
    },
}

/// A supervised task has ended by itself.
#[derive(Debug, thiserror::Error)]
#[error("task {name} ended: {cause}")]
pub struct TaskEnded {
    name: &'static str,
    cause: String,
}

impl Exit {
    /// Success for a wanted stop; the task's name and cause otherwise.
    ///
    /// # Errors
    /// [`TaskEnded`] when a task ended by itself.
    pub fn into_result(self) -> Result<(), Failure> {
        match self {
            Self::Signal(_) | Self::Stopped => Ok(()),
            Self::TaskEnded { name, cause } => Err(Failure::from(TaskEnded {
                name,
                cause: cause.map_or_else(|| "it returned".to_owned(), |e| chain(e.as_ref())),
            })),
        }
    }
}

// === impl Tasks ===

impl Default for Tasks {
    fn default() -> Self {
        Self::new()
    }
}

impl Tasks {
    /// No tasks yet.
    #[must_use]
    pub fn new() -> Self {
        let (ended, first_end) = mpsc::channel(ENDS_KEPT);
        Self {
            inner: Arc::new(Inner {
                token: CancellationToken::new(),
                tracker: TaskTracker::new(),
                running: Mutex::default(),
                next_id: AtomicU64::new(0),
                ended,
                first_end: tokio::sync::Mutex::new(first_end),
            }),
        }
    }

    /// Cancelled when the program stops: every task selects on it.
    #[must_use]
    pub fn token(&self) -> CancellationToken {
        self.inner.token.clone()
    }

    /// Spawns a task that lives as long as the program. Its end is an event: before cancellation it stops
    /// the program. Must be called within the runtime.
    pub fn spawn<F, E>(&self, name: &'static str, future: F)
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<BoxError>,
    {
        let entry = self.enter(name);
        #[allow(
            clippy::disallowed_methods,
            reason = "this is the supervised spawn that the ban points to"
        )]
        tokio::spawn(self.inner.tracker.track_future(async move {
            let mut guard = EndGuard { entry, outcome: None };
            guard.outcome = Some(future.await.map_err(Into::into));
            drop(guard);
        }));
    }

    /// Spawns work that may end at any time (a connection, one request); shutdown waits for it.
    pub fn spawn_work<F>(&self, name: &'static str, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let entry = self.enter(name);
        #[allow(
            clippy::disallowed_methods,
            reason = "this is the supervised spawn that the ban points to"
        )]
        tokio::spawn(self.inner.tracker.track_future(async move {
            future.await;
            drop(entry);
        }));
    }

    /// Names of the tasks and the work that run now, sorted.
    #[must_use]
    pub fn running(&self) -> Vec<&'static str> {
        let mut names: Vec<_> = lock(&self.inner.running).values().copied().collect();
        names.sort_unstable();
        names
    }

    /// Waits for SIGTERM, SIGINT, a cancelled token or a task that ends by itself; then cancels the token and
    /// gives the tasks `drain` to end.
    pub async fn run_until_stopped(&self, drain: Duration) -> Exit {
        let exit = self.first_reason().await;
        match &exit {
            Exit::Signal(signal) => tracing::info!(signal, "stopping"),
            Exit::Stopped => tracing::info!("stopping"),
            Exit::TaskEnded { name, cause } => {
                let error = cause.as_ref().map(|cause| chain(cause.as_ref()));
                tracing::error!(task = name, error, "stopping because a task ended");
            }
        }
        self.inner.token.cancel();
        self.inner.tracker.close();
        if tokio::time::timeout(drain, self.inner.tracker.wait())
            .await
            .is_err()
        {
            tracing::warn!(tasks = ?self.running(), "tasks did not end within the drain time");
        }
        exit
    }

    async fn first_reason(&self) -> Exit {
        let mut first_end = self.inner.first_end.lock().await;
        tokio::select! {
            biased;
            Some(Ended { name, cause }) = first_end.recv() => Exit::TaskEnded { name, cause },
            () = self.inner.token.cancelled() => Exit::Stopped,
            signal = stop_signal() => match signal {
                Ok(signal) => Exit::Signal(signal),
                Err(error) => Exit::TaskEnded { name: "signals", cause: Some(error.into()) },
            },
        }
    }

    fn enter(&self, name: &'static str) -> Entry {
        let id = self.inner.next_id.fetch_add(1, Ordering::Relaxed);
        lock(&self.inner.running).insert(id, name);
        Entry {
            id,
            name,
            inner: Arc::clone(&self.inner),
        }
    }
}

/// Spawns work that nobody waits for, such as a connection that must not delay shutdown.
pub fn spawn_detached<F>(name: &'static str, future: F)
where
    F: Future<Output = ()> + Send + 'static,
{
    #[allow(
        clippy::disallowed_methods,
        reason = "this is the named spawn that the ban points to"
    )]
    tokio::spawn(async move {
        future.await;
        tracing::trace!(task = name, "work ended");
    });
}

/// Waits for the first signal that asks the program to stop.
async fn stop_signal() -> std::io::Result<&'static str> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => Ok("SIGTERM"),
        _ = interrupt.recv() => Ok("SIGINT"),
    }
}

/// A task's place in the list of running ones.
#[derive(Debug)]
struct Entry {
    id: u64,
    name: &'static str,
    inner: Arc<Inner>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.inner.running).remove(&self.id);
    }
}

/// Reports the end of a task even when it panics: then no outcome was stored.
#[derive(Debug)]
struct EndGuard {
    entry: Entry,
    outcome: Option<Result<(), BoxError>>,
}

impl Drop for EndGuard {
    fn drop(&mut self) {
        let name = self.entry.name;
        let cause = match self.outcome.take() {
            Some(Ok(())) => None,
            Some(Err(error)) => Some(error),
            None => Some("it panicked or was dropped".into()),
        };
        if self.entry.inner.token.is_cancelled() {
            if let Some(error) = cause {
                tracing::warn!(
                    task = name,
                    error = chain(error.as_ref()),
                    "task failed while stopping"
                );
            }
            return;
        }
        // A full queue means that an earlier end stops the program already.
        if let Err(mpsc::error::TrySendError::Full(later)) =
            self.entry.inner.ended.try_send(Ended { name, cause })
        {
            tracing::warn!(task = later.name, "another task ended too");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAIN: Duration = Duration::from_secs(5);

    async fn until_cancelled(token: CancellationToken) -> Result<(), BoxError> {
        token.cancelled().await;
        Ok(())
    }

    #[tokio::test]
    async fn a_failing_task_stops_the_program_by_name_and_cause() {
        let tasks = Tasks::new();
        tasks.spawn("good", until_cancelled(tasks.token()));
        tasks.spawn("bad", async { Err::<(), BoxError>("disk full".into()) });
        let failure = tasks.run_until_stopped(DRAIN).await.into_result().unwrap_err();
        assert_eq!(failure.to_string(), "task bad ended: disk full");
        assert!(tasks.running().is_empty());
    }

    #[tokio::test]
    async fn a_task_that_returns_stops_the_program_too() {
        let tasks = Tasks::new();
        tasks.spawn("short", async { Ok::<(), BoxError>(()) });
        let failure = tasks.run_until_stopped(DRAIN).await.into_result().unwrap_err();
        assert_eq!(failure.to_string(), "task short ended: it returned");
    }

    #[tokio::test]
    async fn a_panicking_task_stops_the_program() {
        let tasks = Tasks::new();
        tasks.spawn("brittle", async {
            "no number".parse::<u8>().unwrap();
            Ok::<(), BoxError>(())
        });
        let failure = tasks.run_until_stopped(DRAIN).await.into_result().unwrap_err();
        assert!(
            failure.to_string().contains("brittle ended: it panicked"),
            "{failure}"
        );
    }

    #[tokio::test]
    async fn shutdown_waits_for_tasks_and_work() {
        let tasks = Tasks::new();
        let token = tasks.token();
        let (done, mut was_done) = mpsc::channel(2);
        let (task_done, task_token) = (done.clone(), token.clone());
        tasks.spawn("task", async move {
            task_token.cancelled().await;
            tokio::task::yield_now().await;
            task_done.send("task").await
        });
        let work_token = token.clone();
        tasks.spawn_work("work", async move {
            work_token.cancelled().await;
            let _kept = done.send("work").await;
        });
        assert_eq!(tasks.running(), ["task", "work"]);
        token.cancel();
        assert!(matches!(tasks.run_until_stopped(DRAIN).await, Exit::Stopped));
        assert!(was_done.try_recv().is_ok() && was_done.try_recv().is_ok());
    }

    #[tokio::test]
    async fn a_task_that_ignores_cancellation_does_not_hold_the_program() {
        let tasks = Tasks::new();
        tasks.spawn("deaf", std::future::pending::<Result<(), BoxError>>());
        tasks.token().cancel();
        let short = Duration::from_millis(10);
        assert!(matches!(tasks.run_until_stopped(short).await, Exit::Stopped));
        assert_eq!(tasks.running(), ["deaf"]);
    }

    #[tokio::test]
    async fn ended_work_does_not_stop_the_program() {
        let tasks = Tasks::new();
        let token = tasks.token();
        tasks.spawn_work("connection", async move { token.cancel() });
        assert!(matches!(tasks.run_until_stopped(DRAIN).await, Exit::Stopped));
    }
}
