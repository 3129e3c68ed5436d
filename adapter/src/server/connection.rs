//! One connection from handshake to its last answer.
//!
//! Purpose: handshake, HTTP/1.1 or HTTP/2, the client's certificate for each request, idle time, drain.
//! Inputs: an accepted socket; the order to drain.
//! Invariants: every wait for the client is bounded; draining lets requests in flight finish; how a client
//! ends its connection is never logged above debug.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::metrics::{ConnectionFailure, Metrics};
use crate::access::PeerCertificate;
use crate::api::Api;

/// Handshakes take two round trips; a client that needs longer than this is stuck.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the head of a request to arrive.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// As Go's servers: a connection without requests for this long is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);
/// Finds peers that vanished without a word.
const PING_EVERY: Duration = Duration::from_secs(30);
/// How long such a ping may go unanswered.
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest way from the last request to the end of a connection that is told to go: a client that neither reads
/// nor leaves does not keep its place.
const FAREWELL: Duration = Duration::from_secs(20);
/// HPA workers of one kube-apiserver share a connection; as Go's aggregated servers.
const MAX_STREAMS: u32 = 250;

/// What a connection needs.
pub(super) struct Connection {
    pub(super) api: Arc<Api>,
    pub(super) tls: Option<Arc<rustls::ServerConfig>>,
    pub(super) metrics: Metrics,
    pub(super) drain: CancellationToken,
}

/// When a connection last had something to do.
#[derive(Debug)]
struct Activity {
    started: Instant,
    in_flight: AtomicUsize,
    /// Milliseconds after `started` at which the last request began or ended.
    last: AtomicU64,
}

/// One request in flight.
struct InFlight(Arc<Activity>);

impl Connection {
    /// Serves until the client leaves, idles too long, or the drain is over.
    pub(super) async fn serve(self, socket: TcpStream) {
        // Answers are written whole; waiting to fill a segment only adds latency.
        let _best_effort = socket.set_nodelay(true);
        let _open = self.metrics.connection();
        let Some(tls) = self.tls.clone() else {
            return self.http(socket, None).await;
        };
        let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(tls).accept(socket));
        let stream = tokio::select! {
            result = handshake => match result {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => {
                    tracing::debug!(%error, "TLS handshake failed");
                    return self.metrics.failed(ConnectionFailure::Handshake);
                }
                Err(_) => return self.metrics.failed(ConnectionFailure::SlowHandshake),
            },
            () = self.drain.cancelled() => return,
        };
        let chain = stream.get_ref().1.peer_certificates();
        let peer = chain.map(|chain| {
            let owned = chain.iter().map(|certificate| certificate.clone().into_owned());
            Arc::new(PeerCertificate::new(owned.collect()))
        });
        self.http(stream, peer).await;
    }

    async fn http<S>(self, stream: S, peer: Option<Arc<PeerCertificate>>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let activity = Arc::new(Activity::new());
        let api = self.api;
        let seen = Arc::clone(&activity);
        let service = service_fn(move |request: Request<Incoming>| {
            let (api, peer, in_flight) = (Arc::clone(&api), peer.clone(), InFlight::new(&seen));
            async move {
                let (head, _unread) = request.into_parts();
                let answer = api.answer(&head, peer.as_deref()).await;
                drop(in_flight);
                Ok::<_, Infallible>(answer)
            }
        });
        let connection = builder().serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        let mut draining = false;
        let result = loop {
            tokio::select! {
                result = connection.as_mut() => break result,
                () = self.drain.cancelled(), if !draining => {}
                () = activity.idle(IDLE_TIMEOUT), if !draining => {}
                () = tokio::time::sleep(FAREWELL), if draining => {
                    tracing::debug!("a connection that was told to go did not, and is dropped");
                    return;
                }
            }
            draining = true;
            connection.as_mut().graceful_shutdown();
        };
        if let Err(error) = result {
            tracing::debug!(%error, "connection ended early");
        }
    }
}

fn builder() -> &'static auto::Builder<TokioExecutor> {
    static BUILDER: OnceLock<auto::Builder<TokioExecutor>> = OnceLock::new();
    BUILDER.get_or_init(|| {
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_TIMEOUT)
            .max_concurrent_streams(MAX_STREAMS);
        builder
    })
}

// === impl Activity ===

impl Activity {
    fn new() -> Self {
        Self {
            started: Instant::now(),
            in_flight: AtomicUsize::new(0),
            last: AtomicU64::new(0),
        }
    }

    fn touch(&self) {
        let elapsed = self.started.elapsed().as_millis();
        self.last
            .store(u64::try_from(elapsed).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns once nothing was asked for `limit`.
    async fn idle(&self, limit: Duration) {
        loop {
            let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
            let silent = self.started.elapsed().saturating_sub(last);
            if self.in_flight.load(Ordering::Relaxed) > 0 {
                tokio::time::sleep(limit).await;
            } else if silent >= limit {
                return;
            } else {
                tokio::time::sleep(limit.saturating_sub(silent)).await;
            }
        }
    }
}

impl InFlight {
    fn new(activity: &Arc<Activity>) -> Self {
        activity.in_flight.fetch_add(1, Ordering::Relaxed);
        activity.touch();
        Self(Arc::clone(activity))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.touch();
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_never_reads_does_not_keep_its_place_once_the_drain_began() {
        let (mut client, server) = tokio::io::duplex(16);
        let drain = CancellationToken::new();
        let connection = Connection {
            api: Arc::new(crate::api::tests::api()),
            tls: None,
            metrics: Metrics::default(),
            drain: drain.clone(),
        };
        let served = connection.http(server, None);
        tokio::pin!(served);
        // The request arrives piecewise; the answer never fits.
        let request = async {
            client
                .write_all(b"GET /apis HTTP/1.1\r\nhost: x\r\n\r\n")
                .await
                .unwrap();
            std::future::pending::<()>().await;
        };
        tokio::pin!(request);
        tokio::select! {
            () = served.as_mut() => panic!("nobody told it to end"),
            () = request.as_mut() => {}
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
        }
        drain.cancel();
        let start = tokio::time::Instant::now();
        tokio::time::timeout(FAREWELL * 2, served).await.unwrap();
        assert!(
            start.elapsed() >= FAREWELL - Duration::from_secs(1),
            "the client had its time"
        );
    }
}
