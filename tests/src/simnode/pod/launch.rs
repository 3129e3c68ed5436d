//! What a container of a pod is started as: environment, arguments, mounts, driver.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Container;

use super::super::container::Launch;
use super::super::environment::{self, Addresses, Missing, expand};
use super::super::launcher::{self, Bind};
use super::super::workload::WorkloadContext;
use super::super::{NvidiaRuntime, Run, gpus, lock};
use super::Worker;

impl Worker {
    pub(super) async fn launch(&self, container: &Container, run: &Run) -> Result<Launch, Missing> {
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
        gpus::folder(&self.node.host_root())
    }
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
