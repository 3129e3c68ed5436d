//! Figures of the adapter: latency of answers, age of values, cost of reading a line.
//!
//! Latency is measured under full scrape: 32 nodes with 8 GPUs and 8 pods each, all default metrics, every two
//! seconds. Age is measured from inside the reading: the fake driver writes the time of its call into used memory,
//! and the number that the API answers is compared with the clock at that moment.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use forewarm_adapter::exposition::{Exposition as _, PrometheusText};
use forewarm_fake_nvml::memory_time;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::usage::quantile;
use super::{Figure, progress};
use crate::kubelet::{Kubelet, Pod};
use crate::process::{Adapter, Artefacts, CONFIG_HEAD, Exporter, ExporterOptions, Target};
use crate::wait::until;

const NODES: u32 = 32;
const GPUS: u32 = 8;
/// Pods in the namespace that is asked for.
const PODS: u32 = 50;
/// As many requests a second as 300 HPAs make.
const REQUEST_INTERVAL: Duration = Duration::from_millis(50);
const REQUESTS: u32 = 600;
/// Answers whose age is looked at: at 50 ms, half a minute, over 15 scrapes at changing phases.
const AGES: u32 = 1200;
/// Scrapes fall in step with the exporter's tick within a few rounds.
const IN_STEP: Duration = Duration::from_secs(12);
const SOON: Duration = Duration::from_secs(60);

const LATENCY_BUDGET_MS: f64 = 5.0;
const AGE_BUDGET_S: f64 = 2.2;
const LINE_BUDGET_NS: f64 = 1000.0;
/// Usable memory of the fake's H100, which sets the modulus of encoded time.
const H100_USABLE: u64 = (81559 - 551) << 20;

/// Measures the adapter.
///
/// # Errors
/// A program does not start, or an answer is not the expected one.
pub async fn measure() -> Result<Vec<Figure>> {
    let artefacts = Artefacts::release()?;
    let latency = latency(artefacts).await.context("latency of answers")?;
    let age = age(artefacts).await.context("age of values")?;
    let line = line_cost()?;
    Ok(vec![
        Figure::at_most("adapter_pods_p99", latency, "ms", LATENCY_BUDGET_MS),
        Figure::at_most("adapter_age_p99", age, "s", AGE_BUDGET_S),
        Figure::at_most("adapter_exposition_line", line, "ns", LINE_BUDGET_NS),
    ])
}

/// What a node's exporter writes for the adapter's query: each default family, with its pods and age lines.
fn body(node: u32) -> String {
    let mut body = String::new();
    let device = [
        "utilization",
        "gpm",
        "memory",
        "nvlink",
        "links",
        "power",
        "health",
    ];
    for gpu in 0..GPUS {
        let uuid = format!("GPU-{node:08}-0000-0000-0000-{gpu:012}");
        let number = node * GPUS + gpu;
        let namespace = if number < PODS { "serving" } else { "training" };
        let pod = format!("llm-7c9d8b6f5-{number:05}");
        let uid = format!("3f2b1c6e-9a4d-4c8e-b7a1-{number:012}");
        let pod_row = format!(
            "namespace=\"{namespace}\",pod=\"{pod}\",container=\"server\",pod_uid=\"{uid}\",gpu=\"{gpu}\",uuid=\"{uuid}\""
        );
        for group in device {
            let _infallible = writeln!(
                body,
                "gpu_sample_age_seconds{{gpu=\"{gpu}\",uuid=\"{uuid}\",group=\"{group}\"}} 0.0521"
            );
        }
        let _infallible = write!(
            body,
            "gpu_health_score{{gpu=\"{gpu}\",uuid=\"{uuid}\"}} 1\n\
             gpu_nvlink_errors_total{{gpu=\"{gpu}\",uuid=\"{uuid}\",kind=\"replay\"}} 5\n\
             gpu_nvlink_errors_total{{gpu=\"{gpu}\",uuid=\"{uuid}\",kind=\"crc_flit\"}} 2\n\
             gpu_pod_allocation{{{pod_row},resource=\"nvidia.com/gpu\",replica=\"\",sharing=\"none\",allocator=\"device-plugin\"}} 1\n\
             gpu_pod_ready{{{pod_row}}} 1\n\
             gpu_pod_sample_age_seconds{{pod_uid=\"{uid}\",source=\"exclusive\"}} 0.0521\n\
             gpu_pod_busy_ratio{{{pod_row},source=\"exclusive\"}} 0.53\n\
             gpu_pod_sm_active_ratio{{{pod_row},source=\"exclusive\"}} 0.4137\n\
             gpu_pod_memory_used_bytes{{{pod_row},source=\"exclusive\"}} 34359738368\n\
             gpu_pod_memory_total_bytes{{{pod_row},source=\"exclusive\"}} 84936753152\n\
             gpu_pod_nvlink_bytes_per_second{{{pod_row},source=\"exclusive\",direction=\"rx\"}} 30000000000\n\
             gpu_pod_nvlink_bytes_per_second{{{pod_row},source=\"exclusive\",direction=\"tx\"}} 20000000000\n\
             gpu_pod_power_watts{{{pod_row},source=\"exclusive\"}} 512.5\n"
        );
    }
    body.push_str(
        "gpu_node_allocated{resource=\"nvidia.com/gpu\"} 8\ngpu_node_idle{resource=\"nvidia.com/gpu\"} 0\n",
    );
    body
}

/// A connection that is kept, as kube-apiserver keeps its own.
struct Client {
    sender: http1::SendRequest<Empty<Bytes>>,
    api: SocketAddr,
    path: String,
}

impl Client {
    async fn connect(api: SocketAddr, namespace: &str, metric: &str) -> Result<Self> {
        let path = format!("/apis/custom.metrics.k8s.io/v1beta2/namespaces/{namespace}/pods/%2A/{metric}");
        Ok(Self {
            sender: Self::dial(api).await?,
            api,
            path,
        })
    }

    async fn dial(api: SocketAddr) -> Result<http1::SendRequest<Empty<Bytes>>> {
        let stream = TcpStream::connect(api).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        #[allow(
            clippy::disallowed_methods,
            reason = "drives the bench's own connection; ends with it"
        )]
        tokio::spawn(async move {
            let _ended = connection.await;
        });
        Ok(sender)
    }

    /// One answer, and how long it took to the last byte.
    async fn get(&mut self) -> Result<(serde_json::Value, Duration)> {
        let request = Request::get(&self.path)
            .header(header::HOST, self.api.to_string())
            .body(Empty::<Bytes>::new())?;
        if self.sender.ready().await.is_err() {
            // A server may end a connection at any time between two requests.
            self.sender = Self::dial(self.api).await?;
        }
        let start = Instant::now();
        let response = self.sender.send_request(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        let took = start.elapsed();
        ensure!(
            status == StatusCode::OK,
            "{status}: {}",
            String::from_utf8_lossy(&body)
        );
        Ok((serde_json::from_slice(&body)?, took))
    }
}

/// 99th percentile of an answer about 50 pods, in milliseconds.
async fn latency(artefacts: &Artefacts) -> Result<f64> {
    progress("adapter: 50-pod answers at 20 requests a second under full scrape");
    let mut targets = Vec::new();
    let mut list = String::new();
    for node in 0..NODES {
        let target = Target::start(body(node)).await?;
        let _infallible = write!(list, "{{address: '{}', node: node-{node}}}, ", target.address());
        targets.push(target);
    }
    let config = format!("{CONFIG_HEAD}sources: [{{name: exporters, scrape: {{targets: [{list}]}}}}]\n");
    let adapter = Adapter::start_of(artefacts, &config).await?;
    let expected = PODS as usize;
    until("50 pods are served", SOON, || async {
        let reply = adapter.pods("serving", "gpu_busy_percent").await?;
        let served = reply.items().count();
        if served == expected {
            Ok(())
        } else {
            Err(format!("{served} of {expected}"))
        }
    })
    .await?;
    let mut client = Client::connect(adapter.api, "serving", "gpu_busy_percent").await?;
    let mut ticks = tokio::time::interval(REQUEST_INTERVAL);
    let mut took = Vec::new();
    for _ in 0..REQUESTS {
        ticks.tick().await;
        let (answer, time) = client.get().await?;
        let items = answer["items"].as_array().map_or(0, Vec::len);
        ensure!(items == expected, "{items} items instead of {expected}");
        took.push(time);
    }
    let p99 = quantile(&took, 0.99).context("no answers")?;
    Ok(p99.as_secs_f64() * 1000.0)
}

/// 99th percentile of the time from a reading in the driver to an answer that holds it, in seconds.
async fn age(artefacts: &Artefacts) -> Result<f64> {
    progress("adapter: age of values, from the driver's call to the answer");
    let mut exporter = Exporter::start(&ExporterOptions {
        gpus: GPUS,
        call_cost_us: 50,
        release: true,
        ..ExporterOptions::default()
    })
    .await?;
    let kubelet = Kubelet::start(&exporter.kubelet_dir())?;
    let uuid = Exporter::uuid(0);
    kubelet.set_allocatable(forewarm_signals::resource::GPU, (0..GPUS).map(Exporter::uuid));
    kubelet.put(Pod::running("serving", "llm-0", "uid-0", &[&uuid]));
    exporter.steer(|control| control.gpu(0).encode_time_in_memory = Some(true))?;
    let config = format!(
        "{CONFIG_HEAD}sources: [{{name: exporters, scrape: {{targets: ['{}']}}}}]\n",
        exporter.metrics
    );
    let adapter = Adapter::start_of(artefacts, &config).await?;
    until("the pod is served", SOON, || async {
        let reply = adapter.pods("serving", "gpu_memory_used_bytes").await?;
        reply.value("llm-0").map(drop).ok_or_else(|| format!("{reply:?}"))
    })
    .await?;
    tokio::time::sleep(IN_STEP).await;
    let mut client = Client::connect(adapter.api, "serving", "gpu_memory_used_bytes").await?;
    let mut ticks = tokio::time::interval(REQUEST_INTERVAL);
    let mut ages = Vec::new();
    for _ in 0..AGES {
        ticks.tick().await;
        let (answer, _) = client.get().await?;
        let now = unix_ms()?;
        let used: u64 = answer["items"][0]["value"]
            .as_str()
            .context("no value")?
            .parse()?;
        let read = memory_time::decode(used, now, H100_USABLE);
        ensure!(read <= now, "a reading from the future: {read} at {now}");
        ages.push(Duration::from_millis(now - read));
    }
    let p99 = quantile(&ages, 0.99).context("no answers")?;
    Ok(p99.as_secs_f64())
}

fn unix_ms() -> Result<u64> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(u64::try_from(since.as_millis())?)
}

/// Time to read one line of an exporter's body, in nanoseconds: the best of several rounds, as other work only adds.
fn line_cost() -> Result<f64> {
    progress("adapter: cost of reading a line");
    let body = body(0).repeat(4);
    let lines = body.lines().count();
    let mut best = f64::INFINITY;
    for _ in 0..50 {
        let start = Instant::now();
        let mut sum = 0.0;
        let parsed = PrometheusText.parse(body.as_bytes(), &mut |sample| sum += sample.value);
        let took = start.elapsed().as_secs_f64() * 1e9;
        std::hint::black_box(sum);
        ensure!(
            parsed.is_ok_and(|parsed| parsed.samples == lines),
            "the body is not read whole"
        );
        #[allow(clippy::cast_precision_loss, reason = "a few thousand lines")]
        let cost = took / lines as f64;
        best = best.min(cost);
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_is_what_the_adapter_reads() {
        let mut samples = 0;
        PrometheusText
            .parse(body(3).as_bytes(), &mut |_| samples += 1)
            .unwrap();
        assert!(samples > 150, "{samples}");
    }
}
