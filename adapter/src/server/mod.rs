//! The listening side: TLS, connections, drain.
//!
//! Purpose: serves the API over HTTP/1.1 and HTTP/2, with TLS or (on loopback) without.
//! Inputs: a bound socket, the API, the order to stop.
//! Invariants: connections are counted and bounded; a client that is silent in a handshake, a header or
//! altogether is let go; on stop, readiness turns false first, requests are served during the delay in which
//! the cluster takes note, then every connection is told to go away (GOAWAY) and finishes what it began; a
//! client that leaves early is no error.

mod connection;
pub mod metrics;
mod tls;

pub use tls::config as tls_config;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use forewarm_runtime::BoxError;
use forewarm_runtime::status::Condition;
use forewarm_runtime::tasks::Tasks;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use self::connection::Connection;
use self::metrics::Metrics;
use crate::api::Api;

/// kube-apiservers hold a few long connections each; the rest is for probes and people. Beyond this, new
/// connections wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 1024;
/// A pause after a failed accept (out of file descriptors), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A server that is bound and not yet serving.
pub struct Server {
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    api: Arc<Api>,
    metrics: Metrics,
    tasks: Tasks,
}

/// How to stop.
pub struct Stop {
    /// The order.
    pub token: CancellationToken,
    /// How long requests are still taken after readiness turned false, so that endpoints can be removed.
    pub delay: Duration,
    /// Ready while requests are welcome.
    pub condition: Condition,
}

impl Server {
    /// Serves `api` on `listener`, over TLS where there is a configuration for it.
    ///
    /// # Errors
    /// Where the socket cannot be used asynchronously.
    pub fn new(
        listener: std::net::TcpListener,
        tls: Option<Arc<rustls::ServerConfig>>,
        api: Arc<Api>,
        metrics: Metrics,
        tasks: Tasks,
    ) -> std::io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener: TcpListener::from_std(listener)?,
            tls,
            api,
            metrics,
            tasks,
        })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// Where the system does not say.
    pub fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until told to stop; open connections drain as work of `tasks`.
    ///
    /// # Errors
    /// Never before the order to stop.
    pub async fn serve(self, stop: Stop) -> Result<(), BoxError> {
        let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let drain = CancellationToken::new();
        stop.condition.ready();
        tokio::select! {
            () = self.accept_all(&slots, &drain) => {}
            () = stop.token.cancelled() => {}
        }
        stop.condition.waiting("stopping");
        tokio::select! {
            () = self.accept_all(&slots, &drain) => {}
            () = tokio::time::sleep(stop.delay) => {}
        }
        tracing::info!(
            connections = MAX_CONNECTIONS - slots.available_permits(),
            "draining connections"
        );
        drain.cancel();
        Ok(())
    }

    async fn accept_all(&self, slots: &Arc<Semaphore>, drain: &CancellationToken) {
        loop {
            let Ok(slot) = Arc::clone(slots).acquire_owned().await else {
                return;
            };
            match self.listener.accept().await {
                Ok((socket, _)) => self.begin(socket, slot, drain.clone()),
                Err(error) => {
                    tracing::warn!(%error, "accepting a connection failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn begin(&self, socket: TcpStream, slot: OwnedSemaphorePermit, drain: CancellationToken) {
        let connection = Connection {
            api: Arc::clone(&self.api),
            tls: self.tls.clone(),
            metrics: self.metrics.clone(),
            drain,
        };
        self.tasks.spawn_work("connection", async move {
            connection.serve(socket).await;
            drop(slot);
        });
    }
}
