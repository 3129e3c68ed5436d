//! Process level: how the exporter starts, prints once, and ends.
//!
//! Inputs: the built exporter, the fake driver, fake kubelet sockets.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "clippy exempts test functions only, and this file is all test"
)]
#![allow(clippy::float_cmp, reason = "values that are written and read back unchanged")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forewarm_fake_nvml::Control;
use forewarm_fake_nvml::control::{Block, Effect, Fault};
use forewarm_tests::kubelet::{Kubelet, Pod};
use forewarm_tests::process::{Exporter, ExporterOptions, Scrape, control_path, fetch, fetch_with};
use forewarm_tests::wait::until;
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// Far above anything waited for, on a busy machine.
const SOON: Duration = Duration::from_secs(30);
/// So many answers of eight GPUs fill the buffers between the exporter and a client that does not read, while their
/// requests fit into the exporter's first read: unread requests would make the kernel reset the connection.
const PIPELINED: usize = 150;
/// Receive buffer of such a client.
const SMALL_BUFFER: u32 = 8 * 1024;
/// `EX_USAGE` of sysexits.h.
const USAGE: i32 = 64;

fn with_args(args: &[&str]) -> ExporterOptions {
    ExporterOptions {
        args: args.iter().map(ToString::to_string).collect(),
        ..ExporterOptions::default()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs `once` on two GPUs, the first 40 % busy and held by `ml/web-0`.
fn once(args: &[&str], change: impl FnOnce(&mut Control)) -> Output {
    let (folder, mut command) = Exporter::prepare(&with_args(args)).unwrap();
    let kubelet = Kubelet::start(&folder.path().join("kubelet")).unwrap();
    kubelet.put(Pod::running("ml", "web-0", "uid-0", &[&Exporter::uuid(0)]));
    kubelet.set_allocatable("nvidia.com/gpu", [Exporter::uuid(0), Exporter::uuid(1)]);
    let mut control = Control::default();
    control.gpu(0).busy = Some(0.4);
    change(&mut control);
    control.write(&control_path(folder.path())).unwrap();
    command.output().unwrap()
}

#[test]
fn every_bad_setting_is_told_at_once_with_exit_code_64() {
    let (_folder, mut command) = Exporter::prepare(&with_args(&[
        "--interval",
        "3 parsecs",
        "--format",
        "xml",
        "--dcgm-compat",
        "2",
        "--web-config",
        "/nonexistent/web.yaml",
    ]))
    .unwrap();
    // An environment twin is judged like its flag.
    let output = command.env("FOREWARM_LOG_LEVEL", "louder").output().unwrap();
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(USAGE), "{told}");
    for setting in [
        "--interval",
        "--format",
        "--dcgm-compat",
        "--web-config",
        "--log-level",
    ] {
        assert!(told.contains(setting), "{setting} is not told:\n{told}");
    }
    assert!(output.stdout.is_empty());
}

#[test]
fn an_unknown_flag_is_a_usage_error_and_help_is_not() {
    let run = |args: &[&str]| {
        let (_folder, mut command) = Exporter::prepare(&with_args(args)).unwrap();
        command.output().unwrap()
    };
    let unknown = run(&["--intervall", "1s"]);
    assert_eq!(unknown.status.code(), Some(USAGE), "{}", text(&unknown.stderr));
    let help = run(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
    assert!(text(&help.stdout).contains("--kubelet-dir"));
}

#[test]
fn a_port_in_use_is_named_and_ends_the_program() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let (folder, command) = Exporter::prepare(&ExporterOptions::default()).unwrap();
    let args: Vec<_> = command
        .get_args()
        .map(|arg| arg.to_string_lossy().replace("127.0.0.1:0", &addr))
        .collect();
    let last_words = folder.path().join("termination-log");
    std::fs::write(&last_words, "").unwrap();
    let output = std::process::Command::new(command.get_program())
        .args(args)
        .env("FOREWARM_TERMINATION_LOG", &last_words)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains(&addr), "{}", text(&output.stderr));
    let last_words = std::fs::read_to_string(&last_words).unwrap();
    assert!(
        last_words.contains(&addr),
        "the kubelet would show: {last_words:?}"
    );
}

#[test]
fn once_prints_an_exposition_with_pods() {
    let output = once(&["once"], |_| {});
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let scrape = Scrape::read(&text(&output.stdout)).unwrap();
    assert_eq!(scrape.value("gpu_up", &[("gpu", "1")]), Some(1.0));
    assert_eq!(scrape.value("gpu_busy_ratio", &[("gpu", "0")]), Some(0.4));
    assert_eq!(
        scrape.value("gpu_pod_busy_ratio", &[("pod_uid", "uid-0")]),
        Some(0.4)
    );
    assert_eq!(scrape.value("gpu_node_idle", &[]), Some(1.0));
    assert!(
        scrape.value("gpu_sm_active_ratio", &[("gpu", "0")]).is_some(),
        "needs two readings"
    );
}

#[test]
fn once_prints_the_same_as_json() {
    let output = once(&["once", "--output", "json"], |_| {});
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    let families = told["families"].as_array().unwrap();
    let busy = families
        .iter()
        .find(|family| family["name"] == "gpu_pod_busy_ratio")
        .unwrap();
    assert_eq!(
        (busy["type"].as_str(), busy["unit"].as_str()),
        (Some("gauge"), Some("ratio"))
    );
    assert_eq!(busy["samples"][0]["labels"]["pod_uid"], "uid-0");
    assert_eq!(busy["samples"][0]["value"], 0.4);
}

#[test]
fn once_without_a_driver_says_so_and_fails() {
    let output = once(&["once"], |control| control.driver_loaded = Some(false));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("no driver"),
        "{}",
        text(&output.stderr)
    );
    assert!(output.stdout.is_empty());
}

#[test]
fn once_does_not_wait_for_a_gpu_that_hangs() {
    let started = Instant::now();
    let output = once(&["once"], |control| {
        control.faults = vec![Fault::on_gpu(1, Effect::Block(Block::Forever))];
    });
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let scrape = Scrape::read(&text(&output.stdout)).unwrap();
    assert_eq!(scrape.value("gpu_busy_ratio", &[("gpu", "0")]), Some(0.4));
    assert_eq!(scrape.all("gpu_busy_ratio", &[("gpu", "1")]).count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn families_are_selected_by_name_and_their_age_lines_come_along() {
    let exporter = Exporter::start(&ExporterOptions::default()).await.unwrap();
    exporter
        .until("GPUs", SOON, |scrape| {
            scrape.need("gpu_memory_used_bytes", &[("gpu", "1")])
        })
        .await
        .unwrap();
    let selected = Scrape::get(exporter.metrics, "/metrics?name[]=gpu_memory_used_bytes")
        .await
        .unwrap();
    let mut names: Vec<_> = selected.iter().map(|sample| sample.name.as_str()).collect();
    names.dedup();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names, ["gpu_memory_used_bytes", "gpu_sample_age_seconds"]);
    assert!(
        selected
            .value("gpu_sample_age_seconds", &[("gpu", "0"), ("group", "memory")])
            .is_some()
    );

    let open = fetch_with(
        exporter.metrics,
        "/metrics",
        &[("accept", "application/openmetrics-text; version=1.0.0")],
    )
    .await
    .unwrap();
    assert!(open.text().ends_with("# EOF\n"));
    let packed = fetch_with(exporter.metrics, "/metrics", &[("accept-encoding", "gzip")])
        .await
        .unwrap();
    assert_eq!(packed.headers["content-encoding"], "gzip");
    assert!(packed.body.starts_with(&[0x1f, 0x8b]));
    assert_eq!(fetch(exporter.metrics, "/nonsense").await.unwrap().status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_series_of_a_gpu_stay_within_their_budget() {
    let exporter = Exporter::start(&ExporterOptions {
        gpus: 8,
        ..ExporterOptions::default()
    })
    .await
    .unwrap();
    let kubelet = Kubelet::start(&exporter.kubelet_dir()).unwrap();
    kubelet.put(Pod::running("ml", "web-0", "uid-0", &[&Exporter::uuid(0)]));
    exporter
        .until("everything", SOON, |scrape| {
            scrape.need(
                "gpu_nvlink_bytes_per_second",
                &[("gpu", "7"), ("direction", "rx")],
            )?;
            scrape.need("gpu_pod_busy_ratio", &[])
        })
        .await
        .unwrap();
    let scrape = exporter.scrape().await.unwrap();
    let mut by_gpu: BTreeMap<&str, usize> = BTreeMap::new();
    for sample in scrape
        .iter()
        .filter(|sample| !sample.name.starts_with("gpu_pod_"))
    {
        *by_gpu.entry(sample.label("gpu")).or_default() += 1;
    }
    for (gpu, series) in by_gpu {
        assert!(series <= 80, "GPU {gpu} has {series} series");
    }
    let pod = scrape
        .iter()
        .filter(|sample| sample.name.starts_with("gpu_pod_"))
        .count();
    assert!(
        (1..=12).contains(&pod),
        "{pod} series for one container and device"
    );
}

/// What came of one connection.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// Whole answers, and nothing after the last.
    Answered(usize),
    /// No connection, or one that was closed before a byte came.
    Refused,
    /// An answer that was cut.
    Cut(String),
}

/// Sends `times` requests on one connection, waits for `go`, then reads to the end.
async fn ask(addr: SocketAddr, times: usize, go: impl Future<Output = ()>) -> Outcome {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(SMALL_BUFFER).unwrap();
    let Ok(mut stream) = socket.connect(addr).await else {
        return Outcome::Refused;
    };
    let mut requests = "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n".repeat(times - 1);
    requests.push_str("GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    if stream.write_all(requests.as_bytes()).await.is_err() {
        return Outcome::Refused;
    }
    go.await;
    let mut bytes = Vec::new();
    let ended = tokio::time::timeout(SOON, stream.read_to_end(&mut bytes)).await;
    // A reset after whole answers is the end of what was asked too late. A server that says nothing refuses nobody.
    let _ = ended.expect("the connection hangs");
    if bytes.is_empty() {
        return Outcome::Refused;
    }
    answers(&bytes)
}

/// Takes HTTP/1.1 answers with a length apart.
fn answers(mut bytes: &[u8]) -> Outcome {
    let mut count = 0;
    while !bytes.is_empty() {
        let cut = || Outcome::Cut(text(&bytes[..bytes.len().min(400)]));
        let Some(head) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else {
            return cut();
        };
        let lines = text(&bytes[..head]).to_ascii_lowercase();
        let length = lines
            .lines()
            .find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
        match length {
            Some(length) if lines.starts_with("http/1.1 200") && bytes.len() >= head + 4 + length => {
                bytes = &bytes[head + 4 + length..];
                count += 1;
            }
            _ => return cut(),
        }
    }
    Outcome::Answered(count)
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_under_load_cuts_no_answer_and_exits_with_0() {
    let mut exporter = Exporter::start(&ExporterOptions {
        gpus: 8,
        ..ExporterOptions::default()
    })
    .await
    .unwrap();
    exporter
        .until("all GPUs", SOON, |scrape| {
            scrape.need("gpu_busy_ratio", &[("gpu", "7")])
        })
        .await
        .unwrap();
    let addr = exporter.metrics;

    // Scrapers that ask as fast as they can, until they are refused.
    let (answered, stopping) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let scrapers: Vec<_> = (0..8)
        .map(|_| {
            let (answered, stopping) = (Arc::clone(&answered), Arc::clone(&stopping));
            #[allow(clippy::disallowed_methods, reason = "joined below")]
            tokio::spawn(async move {
                loop {
                    match ask(addr, 1, async {}).await {
                        Outcome::Answered(_) => answered.fetch_add(1, Ordering::Relaxed),
                        Outcome::Refused if stopping.load(Ordering::Relaxed) => return Outcome::Refused,
                        other => return other,
                    };
                }
            })
        })
        .collect();
    // And one whose answers fill every buffer, so that the server is in the middle of one when the signal comes.
    let (go, gone) = tokio::sync::oneshot::channel::<()>();
    #[allow(clippy::disallowed_methods, reason = "joined below")]
    let slow = tokio::spawn(async move {
        ask(addr, PIPELINED, async {
            let _ = gone.await;
        })
        .await
    });
    until("load", SOON, || async {
        match answered.load(Ordering::Relaxed) {
            few @ 0..200 => Err(few.to_string()),
            _ => Ok(()),
        }
    })
    .await
    .unwrap();

    stopping.store(true, Ordering::Relaxed);
    exporter.program.signal(Signal::SIGTERM);
    until("no new connections", SOON, || async {
        match TcpStream::connect(addr).await {
            Ok(_) => Err("it still accepts".to_owned()),
            Err(_) => Ok(()),
        }
    })
    .await
    .unwrap();
    let _ = go.send(());
    for scraper in scrapers {
        assert_eq!(scraper.await.unwrap(), Outcome::Refused);
    }
    match slow.await.unwrap() {
        Outcome::Answered(whole) => assert!((1..PIPELINED).contains(&whole), "{whole} whole answers"),
        other => panic!("the answer in flight: {other:?}"),
    }
    let status = exporter.program.ended(Duration::from_secs(10)).await.unwrap();
    assert_eq!(status.code(), Some(0), "{}", exporter.program.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_before_there_is_a_driver_exits_with_0() {
    let (folder, command) = Exporter::prepare(&ExporterOptions::default()).unwrap();
    let absent = Control {
        driver_loaded: Some(false),
        ..Control::default()
    };
    absent.write(&control_path(folder.path())).unwrap();
    let mut exporter = Exporter::start_in(folder, command).await.unwrap();
    exporter.program.signal(Signal::SIGTERM);
    let status = exporter.program.ended(Duration::from_secs(10)).await.unwrap();
    assert_eq!(status.code(), Some(0), "{}", exporter.program.log());
}
