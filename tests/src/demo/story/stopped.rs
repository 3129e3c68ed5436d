//! Second act: a stopped exporter's values must vanish with their age named, and the HPA must hold.
//!
//! Inputs: a deployment that has settled under a held load. Invariants: the exporter goes on again whatever
//! happens; the HPA is given a few syncs without the values before it is judged.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::{Late, PAUSE, SETTLE, STOPPED, Story};
use crate::demo::judge::{self, Refused, StoppedExporter};
use crate::demo::observe::{Phase, Seen};
use crate::demo::picture::ActStatus;

/// Interval of the adapter's scrapes in `manifests/`.
const SCRAPE: Duration = Duration::from_secs(2);

impl Story {
    pub(super) async fn stopped_act(&self) -> StoppedExporter {
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
            let busy_nodes: BTreeSet<_> = ready_nodes(seen).collect();
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
        let deadline = Instant::now() + SETTLE;
        let mut since = Instant::now();
        let mut wanted = self.wishes.last();
        while Instant::now() < deadline {
            let seen = self.seen.borrow().clone();
            // Replicas that work off a queue are busier than the load alone makes them, and will not stay so.
            let last = self.stage.picture().last();
            let drained = last.queue.is_none_or(|queue| queue <= f64::from(last.ready));
            let settled = drained && seen.as_ref().is_some_and(Seen::is_settled);
            if !settled || self.wishes.last() != wanted {
                since = Instant::now();
                wanted = self.wishes.last();
            }
            if since.elapsed() >= self.calm()
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

    /// How long nothing may have moved before nothing will: a scrape and a window until the values tell of a
    /// change, a sync until the HPA sees them, its stabilisation of two syncs, and a sync to spare.
    fn calm(&self) -> Duration {
        SCRAPE + self.window + self.sync * 4
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
        // Short of the third missed liveness probe, which would restart the exporter.
        let hpa_looks = Instant::now() + self.sync * 3;
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
            // Served again while its exporter is stopped: the values had not vanished.
            Ok(Ok(_)) => Err(Late {
                what: "an API that goes on refusing old values",
                within: self.sync * 3,
            }),
            Err(_) => Ok(refused),
        }
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
    let mut counts = BTreeMap::<&str, usize>::new();
    for node in ready_nodes(seen) {
        *counts.entry(node).or_default() += 1;
    }
    let least = counts
        .into_iter()
        .filter(|(node, _)| !node.is_empty())
        .min_by_key(|(_, count)| *count)?;
    Some(least.0.to_owned())
}
