//! The Node object and its Lease: registration and heartbeats.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use super::container::seconds;
use super::{Node, lock};

/// Time between renewals; the kubelet's is 10 s, and tests may shorten the grace period.
const RENEW: Duration = Duration::from_secs(3);
/// Who owns the fields that this module writes.
const MANAGER: &str = "simulated-kubelet";
/// Pods per node: as many as it has addresses for, within the kubelet's default.
const PODS: u32 = 110;

/// Creates or refreshes the Node object, Ready.
pub(super) async fn register(node: &Node) -> Result<(), kube::Error> {
    let nodes: Api<NodeObject> = Api::all(node.client.clone());
    let name = &node.spec.name;
    let params = PatchParams::apply(MANAGER).force();
    let mut labels = BTreeMap::from([
        ("kubernetes.io/hostname".to_owned(), name.clone()),
        ("kubernetes.io/os".to_owned(), "linux".to_owned()),
        ("kubernetes.io/arch".to_owned(), "amd64".to_owned()),
        ("nvidia.com/gpu.present".to_owned(), "true".to_owned()),
    ]);
    labels.extend(node.spec.labels.clone());
    let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
    nodes.patch(name, &params, &Patch::Apply(object)).await?;
    renew(node).await?;
    nodes
        .patch_status(name, &params, &Patch::Apply(status(node)))
        .await?;
    Ok(())
}

/// Renews Lease and status until the task is aborted.
pub(super) async fn heartbeat(node: Arc<Node>) {
    let nodes: Api<NodeObject> = Api::all(node.client.clone());
    loop {
        tokio::time::sleep(RENEW).await;
        let renewed = async {
            renew(&node).await?;
            let params = PatchParams::apply(MANAGER).force();
            nodes
                .patch_status(&node.spec.name, &params, &Patch::Apply(status(&node)))
                .await
        };
        if let Err(error) = renewed.await {
            tracing::debug!(%error, node = node.spec.name, "heartbeat failed");
        }
    }
}

/// Deletes the Node object; one that stays becomes unreachable, as a machine that was switched off.
pub(super) async fn delete(client: &Client, name: &str) {
    let nodes: Api<NodeObject> = Api::all(client.clone());
    if let Err(error) = nodes.delete(name, &DeleteParams::default()).await {
        tracing::debug!(%error, name, "node object not deleted");
    }
}

async fn renew(node: &Node) -> Result<(), kube::Error> {
    let leases: Api<Lease> = Api::namespaced(node.client.clone(), "kube-node-lease");
    let name = &node.spec.name;
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name},
        "spec": {
            "holderIdentity": name,
            "leaseDurationSeconds": 40,
            "renewTime": Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string(),
        },
    });
    leases
        .patch(name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(lease))
        .await?;
    Ok(())
}

fn status(node: &Node) -> Value {
    let now = seconds(Timestamp::now());
    let gpus = lock(&node.devices).uuids().len().to_string();
    let resources = json!({
        "cpu": "64",
        "memory": "512Gi",
        "ephemeral-storage": "512Gi",
        "pods": PODS.to_string(),
        "nvidia.com/gpu": gpus,
    });
    let condition = |kind: &str, status: &str, reason: &str| {
        json!({"type": kind, "status": status, "reason": reason, "lastHeartbeatTime": now,
               "message": "simulated", "lastTransitionTime": "2020-01-01T00:00:00Z"})
    };
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.spec.name},
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "addresses": [
                {"type": "InternalIP", "address": node.address()},
                {"type": "Hostname", "address": node.spec.name},
            ],
            "conditions": [
                condition("Ready", "True", "KubeletReady"),
                condition("MemoryPressure", "False", "KubeletHasSufficientMemory"),
                condition("DiskPressure", "False", "KubeletHasNoDiskPressure"),
                condition("PIDPressure", "False", "KubeletHasSufficientPID"),
            ],
            "nodeInfo": {
                "architecture": "amd64", "operatingSystem": "linux", "osImage": "simulated",
                "kernelVersion": "simulated", "containerRuntimeVersion": "simulated://1",
                "kubeletVersion": "v1.37.2", "kubeProxyVersion": "", "bootID": node.spec.name,
                "machineID": node.spec.name, "systemUUID": node.spec.name,
            },
        },
    })
}
