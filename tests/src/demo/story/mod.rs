//! The story on a real control plane: load steps up, replicas follow, and two acts that a sceptic asks for.
//!
//! ```text
//! quiet ─► step: reaction ─► act 1: a loading replica is withheld ─► plateau
//!       ─► act 2: a stopped exporter's values vanish, the HPA holds ─► quiet ─► back at one
//! ```
//! Inputs: what the observer sees ([`Seen`]), answers of the metrics API, the load's clock.
//! Invariants: verdicts come from [`judge`] and from what API and HPA said, never from the simulation; while
//! an act is judged the load is held, so whatever moves is not the load's doing; each wait has a deadline,
//! and a wait that fails leaves its act "not shown".

mod loading;
mod stopped;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use kube::Client;
use tokio::sync::watch;

use crate::demo::judge::Summary;
use crate::demo::observe::{Phase, Seen, Target, ask};
use crate::demo::picture::{ActStatus, Stage};
use crate::demo::reading;
use crate::demo::wishes::Wishes;
use crate::load::clock::LoadClock;

/// What the acts claim, in their order on the screen.
pub const CLAIMS: [&str; 2] = [
    "a replica that still loads is withheld, not counted as idle",
    "a stopped exporter's values vanish, their age is named, and the HPA holds",
];

/// Index of each act in [`CLAIMS`].
const LOADING: usize = 0;
const STOPPED: usize = 1;

/// Metric the HPA reads.
const METRIC: &str = "gpu_sm_active_percent";

/// The HPA's tolerance: it acts above `target × 1.1`.
const TOLERANCE: f64 = 0.1;

/// Time between two looks of a wait.
const PAUSE: Duration = Duration::from_millis(150);

/// See [`Story::reaction`].
const HALF_SECOND: Duration = Duration::from_millis(500);

/// How long one deployment may take to settle once its load is held.
const SETTLE: Duration = Duration::from_secs(75);

/// Reads and steers exporters; the story's only hand in the cluster.
pub trait Exporters: Send + Sync {
    /// Sends SIGSTOP to the exporter of a node; false when there is none.
    fn stop(&self, node: &str) -> bool;
    /// Sends SIGCONT to it.
    fn go_on(&self, node: &str);
    /// The exporter's own reading of a pod's SM activity in percent, past the adapter.
    fn reads<'a>(&'a self, node: &'a str, pod_uid: &'a str) -> BoxFuture<'a, Option<f64>>;
}

/// Everything the story needs.
pub struct Story {
    /// For questions to the metrics API.
    pub client: Client,
    /// The workload.
    pub target: Target,
    /// What its HPA aims at, percent.
    pub aim: f64,
    /// Sync period of the HPA.
    pub sync: Duration,
    /// Window over which the adapter averages.
    pub window: Duration,
    /// How long a value of the exporter may be served (`maxAge`).
    pub max_age: Duration,
    /// Where to tell it.
    pub stage: Arc<Stage>,
    /// The load.
    pub load: Arc<LoadClock>,
    /// What the observer sees.
    pub seen: watch::Receiver<Option<Seen>>,
    /// What the HPA wanted.
    pub wishes: Arc<Wishes>,
    /// The exporters.
    pub exporters: Arc<dyn Exporters>,
}

/// A wait that came to nothing.
#[derive(Debug, thiserror::Error)]
#[error("{what} did not happen within {} s", within.as_secs())]
struct Late {
    what: &'static str,
    within: Duration,
}

impl Story {
    /// Tells it from the start of the load to the end.
    ///
    /// # Errors
    /// When the workload never becomes ready: without it there is no story.
    pub async fn tell(self) -> anyhow::Result<Summary> {
        self.stage
            .say("waiting for the first replica and its first value");
        self.until(
            "a first replica with a value that the HPA can read",
            Duration::from_secs(120),
            |seen| {
                seen.is_settled()
                    && seen
                        .hpa
                        .scaling_active
                        .as_ref()
                        .is_some_and(|(active, _)| *active)
            },
        )
        .await?;
        let begin = Instant::now();
        self.load.start(begin);
        self.stage.say("the load begins: one replica is enough");
        let reaction_s = self.reaction(begin).await;
        let loading_replica = self.loading_act().await;
        let stopped_exporter = self.stopped_act().await;
        let hpa_end = self.end().await;
        Ok(Summary {
            hpa_max: self.wishes.most(),
            hpa_end,
            reaction_s,
            stopped_exporter,
            loading_replica,
        })
    }

    /// Seconds from the load's step to the HPA's wish for a second replica.
    async fn reaction(&self, begin: Instant) -> Option<f64> {
        // What one replica can take before the HPA acts.
        let step = self.load.first_above(self.aim / 100.0 * (1.0 + TOLERANCE))?;
        // Half a second on, a steep step is over and its height can be told.
        tokio::time::sleep((step + HALF_SECOND).saturating_duration_since(Instant::now())).await;
        self.stage.say(format!(
            "the load steps up to {:.1} GPUs: busy saturates at once, SM activity says how far",
            self.load.gpus(Instant::now())
        ));
        let patience = self.sync * 5 + self.window + Duration::from_secs(10);
        self.until("a wish for more replicas", patience, |_| {
            self.wishes.first_above(1, begin).is_some()
        })
        .await
        .ok()?;
        let wish = self.wishes.first_above(1, step)?;
        let seconds = wish.saturating_duration_since(step).as_secs_f64();
        self.stage.say(format!(
            "{seconds:.1} s after the step the HPA wants {} replicas",
            self.wishes.last()
        ));
        // A tenth of a second is as exact as the observer.
        Some((seconds * 10.0).round() / 10.0)
    }

    /// Waits for the load's end and the HPA's return to one.
    async fn end(&self) -> i32 {
        self.stage.say("the load goes on, and then away");
        let left = self
            .load
            .length()
            .saturating_sub(self.load.position(Instant::now()));
        let _ = self
            .until("the end of the load", left + Duration::from_secs(30), |_| {
                self.load.is_over(Instant::now())
            })
            .await;
        if self.load.gpus(Instant::now()) > self.aim / 100.0 {
            self.stage
                .say("the recording ends under load: the load is taken away");
            self.load.hold(Instant::now(), 0.0);
        }
        self.stage
            .say("the load is gone: the HPA must come back to one replica");
        let back = self
            .until("one replica", Duration::from_secs(60) + self.sync * 10, |seen| {
                seen.hpa.desired == Some(1) && seen.count(Phase::Ready) == 1 && seen.pods.len() == 1
            })
            .await;
        match back {
            Ok(_) => self.stage.say("back at one replica"),
            Err(late) => self.stage.say(late.to_string()),
        }
        self.wishes.last()
    }

    async fn value_of(&self, pod: &str) -> Result<reading::Answer, String> {
        ask(
            &self.client,
            &reading::path(&self.target.namespace, pod, METRIC, ""),
        )
        .await
    }

    fn mark(&self, node: &str, exporter: &'static str) {
        self.stage.update(|picture| {
            picture
                .nodes
                .iter_mut()
                .filter(|row| row.name == node)
                .for_each(|row| row.exporter = exporter);
        });
    }

    fn close(&self, act: usize, good: bool, evidence: &str) {
        let status = if good {
            ActStatus::Shown
        } else {
            ActStatus::Refuted
        };
        self.stage.act(act, status, evidence);
        self.stage.say(format!(
            "{}: {}",
            if good { "shown" } else { "NOT shown" },
            CLAIMS[act]
        ));
    }

    async fn until(
        &self,
        what: &'static str,
        within: Duration,
        holds: impl Fn(&Seen) -> bool,
    ) -> Result<Seen, Late> {
        let deadline = Instant::now() + within;
        while Instant::now() < deadline {
            if let Some(seen) = self.seen.borrow().clone()
                && holds(&seen)
            {
                return Ok(seen);
            }
            tokio::time::sleep(PAUSE).await;
        }
        Err(Late { what, within })
    }
}
