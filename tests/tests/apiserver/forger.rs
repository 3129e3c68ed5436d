//! A program on the exporter's port that answers what a trial says: another body, late, garbage, or not at all.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Router;
use axum::response::Response;
use forewarm_tests::process::Behaviour;
use forewarm_tests::simnode::workload::{Progress, Tick, Workload, WorkloadContext, WorkloadFactory};
use tokio::runtime::Runtime;

/// Image of the program.
pub(crate) const IMAGE: &str = "test/forger";
/// The exporter's port.
const PORT: u16 = 9410;

/// What one forger answers, and how often it was asked.
#[derive(Debug)]
pub(crate) struct Forgery {
    behaviour: Mutex<Behaviour>,
    deaf: AtomicBool,
    asked: AtomicU64,
}

impl Forgery {
    /// How often somebody read it.
    pub(crate) fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    /// Answers like this from now on.
    pub(crate) fn set(&self, behaviour: Behaviour) {
        *lock(&self.behaviour) = behaviour;
    }

    /// Stops listening and drops its connections, or listens again.
    pub(crate) fn set_deaf(&self, deaf: bool) {
        self.deaf.store(deaf, Ordering::Relaxed);
    }

    async fn answer(self: Arc<Self>) -> Response {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let behaviour = lock(&self.behaviour).clone();
        behaviour.respond().await
    }
}

/// All forgers, by name of their pod.
#[derive(Debug, Clone, Default)]
pub(crate) struct Forgers(Arc<Mutex<BTreeMap<String, Arc<Forgery>>>>);

impl Forgers {
    /// What the pod of this name will answer.
    pub(crate) fn prepare(&self, pod: &str, body: String) -> Arc<Forgery> {
        let forgery = Arc::new(Forgery {
            behaviour: Mutex::new(Behaviour::good(body)),
            deaf: AtomicBool::new(false),
            asked: AtomicU64::new(0),
        });
        lock(&self.0).insert(pod.to_owned(), Arc::clone(&forgery));
        forgery
    }
}

impl WorkloadFactory for Forgers {
    fn start(&self, context: WorkloadContext) -> Result<Box<dyn Workload>, String> {
        let known = lock(&self.0).get(&context.pod).cloned();
        let forgery = known.ok_or_else(|| format!("nothing prepared for pod {}", context.pod))?;
        let address = context.env.get("POD_IP").and_then(|address| address.parse().ok());
        let address = SocketAddr::new(address.ok_or("no POD_IP")?, PORT);
        let mut forger = Forger {
            forgery,
            address,
            server: None,
        };
        forger.listen()?;
        Ok(Box::new(forger))
    }
}

struct Forger {
    forgery: Arc<Forgery>,
    address: SocketAddr,
    /// A runtime of its own, so that dropping it ends open connections too.
    server: Option<Runtime>,
}

impl Forger {
    #[allow(clippy::disallowed_methods, reason = "ends with its runtime, see `server`")]
    fn listen(&mut self) -> Result<(), String> {
        let (forgery, address) = (Arc::clone(&self.forgery), self.address);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(|error| error.to_string())?;
        let inside = runtime.enter();
        let listen = || {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            tokio::net::TcpListener::from_std(listener)
        };
        let listener = listen().map_err(|error| format!("cannot listen on {address}: {error}"))?;
        drop(inside);
        let router = Router::new().fallback(move || Arc::clone(&forgery).answer());
        runtime.spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                eprintln!("a forger ended: {error}");
            }
        });
        self.server = Some(runtime);
        Ok(())
    }

    fn close(&mut self) {
        if let Some(server) = self.server.take() {
            server.shutdown_background();
        }
    }
}

impl Drop for Forger {
    fn drop(&mut self) {
        self.close();
    }
}

impl Workload for Forger {
    fn tick(&mut self, tick: &Tick) -> Progress {
        match (self.forgery.deaf.load(Ordering::Relaxed), self.server.is_some()) {
            (true, true) => self.close(),
            // A port that is not free yet is free at a later tick.
            (false, false) => drop(self.listen()),
            _ => {}
        }
        Progress {
            gpus: Vec::new(),
            ready: true,
            exit: tick.terminating.then_some(0),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
