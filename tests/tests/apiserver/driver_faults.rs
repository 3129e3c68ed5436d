//! What goes wrong between driver, kubelet and exporter, seen from the metrics API and the HPA.
//!
//! Each trial first sees the right values through the API server, injects, asserts what is served and why the rest is
//! not, the exporter's counter, and an HPA that holds; then it takes the fault away and sees the right values again.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use forewarm_fake_nvml::control::{Block, Effect, Fault, Garbage};
use forewarm_tests::kubelet::{Api as KubeletApi, Call, Fault as KubeletFault};
use forewarm_tests::process::Scrape;
use forewarm_tests::simnode::SimNode;
use forewarm_tests::wait::until;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};

use crate::fixture::{Case, Fixture, GPUS, case, disturbing};
use crate::stack;
use crate::victim::{PATIENCE, Victim, is_right};

/// The node of these trials.
const NODE: &str = "gpu-2";
/// Well beyond the kubelet polls and the metric's maxAge, so that a value that would fade has faded.
const LONG_ENOUGH: Duration = Duration::from_secs(12);
/// One more poll of the kubelet, and what it changes.
const A_POLL: Duration = Duration::from_secs(6);

pub(crate) fn cases() -> Vec<Case> {
    vec![
        case(
            "fault_lost_gpu_leaves_its_pod_without_value_and_the_others_alone",
            |fixture| {
                one_gpu(fixture, "lost-gpu", Effect::Lost, |scrape, before| {
                    rose(
                        scrape,
                        before,
                        "forewarm_exporter_nvml_errors_total",
                        &[("code", "gpu-is-lost")],
                    )
                })
            },
        ),
        case(
            "fault_blocked_gpu_leaves_its_pod_without_value_and_the_others_fresh",
            |fixture| {
                one_gpu(
                    fixture,
                    "blocked-gpu",
                    Effect::Block(Block::Forever),
                    |scrape, _| match scrape.need("forewarm_exporter_stuck_gpus", &[])? {
                        1.0 => Ok(()),
                        other => Err(format!("{other} stuck GPUs")),
                    },
                )
            },
        ),
        case("fault_impossible_readings_are_absent_and_counted", |fixture| {
            one_gpu(
                fixture,
                "garbage-gpu",
                Effect::Garbage(Garbage::OutOfRange),
                |scrape, before| rose(scrape, before, "forewarm_exporter_rejected_values_total", &[]),
            )
        }),
        disturbing("fault_driver_that_goes_away_and_comes_back", driver),
        disturbing(
            "fault_kubelet_that_limits_pads_moves_and_ends_its_sockets",
            kubelet,
        ),
    ]
}

fn rose(scrape: &Scrape, before: &Scrape, name: &str, labels: &[(&str, &str)]) -> Result<(), String> {
    let (now, then) = (scrape.sum(name, labels), before.sum(name, labels));
    if now > then {
        Ok(())
    } else {
        Err(format!("{name}{labels:?} stays at {then}"))
    }
}

async fn node(fixture: &Fixture) -> anyhow::Result<Arc<SimNode>> {
    let nodes = fixture.nodes().await?;
    nodes
        .into_iter()
        .find(|node| node.name() == NODE)
        .context("the node")
}

/// Reads the exporter of [`NODE`]: both what Prometheus reads and what it tells of itself.
async fn exporter(client: &Client) -> anyhow::Result<Scrape> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), stack::NAMESPACE);
    let exporters = pods
        .list(&ListParams::default().labels("app.kubernetes.io/name=forewarm-exporter"))
        .await?;
    let address = exporters
        .items
        .into_iter()
        .filter(|pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(NODE))
        .find_map(|pod| pod.status?.pod_ip)
        .context("the exporter's address")?;
    let address: std::net::IpAddr = address.parse()?;
    let devices = forewarm_tests::process::fetch(SocketAddr::new(address, 9410), "/metrics")
        .await?
        .text();
    let itself = forewarm_tests::process::fetch(SocketAddr::new(address, 9411), "/metrics")
        .await?
        .text();
    // The few own series that both ports tell count once.
    let devices: Vec<&str> = devices
        .lines()
        .filter(|line| !line.starts_with("forewarm_"))
        .collect();
    Scrape::read(&format!("{}\n{itself}", devices.join("\n"))).map_err(anyhow::Error::msg)
}

async fn exporter_says(
    client: &Client,
    what: &str,
    holds: impl Fn(&Scrape) -> Result<(), String>,
) -> anyhow::Result<()> {
    until(what, PATIENCE, || async {
        holds(&exporter(client).await.map_err(|error| error.to_string())?)
    })
    .await?;
    Ok(())
}

/// The GPU that a pod holds, as the node's kubelet knows it.
fn gpu_of(node: &SimNode, uid: &str) -> anyhow::Result<u32> {
    let state = node.kubelet().state();
    let pod = state.pods.get(uid).context("the kubelet knows the pod")?;
    let text = format!("{:?}", pod.containers);
    let index = node
        .gpu_uuids()
        .iter()
        .position(|uuid| text.contains(uuid))
        .context("the pod holds a GPU")?;
    Ok(u32::try_from(index)?)
}

/// GPUs with a fault, also by trials that run beside this one.
fn struck(node: &SimNode) -> BTreeSet<String> {
    let mut struck = BTreeSet::new();
    node.gpus().inject(|control| {
        struck = control
            .faults
            .iter()
            .filter_map(|fault| fault.gpu.map(|gpu| gpu.to_string()))
            .collect();
    });
    struck
}

/// Strikes the GPU of one of two replicas.
async fn one_gpu(
    fixture: Arc<Fixture>,
    purpose: &'static str,
    effect: Effect,
    counted: impl Fn(&Scrape, &Scrape) -> Result<(), String>,
) -> anyhow::Result<()> {
    let victim = Victim::start(&fixture, purpose, NODE).await?;
    let node = node(&fixture).await?;
    let pods = victim.pods().await?;
    let (name, uid) = pods
        .first()
        .and_then(|pod| Some((pod.metadata.name.clone()?, pod.metadata.uid.clone()?)))
        .context("a replica")?;
    let gpu = gpu_of(&node, &uid)?;
    let before = exporter(&victim.client).await?;

    node.gpus()
        .inject(|control| control.faults.push(Fault::on_gpu(gpu, effect)));
    let outcome = async {
        let message = victim.becomes_absent(Some(&name)).await?;
        ensure!(message.contains(&name), "the pod is not named in: {message}");
        // The other replica is served as before, and its value alone.
        let values = victim.values().await?;
        ensure!(
            values.len() == 1 && values.iter().all(|value| is_right(*value)),
            "{values:?}"
        );
        exporter_says(&victim.client, "the exporter counts it", |scrape| {
            counted(scrape, &before)
        })
        .await?;
        exporter_says(
            &victim.client,
            "every GPU without a fault is at most one interval old",
            |scrape| {
                let struck = struck(&node);
                let old: Vec<_> = scrape
                    .all("gpu_sample_age_seconds", &[("group", "memory")])
                    .filter(|sample| !struck.contains(sample.label("gpu")))
                    .map(|sample| sample.value)
                    .collect();
                if old.len() + struck.len() == GPUS as usize && old.iter().all(|age| *age <= 1.0) {
                    Ok(())
                } else {
                    Err(format!("ages: {old:?}, struck: {struck:?}"))
                }
            },
        )
        .await
    }
    .await;
    node.gpus().inject(|control| {
        control
            .faults
            .retain(|fault| *fault != Fault::on_gpu(gpu, effect));
    });
    outcome?;
    victim.shows_the_right_values(PATIENCE).await?;
    victim.end().await
}

/// The driver is unloaded under a running exporter, and loaded again.
async fn driver(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let victim = Victim::start(&fixture, "driver", NODE).await?;
    let node = node(&fixture).await?;
    let before = exporter(&victim.client).await?;
    node.gpus().inject(|control| control.driver_loaded = Some(false));
    let gone = async {
        victim.becomes_absent(None).await?;
        exporter_says(
            &victim.client,
            "the exporter waits for the driver",
            |scrape| match scrape.need("forewarm_exporter_nvml_up", &[])? {
                0.0 => Ok(()),
                other => Err(format!("nvml_up {other}")),
            },
        )
        .await
    }
    .await;
    node.gpus().inject(|control| control.driver_loaded = None);
    gone?;
    victim.shows_the_right_values(PATIENCE).await?;
    exporter_says(&victim.client, "the library was opened anew", |scrape| {
        rose(scrape, &before, "forewarm_exporter_nvml_opens_total", &[])
    })
    .await?;
    victim.end().await
}

/// Limits, large answers, new sockets and none: the last good answer is kept, its age and the reason are told.
async fn kubelet(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let victim = Victim::start(&fixture, "kubelet", NODE).await?;
    let node = node(&fixture).await?;
    let kubelet = node.kubelet();
    let before = exporter(&victim.client).await?;
    let outcome = async {
        kubelet.fault(Call::List, Some(KubeletFault::RateLimited));
        exporter_says(&victim.client, "the exporter counts the limit", |scrape| {
            let labels = [("reason", "rate-limited")];
            rose(
                scrape,
                &before,
                "forewarm_exporter_attribution_errors_total",
                &labels,
            )
        })
        .await?;
        victim.is_untouched_for(A_POLL).await.context("rate-limited")?;

        let asked = kubelet.calls(Call::List);
        kubelet.fault(Call::List, Some(KubeletFault::Padded(5 * 1024 * 1024)));
        until("the large answer is read", PATIENCE, || async {
            if kubelet.calls(Call::List) > asked {
                Ok(())
            } else {
                Err("not asked yet".to_owned())
            }
        })
        .await?;
        victim
            .is_untouched_for(A_POLL)
            .await
            .context("an answer over 4 MiB")?;

        // More than any node can have to tell: refused under its own reason, the last good answer stays.
        kubelet.fault(Call::List, Some(KubeletFault::Padded(17 * 1024 * 1024)));
        exporter_says(&victim.client, "the oversized answer is refused", |scrape| {
            let labels = [("reason", "answer-too-large")];
            rose(
                scrape,
                &before,
                "forewarm_exporter_attribution_errors_total",
                &labels,
            )
        })
        .await?;
        victim
            .is_untouched_for(A_POLL)
            .await
            .context("an answer over 16 MiB")?;
        kubelet.fault(Call::List, None);

        let asked = kubelet.calls(Call::List);
        kubelet.replace(KubeletApi::PodResources)?;
        kubelet.replace(KubeletApi::Pods)?;
        until("the new sockets are found", PATIENCE, || async {
            if kubelet.calls(Call::List) > asked {
                Ok(())
            } else {
                Err("not asked yet".to_owned())
            }
        })
        .await?;
        victim.is_untouched_for(A_POLL).await.context("new sockets")?;

        // Without its kubelet a node starts and ends no pod: who holds what is as it was.
        kubelet.close(KubeletApi::PodResources);
        kubelet.close(KubeletApi::Pods);
        victim.is_untouched_for(LONG_ENOUGH).await.context("no sockets")?;
        exporter_says(
            &victim.client,
            "the exporter names the missing sockets and the answer's age",
            |scrape| {
                let labels = [("reason", "socket-missing")];
                rose(
                    scrape,
                    &before,
                    "forewarm_exporter_attribution_errors_total",
                    &labels,
                )?;
                let age = scrape.sum(
                    "forewarm_exporter_attribution_age_seconds",
                    &[("api", "allocations")],
                );
                if age > LONG_ENOUGH.as_secs_f64() / 2.0 {
                    Ok(())
                } else {
                    Err(format!("an age of {age} s"))
                }
            },
        )
        .await?;
        anyhow::Ok(())
    }
    .await;
    kubelet.fault(Call::List, None);
    kubelet.serve(KubeletApi::PodResources)?;
    kubelet.serve(KubeletApi::Pods)?;
    outcome?;
    victim.shows_the_right_values(PATIENCE).await?;
    victim.end().await
}
