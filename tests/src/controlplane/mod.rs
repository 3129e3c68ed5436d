//! One real control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler.
//!
//! ```text
//! etcd ◄─ kube-apiserver (10.77.0.1:port) ◄─ kube-controller-manager (HPA, ReplicaSets, EndpointSlices …)
//!              │  aggregation, by endpoint addresses         kube-scheduler
//!              ▼
//!         forewarm-adapter in a simulated node
//! ```
//! Inputs: the binaries ([`binaries`]) and [`Options`]. Needs the private network of [`crate::netns`].
//! Invariants: everything lives in one temporary folder and dies with [`ControlPlane`]; "ready" is
//! always a condition that was seen, never a time that has passed; the API server keeps its port over
//! [`ControlPlane::restart_api_server`].

pub mod access;
pub mod binaries;
pub mod certs;
pub mod flags;

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ServiceAccount};
use kube::{Api, Client};
use tokio::sync::Mutex;

use crate::child::Child;
use crate::netns::control_plane_address;
use crate::scratch::Scratch;
use crate::wait::until;

use access::Access;
use binaries::Binaries;
use certs::{Certs, Pair};
use flags::Ports;

/// Longest start of one program: 10 s on an idle machine, several times that beside a cold build.
const START: Duration = Duration::from_secs(180);
/// How much of each log a failure shows.
const LOG_TAIL: u64 = 3_000;

/// What a testbed may set.
#[derive(Debug, Clone)]
pub struct Options {
    /// `--horizontal-pod-autoscaler-sync-period`.
    pub hpa_sync: Duration,
    /// `--horizontal-pod-autoscaler-downscale-stabilization`; an HPA's own behaviour takes precedence.
    pub hpa_downscale_stabilization: Duration,
    /// `--horizontal-pod-autoscaler-initial-readiness-delay`.
    pub hpa_initial_readiness_delay: Duration,
    /// `--node-monitor-grace-period`: after this silence a node is unreachable.
    pub node_grace: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            hpa_sync: Duration::from_secs(1),
            hpa_downscale_stabilization: Duration::ZERO,
            hpa_initial_readiness_delay: Duration::from_secs(1),
            node_grace: Duration::from_secs(40),
        }
    }
}

/// A running control plane.
pub struct ControlPlane {
    // Dropped in this order: clients of the API server first, storage last, then the folder.
    scheduler: Child,
    controllers: Child,
    api_server: Mutex<Child>,
    etcd: Child,
    binaries: Binaries,
    ports: Ports,
    certs: Certs,
    access: Access,
    admin: Pair,
    client: Client,
    folder: Scratch,
}

impl std::fmt::Debug for ControlPlane {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("ControlPlane")
            .field("folder", &self.folder)
            .finish_non_exhaustive()
    }
}

impl ControlPlane {
    /// Starts all programs and waits until each does its work.
    ///
    /// # Errors
    /// When a program is missing, ends or is not ready in time; the message carries the end of its log.
    pub async fn start(options: &Options) -> anyhow::Result<Self> {
        access::install_crypto();
        let binaries = Binaries::find()?;
        let folder = Scratch::new("controlplane")?;
        let address = control_plane_address();
        let certs = Certs::generate(&folder.path().join("pki"), address, flags::SERVICE_ADDRESS)?;
        let ports = Ports::choose().context("choosing ports")?;
        let access = Access::new(address, ports.api_server, certs.cluster.pem());

        let mut etcd = start(
            &binaries,
            "etcd",
            &flags::etcd(&ports, folder.path()),
            folder.path(),
        )?;
        ready("etcd", &mut etcd, || async {
            let answer = reqwest_get(&format!("http://{address}:{}/health", ports.etcd)).await?;
            if answer.contains("true") {
                Ok(())
            } else {
                Err(answer)
            }
        })
        .await?;

        let mut api_server = start(
            &binaries,
            "kube-apiserver",
            &flags::api_server(&ports, &certs),
            folder.path(),
        )?;
        let admin = certs.cluster.client("forewarm-admin", &["system:masters"])?;
        let client = access.client(&admin)?;
        ready("kube-apiserver", &mut api_server, || api_ready(client.clone())).await?;

        for (user, file) in [
            ("system:kube-controller-manager", flags::CONTROLLERS_KUBECONFIG),
            ("system:kube-scheduler", flags::SCHEDULER_KUBECONFIG),
        ] {
            let pair = certs.cluster.client(user, &[])?;
            fs::write(folder.path().join(file), access.kubeconfig(&pair).to_string())?;
        }
        fs::write(
            folder.path().join(flags::ADMIN_KUBECONFIG),
            access.kubeconfig(&admin).to_string(),
        )?;
        fs::write(
            folder.path().join(flags::SCHEDULER_CONFIG),
            flags::scheduler_config(folder.path()).to_string(),
        )?;
        let mut controllers = start(
            &binaries,
            "kube-controller-manager",
            &flags::controllers(&ports, &certs, folder.path(), options),
            folder.path(),
        )?;
        let mut scheduler = start(
            &binaries,
            "kube-scheduler",
            &flags::scheduler(&ports, &certs, folder.path()),
            folder.path(),
        )?;
        ready("kube-controller-manager", &mut controllers, || {
            namespace_ready(client.clone(), "default")
        })
        .await?;
        ready("kube-scheduler", &mut scheduler, || async {
            std::net::TcpStream::connect((address, ports.scheduler))
                .map(|_| ())
                .map_err(|error| error.to_string())
        })
        .await?;
        Ok(Self {
            scheduler,
            controllers,
            api_server: Mutex::new(api_server),
            etcd,
            binaries,
            ports,
            certs,
            access,
            admin,
            client,
            folder,
        })
    }

    /// A client with all rights.
    #[must_use]
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Where the API server is and whom to trust.
    #[must_use]
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// The certificate authorities, for identities that tests invent.
    #[must_use]
    pub fn certs(&self) -> &Certs {
        &self.certs
    }

    /// The administrator's certificate.
    #[must_use]
    pub fn admin(&self) -> &Pair {
        &self.admin
    }

    /// A kubeconfig with all rights, reachable inside the private network.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join(flags::ADMIN_KUBECONFIG)
    }

    /// The folder of logs, certificates and data.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Creates a throw-away namespace and waits until pods can be created in it.
    ///
    /// # Errors
    /// When the API server refuses or the namespace is not usable in time.
    pub async fn namespace(&self, name: &str) -> anyhow::Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client());
        let object = serde_json::from_value(serde_json::json!({
            "metadata": {"name": name, "labels": {"forewarm.dev/throw-away": "true"}},
        }))?;
        namespaces
            .create(&kube::api::PostParams::default(), &object)
            .await
            .context("creating a namespace")?;
        until("a usable namespace", START, || {
            namespace_ready(self.client(), name)
        })
        .await?;
        Ok(())
    }

    /// Stops the API server, runs `meanwhile`, starts it again on the same port and waits until it is ready.
    ///
    /// # Errors
    /// When it does not come back.
    pub async fn restart_api_server(&self, meanwhile: impl Future<Output = ()>) -> anyhow::Result<()> {
        let mut api_server = self.api_server.lock().await;
        api_server.stop(Duration::from_secs(10)).await;
        meanwhile.await;
        let flags = flags::api_server(&self.ports, &self.certs);
        *api_server = start(&self.binaries, "kube-apiserver", &flags, self.folder.path())?;
        // A new client: this one's pooled connections belong to the server that ended.
        let client = self.access.client(&self.admin)?;
        ready("kube-apiserver", &mut api_server, || api_ready(client.clone())).await
    }

    /// Lets programs outside the private network reach the API server by a listener that was bound
    /// there, and writes a kubeconfig for them.
    ///
    /// # Errors
    /// When the listener or the file cannot be used.
    pub fn serve_outside(&self, listener: TcpListener, kubeconfig: &Path) -> anyhow::Result<()> {
        let outside = listener.local_addr()?;
        fs::write(
            kubeconfig,
            self.access
                .kubeconfig_at(&outside.to_string(), &self.admin)
                .to_string(),
        )?;
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let inside = SocketAddr::from((control_plane_address(), self.ports.api_server));
        access::forward(listener, inside);
        Ok(())
    }

    /// The ends of all logs, for a failure's message.
    pub async fn evidence(&self) -> String {
        let api_server = self.api_server.lock().await;
        [&self.etcd, &*api_server, &self.controllers, &self.scheduler]
            .into_iter()
            .map(|child| {
                format!(
                    "--- {}: {}\n{}",
                    child.name(),
                    child.log().display(),
                    child.log_tail(LOG_TAIL)
                )
            })
            .collect::<Vec<_>>()
            .join("\n")
    }
}

fn start(binaries: &Binaries, program: &str, flags: &[String], folder: &Path) -> anyhow::Result<Child> {
    let mut command = binaries.command(program);
    // Certificates, tokens and proxies of whoever runs the tests must not leak in.
    command
        .args(flags)
        .current_dir(folder)
        .env_remove("KUBECONFIG")
        .env("NO_PROXY", "*");
    Ok(Child::start(
        program,
        command,
        &folder.join(format!("{program}.log")),
    )?)
}

async fn ready<F, Fut>(name: &str, child: &mut Child, mut look: F) -> anyhow::Result<()>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<(), String>>,
{
    let what = format!("{name} is ready");
    let looked = until(&what, START, || {
        // A program that has ended never becomes ready: say so at once.
        let ended = child.exited();
        let look = ended.is_none().then(&mut look);
        async move {
            match (ended, look) {
                (None, Some(look)) => look.await.map(|()| None),
                (ended, _) => Ok(ended),
            }
        }
    })
    .await;
    let problem = match looked {
        Ok(None) => return Ok(()),
        Ok(Some(status)) => format!("{name} ended: {status}"),
        Err(late) => late.to_string(),
    };
    anyhow::bail!(
        "{problem}\n--- {}\n{}",
        child.log().display(),
        child.log_tail(LOG_TAIL)
    )
}

async fn api_ready(client: Client) -> Result<(), String> {
    let request = http::Request::get("/readyz")
        .body(Vec::new())
        .map_err(|error| error.to_string())?;
    match tokio::time::timeout(Duration::from_secs(5), client.request_text(request)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("no answer within 5 s".to_owned()),
    }
}

/// Pods can be created once the controllers have made the default service account and the CA's ConfigMap.
async fn namespace_ready(client: Client, namespace: &str) -> Result<(), String> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let maps: Api<ConfigMap> = Api::namespaced(client, namespace);
    accounts.get("default").await.map_err(|error| error.to_string())?;
    maps.get("kube-root-ca.crt")
        .await
        .map_err(|error| error.to_string())?;
    Ok(())
}

async fn reqwest_get(url: &str) -> Result<String, String> {
    let answer = reqwest::get(url).await.map_err(|error| error.to_string())?;
    answer.text().await.map_err(|error| error.to_string())
}
