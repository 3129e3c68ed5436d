//! The task that owns the writer, and the handles around it.
//!
//! Invariants: bodies come through a bounded queue and are dropped and counted when it is full; pod changes,
//! configurations and removals are never dropped, their senders wait. Readers load the published state without
//! a lock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use forewarm_runtime::status::Heartbeat;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Batch, Failure, PodChange, PodMode, State, TargetId, Writer};
use crate::config::Config;
use crate::metrics::Metrics;

/// Bodies that may wait: a whole round of a large cluster.
const BODIES: usize = 1024;
/// Changes that may wait before their senders do.
const CHANGES: usize = 256;
/// How often stale cells are forgotten and gauges refreshed.
const TIDY: Duration = Duration::from_secs(5);
/// Most bodies taken before what they brought is published.
const BURST: usize = 64;

/// Work for the index.
#[derive(Debug)]
pub enum Message {
    /// A body that was taken whole.
    Batch(Batch),
    /// A scrape that brought nothing.
    Failed {
        /// Who failed.
        target: TargetId,
        /// The node that it reports about.
        node: Option<Arc<str>>,
        /// Why.
        failure: Failure,
    },
    /// A target is gone.
    Removed(TargetId),
    /// Pods changed.
    Pods(PodChange),
    /// A new configuration.
    Config(Arc<Config>),
}

/// Where work for the index goes.
#[derive(Debug, Clone)]
pub struct Queue {
    bodies: mpsc::Sender<Message>,
    changes: mpsc::Sender<Message>,
    metrics: Arc<Metrics>,
}

impl Queue {
    /// Offers the outcome of a scrape; dropped and counted when the index is behind.
    pub fn offer(&self, message: Message) {
        if self.bodies.try_send(message).is_err() {
            self.metrics.batch_dropped();
        }
    }

    /// Hands over what must not be lost. Returns once it is queued, or when the index has ended.
    pub async fn send(&self, message: Message) {
        if self.changes.send(message).await.is_err() {
            tracing::debug!("index has ended");
        }
    }
}

/// A queue without an index, and what is sent through it.
#[cfg(test)]
pub(super) fn changes_for_test() -> (Queue, mpsc::Receiver<Message>) {
    let (bodies, _) = mpsc::channel(1);
    let (changes, sent) = mpsc::channel(CHANGES);
    let metrics = Arc::new(Metrics::default());
    let queue = Queue {
        bodies,
        changes,
        metrics,
    };
    (queue, sent)
}

/// What requests read.
#[derive(Debug, Clone)]
pub struct Index {
    published: Arc<ArcSwap<State>>,
}

impl Index {
    /// An index that never changes, for tests of readers.
    #[must_use]
    pub fn fixed(state: State) -> Self {
        Self {
            published: Arc::new(ArcSwap::from_pointee(state)),
        }
    }

    /// The state of this moment.
    #[must_use]
    pub fn load(&self) -> arc_swap::Guard<Arc<State>> {
        self.published.load()
    }
}

/// Makes an index. The future owns the writer and ends with the token.
pub fn start(
    config: &Arc<Config>,
    mode: PodMode,
    metrics: Arc<Metrics>,
    heartbeat: Heartbeat,
    token: CancellationToken,
) -> (
    Index,
    Queue,
    impl Future<Output = Result<(), std::convert::Infallible>> + Send + 'static,
) {
    let mut writer = Writer::new(config, mode, Arc::clone(&metrics));
    let index = Index::fixed(writer.state().clone());
    let (bodies, mut incoming_bodies) = mpsc::channel(BODIES);
    let (changes, mut incoming_changes) = mpsc::channel(CHANGES);
    let queue = Queue {
        bodies,
        changes,
        metrics,
    };
    let published = Arc::clone(&index.published);
    let run = async move {
        let mut tidy = tokio::time::interval(TIDY);
        loop {
            tokio::select! {
                biased;
                () = token.cancelled() => return Ok(()),
                Some(message) = incoming_changes.recv() => apply(&mut writer, message),
                Some(message) = incoming_bodies.recv() => apply(&mut writer, message),
                _ = tidy.tick() => writer.tidy(Instant::now()),
            }
            for _ in 0..BURST {
                let Ok(message) = incoming_changes
                    .try_recv()
                    .or_else(|_| incoming_bodies.try_recv())
                else {
                    break;
                };
                apply(&mut writer, message);
            }
            published.store(Arc::new(writer.state().clone()));
            heartbeat.beat();
        }
    };
    (index, queue, run)
}

fn apply(writer: &mut Writer, message: Message) {
    let now = Instant::now();
    match message {
        Message::Batch(batch) => writer.batch(&batch),
        Message::Failed {
            target,
            node,
            failure,
        } => writer.failed(&target, node.as_ref(), failure),
        Message::Removed(target) => writer.target_removed(&target, now),
        Message::Pods(change) => writer.pod_change(change, now),
        Message::Config(config) => writer.configure(&config, now),
    }
}
