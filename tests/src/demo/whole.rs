//! The whole loop: cluster, workload, observer and story, from start to verdict.
//!
//! Inputs: the request, built programs, the private network already entered. Invariants: an error carries the ends
//! of all logs, unless the demo was interrupted; what the simulated nodes could not do fails the run.

use std::future::Future;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio_util::sync::CancellationToken;

use super::Ending;
use super::args::Request;
use super::cluster::Cluster;
use super::observe::{self, Backstage, Target};
use super::picture::Stage;
use super::story::Story;
use super::wishes::Wishes;
use crate::load::clock::LoadClock;
use crate::load::serving::Serving;
use crate::process::Artefacts;
use crate::scratch::Scratch;

/// The HPA's sync period here; five times as fast as the controller's default of 15 s.
pub(super) const HPA_SYNC: Duration = Duration::from_secs(3);

/// Window of the adapter's averages here, shortened likewise ([`objects::overlay`]).
pub(super) const WINDOW: Duration = Duration::from_secs(3);

/// `maxAge` of exclusive values in `manifests/`.
pub(super) const MAX_AGE: Duration = Duration::from_secs(10);

/// What the HPA aims at, percent of SM activity.
pub(super) const AIM: u32 = 60;

/// Namespace and name of the workload.
const NAMESPACE: &str = "demo";
const WORKLOAD: &str = "llm";

/// Load in GPUs while the demo is held after its story.
const HELD_LOAD: f64 = 0.3;

/// Starts everything and tells the story.
///
/// # Errors
/// The step that failed, with evidence.
pub(super) async fn tell(
    request: &Request,
    artefacts: &Artefacts,
    stage: &Arc<Stage>,
    api: Option<TcpListener>,
    stop: &CancellationToken,
) -> anyhow::Result<Ending> {
    let load = Arc::new(LoadClock::new(Arc::clone(&request.load)));
    let serving = Serving::new(Arc::clone(&load), request.loading, request.seed);
    // Boxed: the whole start of a cluster is a large future.
    let starting = Box::pin(Cluster::start(stage, artefacts, &serving, HPA_SYNC));
    let started = unless_stopped(stop, starting).await;
    let cluster = started.context("interrupted while starting")??;
    let outside = Scratch::new("demo")?;
    if let Some(listener) = api {
        let kubeconfig = outside.path().join("kubeconfig");
        cluster.serve_outside(listener, &kubeconfig)?;
        let link = format!("export KUBECONFIG={}", kubeconfig.display());
        stage.say(link.clone());
        stage.update(|picture| picture.links.push(link));
    }
    cluster.deploy(NAMESPACE, WORKLOAD, AIM).await?;

    let target = Target {
        namespace: NAMESPACE.to_owned(),
        name: WORKLOAD.to_owned(),
    };
    let wishes = Arc::new(Wishes::default());
    let (seen_sender, seen) = tokio::sync::watch::channel(None);
    let backstage = Backstage {
        load: Arc::clone(&load),
        serving,
        wishes: Arc::clone(&wishes),
    };
    let watching = CancellationToken::new();
    let observer = observe::watch(
        cluster.client(),
        target.clone(),
        Arc::clone(stage),
        backstage,
        seen_sender,
        watching.clone(),
    );
    let story = Story {
        client: cluster.client(),
        target,
        aim: f64::from(AIM),
        sync: HPA_SYNC,
        window: WINDOW,
        max_age: MAX_AGE,
        stage: Arc::clone(stage),
        load: Arc::clone(&load),
        seen,
        wishes,
        exporters: cluster.exporters(),
    };
    let told = async {
        let summary = unless_stopped(stop, story.tell())
            .await
            .context("interrupted")??;
        let failures = cluster.failures();
        anyhow::ensure!(
            failures.is_empty(),
            "simulated nodes could not do: {}",
            failures.join("; ")
        );
        if request.hold {
            load.hold(Instant::now(), HELD_LOAD);
            stage.say(format!(
                "the story is over, the cluster stays: {HELD_LOAD} GPUs of load; Ctrl-C ends it"
            ));
            stop.cancelled().await;
        }
        anyhow::Ok(summary)
    };
    let outcome = tokio::select! {
        told = told => told,
        watched = observer => match watched {
            Ok(()) => Err(anyhow::anyhow!("the observer ended")),
            Err(error) => Err(error),
        },
    };
    watching.cancel();
    let summary = match outcome {
        Ok(summary) => summary,
        Err(error) if stop.is_cancelled() => return Err(error),
        Err(error) => anyhow::bail!("{error:#}\n{}", cluster.evidence().await),
    };
    Ok(Ending {
        line: Some(summary.line()),
        good: summary.is_good(),
    })
}

async fn unless_stopped<T>(stop: &CancellationToken, body: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        ended = body => Some(ended),
        () = stop.cancelled() => None,
    }
}
