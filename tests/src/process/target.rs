//! A scrape target that does what a test says: answers, stalls, lies or is gone.
//!
//! Invariants: listens on a port that the kernel chose; ends with the value that owns it.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use http::header::{CONTENT_TYPE, DATE};

/// What a target answers.
#[derive(Debug, Clone)]
pub struct Behaviour {
    /// Status code.
    pub status: u16,
    /// `Content-Type`.
    pub content_type: &'static str,
    /// `Date`, where it is not the time.
    pub date: Option<String>,
    /// Time before the answer.
    pub delay: Duration,
    /// Body.
    pub body: String,
}

impl Behaviour {
    /// A good answer.
    #[must_use]
    pub fn good(body: impl Into<String>) -> Self {
        Self {
            status: 200,
            content_type: "text/plain; version=0.0.4; charset=utf-8",
            date: None,
            delay: Duration::ZERO,
            body: body.into(),
        }
    }

    /// Answers a request like this.
    pub async fn respond(self) -> Response {
        tokio::time::sleep(self.delay).await;
        let mut response = Response::builder()
            .status(self.status)
            .header(CONTENT_TYPE, self.content_type);
        if let Some(date) = &self.date {
            response = response.header(DATE, date);
        }
        // The only possible mistake is a header value that a test wrote wrong; it then sees an empty answer.
        response.body(Body::from(self.body)).unwrap_or_default()
    }
}

#[derive(Debug)]
struct Shared {
    behaviour: Behaviour,
    queries: Vec<String>,
}

/// A target.
#[derive(Debug)]
pub struct Target {
    address: SocketAddr,
    shared: Arc<Mutex<Shared>>,
    server: tokio::task::JoinHandle<()>,
}

impl Target {
    /// Starts a target that answers `body`.
    ///
    /// # Errors
    /// No port is free.
    pub async fn start(body: impl Into<String>) -> std::io::Result<Self> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Mutex::new(Shared {
            behaviour: Behaviour::good(body),
            queries: Vec::new(),
        }));
        let router = Router::new().fallback(answer).with_state(Arc::clone(&shared));
        #[allow(
            clippy::disallowed_methods,
            reason = "a test's server; aborted by the value that owns it"
        )]
        let server = tokio::spawn(async move {
            let _ended = axum::serve(listener, router).await;
        });
        Ok(Self {
            address,
            shared,
            server,
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers like this from now on.
    pub fn set(&self, behaviour: Behaviour) {
        self.locked().behaviour = behaviour;
    }

    /// Gives a good answer with this body from now on.
    pub fn set_body(&self, body: impl Into<String>) {
        self.set(Behaviour::good(body));
    }

    /// Query strings of the requests so far.
    #[must_use]
    pub fn queries(&self) -> Vec<String> {
        self.locked().queries.clone()
    }

    /// Stops listening and drops its connections.
    pub async fn stop(&mut self) {
        self.server.abort();
        let _aborted = (&mut self.server).await;
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn answer(State(shared): State<Arc<Mutex<Shared>>>, request: Request) -> Response {
    let behaviour = {
        let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared
            .queries
            .push(request.uri().query().unwrap_or_default().to_owned());
        shared.behaviour.clone()
    };
    behaviour.respond().await
}
