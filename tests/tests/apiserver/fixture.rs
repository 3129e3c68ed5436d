//! What the trials share: control plane, nodes and the installed stack, each started once, on demand.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use forewarm_fake_nvml::settings::Settings;
use forewarm_tests::controlplane::{ControlPlane, Options};
use forewarm_tests::process::artefacts;
use forewarm_tests::scratch::Scratch;
use forewarm_tests::simnode::gpus::Driver;
use forewarm_tests::simnode::workload::Idle;
use forewarm_tests::simnode::{Images, NvidiaRuntime, Run, SimNode, SimNodeSpec};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use tokio::runtime::Runtime;
use tokio::sync::{Mutex, OnceCell, RwLock};

use crate::forger::{self, Forgers};
use crate::serving::{IMAGE, Router};
use crate::stack;

/// Longest time for one trial: far above any sum of its own deadlines.
const LIMIT: Duration = Duration::from_secs(300);
/// How much of each log a failure shows.
const LOG_TAIL: u64 = 4_000;
/// GPUs per shared node.
pub(crate) const GPUS: u32 = 16;
/// Shared nodes.
pub(crate) const NODES: u8 = 2;

type Running = Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>>;

/// One trial.
pub(crate) struct Case {
    /// What it shows, as a sentence in snake case.
    pub(crate) name: &'static str,
    /// Whether it disturbs what others share, and must run alone.
    pub(crate) disturbs: bool,
    /// The trial.
    pub(crate) run: Box<dyn Fn(Arc<Fixture>) -> Running + Send + Sync>,
}

/// A trial that runs beside others.
pub(crate) fn case<F, Fut>(name: &'static str, run: F) -> Case
where
    F: Fn(Arc<Fixture>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    Case {
        name,
        disturbs: false,
        run: Box::new(move |fixture| Box::pin(run(fixture))),
    }
}

/// A trial that runs alone, because it stops or changes what others use.
pub(crate) fn disturbing<F, Fut>(name: &'static str, run: F) -> Case
where
    F: Fn(Arc<Fixture>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    Case {
        disturbs: true,
        ..case(name, run)
    }
}

/// The shared parts.
pub(crate) struct Fixture {
    runtime: Runtime,
    plane: OnceCell<Result<Arc<ControlPlane>, String>>,
    nodes: OnceCell<Result<Vec<Arc<SimNode>>, String>>,
    stack: OnceCell<Result<(), String>>,
    router: Router,
    forgers: Forgers,
    alone: RwLock<()>,
    namespaces: AtomicU32,
    extra_nodes: AtomicU32,
    reported: Mutex<usize>,
}

impl Fixture {
    /// Makes all temporary folders of the process lie in one, which the caller removes.
    pub(crate) fn folder() -> std::io::Result<Scratch> {
        let folder = Scratch::new("apiserver")?;
        tempfile::env::override_temp_dir(folder.path())
            .map_err(|_| std::io::Error::other("the temporary folder was chosen before"))?;
        Ok(folder)
    }

    pub(crate) fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        Self {
            runtime,
            plane: OnceCell::new(),
            nodes: OnceCell::new(),
            stack: OnceCell::new(),
            router: Router::default(),
            forgers: Forgers::default(),
            alone: RwLock::new(()),
            namespaces: AtomicU32::new(0),
            extra_nodes: AtomicU32::new(0),
            reported: Mutex::new(0),
        }
    }

    /// Runs one trial to its end; the error carries the evidence.
    pub(crate) fn run(self: &Arc<Self>, case: &Case) -> Result<(), String> {
        let (outcome, time) = self.runtime.block_on(async {
            let (_shared, _exclusive) = if case.disturbs {
                (None, Some(self.alone.write().await))
            } else {
                (Some(self.alone.read().await), None)
            };
            // Without the wait for others.
            let start = Instant::now();
            let outcome = match tokio::time::timeout(LIMIT, (case.run)(Arc::clone(self))).await {
                Ok(outcome) => outcome,
                Err(_) => Err(anyhow::anyhow!("not over after {LIMIT:?}")),
            };
            let outcome = match (outcome, self.new_failures().await) {
                (Ok(()), failures) if !failures.is_empty() => Err(anyhow::anyhow!(failures.join("\n"))),
                (outcome, _) => outcome,
            };
            let time = start.elapsed();
            let outcome = match outcome {
                Ok(()) => Ok(()),
                Err(error) => Err(format!("{error:#}\n{}", self.evidence().await)),
            };
            (outcome, time)
        });
        eprintln!("{}: {:.1} s", case.name, time.as_secs_f64());
        outcome
    }

    /// The control plane.
    pub(crate) async fn plane(&self) -> anyhow::Result<Arc<ControlPlane>> {
        let started = self
            .plane
            .get_or_init(|| async {
                // Fast enough for a test, slow enough for a sync to see what the last one caused.
                let options = Options {
                    hpa_sync: Duration::from_secs(1),
                    ..Options::default()
                };
                ControlPlane::start(&options)
                    .await
                    .map(Arc::new)
                    .map_err(|error| format!("{error:#}"))
            })
            .await;
        started.clone().map_err(anyhow::Error::msg)
    }

    /// A client with all rights.
    pub(crate) async fn client(&self) -> anyhow::Result<Client> {
        Ok(self.plane().await?.client())
    }

    /// A fresh namespace, named after what it is for.
    pub(crate) async fn namespace(&self, purpose: &str) -> anyhow::Result<String> {
        let name = format!("{purpose}-{}", self.namespaces.fetch_add(1, Ordering::Relaxed));
        self.plane().await?.namespace(&name).await?;
        Ok(name)
    }

    /// The shared nodes.
    pub(crate) async fn nodes(&self) -> anyhow::Result<Vec<Arc<SimNode>>> {
        let started = self
            .nodes
            .get_or_init(|| async {
                let mut nodes = Vec::new();
                for index in 1..=NODES {
                    let node = self.start_node(&format!("gpu-{index}"), index, true).await;
                    nodes.push(Arc::new(node.map_err(|error| format!("{error:#}"))?));
                }
                Ok(nodes)
            })
            .await;
        started.clone().map_err(anyhow::Error::msg)
    }

    /// Exporter and adapter, installed from the manifests and serving.
    pub(crate) async fn stack(&self) -> anyhow::Result<()> {
        let installed = self
            .stack
            .get_or_init(|| async {
                self.nodes().await.map_err(|error| format!("{error:#}"))?;
                let client = self.client().await.map_err(|error| format!("{error:#}"))?;
                stack::install(client)
                    .await
                    .map_err(|error| format!("installing the stack: {error:#}"))
            })
            .await;
        installed.clone().map_err(anyhow::Error::msg)
    }

    /// Which workload the image `forewarm/simulated-inference` runs in which namespace.
    pub(crate) fn router(&self) -> &Router {
        &self.router
    }

    /// Programs that pose as exporters.
    pub(crate) fn forgers(&self) -> &Forgers {
        &self.forgers
    }

    /// A recording under `FOREWARM_DATA` or beside the repository; `None`, said loudly and counted, where absent.
    pub(crate) fn recording(&self, name: &str) -> Option<PathBuf> {
        let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data");
        let folder = std::env::var_os("FOREWARM_DATA").map_or(beside, PathBuf::from);
        let path = folder.join(name);
        if path.is_file() {
            return Some(path);
        }
        // The form that `cargo xtask test` counts; a recording is not a skipped level.
        eprintln!("recordings_skipped: {name} (not in {})", folder.display());
        None
    }

    /// A node of one trial's own; its failures are that trial's business. Others' pods stay off it: the scheduler may
    /// not use it (bind pods by `nodeName`), and the exporter's DaemonSet does not see GPUs on it.
    pub(crate) async fn own_node(&self, name: &str) -> anyhow::Result<SimNode> {
        self.cordoned_node(name, false).await
    }

    /// The same with an exporter of its own, for faults of one node that others must not notice.
    pub(crate) async fn own_gpu_node(&self, name: &str) -> anyhow::Result<SimNode> {
        self.stack().await?;
        self.cordoned_node(name, true).await
    }

    async fn cordoned_node(&self, name: &str, has_exporter: bool) -> anyhow::Result<SimNode> {
        let index = u8::try_from(200 + self.extra_nodes.fetch_add(1, Ordering::Relaxed))?;
        let node = self.start_node(name, index, has_exporter).await?;
        let nodes: Api<Node> = Api::all(self.client().await?);
        nodes.cordon(name).await?;
        Ok(node)
    }

    async fn start_node(&self, name: &str, index: u8, has_exporter: bool) -> anyhow::Result<SimNode> {
        let plane = self.plane().await?;
        let access = plane.access();
        let spec = SimNodeSpec {
            name: name.to_owned(),
            index,
            labels: [
                ("topology.kubernetes.io/zone".to_owned(), format!("zone-{index}")),
                ("nvidia.com/gpu.present".to_owned(), has_exporter.to_string()),
            ]
            .into(),
            images: images(&self.router, &self.forgers)?,
            driver: Driver::Fake {
                library: artefacts()?.fake_nvml.clone(),
                settings: Settings {
                    gpus: Some(GPUS),
                    ..Default::default()
                },
            },
            runtime: NvidiaRuntime::Default,
        };
        let started = SimNode::start(plane.client(), (access.address, access.port), spec).await;
        started.with_context(|| format!("starting node {name}"))
    }

    /// What the shared nodes could not do since the last trial looked.
    async fn new_failures(&self) -> Vec<String> {
        let Some(Ok(nodes)) = self.nodes.get() else {
            return Vec::new();
        };
        let all: Vec<String> = nodes.iter().flat_map(|node| node.failures()).collect();
        let mut reported = self.reported.lock().await;
        let new = all.get(*reported..).unwrap_or_default().to_vec();
        *reported = all.len();
        new
    }

    async fn evidence(&self) -> String {
        let mut evidence = String::new();
        if let Some(Ok(nodes)) = self.nodes.get() {
            nodes
                .iter()
                .for_each(|node| evidence.push_str(&node.evidence(LOG_TAIL)));
        }
        if let Some(Ok(plane)) = self.plane.get() {
            evidence.push_str(&plane.evidence().await);
        }
        evidence
    }

    /// Ends nodes before the control plane, so that the logs of either end without noise.
    pub(crate) fn shut_down(self: Arc<Self>) {
        if let Some(fixture) = Arc::into_inner(self) {
            let _inside = fixture.runtime.enter();
            drop(fixture.nodes);
            drop(fixture.plane);
        }
    }
}

fn images(router: &Router, forgers: &Forgers) -> anyhow::Result<Images> {
    let built = artefacts()?;
    let images = [
        (
            "forewarm/exporter",
            Run::Program {
                binary: built.exporter.clone(),
            },
        ),
        (
            "forewarm/adapter",
            Run::Program {
                binary: built.adapter.clone(),
            },
        ),
        (IMAGE, Run::Workload(Arc::new(router.clone()))),
        (forger::IMAGE, Run::Workload(Arc::new(forgers.clone()))),
        ("test/idle", Run::Workload(Arc::new(Idle::default()))),
        (
            "test/loading",
            Run::Workload(Arc::new(Idle {
                loading: Duration::from_secs(2),
            })),
        ),
        (
            "test/shell",
            Run::Program {
                binary: "/bin/sh".into(),
            },
        ),
    ];
    Ok(Arc::new(
        images
            .into_iter()
            .map(|(name, run)| (name.to_owned(), run))
            .collect(),
    ))
}
