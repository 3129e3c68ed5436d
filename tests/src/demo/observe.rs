//! Watches the cluster as any user could: the HPA, the pods and the metrics API, through the API server.
//!
//! Inputs: a client and the workload's name. Invariants: what is seen is published whole, newest only;
//! an API that does not answer leaves `None`s, it never repeats old numbers; the queue is the one number
//! that the workload itself tells.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::BodyExt as _;
use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::picture::{PodRow, Sample, Stage};
use super::reading::{self, Answer, mean, oldest};
use super::wishes::Wishes;
use crate::load::clock::LoadClock;
use crate::load::serving::Serving;

/// Time between two looks: a few within each HPA sync.
const PAUSE: Duration = Duration::from_millis(300);

/// Longest wait for an answer of the metrics API: the HPA's own patience is far longer.
const ANSWER: Duration = Duration::from_secs(2);

/// The workload under observation.
#[derive(Debug, Clone)]
pub struct Target {
    /// Its namespace.
    pub namespace: String,
    /// Name of the Deployment and the HPA, and value of the pods' label `app`.
    pub name: String,
}

impl Target {
    /// Selector of its pods.
    #[must_use]
    pub fn selector(&self) -> String {
        format!("app={}", self.name)
    }
}

/// What was seen at one moment.
#[derive(Debug, Clone)]
pub struct Seen {
    /// When.
    pub at: Instant,
    /// The HPA's status.
    pub hpa: Hpa,
    /// Pods by name.
    pub pods: BTreeMap<String, SeenPod>,
    /// `gpu_sm_active_percent` of all pods; `None` when the API did not answer.
    pub sm_active: Option<Answer>,
    /// `gpu_busy_percent` likewise.
    pub busy: Option<Answer>,
}

/// The HPA's status.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Hpa {
    /// `status.currentReplicas`.
    pub current: Option<i32>,
    /// `status.desiredReplicas`.
    pub desired: Option<i32>,
    /// The average it last computed.
    pub average: Option<f64>,
    /// Status and message of the condition ScalingActive.
    pub scaling_active: Option<(bool, String)>,
}

/// A pod's status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenPod {
    /// UID.
    pub uid: String,
    /// Node, empty while pending.
    pub node: String,
    /// Where it is in its life.
    pub phase: Phase,
}

/// Where a pod is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Not running yet.
    Pending,
    /// Running, not Ready.
    Loading,
    /// Ready.
    Ready,
    /// Asked to end.
    Ending,
}

impl Seen {
    /// Number of pods in a phase.
    #[must_use]
    pub fn count(&self, phase: Phase) -> u32 {
        u32::try_from(self.pods.values().filter(|pod| pod.phase == phase).count()).unwrap_or(u32::MAX)
    }

    /// Whether replicas wanted, there, ready and answered for are one number.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let ready = self.count(Phase::Ready);
        let answered = self
            .sm_active
            .as_ref()
            .and_then(|answer| answer.as_ref().ok())
            .map_or(0, BTreeMap::len);
        self.hpa
            .desired
            .is_some_and(|desired| i64::from(desired) == i64::from(ready))
            && self.hpa.current == self.hpa.desired
            && self.pods.len() == answered
            && usize::try_from(ready).is_ok_and(|ready| ready == answered)
    }
}

/// Asks for a path through the API server.
///
/// # Errors
/// A message when there is no readable answer in time.
pub async fn ask(client: &Client, path: &str) -> Result<Answer, String> {
    let request = http::Request::get(path)
        .header(http::header::ACCEPT, "application/json")
        .body(kube::client::Body::empty())
        .map_err(|error| error.to_string())?;
    let answer = async {
        let response = client.send(request).await.map_err(|error| error.to_string())?;
        let code = response.status().as_u16();
        let body = response
            .into_body()
            .collect()
            .await
            .map_err(|error| error.to_string())?
            .to_bytes();
        reading::read(code, &body, Timestamp::now())
    };
    tokio::time::timeout(ANSWER, answer)
        .await
        .map_err(|_| format!("no answer within {ANSWER:?}"))?
}

/// What the observer shows besides the cluster.
#[derive(Debug)]
pub struct Backstage {
    /// The offered load.
    pub load: Arc<LoadClock>,
    /// The workload.
    pub serving: Serving,
    /// What the HPA wanted, to be noted here.
    pub wishes: Arc<Wishes>,
}

/// Looks until cancelled.
///
/// # Errors
/// When the HPA or the pods cannot be read for a long time.
pub async fn watch(
    client: Client,
    target: Target,
    stage: Arc<Stage>,
    backstage: Backstage,
    seen: watch::Sender<Option<Seen>>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut failures = 0_u32;
    while !stop.is_cancelled() {
        match look(&client, &target).await {
            Ok(now) => {
                failures = 0;
                show(&stage, &backstage, &now);
                if let Some(desired) = now.hpa.desired {
                    let before = backstage.wishes.last();
                    if backstage.wishes.note(now.at, desired) && before > 0 {
                        stage.note(format!("the HPA wants {desired} replicas, no longer {before}"));
                    }
                }
                seen.send_replace(Some(now));
            }
            Err(error) => {
                failures += 1;
                // A minute: an API server that is being restarted is back by then.
                if failures > 200 {
                    return Err(error.context("the API server has not answered for a minute"));
                }
            }
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(PAUSE) => {}
        }
    }
    Ok(())
}

async fn look(client: &Client, target: &Target) -> anyhow::Result<Seen> {
    let hpas: Api<HorizontalPodAutoscaler> = Api::namespaced(client.clone(), &target.namespace);
    let pods: Api<Pod> = Api::namespaced(client.clone(), &target.namespace);
    let selector = target.selector();
    let busy = reading::path(&target.namespace, "%2A", "gpu_busy_percent", &selector);
    let sm_active = reading::path(&target.namespace, "%2A", "gpu_sm_active_percent", &selector);
    let chosen = ListParams::default().labels(&selector);
    let (hpa, pods, busy, sm_active) = tokio::join!(
        hpas.get_opt(&target.name),
        pods.list(&chosen),
        ask(client, &busy),
        ask(client, &sm_active),
    );
    Ok(Seen {
        at: Instant::now(),
        hpa: hpa?.map(|hpa| hpa_status(&hpa)).unwrap_or_default(),
        pods: pods?.items.iter().filter_map(seen_pod).collect(),
        sm_active: sm_active.ok(),
        busy: busy.ok(),
    })
}

fn hpa_status(hpa: &HorizontalPodAutoscaler) -> Hpa {
    let Some(status) = &hpa.status else {
        return Hpa::default();
    };
    let average = status.current_metrics.iter().flatten().find_map(|metric| {
        metric
            .pods
            .as_ref()?
            .current
            .average_value
            .as_ref()
            .and_then(|value| reading::quantity(&value.0))
    });
    let scaling_active = status
        .conditions
        .iter()
        .flatten()
        .find(|condition| condition.type_ == "ScalingActive")
        .map(|condition| {
            (
                condition.status == "True",
                condition.message.clone().unwrap_or_default(),
            )
        });
    // 0 until the controller's first sync; our HPAs have a minimum of one.
    let desired = Some(status.desired_replicas).filter(|desired| *desired > 0);
    Hpa {
        current: status.current_replicas,
        desired,
        average,
        scaling_active,
    }
}

fn seen_pod(pod: &Pod) -> Option<(String, SeenPod)> {
    let name = pod.metadata.name.clone()?;
    let status = pod.status.as_ref();
    let running = status.and_then(|status| status.phase.as_deref()) == Some("Running");
    let ready = status
        .and_then(|status| status.conditions.as_ref())
        .is_some_and(|all| all.iter().any(|one| one.type_ == "Ready" && one.status == "True"));
    let phase = match (pod.metadata.deletion_timestamp.is_some(), running, ready) {
        (true, ..) => Phase::Ending,
        (_, true, true) => Phase::Ready,
        (_, true, false) => Phase::Loading,
        (_, false, _) => Phase::Pending,
    };
    let node = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.node_name.clone())
        .unwrap_or_default();
    Some((
        name,
        SeenPod {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            node,
            phase,
        },
    ))
}

fn show(stage: &Stage, backstage: &Backstage, seen: &Seen) {
    let none = BTreeMap::new();
    let values = |answer: &Option<Answer>| {
        answer
            .clone()
            .and_then(Result::ok)
            .unwrap_or_else(|| none.clone())
    };
    let (sm_active, busy) = (values(&seen.sm_active), values(&seen.busy));
    stage.record(Sample {
        at: 0.0,
        offered: Some(backstage.load.gpus(seen.at)),
        busy: mean(&busy),
        sm_active: mean(&sm_active),
        age: oldest(&sm_active),
        queue: Some(
            backstage
                .serving
                .replicas()
                .iter()
                .map(|replica| replica.queue)
                .sum(),
        ),
        current: seen.hpa.current,
        desired: seen.hpa.desired,
        ready: seen.count(Phase::Ready),
        loading: seen.count(Phase::Loading) + seen.count(Phase::Pending),
        answered: u32::try_from(sm_active.len()).unwrap_or(u32::MAX),
    });
    let rows = seen
        .pods
        .iter()
        .map(|(name, pod)| PodRow {
            name: name.clone(),
            node: pod.node.clone(),
            phase: match pod.phase {
                Phase::Pending => "pending",
                Phase::Loading => "loading",
                Phase::Ready => "ready",
                Phase::Ending => "ending",
            },
            busy: busy.get(name).map(|reading| reading.value),
            sm_active: sm_active.get(name).map(|reading| reading.value),
            age: sm_active.get(name).map(|reading| reading.age),
        })
        .collect();
    stage.update(|picture| {
        picture.pods = rows;
        for node in &mut picture.nodes {
            node.used = seen.pods.values().filter(|pod| pod.node == node.name).count();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::reading::Reading;
    use super::*;

    fn seen(desired: i32, ready: usize, answered: usize) -> Seen {
        let name = |number: usize| format!("llm-{number}");
        Seen {
            at: Instant::now(),
            hpa: Hpa {
                current: Some(desired),
                desired: Some(desired),
                ..Hpa::default()
            },
            pods: (0..ready)
                .map(|number| {
                    (
                        name(number),
                        SeenPod {
                            uid: String::new(),
                            node: "gpu-1".into(),
                            phase: Phase::Ready,
                        },
                    )
                })
                .collect(),
            sm_active: Some(Ok((0..answered)
                .map(|number| (name(number), Reading { value: 1.0, age: 1.0 }))
                .collect())),
            busy: None,
        }
    }

    #[test]
    fn settled_means_wanted_ready_and_answered_for() {
        assert!(seen(3, 3, 3).is_settled());
        assert!(!seen(4, 3, 3).is_settled());
        assert!(!seen(3, 3, 2).is_settled());
        let mut ending = seen(3, 3, 3);
        ending.pods.insert(
            "old".into(),
            SeenPod {
                uid: String::new(),
                node: String::new(),
                phase: Phase::Ending,
            },
        );
        assert!(!ending.is_settled());
    }

    #[test]
    fn phases_come_from_the_pods_status() {
        let pod = |json: serde_json::Value| seen_pod(&serde_json::from_value(json).unwrap()).unwrap().1.phase;
        let status = |phase: &str, ready: &str| {
            serde_json::json!({"metadata": {"name": "a"}, "status": {"phase": phase, "conditions": [
                {"type": "Ready", "status": ready}]}})
        };
        assert_eq!(pod(status("Running", "True")), Phase::Ready);
        assert_eq!(pod(status("Running", "False")), Phase::Loading);
        assert_eq!(pod(status("Pending", "False")), Phase::Pending);
        let mut ending = status("Running", "True");
        ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        assert_eq!(pod(ending), Phase::Ending);
    }
}
