//! Exporter and adapter, installed from the very manifests that users apply, and ways to look at them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use forewarm_tests::install::{self, Mode};
use forewarm_tests::kustomize;
use forewarm_tests::wait::until;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

/// Namespace of the stack, as in the manifests.
pub(crate) const NAMESPACE: &str = "forewarm";
/// The registrations in the manifests.
pub(crate) const API_SERVICES: [&str; 3] = [
    "v1beta1.custom.metrics.k8s.io",
    "v1beta2.custom.metrics.k8s.io",
    "v1beta1.external.metrics.k8s.io",
];
/// Patience with each step of the installation: ten times what it takes on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// The repository's `manifests/`.
pub(crate) fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests")
}

/// Installs `manifests/base` and waits until the API server serves the adapter's groups.
pub(crate) async fn install(client: Client) -> anyhow::Result<()> {
    let objects = kustomize::render(&manifests().join("base"))?;
    install::apply(&client, &objects, Mode::Apply).await?;
    until("an exporter is ready on every node", PATIENCE, || async {
        let sets: Api<DaemonSet> = Api::namespaced(client.clone(), NAMESPACE);
        let set = sets
            .get("forewarm-exporter")
            .await
            .map_err(|error| error.to_string())?;
        let status = set.status.unwrap_or_default();
        let (wanted, ready) = (status.desired_number_scheduled, status.number_ready);
        if wanted > 0 && ready == wanted {
            Ok(())
        } else {
            Err(format!("{ready} of {wanted}"))
        }
    })
    .await?;
    until("all adapters are ready", PATIENCE, || {
        adapters_ready(client.clone())
    })
    .await?;
    for name in API_SERVICES {
        until(&format!("{name} is available"), PATIENCE, || {
            available(client.clone(), name)
        })
        .await?;
    }
    add_metrics(&client).await
}

pub(crate) async fn adapters_ready(client: Client) -> Result<(), String> {
    let deployments: Api<Deployment> = Api::namespaced(client, NAMESPACE);
    let deployment = deployments
        .get("forewarm-adapter")
        .await
        .map_err(|error| error.to_string())?;
    let wanted = deployment.spec.and_then(|spec| spec.replicas).unwrap_or(1);
    let status = deployment.status.unwrap_or_default();
    let ready = status.ready_replicas.unwrap_or(0);
    let current = status.updated_replicas.unwrap_or(0) == wanted && status.replicas.unwrap_or(0) == wanted;
    if ready == wanted && current {
        Ok(())
    } else {
        Err(format!("{ready} of {wanted}: {status:?}"))
    }
}

/// Whether an APIService has condition Available.
pub(crate) async fn available(client: Client, name: &str) -> Result<(), String> {
    let service = get(
        &client,
        &format!("/apis/apiregistration.k8s.io/v1/apiservices/{name}"),
    )
    .await
    .map_err(|error| error.to_string())?;
    let conditions = service["status"]["conditions"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let holds = conditions
        .iter()
        .any(|one| one["type"] == "Available" && one["status"] == "True");
    if holds {
        Ok(())
    } else {
        Err(format!("{conditions:?}"))
    }
}

/// Registers only these of the custom metrics API's versions, the way a user would: by deleting or creating APIServices.
/// One that is created again carries the CA that its like carries, as a GitOps tool that keeps the live value has it.
pub(crate) async fn register_custom_metrics(client: &Client, versions: &[&str]) -> anyhow::Result<()> {
    let objects = kustomize::render(&manifests().join("base"))?;
    let external = get(
        client,
        &format!("/apis/apiregistration.k8s.io/v1/apiservices/{}", API_SERVICES[2]),
    )
    .await?;
    for object in objects.iter().filter(|object| object["kind"] == "APIService") {
        let (group, version) = (
            &object["spec"]["group"],
            object["spec"]["version"].as_str().unwrap_or_default(),
        );
        if group != "custom.metrics.k8s.io" {
            continue;
        }
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let api = install::api(client, object).await.map_err(anyhow::Error::msg)?;
        let there = api.get_opt(name).await?.is_some();
        if versions.contains(&version) && !there {
            let mut object = object.clone();
            object["spec"]["caBundle"] = external["spec"]["caBundle"].clone();
            api.create(&PostParams::default(), &serde_json::from_value(object)?)
                .await?;
        } else if there && !versions.contains(&version) {
            api.delete(name, &DeleteParams::default()).await?;
        }
        if versions.contains(&version) {
            until(&format!("{name} is available"), PATIENCE, || {
                available(client.clone(), name)
            })
            .await?;
        }
    }
    until("the group lists exactly these versions", PATIENCE, || async {
        let group = get(client, "/apis/custom.metrics.k8s.io")
            .await
            .map_err(|error| error.to_string())?;
        let mut listed: Vec<&str> = group["versions"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|version| version["version"].as_str())
            .collect();
        listed.sort_unstable();
        if listed == versions {
            Ok(())
        } else {
            Err(format!("{listed:?}"))
        }
    })
    .await?;
    Ok(())
}

/// `gpu_sm_active_percent` over 2 s, so that a trial need not wait for old values to leave the window.
pub(crate) const SHORT: &str = "gpu_sm_active_percent_short";
/// The same at half its value: what a wrong adapter would serve.
pub(crate) const HALVED: &str = "gpu_sm_active_percent_halved";

/// Adds the trials' own metrics to the configuration in the manifests, which the adapter reloads without a restart.
pub(crate) async fn add_metrics(client: &Client) -> anyhow::Result<()> {
    edit_adapter_config(client, |config| {
        let own = |name: &str, scale: u32| {
            format!(
                "\nmetrics:\n- name: {name}\n  source: exporters\n  series: gpu_pod_sm_active_ratio\n  scale: {scale}\n  \
                 per: pods\n  pods: ready\n  acrossDevices: mean\n  window: {{length: 2s, function: mean}}\n  \
                 maxAge: {{exclusive: 10s}}\n"
            )
        };
        let both = own(SHORT, 100) + own(HALVED, 50).trim_start_matches("\nmetrics:\n");
        config.replacen("\nmetrics:\n", &both, 1)
    })
    .await?;
    for metric in [SHORT, HALVED] {
        until(&format!("the adapter knows {metric}"), PATIENCE, || async {
            let path = pods_path("v1beta2", "default", metric, "no=pod");
            match get(client, &path).await {
                Err(kube::Error::Api(status)) if status.message.contains("selector") => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await?;
    }
    Ok(())
}

/// Rewrites the adapter's configuration; it is reloaded without a restart.
pub(crate) async fn edit_adapter_config(
    client: &Client,
    edit: impl Fn(&str) -> String,
) -> anyhow::Result<()> {
    let objects = kustomize::render(&manifests().join("base"))?;
    let map = objects
        .iter()
        .find(|object| object["kind"] == "ConfigMap" && object["metadata"]["name"] == "forewarm-adapter")
        .context("the adapter's ConfigMap")?;
    let config = map["data"]["config.yaml"].as_str().context("config.yaml")?;
    let edited = edit(config);
    ensure!(edited != config, "the edit changed nothing");
    let maps = install::api(client, map).await.map_err(anyhow::Error::msg)?;
    let patch = json!({"data": {"config.yaml": edited}});
    maps.patch("forewarm-adapter", &PatchParams::default(), &Patch::Merge(patch))
        .await?;
    Ok(())
}

/// The running adapter pods.
pub(crate) async fn adapter_pods(client: &Client) -> anyhow::Result<Vec<Pod>> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let list = pods
        .list(&ListParams::default().labels("app.kubernetes.io/name=forewarm-adapter"))
        .await?;
    ensure!(!list.items.is_empty(), "no adapter pods");
    Ok(list.items)
}

/// A GET through the API server, decoded.
pub(crate) async fn get(client: &Client, path: &str) -> Result<Value, kube::Error> {
    let request = http::Request::get(path)
        .body(Vec::new())
        .map_err(kube::Error::HttpError)?;
    client.request(request).await
}

/// Path of a metric of all pods of a namespace that match a selector.
pub(crate) fn pods_path(version: &str, namespace: &str, metric: &str, selector: &str) -> String {
    let selector = selector.replace('=', "%3D").replace(',', "%2C");
    format!(
        "/apis/custom.metrics.k8s.io/{version}/namespaces/{namespace}/pods/%2A/{metric}?labelSelector={selector}"
    )
}
