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

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use kube::Client;
use tokio::sync::watch;

use super::judge::{self, Loading, LoadingReplica, Refused, StoppedExporter, Summary};
use super::observe::{Phase, Seen, Target, ask};
use super::picture::{ActStatus, Stage};
use super::reading::{self, mean};
use super::wishes::Wishes;
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

    async fn loading_act(&self) -> LoadingReplica {
        let verdict = match self.watch_loading().await {
            Ok(seen) => {
                let verdict = judge::loading_replica(&seen);
                let evidence = loading_evidence(&seen);
                self.close(LOADING, verdict == LoadingReplica::Withheld, &evidence);
                verdict
            }
            Err(late) => {
                self.close(LOADING, false, &late.to_string());
                LoadingReplica::NotShown
            }
        };
        self.load.go_on(Instant::now());
        verdict
    }

    async fn watch_loading(&self) -> Result<Loading, Late> {
        let first = self
            .until(
                "a replica that runs and still loads",
                Duration::from_secs(45),
                |seen| seen.count(Phase::Loading) > 0 && seen.count(Phase::Ready) > 0,
            )
            .await?;
        let Some((name, pod)) = first.pods.iter().find(|(_, pod)| pod.phase == Phase::Loading) else {
            return Err(Late {
                what: "a loading replica",
                within: Duration::ZERO,
            });
        };
        let now = Instant::now();
        // Whatever the HPA knows of the load by then, holding at less could make it shrink by itself.
        self.load.hold(
            now,
            self.load.gpus(now).max(self.load.recent_mean(now, self.window)),
        );
        self.stage
            .act(LOADING, ActStatus::Running, format!("{name} on {}", pod.node));
        self.stage.say(format!(
            "{name} loads its weights: the metrics API must not have a value for it"
        ));
        let wanted = self.wishes.since(now).first().copied().unwrap_or_default();
        let mut told = Loading {
            desired_before: wanted,
            desired_lowest: wanted,
            ..Loading::default()
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let seen = self.seen.borrow().clone();
            let still = seen
                .as_ref()
                .and_then(|seen| seen.pods.get(name))
                .is_some_and(|pod| pod.phase == Phase::Loading);
            if !still || Instant::now() > deadline {
                break;
            }
            if let Some(read) = self.exporters.reads(&pod.node, &pod.uid).await {
                told.exporter_read = Some(read);
            }
            let single = self.value_of(name).await;
            let all = ask(
                &self.client,
                &reading::path(&self.target.namespace, "%2A", METRIC, &self.target.selector()),
            )
            .await;
            // A pod that became ready between the looks is no evidence of anything.
            if self.is_loading(name).await {
                match single {
                    Ok(Err(refused)) => told.refused = Some(refused),
                    Ok(Ok(_)) => told.listed += 1,
                    Err(_) => {}
                }
                if let Ok(Ok(values)) = all {
                    if values.contains_key(name) {
                        told.listed += 1;
                    } else if !values.is_empty() {
                        told.left_out += 1;
                    }
                    told.ready_mean = mean(&values);
                }
            }
            told.hpa_average = seen.and_then(|seen| seen.hpa.average);
            tokio::time::sleep(PAUSE * 2).await;
        }
        told.desired_lowest = self.wishes.since(now).into_iter().min().unwrap_or(wanted);
        Ok(told)
    }

    /// Asks the API server itself, past the observer's last look.
    async fn is_loading(&self, name: &str) -> bool {
        let pods: kube::Api<k8s_openapi::api::core::v1::Pod> =
            kube::Api::namespaced(self.client.clone(), &self.target.namespace);
        pods.get(name).await.is_ok_and(|pod| {
            pod.status
                .and_then(|status| status.conditions)
                .is_some_and(|conditions| {
                    conditions
                        .iter()
                        .any(|condition| condition.type_ == "Ready" && condition.status == "False")
                })
        })
    }

    async fn stopped_act(&self) -> StoppedExporter {
        let patience = self.load.length() + SETTLE;
        let verdict = match self.watch_stopped(patience).await {
            Ok((verdict, evidence)) => {
                self.close(STOPPED, verdict == StoppedExporter::Held, &evidence);
                verdict
            }
            Err(late) => {
                self.close(STOPPED, false, &late.to_string());
                StoppedExporter::NotShown
            }
        };
        self.load.go_on(Instant::now());
        verdict
    }

    async fn watch_stopped(&self, patience: Duration) -> Result<(StoppedExporter, String), Late> {
        self.stage.say("the load climbs on; replicas follow");
        let half_way = Instant::now()
            + self
                .load
                .length()
                .saturating_sub(self.load.position(Instant::now()))
                .mul_f64(0.45);
        self.until("three replicas on two nodes", patience, |seen| {
            let busy_nodes: std::collections::BTreeSet<_> = ready_nodes(seen).collect();
            let plateau = seen.count(Phase::Ready) >= 3 && busy_nodes.len() >= 2;
            // At the plateau of the built-in shape, or in the middle of a recording.
            plateau && Instant::now() >= half_way
        })
        .await?;
        let now = Instant::now();
        self.load.hold(now, self.load.recent_mean(now, self.window * 2));
        self.stage.act(
            STOPPED,
            ActStatus::Running,
            "waiting until load, replicas and HPA agree",
        );
        self.stage.say(format!(
            "the load is held at {:.1} GPUs until the HPA has settled",
            self.load.gpus(now)
        ));
        let node = self.settled().await?;
        let before = self.wishes.last();

        let stopped_at = Instant::now();
        if !self.exporters.stop(&node) {
            return Err(Late {
                what: "a running exporter to stop",
                within: Duration::ZERO,
            });
        }
        self.mark(&node, "stopped");
        self.stage.act(
            STOPPED,
            ActStatus::Running,
            format!("SIGSTOP to the exporter on {node}"),
        );
        self.stage.say(format!(
            "the exporter on {node} is stopped: its values must vanish, and the HPA must hold"
        ));
        let outcome = self.while_stopped(&node, stopped_at).await;
        self.exporters.go_on(&node);
        self.mark(&node, "up");
        self.stage
            .say(format!("the exporter on {node} goes on: values come back"));
        let back = self
            .until("all values again", Duration::from_secs(30), |seen| {
                seen.sm_active.as_ref().is_some_and(|answer| {
                    answer
                        .as_ref()
                        .is_ok_and(|values| seen.pods.keys().all(|pod| values.contains_key(pod)))
                })
            })
            .await;
        let during = self.wishes.since(stopped_at);
        let refused = outcome.as_ref().ok();
        let verdict = judge::stopped_exporter(refused, before, &during);
        let mut evidence = match refused {
            Some(refused) => format!("{}: {}", refused.code, refused.message),
            None => "the API went on serving values".to_owned(),
        };
        evidence = format!("HPA wanted {before}, then {during:?}; {evidence}");
        if let Err(late) = back {
            evidence = format!("{evidence}; {late}");
        }
        Ok((verdict, evidence))
    }

    /// Waits until nothing moves any more; answers with the node whose exporter is to be stopped.
    async fn settled(&self) -> Result<String, Late> {
        // One window for the values, two syncs for the HPA, and its scale-down stabilisation of two more.
        let calm = self.window + self.sync * 4;
        let deadline = Instant::now() + SETTLE;
        let mut since = Instant::now();
        let mut wanted = self.wishes.last();
        while Instant::now() < deadline {
            let seen = self.seen.borrow().clone();
            let settled = seen.as_ref().is_some_and(Seen::is_settled);
            if !settled || self.wishes.last() != wanted {
                since = Instant::now();
                wanted = self.wishes.last();
            }
            if since.elapsed() >= calm
                && let Some(seen) = seen
                && let Some(node) = fewest_replicas(&seen)
            {
                return Ok(node);
            }
            tokio::time::sleep(PAUSE).await;
        }
        Err(Late {
            what: "a settled HPA",
            within: SETTLE,
        })
    }

    /// Waits for the refusal, then lets the HPA sync a few times without the values.
    async fn while_stopped(&self, node: &str, stopped_at: Instant) -> Result<Refused, Late> {
        let within = self.max_age + self.window + Duration::from_secs(10);
        let pod = self
            .seen
            .borrow()
            .as_ref()
            .and_then(|seen| {
                seen.pods
                    .iter()
                    .find(|(_, pod)| pod.node == node && pod.phase == Phase::Ready)
                    .map(|(name, _)| name.clone())
            })
            .ok_or(Late {
                what: "a replica on that node",
                within: Duration::ZERO,
            })?;
        let deadline = Instant::now() + within;
        let refused = loop {
            if let Ok(Err(refused)) = self.value_of(&pod).await {
                break refused;
            }
            if Instant::now() > deadline {
                return Err(Late {
                    what: "a refusal to serve old values",
                    within,
                });
            }
            self.stage.progress(format!(
                "the exporter on {node} has been stopped for {:.0} s; values older than {:.0} s are not served",
                stopped_at.elapsed().as_secs_f64(),
                self.max_age.as_secs_f64()
            ));
            tokio::time::sleep(PAUSE).await;
        };
        self.stage.say(format!(
            "{:.0} s after the stop the API refuses {pod}: {}",
            stopped_at.elapsed().as_secs_f64(),
            refused.message
        ));
        let hpa_looks = Instant::now() + self.sync * 4;
        while Instant::now() < hpa_looks {
            let seen = self.seen.borrow().clone();
            if let Some(hpa) = seen.map(|seen| seen.hpa) {
                let without = hpa
                    .scaling_active
                    .filter(|(active, _)| !active)
                    .map(|(_, message)| message);
                self.stage.progress(format!(
                    "the HPA goes on with the values it has and wants {}{}",
                    hpa.desired.unwrap_or_default(),
                    without.map_or(String::new(), |message| format!(" ({message})"))
                ));
            }
            tokio::time::sleep(PAUSE).await;
        }
        // Asked again: the age in the message must have grown with the outage.
        match self.value_of(&pod).await {
            Ok(Err(later)) => Ok(later),
            _ => Ok(refused),
        }
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

fn ready_nodes(seen: &Seen) -> impl Iterator<Item = &str> {
    seen.pods
        .values()
        .filter(|pod| pod.phase == Phase::Ready)
        .map(|pod| pod.node.as_str())
}

/// The node with the fewest ready replicas, but some: the HPA then still has most of its values, which is
/// when a wrong guess about the rest would make it move.
fn fewest_replicas(seen: &Seen) -> Option<String> {
    let mut counts = std::collections::BTreeMap::<&str, usize>::new();
    for node in ready_nodes(seen) {
        *counts.entry(node).or_default() += 1;
    }
    let least = counts
        .into_iter()
        .filter(|(node, _)| !node.is_empty())
        .min_by_key(|(_, count)| *count)?;
    Some(least.0.to_owned())
}

fn loading_evidence(seen: &Loading) -> String {
    let percent = |value: Option<f64>| value.map_or("nothing".to_owned(), |value| format!("{value:.0} %"));
    let api = match &seen.refused {
        Some(refused) => format!("{}: {}", refused.code, refused.message),
        None => "the API had a value".to_owned(),
    };
    format!(
        "{api} (the exporter read {}); HPA average {} over the ready ones, wanted {}, never under {}",
        percent(seen.exporter_read),
        percent(seen.hpa_average),
        seen.desired_before,
        seen.desired_lowest,
    )
}
