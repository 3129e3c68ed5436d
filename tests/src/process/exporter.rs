//! The real exporter on the fake driver, with everything a test needs to steer it.
//!
//! Inputs: [`ExporterOptions`]. Invariants: each exporter has its own folder with the fake's control file, the
//! kubelet folder and the log; both go when it is dropped.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use std::time::Duration;

use anyhow::{Context, Result};
use forewarm_fake_nvml::{Control, gpu_uuid};

use super::artefacts::{Artefacts, artefacts};
use super::program::Program;
use super::scrape::Scrape;
use crate::scratch::Scratch;
use crate::wait::{Late, until};

/// How to start an exporter.
#[derive(Debug, Clone)]
pub struct ExporterOptions {
    /// Built-in profile name or profile file of the fake.
    pub profile: String,
    /// How many GPUs the node has.
    pub gpus: u32,
    /// Driver version the fake plays.
    pub driver: Option<String>,
    /// Cost of a call in microseconds. None by default: tests are about values.
    pub call_cost_us: u32,
    /// Arguments besides addresses, library, kubelet folder and node name.
    pub args: Vec<String>,
    /// More environment.
    pub env: Vec<(String, String)>,
    /// Kubelet folder of another owner; its own when absent.
    pub kubelet_dir: Option<PathBuf>,
    /// Release build, for figures.
    pub release: bool,
}

impl Default for ExporterOptions {
    fn default() -> Self {
        Self {
            profile: "h100-sxm".into(),
            gpus: 2,
            driver: None,
            call_cost_us: 0,
            args: Vec::new(),
            env: Vec::new(),
            kubelet_dir: None,
            release: false,
        }
    }
}

/// A running exporter.
#[derive(Debug)]
pub struct Exporter {
    /// The process.
    pub program: Program,
    /// Where `/metrics` is served.
    pub metrics: SocketAddr,
    /// Where probes and its own health are served.
    pub admin: SocketAddr,
    control: Control,
    folder: Scratch,
}

/// Seed of the fake's UUIDs, the same in all tests so that expected UUIDs are known beforehand.
const UUID_SEED: &str = "process";

impl Exporter {
    /// The folder, control file and command for an exporter that is not started yet.
    ///
    /// # Errors
    /// The programs cannot be built, or no folder can be made.
    pub fn prepare(options: &ExporterOptions) -> Result<(Scratch, Command)> {
        let artefacts = if options.release {
            Artefacts::release()?
        } else {
            artefacts()?
        };
        let folder = Scratch::new("exporter").context("make a folder")?;
        let kubelet_dir = options
            .kubelet_dir
            .clone()
            .unwrap_or_else(|| folder.path().join("kubelet"));
        std::fs::create_dir_all(&kubelet_dir)?;
        let mut command = Command::new(&artefacts.exporter);
        command
            .args(["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"])
            .args(["--node-name", "node-a", "--log-format", "json"])
            .arg("--nvml-library")
            .arg(&artefacts.fake_nvml)
            .arg("--kubelet-dir")
            .arg(kubelet_dir)
            .args(&options.args)
            .env_remove("KUBERNETES_SERVICE_HOST")
            .env("FAKE_NVML_PROFILE", &options.profile)
            .env("FAKE_NVML_GPUS", options.gpus.to_string())
            .env("FAKE_NVML_CONTROL", control_path(folder.path()))
            .env("FAKE_NVML_CALL_COST_US", options.call_cost_us.to_string())
            .env("FAKE_NVML_UUID_SEED", UUID_SEED);
        if let Some(driver) = &options.driver {
            command.env("FAKE_NVML_DRIVER", driver);
        }
        command.envs(options.env.iter().map(|(key, value)| (key, value)));
        Ok((folder, command))
    }

    /// Starts an exporter and waits until it listens.
    ///
    /// # Errors
    /// It cannot be built or started, or does not listen in time.
    pub async fn start(options: &ExporterOptions) -> Result<Self> {
        let (folder, command) = Self::prepare(options)?;
        Self::start_in(folder, command).await
    }

    /// Starts what [`Self::prepare`] prepared.
    ///
    /// # Errors
    /// It cannot be started, or does not listen in time.
    pub async fn start_in(folder: Scratch, command: Command) -> Result<Self> {
        let mut program = Program::start("forewarm-exporter", command, folder.path())?;
        Ok(Self {
            metrics: program.listening("metrics").await?,
            admin: program.listening("admin").await?,
            program,
            control: Control::read(&control_path(folder.path())).unwrap_or_default(),
            folder,
        })
    }

    /// Changes what the fake's GPUs do, from the next 100 ms on.
    ///
    /// # Errors
    /// The control file cannot be written.
    pub fn steer(&mut self, change: impl FnOnce(&mut Control)) -> Result<()> {
        change(&mut self.control);
        self.control
            .write(&control_path(self.folder.path()))
            .context("write the control file")
    }

    /// The UUID of a GPU.
    #[must_use]
    pub fn uuid(index: u32) -> String {
        gpu_uuid(UUID_SEED, index)
    }

    /// The kubelet folder it looks into, unless the options named another.
    #[must_use]
    pub fn kubelet_dir(&self) -> PathBuf {
        self.folder.path().join("kubelet")
    }

    /// Reads `/metrics`.
    ///
    /// # Errors
    /// As [`Scrape::get`].
    pub async fn scrape(&self) -> Result<Scrape, String> {
        Scrape::get(self.metrics, "/metrics")
            .await
            .map_err(|error| format!("{error:#}"))
    }

    /// Scrapes until `look` is content, and returns what it found.
    ///
    /// # Errors
    /// What the last look missed, when `within` has passed.
    pub async fn until<T>(
        &self,
        what: &str,
        within: Duration,
        look: impl Fn(&Scrape) -> Result<T, String>,
    ) -> Result<T, Late> {
        until(what, within, || async { look(&self.scrape().await?) }).await
    }

    /// Reads its own health until `look` is content, and returns what it found.
    ///
    /// # Errors
    /// What the last look missed, when `within` has passed.
    pub async fn until_health<T>(
        &self,
        what: &str,
        within: Duration,
        look: impl Fn(&Scrape) -> Result<T, String>,
    ) -> Result<T, Late> {
        until(what, within, || async { look(&self.health().await?) }).await
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

/// The control file in an exporter's folder.
#[must_use]
pub fn control_path(folder: &Path) -> PathBuf {
    folder.join("control.json")
}
