//! Figures of the exporter: memory, CPU, scrape latency, number of series.
//!
//! The set-up is a full HGX node: 8 H100, every GPU at work and with something to complain about, 50 µs a driver
//! call, a kubelet that has handed each GPU to a pod, and two adapters that scrape everything each 2 s.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use forewarm_fake_nvml::control::{Control, EccErrors, NvlinkErrors, Process, RemappedRows, Throttle};
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::floor::{Floor, QUIET};
use super::usage::{CpuMeter, quantile, resident};
use super::{Figure, progress};
use crate::kubelet::{Kubelet, Pod};
use crate::process::{Exporter, ExporterOptions};

const GPUS: u32 = 8;
/// A common assumption for a simple getter, until a device has been measured.
const CALL_COST_US: u32 = 50;
/// Adapters that scrape, and how often each does.
const ADAPTERS: u32 = 2;
const ADAPTER_INTERVAL: Duration = Duration::from_secs(2);
/// First readings of every tier, connections and caches are behind by then.
const WARM_UP: Duration = Duration::from_secs(8);
/// The slowest tier runs each 30 s: its turn of every GPU is in.
const CPU_SPAN: Duration = Duration::from_secs(62);
const SCRAPE_INTERVAL: Duration = Duration::from_millis(100);
/// Scrapes of a round.
const SCRAPES: u32 = 300;
/// Rounds at most, while other work disturbs them.
const ROUNDS: u32 = 4;
const MIB: f64 = 1_048_576.0;

const RSS_BUDGET_MIB: f64 = 15.0;
const CPU_BUDGET_MILLICORES: f64 = 15.0;
const SCRAPE_BUDGET_MS: f64 = 2.0;
const SERIES_BUDGET: f64 = 80.0;
const POD_SERIES_BUDGET: f64 = 12.0;

/// Every reading that a healthy or ailing GPU can give is given, so that no series is left out.
fn work(control: &mut Control) {
    for index in 0..GPUS {
        let share = f64::from(index + 1) / f64::from(GPUS);
        let gpu = control.gpu(index);
        gpu.busy = Some(share);
        gpu.memory_used_bytes = Some(u64::from(index + 1) << 32);
        gpu.nvlink_tx_bytes_per_second = Some(2e10 * share);
        gpu.nvlink_rx_bytes_per_second = Some(3e10 * share);
        gpu.pcie_tx_bytes_per_second = Some(1e9 * share);
        gpu.pcie_rx_bytes_per_second = Some(2e9 * share);
        gpu.pcie_replays = Some(3);
        gpu.nvlink_errors = Some(NvlinkErrors {
            replay: 5,
            recovery: 1,
            crc_flit: 2,
            ..NvlinkErrors::default()
        });
        gpu.throttle = Throttle::ALL.to_vec();
        gpu.ecc = Some(EccErrors {
            corrected: 7,
            uncorrected: 1,
            ..EccErrors::default()
        });
        gpu.remapped_rows = Some(RemappedRows {
            correctable: 1,
            uncorrectable: 1,
            pending: true,
            ..RemappedRows::default()
        });
        gpu.recovery_action = Some(1);
        gpu.processes = vec![Process {
            pid: 1000 + index,
            sm: share,
            memory_bytes: 1 << 30,
            ..Process::default()
        }];
    }
}

/// An exporter at work, with its kubelet.
struct Node {
    exporter: Exporter,
    _kubelet: Kubelet,
    _folder: tempfile::TempDir,
}

impl Node {
    async fn start() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let kubelet = Kubelet::start(folder.path())?;
        for index in 0..GPUS {
            let uuid = Exporter::uuid(index);
            kubelet.put(Pod::running(
                "serving",
                &format!("llm-{index}"),
                &format!("uid-{index}"),
                &[&uuid],
            ));
        }
        kubelet.set_allocatable(forewarm_signals::resource::GPU, (0..GPUS).map(Exporter::uuid));
        let mut exporter = Exporter::start(&ExporterOptions {
            gpus: GPUS,
            call_cost_us: CALL_COST_US,
            kubelet_dir: Some(folder.path().to_owned()),
            release: true,
            ..ExporterOptions::default()
        })
        .await?;
        exporter.steer(work)?;
        Ok(Self {
            exporter,
            _kubelet: kubelet,
            _folder: folder,
        })
    }

    /// Waits until each GPU is told with its pod, then lets caches fill; Xids come last, as they only count from now.
    async fn settle(&mut self) -> Result<()> {
        self.exporter
            .until("all pods are told", Duration::from_secs(30), |scrape| {
                let told = scrape
                    .all("gpu_pod_busy_ratio", &[("source", "exclusive")])
                    .count();
                if told == GPUS as usize {
                    Ok(())
                } else {
                    Err(format!("{told} of {GPUS}"))
                }
            })
            .await?;
        self.exporter.steer(|control| {
            for index in 0..GPUS {
                control.gpu(index).xids = vec![31, 63, 94];
            }
        })?;
        tokio::time::sleep(WARM_UP).await;
        Ok(())
    }
}

/// A connection that is kept, as an adapter keeps its own.
struct Client {
    sender: http1::SendRequest<Empty<Bytes>>,
    target: SocketAddr,
}

impl Client {
    async fn connect(target: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(target).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        #[allow(
            clippy::disallowed_methods,
            reason = "ends with the connection, which the client owns"
        )]
        tokio::spawn(connection);
        Ok(Self { sender, target })
    }

    /// Scrapes everything; answers how long it took until the last byte and how long the body was.
    async fn scrape(&mut self, encoding: &str) -> Result<(Duration, usize)> {
        let request = Request::get("/metrics")
            .header(header::HOST, self.target.to_string())
            .header(header::ACCEPT_ENCODING, encoding)
            .body(Empty::new())?;
        let begun = Instant::now();
        let answer = self.sender.send_request(request).await?;
        let (head, body) = answer.into_parts();
        let length = body.collect().await?.to_bytes().len();
        let took = begun.elapsed();
        ensure!(head.status == StatusCode::OK, "scrape answered {}", head.status);
        Ok((took, length))
    }
}

/// Scrapes as the adapters do, for ever; only an error ends it.
async fn adapter(target: SocketAddr, offset: Duration) -> Result<()> {
    let mut client = Client::connect(target).await?;
    tokio::time::sleep(offset).await;
    let mut ticks = tokio::time::interval(ADAPTER_INTERVAL);
    loop {
        ticks.tick().await;
        client.scrape("identity").await?;
    }
}

fn adapters(target: SocketAddr) -> JoinSet<Result<()>> {
    let mut running = JoinSet::new();
    for nth in 0..ADAPTERS {
        running.spawn(adapter(target, ADAPTER_INTERVAL * nth / ADAPTERS));
    }
    running
}

/// Mean CPU and highest resident memory while two adapters scrape.
async fn cpu_and_memory(node: &Node) -> Result<(f64, f64)> {
    let pid = node.exporter.program.pid();
    let mut load = adapters(node.exporter.metrics);
    let meter = CpuMeter::start(pid)?;
    let (begun, mut highest) = (Instant::now(), 0);
    while begun.elapsed() < CPU_SPAN {
        progress(&format!(
            "exporter under two adapters, {} of {} s",
            begun.elapsed().as_secs(),
            CPU_SPAN.as_secs()
        ));
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(5).min(CPU_SPAN.saturating_sub(begun.elapsed()))) => {}
            ended = load.join_next() => bail!("an adapter stopped scraping: {ended:?}"),
        }
        highest = highest.max(resident(pid)?);
    }
    #[allow(clippy::cast_precision_loss, reason = "bytes of memory are below 2^52")]
    Ok((meter.millicores()?, highest as f64 / MIB))
}

/// One round of scrapes, with what a bare server needed in the same moments.
#[derive(Debug)]
struct Round {
    p99: Duration,
    floor: Duration,
}

impl Round {
    async fn measure(node: &Node, encoding: &str) -> Result<Self> {
        let mut client = Client::connect(node.exporter.metrics).await?;
        let (_, length) = client.scrape(encoding).await?;
        let mut bare = Client::connect(Floor::start(length)?.addr).await?;
        let (mut took, mut floor) = (Vec::new(), Vec::new());
        let mut ticks = tokio::time::interval(SCRAPE_INTERVAL);
        for _ in 0..SCRAPES {
            ticks.tick().await;
            took.push(client.scrape(encoding).await?.0);
            floor.push(bare.scrape(encoding).await?.0);
        }
        let of = |q| quantile(&took, q).unwrap_or_default();
        let round = Self {
            p99: of(0.99),
            floor: quantile(&floor, 0.99).unwrap_or_default(),
        };
        progress(&format!(
            "exporter scrapes ({encoding}, {length} bytes): p50 {:?}, p99 {:?}, max {:?}; a bare server p99 {:?}",
            of(0.5),
            round.p99,
            of(1.0),
            round.floor
        ));
        Ok(round)
    }
}

/// Slowest one in a hundred of many scrapes, the adapters scraping on: the first round that others on the machine
/// left alone; the best one, if there was none.
async fn scrape_p99(node: &Node) -> Result<Duration> {
    let mut load = adapters(node.exporter.metrics);
    let mut worst = Duration::ZERO;
    for encoding in ["identity", "gzip"] {
        let mut best = Duration::MAX;
        for nth in 1..=ROUNDS {
            let round = Round::measure(node, encoding).await?;
            if let Some(ended) = load.try_join_next() {
                bail!("an adapter stopped scraping: {ended:?}");
            }
            if round.floor <= QUIET {
                best = round.p99;
                break;
            }
            best = best.min(round.p99);
            progress(&format!(
                "round {nth} of {ROUNDS} was disturbed by other work on this machine"
            ));
        }
        worst = worst.max(best);
    }
    Ok(worst)
}

/// Most series of one GPU, and of one container on one device.
async fn series(node: &Node) -> Result<(usize, usize)> {
    let scrape = node.exporter.scrape().await.map_err(anyhow::Error::msg)?;
    let (mut by_gpu, mut by_container) = (BTreeMap::new(), BTreeMap::new());
    for sample in scrape.iter() {
        let gpu = sample.label("gpu").to_owned();
        if sample.name.starts_with("gpu_pod_") {
            let container = (
                sample.label("pod_uid").to_owned(),
                sample.label("container").to_owned(),
                gpu,
            );
            *by_container.entry(container).or_insert(0) += 1;
        } else if !gpu.is_empty() {
            *by_gpu.entry(gpu).or_insert(0) += 1;
        }
    }
    ensure!(
        by_gpu.len() == GPUS as usize,
        "series of {} GPUs, not {GPUS}",
        by_gpu.len()
    );
    let most = |counts: Option<&usize>| counts.copied().unwrap_or_default();
    Ok((most(by_gpu.values().max()), most(by_container.values().max())))
}

/// Measures the exporter.
///
/// # Errors
/// It cannot be built or started, stops answering, or leaves something out.
pub async fn measure() -> Result<Vec<Figure>> {
    progress("building the release exporter and the fake driver");
    let mut node = Node::start().await.context("starting the exporter")?;
    progress("exporter runs; letting it settle");
    node.settle().await?;
    let (gpu_series, pod_series) = series(&node).await?;
    let (millicores, mib) = cpu_and_memory(&node).await?;
    let p99 = scrape_p99(&node).await?;
    #[allow(clippy::cast_precision_loss, reason = "counts of series are small")]
    let count = |series: usize| series as f64;
    Ok(vec![
        Figure::at_most("exporter_rss", mib, "MiB", RSS_BUDGET_MIB),
        Figure::at_most("exporter_cpu", millicores, "mCPU", CPU_BUDGET_MILLICORES),
        Figure::at_most(
            "exporter_scrape_p99",
            p99.as_secs_f64() * 1000.0,
            "ms",
            SCRAPE_BUDGET_MS,
        ),
        Figure::at_most("exporter_series", count(gpu_series), "series/GPU", SERIES_BUDGET),
        Figure::at_most(
            "exporter_pod_series",
            count(pod_series),
            "series/container",
            POD_SERIES_BUDGET,
        ),
    ])
}
