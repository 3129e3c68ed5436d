//! Shows the picture on a local page: `/` is one self-contained file, `/state.json` the picture.
//!
//! Invariants: only a loopback listener is served, bound before the demo leaves the host's network; the
//! page loads nothing from anywhere else.

use std::net::TcpListener;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use tokio_util::sync::CancellationToken;

use super::picture::Stage;

/// The page, with its style, script and nothing else to load.
const PAGE: &str = include_str!("page.html");

/// Nothing may be loaded from elsewhere, even if the page asked.
const POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'";

/// Serves until cancelled.
///
/// # Errors
/// When the listener cannot be used.
pub async fn serve(listener: TcpListener, stage: Arc<Stage>, stop: CancellationToken) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let app = axum::Router::new()
        .route("/", get(page))
        .route("/state.json", get(picture))
        .with_state(stage);
    axum::serve(listener, app)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
}

async fn page() -> impl IntoResponse {
    (
        [
            (header::CONTENT_TYPE, "text/html; charset=utf-8"),
            (header::CONTENT_SECURITY_POLICY, POLICY),
        ],
        PAGE,
    )
}

async fn picture(State(stage): State<Arc<Stage>>) -> impl IntoResponse {
    let body = serde_json::to_vec(&stage.picture()).unwrap_or_default();
    (
        [
            (header::CONTENT_TYPE, "application/json"),
            (header::CACHE_CONTROL, "no-store"),
        ],
        body,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_loads_nothing_from_elsewhere() {
        for forbidden in ["http://", "https://", "src=", "@import", "url("] {
            // The name of SVG's namespace is not an address.
            let page = PAGE.replace("http://www.w3.org/2000/svg", "");
            assert!(!page.contains(forbidden), "{forbidden}");
        }
    }
}
