//! One pod on a simulated node, from binding to deletion.
//!
//! The worker looks ten times a second: what does the API server want, what have the containers done, is
//! the status that was written still true. Deletion is the kubelet's way: SIGTERM, the grace period,
//! SIGKILL, a last status, then the object is deleted with grace period 0.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forewarm_signals::resource::GPU;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::container::{Launch, Machine, PodView};
use super::devices::Holder;
use super::environment::{self, Addresses, Missing, expand};
use super::launcher::{self, Bind};
use super::status::{Observed, status};
use super::volumes::Volumes;
use super::workload::WorkloadContext;
use super::{ContainerKey, Node, NvidiaRuntime, Run, honoured, image_name, lock};
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
    lock(&node.devices).release(&uid);
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

    /// Returns address and load; devices are returned by the caller.
    fn free(&mut self) {
        let mut loads = lock(&self.node.loads);
        self.gpus.values().flatten().for_each(|index| {
            loads.remove(index);
        });
        drop(loads);
        if let Some(slot) = self.slot.take() {
            lock(&self.node.slots).remove(&slot);
        }
        lock(&self.node.pids).retain(|key, _| {
            (key.namespace.as_str(), key.pod.as_str())
                != (
                    self.pod.metadata.namespace.as_deref().unwrap_or_default(),
                    self.pod.metadata.name.as_deref().unwrap_or_default(),
                )
        });
    }

    fn terminate_if_asked(&mut self, now: Instant) {
        if self.pod.metadata.deletion_timestamp.is_none() {
            return;
        }
        let grace = self.pod.metadata.deletion_grace_period_seconds.unwrap_or(30);
        let by = *self
            .terminate_by
            .get_or_insert(now + Duration::from_secs(u64::try_from(grace).unwrap_or_default()));
        self.all().for_each(Machine::ask_to_end);
        if now >= by {
            self.all().for_each(Machine::kill);
        }
    }

    async fn advance(&mut self, now: Instant) {
        if !self.refresh_volumes(now).await {
            return;
        }
        let spec = self.spec();
        let policy = spec.restart_policy.as_deref().unwrap_or("Always");
        let ready = condition(&self.pod, "Ready");
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

    async fn launch(&self, container: &Container, run: &Run) -> Result<Launch, Missing> {
        let addresses = Addresses {
            pod: self.address.unwrap_or(Ipv4Addr::UNSPECIFIED),
            host: self.node.address(),
        };
        let env = environment::resolve(
            &self.node.client,
            &self.pod,
            container,
            addresses,
            self.node.api_server,
        )
        .await?;
        let command = container
            .command
            .iter()
            .flatten()
            .map(|part| expand(part, &env))
            .collect::<Vec<_>>();
        let args = container
            .args
            .iter()
            .flatten()
            .map(|part| expand(part, &env))
            .collect::<Vec<_>>();
        let gpus = self.gpus.get(&container.name).cloned().unwrap_or_default();
        let binary = match run {
            Run::Workload(_) => {
                let devices = lock(&self.node.devices);
                return Ok(Launch::Workload(WorkloadContext {
                    namespace: self.namespace().to_owned(),
                    pod: self.name().to_owned(),
                    pod_uid: self.uid.clone(),
                    container: container.name.clone(),
                    node: self.node.spec.name.clone(),
                    labels: self.pod.metadata.labels.clone().unwrap_or_default(),
                    args: command.into_iter().chain(args).collect(),
                    gpu_uuids: gpus
                        .iter()
                        .filter_map(|&index| devices.uuid(index).map(str::to_owned))
                        .collect(),
                    env,
                }));
            }
            Run::Program { binary } => binary,
        };
        let entry_point = Path::new("/").join(binary.file_name().unwrap_or_default());
        let argv = if command.is_empty() {
            vec![entry_point.display().to_string()]
        } else {
            command
        };
        let folder = self.folder().join("containers").join(&container.name);
        std::fs::create_dir_all(&folder).map_err(|error| Missing(error.to_string()))?;
        let mut mounts = vec![Bind {
            source: binary.clone(),
            target: entry_point,
            read_only: true,
        }];
        mounts.extend(self.mounts(container)?);
        mounts.extend(termination_log(container, &folder, &mounts)?);
        mounts.sort_by_key(|bind| bind.target.components().count());
        let description = launcher::Container {
            root: folder.join("root"),
            argv: argv.into_iter().chain(args).collect(),
            directory: container
                .working_dir
                .clone()
                .unwrap_or_else(|| "/".to_owned())
                .into(),
            mounts,
            driver: self
                .has_driver(&env, !gpus.is_empty())
                .then(|| self.driver_folder()),
            read_only_root: container
                .security_context
                .as_ref()
                .and_then(|context| context.read_only_root_filesystem)
                .unwrap_or(false),
            hosts: format!("127.0.0.1 localhost\n{} {}\n", addresses.pod, self.name()),
            hostname: self.name().chars().take(63).collect(),
            env,
        };
        Ok(Launch::Program { description, folder })
    }

    fn mounts(&self, container: &Container) -> Result<Vec<Bind>, Missing> {
        let spec = self.spec();
        let volumes = spec.volumes.unwrap_or_default();
        let mut mounts = Vec::new();
        for mount in container.volume_mounts.iter().flatten() {
            let volume = volumes
                .iter()
                .find(|volume| volume.name == mount.name)
                .ok_or_else(|| Missing(format!("volume {} is not declared", mount.name)))?;
            let Some(ours) = &self.volumes else { continue };
            let written_by_node = volume.host_path.is_none() && volume.empty_dir.is_none();
            mounts.push(Bind {
                source: ours.path(volume),
                target: mount.mount_path.clone().into(),
                read_only: written_by_node || mount.read_only.unwrap_or(false),
            });
        }
        Ok(mounts)
    }

    /// Whether NVIDIA's runtime would inject the driver.
    fn has_driver(&self, env: &BTreeMap<String, String>, has_gpus: bool) -> bool {
        let by_class = self.spec().runtime_class_name.is_some();
        let asked = env
            .get("NVIDIA_VISIBLE_DEVICES")
            .is_some_and(|devices| !matches!(devices.as_str(), "" | "void" | "none"));
        (by_class || self.node.spec.runtime == NvidiaRuntime::Default) && (asked || has_gpus)
    }

    fn driver_folder(&self) -> PathBuf {
        super::gpus::folder(&self.node.host_root())
    }

    fn report_pids(&self) {
        let mut pids = lock(&self.node.pids);
        for machine in self.init.iter().chain(&self.containers) {
            let key = ContainerKey {
                namespace: self.namespace().to_owned(),
                pod: self.name().to_owned(),
                container: machine.spec().name.clone(),
            };
            match machine.pid() {
                Some(pid) => pids.insert(key, pid),
                None => pids.remove(&key),
            };
        }
    }

    /// The node's local APIs know before the API server does, as a kubelet's do.
    fn tell_kubelet(&mut self, observed: &Observed) {
        let phase = match observed.phase {
            "Running" => kubelet::Phase::Running,
            "Succeeded" => kubelet::Phase::Succeeded,
            "Failed" => kubelet::Phase::Failed,
            _ => kubelet::Phase::Pending,
        };
        let devices = |container: &str| -> Vec<kubelet::Device> {
            let devices = lock(&self.node.devices);
            self.gpus
                .get(container)
                .into_iter()
                .flatten()
                .filter_map(|&index| devices.uuid(index))
                .map(|id| kubelet::Device::Plugin {
                    resource: GPU.to_owned(),
                    id: id.to_owned(),
                })
                .collect()
        };
        let told = kubelet::Pod {
            uid: self.uid.clone(),
            namespace: self.namespace().to_owned(),
            name: self.name().to_owned(),
            phase,
            ready: observed.ready,
            containers: self
                .containers
                .iter()
                .map(|machine| machine.spec().name.clone())
                .map(|name| kubelet::Container {
                    devices: devices(&name),
                    name,
                })
                .collect(),
        };
        if self.told.as_ref() != Some(&told) {
            self.node.kubelet.put(told.clone());
            self.told = Some(told);
        }
    }

    /// Writes the status when it has changed; true when the API server has the current one.
    async fn write_status(&mut self, now: Instant) -> bool {
        let observed = self.observe();
        self.tell_kubelet(&observed);
        let status = status(&self.pod, &observed);
        if self.written.as_ref() == Some(&status) {
            return true;
        }
        if self.retry.is_some_and(|retry| now < retry) {
            return false;
        }
        let pods: Api<Pod> = Api::namespaced(self.node.client.clone(), self.namespace());
        // The UID keeps the status of this pod from reaching a successor of the same name.
        let patch = json!({"metadata": {"uid": self.uid}, "status": status});
        match pods
            .patch_status(self.name(), &PatchParams::default(), &Patch::Merge(patch))
            .await
        {
            Ok(_) => {
                self.written = Some(status);
                self.retry = None;
                true
            }
            // Gone: the watch will tell.
            Err(kube::Error::Api(answer)) if answer.code == 404 || answer.code == 409 => true,
            Err(error) => {
                tracing::debug!(%error, pod = self.name(), "status not written");
                self.retry = Some(now + RETRY);
                false
            }
        }
    }

    fn observe(&self) -> Observed {
        let initialized = self.init.iter().all(|machine| machine.exit_code() == Some(0));
        let policy = self.spec().restart_policy.unwrap_or_else(|| "Always".to_owned());
        let exits: Vec<Option<i32>> = self.containers.iter().map(Machine::exit_code).collect();
        let ended = !exits.is_empty() && exits.iter().all(Option::is_some);
        let final_end = ended && (policy != "Always" || self.terminate_by.is_some());
        let init_failed = policy == "Never"
            && self
                .init
                .iter()
                .any(|machine| machine.exit_code().is_some_and(|code| code != 0));
        let phase = if self.refusal.is_some() || init_failed {
            "Failed"
        } else if final_end {
            if exits.iter().all(|exit| *exit == Some(0)) {
                "Succeeded"
            } else {
                "Failed"
            }
        } else if self.containers.iter().any(Machine::has_run) {
            "Running"
        } else {
            "Pending"
        };
        Observed {
            phase,
            started: self.started,
            address: self.address.filter(|_| self.volumes_at.is_some()),
            host: self.node.address(),
            initialized,
            ready: self.refusal.is_none()
                && !self.containers.is_empty()
                && self.containers.iter().all(Machine::is_ready),
            containers: self.containers.iter().map(Machine::status).collect(),
            init_containers: self.init.iter().map(Machine::status).collect(),
            refusal: self.refusal.clone(),
        }
    }

    /// Deletes the object for good, until that is done.
    async fn delete(&self) {
        let pods: Api<Pod> = Api::namespaced(self.node.client.clone(), self.namespace());
        let params = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions {
                uid: Some(self.uid.clone()),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        loop {
            match pods.delete(self.name(), &params).await {
                Ok(_) => return,
                Err(kube::Error::Api(answer)) if answer.code == 404 || answer.code == 409 => return,
                Err(error) => {
                    tracing::debug!(%error, pod = self.name(), "pod not deleted");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Which {
    Init(usize),
    Main(usize),
}

fn condition(pod: &Pod, kind: &str) -> bool {
    pod.status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten())
        .any(|condition| condition.type_ == kind && condition.status == "True")
}

/// The termination message file, unless a volume covers its folder with something of the machine's.
fn termination_log(container: &Container, folder: &Path, mounts: &[Bind]) -> Result<Option<Bind>, Missing> {
    let target = container
        .termination_message_path
        .clone()
        .unwrap_or_else(|| "/dev/termination-log".to_owned());
    let target = PathBuf::from(target);
    let source = folder.join("termination-log");
    std::fs::write(&source, "").map_err(|error| Missing(error.to_string()))?;
    let covered = mounts.iter().any(|mount| target.starts_with(&mount.target));
    Ok((!covered).then_some(Bind {
        source,
        target,
        read_only: false,
    }))
}
