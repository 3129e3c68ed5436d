//! Process level: the real adapter over targets that misbehave, and over the real exporter.
//!
//! Inputs: the built adapter and exporter, targets and a fake kubelet under the test's control. Each test first
//! sees the right value, then injects, then asserts status code, reason text and counter.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "clippy exempts test functions only, and this file is all test"
)]

use std::time::{Duration, SystemTime};

use forewarm_signals::resource::GPU;
use forewarm_tests::kubelet::{Kubelet, Pod};
use forewarm_tests::process::{
    Adapter, Behaviour, CONFIG_HEAD, Exporter, ExporterOptions, Reply, Target, fetch,
};
use forewarm_tests::wait::until;
use http::StatusCode;

/// Far above anything waited for, on a busy machine.
const SOON: Duration = Duration::from_secs(30);

/// Short times, so that values age while a test watches.
fn config(targets: &[&Target]) -> String {
    let targets: Vec<String> = targets
        .iter()
        .map(|target| format!("'{}'", target.address()))
        .collect();
    format!(
        "{CONFIG_HEAD}sources:
- name: exporters
  scrape: {{targets: [{}], interval: 500ms, timeout: 250ms, maxBodyBytes: 4096}}
metrics:
- {{name: gpu_busy_percent, source: exporters, series: gpu_pod_busy_ratio, scale: 100, maxAge: 3s}}
external: []
",
        targets.join(", ")
    )
}

/// What an exporter says about one ready pod that holds one GPU alone.
fn body(busy: &str, age: f64) -> String {
    let identity =
        "namespace=\"ml\",pod=\"web-0\",container=\"main\",pod_uid=\"uid-0\",gpu=\"0\",uuid=\"GPU-0\"";
    format!(
        "# TYPE gpu_pod_allocation gauge
gpu_pod_allocation{{{identity},resource=\"nvidia.com/gpu\",replica=\"\",sharing=\"none\",allocator=\"device-plugin\"}} 1
gpu_pod_ready{{{identity}}} 1
gpu_pod_busy_ratio{{{identity},source=\"exclusive\"}} {busy}
gpu_pod_sample_age_seconds{{pod_uid=\"uid-0\",source=\"exclusive\"}} {age}
gpu_sample_age_seconds{{gpu=\"0\",uuid=\"GPU-0\",group=\"utilization\"}} {age}
"
    )
}

async fn sees(adapter: &Adapter, value: &str) {
    adapter
        .until_pods(
            &format!("web-0 at {value}"),
            SOON,
            "ml",
            "gpu_busy_percent",
            |reply| served(reply, value),
        )
        .await
        .unwrap();
}

fn served(reply: &Reply, value: &str) -> Result<(), String> {
    if reply.status == StatusCode::OK && reply.value("web-0") == Some(value) {
        Ok(())
    } else {
        Err(format!("{reply:?}"))
    }
}

/// Waits until the value is refused for staleness, and returns the message.
async fn refused(adapter: &Adapter) -> String {
    adapter
        .until_pods("no value", SOON, "ml", "gpu_busy_percent", |reply| {
            if reply.status == StatusCode::NOT_FOUND && reply.body["reason"] == "NotFound" {
                Ok(reply.message().to_owned())
            } else {
                Err(format!("{reply:?}"))
            }
        })
        .await
        .unwrap()
}

/// A target with one pod at 40 %, and an adapter that serves it.
async fn serving() -> (Target, Adapter) {
    let target = Target::start(body("0.4", 0.3)).await.unwrap();
    let adapter = Adapter::start(&config(&[&target])).await.unwrap();
    sees(&adapter, "40").await;
    (target, adapter)
}

async fn counted(adapter: &Adapter, name: &str, labels: &[(&str, &str)], at_least: f64) {
    until(&format!("{name} {labels:?}"), SOON, || async {
        let count = adapter.health().await?.sum(name, labels);
        if count >= at_least {
            Ok(())
        } else {
            Err(count.to_string())
        }
    })
    .await
    .unwrap();
}

/// The value goes stale for this reason, is counted as `result`, and comes back with a good answer.
async fn goes_and_comes_back(target: &Target, adapter: &Adapter, result: &str, cause: &str) {
    let message = refused(adapter).await;
    assert!(
        message.starts_with("no fresh sample of gpu_busy_percent for 1 running pods in namespace ml"),
        "{message}"
    );
    assert!(
        message.contains("pod web-0 has its last sample") && message.contains("older than maxAge 3 s"),
        "{message}"
    );
    assert!(
        message.contains(&format!("target {} failed", target.address())) && message.contains(cause),
        "{message}"
    );
    counted(
        adapter,
        "forewarm_adapter_scrapes_total",
        &[("result", result)],
        1.0,
    )
    .await;
    let up = adapter
        .health()
        .await
        .unwrap()
        .sum("forewarm_adapter_target_up", &[]);
    assert!(up.abs() < f64::EPSILON, "{up}");
    target.set_body(body("0.6", 0.1));
    sees(adapter, "60").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_carries_the_time_of_its_reading() {
    let target = Target::start(body("0.4", 2.0)).await.unwrap();
    let adapter = Adapter::start(&config(&[&target])).await.unwrap();
    sees(&adapter, "40").await;
    let reply = adapter.pods("ml", "gpu_busy_percent").await.unwrap();
    let item = reply.items().next().unwrap();
    let timestamp: jiff::Timestamp = item["timestamp"].as_str().unwrap().parse().unwrap();
    let now = jiff::Timestamp::try_from(SystemTime::now()).unwrap();
    let age = now.duration_since(timestamp).as_secs_f64();
    assert!((2.0..6.0).contains(&age), "{age}");
    assert_eq!(item["describedObject"]["kind"], "Pod");
    counted(
        &adapter,
        "forewarm_adapter_value_age_seconds_count",
        &[("metric", "gpu_busy_percent")],
        1.0,
    )
    .await;
    // Only what the configuration needs was asked for.
    let query = target.queries().pop().unwrap();
    assert!(
        query.contains("gpu_pod_busy_ratio") && !query.contains("gpu_power_watts"),
        "{query}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_exporter_is_named_with_its_cause() {
    let (mut target, adapter) = serving().await;
    target.stop().await;
    let message = refused(&adapter).await;
    assert!(
        message.contains("has its last sample") && message.contains("older than maxAge 3 s"),
        "{message}"
    );
    assert!(
        message.contains("unreachable: ") && message.contains("refused"),
        "{message}"
    );
    counted(
        &adapter,
        "forewarm_adapter_scrapes_total",
        &[("result", "unreachable")],
        1.0,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_exporter_is_a_timeout_and_not_an_old_value() {
    let (target, adapter) = serving().await;
    target.set(Behaviour {
        delay: Duration::from_secs(20),
        ..Behaviour::good(body("0.9", 0.0))
    });
    goes_and_comes_back(
        &target,
        &adapter,
        "timeout",
        "timeout: no complete answer within 0.25 s",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_is_refused_whole_with_its_line() {
    let (target, adapter) = serving().await;
    target.set_body(body("0.9", 0.0) + "gpu_pod_busy_ratio{namespace=\"ml\n");
    goes_and_comes_back(&target, &adapter, "parse", "the answer is not valid: line 7: metric gpu_pod_busy_ratio: label namespace: the closing quote is missing").await;
    counted(
        &adapter,
        "forewarm_adapter_samples_dropped_total",
        &[("reason", "bad-body")],
        7.0,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_of_ten_times_the_size_is_not_taken() {
    let (target, adapter) = serving().await;
    let mut large = body("0.9", 0.0);
    let one = large.len();
    while large.len() < one * 10 {
        large.push_str("# more of it\n");
    }
    target.set_body(large);
    goes_and_comes_back(
        &target,
        &adapter,
        "too-large",
        "the answer is larger than 4096 bytes",
    )
    .await;
    counted(
        &adapter,
        "forewarm_adapter_samples_dropped_total",
        &[("reason", "too-many-series")],
        1.0,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_and_pages_are_not_expositions() {
    let (target, adapter) = serving().await;
    target.set(Behaviour {
        status: 503,
        ..Behaviour::good(body("0.9", 0.0))
    });
    goes_and_comes_back(&target, &adapter, "status", "the answer has status 503").await;
    target.set(Behaviour {
        content_type: "text/html",
        ..Behaviour::good("<html>gpu_pod_busy_ratio 1</html>\n")
    });
    goes_and_comes_back(
        &target,
        &adapter,
        "content-type",
        "the answer has content type text/html",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_is_ten_minutes_off_changes_nothing() {
    let (target, adapter) = serving().await;
    for (skew, busy, value) in [(-600_i64, "0.5", "50"), (600, "0.7", "70")] {
        let now = jiff::Timestamp::now();
        let theirs = now.checked_add(jiff::SignedDuration::from_secs(skew)).unwrap();
        let stamped: String = body(busy, 0.2)
            .lines()
            .map(|line| {
                if line.starts_with('#') {
                    format!("{line}\n")
                } else {
                    format!("{line} {}\n", theirs.as_millisecond())
                }
            })
            .collect();
        target.set(Behaviour {
            date: Some(theirs.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()),
            ..Behaviour::good(stamped)
        });
        sees(&adapter, value).await;
        let reply = adapter.pods("ml", "gpu_busy_percent").await.unwrap();
        let timestamp: jiff::Timestamp = reply.items().next().unwrap()["timestamp"]
            .as_str()
            .unwrap()
            .parse()
            .unwrap();
        let age = jiff::Timestamp::now().duration_since(timestamp).as_secs_f64();
        assert!((0.0..5.0).contains(&age), "{skew}: {age}");
    }
    // An age line that cannot be true is another matter: no age, no value.
    target.set_body(body("0.9", -600.0));
    let message = refused(&adapter).await;
    assert!(message.contains("older than maxAge"), "{message}");
    counted(
        &adapter,
        "forewarm_adapter_samples_dropped_total",
        &[("reason", "bad-age")],
        1.0,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_exporter_ages_out_although_it_answers() {
    let (target, adapter) = serving().await;
    target.set_body(body("0.9", 14.0));
    let message = refused(&adapter).await;
    assert!(
        message.contains("pod web-0 has its last sample") && !message.contains("failed"),
        "{message}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_number_that_is_none_is_dropped_and_counted() {
    let (target, adapter) = serving().await;
    for value in ["NaN", "+Inf", "-Inf"] {
        target.set_body(body(value, 0.0));
        let message = refused(&adapter).await;
        assert!(message.contains("has its last sample"), "{message}");
        target.set_body(body("0.6", 0.0));
        sees(&adapter, "60").await;
    }
    counted(
        &adapter,
        "forewarm_adapter_samples_dropped_total",
        &[("reason", "not-finite")],
        3.0,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_exporters_that_claim_one_pod_leave_it_without_value() {
    let first = Target::start(body("0.4", 0.1)).await.unwrap();
    let second = Target::start("").await.unwrap();
    let adapter = Adapter::start(&config(&[&first, &second])).await.unwrap();
    sees(&adapter, "40").await;
    second.set_body(body("0.9", 0.0));
    let message = refused(&adapter).await;
    assert!(
        message.contains("pod web-0 is claimed by two targets"),
        "{message}"
    );
    assert!(
        message.contains(&first.address().to_string()) && message.contains(&second.address().to_string()),
        "{message}"
    );
    counted(&adapter, "forewarm_adapter_sample_conflicts_total", &[], 1.0).await;
    second.set_body("");
    sees(&adapter, "40").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_is_not_ready_is_withheld() {
    let (target, adapter) = serving().await;
    target.set_body(body("0.0", 0.1).replace("gpu_pod_ready{namespace=\"ml\",pod=\"web-0\",container=\"main\",pod_uid=\"uid-0\",gpu=\"0\",uuid=\"GPU-0\"} 1", "gpu_pod_ready{namespace=\"ml\",pod=\"web-0\",container=\"main\",pod_uid=\"uid-0\",gpu=\"0\",uuid=\"GPU-0\"} 0"));
    let message = refused(&adapter).await;
    assert!(
        message.contains("pod web-0 is not ready, so its value is withheld"),
        "{message}"
    );
    target.set_body(body("0.7", 0.1));
    sees(&adapter, "70").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_ended_has_no_value_though_its_name_was_known() {
    let (target, adapter) = serving().await;
    target.set_body("");
    let message = refused(&adapter).await;
    assert!(
        message.contains("no running pod in namespace ml matches"),
        "{message}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_configuration_is_refused_and_the_old_one_stays() {
    let (target, adapter) = serving().await;
    let good = config(&[&target]);
    for (bad, cause) in [
        (
            good.replace("maxAge: 3s", "maxAgee: 3s"),
            "metrics[0].maxAgee: unknown field; did you mean maxAge?",
        ),
        (
            good.replace("interval: 500ms", "interval: 2"),
            "sources[0].scrape.interval: 2 has no unit; write 2s if seconds were meant",
        ),
        (
            good.replace(
                "external:",
                "- {name: gpu_busy_percent, source: exporters, series: gpu_pod_busy_ratio}\nexternal:",
            ),
            "metrics[1].name: metric gpu_busy_percent per pods is defined twice",
        ),
    ] {
        adapter.reconfigure(&bad).unwrap();
        let file = adapter.config_path();
        until("the reason in readyz", SOON, || async {
            let answer = fetch(adapter.admin, "/readyz?verbose")
                .await
                .map_err(|error| format!("{error:#}"))?;
            let text = answer.text();
            if answer.status == StatusCode::OK
                && text.contains(cause)
                && text.contains(&*file.to_string_lossy())
            {
                Ok(())
            } else {
                Err(text)
            }
        })
        .await
        .unwrap();
        let in_force = adapter
            .health()
            .await
            .unwrap()
            .need("forewarm_adapter_config_last_reload_success", &[])
            .unwrap();
        assert!(in_force.abs() < f64::EPSILON);
        sees(&adapter, "40").await;
        assert!(
            adapter
                .program
                .log()
                .contains("configuration rejected, the old one stays in force")
        );
    }
    adapter
        .reconfigure(&good.replace("scale: 100", "scale: 1000"))
        .unwrap();
    sees(&adapter, "400").await;
    counted(&adapter, "forewarm_adapter_config_last_reload_success", &[], 1.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reading_travels_from_the_driver_to_the_answer() {
    let mut exporter = Exporter::start(&ExporterOptions::default()).await.unwrap();
    let kubelet = Kubelet::start(&exporter.kubelet_dir()).unwrap();
    let uuids = [Exporter::uuid(0), Exporter::uuid(1)];
    kubelet.set_allocatable(GPU, uuids.clone());
    kubelet.put(Pod::running("ml", "web-0", "uid-0", &[&uuids[0]]));
    exporter.steer(|control| control.gpu(0).busy = Some(0.4)).unwrap();
    // The defaults, but for where the exporter is: every default metric is made of what it really writes.
    let config = format!(
        "{CONFIG_HEAD}sources:\n- name: exporters\n  scrape: {{targets: [{{address: '{}', node: node-a}}]}}\n",
        exporter.metrics
    );
    let adapter = Adapter::start(&config).await.unwrap();
    sees(&adapter, "40").await;
    for metric in [
        "gpu_sm_active_percent",
        "gpu_memory_used_percent",
        "gpu_memory_used_bytes",
        "gpu_nvlink_bytes_per_second",
        "gpu_power_watts",
    ] {
        adapter
            .until_pods(metric, SOON, "ml", metric, |reply| {
                reply.value("web-0").map(drop).ok_or_else(|| format!("{reply:?}"))
            })
            .await
            .unwrap();
    }
    for (metric, value) in [
        ("gpu_health_score", "1"),
        ("gpu_allocated", "1"),
        ("gpu_idle", "1"),
    ] {
        let path = format!("/apis/custom.metrics.k8s.io/v1beta2/namespaces/ml/nodes/node-a/{metric}");
        until(metric, SOON, || async {
            let reply = adapter.get(&path).await?;
            if reply.value("node-a") == Some(value) {
                Ok(())
            } else {
                Err(format!("{reply:?}"))
            }
        })
        .await
        .unwrap();
    }
    // Link counters are read each 30 s: a rate needs two readings, and until then says so.
    let path = "/apis/custom.metrics.k8s.io/v1beta2/namespaces/ml/nodes/node-a/gpu_nvlink_errors_per_second";
    let reply = adapter.get(path).await.unwrap();
    let is_rate = reply.value("node-a") == Some("0");
    assert!(
        is_rate || reply.message().contains("too few readings"),
        "{reply:?}"
    );
    kubelet.set_ready("uid-0", false);
    let message = refused(&adapter).await;
    assert!(message.contains("pod web-0 is not ready"), "{message}");
}
