//! What the demo installs: `manifests/` by a small overlay, and the example that users get.
//!
//! Invariants: the stack is changed only by a kustomize overlay that anyone could write; the workload is the
//! shipped example with another image and faster behaviour.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::Value;

/// What the demo changes in the adapter's config: with the HPA looking five times as often as by default,
/// values are averaged over a fifth of the time.
const WINDOW: (&str, &str) = ("length: 15s", "length: 3s");

/// The repository's `manifests/`.
#[must_use]
pub fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests")
}

/// Writes the demo's overlay of `manifests/base` into `folder`.
///
/// # Errors
/// When a file cannot be read or written, or the config no longer has the window that is changed.
pub fn overlay(folder: &Path) -> anyhow::Result<()> {
    let manifests = manifests().canonicalize().context("manifests/")?;
    let config = manifests.join("base/adapter/config.yaml");
    let text = std::fs::read_to_string(&config).with_context(|| config.display().to_string())?;
    anyhow::ensure!(
        text.contains(WINDOW.0),
        "{}: no `{}` to change",
        config.display(),
        WINDOW.0
    );
    std::fs::write(folder.join("config.yaml"), text.replace(WINDOW.0, WINDOW.1))?;
    // JSON is YAML.
    let kustomization = serde_json::json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [relative(&folder.canonicalize()?, &manifests.join("base"))],
        "configMapGenerator": [{
            "name": "forewarm-adapter",
            "namespace": "forewarm",
            "behavior": "merge",
            "files": ["config.yaml"],
            "options": {"disableNameSuffixHash": true},
        }],
    });
    std::fs::write(folder.join("kustomization.yaml"), kustomization.to_string())?;
    Ok(())
}

/// The way from a folder to a path, both canonical: kustomize takes no absolute paths.
fn relative(folder: &Path, to: &Path) -> PathBuf {
    let up = folder
        .components()
        .filter(|part| matches!(part, std::path::Component::Normal(_)));
    up.map(|_| Path::new(".."))
        .chain([to.strip_prefix("/").unwrap_or(to)])
        .collect()
}

/// The inference Deployment and its HPA, from the example that users get, fitted to the demo.
///
/// # Errors
/// When the example is not as expected.
pub fn workload(namespace: &str, name: &str, target: u32, most: u32) -> anyhow::Result<Vec<Value>> {
    let file = manifests().join("examples/hpa.yaml");
    let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let mut objects = crate::kustomize::objects(&text).map_err(anyhow::Error::msg)?;
    for object in &mut objects {
        object["metadata"]["namespace"] = namespace.into();
        object["metadata"]["name"] = name.into();
        match object["kind"].as_str() {
            Some("Deployment") => {
                object["spec"]["replicas"] = 1.into();
                object["spec"]["selector"]["matchLabels"] = serde_json::json!({"app": name});
                object["spec"]["template"]["metadata"]["labels"] = serde_json::json!({"app": name});
                object["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 5.into();
                let container = &mut object["spec"]["template"]["spec"]["containers"][0];
                container["image"] = "forewarm/simulated-inference".into();
                // A simulated container tells its readiness itself.
                if let Some(container) = container.as_object_mut() {
                    container.remove("readinessProbe");
                }
            }
            Some("HorizontalPodAutoscaler") => {
                object["spec"]["scaleTargetRef"]["name"] = name.into();
                object["spec"]["maxReplicas"] = most.into();
                object["spec"]["metrics"][0]["pods"]["target"]["averageValue"] = target.to_string().into();
                // Everything a fifth as long, to match the HPA's sync period here.
                object["spec"]["behavior"] = serde_json::json!({
                    "scaleUp": {"stabilizationWindowSeconds": 0, "selectPolicy": "Max", "policies": [
                        {"type": "Percent", "value": 100, "periodSeconds": 3},
                        {"type": "Pods", "value": 4, "periodSeconds": 3}]},
                    "scaleDown": {"stabilizationWindowSeconds": 6, "policies": [
                        {"type": "Percent", "value": 100, "periodSeconds": 3}]},
                });
            }
            other => anyhow::bail!("{}: unexpected {other:?}", file.display()),
        }
    }
    Ok(objects)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_overlay_shortens_every_window_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        overlay(folder.path()).unwrap();
        let stock = std::fs::read_to_string(manifests().join("base/adapter/config.yaml")).unwrap();
        let ours = std::fs::read_to_string(folder.path().join("config.yaml")).unwrap();
        assert_ne!(stock, ours);
        assert_eq!(stock, ours.replace(WINDOW.1, WINDOW.0));
    }

    #[test]
    fn what_the_story_assumes_of_the_config_is_there() {
        let text = std::fs::read_to_string(manifests().join("base/adapter/config.yaml")).unwrap();
        let config: serde_json::Value = serde_saphyr::from_str(&text).unwrap();
        let metrics = config["metrics"].as_array().unwrap();
        let read = metrics
            .iter()
            .find(|metric| metric["name"] == "gpu_sm_active_percent")
            .unwrap();
        assert_eq!(read["pods"], "ready");
        assert_eq!(
            read["maxAge"]["exclusive"],
            format!("{}s", crate::demo::whole::MAX_AGE.as_secs())
        );
        assert!(
            WINDOW
                .1
                .ends_with(&format!(" {}s", crate::demo::whole::WINDOW.as_secs()))
        );
    }

    #[test]
    fn paths_are_relative_to_the_overlay() {
        assert_eq!(
            relative(Path::new("/tmp/x"), Path::new("/home/a")),
            Path::new("../../home/a")
        );
    }

    #[test]
    fn the_demo_scales_what_the_example_scales() {
        let objects = workload("demo", "llm", 60, 24).unwrap();
        assert_eq!(objects.len(), 2);
        assert_eq!(
            objects[0]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"],
            1
        );
        assert_eq!(
            objects[1]["spec"]["metrics"][0]["pods"]["metric"]["name"],
            "gpu_sm_active_percent"
        );
        assert_eq!(objects[1]["spec"]["scaleTargetRef"]["name"], "llm");
    }
}
