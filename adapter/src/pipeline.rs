//! From configuration to answers: wires sources, pods and the index together.
//!
//! Purpose: the one call that `run` makes to get a [`Provider`](crate::provider::Provider).
//! Inputs: the configuration handle, a cluster or none (`--standalone`), the program's tasks and status.
//! Invariants: readiness conditions are registered before anything starts; every task has a name.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forewarm_runtime::status::{Condition, Status};
use forewarm_runtime::tasks::Tasks;
use tokio_util::sync::CancellationToken;

use crate::config::watch::Handle;
use crate::index::{self, Index, PodMode};
use crate::metrics::Metrics;
use crate::query::Answers;
use crate::source::{self, Cluster};

/// The index beats at least each five seconds; silent for this long, it hangs.
const MAX_SILENCE: Duration = Duration::from_secs(30);
/// How often readiness looks whether the pods are known.
const LOOK: Duration = Duration::from_millis(50);

/// Starts everything behind the answers. `cluster` is `None` with `--standalone`: pods are then as exporters
/// report them.
#[must_use]
pub fn start(
    config: Handle,
    cluster: Option<Cluster>,
    tasks: &Tasks,
    status: &Status,
    metrics: &Arc<Metrics>,
) -> Answers {
    let pods = status.readiness.condition("pods");
    let targets = status.readiness.condition("targets");
    let mode = if cluster.is_some() {
        PodMode::Watched
    } else {
        PodMode::Reported
    };
    let heartbeat = status.liveness.heartbeat("index", MAX_SILENCE);
    let (index, queue, run) = index::start(
        config.current(),
        mode,
        Arc::clone(metrics),
        heartbeat,
        tasks.token(),
    );
    tasks.spawn("index", infallible(run));
    match &cluster {
        Some(cluster) => {
            let follow = index::watch::follow(
                cluster.client.clone(),
                queue.clone(),
                Arc::clone(metrics),
                tasks.token(),
            );
            tasks.spawn("pods", infallible(follow));
            pods.waiting("the first list of pods has not come");
            tasks.spawn_work("pods-known", pods_known(index.clone(), pods, tasks.token()));
        }
        None => pods.ready(),
    }
    let run = source::run(
        config,
        cluster,
        queue,
        Arc::clone(metrics),
        tasks.clone(),
        targets,
    );
    tasks.spawn("sources", infallible(run));
    Answers::new(index, Arc::clone(metrics))
}

/// Latches readiness once the first list of pods is in the index.
async fn pods_known(index: Index, condition: Condition, token: CancellationToken) {
    let started = Instant::now();
    loop {
        if index.load().pods_known {
            condition.ready();
            tracing::info!(after_ms = started.elapsed().as_millis(), "pods are known");
            return;
        }
        tokio::select! {
            () = token.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

async fn infallible(
    run: impl Future<Output = Result<(), Infallible>>,
) -> Result<(), forewarm_runtime::BoxError> {
    match run.await {
        Ok(()) => Ok(()),
        Err(never) => match never {},
    }
}
