//! A container's probes, as the kubelet runs them: the start-up probe first, then readiness and liveness
//! side by side, each at its own period with its own thresholds.
//!
//! Only `httpGet`; other kinds are refused by [`super::honoured`]. Certificates are not verified, as in
//! the kubelet. The kubelet also probes once right after the start, whatever the period; so does this.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tokio::task::JoinHandle;

/// What the probes have found so far.
#[derive(Debug, Default)]
pub struct Findings {
    started: AtomicBool,
    ready: AtomicBool,
    condemned: AtomicBool,
}

impl Findings {
    /// Whether the start-up probe has passed, or there is none.
    #[must_use]
    pub fn started(&self) -> bool {
        self.started.load(Ordering::Relaxed)
    }

    /// Whether the readiness probe passes, or there is none.
    #[must_use]
    pub fn ready(&self) -> bool {
        self.started() && self.ready.load(Ordering::Relaxed)
    }

    /// Whether the start-up or the liveness probe has failed for good: the container must be restarted.
    #[must_use]
    pub fn condemned(&self) -> bool {
        self.condemned.load(Ordering::Relaxed)
    }
}

/// The probes of one run of a container; they end when this is dropped.
#[derive(Debug)]
pub struct Probes {
    findings: Arc<Findings>,
    task: JoinHandle<()>,
}

impl Drop for Probes {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Probes {
    /// Starts the probes of a container that was just started.
    #[must_use]
    #[allow(
        clippy::disallowed_methods,
        reason = "ends with the container: aborted on drop"
    )]
    pub fn start(container: &Container, pod: Ipv4Addr) -> Self {
        let findings = Arc::new(Findings::default());
        let target = |probe: &Option<Probe>| {
            probe
                .as_ref()
                .and_then(|probe| Target::new(probe, container, pod))
        };
        let probes = (
            target(&container.startup_probe),
            target(&container.readiness_probe),
            target(&container.liveness_probe),
        );
        let shared = Arc::clone(&findings);
        let task = tokio::spawn(async move { run(probes, &shared).await });
        Self { findings, task }
    }

    /// What they have found so far.
    #[must_use]
    pub fn findings(&self) -> &Findings {
        &self.findings
    }
}

type Targets = (Option<Target>, Option<Target>, Option<Target>);

async fn run((startup, readiness, liveness): Targets, findings: &Findings) {
    if let Some(target) = startup {
        let passed = target.first_decision().await;
        if !passed {
            findings.condemned.store(true, Ordering::Relaxed);
            return;
        }
    }
    findings.started.store(true, Ordering::Relaxed);
    let ready = async {
        match readiness {
            Some(target) => {
                target
                    .forever(|passes| findings.ready.store(passes, Ordering::Relaxed))
                    .await;
            }
            None => findings.ready.store(true, Ordering::Relaxed),
        }
    };
    let live = async {
        if let Some(target) = liveness {
            target
                .forever(|passes| {
                    if !passes {
                        findings.condemned.store(true, Ordering::Relaxed);
                    }
                })
                .await;
        }
    };
    tokio::join!(ready, live);
}

#[derive(Debug, Clone)]
struct Target {
    url: String,
    client: reqwest::Client,
    delay: Duration,
    period: Duration,
    successes: i32,
    failures: i32,
}

impl Target {
    fn new(probe: &Probe, container: &Container, pod: Ipv4Addr) -> Option<Self> {
        let get = probe.http_get.as_ref()?;
        let port = match &get.port {
            IntOrString::Int(port) => *port,
            IntOrString::String(name) => container
                .ports
                .iter()
                .flatten()
                .find(|port| port.name.as_deref() == Some(name))
                .map(|port| port.container_port)?,
        };
        let scheme = get.scheme.as_deref().unwrap_or("HTTP").to_lowercase();
        let path = get.path.as_deref().unwrap_or("/");
        let seconds = |value: Option<i32>, default: i32| {
            Duration::from_secs(u64::try_from(value.unwrap_or(default)).unwrap_or_default())
        };
        let client = reqwest::Client::builder()
            .timeout(seconds(probe.timeout_seconds, 1))
            .danger_accept_invalid_certs(true)
            .redirect(reqwest::redirect::Policy::none())
            // The kubelet opens a connection per probe; a kept one would hide a listener that is gone.
            .pool_max_idle_per_host(0)
            .build()
            .ok()?;
        Some(Self {
            url: format!("{scheme}://{pod}:{port}{path}"),
            client,
            delay: seconds(probe.initial_delay_seconds, 0),
            period: seconds(probe.period_seconds, 10).max(Duration::from_secs(1)),
            successes: probe.success_threshold.unwrap_or(1).max(1),
            failures: probe.failure_threshold.unwrap_or(3).max(1),
        })
    }

    async fn passes(&self) -> bool {
        self.client
            .get(&self.url)
            .send()
            .await
            .is_ok_and(|answer| (200..400).contains(&answer.status().as_u16()))
    }

    /// Tells every decision until the task is aborted.
    async fn forever(&self, mut decide: impl FnMut(bool)) {
        tokio::time::sleep(self.delay).await;
        let (mut passed, mut failed) = (0, 0);
        loop {
            if self.passes().await {
                (passed, failed) = (passed + 1, 0);
            } else {
                (passed, failed) = (0, failed + 1);
            }
            if passed >= self.successes {
                decide(true);
            } else if failed >= self.failures {
                decide(false);
            }
            tokio::time::sleep(self.period).await;
        }
    }

    /// The first decision.
    async fn first_decision(&self) -> bool {
        let (decided, decision) = tokio::sync::oneshot::channel();
        let mut decided = Some(decided);
        let deciding = self.forever(|passes| {
            if let Some(decided) = decided.take() {
                let _ = decided.send(passes);
            }
        });
        tokio::select! {
            () = deciding => false,
            decision = decision => decision.unwrap_or(false),
        }
    }
}
