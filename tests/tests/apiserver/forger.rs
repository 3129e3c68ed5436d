//! A program that poses as an exporter: it answers on the exporter's port with a body that a trial wrote.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::routing::get;
use forewarm_tests::simnode::workload::{Progress, Tick, Workload, WorkloadContext, WorkloadFactory};
use tokio::task::JoinHandle;

/// Image of the program.
pub(crate) const IMAGE: &str = "test/forger";
/// The exporter's port.
const PORT: u16 = 9410;

/// What one forger answers, and how often it was asked.
#[derive(Debug, Default)]
pub(crate) struct Forgery {
    body: Mutex<String>,
    asked: AtomicU64,
}

impl Forgery {
    /// How often somebody read it.
    pub(crate) fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    fn answer(&self) -> String {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.body.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// All forgers, by name of their pod.
#[derive(Debug, Clone, Default)]
pub(crate) struct Forgers(Arc<Mutex<BTreeMap<String, Arc<Forgery>>>>);

impl Forgers {
    /// What the pod of this name will answer.
    pub(crate) fn prepare(&self, pod: &str, body: String) -> Arc<Forgery> {
        let forgery = Arc::new(Forgery {
            body: Mutex::new(body),
            asked: AtomicU64::new(0),
        });
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(pod.to_owned(), Arc::clone(&forgery));
        forgery
    }
}

impl WorkloadFactory for Forgers {
    #[allow(
        clippy::disallowed_methods,
        reason = "ends with the container: aborted on drop"
    )]
    fn start(&self, context: WorkloadContext) -> Result<Box<dyn Workload>, String> {
        let known = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&context.pod)
            .cloned();
        let forgery = known.ok_or_else(|| format!("nothing prepared for pod {}", context.pod))?;
        let address = context.env.get("POD_IP").and_then(|address| address.parse().ok());
        let address = SocketAddr::new(address.ok_or("no POD_IP")?, PORT);
        let listen = || {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            tokio::net::TcpListener::from_std(listener)
        };
        let listener = listen().map_err(|error| format!("cannot listen on {address}: {error}"))?;
        let router = Router::new().route("/metrics", get(move || async move { forgery.answer() }));
        let server = tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                eprintln!("a forger ended: {error}");
            }
        });
        Ok(Box::new(Forger(server)))
    }
}

struct Forger(JoinHandle<()>);

impl Drop for Forger {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Workload for Forger {
    fn tick(&mut self, tick: &Tick) -> Progress {
        Progress {
            gpus: Vec::new(),
            ready: true,
            exit: tick.terminating.then_some(0),
        }
    }
}
