//! The real adapter without a cluster, over static targets.
//!
//! Inputs: the text of its configuration. Invariants: each adapter has its own folder with the configuration and
//! the log; both go when it is dropped.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use http::StatusCode;
use serde_json::Value;

use super::artefacts::{Artefacts, artefacts};
use super::program::Program;
use super::scrape::{Scrape, fetch};
use crate::scratch::Scratch;
use crate::wait::{Late, until};

/// First lines of every configuration.
pub const CONFIG_HEAD: &str = "apiVersion: forewarm.dev/v1alpha1\nkind: AdapterConfig\n";

/// A running adapter.
#[derive(Debug)]
pub struct Adapter {
    /// The process.
    pub program: Program,
    /// Where the metrics API is served, without TLS.
    pub api: SocketAddr,
    /// Where probes and its own health are served.
    pub admin: SocketAddr,
    folder: Scratch,
}

/// What the metrics API answered.
#[derive(Debug, Clone)]
pub struct Reply {
    /// Status code.
    pub status: StatusCode,
    /// Body.
    pub body: Value,
}

impl Reply {
    /// The value of an item, as text of a quantity.
    #[must_use]
    pub fn value(&self, object: &str) -> Option<&str> {
        self.items()
            .find(|item| item["describedObject"]["name"] == object)
            .and_then(|item| item["value"].as_str())
    }

    /// The items of a list.
    pub fn items(&self) -> impl Iterator<Item = &Value> {
        self.body["items"].as_array().into_iter().flatten()
    }

    /// The message of a Status.
    #[must_use]
    pub fn message(&self) -> &str {
        self.body["message"].as_str().unwrap_or_default()
    }
}

impl Adapter {
    /// Starts an adapter of the dev profile.
    ///
    /// # Errors
    /// It cannot be built or started, or does not listen in time.
    pub async fn start(config: &str) -> Result<Self> {
        Self::start_of(artefacts()?, config).await
    }

    /// Starts an adapter of other artefacts, such as a release build for figures.
    ///
    /// # Errors
    /// It cannot be started, or does not listen in time.
    pub async fn start_of(artefacts: &Artefacts, config: &str) -> Result<Self> {
        let folder = Scratch::new("adapter").context("make a folder")?;
        let path = folder.path().join("adapter.yaml");
        std::fs::write(&path, config)?;
        let mut command = Command::new(&artefacts.adapter);
        command
            .args([
                "--standalone",
                "--listen",
                "127.0.0.1:0",
                "--admin-listen",
                "127.0.0.1:0",
            ])
            .args(["--log-format", "json", "--shutdown-delay", "0s", "--config"])
            .arg(&path)
            .env_remove("KUBERNETES_SERVICE_HOST");
        let mut program = Program::start("forewarm-adapter", command, folder.path())?;
        Ok(Self {
            api: program.listening("api").await?,
            admin: program.listening("admin").await?,
            program,
            folder,
        })
    }

    /// The configuration file.
    #[must_use]
    pub fn config_path(&self) -> PathBuf {
        self.folder.path().join("adapter.yaml")
    }

    /// Replaces the configuration at once, as the kubelet does: by a rename.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn reconfigure(&self, config: &str) -> Result<()> {
        let new = self.folder.path().join("adapter.yaml.new");
        std::fs::write(&new, config)?;
        std::fs::rename(new, self.config_path()).context("replace the configuration")
    }

    /// Asks the metrics API.
    ///
    /// # Errors
    /// No answer, or one that is not JSON.
    pub async fn get(&self, path: &str) -> Result<Reply, String> {
        let answer = fetch(self.api, path)
            .await
            .map_err(|error| format!("{error:#}"))?;
        let body =
            serde_json::from_slice(&answer.body).map_err(|error| format!("{error}: {}", answer.text()))?;
        Ok(Reply {
            status: answer.status,
            body,
        })
    }

    /// Asks for a metric of all pods of a namespace, as an HPA does.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub async fn pods(&self, namespace: &str, metric: &str) -> Result<Reply, String> {
        self.get(&format!(
            "/apis/custom.metrics.k8s.io/v1beta2/namespaces/{namespace}/pods/%2A/{metric}"
        ))
        .await
    }

    /// Asks until `look` is content, and returns what it found.
    ///
    /// # Errors
    /// What the last look missed, when `within` has passed.
    pub async fn until_pods<T>(
        &self,
        what: &str,
        within: Duration,
        namespace: &str,
        metric: &str,
        look: impl Fn(&Reply) -> Result<T, String>,
    ) -> Result<T, Late> {
        until(what, within, || async {
            look(&self.pods(namespace, metric).await?)
        })
        .await
    }

    /// Reads its own health from the admin port.
    ///
    /// # Errors
    /// As [`Scrape::get`].
    pub async fn health(&self) -> Result<Scrape, String> {
        Scrape::get(self.admin, "/metrics")
            .await
            .map_err(|error| format!("{error:#}"))
    }
}
