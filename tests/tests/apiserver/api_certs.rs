//! `forewarm-adapter certs` against the real API server: made once, adopted by everybody, repaired when broken.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use forewarm_tests::process::{Program, artefacts};
use forewarm_tests::wait::until;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;

use crate::fixture::{Case, Fixture, case};

const SECRET: &str = "some-certs";
/// How many start at once: more than an adapter has replicas.
const RACERS: usize = 4;
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn cases() -> Vec<Case> {
    vec![case(
        "api_certs_command_makes_one_certificate_for_all_who_race",
        race,
    )]
}

/// Runs the command `count` times at once; each writes its files to a folder of its own under `folder`.
async fn run(
    kubeconfig: &Path,
    namespace: &str,
    folder: &Path,
    count: usize,
) -> anyhow::Result<Vec<[String; 3]>> {
    let mut programs = Vec::new();
    for index in 0..count {
        let out = folder.join(index.to_string());
        std::fs::create_dir_all(&out)?;
        let mut command = Command::new(&artefacts()?.adapter);
        command
            .arg("certs")
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .args([
                "--namespace",
                namespace,
                "--certs-secret",
                SECRET,
                "--certs-service",
                "some-service",
            ])
            .arg("--write")
            .arg(&out);
        programs.push((Program::start("forewarm-adapter", command, &out)?, out));
    }
    let mut written = Vec::new();
    for (mut program, out) in programs {
        let status = until("the command ended", PATIENCE, || {
            let ended = program.exited();
            async move { ended.ok_or_else(|| "it runs".to_owned()) }
        })
        .await?;
        ensure!(status.success(), "{status}\n{}", program.log());
        let read = |name: &str| std::fs::read_to_string(out.join(name)).with_context(|| name.to_owned());
        written.push([read("ca.crt")?, read("tls.crt")?, read("tls.key")?]);
    }
    Ok(written)
}

async fn secret(client: &Client, namespace: &str) -> anyhow::Result<[String; 3]> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let mut data = secrets.get(SECRET).await?.data.context("data")?;
    let mut text = |key: &str| -> anyhow::Result<String> {
        Ok(String::from_utf8(
            data.remove(key).with_context(|| key.to_owned())?.0,
        )?)
    };
    Ok([text("ca.crt")?, text("tls.crt")?, text("tls.key")?])
}

async fn race(fixture: Arc<Fixture>) -> anyhow::Result<()> {
    let plane = fixture.plane().await?;
    let client = plane.client();
    let namespace = fixture.namespace("certs").await?;
    let folder = tempfile::tempdir()?;

    let first = run(&plane.kubeconfig(), &namespace, folder.path(), RACERS).await?;
    let stored = secret(&client, &namespace).await?;
    ensure!(
        first.iter().all(|files| *files == stored),
        "not everybody has what the Secret holds"
    );

    // Again: nothing is made anew.
    let again = run(&plane.kubeconfig(), &namespace, folder.path(), 1).await?;
    ensure!(again[0] == stored, "a good certificate was replaced");

    // A key that does not fit is found and only the certificate is made again.
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &namespace);
    let broken = json!({"stringData": {"tls.key": "nonsense"}});
    secrets
        .patch(SECRET, &PatchParams::default(), &Patch::Merge(broken))
        .await?;
    let repaired = run(&plane.kubeconfig(), &namespace, folder.path(), RACERS).await?;
    let now = secret(&client, &namespace).await?;
    ensure!(
        repaired.iter().all(|files| *files == now),
        "not everybody has what the Secret holds"
    );
    ensure!(now[0] == stored[0], "the CA was replaced although it was good");
    ensure!(now[1] != stored[1], "the certificate was not replaced");
    Ok(())
}
