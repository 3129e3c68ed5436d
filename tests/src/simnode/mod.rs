//! Simulated GPU nodes: a kubelet, a device plugin and a driver, as far as our programs can tell.
//!
//! ```text
//!                    API server ──watch──► pods of this node ──► one worker per pod (pod.rs)
//! node object,  ◄── heartbeats                                     │ containers (container.rs)
//! pod status    ◄──────────────────────────────────────────────────┤   real processes (launcher.rs)
//!                                                                  │   or workloads (workload.rs)
//! pod-resources/, pods-api/ sockets ◄── devices (devices.rs) ◄─────┤
//! fake driver's control file        ◄── load per GPU (gpus.rs) ◄───┘
//! ```
//! Inputs: a running API server, and per image how to run it. What a pod asks for and the node cannot do
//! is refused by name ([`honoured`]), so that no test passes on a field that was skipped.
//!
//! Invariants: all processes, sockets and files of the node go when [`SimNode`] is dropped; a pod's status
//! says only what has happened; devices have one holder.

pub mod container;
pub mod devices;
pub mod environment;
pub mod gpus;
pub mod honoured;
pub mod launcher;
mod object;
mod pod;
pub mod probe;
mod status;
pub mod volumes;
pub mod workload;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::child::tail;
use crate::kubelet::Kubelet;
use crate::netns;
use crate::scratch::Scratch;
use devices::Devices;
use forewarm_signals::resource::GPU;
use workload::GpuLoad;

/// How the simulated node runs a container's image.
#[derive(Clone)]
pub enum Run {
    /// In this process, ticked by the node.
    Workload(Arc<dyn workload::WorkloadFactory>),
    /// As a real process in a private mount namespace.
    Program {
        /// The executable outside; inside it lies at `/` under its own name, as the image's entry point.
        binary: PathBuf,
    },
}

impl std::fmt::Debug for Run {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Workload(_) => formatter.write_str("Workload"),
            Self::Program { binary } => formatter.debug_struct("Program").field("binary", binary).finish(),
        }
    }
}

/// Images by name without tag or digest.
pub type Images = Arc<BTreeMap<String, Run>>;

/// One node to simulate.
#[derive(Debug, Clone)]
pub struct SimNodeSpec {
    /// Name of the Node object.
    pub name: String,
    /// Which part of the address range is its own: 1–254, one per node of a testbed.
    pub index: u8,
    /// Labels beside the usual ones and `nvidia.com/gpu.present=true`.
    pub labels: BTreeMap<String, String>,
    /// How images run.
    pub images: Images,
    /// Its GPUs and their driver.
    pub driver: gpus::Driver,
    /// Whether NVIDIA's runtime is the default one, or only serves `runtimeClassName: nvidia`.
    pub runtime: NvidiaRuntime,
}

/// For which containers NVIDIA's container runtime injects the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NvidiaRuntime {
    /// For all that ask for devices, by resource or by `NVIDIA_VISIBLE_DEVICES`.
    #[default]
    Default,
    /// For those of them whose pod has `runtimeClassName: nvidia`.
    ByClass,
}

/// Why a node could not be simulated.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the node could not be written.
    #[error("files of node {node}: {source}")]
    Files {
        /// The node.
        node: String,
        /// Why.
        source: std::io::Error,
    },
    /// The API server refused the Node object.
    #[error("registering node {node}: {source}")]
    Register {
        /// The node.
        node: String,
        /// Why.
        source: Box<kube::Error>,
    },
}

/// A container of a pod, as the accessors of [`SimNode`] name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerKey {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
}

/// What the parts of one node share.
pub(crate) struct Node {
    pub(crate) spec: SimNodeSpec,
    pub(crate) client: Client,
    pub(crate) api_server: (Ipv4Addr, u16),
    pub(crate) folder: PathBuf,
    pub(crate) devices: Mutex<Devices>,
    pub(crate) loads: Mutex<BTreeMap<u32, GpuLoad>>,
    pub(crate) slots: Mutex<BTreeSet<u8>>,
    pub(crate) failures: Mutex<Vec<String>>,
    pub(crate) pids: Mutex<BTreeMap<ContainerKey, u32>>,
    pub(crate) kubelet: Kubelet,
}

/// Locks; a panic elsewhere does not make the value unusable.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Node {
    pub(crate) fn address(&self) -> Ipv4Addr {
        netns::node_address(self.spec.index)
    }

    /// The node's own root folder, to which host paths are relative.
    pub(crate) fn host_root(&self) -> PathBuf {
        self.folder.join("root")
    }

    pub(crate) fn fail(&self, message: String) {
        lock(&self.failures).push(message);
    }
}

/// A simulated node; dropping it kills its containers.
pub struct SimNode {
    node: Arc<Node>,
    gpus: gpus::Gpus,
    _tasks: JoinSet<()>,
    _folder: Scratch,
}

impl std::fmt::Debug for SimNode {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("SimNode")
            .field("name", &self.node.spec.name)
            .finish_non_exhaustive()
    }
}

impl SimNode {
    /// Registers the node and starts to run pods bound to it.
    ///
    /// # Errors
    /// When its files cannot be written or the API server refuses the Node object.
    pub async fn start(
        client: Client,
        api_server: (Ipv4Addr, u16),
        spec: SimNodeSpec,
    ) -> Result<Self, Error> {
        let files = |source| Error::Files {
            node: spec.name.clone(),
            source,
        };
        let folder = Scratch::new(&spec.name).map_err(files)?;
        let gpus =
            gpus::Gpus::install(&spec.driver, &spec.name, &folder.path().join("root")).map_err(files)?;
        let kubelet = kubelet(folder.path()).map_err(files)?;
        kubelet.set_allocatable(GPU, gpus.uuids());
        let node = Arc::new(Node {
            client,
            api_server,
            folder: folder.path().to_owned(),
            devices: Mutex::new(Devices::new(gpus.uuids())),
            loads: Mutex::default(),
            slots: Mutex::default(),
            failures: Mutex::default(),
            pids: Mutex::default(),
            kubelet,
            spec,
        });
        object::register(&node).await.map_err(|source| Error::Register {
            node: node.spec.name.clone(),
            source: Box::new(source),
        })?;
        let mut tasks = JoinSet::new();
        tasks.spawn(object::heartbeat(Arc::clone(&node)));
        tasks.spawn(gpus.drive(Arc::clone(&node)));
        tasks.spawn(run_pods(Arc::clone(&node)));
        Ok(Self {
            node,
            gpus,
            _tasks: tasks,
            _folder: folder,
        })
    }

    /// Ends the node and deletes its object, so that the scheduler and DaemonSets forget it.
    pub async fn remove(self) {
        let client = self.node.client.clone();
        let name = self.name().to_owned();
        drop(self);
        object::delete(&client, &name).await;
    }

    /// Name of the node.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.node.spec.name
    }

    /// UUIDs of its GPUs, by index.
    #[must_use]
    pub fn gpu_uuids(&self) -> Vec<String> {
        lock(&self.node.devices).uuids().to_vec()
    }

    /// Its GPUs, for faults.
    #[must_use]
    pub fn gpus(&self) -> &gpus::Gpus {
        &self.gpus
    }

    /// Its kubelet's local APIs, for faults.
    #[must_use]
    pub fn kubelet(&self) -> &Kubelet {
        &self.node.kubelet
    }

    /// The folder that stands for `/` of the node in host paths.
    #[must_use]
    pub fn host_root(&self) -> PathBuf {
        self.node.host_root()
    }

    /// What the node could not do; a test with any of these has failed.
    #[must_use]
    pub fn failures(&self) -> Vec<String> {
        lock(&self.node.failures).clone()
    }

    /// Process ids of running program containers.
    #[must_use]
    pub fn pids(&self) -> BTreeMap<ContainerKey, u32> {
        lock(&self.node.pids).clone()
    }

    /// Sends a signal to the programs whose container has this name; returns how many there were.
    #[must_use]
    pub fn signal(&self, container: &str, signal: Signal) -> usize {
        let pids = self.pids();
        let chosen = pids.iter().filter(|(key, _)| key.container == container);
        chosen
            .filter(|&(_, &pid)| i32::try_from(pid).is_ok_and(|pid| kill(Pid::from_raw(pid), signal).is_ok()))
            .count()
    }

    /// The ends of all containers' logs, for a failure's message.
    #[must_use]
    pub fn evidence(&self, bytes: u64) -> String {
        let mut text = String::new();
        for log in logs(&self.node.folder.join("pods")) {
            let shown = log.strip_prefix(&self.node.folder).unwrap_or(&log);
            text.push_str(&format!(
                "--- {} {}\n{}\n",
                self.name(),
                shown.display(),
                tail(&log, bytes)
            ));
        }
        text
    }
}

/// The kubelet's local APIs. A socket's path may have 107 bytes at most, so the kubelet's folder is a short one to which
/// the usual place in the node's root folder links.
fn kubelet(folder: &Path) -> std::io::Result<Kubelet> {
    let short = folder.join("k");
    fs::create_dir_all(&short)?;
    let usual = folder.join("root/var/lib");
    fs::create_dir_all(&usual)?;
    std::os::unix::fs::symlink(&short, usual.join("kubelet"))?;
    Kubelet::start(&short)
}

/// `pods/<uid>/<container>/log` of all containers.
fn logs(pods: &Path) -> Vec<PathBuf> {
    let list = |folder: &Path| {
        fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
    };
    let mut logs: Vec<PathBuf> = list(pods)
        .flat_map(|pod| list(&pod.join("containers")).collect::<Vec<_>>())
        .map(|container| container.join("log"))
        .filter(|log| log.is_file())
        .collect();
    logs.sort();
    logs
}

/// Keeps one worker per pod bound to the node.
async fn run_pods(node: Arc<Node>) {
    let pods: Api<Pod> = Api::all(node.client.clone());
    let config = watcher::Config::default().fields(&format!("spec.nodeName={}", node.spec.name));
    let mut events = std::pin::pin!(watcher(pods, config).default_backoff());
    let mut workers = JoinSet::new();
    let mut channels: BTreeMap<String, watch::Sender<Option<Pod>>> = BTreeMap::new();
    let mut listed = BTreeSet::new();
    loop {
        tokio::select! {
            Some(event) = events.next() => {
                match event {
                    Ok(Event::Init) => listed.clear(),
                    Ok(Event::InitApply(pod)) => {
                        listed.extend(pod.metadata.uid.clone());
                        apply(&node, &mut workers, &mut channels, pod);
                    }
                    Ok(Event::InitDone) => {
                        channels.iter().filter(|(uid, _)| !listed.contains(*uid)).for_each(|(_, channel)| {
                            channel.send_replace(None);
                        });
                    }
                    Ok(Event::Apply(pod)) => apply(&node, &mut workers, &mut channels, pod),
                    Ok(Event::Delete(pod)) => {
                        if let Some(channel) = pod.metadata.uid.and_then(|uid| channels.remove(&uid)) {
                            channel.send_replace(None);
                        }
                    }
                    Err(error) => tracing::debug!(%error, node = node.spec.name, "pod watch interrupted"),
                }
            }
            Some(ended) = workers.join_next() => match ended {
                Ok(uid) => {
                    channels.remove(&uid);
                }
                Err(error) => node.fail(format!("a pod's worker ended: {error}")),
            },
            else => return,
        }
    }
}

fn apply(
    node: &Arc<Node>,
    workers: &mut JoinSet<String>,
    channels: &mut BTreeMap<String, watch::Sender<Option<Pod>>>,
    pod: Pod,
) {
    let Some(uid) = pod.metadata.uid.clone() else {
        return;
    };
    if let Some(channel) = channels.get(&uid) {
        channel.send_replace(Some(pod));
        return;
    }
    let (channel, updates) = watch::channel(Some(pod.clone()));
    channels.insert(uid.clone(), channel);
    let node = Arc::clone(node);
    workers.spawn(async move {
        pod::run(&node, pod, updates).await;
        uid
    });
}

/// An image's name without tag and digest.
#[must_use]
pub fn image_name(image: &str) -> &str {
    let image = image.split_once('@').map_or(image, |(name, _)| name);
    match image.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => name,
        _ => image,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_and_digests_are_not_part_of_an_images_name() {
        assert_eq!(image_name("forewarm/exporter:0.1.0"), "forewarm/exporter");
        assert_eq!(image_name("host:5000/a/b@sha256:0"), "host:5000/a/b");
        assert_eq!(image_name("host:5000/a/b"), "host:5000/a/b");
    }
}
