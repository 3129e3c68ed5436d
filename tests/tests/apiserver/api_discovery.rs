//! The metrics API as kube-apiserver and its clients see it: registration, discovery, shapes of requests.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use forewarm_tests::install::{self, Mode};
use forewarm_tests::kustomize;
use forewarm_tests::wait::until;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::fixture::{Case, Fixture, case, disturbing};
use crate::stack::{self, API_SERVICES};

/// What kube-apiserver's own rounds need: availability each 30 s and at every change, some room for the machine.
const AVAILABLE_WITHIN: Duration = Duration::from_secs(35);
/// kube-apiserver reads aggregated discovery each 60 s.
const DISCOVERED_WITHIN: Duration = Duration::from_secs(90);
const PATIENCE: Duration = Duration::from_secs(90);

pub(crate) fn cases() -> Vec<Case> {
    vec![
        case("api_discovery_shows_every_metric_as_current", discovered),
        case("api_answers_every_shape_of_request_in_both_versions", shapes),
        case("api_faults_reach_the_client_with_code_and_cause", faults),
        disturbing(
            "api_registers_within_35_s_without_a_single_metric",
            registers_without_metrics,
        ),
    ]
}

/// A GET through the API server with an Accept header.
async fn get_as(client: &Client, path: &str, accept: &str) -> anyhow::Result<Value> {
    let request = http::Request::get(path)
        .header("Accept", accept)
        .body(Vec::new())?;
    let text = client.request_text(request).await?;
    Ok(serde_json::from_str(&text)?)
}

async fn discovered(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    fixture.stack().await?;
    let client = fixture.client().await?;
    let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
    until(
        "kube-apiserver lists our metrics as current",
        DISCOVERED_WITHIN,
        || async {
            let list = get_as(&client, "/apis", accept)
                .await
                .map_err(|error| format!("{error:#}"))?;
            for (group, versions, resource, subresource) in [
                (
                    "custom.metrics.k8s.io",
                    vec!["v1beta2", "v1beta1"],
                    "pods",
                    Some("gpu_busy_percent"),
                ),
                (
                    "external.metrics.k8s.io",
                    vec!["v1beta1"],
                    "gpu_health_reason",
                    None,
                ),
            ] {
                let found = list["items"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .find(|item| item["metadata"]["name"] == group)
                    .ok_or_else(|| format!("no {group}"))?;
                let listed: Vec<_> = found["versions"].as_array().into_iter().flatten().collect();
                // kube-apiserver orders by versionPriority: v1beta2 is what the HPA controller takes.
                let names: Vec<_> = listed
                    .iter()
                    .filter_map(|version| version["version"].as_str())
                    .collect();
                if names != versions {
                    return Err(format!("{group}: {names:?}"));
                }
                for version in listed {
                    let resource = version["resources"]
                        .as_array()
                        .into_iter()
                        .flatten()
                        .find(|entry| entry["resource"] == resource)
                        .ok_or_else(|| format!("{group}: {version}"))?;
                    let has = subresource.is_none_or(|name| {
                        let mut entries = resource["subresources"].as_array().into_iter().flatten();
                        entries
                            .any(|entry| entry["subresource"] == name && entry["responseKind"]["kind"] != "")
                    });
                    if version["freshness"] != "Current" || !has {
                        return Err(format!("{group}: {version}"));
                    }
                }
            }
            Ok(())
        },
    )
    .await?;
    // What older clients and `kubectl get --raw` read.
    for path in [
        "/apis/custom.metrics.k8s.io/v1beta1",
        "/apis/custom.metrics.k8s.io/v1beta2",
    ] {
        let list = stack::get(&client, path).await?;
        let names: Vec<_> = list["resources"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|entry| &entry["name"])
            .collect();
        ensure!(
            names.iter().any(|name| **name == "pods/gpu_busy_percent"),
            "{path}: {names:?}"
        );
        ensure!(
            names.iter().any(|name| **name == "nodes/gpu_health_score"),
            "{path}: {names:?}"
        );
    }
    until(
        "the OpenAPI v3 documents of our group versions are listed",
        DISCOVERED_WITHIN,
        || async {
            let list = stack::get(&client, "/openapi/v3")
                .await
                .map_err(|error| error.to_string())?;
            let missing: Vec<_> = [
                "custom.metrics.k8s.io/v1beta1",
                "custom.metrics.k8s.io/v1beta2",
                "external.metrics.k8s.io/v1beta1",
            ]
            .into_iter()
            .filter(|served| list["paths"][format!("apis/{served}")].is_null())
            .collect();
            if missing.is_empty() {
                Ok(())
            } else {
                Err(format!("{missing:?}"))
            }
        },
    )
    .await?;
    let document = stack::get(&client, "/openapi/v3/apis/custom.metrics.k8s.io/v1beta2").await?;
    ensure!(document["openapi"] == "3.0.0", "{document}");
    Ok(())
}

/// A pod with one GPU to itself; its exporter reports it idle.
pub(crate) async fn gpu_pod(
    client: &Client,
    namespace: &str,
    name: &str,
    labels: Value,
) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let pod = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "c", "image": "test/idle", "resources": {"limits": {"nvidia.com/gpu": 1}}}],
        },
    }))?;
    pods.create(&PostParams::default(), &pod).await?;
    let path = named_path("v1beta2", namespace, name, "gpu_memory_total_bytes_of_no_metric");
    ensure!(
        stack::get(client, &path).await.is_err(),
        "an unknown metric has a value"
    );
    until(&format!("{namespace}/{name} has a value"), PATIENCE, || async {
        let path = named_path("v1beta2", namespace, name, "gpu_busy_percent");
        stack::get(client, &path)
            .await
            .map(drop)
            .map_err(|error| error.to_string())
    })
    .await?;
    Ok(())
}

pub(crate) fn named_path(version: &str, namespace: &str, pod: &str, metric: &str) -> String {
    format!("/apis/custom.metrics.k8s.io/{version}/namespaces/{namespace}/pods/{pod}/{metric}")
}

/// Names of the described objects, sorted.
fn names(list: &Value) -> Vec<&str> {
    let mut names: Vec<_> = list["items"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|item| item["describedObject"]["name"].as_str())
        .collect();
    names.sort_unstable();
    names
}

async fn shapes(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    fixture.stack().await?;
    let client = fixture.client().await?;
    let (one, other) = (
        fixture.namespace("shapes").await?,
        fixture.namespace("shapes-other").await?,
    );
    gpu_pod(&client, &one, "a", json!({"app": "llm", "tier": "gold"})).await?;
    gpu_pod(&client, &one, "b", json!({"app": "llm"})).await?;
    gpu_pod(&client, &other, "c", json!({"app": "llm"})).await?;
    for version in ["v1beta1", "v1beta2"] {
        let base = format!("/apis/custom.metrics.k8s.io/{version}/namespaces/{one}");
        for (path, expected) in [
            ("pods/%2A/gpu_busy_percent", vec!["a", "b"]),
            ("pods/%2a/gpu_busy_percent", vec!["a", "b"]),
            ("pods/*/gpu_busy_percent", vec!["a", "b"]),
            ("pod/*/gpu_busy_percent", vec!["a", "b"]),
            ("pods/a/gpu_busy_percent", vec!["a"]),
            (
                "pods/*/gpu_busy_percent?labelSelector=app%3Dllm%2Ctier%3Dgold",
                vec!["a"],
            ),
            (
                "pods/*/gpu_busy_percent?labelSelector=app%20in%20(llm,x),!tier",
                vec!["b"],
            ),
            (
                "pods/*/gpu_busy_percent?labelSelector=tier%21%3Dgold&limit=1&timeout=5s",
                vec!["b"],
            ),
        ] {
            let list = stack::get(&client, &format!("{base}/{path}"))
                .await
                .with_context(|| path.to_owned())?;
            ensure!(names(&list) == expected, "{version} {path}: {list}");
            ensure!(
                list["apiVersion"] == format!("custom.metrics.k8s.io/{version}"),
                "{list}"
            );
            for item in list["items"].as_array().into_iter().flatten() {
                ensure!(item["describedObject"]["namespace"] == one, "leaked: {item}");
                ensure!(item["value"] == "0", "an idle GPU is busy: {item}");
                let name = if version == "v1beta1" {
                    &item["metricName"]
                } else {
                    &item["metric"]["name"]
                };
                ensure!(name == "gpu_busy_percent", "{item}");
            }
        }
        // An HPA's Object metric on a node goes through its own namespace.
        let node = stack::get(&client, &format!("{base}/nodes/gpu-1/gpu_health_score")).await?;
        ensure!(names(&node) == ["gpu-1"], "{node}");
        let root = format!("/apis/custom.metrics.k8s.io/{version}/nodes/gpu-1/gpu_health_score");
        let root = stack::get(&client, &root).await?;
        ensure!(
            root["items"][0]["value"] == node["items"][0]["value"],
            "{root} {node}"
        );
    }
    Ok(())
}

async fn faults(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    fixture.stack().await?;
    let client = fixture.client().await?;
    let namespace = fixture.namespace("faults").await?;
    gpu_pod(&client, &namespace, "a", json!({"app": "llm"})).await?;
    let pods = |rest: &str| format!("/apis/custom.metrics.k8s.io/v1beta2/namespaces/{namespace}/pods/{rest}");
    let external = format!("/apis/external.metrics.k8s.io/v1beta1/namespaces/{namespace}");
    for (path, code, says) in [
        (pods("*/no_such_metric"), 404, "no_such_metric"),
        (
            pods("*/gpu_busy_percent?labelSelector=app%3Dother"),
            404,
            "app=other",
        ),
        (
            pods("*/gpu_busy_percent?labelSelector=a%3D%3D%3Db"),
            400,
            "labelSelector",
        ),
        (
            pods("*/gpu_busy_percent?metricLabelSelector=%21%21"),
            400,
            "metricLabelSelector",
        ),
        (pods("a"), 404, "could not find"),
        (format!("{external}/no_such_metric"), 404, "no_such_metric"),
        (
            format!("{external}/no_such_metric?labelSelector=a%20in%20("),
            400,
            "labelSelector",
        ),
    ] {
        match stack::get(&client, &path).await {
            Err(kube::Error::Api(status)) => {
                ensure!(status.code == code, "{path}: {status:?}");
                ensure!(status.message.contains(says), "{path}: {status:?}");
            }
            other => anyhow::bail!("{path}: {other:?}"),
        }
    }
    Ok(())
}

async fn registers_without_metrics(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    fixture.stack().await?;
    let client = fixture.client().await?;
    let objects = kustomize::render(&stack::manifests().join("base"))?;
    let services: Vec<_> = objects
        .into_iter()
        .filter(|object| object["kind"] == "APIService")
        .collect();
    ensure!(
        services.len() == API_SERVICES.len(),
        "{} APIServices",
        services.len()
    );

    let outcome = async {
        stack::edit_adapter_config(&client, |_| {
            "apiVersion: forewarm.dev/v1alpha1\nkind: AdapterConfig\nsources: []\nmetrics: []\nexternal: []\n"
                .to_owned()
        })
        .await?;
        until("no metric is left", PATIENCE, || async {
            let list = stack::get(&client, "/apis/custom.metrics.k8s.io/v1beta2")
                .await
                .map_err(|error| error.to_string())?;
            let count = list["resources"].as_array().map_or(0, Vec::len);
            if count == 1 {
                Ok(())
            } else {
                Err(format!("{list}"))
            }
        })
        .await?;
        for service in &services {
            let api = install::api(&client, service).await.map_err(anyhow::Error::msg)?;
            let name = service["metadata"]["name"].as_str().context("a name")?;
            api.delete(name, &DeleteParams::default()).await?;
        }
        let applied = Instant::now();
        install::apply(&client, &services, Mode::Apply).await?;
        for name in API_SERVICES {
            let left = AVAILABLE_WITHIN.saturating_sub(applied.elapsed());
            until(&format!("{name} is available"), left, || {
                stack::available(client.clone(), name)
            })
            .await?;
        }
        for path in [
            "/apis/custom.metrics.k8s.io/v1beta1",
            "/apis/external.metrics.k8s.io/v1beta1",
        ] {
            let list = stack::get(&client, path).await?;
            ensure!(
                list["resources"]
                    .as_array()
                    .is_some_and(|entries| !entries.is_empty()),
                "{path}: {list}"
            );
        }
        Ok(())
    }
    .await;
    // The configuration that other trials rely on.
    stack::add_metrics(&client).await?;
    outcome
}
