//! First act: a replica that still loads must have no value, and must not pull down what the HPA sees.
//!
//! Inputs: the first replica that loads after the load has stepped up. Invariants: only looks at a moment when the
//! API server still has the pod as not Ready count; the load is held meanwhile.

use std::time::{Duration, Instant};

use super::{LOADING, Late, METRIC, PAUSE, Story};
use crate::demo::judge::{self, Loading, LoadingReplica};
use crate::demo::observe::{Phase, ask};
use crate::demo::picture::ActStatus;
use crate::demo::reading::{self, mean};

impl Story {
    pub(super) async fn loading_act(&self) -> LoadingReplica {
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
                    let average = seen.and_then(|seen| seen.hpa.average);
                    if let (Some(mean), Some(average)) = (mean(&values), average) {
                        told.compare(mean, average);
                    }
                }
            }
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
        percent(seen.averages.map(|(_, average)| average)),
        seen.desired_before,
        seen.desired_lowest,
    )
}
