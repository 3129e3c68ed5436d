//! Process level: attribution against the kubelet's sockets, with the faults real kubelets have.
//!
//! Inputs: fake kubelet sockets and a fake API server on loopback. Each test first sees the right pod, then injects,
//! then asserts what is kept or withdrawn, the reason, and the counter.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "clippy exempts test functions only, and this file is all test"
)]
#![allow(clippy::float_cmp, reason = "values that are written and read back unchanged")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forewarm_exporter::attribution::{Attribution, AttributionView, Config, Gap, start};
use forewarm_runtime::tasks::Tasks;
use forewarm_tests::kubelet::{Api, Call, Device, Fault, Kubelet, Phase, Pod};
use forewarm_tests::process::Scrape;
use forewarm_tests::wait::until;
use prometheus_client::registry::Registry;
use tempfile::TempDir;

const GPU: &str = "GPU-0b5d8f3e-1c2d-4e5f-8a9b-0c1d2e3f4a5b";
const OTHER_GPU: &str = "GPU-1b5d8f3e-1c2d-4e5f-8a9b-0c1d2e3f4a5b";
/// Short, so that a test meets several polls.
const INTERVAL: Duration = Duration::from_millis(300);
/// Far above anything waited for, on a busy machine.
const SOON: Duration = Duration::from_secs(20);

/// Attribution running against a folder.
struct Running {
    view: AttributionView,
    registry: Registry,
    tasks: Tasks,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.tasks.token().cancel();
    }
}

impl Running {
    fn start(dir: &Path) -> Self {
        Self::start_with(dir, |_| {})
    }

    fn start_with(dir: &Path, configure: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::new(dir.to_owned(), Some("node-a".into()));
        config.interval = INTERVAL;
        configure(&mut config);
        let (tasks, mut registry) = (Tasks::new(), Registry::default());
        let view = start(config, &tasks, &mut registry);
        Self {
            view,
            registry,
            tasks,
        }
    }

    fn health(&self) -> Scrape {
        Scrape::read(&forewarm_runtime::metrics::text(&self.registry)).unwrap()
    }

    /// Every reason counted for a question so far.
    fn reasons(&self, api: &str) -> Vec<String> {
        let health = self.health();
        let mut reasons: Vec<_> = health
            .all("forewarm_exporter_attribution_errors_total", &[("api", api)])
            .filter(|errors| errors.value > 0.0)
            .map(|errors| errors.label("reason").to_owned())
            .collect();
        reasons.sort();
        reasons
    }

    fn errors(&self, api: &str, reason: &str) -> f64 {
        self.health().sum(
            "forewarm_exporter_attribution_errors_total",
            &[("api", api), ("reason", reason)],
        )
    }

    async fn until(&self, what: &str, holds: impl Fn(&Attribution) -> bool) -> Arc<Attribution> {
        until(what, SOON, || async {
            let told = self.view.load();
            if holds(&told) {
                Ok(told)
            } else {
                Err(format!("{told:?}"))
            }
        })
        .await
        .unwrap()
    }

    async fn until_failed(&self, api: &str, reason: &str, times: f64) {
        until(&format!("{api} {reason}"), SOON, || async {
            let seen = self.errors(api, reason);
            if seen >= times {
                Ok(())
            } else {
                Err(format!("{seen} of {times}"))
            }
        })
        .await
        .unwrap();
    }

    /// Waits for the one allocation of one pod.
    async fn until_held_by(&self, uid: &str) -> Arc<Attribution> {
        self.until(&format!("held by {uid}"), |told| holders(told) == [uid])
            .await
    }
}

fn holders(told: &Attribution) -> Vec<&str> {
    told.allocations
        .iter()
        .filter_map(|allocation| allocation.pod_uid.as_deref())
        .collect()
}

fn kubelet() -> (TempDir, Kubelet) {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).unwrap();
    kubelet.put(Pod::running("ml", "web-0", "uid-1", &[GPU]));
    kubelet.set_allocatable("nvidia.com/gpu", [GPU, OTHER_GPU]);
    (dir, kubelet)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_allocation_is_told_with_uid_readiness_and_inventory() {
    let (dir, kubelet) = kubelet();
    let running = Running::start(dir.path());
    let told = running.until_held_by("uid-1").await;
    let held = &told.allocations[0];
    assert_eq!(
        (
            held.namespace.as_str(),
            held.pod.as_str(),
            held.container.as_str()
        ),
        ("ml", "web-0", "main")
    );
    assert_eq!((held.device_id.as_str(), held.ready), (GPU, Some(true)));
    assert!(told.gaps.is_empty(), "{:?}", told.gaps);
    let told = running
        .until("inventory", |told| told.allocatable.is_some())
        .await;
    assert_eq!(told.allocatable.as_ref().unwrap()["nvidia.com/gpu"], 2);
    assert_eq!(told.handed_out.as_ref().unwrap()["nvidia.com/gpu"], 1);
    assert!(running.view.settled(SOON).await);

    kubelet.set_ready("uid-1", false);
    running
        .until("not ready", |told| told.allocations[0].ready == Some(false))
        .await;
    kubelet.set_phase("uid-1", Phase::Succeeded);
    let told = running.until("ended", |told| told.allocations.is_empty()).await;
    assert!(told.handed_out.as_ref().unwrap().is_empty());
    let health = running.health();
    assert_eq!(
        health.value(
            "forewarm_exporter_attribution_pod_source",
            &[("source", "kubelet")]
        ),
        Some(1.0)
    );
    assert!(
        health
            .value(
                "forewarm_exporter_attribution_age_seconds",
                &[("api", "allocations")]
            )
            .unwrap()
            < 5.0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_pod_is_noticed_before_the_next_poll() {
    let (dir, kubelet) = kubelet();
    let running = Running::start_with(dir.path(), |config| config.interval = Duration::from_secs(3600));
    running.until_held_by("uid-1").await;
    kubelet.put(Pod::running("ml", "web-1", "uid-2", &[OTHER_GPU]));
    running
        .until("both", |told| holders(told) == ["uid-1", "uid-2"])
        .await;
    kubelet.remove("uid-1");
    running.until_held_by("uid-2").await;
    assert!(
        kubelet.calls(Call::List) < 12,
        "a List for each change, not a flood"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_recreated_under_its_name_has_its_own_uid_at_once() {
    let (dir, kubelet) = kubelet();
    let running = Running::start_with(dir.path(), |config| config.interval = Duration::from_secs(3600));
    running.until_held_by("uid-1").await;
    for round in 2..6 {
        let (old, new) = (format!("uid-{}", round - 1), format!("uid-{round}"));
        kubelet.change(|state| {
            state.pods.remove(&old);
            state
                .pods
                .insert(new.clone(), Pod::running("ml", "web-0", &new, &[GPU]));
        });
        let told = running.until_held_by(&new).await;
        assert_eq!(told.allocations.len(), 1);
        assert!(told.gaps.is_empty(), "{:?}", told.gaps);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_devices_of_a_replaced_pod_are_nobodys_until_the_kubelet_lists_them_again() {
    let (dir, kubelet) = kubelet();
    let running = Running::start(dir.path());
    running.until_held_by("uid-1").await;
    kubelet.fault(Call::List, Some(Fault::Hang));
    kubelet.change(|state| {
        state.pods.remove("uid-1");
        state
            .pods
            .insert("uid-2".into(), Pod::running("ml", "web-0", "uid-2", &[OTHER_GPU]));
    });
    let told = running
        .until("withdrawn", |told| told.gaps.contains_key(&Gap::PodReplaced))
        .await;
    assert!(
        holders(&told).is_empty(),
        "neither the old UID nor the new one: {told:?}"
    );
    kubelet.fault(Call::List, None);
    let told = running.until_held_by("uid-2").await;
    assert_eq!(told.allocations[0].device_id, OTHER_GPU);
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_that_are_missing_are_named_and_used_once_they_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::stopped(dir.path());
    kubelet.put(Pod::running("ml", "web-0", "uid-1", &[GPU]));
    let running = Running::start(dir.path());
    running.until_failed("allocations", "socket-missing", 2.0).await;
    running.until_failed("pods", "socket-missing", 2.0).await;
    assert_eq!(running.view.load().answered_at, None);
    kubelet.serve(Api::PodResources).unwrap();
    running
        .until("who holds it is not known without pods", |told| {
            told.gaps.contains_key(&Gap::PodsUnknown)
        })
        .await;
    kubelet.serve(Api::Pods).unwrap();
    running.until_held_by("uid-1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_kubelet_is_found_behind_the_new_sockets_and_the_last_answer_is_kept_meanwhile() {
    let (dir, kubelet) = kubelet();
    let running = Running::start(dir.path());
    running.until_held_by("uid-1").await;

    kubelet.close(Api::PodResources);
    kubelet.close(Api::Pods);
    running.until_failed("allocations", "socket-missing", 2.0).await;
    running.until_failed("pods", "socket-missing", 1.0).await;
    assert_eq!(
        holders(&running.view.load()),
        ["uid-1"],
        "kept while the kubelet is away"
    );

    let restarted = Kubelet::start(dir.path()).unwrap();
    restarted.put(Pod::running("ml", "web-1", "uid-2", &[GPU]));
    running.until_held_by("uid-2").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_replaced_under_an_open_connection_is_noticed() {
    let (dir, old) = kubelet();
    let running = Running::start(dir.path());
    running.until_held_by("uid-1").await;
    // The old kubelet still answers on its connections; the path leads to a new one.
    let new = Kubelet::stopped(dir.path());
    new.put(Pod::running("ml", "web-1", "uid-2", &[GPU]));
    new.replace(Api::PodResources).unwrap();
    new.replace(Api::Pods).unwrap();
    running.until_held_by("uid-2").await;
    drop(old);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_limited_kubelet_is_asked_less_and_the_last_answer_is_kept() {
    let (dir, kubelet) = kubelet();
    let running = Running::start(dir.path());
    running.until_held_by("uid-1").await;
    kubelet.fault(Call::List, Some(Fault::RateLimited));
    running.until_failed("allocations", "rate-limited", 1.0).await;
    let limited = kubelet.calls(Call::List);
    // A changed pod must not bring the questions back.
    kubelet.put(Pod::running("ml", "web-1", "uid-2", &[OTHER_GPU]));
    let seen = until("no question for ten intervals", SOON, || async {
        let age = running
            .view
            .load()
            .answered_at
            .map(|at| at.elapsed())
            .unwrap_or_default();
        if age > INTERVAL * 10 {
            Ok(kubelet.calls(Call::List))
        } else {
            Err(format!("{age:?}"))
        }
    })
    .await
    .unwrap();
    assert_eq!(seen, limited, "it backed off");
    assert_eq!(holders(&running.view.load()), ["uid-1"], "kept");
    let age = running
        .health()
        .value(
            "forewarm_exporter_attribution_age_seconds",
            &[("api", "allocations")],
        )
        .unwrap();
    assert!(age > INTERVAL.as_secs_f64() * 10.0, "its age is told: {age}");
    kubelet.fault(Call::List, None);
    running
        .until("both", |told| holders(told) == ["uid-1", "uid-2"])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_over_4_mib_is_read_and_one_over_16_mib_is_refused() {
    let (dir, kubelet) = kubelet();
    let running = Running::start(dir.path());
    running.until_held_by("uid-1").await;

    kubelet.fault(Call::List, Some(Fault::Padded(5 << 20)));
    kubelet.put(Pod::running("ml", "web-1", "uid-2", &[OTHER_GPU]));
    running
        .until("both", |told| holders(told) == ["uid-1", "uid-2"])
        .await;
    assert_eq!(running.errors("allocations", "answer-too-large"), 0.0);

    kubelet.fault(Call::List, Some(Fault::Padded(17 << 20)));
    running.until_failed("allocations", "answer-too-large", 1.0).await;
    // What it would have told is not read: neither a part of it, nor by asking again.
    kubelet.put(Pod::running("ml", "web-2", "uid-3", &[]));
    kubelet.remove("uid-2");
    running.until_failed("allocations", "answer-too-large", 3.0).await;
    assert_eq!(
        holders(&running.view.load()),
        ["uid-1"],
        "kept, less the pod that is gone"
    );
    assert_eq!(
        running.reasons("allocations"),
        ["answer-too-large"],
        "one failure, one reason"
    );
    assert!(running.reasons("pods").is_empty() && running.reasons("allocatable").is_empty());
    let age = running.view.load().answered_at.unwrap().elapsed();
    assert!(age >= INTERVAL, "a refused answer is none: {age:?}");

    kubelet.fault(Call::List, None);
    kubelet.put(Pod::running("ml", "web-1", "uid-4", &[OTHER_GPU]));
    running
        .until("read again", |told| holders(told) == ["uid-1", "uid-4"])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inventory_over_16_mib_is_refused_and_costs_only_itself() {
    let (dir, kubelet) = kubelet();
    kubelet.fault(Call::Allocatable, Some(Fault::Padded(17 << 20)));
    let running = Running::start(dir.path());
    let told = running.until_held_by("uid-1").await;
    assert_eq!((&told.allocatable, &told.idle), (&None, &None));
    assert_eq!(told.handed_out.as_ref().unwrap()["nvidia.com/gpu"], 1);
    running.until_failed("allocatable", "answer-too-large", 2.0).await;
    assert_eq!(running.reasons("allocatable"), ["answer-too-large"]);
    assert!(running.reasons("allocations").is_empty());

    kubelet.fault(Call::Allocatable, Some(Fault::Padded(5 << 20)));
    let told = running.until("inventory", |told| told.idle.is_some()).await;
    assert_eq!(told.idle.as_ref().unwrap()["nvidia.com/gpu"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_turns_unhealthy_in_use_takes_no_idle_one_with_it() {
    let (dir, kubelet) = kubelet();
    kubelet.set_allocatable("nvidia.com/gpu", [OTHER_GPU]);
    let running = Running::start(dir.path());
    let told = running.until("inventory", |told| told.idle.is_some()).await;
    let of =
        |counts: &Option<std::collections::BTreeMap<String, u64>>| counts.as_ref().unwrap()["nvidia.com/gpu"];
    assert_eq!(
        (of(&told.allocatable), of(&told.handed_out), of(&told.idle)),
        (1, 1, 1)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_is_refused_and_the_last_answer_is_kept() {
    let (dir, kubelet) = kubelet();
    let running = Running::start(dir.path());
    running.until_held_by("uid-1").await;
    kubelet.fault(Call::List, Some(Fault::Garbage));
    running.until_failed("allocations", "malformed", 2.0).await;
    assert_eq!(holders(&running.view.load()), ["uid-1"]);
    kubelet.fault(Call::List, None);
    kubelet.remove("uid-1");
    running.until("gone", |told| told.allocations.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubelet_that_hangs_costs_a_deadline_and_nothing_else() {
    let (dir, kubelet) = kubelet();
    let running = Running::start(dir.path());
    running.until_held_by("uid-1").await;
    kubelet.fault(Call::List, Some(Fault::Hang));
    running
        .until_failed("allocations", "deadline-exceeded", 1.0)
        .await;
    assert_eq!(
        holders(&running.view.load()),
        ["uid-1"],
        "readers go on with the last answer"
    );
    kubelet.fault(Call::List, None);
    kubelet.put(Pod::running("ml", "web-1", "uid-2", &[OTHER_GPU]));
    running
        .until("both", |told| holders(told) == ["uid-1", "uid-2"])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubelet_that_hangs_is_asked_once_an_interval() {
    let (dir, kubelet) = kubelet();
    let running = Running::start_with(dir.path(), |config| config.interval = Duration::from_secs(3600));
    running.until_held_by("uid-1").await;
    kubelet.fault(Call::List, Some(Fault::Hang));
    kubelet.put(Pod::running("ml", "web-1", "uid-2", &[OTHER_GPU]));
    running
        .until_failed("allocations", "deadline-exceeded", 1.0)
        .await;
    let asked = kubelet.calls(Call::List);
    until("three deadlines pass", SOON, || async {
        let age = running
            .view
            .load()
            .answered_at
            .map(|at| at.elapsed())
            .unwrap_or_default();
        if age > Duration::from_secs(8) {
            Ok(())
        } else {
            Err(format!("{age:?}"))
        }
    })
    .await
    .unwrap();
    assert_eq!(kubelet.calls(Call::List), asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_pods_stream_names_are_trusted_for_seconds_and_then_withdrawn() {
    let (dir, kubelet) = kubelet();
    let running = Running::start(dir.path());
    running.until_held_by("uid-1").await;
    kubelet.fault(Call::Watch, Some(Fault::NotReady));
    kubelet.serve(Api::Pods).unwrap(); // ends the open stream
    running.until_failed("pods", "not-ready", 2.0).await;
    let told = running
        .until("withdrawn", |told| told.gaps.contains_key(&Gap::PodsStale))
        .await;
    assert!(holders(&told).is_empty());
    assert_eq!(
        told.handed_out.as_ref().unwrap()["nvidia.com/gpu"],
        1,
        "it is still handed out"
    );
    kubelet.fault(Call::Watch, None);
    running.until_held_by("uid-1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_kubelet_without_pods_api_and_no_api_server_gives_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start_without_pods_api(dir.path()).unwrap();
    kubelet.change(|state| state.lists_ended_pods = true);
    kubelet.put(Pod::running("ml", "web-0", "uid-1", &[GPU]));
    let running = Running::start_with(dir.path(), |config| {
        config.api_server.kubeconfig = Some("/nonexistent/kubeconfig".into());
    });
    running
        .until_failed("api-server-pods", "no-api-server", 1.0)
        .await;
    let told = running.view.load();
    assert_eq!((told.allocations.len(), holders(&told).len()), (1, 0));
    assert!(told.gaps.contains_key(&Gap::PodsUnknown));
    // The kubelet is upgraded.
    kubelet.serve(Api::Pods).unwrap();
    running.until_held_by("uid-1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dra_devices_and_unknown_forms_are_told_apart() {
    let (dir, kubelet) = kubelet();
    let mut pod = Pod::running("ml", "dra-0", "uid-2", &["hami-0-1"]);
    for (driver, device) in [
        ("gpu.nvidia.com", "gpu-1"),
        ("compute-domain.nvidia.com", "channel-0"),
    ] {
        pod.containers[0].devices.push(Device::Dra {
            driver: driver.into(),
            device: device.into(),
            share: None,
        });
    }
    kubelet.put(pod);
    let running = Running::start(dir.path());
    let told = running.until("three", |told| told.allocations.len() == 3).await;
    let known: Vec<bool> = told
        .allocations
        .iter()
        .map(|allocation| allocation.device.is_some())
        .collect();
    assert_eq!(
        known.iter().filter(|known| **known).count(),
        2,
        "{:?}",
        told.allocations
    );
    assert!(
        told.allocations
            .iter()
            .any(|held| held.allocator.as_str() == "dra" && held.device_id == "gpu-1")
    );
}
