//! The metrics port behind TLS and a password, over real sockets.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test binary: helpers fail the test they serve"
)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use forewarm_exporter::attribution::AttributionView;
use forewarm_exporter::metrics::{Metrics, Sources};
use forewarm_exporter::poll::PollCounts;
use forewarm_exporter::render::Renderer;
use forewarm_exporter::server::Server;
use forewarm_exporter::snapshot::Fleet;
use forewarm_exporter::web_config::WebConfig;
use forewarm_runtime::listen::{self, ListenAddr};
use forewarm_runtime::tasks::Tasks;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

struct Port {
    address: SocketAddr,
    certificate: CertificateDer<'static>,
    tasks: Tasks,
    _folder: tempfile::TempDir,
}

impl Drop for Port {
    fn drop(&mut self) {
        self.tasks.token().cancel();
    }
}

fn serve() -> Port {
    forewarm_runtime::install_crypto();
    let folder = tempfile::tempdir().unwrap();
    let signed = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let file = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
    file("cert.pem", signed.cert.pem());
    file("key.pem", signed.signing_key.serialize_pem());
    let hash = bcrypt::hash("secret", 10).unwrap();
    file(
        "web.yaml",
        format!(
            "tls_server_config:\n  cert_file: cert.pem\n  key_file: key.pem\nbasic_auth_users:\n  reader: {hash}\n"
        ),
    );
    let web = WebConfig::load(folder.path().join("web.yaml")).unwrap();
    let fleet = Fleet::new(Duration::from_secs(1));
    let counts = Arc::<PollCounts>::default();
    let renderer = Renderer::new(
        Arc::clone(&fleet),
        AttributionView::default(),
        Arc::clone(&counts),
    );
    let sources = Sources {
        fleet,
        calls: Arc::default(),
        counts,
        web: Some(Arc::clone(&web)),
    };
    let (metrics, _) = Metrics::register(sources);
    let listener = listen::bind(&ListenAddr::loopback(0)).unwrap();
    let address = listener.local_addr().unwrap();
    let tasks = Tasks::new();
    tasks.spawn(
        "metrics-server",
        Server::new(renderer, Some(web), metrics).serve(listener, tasks.clone()),
    );
    Port {
        address,
        certificate: signed.cert.der().clone(),
        tasks,
        _folder: folder,
    }
}

impl Port {
    async fn get(&self, credentials: Option<&str>) -> String {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.certificate.clone()).unwrap();
        let config = rustls::ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let socket = TcpStream::connect(self.address).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let stream = TlsConnector::from(Arc::new(config))
            .connect(name, socket)
            .await
            .unwrap();
        ask(stream, credentials).await
    }
}

async fn ask<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, credentials: Option<&str>) -> String {
    let login = credentials
        .map(|pair| base64::engine::general_purpose::STANDARD.encode(pair))
        .map(|encoded| format!("Authorization: Basic {encoded}\r\n"))
        .unwrap_or_default();
    let request = format!("GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{login}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // A peer that closes without a word is an empty answer.
    let _ended = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_known_reader_over_tls_sees_values() {
    let port = serve();
    let good = port.get(Some("reader:secret")).await;
    assert!(
        good.starts_with("HTTP/1.1 200 ") && good.contains("forewarm_exporter_nvml_up 0"),
        "{good}"
    );
    for wrong in [None, Some("reader:wrong"), Some("stranger:secret")] {
        let refused = port.get(wrong).await;
        assert!(refused.starts_with("HTTP/1.1 401 "), "{refused}");
        assert!(refused.contains("www-authenticate: Basic"), "{refused}");
        assert!(!refused.contains("forewarm_exporter"), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_http_gets_no_answer_from_a_tls_port() {
    let port = serve();
    let socket = TcpStream::connect(port.address).await.unwrap();
    let answer = ask(socket, Some("reader:secret")).await;
    assert!(!answer.contains("forewarm_exporter"), "{answer}");
}
