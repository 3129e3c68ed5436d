//! The workload that fault trials watch: replicas under a constant load, and an HPA at rest.
//!
//! A trial first sees the right values here, injects its fault, and then asserts what is served, why something is
//! not, and that the HPA has not moved.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use forewarm_tests::load::Constant;
use forewarm_tests::load::clock::LoadClock;
use forewarm_tests::load::serving::Serving;
use forewarm_tests::process::Scrape;
use forewarm_tests::wait::until;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::fixture::Fixture;
use crate::serving::IMAGE;
use crate::stack;

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Offered load of these trials, GPUs: two replicas at 45 %, where the HPA rests (see [`HPA_TARGET`]).
pub(crate) const LOAD: f64 = 0.9;
pub(crate) const REPLICAS: u32 = 2;
/// Per cent that each replica shows.
pub(crate) const VALUE: f64 = 45.0;
/// Per cent that the HPA aims at: [`VALUE`] itself, so that any wrong value would move it.
pub(crate) const HPA_TARGET: &str = "45";
/// How far a right value may be off: the fake's readings carry no noise, the window rounds.
pub(crate) const EXACT: f64 = 2.0;

/// How long values must be right to count as settled: the window, a scrape's interval and a tick.
const STANDS: Duration = Duration::from_secs(4);

/// Replicas under a constant load, and an HPA at rest.
pub(crate) struct Victim {
    pub(crate) client: Client,
    pub(crate) namespace: String,
    clock: Arc<LoadClock>,
}

impl Victim {
    /// On `node` only, and settled: the API serves [`VALUE`] for each replica, and the HPA is at rest.
    pub(crate) async fn start(fixture: &Fixture, purpose: &str, node: &str) -> anyhow::Result<Self> {
        let place = json!({"nodeSelector": {"kubernetes.io/hostname": node}});
        let victim = Self::deploy(fixture, purpose, place).await?;
        victim.settle().await?;
        Ok(victim)
    }

    /// Replicas alone, placed by fields of the pod spec.
    pub(crate) async fn deploy(fixture: &Fixture, purpose: &str, place: Value) -> anyhow::Result<Self> {
        fixture.stack().await?;
        let client = fixture.client().await?;
        let namespace = fixture.namespace(purpose).await?;
        let clock = Arc::new(LoadClock::new(Arc::new(Constant(LOAD))));
        let serving = Serving::new(Arc::clone(&clock), Duration::ZERO, 7);
        fixture.router().route(&namespace, Arc::new(serving));
        let mut deployment = json!({
            "metadata": {"name": "llm"},
            "spec": {
                "replicas": REPLICAS,
                "selector": {"matchLabels": {"app": "llm"}},
                "template": {
                    "metadata": {"labels": {"app": "llm"}},
                    "spec": {
                        "terminationGracePeriodSeconds": 5,
                        "containers": [{"name": "server", "image": IMAGE, "resources": {"limits": {"nvidia.com/gpu": 1}}}],
                    },
                },
            },
        });
        let spec = &mut deployment["spec"]["template"]["spec"];
        for (field, value) in place.as_object().into_iter().flatten() {
            spec[field] = value.clone();
        }
        let deployments: Api<Deployment> = Api::namespaced(client.clone(), &namespace);
        deployments
            .create(&PostParams::default(), &serde_json::from_value(deployment)?)
            .await?;
        Ok(Self {
            client,
            namespace,
            clock,
        })
    }

    /// Waits for the right values and lets an HPA come to rest on them.
    pub(crate) async fn settle(&self) -> anyhow::Result<()> {
        let victim = self;
        victim.shows_the_right_values(PATIENCE).await?;
        let hpa = serde_json::from_value(json!({
            "metadata": {"name": "llm"},
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llm"},
                "minReplicas": 1,
                "maxReplicas": 6,
                "metrics": [{"type": "Pods", "pods": {
                    "metric": {"name": stack::SHORT},
                    "target": {"type": "AverageValue", "averageValue": HPA_TARGET},
                }}],
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
            },
        }))?;
        victim.hpas().create(&PostParams::default(), &hpa).await?;
        until("the HPA reads its metric", PATIENCE, || async {
            match victim.hpa().await {
                Ok((REPLICAS, None)) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await?;
        Ok(())
    }

    pub(crate) fn hpas(&self) -> Api<HorizontalPodAutoscaler> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Desired replicas, and why it is not active if so.
    pub(crate) async fn hpa(&self) -> anyhow::Result<(u32, Option<String>)> {
        let status = self.hpas().get("llm").await?.status.unwrap_or_default();
        let conditions = status.conditions.unwrap_or_default();
        let inactive = conditions
            .iter()
            .find(|condition| condition.type_ == "ScalingActive" && condition.status != "True");
        Ok((
            u32::try_from(status.desired_replicas)?,
            inactive.map(|condition| condition.message.clone().unwrap_or_default()),
        ))
    }

    /// The replicas that there are.
    pub(crate) async fn pods(&self) -> anyhow::Result<Vec<Pod>> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        Ok(pods.list(&ListParams::default().labels("app=llm")).await?.items)
    }

    /// Waits until the value of one replica (or of all that match) is refused with a 404 that says how old the last one
    /// is. Until then nothing but right values, and all the time an HPA that does not move. Returns the message.
    pub(crate) async fn becomes_absent(&self, pod: Option<&str>) -> anyhow::Result<String> {
        let path = match pod {
            Some(pod) => format!(
                "/apis/custom.metrics.k8s.io/v1beta2/namespaces/{}/pods/{pod}/{}",
                self.namespace,
                stack::SHORT
            ),
            None => self.path(),
        };
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (desired, _) = self.hpa().await?;
            ensure!(desired == REPLICAS, "the HPA moved to {desired}");
            match stack::get(&self.client, &path).await {
                Ok(answer) => {
                    for item in answer["items"].as_array().into_iter().flatten() {
                        ensure!(is_right(quantity(&item["value"])), "a wrong value: {item}");
                    }
                }
                Err(kube::Error::Api(status)) if status.code == 404 => {
                    ensure!(
                        status.message.contains(stack::SHORT) && status.message.contains("s ago"),
                        "neither metric nor age in: {}",
                        status.message
                    );
                    return Ok(status.message.clone());
                }
                Err(error) => return Err(error.into()),
            }
            ensure!(
                Instant::now() < deadline,
                "still served: {:?}",
                self.values().await
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    pub(crate) fn path(&self) -> String {
        stack::pods_path("v1beta2", &self.namespace, stack::SHORT, "app=llm")
    }

    /// The values served now, in per cent.
    pub(crate) async fn values(&self) -> Result<Vec<f64>, kube::Error> {
        let answer = stack::get(&self.client, &self.path()).await?;
        let items = answer["items"].as_array().cloned().unwrap_or_default();
        Ok(items.iter().map(|item| quantity(&item["value"])).collect())
    }

    /// Waits until nothing but right values was served for [`STANDS`]: on their way to them, values pass each other.
    pub(crate) async fn shows_the_right_values(&self, within: Duration) -> anyhow::Result<()> {
        let since: Mutex<Option<Instant>> = Mutex::new(None);
        until(
            "the API serves the right value for each replica",
            within,
            || async {
                let values = self.values().await;
                let right = values.as_ref().is_ok_and(|values| {
                    values.len() == REPLICAS as usize && values.iter().all(|value| is_right(*value))
                });
                let mut since = since.lock().unwrap_or_else(PoisonError::into_inner);
                *since = since.or_else(|| Some(Instant::now())).filter(|_| right);
                match *since {
                    Some(start) if start.elapsed() >= STANDS => Ok(()),
                    _ => Err(format!("{values:?}")),
                }
            },
        )
        .await?;
        Ok(())
    }

    /// For a while, nothing but right values, and an HPA that stays.
    pub(crate) async fn is_untouched_for(&self, time: Duration) -> anyhow::Result<()> {
        let start = Instant::now();
        while start.elapsed() < time {
            let values = self.values().await.context("reading values")?;
            ensure!(
                values.len() == REPLICAS as usize && values.iter().all(|value| is_right(*value)),
                "{values:?}"
            );
            let (desired, inactive) = self.hpa().await?;
            ensure!(
                desired == REPLICAS && inactive.is_none(),
                "the HPA: {desired} {inactive:?}"
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Ok(())
    }

    pub(crate) async fn end(self) -> anyhow::Result<()> {
        self.hpas().delete("llm", &DeleteParams::default()).await?;
        let deployments: Api<Deployment> = Api::namespaced(self.client.clone(), &self.namespace);
        deployments.delete("llm", &DeleteParams::default()).await?;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        until("all replicas are gone", PATIENCE, || async {
            let left = pods
                .list(&ListParams::default())
                .await
                .map_err(|error| error.to_string())?;
            if left.items.is_empty() {
                Ok(())
            } else {
                Err(format!("{} pods", left.items.len()))
            }
        })
        .await?;
        drop(self.clock);
        Ok(())
    }
}

pub(crate) fn is_right(value: f64) -> bool {
    (value - VALUE).abs() <= EXACT
}

/// A quantity that is a plain number or milli.
pub(crate) fn quantity(value: &Value) -> f64 {
    let text = value.as_str().unwrap_or_default();
    let (number, factor) = text
        .strip_suffix('m')
        .map_or((text, 1.0), |number| (number, 1e-3));
    number.parse::<f64>().map_or(f64::NAN, |number| number * factor)
}

/// Sum of one of the adapters' own series, over all replicas.
pub(crate) async fn adapters_count(
    client: &Client,
    name: &str,
    labels: &[(&str, &str)],
) -> anyhow::Result<f64> {
    let mut sum = 0.0;
    for pod in stack::adapter_pods(client).await? {
        let address = pod
            .status
            .and_then(|status| status.pod_ip)
            .context("an adapter's address")?;
        let scrape = Scrape::get(SocketAddr::new(address.parse()?, 9411), "/metrics").await?;
        sum += scrape.sum(name, labels);
    }
    Ok(sum)
}
