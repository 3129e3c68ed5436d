//! The metrics port: answers from memory, with TLS and passwords where configured.
//!
//! Inputs: the renderer, the web config. Answers `/metrics` and `/metrics/detail` (`name[]` selects families, text or
//! OpenMetrics, gzip) and `/`. Invariants: an answer never waits for NVML or a socket of the kubelet; every wait for a
//! client is bounded; connections are bounded.

use std::borrow::Cow;
use std::convert::Infallible;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use forewarm_runtime::tasks::Tasks;
use forewarm_signals::Family;
use http::header::{
    ACCEPT, ACCEPT_ENCODING, ALLOW, CONTENT_ENCODING, CONTENT_TYPE, HeaderValue, VARY, WWW_AUTHENTICATE,
};
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::render::page::{Deflater, Page, Selection};
use crate::render::text::Format;
use crate::render::{Renderer, negotiate};
use crate::web_config::{Denied, WebConfig};

/// Two adapters, two Prometheus servers and some people; more is a leak or an attack.
const MOST_CONNECTIONS: usize = 128;
/// A client that needs longer for a handshake is stuck.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection may stand without a request. Covers the pause between two scrapes on a connection kept open:
/// Prometheus' longest usual interval is 60 s.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);
/// A client that has not taken its answer this long after the end was announced does not want it.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(5);
/// After a failed accept (no file descriptors left), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const INDEX: &str = "forewarm-exporter\n\n/metrics          GPU and pod series; ?name[]=gpu_busy_ratio selects families\n\
    /metrics/detail   per NVLink link, and what each GPU offers; takes name[] as well\n";

/// What answers need.
#[derive(Debug)]
pub struct Server {
    renderer: Renderer,
    deflater: Mutex<Option<Deflater>>,
    web: Option<Arc<WebConfig>>,
    metrics: Metrics,
    idle_timeout: Duration,
}

impl Server {
    /// A server of these pages.
    #[must_use]
    pub fn new(renderer: Renderer, web: Option<Arc<WebConfig>>, metrics: Metrics) -> Arc<Self> {
        Arc::new(Self {
            renderer,
            deflater: Mutex::new(None),
            web,
            metrics,
            idle_timeout: IDLE_TIMEOUT,
        })
    }

    /// Accepts until the program stops.
    ///
    /// # Errors
    /// When the listener cannot be handed to the runtime.
    pub async fn serve(self: Arc<Self>, listener: TcpListener, tasks: Tasks) -> std::io::Result<()> {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let permits = Arc::new(Semaphore::new(MOST_CONNECTIONS));
        let token = tasks.token();
        loop {
            let permit = tokio::select! {
                () = token.cancelled() => return Ok(()),
                permit = Arc::clone(&permits).acquire_owned() => permit,
            };
            let Ok(permit) = permit else { return Ok(()) };
            let accepted = tokio::select! {
                () = token.cancelled() => return Ok(()),
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((socket, _)) => {
                    let (server, token) = (Arc::clone(&self), token.clone());
                    tasks.spawn_work("scrape-connection", async move {
                        server.connection(socket, token).await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "accepting a connection failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn connection(self: Arc<Self>, socket: TcpStream, token: CancellationToken) {
        // Answers are written whole; waiting to fill a segment only adds latency.
        let _best_effort = socket.set_nodelay(true);
        let Some(tls) = self.web.as_ref().and_then(|web| web.tls()) else {
            return self.http(socket, token).await;
        };
        let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(tls).accept(socket));
        tokio::select! {
            () = token.cancelled() => {}
            outcome = handshake => match outcome {
                Ok(Ok(stream)) => self.http(stream, token).await,
                Ok(Err(error)) => tracing::debug!(%error, "tls handshake failed"),
                Err(_) => tracing::debug!("tls handshake took too long"),
            },
        }
    }

    async fn http<S>(self: Arc<Self>, stream: S, token: CancellationToken)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let idle_timeout = self.idle_timeout;
        let last_request = Arc::new(Mutex::new(Instant::now()));
        let noted = Arc::clone(&last_request);
        let service = service_fn(move |request: Request<Incoming>| {
            *noted.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            let server = Arc::clone(&self);
            async move { Ok::<_, Infallible>(server.answer(&request).await) }
        });
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(idle_timeout);
        builder.http2().timer(TokioTimer::new());
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        let outcome = tokio::select! {
            outcome = connection.as_mut() => Ok(outcome),
            () = ended(&token, &last_request, idle_timeout) => {
                connection.as_mut().graceful_shutdown();
                tokio::time::timeout(CLOSING_TIMEOUT, connection.as_mut()).await
            }
        };
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "connection ended early"),
            Err(_) => tracing::debug!("client did not take its answer"),
        }
    }

    async fn answer<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        let path = match request.uri().path() {
            "/metrics" => "/metrics",
            "/metrics/detail" => "/metrics/detail",
            "/" => "/",
            _ => "other",
        };
        let mut response = match self.refusal(request).await {
            Some(refusal) => refusal,
            None => self.page(request, path),
        };
        if let Some(web) = &self.web {
            response.headers_mut().extend(web.headers());
        }
        self.metrics.scraped(path, status_label(response.status()));
        response
    }

    async fn refusal<B>(&self, request: &Request<B>) -> Option<Response<Full<Bytes>>> {
        if let Some(web) = &self.web
            && let Err(denied) = web.authorize(request.headers()).await
        {
            let status = match denied {
                Denied::Unauthorized => StatusCode::UNAUTHORIZED,
                Denied::Busy => StatusCode::SERVICE_UNAVAILABLE,
            };
            let mut refusal = plain(status, format!("{denied}\n"));
            if status == StatusCode::UNAUTHORIZED {
                refusal
                    .headers_mut()
                    .insert(WWW_AUTHENTICATE, HeaderValue::from_static("Basic"));
            }
            return Some(refusal);
        }
        if ![Method::GET, Method::HEAD].contains(request.method()) {
            let mut refusal = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n");
            refusal
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return Some(refusal);
        }
        None
    }

    fn page<B>(&self, request: &Request<B>, path: &'static str) -> Response<Full<Bytes>> {
        match path {
            "/metrics" => {
                let now = Instant::now();
                let (page, rendered) = self.renderer.page(now);
                if let Some(took) = rendered {
                    self.metrics.render.observe(took.as_secs_f64());
                }
                let selection = selection(request.uri(), self.renderer.families());
                // Asked again: rendering took time, and ages are those of the answer.
                self.body(request, &page, selection, Instant::now())
            }
            "/metrics/detail" => {
                let now = Instant::now();
                let selection = selection(request.uri(), self.renderer.detail_families());
                self.body(request, &self.renderer.detail(now), selection, now)
            }
            "/" => plain(StatusCode::OK, INDEX),
            _ => plain(
                StatusCode::NOT_FOUND,
                "no such page; there are /metrics and /metrics/detail\n",
            ),
        }
    }

    fn body<B>(
        &self,
        request: &Request<B>,
        page: &Page,
        selection: Selection,
        now: Instant,
    ) -> Response<Full<Bytes>> {
        let header = |name| {
            request
                .headers()
                .get(name)
                .and_then(|value: &HeaderValue| value.to_str().ok())
        };
        let format: Format = negotiate::format(header(ACCEPT));
        let is_packed = negotiate::takes_gzip(header(ACCEPT_ENCODING));
        let body = if is_packed {
            let mut deflater = self.deflater.lock().unwrap_or_else(PoisonError::into_inner);
            page.gzip_body(format, selection, now, deflater.get_or_insert_default())
        } else {
            page.body(format, selection, now)
        };
        let mut response = Response::new(Full::new(Bytes::from(body)));
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
        headers.insert(VARY, HeaderValue::from_static("accept, accept-encoding"));
        if is_packed {
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        response
    }
}

/// Comes back once the program stops or no request has come for long. The protocol's own timeouts do not cover a client
/// that says nothing at all, nor HTTP/2, and either would hold its place among the connections for ever.
async fn ended(token: &CancellationToken, last_request: &Mutex<Instant>, idle_timeout: Duration) {
    let idle = async {
        loop {
            let limit = *last_request.lock().unwrap_or_else(PoisonError::into_inner) + idle_timeout;
            if Instant::now() >= limit {
                return;
            }
            tokio::time::sleep_until(limit.into()).await;
        }
    };
    tokio::select! {
        () = token.cancelled() => {}
        () = idle => {}
    }
}

fn plain(status: StatusCode, text: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

const fn status_label(status: StatusCode) -> &'static str {
    match status.as_u16() {
        200 => "200",
        401 => "401",
        404 => "404",
        405 => "405",
        503 => "503",
        _ => "other",
    }
}

/// The families of a page that a query asks for.
fn selection(uri: &Uri, families: &[&'static Family]) -> Selection {
    let names = names(uri);
    Page::select(families, names.iter().map(Cow::as_ref))
}

/// The values of `name[]` in a query.
fn names(uri: &Uri) -> Vec<Cow<'_, str>> {
    let query = uri.query().unwrap_or_default();
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs
        .filter(|(key, _)| unescape(key) == "name[]")
        .map(|(_, value)| unescape(value))
        .collect()
}

/// Undoes percent-encoding; what is not valid stays as it is and so names nothing.
fn unescape(text: &str) -> Cow<'_, str> {
    if !text.contains(['%', '+']) {
        return Cow::Borrowed(text);
    }
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'+' => out.push(b' '),
            b'%' => {
                let digits = [bytes.next(), bytes.next()].map(|digit| {
                    let digit = digit.map(char::from).and_then(|digit| digit.to_digit(16))?;
                    u8::try_from(digit).ok()
                });
                let [Some(high), Some(low)] = digits else {
                    return Cow::Borrowed(text);
                };
                out.push(high << 4 | low);
            }
            other => out.push(other),
        }
    }
    String::from_utf8(out).map_or(Cow::Borrowed(text), Cow::Owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt as _;

    use crate::attribution::AttributionView;
    use crate::metrics::Sources;
    use crate::snapshot::{
        DeviceSnapshot, Directions, Fleet, FleetState, LibraryState, Link, LinkErrors, Links, Presence, Timed,
    };

    fn server() -> Arc<Server> {
        server_of(Fleet::new(Duration::from_secs(1)))
    }

    /// Longest wait for what comes within milliseconds.
    const DEADLINE: Duration = Duration::from_secs(20);

    fn impatient() -> Arc<Server> {
        let mut server = Arc::into_inner(server()).unwrap();
        server.idle_timeout = Duration::from_millis(50);
        Arc::new(server)
    }

    fn server_of(fleet: Arc<Fleet>) -> Arc<Server> {
        let counts = Arc::<crate::poll::PollCounts>::default();
        let renderer = Renderer::new(
            Arc::clone(&fleet),
            AttributionView::default(),
            Arc::clone(&counts),
        );
        let sources = Sources {
            fleet,
            calls: Arc::default(),
            counts,
            web: None,
        };
        let (metrics, _) = Metrics::register(sources);
        Server::new(renderer, None, metrics)
    }

    async fn get(uri: &str, headers: &[(http::HeaderName, &str)]) -> (StatusCode, http::HeaderMap, Vec<u8>) {
        get_from(&server(), uri, headers).await
    }

    async fn get_from(
        server: &Server,
        uri: &str,
        headers: &[(http::HeaderName, &str)],
    ) -> (StatusCode, http::HeaderMap, Vec<u8>) {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(name, *value);
        }
        let response = server.answer(&request.body(()).unwrap()).await;
        let (head, body) = response.into_parts();
        (
            head.status,
            head.headers,
            body.collect().await.unwrap().to_bytes().to_vec(),
        )
    }

    #[tokio::test]
    async fn without_a_driver_the_page_says_so() {
        let (status, headers, body) = get("/metrics", &[]).await;
        let text = String::from_utf8(body).unwrap();
        assert_eq!(status, StatusCode::OK);
        assert_eq!(headers[CONTENT_TYPE], Format::Text.content_type());
        assert!(text.contains("forewarm_exporter_nvml_up 0\n"), "{text}");
        assert!(!text.contains("gpu_up"), "{text}");
    }

    #[tokio::test]
    async fn format_and_encoding_follow_the_headers() {
        let accept = [
            (ACCEPT, "application/openmetrics-text;version=1.0.0"),
            (ACCEPT_ENCODING, "gzip"),
        ];
        let (_, headers, body) = get("/metrics", &accept).await;
        assert_eq!(headers[CONTENT_TYPE], Format::OpenMetrics.content_type());
        assert_eq!(headers[CONTENT_ENCODING], "gzip");
        let mut text = String::new();
        std::io::Read::read_to_string(&mut flate2::read::GzDecoder::new(body.as_slice()), &mut text).unwrap();
        assert!(text.ends_with("# EOF\n"), "{text}");
    }

    #[tokio::test]
    async fn families_are_selected_whatever_way_the_brackets_are_written() {
        for query in [
            "name[]=forewarm_exporter_nvml_up",
            "name%5B%5D=forewarm_exporter_nvml_up",
        ] {
            let (_, _, body) = get(&format!("/metrics?{query}"), &[]).await;
            let text = String::from_utf8(body).unwrap();
            assert!(text.contains("forewarm_exporter_nvml_up 0"), "{text}");
            assert!(!text.contains("forewarm_build_info"), "{text}");
        }
    }

    #[tokio::test]
    async fn families_of_the_detail_page_are_selected_likewise() {
        let fleet = Fleet::new(Duration::from_secs(1));
        let slot = fleet.slot(0);
        let now = Instant::now();
        let mut snapshot = DeviceSnapshot::unseen(0);
        snapshot.presence = Presence::Answering;
        snapshot.answered_at = Some(now);
        snapshot.support = Arc::new(vec![("gpm", false)]);
        let links = Links {
            links: vec![Link {
                up: Some(true),
                bytes: Directions { rx: None, tx: None },
                errors: LinkErrors::default(),
            }],
            up: Some(1),
            errors: LinkErrors::default(),
        };
        snapshot.links = Some(Timed {
            at: now,
            value: Arc::new(links),
        });
        slot.store(snapshot);
        fleet.store(FleetState {
            library: LibraryState::Waiting(String::new()),
            devices: vec![slot],
        });
        let server = server_of(fleet);
        let text = |uri: &'static str| {
            let server = Arc::clone(&server);
            async move { String::from_utf8(get_from(&server, uri, &[]).await.2).unwrap() }
        };
        let all = text("/metrics/detail").await;
        assert!(
            all.contains("gpu_nvlink_link_up{") && all.contains("gpu_reading_supported{"),
            "{all}"
        );
        let one = text("/metrics/detail?name[]=gpu_reading_supported").await;
        assert!(one.contains("gpu_reading_supported{"), "{one}");
        assert!(!one.contains("gpu_nvlink_link_up"), "{one}");
        assert!(!one.contains("gpu_sample_age_seconds"), "{one}");
        let links = text("/metrics/detail?name[]=gpu_nvlink_link_up").await;
        assert!(links.contains("group=\"links\""), "ages come along: {links}");
    }

    #[tokio::test]
    async fn a_client_that_says_nothing_is_let_go() {
        let (_client, stream) = tokio::io::duplex(64);
        let served = impatient().http(stream, CancellationToken::new());
        tokio::time::timeout(DEADLINE, served).await.unwrap();
    }

    #[tokio::test]
    async fn an_idle_http2_connection_is_let_go() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let (mut client, stream) = tokio::io::duplex(4096);
        let served = impatient().http(stream, CancellationToken::new());
        let client = async {
            // The preface and empty settings; then nothing but reading.
            client
                .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
                .await
                .unwrap();
            let mut taken = Vec::new();
            client.read_to_end(&mut taken).await.unwrap();
            assert!(!taken.is_empty(), "it was http/2 to the server");
        };
        tokio::time::timeout(DEADLINE, async { tokio::join!(served, client) })
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn other_paths_and_methods_are_refused() {
        assert_eq!(get("/nonsense", &[]).await.0, StatusCode::NOT_FOUND);
        assert_eq!(get("/", &[]).await.0, StatusCode::OK);
        let request = Request::builder()
            .method(Method::POST)
            .uri("/metrics")
            .body(())
            .unwrap();
        assert_eq!(
            server().answer(&request).await.status(),
            StatusCode::METHOD_NOT_ALLOWED
        );
    }

    #[test]
    fn broken_escapes_name_nothing() {
        assert_eq!(unescape("a%2"), "a%2");
        assert_eq!(unescape("%zz"), "%zz");
        assert_eq!(unescape("%ff"), "%ff");
        assert_eq!(unescape("a%5Bb+c"), "a[b c");
    }
}
