//! What the rest of the world is told of a pod: the API server, the kubelet's local APIs, the testbed.

use std::time::Instant;

use forewarm_signals::resource::GPU;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use serde_json::json;

use super::super::container::Machine;
use super::super::status::{Observed, status};
use super::super::{ContainerKey, lock};
use super::{RETRY, Worker};
use crate::kubelet;

impl Worker {
    pub(super) fn report_pids(&self) {
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

    /// The node's local APIs know before the API server does, as a kubelet's do: the end of a pod as its last phase
    /// and then as its removal, though the object stays.
    pub(super) fn tell_kubelet(&mut self, observed: &Observed) {
        if self.is_removed {
            return;
        }
        let phase = match observed.phase {
            "Running" => kubelet::Phase::Running,
            "Succeeded" => kubelet::Phase::Succeeded,
            "Failed" => kubelet::Phase::Failed,
            _ => kubelet::Phase::Pending,
        };
        let has_ended =
            phase.has_ended() && !self.init.iter().chain(&self.containers).any(Machine::is_running);
        if has_ended {
            self.give_back();
        }
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
        } else if has_ended {
            self.node.kubelet.remove(&self.uid);
            self.is_removed = true;
        }
    }

    /// Writes the status when it has changed; true when the API server has the current one.
    pub(super) async fn write_status(&mut self, now: Instant) -> bool {
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

    pub(super) fn observe(&self) -> Observed {
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
    pub(super) async fn delete(&self) {
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

/// Whether the API server has a condition of the pod as True.
pub(super) fn condition(pod: &Pod, kind: &str) -> bool {
    pod.status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten())
        .any(|condition| condition.type_ == kind && condition.status == "True")
}
