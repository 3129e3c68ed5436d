//! Wires the parts and runs them until told to stop.
//!
//! Purpose: from checked settings to a serving adapter.
//! Inputs: the command line.
//! Invariants: probes answer before anything else is tried; what is missing is waited for and named in
//! `/readyz?verbose`, never a reason to exit; readiness latches: once pods, targets, trust and certificate were
//! there, only stopping takes it back.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use forewarm_runtime::admin::{Admin, Program};
use forewarm_runtime::exit::{self, Failure, Problems};
use forewarm_runtime::status::{Condition, Status};
use forewarm_runtime::tasks::Tasks;
use forewarm_runtime::tls::{RELOAD_EVERY, ReloadingCert};
use forewarm_runtime::{BoxError, kube as client, listen, logs, metrics as registry};
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::access::{self, Access, KubeReviewer, TrustStore};
use crate::api::Api;
use crate::args::{Args, Command, Run, Serving};
use crate::certs;
use crate::config::check::check;
use crate::config::watch::{Handle, Watcher};
use crate::index::{self, Index, PodMode};
use crate::metrics::Metrics;
use crate::query::Answers;
use crate::rights;
use crate::server::{Server, Stop, tls_config};
use crate::source;

/// Name of the program.
pub const PROGRAM: Program = Program {
    name: "forewarm-adapter",
    version: env!("CARGO_PKG_VERSION"),
};

/// Requests in flight and the last answers of draining connections; with the shutdown delay well inside the
/// 30 s that the kubelet grants.
const DRAIN: Duration = Duration::from_secs(15);
/// The index beats at least every five seconds.
const INDEX_SILENCE: Duration = Duration::from_secs(30);
/// How often first events are looked for.
const LATCH_EVERY: Duration = Duration::from_millis(100);

/// The program.
///
/// # Errors
/// Why it ends early.
pub fn main() -> Result<(), Failure> {
    let args: Args = exit::parse();
    // The downward API's usual name, as the manifests set it.
    let pod_namespace = std::env::var("POD_NAMESPACE")
        .ok()
        .filter(|name| !name.is_empty());
    match args.resolve(pod_namespace)? {
        Command::Run(run) => block_on(serve(*run)),
        Command::CheckConfig {
            file,
            options,
            output,
        } => {
            let (text, good) = check(&file, options, output);
            std::io::stdout().write_all(text.as_bytes())?;
            if good {
                Ok(())
            } else {
                Err(Failure::boxed("the configuration is not usable"))
            }
        }
        Command::Certs {
            names,
            namespace,
            write,
            kube,
            logs,
        } => {
            logs::init(&logs)?;
            block_on(async move {
                let client = client::client(&kube, &user_agent()).await?;
                let namespace = namespace.unwrap_or_else(|| client.default_namespace().to_owned());
                let round = certs::ensure_once(&client, &namespace, names, write.as_deref()).await?;
                for open in &round.open {
                    tracing::warn!(reason = open, "APIService without our CA");
                }
                tracing::info!(apiservices = round.trusting, "certificate is in place");
                Ok(())
            })
        }
    }
}

fn block_on(work: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(work)
}

fn user_agent() -> String {
    format!("{}/{}", PROGRAM.name, PROGRAM.version)
}

/// What all parts share.
struct Parts {
    tasks: Tasks,
    token: CancellationToken,
    health: Status,
    registry: Registry,
}

impl Parts {
    fn condition(&self, name: &'static str) -> Condition {
        self.health.readiness.condition(name)
    }
}

async fn serve(run: Run) -> Result<(), Failure> {
    let logs = logs::init(&run.logs)?;
    let metrics = Arc::new(Metrics::default());
    let (watcher, config) = match Watcher::new(&run.server.config, run.server.options, Arc::clone(&metrics)) {
        Ok(pair) => pair,
        Err(rejected) => {
            let mut problems = Problems::new();
            problems.add("--config", rejected);
            return problems.finish().map_err(Failure::from);
        }
    };
    let tasks = Tasks::new();
    let mut parts = Parts {
        token: tasks.token(),
        tasks,
        health: Status::new(),
        registry: registry::registry(PROGRAM.name, PROGRAM.version),
    };
    metrics.register(&mut parts.registry);
    let cluster = match &run.cluster {
        Some(args) => Some(client::client(args, &user_agent()).await?),
        None => None,
    };

    let watcher = watcher.reporting(parts.condition("config"));
    parts.tasks.spawn("config", watcher.follow(parts.token.clone()));
    let cluster = cluster.map(|client| source::Cluster {
        namespace: own_namespace(&run, &client),
        client,
    });
    let index = start_data(&parts, config, cluster.clone(), &metrics);
    let server = bind(&run, &mut parts, cluster, &index, &metrics)?;

    let body = Arc::new(std::mem::take(&mut parts.registry));
    let admin = Admin::start(
        &run.admin,
        PROGRAM,
        parts.health.clone(),
        logs,
        Arc::new(move || registry::text(&body)),
    )?;
    tracing::info!(server = "admin", address = %admin.local_addr(), "listening");
    tracing::info!(server = "api", address = %server.local_addr()?, "listening");
    let stop = Stop {
        token: parts.token.clone(),
        delay: run.server.shutdown_delay,
        condition: parts.condition("server"),
    };
    parts.tasks.spawn("server", server.serve(stop));
    let exit = parts
        .tasks
        .run_until_stopped(run.server.shutdown_delay + DRAIN)
        .await;
    drop(admin);
    exit.into_result()
}

/// Starts what fills the index.
fn start_data(
    parts: &Parts,
    config: Handle,
    cluster: Option<source::Cluster>,
    metrics: &Arc<Metrics>,
) -> Index {
    let mode = if cluster.is_some() {
        PodMode::Watched
    } else {
        PodMode::Reported
    };
    let heartbeat = parts.health.liveness.heartbeat("index", INDEX_SILENCE);
    let (index, queue, run) = index::start(
        &config.current(),
        mode,
        Arc::clone(metrics),
        heartbeat,
        parts.token.clone(),
    );
    parts.tasks.spawn("index", run);
    if let Some(cluster) = &cluster {
        let pods = parts.condition("pods");
        pods.waiting("the running pods were not listed yet");
        let known = index.clone();
        parts.tasks.spawn_work(
            "pods-latch",
            latch(pods, parts.token.clone(), move || known.load().pods_known),
        );
        let client = cluster.client.clone();
        let follow = index::watch::follow(client, queue.clone(), Arc::clone(metrics), parts.token.clone());
        parts.tasks.spawn("pods", follow);
    }
    let sources = source::run(
        config,
        cluster,
        queue,
        Arc::clone(metrics),
        parts.tasks.clone(),
        parts.condition("targets"),
    );
    parts.tasks.spawn("sources", sources);
    index
}

/// The namespace that the adapter runs in.
fn own_namespace(run: &Run, client: &kube::Client) -> String {
    run.namespace
        .clone()
        .unwrap_or_else(|| client.default_namespace().to_owned())
}

/// Turns a condition ready at the first sight of something, for good.
async fn latch(condition: Condition, token: CancellationToken, seen: impl Fn() -> bool) {
    while !seen() {
        tokio::select! {
            () = token.cancelled() => return,
            () = tokio::time::sleep(LATCH_EVERY) => {}
        }
    }
    condition.ready();
}

/// Binds the server, with identity checks where there is a cluster.
fn bind(
    run: &Run,
    parts: &mut Parts,
    cluster: Option<source::Cluster>,
    index: &Index,
    metrics: &Arc<Metrics>,
) -> Result<Server, Failure> {
    let tls = match &run.server.serving {
        Serving::Plain => None,
        Serving::Files { cert, key } => {
            let pair = ReloadingCert::new(cert, key)?;
            let follow = Arc::clone(&pair).follow(RELOAD_EVERY, parts.token.clone());
            parts.tasks.spawn("certificate", async move {
                follow.await;
                Ok::<_, BoxError>(())
            });
            Some(tls_config(pair)?)
        }
        Serving::Managed(settings) => {
            let served = Arc::new(certs::ServedCert::default());
            if let Some(cluster) = &cluster {
                let counters = certs::Metrics::default();
                counters.register(&mut parts.registry);
                let manager = certs::Manager::new(
                    &cluster.client,
                    &cluster.namespace,
                    settings.clone(),
                    Arc::clone(&served),
                    counters,
                );
                let condition = parts.condition("certificate");
                condition.waiting("not made yet");
                parts
                    .tasks
                    .spawn("certificate", manager.run(condition, parts.token.clone()));
            }
            Some(tls_config(served)?)
        }
    };
    let access = cluster.map(|cluster| start_access(&run.server.serving, parts, cluster));
    let counters = crate::server::metrics::Metrics::default();
    counters.register(&mut parts.registry);
    let provider = Arc::new(Answers::new(index.clone(), Arc::clone(metrics)));
    let api = Arc::new(Api::new(provider, access, parts.health.clone(), counters.clone()));
    let listener = listen::bind(&run.server.listen)?;
    Ok(Server::new(listener, tls, api, counters, parts.tasks.clone())?)
}

/// Starts what decides who may read.
fn start_access(serving: &Serving, parts: &mut Parts, cluster: source::Cluster) -> Access {
    let client = cluster.client;
    let trust = Arc::new(TrustStore::empty());
    let condition = parts.condition("trust");
    parts.tasks.spawn(
        "trust",
        access::watch(client.clone(), Arc::clone(&trust), condition, parts.token.clone()),
    );

    let missing = rights::Missing::default();
    missing.register(&mut parts.registry);
    let needed = match serving {
        Serving::Managed(settings) => rights::needed(Some((settings, &cluster.namespace))),
        Serving::Plain | Serving::Files { .. } => rights::needed(None),
    };
    let condition = parts.condition("rights");
    condition.waiting("not checked yet");
    parts.tasks.spawn(
        "rights",
        rights::check(client.clone(), needed, condition, missing, parts.token.clone()),
    );

    let counters = access::Metrics::default();
    counters.register(&mut parts.registry);
    Access::new(trust, Arc::new(KubeReviewer::new(client)), counters)
}
