//! The demo's cluster: a real control plane, simulated H100 nodes, everything else from `manifests/`.
//!
//! Inputs: built programs, the private network already entered. Invariants: each step waits for a condition that
//! the API server shows; a step that fails carries the ends of all logs.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::objects;
use super::picture::{NodeRow, Stage};
use super::story::Exporters;
use crate::controlplane::{ControlPlane, Options};
use crate::install::{Mode, apply};
use crate::kustomize;
use crate::load::serving::Serving;
use crate::process::{Artefacts, Scrape};
use crate::scratch::Scratch;
use crate::simnode::gpus::Driver;
use crate::simnode::{Images, NvidiaRuntime, Run, SimNode, SimNodeSpec};
use crate::wait::until;

/// Simulated nodes and GPUs on each.
pub const NODES: u8 = 3;
/// See [`NODES`].
pub const GPUS: u32 = 8;

/// Namespace of the stack, as in the manifests.
const STACK: &str = "forewarm";

/// Patience with each step: ten times what it takes on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// How much of each log a failure shows.
const LOG_TAIL: u64 = 2_000;

/// The APIServices of the manifests.
const API_SERVICES: [&str; 3] = [
    "v1beta1.custom.metrics.k8s.io",
    "v1beta2.custom.metrics.k8s.io",
    "v1beta1.external.metrics.k8s.io",
];

/// A running cluster; dropping it ends everything.
pub struct Cluster {
    // Nodes end before the API server they report to.
    nodes: Arc<Vec<SimNode>>,
    plane: ControlPlane,
    _overlay: Scratch,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster")
            .field("nodes", &self.nodes.len())
            .finish_non_exhaustive()
    }
}

impl Cluster {
    /// Starts control plane and nodes and installs the stack.
    ///
    /// # Errors
    /// The step that failed, with evidence.
    pub async fn start(
        stage: &Stage,
        artefacts: &Artefacts,
        serving: &Serving,
        hpa_sync: Duration,
    ) -> anyhow::Result<Self> {
        stage.say("starting etcd, kube-apiserver, kube-controller-manager and kube-scheduler");
        let plane = ControlPlane::start(&Options {
            hpa_sync,
            hpa_initial_readiness_delay: Duration::from_secs(1),
            ..Options::default()
        })
        .await?;
        stage.say(format!("starting {NODES} simulated nodes with {GPUS} H100 each"));
        let images = images(artefacts, serving);
        let mut nodes = Vec::new();
        for index in 1..=NODES {
            let spec = SimNodeSpec {
                name: format!("gpu-{index}"),
                index,
                labels: [("topology.kubernetes.io/zone".to_owned(), format!("zone-{index}"))].into(),
                images: Arc::clone(&images),
                driver: Driver::Fake {
                    library: artefacts.fake_nvml.clone(),
                    settings: forewarm_fake_nvml::settings::Settings {
                        profile: Some("h100-sxm".to_owned()),
                        gpus: Some(GPUS),
                        ..Default::default()
                    },
                },
                runtime: NvidiaRuntime::Default,
            };
            let access = plane.access();
            nodes.push(SimNode::start(plane.client(), (access.address, access.port), spec).await?);
        }
        stage.update(|picture| {
            picture.nodes = nodes
                .iter()
                .map(|node| NodeRow {
                    name: node.name().to_owned(),
                    exporter: "starting",
                    used: 0,
                    gpus: node.gpu_uuids().len(),
                })
                .collect();
        });
        let overlay = Scratch::new("demo")?;
        let cluster = Self {
            nodes: Arc::new(nodes),
            plane,
            _overlay: overlay,
        };
        match cluster.install(stage).await {
            Ok(()) => Ok(cluster),
            Err(error) => Err(anyhow::anyhow!("{error:#}\n{}", cluster.evidence().await)),
        }
    }

    async fn install(&self, stage: &Stage) -> anyhow::Result<()> {
        stage.say("installing exporter and adapter from manifests/ by kustomize");
        objects::overlay(self._overlay.path())?;
        let stack = kustomize::render(self._overlay.path())?;
        let client = self.plane.client();
        apply(&client, &stack, Mode::Apply).await?;
        until("an exporter on every node", PATIENCE, || {
            exporters_ready(client.clone())
        })
        .await?;
        stage.update(|picture| picture.nodes.iter_mut().for_each(|row| row.exporter = "up"));
        stage.say("an exporter runs on every node; waiting for the adapter's API");
        until("a ready adapter", PATIENCE, || adapter_ready(client.clone())).await?;
        for name in API_SERVICES {
            until(&format!("an available APIService {name}"), PATIENCE, || {
                api_service_available(client.clone(), name)
            })
            .await?;
        }
        stage.say("the API server serves custom.metrics.k8s.io from the adapter");
        Ok(())
    }

    /// Creates the workload and its HPA.
    ///
    /// # Errors
    /// What the API server refused.
    pub async fn deploy(&self, namespace: &str, name: &str, aim: u32) -> anyhow::Result<()> {
        self.plane.namespace(namespace).await?;
        let most = u32::from(NODES) * GPUS;
        apply(
            &self.plane.client(),
            &objects::workload(namespace, name, aim, most)?,
            Mode::Apply,
        )
        .await?;
        Ok(())
    }

    /// A client with all rights.
    #[must_use]
    pub fn client(&self) -> Client {
        self.plane.client()
    }

    /// Lets other shells reach the API server; writes them a kubeconfig.
    ///
    /// # Errors
    /// When the listener or file cannot be used.
    pub fn serve_outside(&self, listener: TcpListener, kubeconfig: &Path) -> anyhow::Result<()> {
        self.plane.serve_outside(listener, kubeconfig)
    }

    /// The story's hand on the exporters.
    #[must_use]
    pub fn exporters(&self) -> Arc<dyn Exporters> {
        Arc::new(NodeExporters {
            nodes: Arc::clone(&self.nodes),
            client: self.plane.client(),
        })
    }

    /// What the nodes could not do.
    #[must_use]
    pub fn failures(&self) -> Vec<String> {
        self.nodes.iter().flat_map(SimNode::failures).collect()
    }

    /// The ends of all logs.
    pub async fn evidence(&self) -> String {
        let nodes: String = self.nodes.iter().map(|node| node.evidence(LOG_TAIL)).collect();
        format!(
            "{}\n{nodes}{}",
            self.failures().join("\n"),
            self.plane.evidence().await
        )
    }
}

fn images(artefacts: &Artefacts, serving: &Serving) -> Images {
    let program = |binary: &Path| Run::Program {
        binary: binary.to_owned(),
    };
    Arc::new(
        [
            ("forewarm/exporter", program(&artefacts.exporter)),
            ("forewarm/adapter", program(&artefacts.adapter)),
            (
                "forewarm/simulated-inference",
                Run::Workload(Arc::new(serving.clone())),
            ),
        ]
        .into_iter()
        .map(|(name, run)| (name.to_owned(), run))
        .collect(),
    )
}

async fn exporters_ready(client: Client) -> Result<(), String> {
    let sets: Api<DaemonSet> = Api::namespaced(client, STACK);
    let set = sets
        .get("forewarm-exporter")
        .await
        .map_err(|error| error.to_string())?;
    let ready = set.status.map_or(0, |status| status.number_ready);
    if ready == i32::from(NODES) {
        Ok(())
    } else {
        Err(format!("{ready} of {NODES} are ready"))
    }
}

async fn adapter_ready(client: Client) -> Result<(), String> {
    let deployments: Api<Deployment> = Api::namespaced(client, STACK);
    let deployment = deployments
        .get("forewarm-adapter")
        .await
        .map_err(|error| error.to_string())?;
    let wanted = deployment.spec.and_then(|spec| spec.replicas).unwrap_or(1);
    let ready = deployment
        .status
        .and_then(|status| status.ready_replicas)
        .unwrap_or(0);
    if ready == wanted {
        Ok(())
    } else {
        Err(format!("{ready} of {wanted} are ready"))
    }
}

async fn api_service_available(client: Client, name: &str) -> Result<(), String> {
    let request = http::Request::get(format!("/apis/apiregistration.k8s.io/v1/apiservices/{name}"))
        .body(Vec::new())
        .map_err(|error| error.to_string())?;
    let service: Value = client.request(request).await.map_err(|error| error.to_string())?;
    let conditions = service["status"]["conditions"].as_array();
    let available = conditions.and_then(|all| all.iter().find(|condition| condition["type"] == "Available"));
    match available {
        Some(condition) if condition["status"] == "True" => Ok(()),
        Some(condition) => Err(condition["message"].as_str().unwrap_or_default().to_owned()),
        None => Err("no condition yet".to_owned()),
    }
}

/// The exporters of the simulated nodes.
struct NodeExporters {
    nodes: Arc<Vec<SimNode>>,
    client: Client,
}

impl NodeExporters {
    fn signal(&self, node: &str, signal: Signal) -> bool {
        self.nodes
            .iter()
            .filter(|one| one.name() == node)
            .any(|one| one.signal("exporter", signal) > 0)
    }

    async fn read(&self, node: &str, pod_uid: &str) -> anyhow::Result<f64> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), STACK);
        let chosen = ListParams::default()
            .labels("app.kubernetes.io/name=forewarm-exporter")
            .fields(&format!("spec.nodeName={node}"));
        let address = pods
            .list(&chosen)
            .await?
            .items
            .into_iter()
            .find_map(|pod| pod.status?.pod_ip)
            .context("an exporter's address")?;
        let address = SocketAddr::new(address.parse()?, 9410);
        let family = forewarm_signals::pod::SM_ACTIVE_RATIO.name;
        let scrape = Scrape::get(address, &format!("/metrics?name[]={family}")).await?;
        let sample = scrape
            .all(family, &[("pod_uid", pod_uid)])
            .next()
            .map(|sample| sample.value);
        Ok(sample.context("a reading of that pod")? * 100.0)
    }
}

impl Exporters for NodeExporters {
    fn stop(&self, node: &str) -> bool {
        self.signal(node, Signal::SIGSTOP)
    }

    fn go_on(&self, node: &str) {
        self.signal(node, Signal::SIGCONT);
    }

    fn reads<'a>(&'a self, node: &'a str, pod_uid: &'a str) -> BoxFuture<'a, Option<f64>> {
        async move { self.read(node, pod_uid).await.ok() }.boxed()
    }
}
