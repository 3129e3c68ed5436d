//! The simulated node: does it do what a real one does, as far as our programs can tell, and does it say
//! so when it cannot?

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use forewarm_tests::wait::until;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::fixture::{Case, Fixture, case};

const SOON: Duration = Duration::from_secs(60);

pub(crate) fn cases() -> Vec<Case> {
    vec![
        case("node_runs_a_gpu_pod_from_loading_to_deletion", gpu_pod),
        case(
            "node_gives_a_program_what_its_spec_promises",
            program_sees_its_spec,
        ),
        case("node_restarts_a_program_that_fails", restarts),
        case("node_refuses_by_name_what_it_cannot_honour", refuses),
    ]
}

async fn create(client: &Client, namespace: &str, pod: Value) -> anyhow::Result<(Api<Pod>, Pod)> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let pod = serde_json::from_value(pod)?;
    let pod = pods
        .create(&PostParams::default(), &pod)
        .await
        .context("creating the pod")?;
    Ok((pods, pod))
}

fn ready(pod: &Pod) -> bool {
    pod.status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten())
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

/// Pending, then running but not ready while it loads, then ready; its GPU is its own; after deletion
/// object and device are free.
async fn gpu_pod(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let client = fixture.client().await?;
    let node = fixture.own_node("lifecycle").await?;
    let namespace = fixture.namespace("gpu-pod").await?;
    let (pods, pod) = create(
        &client,
        &namespace,
        json!({
            "metadata": {"name": "p"},
            "spec": {
                "nodeName": node.name(),
                "containers": [{"name": "main", "image": "test/loading:1", "resources": {"limits": {"nvidia.com/gpu": 2}}}],
            },
        }),
    )
    .await?;
    let running = until("the pod runs", SOON, || async {
        let pod = pods.get("p").await.map_err(|error| error.to_string())?;
        if phase(&pod) == "Running" {
            Ok(pod)
        } else {
            Err(format!("{:?}", pod.status))
        }
    })
    .await?;
    ensure!(!ready(&running), "ready before it has loaded");
    let uid = pod.metadata.uid.unwrap_or_default();
    let held = node
        .kubelet()
        .state()
        .pods
        .get(&uid)
        .cloned()
        .context("the kubelet's API knows the pod")?;
    ensure!(
        held.containers
            .iter()
            .map(|container| container.devices.len())
            .sum::<usize>()
            == 2
    );
    let loaded = until("the pod is ready", SOON, || async {
        let pod = pods.get("p").await.map_err(|error| error.to_string())?;
        if ready(&pod) {
            Ok(pod)
        } else {
            Err(format!("{:?}", pod.status))
        }
    })
    .await?;
    let status = loaded.status.context("a status")?;
    let address = status.pod_ip.context("an address")?;
    ensure!(address.starts_with("10.77."), "address {address}");
    ensure!(
        status
            .container_statuses
            .context("container statuses")?
            .iter()
            .all(|one| one.ready)
    );
    ensure!(node.kubelet().state().pods.get(&uid).is_some_and(|pod| pod.ready));

    pods.delete("p", &DeleteParams::default()).await?;
    until("the object is gone", SOON, || async {
        match pods.get_opt("p").await {
            Ok(None) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await?;
    ensure!(
        !node.kubelet().state().pods.contains_key(&uid),
        "the kubelet still tells the pod"
    );
    ensure!(node.failures().is_empty(), "{:?}", node.failures());
    node.remove().await;
    Ok(())
}

/// Environment, arguments, ConfigMap with update, token, read-only root, driver: told by the program itself.
async fn program_sees_its_spec(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let client = fixture.client().await?;
    let node = fixture.own_node("program").await?;
    let namespace = fixture.namespace("program").await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
    let map =
        serde_json::from_value(json!({"metadata": {"name": "m"}, "data": {"key": "before", "other": "x"}}))?;
    maps.create(&PostParams::default(), &map).await?;
    // Waits for the update of the ConfigMap, then tells everything it sees.
    let script = r#"
        while [ "$(cat /config/key)" = before ]; do /bin/sleep 0.1; done
        {
          echo "ip=$1"; echo "node=$NODE"; echo "from=$FROM"; echo "key=$(cat /config/key)"
          echo "namespace=$(cat /var/run/secrets/kubernetes.io/serviceaccount/namespace)"
          [ -s /var/run/secrets/kubernetes.io/serviceaccount/token ] && echo "token=yes"
          grep -q BEGIN /var/run/secrets/kubernetes.io/serviceaccount/ca.crt && echo "ca=yes"
          [ -s /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1 ] && echo "driver=yes"
          touch /nope 2>/dev/null || echo "root=read-only"
          touch /scratch/file && echo "scratch=writable"
          touch /config/nope 2>/dev/null || echo "config=read-only"
          [ -e /host/marker ] && echo "host=own"
          [ -e /root ] || echo "machine=hidden"
          echo "api=$KUBERNETES_SERVICE_HOST"
        } > /dev/termination-log
    "#;
    std::fs::create_dir_all(node.host_root().join("var/lib/thing"))?;
    std::fs::write(node.host_root().join("var/lib/thing/marker"), "")?;
    let (pods, _) = create(
        &client,
        &namespace,
        json!({
            "metadata": {"name": "p"},
            "spec": {
                "nodeName": node.name(),
                "restartPolicy": "Never",
                "initContainers": [{"name": "first", "image": "test/shell", "args": ["-c", "echo done > /scratch/init"],
                    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}],
                "containers": [{
                    "name": "main", "image": "test/shell:1",
                    "args": ["-c", script, "script", "$(IP)"],
                    "securityContext": {"readOnlyRootFilesystem": true},
                    "env": [
                        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                        {"name": "FROM", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "other"}}},
                        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
                    ],
                    "volumeMounts": [
                        {"name": "config", "mountPath": "/config"},
                        {"name": "scratch", "mountPath": "/scratch"},
                        {"name": "host", "mountPath": "/host", "readOnly": true},
                    ],
                }],
                "volumes": [
                    {"name": "config", "configMap": {"name": "m", "items": [{"key": "key", "path": "key"}]}},
                    {"name": "scratch", "emptyDir": {}},
                    {"name": "host", "hostPath": {"path": "/var/lib/thing", "type": "Directory"}},
                ],
            },
        }),
    )
    .await?;
    until("the program runs", SOON, || async {
        let pod = pods.get("p").await.map_err(|error| error.to_string())?;
        if ready(&pod) {
            Ok(())
        } else {
            Err(format!("{:?}\n{}", pod.status, node.evidence(500)))
        }
    })
    .await?;
    maps.patch(
        "m",
        &PatchParams::default(),
        &Patch::Merge(json!({"data": {"key": "after"}})),
    )
    .await?;
    let ended = until("the program ends", SOON, || async {
        let pod = pods.get("p").await.map_err(|error| error.to_string())?;
        if phase(&pod) == "Succeeded" {
            Ok(pod)
        } else {
            Err(format!("{:?}\n{}", pod.status, node.evidence(500)))
        }
    })
    .await?;
    let status = ended.status.context("a status")?;
    let address = status.pod_ip.clone().unwrap_or_default();
    let statuses = status.container_statuses.unwrap_or_default();
    let terminated = statuses
        .first()
        .and_then(|one| one.state.clone())
        .and_then(|state| state.terminated);
    let message = terminated
        .and_then(|terminated| terminated.message)
        .unwrap_or_default();
    let told: Vec<&str> = message.lines().collect();
    let expected = [
        format!("ip={address}"),
        "node=program".to_owned(),
        "from=x".to_owned(),
        "key=after".to_owned(),
        format!("namespace={namespace}"),
        "token=yes".to_owned(),
        "ca=yes".to_owned(),
        "driver=yes".to_owned(),
        "root=read-only".to_owned(),
        "scratch=writable".to_owned(),
        "config=read-only".to_owned(),
        "host=own".to_owned(),
        "machine=hidden".to_owned(),
        "api=10.77.0.1".to_owned(),
    ];
    ensure!(told == expected, "the program saw {told:#?}");
    ensure!(node.failures().is_empty(), "{:?}", node.failures());
    node.remove().await;
    Ok(())
}

async fn restarts(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let client = fixture.client().await?;
    let node = fixture.own_node("restarts").await?;
    let namespace = fixture.namespace("restarts").await?;
    let (pods, _) = create(
        &client,
        &namespace,
        json!({
            "metadata": {"name": "p"},
            "spec": {
                "nodeName": node.name(),
                "containers": [{"name": "main", "image": "test/shell", "args": ["-c", "exit 7"]}],
            },
        }),
    )
    .await?;
    until("a second restart", SOON, || async {
        let pod = pods.get("p").await.map_err(|error| error.to_string())?;
        let status = pod.status.unwrap_or_default();
        let one = status
            .container_statuses
            .unwrap_or_default()
            .into_iter()
            .next()
            .ok_or("no status")?;
        let last = one
            .last_state
            .and_then(|state| state.terminated)
            .map(|ended| ended.exit_code);
        if one.restart_count >= 2 && last == Some(7) {
            Ok(())
        } else {
            Err(format!("{} {last:?}", one.restart_count))
        }
    })
    .await?;
    let asked = Instant::now();
    pods.delete("p", &DeleteParams::default()).await?;
    until("the object is gone", SOON, || async {
        match pods.get_opt("p").await {
            Ok(None) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await?;
    ensure!(
        asked.elapsed() < Duration::from_secs(20),
        "a pod without a running container needs no grace period"
    );
    node.remove().await;
    Ok(())
}

async fn refuses(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let client = fixture.client().await?;
    let node = fixture.own_node("refuses").await?;
    let namespace = fixture.namespace("refuses").await?;
    let (pods, _) = create(
        &client,
        &namespace,
        json!({
            "metadata": {"name": "p"},
            "spec": {
                "nodeName": node.name(),
                "containers": [{"name": "main", "image": "test/idle", "lifecycle": {"preStop": {"exec": {"command": ["x"]}}}}],
            },
        }),
    )
    .await?;
    let message = until("the refusal", SOON, || async {
        let pod = pods.get("p").await.map_err(|error| error.to_string())?;
        if phase(&pod) == "Failed" {
            Ok(pod.status.and_then(|status| status.message))
        } else {
            Err(format!("{:?}", pod.status))
        }
    })
    .await?;
    ensure!(
        message
            .is_some_and(|message| message.contains("spec.containers[0].lifecycle.preStop.exec.command[0]"))
    );
    if node.failures().is_empty() {
        bail!("the refusal is no failure of the test");
    }
    node.remove().await;
    Ok(())
}
