//! What goes wrong in a cluster must never become a wrong value, nor move the HPA.
//!
//! Each trial first sees the right value served through the API server, then injects, then asserts the
//! answer's status and reason, what the HPA does, and the adapter's own counters; and that all is well again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use forewarm_tests::process::fetch;
use forewarm_tests::wait::until;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, RoleBinding};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::fixture::{Case, Fixture, case, disturbing};
use crate::victim::{EXACT, PATIENCE, REPLICAS, Victim, adapters_count, is_right, quantity};
use crate::{forger, stack};

pub(crate) fn cases() -> Vec<Case> {
    vec![
        case(
            "fault_pod_of_another_namespace_that_poses_as_an_exporter_is_not_read",
            foreign_exporter,
        ),
        case(
            "fault_second_exporter_that_claims_a_pod_is_refused_and_counted",
            second_claim,
        ),
        case(
            "fault_user_without_rights_is_forbidden_until_a_role_is_bound",
            no_rights,
        ),
        case(
            "fault_stopped_exporter_means_absent_values_with_their_age_and_a_hpa_that_holds",
            stopped_exporter,
        ),
        disturbing(
            "fault_api_server_restart_leaves_values_and_replicas_as_they_are",
            api_server_restart,
        ),
        disturbing(
            "fault_adapters_without_the_right_to_review_say_so_and_recover",
            no_reviews,
        ),
        disturbing(
            "fault_adapters_replaced_under_load_cause_no_failed_answer",
            rollout,
        ),
    ]
}

/// What the real exporter of a node tells, with every SM reading replaced.
async fn forged_body(client: &Client, node: &str) -> anyhow::Result<String> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), stack::NAMESPACE);
    let exporters = pods
        .list(&ListParams::default().labels("app.kubernetes.io/name=forewarm-exporter"))
        .await?;
    let on_node = exporters
        .items
        .into_iter()
        .find(|pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node))
        .context("the node's exporter")?;
    let address = on_node
        .status
        .and_then(|status| status.pod_ip)
        .context("its address")?;
    let text = fetch(SocketAddr::new(address.parse()?, 9410), "/metrics")
        .await?
        .text();
    let mut replaced = 0;
    let lines: Vec<String> = text
        .lines()
        .map(|line| match line.rsplit_once(' ') {
            Some((series, _)) if series.starts_with("gpu_pod_sm_active_ratio{") => {
                replaced += 1;
                format!("{series} 0.01")
            }
            _ => line.to_owned(),
        })
        .collect();
    ensure!(replaced > 0, "the exporter tells nothing to forge");
    Ok(lines.join("\n") + "\n")
}

/// A pod with the exporters' label. It belongs to a ConfigMap, or the exporters' DaemonSet would adopt it and then
/// remove it as one too many on its node.
pub(crate) async fn forger_pod(
    client: &Client,
    namespace: &str,
    name: &str,
    node: &str,
) -> anyhow::Result<Pod> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = serde_json::from_value(json!({"metadata": {"name": name}}))?;
    let owner = maps.create(&PostParams::default(), &map).await?.metadata.uid;
    Ok(serde_json::from_value(json!({
        "metadata": {
            "name": name,
            "labels": {"app.kubernetes.io/name": "forewarm-exporter"},
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": owner, "controller": true},
            ],
        },
        "spec": {
            "nodeName": node,
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "forger", "image": forger::IMAGE,
                "ports": [{"name": "metrics", "containerPort": 9410}],
                "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            }],
        },
    }))?)
}

async fn foreign_exporter(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let victim = Victim::start(&fixture, "foreign-exporter", "gpu-1").await?;
    let forgery = fixture
        .forgers()
        .prepare("foreign-forger", forged_body(&victim.client, "gpu-1").await?);
    let pods: Api<Pod> = Api::namespaced(victim.client.clone(), &victim.namespace);
    pods.create(
        &PostParams::default(),
        &forger_pod(&victim.client, &victim.namespace, "foreign-forger", "gpu-2").await?,
    )
    .await?;
    until("the forger runs", PATIENCE, || async {
        let pod = pods
            .get("foreign-forger")
            .await
            .map_err(|error| error.to_string())?;
        let phase = pod.status.and_then(|status| status.phase).unwrap_or_default();
        if phase == "Running" { Ok(()) } else { Err(phase) }
    })
    .await?;
    victim.is_untouched_for(Duration::from_secs(8)).await?;
    ensure!(
        forgery.asked() == 0,
        "the adapters read the forger {} times",
        forgery.asked()
    );
    pods.delete("foreign-forger", &DeleteParams::default()).await?;
    victim.end().await
}

/// Inside the exporters' own namespace the forger is read, but another node's exporter answers for the pods.
async fn second_claim(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let victim = Victim::start(&fixture, "second-claim", "gpu-1").await?;
    let conflicts = "forewarm_adapter_sample_conflicts_total";
    let before = adapters_count(&victim.client, conflicts, &[]).await?;
    let forgery = fixture
        .forgers()
        .prepare("second-forger", forged_body(&victim.client, "gpu-1").await?);
    let pods: Api<Pod> = Api::namespaced(victim.client.clone(), stack::NAMESPACE);
    pods.create(
        &PostParams::default(),
        &forger_pod(&victim.client, stack::NAMESPACE, "second-forger", "gpu-2").await?,
    )
    .await?;
    let refused = until("the adapters refuse the second claim", PATIENCE, || async {
        let now = adapters_count(&victim.client, conflicts, &[])
            .await
            .map_err(|error| error.to_string())?;
        if now > before {
            Ok(())
        } else {
            Err(format!("{now} conflicts, read {} times", forgery.asked()))
        }
    })
    .await;
    let untouched = victim.is_untouched_for(Duration::from_secs(6)).await;
    pods.delete("second-forger", &DeleteParams::default()).await?;
    refused?;
    untouched?;
    victim.end().await
}

/// RBAC by verb: nothing without a role, the values with the manifests' view role, still nothing elsewhere.
async fn no_rights(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let victim = Victim::start(&fixture, "no-rights", "gpu-1").await?;
    let plane = fixture.plane().await?;
    let user = plane
        .access()
        .client(&plane.certs().cluster.client("tenant", &[])?)?;
    let forbidden = |answer: Result<Value, kube::Error>| match answer {
        Err(kube::Error::Api(status)) if status.code == 403 && status.message.contains("tenant") => Ok(()),
        other => Err(anyhow::anyhow!("not forbidden: {other:?}")),
    };
    forbidden(stack::get(&user, &victim.path()).await)?;
    let bindings: Api<RoleBinding> = Api::namespaced(victim.client.clone(), &victim.namespace);
    let binding = serde_json::from_value(json!({
        "metadata": {"name": "tenant-view"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "forewarm-metrics-view"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "tenant"}],
    }))?;
    bindings.create(&PostParams::default(), &binding).await?;
    until(
        "the tenant reads its own namespace's values",
        PATIENCE,
        || async {
            let answer = stack::get(&user, &victim.path())
                .await
                .map_err(|error| error.to_string())?;
            let values: Vec<f64> = answer["items"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|item| quantity(&item["value"]))
                .collect();
            if values.len() == REPLICAS as usize && values.iter().all(|value| is_right(*value)) {
                Ok(())
            } else {
                Err(format!("{answer}"))
            }
        },
    )
    .await?;
    forbidden(
        stack::get(
            &user,
            &stack::pods_path("v1beta2", "default", stack::SHORT, "app=llm"),
        )
        .await,
    )?;
    victim.end().await
}

async fn stopped_exporter(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let node = fixture.own_gpu_node("stopped").await?;
    let victim = Victim::deploy(&fixture, "stopped-exporter", json!({"nodeName": node.name()})).await?;
    victim.settle().await?;
    let timeouts = |client: Client| async move {
        adapters_count(
            &client,
            "forewarm_adapter_scrapes_total",
            &[("result", "timeout")],
        )
        .await
    };
    let before = timeouts(victim.client.clone()).await?;
    ensure!(node.signal("exporter", Signal::SIGSTOP) == 1);
    let stopped = Instant::now();
    let outcome = absent_then_held(&victim, stopped).await;
    ensure!(
        node.signal("exporter", Signal::SIGCONT) == 1,
        "the exporter was replaced while it was stopped"
    );
    let message = outcome?;
    ensure!(
        timeouts(victim.client.clone()).await? > before,
        "no scrape was counted as timed out"
    );
    // Well again by itself.
    victim.shows_the_right_values(Duration::from_secs(15)).await?;
    until("the HPA is active again", PATIENCE, || async {
        match victim.hpa().await {
            Ok((REPLICAS, None)) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await?;
    eprintln!("told while the exporter was stopped: {message}");
    victim.end().await?;
    node.remove().await;
    Ok(())
}

/// Values are right, then gone with a reason that names their age, never wrong; the HPA keeps its replicas.
async fn absent_then_held(victim: &Victim, stopped: Instant) -> anyhow::Result<String> {
    let message = loop {
        match victim.values().await {
            Ok(values) => {
                ensure!(
                    values.iter().all(|value| is_right(*value)),
                    "wrong values: {values:?}"
                );
                // maxAge is 10 s, the last reading is at most one interval and one tick older than the stop.
                ensure!(
                    stopped.elapsed() < Duration::from_secs(12),
                    "still served after {:?}",
                    stopped.elapsed()
                );
            }
            Err(kube::Error::Api(status)) => {
                ensure!(status.code == 404, "{status:?}");
                break status.message;
            }
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    ensure!(
        stopped.elapsed() > Duration::from_secs(6),
        "withheld already after {:?}",
        stopped.elapsed()
    );
    for part in [stack::SHORT, "app=llm", " s ago, older than maxAge 10 s"] {
        ensure!(message.contains(part), "the reason lacks {part:?}: {message}");
    }
    let told = until("the HPA shows the reason", Duration::from_secs(10), || async {
        match victim.hpa().await {
            Ok((REPLICAS, Some(inactive))) if inactive.contains("older than maxAge") => Ok(inactive),
            other => Err(format!("{other:?}")),
        }
    })
    .await?;
    let held = Instant::now();
    while held.elapsed() < Duration::from_secs(3) {
        let (desired, _) = victim.hpa().await?;
        ensure!(desired == REPLICAS, "the HPA moved to {desired}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(told)
}

async fn api_server_restart(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let victim = Victim::start(&fixture, "api-restart", "gpu-1").await?;
    let restarts = |pods: &[Pod]| -> i32 {
        let statuses = pods.iter().flat_map(|pod| pod.status.iter());
        statuses
            .flat_map(|status| status.container_statuses.iter().flatten())
            .map(|one| one.restart_count)
            .sum()
    };
    let before = restarts(&stack::adapter_pods(&victim.client).await?);
    fixture.plane().await?.restart_api_server(async {}).await?;
    victim.shows_the_right_values(Duration::from_secs(60)).await?;
    until("the HPA is active", PATIENCE, || async {
        match victim.hpa().await {
            Ok((REPLICAS, None)) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await?;
    victim.is_untouched_for(Duration::from_secs(3)).await?;
    ensure!(
        restarts(&stack::adapter_pods(&victim.client).await?) == before,
        "an adapter restarted"
    );
    // The watches go on: a replica that is added now gets its value.
    let deployments: Api<Deployment> = Api::namespaced(victim.client.clone(), &victim.namespace);
    victim.hpas().delete("llm", &DeleteParams::default()).await?;
    let scale = json!({"spec": {"replicas": 3}});
    deployments
        .patch("llm", &Default::default(), &kube::api::Patch::Merge(scale))
        .await?;
    until(
        "a replica added after the restart has a value",
        PATIENCE,
        || async {
            let values = victim.values().await.map_err(|error| error.to_string())?;
            let right = values.iter().all(|value| (value - 30.0).abs() < EXACT);
            if values.len() == 3 && right {
                Ok(())
            } else {
                Err(format!("{values:?}"))
            }
        },
    )
    .await?;
    deployments.delete("llm", &DeleteParams::default()).await?;
    Ok(())
}

/// Without `system:auth-delegator` the adapters cannot ask whether a user may read: nobody is served on trust.
async fn no_reviews(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let victim = Victim::start(&fixture, "no-reviews", "gpu-1").await?;
    let bindings: Api<ClusterRoleBinding> = Api::all(victim.client.clone());
    let name = "forewarm-adapter-auth-delegator";
    let mut binding = bindings.get(name).await?;
    bindings.delete(name, &DeleteParams::default()).await?;
    // Not the administrator, whose group needs no review.
    let plane = fixture.plane().await?;
    let user = plane
        .access()
        .client(&plane.certs().cluster.client("reviewed", &[])?)?;
    let rights: Api<RoleBinding> = Api::namespaced(victim.client.clone(), &victim.namespace);
    let right = serde_json::from_value(json!({
        "metadata": {"name": "reviewed"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "forewarm-metrics-view"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "reviewed"}],
    }))?;
    rights.create(&PostParams::default(), &right).await?;
    let refused = until("the adapters say what they may not", PATIENCE, || async {
        match stack::get(&user, &victim.path()).await {
            Err(kube::Error::Api(status)) if status.message.contains("may not create the review") => {
                Ok(status)
            }
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    let held = victim.hpa().await;
    binding.metadata.resource_version = None;
    binding.metadata.uid = None;
    bindings.create(&PostParams::default(), &binding).await?;
    let refused = refused?;
    ensure!(refused.code == 503, "{refused:?}");
    ensure!(held?.0 == REPLICAS, "the HPA moved");
    until("the user is served again", PATIENCE, || async {
        match stack::get(&user, &victim.path()).await {
            Ok(answer) if answer["items"].as_array().is_some_and(|items| items.len() == 2) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await?;
    victim.shows_the_right_values(PATIENCE).await?;
    victim.end().await
}

/// A rolling restart while a client reads all the time: old adapters drain, new ones are ready with values.
async fn rollout(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let victim = Victim::start(&fixture, "rollout", "gpu-1").await?;
    let deployments: Api<Deployment> = Api::namespaced(victim.client.clone(), stack::NAMESPACE);
    let before: Vec<_> = stack::adapter_pods(&victim.client)
        .await?
        .into_iter()
        .map(|pod| pod.metadata.uid)
        .collect();
    deployments.restart("forewarm-adapter").await?;
    let (mut answers, mut failures) = (0_u32, Vec::new());
    let deadline = Instant::now() + Duration::from_secs(90);
    let mut over = None;
    loop {
        match victim.values().await {
            Ok(values) => {
                answers += 1;
                ensure!(
                    values.iter().all(|value| is_right(*value)),
                    "wrong values: {values:?}"
                );
                if values.len() != REPLICAS as usize {
                    failures.push(format!("{} values", values.len()));
                }
            }
            Err(error) => failures.push(error.to_string()),
        }
        let (desired, _) = victim.hpa().await?;
        ensure!(desired == REPLICAS, "the HPA moved to {desired}");
        let now: Vec<_> = stack::adapter_pods(&victim.client)
            .await?
            .into_iter()
            .map(|pod| pod.metadata.uid)
            .collect();
        let replaced = now.len() == before.len() && now.iter().all(|uid| !before.contains(uid));
        if replaced && stack::adapters_ready(victim.client.clone()).await.is_ok() {
            // A little longer: the API server may still hold connections to those that ended.
            let over = over.get_or_insert_with(Instant::now);
            if over.elapsed() > Duration::from_secs(3) {
                break;
            }
        }
        if Instant::now() > deadline {
            bail!(
                "the rollout did not end: {:?}",
                stack::adapters_ready(victim.client.clone()).await
            );
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    ensure!(answers > 50, "only {answers} answers");
    ensure!(
        failures.is_empty(),
        "{} of {} answers failed: {failures:?}",
        failures.len(),
        answers
    );
    victim.end().await
}
