//! Probes, metrics and log level on a thread and a runtime of their own.
//!
//! Inputs: [`Status`], a closure that writes metrics, a [`LogControl`]. Answers `/livez`, `/readyz`
//! (`?verbose` for every condition), `/metrics`, `/log-level` (GET none, PUT a filter), `/version`.
//! Invariants: the answers never wait for the program's own runtime, so a stuck data path is still reported;
//! nothing here changes a program except its log filter.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, RawQuery, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use tokio_util::sync::CancellationToken;

use crate::exit::Problems;
use crate::listen::{self, ListenAddr};
use crate::logs::LogControl;
use crate::metrics;
use crate::status::{Status, Verdict};

/// A log filter is a few words; anything longer is a mistake.
const LOG_LEVEL_BODY_LIMIT: usize = 4096;

/// Admin flags, made for flattening into a program's arguments.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Admin")]
pub struct AdminArgs {
    /// Address of /livez, /readyz, /metrics, /log-level and /version; port 0 lets the kernel choose.
    #[arg(
        long,
        env = "FOREWARM_ADMIN_LISTEN",
        default_value = "[::]:9411",
        value_name = "HOST:PORT"
    )]
    pub admin_listen: String,
}

impl AdminArgs {
    /// The address, or a noted problem.
    pub fn resolve(&self, problems: &mut Problems) -> Option<ListenAddr> {
        problems.check("--admin-listen", self.admin_listen.parse())
    }
}

/// Writes the program's own metrics, called once a request.
pub type MetricsText = Arc<dyn Fn() -> String + Send + Sync>;

/// Name and version, as `/version` tells them.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// Binary name.
    pub name: &'static str,
    /// `CARGO_PKG_VERSION` of the program.
    pub version: &'static str,
}

/// Starts the admin server.
#[derive(Debug)]
pub struct Admin;

/// The running admin server; it stops when this is dropped.
#[derive(Debug)]
pub struct AdminHandle {
    local_addr: SocketAddr,
    token: CancellationToken,
}

#[derive(Clone)]
struct Context {
    program: Program,
    status: Status,
    logs: LogControl,
    metrics: MetricsText,
}

impl AdminHandle {
    /// Where it listens, with the port that the kernel chose.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }
}

impl Drop for AdminHandle {
    fn drop(&mut self) {
        self.token.cancel();
    }
}

impl Admin {
    /// Binds at once and serves from a thread of its own.
    ///
    /// # Errors
    /// When the address cannot be bound or the thread not started.
    pub fn start(
        addr: &ListenAddr,
        program: Program,
        status: Status,
        logs: LogControl,
        metrics: MetricsText,
    ) -> std::io::Result<AdminHandle> {
        let listener = listen::bind(addr)?;
        let local_addr = listener.local_addr()?;
        let context = Context {
            program,
            status,
            logs,
            metrics,
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let token = CancellationToken::new();
        let stop = token.clone();
        thread::Builder::new().name("admin".to_owned()).spawn(move || {
            if let Err(error) = runtime.block_on(serve(listener, router(context), stop)) {
                tracing::error!(%error, "admin server ended");
            }
        })?;
        tracing::info!(address = %local_addr, "admin server listens");
        Ok(AdminHandle { local_addr, token })
    }
}

async fn serve(listener: TcpListener, router: Router, stop: CancellationToken) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    tokio::select! {
        served = async { axum::serve(listener, router).await } => served,
        () = stop.cancelled() => Ok(()),
    }
}

fn router(context: Context) -> Router {
    Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics_text))
        .route("/log-level", put(set_log_level))
        .route("/version", get(version))
        .layer(DefaultBodyLimit::max(LOG_LEVEL_BODY_LIMIT))
        .with_state(context)
}

async fn livez(State(context): State<Context>, RawQuery(query): RawQuery) -> Response {
    probe(
        &context.status.liveness.verdict(),
        query.as_deref(),
        StatusCode::INTERNAL_SERVER_ERROR,
    )
}

async fn readyz(State(context): State<Context>, RawQuery(query): RawQuery) -> Response {
    probe(
        &context.status.readiness.verdict(),
        query.as_deref(),
        StatusCode::SERVICE_UNAVAILABLE,
    )
}

fn probe(verdict: &Verdict, query: Option<&str>, failed: StatusCode) -> Response {
    let verbose = query.is_some_and(|query| {
        query
            .split('&')
            .any(|part| part == "verbose" || part.starts_with("verbose="))
    });
    let status = if verdict.passed { StatusCode::OK } else { failed };
    (status, verdict.body(verbose)).into_response()
}

async fn metrics_text(State(context): State<Context>) -> Response {
    ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], (context.metrics)()).into_response()
}

async fn set_log_level(State(context): State<Context>, body: Bytes) -> Response {
    let Ok(filter) = std::str::from_utf8(&body) else {
        return (StatusCode::BAD_REQUEST, "the filter is not UTF-8\n").into_response();
    };
    let filter = filter.trim();
    match context.logs.set(filter) {
        Ok(()) => {
            tracing::info!(filter, "log filter changed");
            StatusCode::NO_CONTENT.into_response()
        }
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    }
}

async fn version(State(context): State<Context>) -> Response {
    let body = serde_json::json!({
        "program": context.program.name,
        "version": context.program.version,
    });
    ([(CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;
    use std::time::Duration;

    const PROGRAM: Program = Program {
        name: "forewarm-test",
        version: "1.2.3",
    };

    fn start(status: Status) -> AdminHandle {
        Admin::start(
            &ListenAddr::loopback(0),
            PROGRAM,
            status,
            LogControl::detached(),
            Arc::new(|| "forewarm_test 1\n# EOF\n".to_owned()),
        )
        .unwrap()
    }

    fn ask(admin: &AdminHandle, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(admin.local_addr()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer[9..12].parse().unwrap();
        let body = answer.split_once("\r\n\r\n").unwrap().1.to_owned();
        (status, body)
    }

    #[test]
    fn probes_follow_the_status() {
        let status = Status::new();
        let pods = status.readiness.condition("pods");
        let admin = start(status.clone());
        assert_eq!(ask(&admin, "GET", "/livez", "").0, 200);
        let (code, body) = ask(&admin, "GET", "/readyz", "");
        assert_eq!(code, 503);
        assert!(body.contains("[-]pods"), "{body}");

        pods.ready();
        assert_eq!(ask(&admin, "GET", "/readyz", ""), (200, "ok\n".to_owned()));
        let (code, body) = ask(&admin, "GET", "/readyz?verbose", "");
        assert_eq!((code, body.as_str()), (200, "[+]pods ok\nok\n"));

        let _stuck = status.liveness.heartbeat("poll", Duration::ZERO);
        let (code, body) = ask(&admin, "GET", "/livez", "");
        assert_eq!(code, 500);
        assert!(body.contains("[-]poll silent"), "{body}");
    }

    #[test]
    fn metrics_version_and_log_level_answer() {
        let admin = start(Status::new());
        assert_eq!(
            ask(&admin, "GET", "/metrics", ""),
            (200, "forewarm_test 1\n# EOF\n".to_owned())
        );
        assert!(ask(&admin, "GET", "/version", "").1.contains("\"1.2.3\""));
        assert_eq!(ask(&admin, "PUT", "/log-level", "debug").0, 204);
        let (code, body) = ask(&admin, "PUT", "/log-level", "debgu");
        assert_eq!(code, 400);
        assert!(body.contains("debgu"), "{body}");
        assert_eq!(ask(&admin, "PUT", "/log-level", &"x".repeat(5000)).0, 413);
        assert_eq!(ask(&admin, "GET", "/nothing", "").0, 404);
    }

    #[test]
    fn probes_answer_while_the_program_is_stuck() {
        let admin = start(Status::new());
        let program = tokio::runtime::Builder::new_current_thread().build().unwrap();
        program.block_on(async { assert_eq!(ask(&admin, "GET", "/livez", "").0, 200) });
    }

    #[test]
    fn dropping_the_handle_frees_the_port() {
        let admin = start(Status::new());
        let addr = admin.local_addr();
        drop(admin);
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while TcpListener::bind(addr).is_err() {
            assert!(std::time::Instant::now() < deadline, "still listening");
            std::thread::yield_now();
        }
    }
}
