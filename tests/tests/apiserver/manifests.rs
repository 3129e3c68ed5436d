//! The manifests: does a real API server take every object, as it is, strictly?

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use forewarm_tests::install::{self, Mode};
use forewarm_tests::kustomize;
use serde_json::{Value, json};

use crate::fixture::{Case, Fixture, case};
use crate::stack;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        case("manifests_pass_a_strict_server_side_dry_run", |fixture| {
            dry_run(fixture, &[])
        }),
        case(
            "manifests_components_pass_a_strict_server_side_dry_run",
            every_component,
        ),
        case("manifests_examples_pass_a_strict_server_side_dry_run", examples),
    ]
}

/// A dry run stores nothing, so the namespace must be there for what lies in it.
async fn check(fixture: &Fixture, objects: &[Value]) -> anyhow::Result<()> {
    let client = fixture.client().await?;
    let namespaces: BTreeSet<&str> = objects
        .iter()
        .filter_map(|object| object["metadata"]["namespace"].as_str())
        .collect();
    for name in namespaces {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        install::apply(&client, &[namespace], Mode::Apply).await?;
    }
    install::apply(&client, objects, Mode::DryRun).await?;
    Ok(())
}

async fn dry_run(fixture: Arc<Fixture>, components: &[&str]) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let manifests = relative(folder.path(), &stack::manifests())?;
    let kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [format!("{manifests}/base")],
        "components": components.iter().map(|name| format!("{manifests}/components/{name}")).collect::<Vec<_>>(),
    });
    std::fs::write(
        folder.path().join("kustomization.yaml"),
        kustomization.to_string(),
    )?;
    let objects = kustomize::render(folder.path())?;
    ensure!(objects.len() > 15, "only {} objects", objects.len());
    let insecure = objects
        .iter()
        .find(|object| object["spec"]["insecureSkipTLSVerify"] == true);
    ensure!(insecure.is_none(), "an APIService skips verification");
    check(&fixture, &objects).await
}

async fn every_component(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(stack::manifests().join("components"))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    ensure!(!names.is_empty(), "no components");
    for name in names {
        dry_run(Arc::clone(&fixture), &[&name])
            .await
            .with_context(|| format!("component {name}"))?;
    }
    Ok(())
}

async fn examples(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let mut count = 0;
    for entry in std::fs::read_dir(stack::manifests().join("examples"))? {
        let path = entry?.path();
        let text = std::fs::read_to_string(&path)?;
        let objects = kustomize::objects(&text).map_err(anyhow::Error::msg)?;
        check(&fixture, &objects)
            .await
            .with_context(|| path.display().to_string())?;
        count += 1;
    }
    ensure!(count > 0, "no examples");
    Ok(())
}

/// kustomize takes no absolute paths.
fn relative(from: &Path, to: &Path) -> anyhow::Result<String> {
    let ups = "../".repeat(from.canonicalize()?.components().count() - 1);
    let to = to.canonicalize()?;
    Ok(format!("{ups}{}", to.strip_prefix("/")?.display()))
}
