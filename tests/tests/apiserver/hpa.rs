//! The loop: a GPU's load travels through exporter, adapter, API server and the real HPA controller into
//! replicas, and back.
//!
//! How many replicas there must be is computed here, from the offered load and the formula that Kubernetes
//! documents for the HPA ([`desired`]), never read off the system. The trial that halves the adapter's
//! values shows that the check can fail.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use forewarm_tests::load::clock::LoadClock;
use forewarm_tests::load::serving::{Phase, Serving};
use forewarm_tests::load::shape::Shape;
use forewarm_tests::load::trace::{Columns, Trace};
use forewarm_tests::load::{Constant, OfferedLoad};
use forewarm_tests::wait::until;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::fixture::{Case, Fixture, case, disturbing};
use crate::serving::IMAGE;
use crate::stack;

/// What the HPA aims at: per cent of SM time.
const TARGET: f64 = 60.0;
/// The HPA's default tolerance.
const TOLERANCE: f64 = 0.1;
/// Most replicas: several such trials fit the nodes side by side.
const MOST: u32 = 8;
/// Patience with one change of scale: window, syncs, start and loading of replicas, several times over.
const PATIENCE: Duration = Duration::from_secs(90);
/// How long a result must stand to count: several syncs, scrapes and, with the short one, windows.
const STANDS: Duration = Duration::from_secs(5);

pub(crate) fn cases() -> Vec<Case> {
    vec![
        case(
            "hpa_follows_the_generators_load_with_both_versions_registered",
            |fixture| async move { generator(&fixture, "both", AS_INSTALLED).await },
        ),
        case("hpa_check_is_red_when_the_adapter_halves_its_values", halved),
        case("hpa_does_not_shrink_while_a_replica_loads", loading),
        case("hpa_follows_a_recording", recording),
        disturbing("hpa_follows_the_generators_load_with_v1beta1_only", |fixture| {
            only(fixture, "v1beta1")
        }),
        disturbing("hpa_follows_the_generators_load_with_v1beta2_only", |fixture| {
            only(fixture, "v1beta2")
        }),
    ]
}

/// The HPA's formula for one metric of kind Pods: `ceil(current × average / target)`, and no change
/// within the tolerance.
fn desired(current: u32, average: f64) -> u32 {
    let ratio = average / TARGET;
    if (ratio - 1.0).abs() <= TOLERANCE {
        return current;
    }
    // Replicas are small, loads finite and positive.
    ((f64::from(current) * ratio).ceil() as u32).clamp(1, MOST)
}

/// Numbers of replicas at which the formula asks for no change when `gpus` of load are divided evenly.
fn fixed_points(gpus: f64) -> Vec<u32> {
    (1..=MOST)
        .filter(|&replicas| desired(replicas, average(gpus, replicas)) == replicas)
        .collect()
}

/// What each of `replicas` shows, in per cent: a replica uses at most 95 % of its SMs.
fn average(gpus: f64, replicas: u32) -> f64 {
    (gpus / f64::from(replicas)).min(forewarm_tests::load::replica::SM_CEILING) * 100.0
}

/// The metric as the manifests have it, averaged over 15 s.
const AS_INSTALLED: &str = "gpu_sm_active_percent";

/// A Deployment under load, with its HPA.
struct Scaled {
    client: Client,
    namespace: String,
    serving: Serving,
    clock: Arc<LoadClock>,
}

/// An HPA's `metrics`.
fn metrics(name: &str) -> Value {
    let target = json!({"type": "AverageValue", "averageValue": TARGET.to_string()});
    json!([{"type": "Pods", "pods": {"metric": {"name": name}, "target": target}}])
}

/// What the HPA says at one moment.
#[derive(Debug, Clone)]
struct Seen {
    current: u32,
    desired: u32,
    /// `ScalingActive`, once it is known.
    active: Option<bool>,
    trouble: Option<String>,
}

impl Scaled {
    async fn start(
        fixture: &Fixture,
        purpose: &str,
        load: Arc<dyn OfferedLoad>,
        loading: Duration,
        least: u32,
        metric: &str,
    ) -> anyhow::Result<Self> {
        fixture.stack().await?;
        let client = fixture.client().await?;
        let namespace = fixture.namespace(purpose).await?;
        let clock = Arc::new(LoadClock::new(load));
        let serving = Serving::new(Arc::clone(&clock), loading, 7);
        fixture.router().route(&namespace, Arc::new(serving.clone()));
        let deployment = serde_json::from_value(json!({
            "metadata": {"name": "llm"},
            "spec": {
                "replicas": least,
                "selector": {"matchLabels": {"app": "llm"}},
                "template": {
                    "metadata": {"labels": {"app": "llm"}},
                    "spec": {
                        "terminationGracePeriodSeconds": 5,
                        "containers": [{"name": "server", "image": IMAGE, "resources": {"limits": {"nvidia.com/gpu": 1}}}],
                    },
                },
            },
        }))?;
        let deployments: Api<Deployment> = Api::namespaced(client.clone(), &namespace);
        deployments.create(&PostParams::default(), &deployment).await?;
        let scaled = Self {
            client,
            namespace,
            serving,
            clock,
        };
        scaled.wait_for_ready(least).await?;
        let hpa = serde_json::from_value(json!({
            "metadata": {"name": "llm"},
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llm"},
                "minReplicas": least,
                "maxReplicas": MOST,
                "metrics": metrics(metric),
                "behavior": {
                    "scaleUp": {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 4, "periodSeconds": 3}]},
                    "scaleDown": {"stabilizationWindowSeconds": 0, "policies": [{"type": "Percent", "value": 100, "periodSeconds": 3}]},
                },
            },
        }))?;
        scaled.hpas().create(&PostParams::default(), &hpa).await?;
        Ok(scaled)
    }

    fn hpas(&self) -> Api<HorizontalPodAutoscaler> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    async fn seen(&self) -> anyhow::Result<Seen> {
        let hpa = self.hpas().get("llm").await?;
        let status = hpa.status.unwrap_or_default();
        let number = |value: i32| u32::try_from(value).unwrap_or_default();
        let conditions = status.conditions.unwrap_or_default();
        let active = conditions
            .iter()
            .find(|condition| condition.type_ == "ScalingActive");
        let trouble = conditions
            .iter()
            .filter(|condition| matches!(condition.type_.as_str(), "ScalingActive" | "AbleToScale"))
            .find(|condition| condition.status == "False")
            .map(|condition| {
                format!(
                    "{} {}: {}",
                    condition.type_,
                    condition.reason.as_deref().unwrap_or_default(),
                    condition.message.as_deref().unwrap_or_default()
                )
            });
        Ok(Seen {
            current: number(status.current_replicas.unwrap_or(0)),
            desired: number(status.desired_replicas),
            active: active.map(|condition| condition.status == "True"),
            trouble,
        })
    }

    async fn wait_for_ready(&self, replicas: u32) -> anyhow::Result<()> {
        until(&format!("{replicas} replicas take load"), PATIENCE, || async {
            let ready = self
                .serving
                .replicas()
                .iter()
                .filter(|view| view.phase == Phase::Ready)
                .count();
            if ready == replicas as usize {
                Ok(())
            } else {
                Err(format!("{:?}", self.serving.replicas()))
            }
        })
        .await?;
        Ok(())
    }

    /// Waits for the HPA's first sync without trouble.
    async fn wait_for_first_sync(&self) -> anyhow::Result<()> {
        until("the HPA reads its metric", PATIENCE, || async {
            let seen = self.seen().await.map_err(|error| error.to_string())?;
            if seen.active == Some(true) && seen.trouble.is_none() {
                Ok(())
            } else {
                Err(format!("{seen:?}"))
            }
        })
        .await?;
        Ok(())
    }

    /// Waits until the HPA has asked for `wanted` replicas for [`STANDS`], all of them there and ready.
    /// The HPA must not be in trouble at any moment.
    async fn settles_at(&self, wanted: &[u32]) -> anyhow::Result<u32> {
        let deadline = Instant::now() + PATIENCE;
        let mut since: Option<(Instant, u32)> = None;
        let mut history: Vec<(u32, u32)> = Vec::new();
        loop {
            let seen = self.seen().await?;
            if let Some(trouble) = &seen.trouble {
                bail!("the HPA is in trouble: {trouble}; current and desired so far: {history:?}");
            }
            if history.last() != Some(&(seen.current, seen.desired)) {
                history.push((seen.current, seen.desired));
            }
            let views = self.serving.replicas();
            let all_ready =
                views.len() == seen.current as usize && views.iter().all(|view| view.phase == Phase::Ready);
            let right = wanted.contains(&seen.desired) && seen.current == seen.desired && all_ready;
            since = match since {
                Some((start, number)) if right && number == seen.desired => Some((start, number)),
                _ if right => Some((Instant::now(), seen.desired)),
                _ => None,
            };
            if let Some((start, number)) = since
                && start.elapsed() >= STANDS
            {
                return Ok(number);
            }
            if Instant::now() >= deadline {
                bail!(
                    "the HPA did not settle at any of {wanted:?}; current and desired: {history:?}; replicas: {views:?}"
                );
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    async fn end(self) -> anyhow::Result<()> {
        self.hpas().delete("llm", &Default::default()).await?;
        let deployments: Api<Deployment> = Api::namespaced(self.client.clone(), &self.namespace);
        deployments.delete("llm", &Default::default()).await?;
        until("all replicas have ended", PATIENCE, || async {
            let left = self.serving.replicas();
            if left.is_empty() {
                Ok(())
            } else {
                Err(format!("{left:?}"))
            }
        })
        .await?;
        Ok(())
    }
}

/// A load whose plateau needs a number of replicas that no tolerance blurs: with `gpus` of load there is
/// exactly one number at which the formula rests.
fn unambiguous(gpus: f64) -> anyhow::Result<u32> {
    match fixed_points(gpus).as_slice() {
        [one] => Ok(*one),
        several => bail!("{gpus} GPUs rest at {several:?}: choose another load"),
    }
}

/// Peak of the generator in these trials, GPUs: three replicas, with little to queue on the way there.
const PEAK: f64 = 1.7;
/// Load under the metric that is halved, GPUs: true values need four replicas, halved ones fewer.
const HALVED_LOAD: f64 = 2.25;

async fn generator(fixture: &Fixture, purpose: &str, metric: &str) -> anyhow::Result<()> {
    let load = Arc::new(Shape::new(7, Duration::from_secs(12), PEAK));
    let scaled = Scaled::start(fixture, purpose, load, Duration::from_secs(2), 1, metric).await?;
    scaled.wait_for_first_sync().await?;
    let quiet = scaled.seen().await?;
    ensure!(
        (quiet.current, quiet.desired) == (1, 1),
        "before the load: {quiet:?}"
    );
    one_to_many_to_one(&scaled).await?;
    scaled.end().await
}

/// The same with one version of the API registered; the other is registered again whatever happens.
async fn only(fixture: Arc<Fixture>, version: &'static str) -> anyhow::Result<()> {
    fixture.stack().await?;
    let client = fixture.client().await?;
    stack::register_custom_metrics(&client, &[version]).await?;
    let outcome = generator(&fixture, version, stack::SHORT).await;
    stack::register_custom_metrics(&client, &["v1beta1", "v1beta2"]).await?;
    outcome
}

/// Lets the load climb to its plateau, holds it there, checks the number, lets it go down, checks one.
async fn one_to_many_to_one(scaled: &Scaled) -> anyhow::Result<u32> {
    scaled.clock.start(Instant::now());
    // The shape's plateau lies around half its length.
    let plateau = scaled.clock.length().mul_f64(0.55);
    until("the load's plateau", PATIENCE, || async {
        let at = scaled.clock.position(Instant::now());
        if at >= plateau {
            Ok(())
        } else {
            Err(format!("{at:?}"))
        }
    })
    .await?;
    scaled.clock.hold(Instant::now(), PEAK);
    let wanted = unambiguous(PEAK)?;
    ensure!(wanted > 2, "a load that needs {wanted} replicas shows little");
    let many = scaled.settles_at(&[wanted]).await?;
    scaled.clock.go_on(Instant::now());
    scaled.settles_at(&[1]).await?;
    Ok(many)
}

/// The same check on a metric whose scale is halved must be red: it settles elsewhere. Then the HPA is
/// pointed at the true metric, and the very same check is green.
async fn halved(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let load = Arc::new(Constant(HALVED_LOAD));
    let scaled = Scaled::start(&fixture, "halved", load, Duration::from_secs(1), 1, stack::HALVED).await?;
    scaled.wait_for_first_sync().await?;
    let wanted = unambiguous(HALVED_LOAD)?;
    let halved: Vec<u32> = (1..=MOST)
        .filter(|&n| desired(n, average(HALVED_LOAD, n) / 2.0) == n)
        .collect();
    ensure!(
        !halved.contains(&wanted),
        "halved values rest at {halved:?}, which {wanted} does not tell apart"
    );
    scaled.settles_at(&halved).await.context("with halved values")?;
    let patch = json!({"spec": {"metrics": metrics(stack::SHORT)}});
    scaled
        .hpas()
        .patch("llm", &PatchParams::default(), &Patch::Merge(patch))
        .await?;
    scaled.settles_at(&[wanted]).await.context("with true values")?;
    scaled.end().await
}

/// Five replicas, the fifth still loading, four at exactly the target. An adapter that reports 0 for the
/// fifth makes the average 48 %, and the HPA would take it away before it has served a request.
async fn loading(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let load = Arc::new(Constant(0.0));
    let scaled = Scaled::start(
        &fixture,
        "loading",
        load,
        Duration::from_secs(10),
        4,
        stack::SHORT,
    )
    .await?;
    let hold = |gpus: f64| scaled.clock.hold(Instant::now(), gpus);
    hold(2.4);
    scaled.wait_for_first_sync().await?;
    ensure!(scaled.settles_at(&[4]).await? == 4);
    hold(3.0);
    until("the HPA asks for a fifth replica", PATIENCE, || async {
        let seen = scaled.seen().await.map_err(|error| error.to_string())?;
        if seen.desired == 5 {
            Ok(())
        } else {
            Err(format!("{seen:?}"))
        }
    })
    .await?;
    hold(2.4);
    let loads = |phase: Phase| {
        scaled
            .serving
            .replicas()
            .iter()
            .filter(|view| view.phase == phase)
            .count()
    };
    until("the fifth replica loads", PATIENCE, || async {
        if loads(Phase::Loading) == 1 {
            Ok(())
        } else {
            Err(format!("{:?}", scaled.serving.replicas()))
        }
    })
    .await?;
    let mut looks = 0;
    while loads(Phase::Loading) == 1 {
        let seen = scaled.seen().await?;
        ensure!(
            seen.desired >= 5,
            "the HPA shrinks to {} while a replica loads",
            seen.desired
        );
        ensure!(seen.trouble.is_none(), "{:?}", seen.trouble);
        looks += 1;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    ensure!(looks > 10, "looked only {looks} times while it loaded");
    // Loaded, it takes a fifth of the load, and now the HPA may take one away: 48 % is below the tolerance.
    scaled.settles_at(&fixed_points(2.4)).await?;
    scaled.end().await
}

/// Replays a recording as offered load, stopping at three moments to compare.
async fn recording(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let Some(path) = fixture.recording("traces/genai_gpu_activity.csv") else {
        return Ok(());
    };
    // 0–14.5 GPUs in the recording; scaled to the nodes' size.
    let columns = Columns {
        time: "time_s".to_owned(),
        value: "gpu_busy_percent".to_owned(),
        sum_by_time: true,
        scale: 0.01 * 0.4,
        speed: 2_000.0,
    };
    let trace = Arc::new(Trace::read(&path, &columns)?);
    let (length, step) = (trace.length(), trace.length() / 400);
    let at = |load: f64| {
        (0..400)
            .map(|index| step * index)
            .find(|&moment| (trace.gpus(moment) - load).abs() < 0.15)
    };
    ensure!(length > Duration::ZERO);
    let scaled = Scaled::start(
        &fixture,
        "recording",
        trace.clone(),
        Duration::from_secs(1),
        1,
        stack::SHORT,
    )
    .await?;
    scaled.wait_for_first_sync().await?;
    scaled.clock.start(Instant::now());
    let mut stops: Vec<Duration> = [0.5, 2.25, 4.6].into_iter().filter_map(at).collect();
    stops.sort_unstable();
    ensure!(stops.len() >= 2, "the recording has none of the loads to stop at");
    let mut numbers = Vec::new();
    for stop in stops {
        until("the recording's next stop", PATIENCE, || async {
            let now = scaled.clock.position(Instant::now());
            if now >= stop {
                Ok(())
            } else {
                Err(format!("{now:?} of {stop:?}"))
            }
        })
        .await?;
        let level = trace.gpus(stop);
        scaled.clock.hold(Instant::now(), level);
        numbers.push(
            scaled
                .settles_at(&fixed_points(level))
                .await
                .with_context(|| format!("at {level} GPUs"))?,
        );
        scaled.clock.go_on(Instant::now());
    }
    ensure!(
        numbers.iter().any(|&number| number != numbers[0]),
        "the recording moved nothing: {numbers:?}"
    );
    scaled.clock.hold(Instant::now(), 0.05);
    scaled.settles_at(&[1]).await?;
    scaled.end().await
}
