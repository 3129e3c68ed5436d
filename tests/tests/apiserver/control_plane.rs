//! The control plane itself: is it real, and is what others rely on there?

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use forewarm_tests::wait::until;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

use crate::fixture::{Case, Fixture, case};

pub(crate) fn cases() -> Vec<Case> {
    vec![
        case("control_plane_is_of_the_pinned_release", pinned_release),
        case(
            "control_plane_tells_aggregated_servers_whom_to_trust",
            front_proxy,
        ),
        case("control_plane_controllers_and_scheduler_work", controllers_work),
    ]
}

async fn pinned_release(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let version = fixture.client().await?.apiserver_version().await?;
    let minor: u32 = version.minor.trim_end_matches('+').parse()?;
    ensure!(
        version.major == "1" && minor >= 37,
        "API server is {}",
        version.git_version
    );
    Ok(())
}

/// The requestheader CA differs from the cluster's, or mistakes in the adapter's identity checks would not show.
async fn front_proxy(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(fixture.client().await?, "kube-system");
    let data = until(
        "the authentication ConfigMap",
        Duration::from_secs(60),
        || async {
            let map = maps
                .get("extension-apiserver-authentication")
                .await
                .map_err(|error| error.to_string())?;
            map.data
                .filter(|data| data.contains_key("requestheader-client-ca-file"))
                .ok_or("no CA yet".to_owned())
        },
    )
    .await?;
    ensure!(
        data["requestheader-client-ca-file"] != data["client-ca-file"],
        "one CA for both"
    );
    ensure!(data["requestheader-allowed-names"] == r#"["front-proxy-client"]"#);
    ensure!(data["requestheader-username-headers"] == r#"["X-Remote-User"]"#);
    ensure!(data["requestheader-uid-headers"] == r#"["X-Remote-Uid"]"#);
    Ok(())
}

/// A Deployment gets its pod, and the scheduler says why the pod fits nowhere.
async fn controllers_work(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let client = fixture.client().await?;
    let namespace = fixture.namespace("controllers").await?;
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), &namespace);
    let deployment = serde_json::from_value(json!({
        "metadata": {"name": "d"},
        "spec": {
            "selector": {"matchLabels": {"app": "d"}},
            "template": {
                "metadata": {"labels": {"app": "d"}},
                "spec": {
                    "nodeSelector": {"no-such-label": "x"},
                    "containers": [{"name": "c", "image": "test/idle"}],
                },
            },
        },
    }))?;
    deployments.create(&PostParams::default(), &deployment).await?;
    let pods: Api<Pod> = Api::namespaced(client, &namespace);
    until("the scheduler's verdict", Duration::from_secs(60), || async {
        let list = pods
            .list(&Default::default())
            .await
            .map_err(|error| error.to_string())?;
        let pod = list.items.first().ok_or("no pod yet")?;
        let conditions = pod
            .status
            .iter()
            .flat_map(|status| status.conditions.iter().flatten());
        let verdict = conditions
            .clone()
            .find(|condition| condition.type_ == "PodScheduled");
        match verdict.and_then(|verdict| verdict.reason.as_deref()) {
            Some("Unschedulable") => Ok(()),
            _ => Err(format!("{:?}", conditions.collect::<Vec<_>>())),
        }
    })
    .await?;
    Ok(())
}
