//! Wiring: sources, renderer, ports, tasks; started in the order in which failures are cheapest.
//!
//! Invariants: ports are bound before the driver is touched, so a late driver never delays a probe; readiness means
//! that HTTP serves and the driver was tried once, since a node whose driver is late must still be scraped.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forewarm_nvml::{CallLog, InFlight, Library, Nvml};
use forewarm_runtime::admin::{Admin, Program};
use forewarm_runtime::exit::Failure;
use forewarm_runtime::status::Status;
use forewarm_runtime::tasks::Tasks;
use forewarm_runtime::{listen, logs, metrics as runtime_metrics};

use crate::args::{Args, Config};
use crate::attribution::{self, AttributionView};
use crate::metrics::{Metrics, Sources};
use crate::poll::{self, Opener, PollCounts, Supervision};
use crate::render::Renderer;
use crate::server::Server;
use crate::snapshot::Fleet;
use crate::{PROGRAM, once};

/// Scrapes in flight end within this time after SIGTERM.
const DRAIN: Duration = Duration::from_secs(5);
/// The supervisor beats each interval; only a library that hangs while it opens keeps it silent for long.
const SUPERVISOR_SILENCE: Duration = Duration::from_secs(180);
/// Scrapes are short; two workers keep one slow TLS handshake from holding up the rest.
const WORKERS: usize = 2;
/// Password checks and name look-ups.
const MOST_BLOCKING: usize = 4;

/// Everything that reads and counts, before anything is served.
pub(crate) struct Parts {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) calls: Arc<CallLog>,
    pub(crate) counts: Arc<PollCounts>,
}

impl Parts {
    pub(crate) fn new(interval: Duration) -> Self {
        Self {
            fleet: Fleet::new(interval),
            calls: Arc::default(),
            counts: Arc::default(),
        }
    }

    /// Opens the real library.
    pub(crate) fn opener(&self, path: Option<PathBuf>) -> Opener {
        let calls = Arc::clone(&self.calls);
        Box::new(move |in_flight: &InFlight| {
            let library = Library::open(path.as_deref(), Arc::clone(&calls), in_flight)?;
            Ok(Arc::new(library) as Arc<dyn Nvml>)
        })
    }

    pub(crate) fn renderer(&self, attribution: AttributionView) -> Renderer {
        Renderer::new(Arc::clone(&self.fleet), attribution, Arc::clone(&self.counts))
    }
}

/// Runs the program until it is told to stop.
///
/// # Errors
/// Bad settings (exit code 64), a port that cannot be bound, or a task that ended by itself.
pub fn run(args: Args) -> Result<(), Failure> {
    let config = args.resolve()?;
    let log_control = logs::init(&config.logs)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(MOST_BLOCKING)
        .thread_name("worker")
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(async {
        match config.once {
            Some(output) => once::run(config, output).await,
            None => serve(config, log_control).await,
        }
    });
    // A password check may still run; nothing of ours needs it.
    runtime.shutdown_background();
    outcome
}

async fn serve(config: Config, log_control: logs::LogControl) -> Result<(), Failure> {
    let status = Status::new();
    let listening = status.readiness.condition("listener");
    let driver = status.readiness.condition("driver");
    let lost_access = status.liveness.fault("device-access");
    let heartbeat = status.liveness.heartbeat("supervisor", SUPERVISOR_SILENCE);
    let tasks = Tasks::new();

    let parts = Parts::new(config.interval);
    let (metrics, mut registry) = Metrics::register(Sources {
        fleet: Arc::clone(&parts.fleet),
        calls: Arc::clone(&parts.calls),
        counts: Arc::clone(&parts.counts),
        web: config.web.clone(),
    });
    let view = attribution::start(attribution_config(&config), &tasks, &mut registry);
    let registry = Arc::new(registry);
    let listener = listen::bind(&config.listen)?;
    let program = Program {
        name: PROGRAM,
        version: env!("CARGO_PKG_VERSION"),
    };
    let admin = Admin::start(
        &config.admin,
        program,
        status.clone(),
        log_control,
        Arc::new(move || runtime_metrics::text(&registry)),
    )?;
    tracing::info!(server = "admin", address = %admin.local_addr(), "listening");
    tracing::info!(server = "metrics", address = %listener.local_addr()?, "listening");

    if let Some(web) = &config.web {
        tasks.spawn("web-config", Arc::clone(web).follow(tasks.token()));
    }
    let server = Server::new(parts.renderer(view), config.web.clone(), metrics);
    tasks.spawn("metrics-server", server.serve(listener, tasks.clone()));
    listening.ready();
    let supervision = Supervision {
        fleet: Arc::clone(&parts.fleet),
        counts: Arc::clone(&parts.counts),
        heartbeat,
        driver,
        lost_access,
    };
    poll::start(parts.opener(config.nvml_library.clone()), supervision)?;
    tasks.run_until_stopped(DRAIN).await.into_result()
}

/// Where attribution asks.
pub(crate) fn attribution_config(config: &Config) -> attribution::Config {
    attribution::Config {
        api_server: config.kube.clone(),
        ..attribution::Config::new(config.kubelet_dir.clone(), config.node_name.clone())
    }
}
