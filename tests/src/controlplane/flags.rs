//! The flags of the control plane's programs, kept apart so that the whole configuration reads as one page.

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;

use serde_json::{Value, json};

use super::Options;
use super::certs::{Certs, FRONT_PROXY_NAME};
use crate::netns::control_plane_address;

/// Cluster IPs; nothing routes them, they only have to exist.
pub const SERVICE_RANGE: &str = "10.96.0.0/16";
/// The `kubernetes` Service's address, first of [`SERVICE_RANGE`].
pub const SERVICE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// Issuer of service account tokens.
const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";
/// File names inside the control plane's folder.
pub const ADMIN_KUBECONFIG: &str = "admin.kubeconfig";
/// Of the controller manager.
pub const CONTROLLERS_KUBECONFIG: &str = "kube-controller-manager.kubeconfig";
/// Of the scheduler.
pub const SCHEDULER_KUBECONFIG: &str = "kube-scheduler.kubeconfig";
/// The scheduler's configuration.
pub const SCHEDULER_CONFIG: &str = "kube-scheduler.yaml";

/// Ports chosen by the kernel, on the control plane's address.
#[derive(Debug, Clone, Copy)]
pub struct Ports {
    /// etcd's clients.
    pub etcd: u16,
    /// etcd's peers.
    pub etcd_peer: u16,
    /// The API server.
    pub api_server: u16,
    /// The controller manager.
    pub controllers: u16,
    /// The scheduler.
    pub scheduler: u16,
}

impl Ports {
    /// Asks the kernel for free ports. Held together until all are known, so that they differ.
    ///
    /// # Errors
    /// When the address cannot be bound: the private network is missing.
    pub fn choose() -> std::io::Result<Self> {
        let bind = || TcpListener::bind((control_plane_address(), 0));
        let held = [bind()?, bind()?, bind()?, bind()?, bind()?];
        let mut ports = [0; 5];
        for (port, listener) in ports.iter_mut().zip(&held) {
            *port = listener.local_addr()?.port();
        }
        let [etcd, etcd_peer, api_server, controllers, scheduler] = ports;
        Ok(Self {
            etcd,
            etcd_peer,
            api_server,
            controllers,
            scheduler,
        })
    }
}

pub(super) fn etcd(ports: &Ports, folder: &Path) -> Vec<String> {
    let address = control_plane_address();
    let client = format!("http://{address}:{}", ports.etcd);
    let peer = format!("http://{address}:{}", ports.etcd_peer);
    vec![
        "--name=forewarm".to_owned(),
        format!("--data-dir={}", folder.join("etcd").display()),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=forewarm={peer}"),
        "--log-level=warn".to_owned(),
        // The data lives as long as the test.
        "--unsafe-no-fsync".to_owned(),
    ]
}

pub(super) fn api_server(ports: &Ports, certs: &Certs) -> Vec<String> {
    let address = control_plane_address();
    let file = |name: &str| certs.path(name).display().to_string();
    vec![
        format!("--etcd-servers=http://{address}:{}", ports.etcd),
        format!("--bind-address={address}"),
        format!("--advertise-address={address}"),
        format!("--secure-port={}", ports.api_server),
        format!("--tls-cert-file={}", file("server.crt")),
        format!("--tls-private-key-file={}", file("server.key")),
        format!("--client-ca-file={}", file("ca.crt")),
        "--authorization-mode=Node,RBAC".to_owned(),
        format!("--service-cluster-ip-range={SERVICE_RANGE}"),
        format!("--service-account-issuer={ISSUER}"),
        format!("--service-account-key-file={}", file("service-account.pub")),
        format!(
            "--service-account-signing-key-file={}",
            file("service-account.key")
        ),
        "--allow-privileged=true".to_owned(),
        // Aggregation: identity as in a real cluster, and endpoints' addresses because no kube-proxy runs.
        format!("--requestheader-client-ca-file={}", file("requestheader-ca.crt")),
        format!("--requestheader-allowed-names={FRONT_PROXY_NAME}"),
        "--requestheader-username-headers=X-Remote-User".to_owned(),
        "--requestheader-group-headers=X-Remote-Group".to_owned(),
        "--requestheader-uid-headers=X-Remote-Uid".to_owned(),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
        format!("--proxy-client-cert-file={}", file("front-proxy.crt")),
        format!("--proxy-client-key-file={}", file("front-proxy.key")),
        "--enable-aggregator-routing=true".to_owned(),
        // Stops at once when asked: nothing balances over several API servers here.
        "--shutdown-delay-duration=0s".to_owned(),
        "--endpoint-reconciler-type=none".to_owned(),
        "--profiling=false".to_owned(),
    ]
}

pub(super) fn controllers(ports: &Ports, certs: &Certs, folder: &Path, options: &Options) -> Vec<String> {
    let file = |name: &str| certs.path(name).display().to_string();
    let seconds = |duration: std::time::Duration| format!("{}ms", duration.as_millis());
    vec![
        format!("--kubeconfig={}", folder.join(CONTROLLERS_KUBECONFIG).display()),
        format!("--bind-address={}", control_plane_address()),
        format!("--secure-port={}", ports.controllers),
        "--leader-elect=false".to_owned(),
        // Each controller acts as its own service account, so that its RBAC is the real one.
        "--use-service-account-credentials=true".to_owned(),
        format!(
            "--service-account-private-key-file={}",
            file("service-account.key")
        ),
        format!("--root-ca-file={}", file("ca.crt")),
        "--allocate-node-cidrs=false".to_owned(),
        "--kube-api-qps=200".to_owned(),
        "--kube-api-burst=400".to_owned(),
        format!(
            "--horizontal-pod-autoscaler-sync-period={}",
            seconds(options.hpa_sync)
        ),
        format!(
            "--horizontal-pod-autoscaler-downscale-stabilization={}",
            seconds(options.hpa_downscale_stabilization)
        ),
        format!(
            "--horizontal-pod-autoscaler-initial-readiness-delay={}",
            seconds(options.hpa_initial_readiness_delay)
        ),
        "--node-monitor-period=1s".to_owned(),
        format!("--node-monitor-grace-period={}", seconds(options.node_grace)),
        "--profiling=false".to_owned(),
    ]
}

pub(super) fn scheduler(ports: &Ports, certs: &Certs, folder: &Path) -> Vec<String> {
    let file = |name: &str| certs.path(name).display().to_string();
    vec![
        format!("--config={}", folder.join(SCHEDULER_CONFIG).display()),
        format!("--bind-address={}", control_plane_address()),
        format!("--secure-port={}", ports.scheduler),
        format!("--tls-cert-file={}", file("server.crt")),
        format!("--tls-private-key-file={}", file("server.key")),
    ]
}

pub(super) fn scheduler_config(folder: &Path) -> Value {
    json!({
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {
            "kubeconfig": folder.join(SCHEDULER_KUBECONFIG).display().to_string(),
            "qps": 200,
            "burst": 400,
        },
        "leaderElection": {"leaderElect": false},
        // A pod that waited for a GPU is tried again as soon as one is free.
        "podInitialBackoffSeconds": 1,
        "podMaxBackoffSeconds": 1,
        "enableProfiling": false,
    })
}
