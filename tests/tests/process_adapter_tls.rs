//! Process level: the real adapter reads the real exporter over TLS, with a client certificate and a password.
//!
//! Inputs: a throw-away CA, the exporter's web configuration. Right values first, then credentials that change
//! while running: what is refused says why, what is right again serves again.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions only, and this file is all test"
)]

use std::path::Path;
use std::time::Duration;

use forewarm_signals::resource::GPU;
use forewarm_tests::controlplane::certs::Authority;
use forewarm_tests::kubelet::{Kubelet, Pod};
use forewarm_tests::process::{Adapter, CONFIG_HEAD, Exporter, ExporterOptions};
use forewarm_tests::wait::until;
use http::StatusCode;

/// Credentials are read again each five seconds; the rest is for a busy machine.
const SOON: Duration = Duration::from_secs(45);
const PASSWORD: &str = "a";
/// bcrypt of `a` at cost 6, from the test vectors of OpenBSD's implementation.
const HASH: &str = "$2a$06$m0CrhHm10qJ3lXRY.5zDGO3rS2KdeeWLuGmsfGlMfOxih58VYVfxe";

fn config(folder: &Path, exporter: &Exporter, server_name: &str) -> String {
    let folder = folder.display();
    format!(
        "{CONFIG_HEAD}sources:
- name: exporters
  scrape:
    targets: ['{}']
    scheme: https
    tls: {{caFile: {folder}/ca.crt, serverName: {server_name}, certFile: {folder}/client.crt, keyFile: {folder}/client.key}}
    basicAuth: {{username: adapter, passwordFile: {folder}/password}}
    interval: 500ms
    timeout: 450ms
metrics:
- {{name: gpu_busy_percent, source: exporters, series: gpu_pod_busy_ratio, scale: 100, maxAge: 3s}}
external: []
",
        exporter.metrics
    )
}

async fn sees_the_value(adapter: &Adapter) {
    adapter
        .until_pods("web-0 at 40", SOON, "ml", "gpu_busy_percent", |reply| {
            if reply.value("web-0") == Some("40") {
                Ok(())
            } else {
                Err(format!("{reply:?}"))
            }
        })
        .await
        .unwrap();
}

async fn is_refused_for(adapter: &Adapter, cause: &str) {
    adapter
        .until_pods(cause, SOON, "ml", "gpu_busy_percent", |reply| {
            if reply.status == StatusCode::NOT_FOUND && reply.message().contains(cause) {
                Ok(())
            } else {
                Err(format!("{reply:?}"))
            }
        })
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exporter_behind_tls_is_read_and_its_credentials_may_change() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let authority = Authority::new("exporters").unwrap();
    let server = authority.server(&["exporter.forewarm"], &[]).unwrap();
    let client = authority.client("forewarm-adapter", &[]).unwrap();
    for (name, text) in [
        ("ca.crt", &authority.pem()),
        ("server.crt", &server.cert),
        ("server.key", &server.key),
        ("client.crt", &client.cert),
        ("client.key", &client.key),
    ] {
        write(name, text);
    }
    write("password", &format!("{PASSWORD}\n"));
    write(
        "web.yaml",
        &format!(
            "tls_server_config:
  cert_file: server.crt
  key_file: server.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca.crt
basic_auth_users:
  adapter: {HASH}
"
        ),
    );
    let web = folder.path().join("web.yaml").display().to_string();
    let mut exporter = Exporter::start(&ExporterOptions {
        args: vec!["--web-config".to_owned(), web],
        ..ExporterOptions::default()
    })
    .await
    .unwrap();
    let kubelet = Kubelet::start(&exporter.kubelet_dir()).unwrap();
    let uuid = Exporter::uuid(0);
    kubelet.set_allocatable(GPU, [uuid.clone()]);
    kubelet.put(Pod::running("ml", "web-0", "uid-0", &[&uuid]));
    exporter.steer(|control| control.gpu(0).busy = Some(0.4)).unwrap();

    let good = config(folder.path(), &exporter, "exporter.forewarm");
    let adapter = Adapter::start(&good).await.unwrap();
    sees_the_value(&adapter).await;

    write("password", "wrong");
    is_refused_for(&adapter, "the answer has status 401").await;
    write("password", PASSWORD);
    sees_the_value(&adapter).await;

    // A certificate for another name is no answer, whoever signed it.
    adapter
        .reconfigure(&config(folder.path(), &exporter, "somebody.else"))
        .unwrap();
    is_refused_for(&adapter, "certificate not valid for name \"somebody.else\"").await;
    adapter.reconfigure(&good).unwrap();
    sees_the_value(&adapter).await;

    // A CA that signed none of it, swapped in while running.
    write("ca.crt", &Authority::new("others").unwrap().pem());
    is_refused_for(&adapter, "invalid peer certificate").await;
    write("ca.crt", &authority.pem());
    sees_the_value(&adapter).await;

    // A CA file that is no certificate leaves the one before in force.
    write("ca.crt", "no certificate\n");
    until("the complaint about the CA", SOON, || async {
        let log = adapter.program.log();
        if log.contains("the ones before stay in force") {
            Ok(())
        } else {
            Err(log)
        }
    })
    .await
    .unwrap();
    sees_the_value(&adapter).await;
}
