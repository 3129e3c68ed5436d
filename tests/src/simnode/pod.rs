//! One pod on a simulated node, from binding to deletion.
//!
//! The worker looks ten times a second: what does the API server want, what have the containers done, is
//! the status that was written still true. Deletion is the kubelet's way: SIGTERM, the grace period,
//! SIGKILL, a last status, then the object is deleted with grace period 0. [`launch`] turns a container's
//! spec into what is started, [`leave`] ends it and gives back what it held, [`report`] tells the API server
//! and the node's own APIs.

mod launch;
mod leave;
mod report;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forewarm_signals::resource::GPU;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use serde_json::Value;
use tokio::sync::watch;

use super::container::{Machine, PodView};
use super::devices::Holder;
use super::environment::{Addresses, Missing};
use super::volumes::Volumes;
use super::{Node, honoured, image_name, lock};
use crate::kubelet;
use crate::netns;

/// Time between looks.
const TICK: Duration = Duration::from_millis(100);
/// How often volumes are compared with their sources. The kubelet takes a minute; tests should not.
const VOLUME_REFRESH: Duration = Duration::from_secs(1);
/// Pause after the API server refused a status.
const RETRY: Duration = Duration::from_millis(500);

/// Runs one pod until its object is gone or deleted here.
pub(super) async fn run(node: &Arc<Node>, pod: Pod, updates: watch::Receiver<Option<Pod>>) {
    let Some(uid) = pod.metadata.uid.clone() else {
        return;
    };
    let mut worker = Worker::new(node, pod, uid.clone());
    let outcome = worker.work(updates).await;
    worker.give_back();
    node.kubelet.remove(&uid);
    worker.free();
    if let Outcome::Finish = outcome {
        worker.delete().await;
    }
}

enum Outcome {
    /// All containers have ended: the object can go.
    Finish,
    /// The object is gone already.
    Gone,
}

struct Worker {
    node: Arc<Node>,
    pod: Pod,
    uid: String,
    started: Timestamp,
    slot: Option<u8>,
    address: Option<Ipv4Addr>,
    gpus: BTreeMap<String, Vec<u32>>,
    init: Vec<Machine>,
    containers: Vec<Machine>,
    volumes: Option<Volumes>,
    volumes_at: Option<Instant>,
    refusal: Option<(&'static str, String)>,
    terminate_by: Option<Instant>,
    told: Option<kubelet::Pod>,
    /// Whether the node's local APIs were told that it ended for good.
    is_removed: bool,
    written: Option<Value>,
    retry: Option<Instant>,
}

impl Worker {
    fn new(node: &Arc<Node>, pod: Pod, uid: String) -> Self {
        let machine = |container: &Container| {
            let image = container.image.as_deref().unwrap_or_default();
            Machine::new(
                container.clone(),
                node.spec.images.get(image_name(image)).cloned(),
            )
        };
        let spec = pod.spec.clone().unwrap_or_default();
        Self {
            node: Arc::clone(node),
            uid,
            started: Timestamp::now(),
            slot: None,
            address: None,
            gpus: BTreeMap::new(),
            init: spec.init_containers.iter().flatten().map(machine).collect(),
            containers: spec.containers.iter().map(machine).collect(),
            volumes: None,
            volumes_at: None,
            refusal: None,
            terminate_by: None,
            told: None,
            is_removed: false,
            written: None,
            retry: None,
            pod,
        }
    }

    async fn work(&mut self, updates: watch::Receiver<Option<Pod>>) -> Outcome {
        self.admit().await;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let now = Instant::now();
            match updates.borrow().clone() {
                Some(pod) => self.pod = pod,
                None => {
                    self.all().for_each(Machine::kill);
                    return Outcome::Gone;
                }
            }
            self.terminate_if_asked(now);
            if self.refusal.is_none() && self.address.is_some() {
                self.advance(now).await;
            }
            self.report_pids();
            let over = self.terminate_by.is_some() && !self.all().any(|machine| machine.is_running());
            let written = self.write_status(now).await;
            if over && written {
                return Outcome::Finish;
            }
            tick.tick().await;
        }
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Machine> {
        self.init.iter_mut().chain(&mut self.containers)
    }

    fn spec(&self) -> PodSpec {
        self.pod.spec.clone().unwrap_or_default()
    }

    fn name(&self) -> &str {
        self.pod.metadata.name.as_deref().unwrap_or_default()
    }

    fn namespace(&self) -> &str {
        self.pod.metadata.namespace.as_deref().unwrap_or_default()
    }

    fn refuse(&mut self, reason: &'static str, message: String) {
        self.node.fail(format!(
            "pod {}/{} refused: {message}",
            self.namespace(),
            self.name()
        ));
        self.refusal = Some((reason, message));
    }

    /// Checks the spec, hands out address and devices.
    async fn admit(&mut self) {
        let path = format!("/api/v1/namespaces/{}/pods/{}", self.namespace(), self.name());
        let raw = match http::Request::get(path).body(Vec::new()) {
            Ok(request) => self
                .node
                .client
                .request::<Value>(request)
                .await
                .map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match raw {
            Ok(raw) => {
                if let Err(problem) = honoured::check(&raw["spec"]) {
                    return self.refuse("NotHonoured", problem.to_string());
                }
            }
            // Gone already, or the API server is away: the next look tells.
            Err(error) => tracing::debug!(error, "cannot read the pod's raw spec"),
        }
        let spec = self.spec();
        if let Some(class) = spec
            .runtime_class_name
            .as_deref()
            .filter(|class| *class != "nvidia")
        {
            return self.refuse(
                "NotHonoured",
                format!("spec.runtimeClassName {class} is not known"),
            );
        }
        for container in &spec.containers {
            let wanted = container
                .resources
                .as_ref()
                .and_then(|resources| resources.limits.as_ref())
                .and_then(|limits| limits.get(GPU))
                .and_then(|quantity| quantity.0.parse::<u32>().ok())
                .unwrap_or(0);
            let holder = Holder {
                namespace: self.namespace().to_owned(),
                pod: self.name().to_owned(),
                pod_uid: self.uid.clone(),
                container: container.name.clone(),
            };
            let allocated = lock(&self.node.devices).allocate(&holder, wanted);
            match allocated {
                Ok(indices) => {
                    self.gpus.insert(container.name.clone(), indices);
                }
                Err(error) => return self.refuse("UnexpectedAdmissionError", error.to_string()),
            }
        }
        if spec.host_network == Some(true) {
            self.address = Some(self.node.address());
        } else {
            let mut slots = lock(&self.node.slots);
            self.slot = (0..=243).find(|slot| slots.insert(*slot));
            self.address = self
                .slot
                .map(|slot| netns::pod_address(self.node.spec.index, slot));
        }
    }

    async fn advance(&mut self, now: Instant) {
        if !self.refresh_volumes(now).await {
            return;
        }
        let spec = self.spec();
        let policy = spec.restart_policy.as_deref().unwrap_or("Always");
        let ready = report::condition(&self.pod, "Ready");
        let view = PodView { ready };
        for index in 0..self.init.len() {
            self.start_if_wanted(Which::Init(index), now).await;
            let Some(machine) = self.init.get_mut(index) else {
                return;
            };
            machine.tick(now, view);
            match machine.exit_code() {
                Some(0) => {}
                Some(_) => {
                    // An init container that fails is tried again unless the policy is Never.
                    machine.restart(if policy == "Never" { "Never" } else { "OnFailure" }, now);
                    return;
                }
                None => return,
            }
        }
        for index in 0..self.containers.len() {
            self.start_if_wanted(Which::Main(index), now).await;
            let Some(machine) = self.containers.get_mut(index) else {
                return;
            };
            let loads = machine.tick(now, view);
            machine.restart(policy, now);
            let running = machine.is_running();
            let name = machine.spec().name.clone();
            let mut shared = lock(&self.node.loads);
            for (position, gpu) in self.gpus.get(&name).into_iter().flatten().enumerate() {
                match loads.get(position).filter(|_| running) {
                    Some(load) => shared.insert(*gpu, *load),
                    None => shared.remove(gpu),
                };
            }
        }
    }

    /// Whether all volumes are there.
    async fn refresh_volumes(&mut self, now: Instant) -> bool {
        if self
            .volumes_at
            .is_some_and(|at| now.duration_since(at) < VOLUME_REFRESH)
        {
            return true;
        }
        let Some(address) = self.address else { return false };
        let first = self.volumes_at.is_none();
        let addresses = Addresses {
            pod: address,
            host: self.node.address(),
        };
        if self.volumes.is_none() {
            self.volumes = Some(Volumes::new(
                self.node.client.clone(),
                self.pod.clone(),
                addresses,
                self.folder().join("volumes"),
                self.node.host_root(),
            ));
        }
        let Some(volumes) = &self.volumes else {
            return false;
        };
        match volumes.refresh().await {
            Ok(()) => {
                self.volumes_at = Some(Instant::now());
                true
            }
            Err(Missing(message)) => {
                self.all()
                    .for_each(|machine| machine.wait_for("ContainerCreating", message.clone()));
                // A source that vanishes later changes nothing for a pod that runs.
                !first
            }
        }
    }

    async fn start_if_wanted(&mut self, which: Which, now: Instant) {
        let Some(machine) = self.machine(which) else {
            return;
        };
        if self.terminate_by.is_some() || !machine.wants_start(now) {
            return;
        }
        let container = machine.spec().clone();
        let Some(run) = machine.run().cloned() else {
            let message = format!(
                "image {} is not known to the simulated node",
                container.image.unwrap_or_default()
            );
            if let Some(machine) = self.machine_mut(which) {
                machine.wait_for("ErrImagePull", message.clone());
            }
            let problem = format!("pod {}/{}: {message}", self.namespace(), self.name());
            if !lock(&self.node.failures).contains(&problem) {
                self.node.fail(problem);
            }
            return;
        };
        let launch = self.launch(&container, &run).await;
        let address = self.address.unwrap_or(Ipv4Addr::UNSPECIFIED);
        let Some(machine) = self.machine_mut(which) else {
            return;
        };
        match launch {
            Ok(launch) => machine.start(launch, address),
            Err(Missing(message)) => machine.wait_for("CreateContainerConfigError", message),
        }
    }

    fn machine(&self, which: Which) -> Option<&Machine> {
        match which {
            Which::Init(index) => self.init.get(index),
            Which::Main(index) => self.containers.get(index),
        }
    }

    fn machine_mut(&mut self, which: Which) -> Option<&mut Machine> {
        match which {
            Which::Init(index) => self.init.get_mut(index),
            Which::Main(index) => self.containers.get_mut(index),
        }
    }

    fn folder(&self) -> PathBuf {
        self.node.folder.join("pods").join(&self.uid)
    }
}

#[derive(Debug, Clone, Copy)]
enum Which {
    Init(usize),
    Main(usize),
}

#[cfg(test)]
mod tests;
