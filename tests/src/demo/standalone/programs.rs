//! The two programs of the standalone half, started on loopback.
//!
//! Inputs: built programs, a driver's library, the stand-in kubelet's folder. Invariants: ports are the kernel's choice;
//! nothing of the machine's Kubernetes leaks in.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::GPUS;
use crate::process::{Artefacts, Program, Scrape};

/// The exporter, on either driver.
pub(super) struct Running {
    /// Where its readings are.
    pub(super) metrics: SocketAddr,
    /// The fake's control file; `None` with the machine's driver.
    pub(super) control: Option<PathBuf>,
    _program: Program,
}

/// UUIDs of the GPUs that answer.
pub(super) async fn gpus(exporter: SocketAddr) -> Result<Vec<String>, String> {
    let scrape = Scrape::get(exporter, "/metrics")
        .await
        .map_err(|error| format!("{error:#}"))?;
    let up: Vec<String> = scrape
        .all(forewarm_signals::gpu::UP.name, &[])
        .filter(|sample| sample.value > 0.0)
        .map(|sample| sample.label("uuid").to_owned())
        .collect();
    if up.is_empty() {
        Err("no GPU is up yet".to_owned())
    } else {
        Ok(up)
    }
}

/// Starts the adapter on one exporter; answers with the address of its API.
pub(super) async fn adapter(
    artefacts: &Artefacts,
    exporter: SocketAddr,
    folder: &Path,
) -> anyhow::Result<(Program, SocketAddr)> {
    let config = folder.join("adapter.yaml");
    // JSON is YAML. Without `metrics` the built-in ones are served.
    let text = serde_json::json!({
        "apiVersion": "forewarm.dev/v1alpha1",
        "kind": "AdapterConfig",
        "sources": [{"name": "exporters", "scrape": {
            "targets": [exporter.to_string()], "scheme": "http", "interval": "1s", "timeout": "500ms",
        }}],
    });
    std::fs::write(&config, text.to_string())?;
    let mut command = Command::new(&artefacts.adapter);
    command
        .arg("--standalone")
        .arg("--config")
        .arg(config)
        .args([
            "--listen",
            "127.0.0.1:0",
            "--admin-listen",
            "127.0.0.1:0",
            "--log-format",
            "json",
        ])
        .env_remove("KUBERNETES_SERVICE_HOST")
        .env_remove("KUBECONFIG");
    let mut program = Program::start("forewarm-adapter", command, folder)?;
    let api = program.listening("api").await?;
    Ok((program, api))
}

/// Starts the exporter; with a control file on the stand-in for the driver.
pub(super) async fn exporter(
    artefacts: &Artefacts,
    library: &Path,
    kubelet_dir: &Path,
    folder: &Path,
    control: Option<PathBuf>,
) -> anyhow::Result<Running> {
    let mut command = Command::new(&artefacts.exporter);
    command
        .args([
            "--listen",
            "127.0.0.1:0",
            "--admin-listen",
            "127.0.0.1:0",
            "--log-format",
            "json",
        ])
        .args(["--node-name", "this"])
        .arg("--nvml-library")
        .arg(library)
        .arg("--kubelet-dir")
        .arg(kubelet_dir)
        .env_remove("KUBERNETES_SERVICE_HOST");
    if let Some(control) = &control {
        command
            .env("FAKE_NVML_PROFILE", "h100-sxm")
            .env("FAKE_NVML_GPUS", GPUS.to_string())
            .env("FAKE_NVML_CONTROL", control);
    }
    let mut program = Program::start("forewarm-exporter", command, folder)?;
    let metrics = program.listening("metrics").await?;
    Ok(Running {
        metrics,
        control,
        _program: program,
    })
}
