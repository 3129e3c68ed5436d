//! Process level: the real exporter on the fake driver, with bad input.
//!
//! Inputs: the built exporter, the fake driver's control file, fake kubelet sockets. Each test first sees the right
//! value, then injects, then asserts what is withdrawn or kept, the reason, and the counter.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "clippy exempts test functions only, and this file is all test"
)]
#![allow(clippy::float_cmp, reason = "values that are written and read back unchanged")]

use std::time::{Duration, Instant};

use forewarm_fake_nvml::control::{Block, Effect, Fault, Garbage};
use forewarm_signals::resource::GPU;
use forewarm_tests::kubelet::{Api, Call, Fault as KubeletFault, Kubelet, Pod};
use forewarm_tests::process::{Exporter, ExporterOptions, Scrape, control_path, fetch};

/// Far above anything waited for, on a busy machine.
const SOON: Duration = Duration::from_secs(30);
/// The exporter's default interval.
const INTERVAL: f64 = 1.0;
/// What a scrape's age may exceed the interval by: the tick itself and a busy machine's scheduling.
const SLACK: f64 = 0.5;

const FAST_GROUPS: [&str; 4] = ["utilization", "gpm", "memory", "power"];

/// A value that is close to what the control file says: the driver rounds percentages.
fn near(value: f64, expected: f64) -> Result<(), String> {
    if (value - expected).abs() <= 0.011 {
        Ok(())
    } else {
        Err(format!("{value}, not {expected}"))
    }
}

fn absent(scrape: &Scrape, name: &str, labels: &[(&str, &str)]) -> Result<(), String> {
    match scrape.all(name, labels).next() {
        None => Ok(()),
        Some(sample) => Err(format!("still there: {sample:?}")),
    }
}

/// Two GPUs, the first 40 % busy and held by `ml/web-0`, the second 70 % busy and held by `ml/web-1`.
async fn node() -> (Exporter, Kubelet) {
    let mut exporter = Exporter::start(&ExporterOptions::default()).await.unwrap();
    let kubelet = Kubelet::start(&exporter.kubelet_dir()).unwrap();
    let uuids = [Exporter::uuid(0), Exporter::uuid(1)];
    kubelet.set_allocatable(GPU, uuids.clone());
    kubelet.put(Pod::running("ml", "web-0", "uid-0", &[&uuids[0]]));
    kubelet.put(Pod::running("ml", "web-1", "uid-1", &[&uuids[1]]));
    exporter
        .steer(|control| {
            control.gpu(0).busy = Some(0.4);
            control.gpu(1).busy = Some(0.7);
        })
        .unwrap();
    exporter
        .until("both GPUs and both pods", SOON, |scrape| {
            near(scrape.need("gpu_busy_ratio", &[("gpu", "0")])?, 0.4)?;
            near(scrape.need("gpu_busy_ratio", &[("gpu", "1")])?, 0.7)?;
            near(busy(scrape, "uid-0")?, 0.4)?;
            near(busy(scrape, "uid-1")?, 0.7)
        })
        .await
        .unwrap();
    (exporter, kubelet)
}

fn busy(scrape: &Scrape, uid: &str) -> Result<f64, String> {
    scrape.need("gpu_pod_busy_ratio", &[("pod_uid", uid), ("source", "exclusive")])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pods_values_are_those_of_the_gpu_it_holds_alone() {
    let (exporter, kubelet) = node().await;
    let scrape = exporter.scrape().await.unwrap();
    let uuid = Exporter::uuid(0);
    let row = [
        ("namespace", "ml"),
        ("pod", "web-0"),
        ("container", "main"),
        ("pod_uid", "uid-0"),
        ("gpu", "0"),
        ("uuid", uuid.as_str()),
    ];
    let allocation: Vec<_> = scrape.all("gpu_pod_allocation", &row).collect();
    assert_eq!(allocation.len(), 1);
    assert_eq!(
        (
            allocation[0].label("resource"),
            allocation[0].label("sharing"),
            allocation[0].label("allocator")
        ),
        (GPU, "none", "device-plugin")
    );
    assert_eq!(scrape.value("gpu_pod_ready", &row), Some(1.0));
    for (pod, device) in [
        ("gpu_pod_busy_ratio", "gpu_busy_ratio"),
        ("gpu_pod_sm_active_ratio", "gpu_sm_active_ratio"),
        ("gpu_pod_memory_used_bytes", "gpu_memory_used_bytes"),
        ("gpu_pod_memory_total_bytes", "gpu_memory_total_bytes"),
        ("gpu_pod_power_watts", "gpu_power_watts"),
    ] {
        assert_eq!(
            scrape.need(pod, &row).unwrap(),
            scrape.need(device, &[("gpu", "0")]).unwrap(),
            "{pod}"
        );
    }
    let age = scrape
        .need(
            "gpu_pod_sample_age_seconds",
            &[("pod_uid", "uid-0"), ("source", "exclusive")],
        )
        .unwrap();
    assert!((0.0..INTERVAL + SLACK).contains(&age), "{age}");
    for (family, expected) in [
        ("gpu_node_allocatable", 2.0),
        ("gpu_node_allocated", 2.0),
        ("gpu_node_idle", 0.0),
    ] {
        assert_eq!(
            scrape.value(family, &[("resource", GPU)]),
            Some(expected),
            "{family}"
        );
    }

    kubelet.set_ready("uid-0", false);
    exporter
        .until("not ready", SOON, |scrape| {
            match scrape.need("gpu_pod_ready", &[("pod_uid", "uid-0")])? {
                0.0 => Ok(()),
                other => Err(other.to_string()),
            }
        })
        .await
        .unwrap();
    kubelet.remove("uid-1");
    exporter
        .until("one idle", SOON, |scrape| {
            absent(scrape, "gpu_pod_busy_ratio", &[("pod_uid", "uid-1")])?;
            absent(scrape, "gpu_pod_sample_age_seconds", &[("pod_uid", "uid-1")])?;
            match scrape.need("gpu_node_idle", &[("resource", GPU)])? {
                1.0 => Ok(()),
                other => Err(other.to_string()),
            }
        })
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_driver_it_serves_and_waits_for_one() {
    let (folder, command) = Exporter::prepare(&ExporterOptions::default()).unwrap();
    let absent_driver = forewarm_fake_nvml::Control {
        driver_loaded: Some(false),
        ..Default::default()
    };
    absent_driver.write(&control_path(folder.path())).unwrap();
    let mut exporter = Exporter::start_in(folder, command).await.unwrap();

    let scrape = exporter.scrape().await.unwrap();
    absent(&scrape, "gpu_up", &[]).unwrap();
    exporter
        .until_health("waiting", SOON, |health| {
            match health.need("forewarm_exporter_nvml_up", &[])? {
                0.0 => Ok(()),
                other => Err(other.to_string()),
            }
        })
        .await
        .unwrap();
    assert_eq!(fetch(exporter.admin, "/livez").await.unwrap().status, 200);

    exporter
        .steer(|control| {
            control.driver_loaded = Some(true);
            control.gpu(0).busy = Some(0.4);
        })
        .unwrap();
    exporter
        .until("the driver's GPUs", SOON, |scrape| {
            near(scrape.need("gpu_busy_ratio", &[("gpu", "0")])?, 0.4)
        })
        .await
        .unwrap();

    // The driver goes away under the running exporter, and comes back.
    exporter
        .steer(|control| control.driver_loaded = Some(false))
        .unwrap();
    exporter
        .until("withdrawn", SOON, |scrape| {
            absent(scrape, "gpu_busy_ratio", &[])?;
            scrape.all("gpu_up", &[]).try_for_each(|up| match up.value {
                0.0 => Ok(()),
                _ => Err(format!("{up:?}")),
            })
        })
        .await
        .unwrap();
    exporter
        .steer(|control| control.driver_loaded = Some(true))
        .unwrap();
    exporter
        .until("back again", SOON, |scrape| {
            near(scrape.need("gpu_busy_ratio", &[("gpu", "0")])?, 0.4)
        })
        .await
        .unwrap();
    let opens = exporter
        .health()
        .await
        .unwrap()
        .need("forewarm_exporter_nvml_opens_total", &[])
        .unwrap();
    assert!(opens >= 2.0, "{opens}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_library_that_is_installed_later_is_found() {
    let options = ExporterOptions::default();
    let (folder, mut command) = Exporter::prepare(&options).unwrap();
    let library = folder.path().join("libnvidia-ml.so.1");
    // The prepared command names the built library: this one needs a path that does not exist yet.
    let mut args: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    let at = args.iter().position(|arg| arg == "--nvml-library").unwrap() + 1;
    let built = std::mem::replace(&mut args[at], library.clone().into());
    let mut later = std::process::Command::new(command.get_program());
    later.args(args);
    for (key, value) in command.get_envs() {
        match value {
            Some(value) => later.env(key, value),
            None => later.env_remove(key),
        };
    }
    command = later;
    let exporter = Exporter::start_in(folder, command).await.unwrap();
    absent(&exporter.scrape().await.unwrap(), "gpu_up", &[]).unwrap();
    let readiness = fetch(exporter.admin, "/readyz?verbose").await.unwrap();
    assert!(!readiness.text().is_empty());

    // As an installer does it: whole under another name, then renamed.
    let fresh = library.with_extension("new");
    std::fs::copy(built, &fresh).unwrap();
    std::fs::rename(&fresh, &library).unwrap();
    exporter
        .until("GPUs", SOON, |scrape| scrape.need("gpu_up", &[("gpu", "1")]))
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_gpu_withdraws_its_own_values_and_its_pods_and_no_others() {
    let (mut exporter, _kubelet) = node().await;
    exporter
        .steer(|control| control.faults = vec![Fault::on_gpu(1, Effect::Lost)])
        .unwrap();
    exporter
        .until("GPU 1 withdrawn", SOON, |scrape| {
            match scrape.need("gpu_up", &[("gpu", "1")])? {
                0.0 => {}
                other => return Err(format!("up {other}")),
            }
            absent(scrape, "gpu_busy_ratio", &[("gpu", "1")])?;
            absent(scrape, "gpu_memory_used_bytes", &[("gpu", "1")])?;
            absent(scrape, "gpu_pod_busy_ratio", &[("pod_uid", "uid-1")])?;
            absent(scrape, "gpu_pod_sample_age_seconds", &[("pod_uid", "uid-1")])
        })
        .await
        .unwrap();
    let scrape = exporter.scrape().await.unwrap();
    near(busy(&scrape, "uid-0").unwrap(), 0.4).unwrap();
    assert_eq!(scrape.value("gpu_up", &[("gpu", "0")]), Some(1.0));
    assert_eq!(
        scrape.all("gpu_pod_allocation", &[("pod_uid", "uid-1")]).count(),
        1,
        "the pod still holds it"
    );
    let health = exporter.health().await.unwrap();
    assert!(
        health
            .all("forewarm_exporter_nvml_errors_total", &[])
            .any(|errors| errors.label("code").contains("lost") && errors.value > 0.0),
        "{:?}",
        health
            .all("forewarm_exporter_nvml_errors_total", &[])
            .collect::<Vec<_>>()
    );

    exporter.steer(|control| control.faults.clear()).unwrap();
    exporter
        .until("GPU 1 back", SOON, |scrape| near(busy(scrape, "uid-1")?, 0.7))
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_blocked_for_ever_holds_up_nobody_and_no_shutdown() {
    let (mut exporter, _kubelet) = node().await;
    exporter
        .steer(|control| control.faults = vec![Fault::on_gpu(1, Effect::Block(Block::Forever))])
        .unwrap();
    exporter
        .until("GPU 1 withdrawn", SOON, |scrape| {
            absent(scrape, "gpu_busy_ratio", &[("gpu", "1")])?;
            absent(scrape, "gpu_pod_busy_ratio", &[("pod_uid", "uid-1")])?;
            match scrape.need("gpu_up", &[("gpu", "1")])? {
                0.0 => Ok(()),
                other => Err(format!("up {other}")),
            }
        })
        .await
        .unwrap();
    exporter
        .until_health("one stuck GPU", SOON, |health| {
            match health.need("forewarm_exporter_stuck_gpus", &[])? {
                1.0 => Ok(()),
                other => Err(other.to_string()),
            }
        })
        .await
        .unwrap();
    // For five intervals: the other GPU is never older than one, and no scrape waits.
    let until = Instant::now() + Duration::from_secs(5);
    let mut scrapes = 0;
    while Instant::now() < until {
        let asked = Instant::now();
        let scrape = exporter.scrape().await.unwrap();
        assert!(
            asked.elapsed() < Duration::from_secs(1),
            "a scrape waited {:?}",
            asked.elapsed()
        );
        for group in FAST_GROUPS {
            let age = scrape
                .need("gpu_sample_age_seconds", &[("gpu", "0"), ("group", group)])
                .unwrap();
            assert!(
                age <= INTERVAL + SLACK,
                "{group} of the healthy GPU is {age} s old"
            );
        }
        near(busy(&scrape, "uid-0").unwrap(), 0.4).unwrap();
        absent(&scrape, "gpu_pod_busy_ratio", &[("pod_uid", "uid-1")]).unwrap();
        scrapes += 1;
    }
    assert!(scrapes > 10);
    assert_eq!(
        fetch(exporter.admin, "/livez").await.unwrap().status,
        200,
        "alive all the same"
    );

    exporter.program.signal(nix::sys::signal::Signal::SIGTERM);
    let status = exporter.program.ended(Duration::from_secs(10)).await.unwrap();
    assert_eq!(
        status.code(),
        Some(0),
        "a thread inside the driver does not hold the process"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blocked_gpu_that_comes_back_is_read_again() {
    let (mut exporter, _kubelet) = node().await;
    exporter
        .steer(|control| control.faults = vec![Fault::on_gpu(1, Effect::Block(Block::Forever))])
        .unwrap();
    exporter
        .until("withdrawn", SOON, |scrape| {
            absent(scrape, "gpu_busy_ratio", &[("gpu", "1")])
        })
        .await
        .unwrap();
    exporter
        .steer(|control| {
            control.faults.clear();
            control.gpu(1).busy = Some(0.2);
        })
        .unwrap();
    exporter
        .until("back", SOON, |scrape| near(busy(scrape, "uid-1")?, 0.2))
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn impossible_values_are_left_out_and_counted_and_never_clamped() {
    let (mut exporter, _kubelet) = node().await;
    for garbage in [Garbage::OutOfRange, Garbage::Sentinel] {
        let rejected = |health: &Scrape| health.sum("forewarm_exporter_rejected_values_total", &[]);
        let before = rejected(&exporter.health().await.unwrap());
        exporter
            .steer(|control| control.faults = vec![Fault::on_gpu(1, Effect::Garbage(garbage))])
            .unwrap();
        exporter
            .until(&format!("{garbage:?} left out"), SOON, |scrape| {
                absent(scrape, "gpu_busy_ratio", &[("gpu", "1")])?;
                absent(scrape, "gpu_sm_active_ratio", &[("gpu", "1")])?;
                absent(scrape, "gpu_pod_busy_ratio", &[("pod_uid", "uid-1")])
            })
            .await
            .unwrap();
        exporter
            .until_health("counted", SOON, |health| {
                let now = rejected(health);
                if now > before {
                    Ok(())
                } else {
                    Err(format!("{now}, before {before}"))
                }
            })
            .await
            .unwrap();
        let scrape = exporter.scrape().await.unwrap();
        for sample in scrape.iter().filter(|sample| sample.name.ends_with("_ratio")) {
            assert!((0.0..=1.0).contains(&sample.value), "{sample:?}");
        }
        let absurd: Vec<_> = scrape
            .iter()
            .filter(|sample| sample.label("gpu") == "1" && !(sample.value.is_finite() && sample.value < 1e15))
            .collect();
        assert!(absurd.is_empty(), "{garbage:?}: {absurd:?}");
        near(busy(&scrape, "uid-0").unwrap(), 0.4).unwrap();

        exporter.steer(|control| control.faults.clear()).unwrap();
        exporter
            .until("back", SOON, |scrape| near(busy(scrape, "uid-1")?, 0.7))
            .await
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_xid_is_counted_once_and_lowers_the_health() {
    let (mut exporter, _kubelet) = node().await;
    let scrape = exporter.scrape().await.unwrap();
    absent(&scrape, "gpu_xid_total", &[("xid", "79")]).unwrap();
    assert_eq!(scrape.value("gpu_health_score", &[("gpu", "0")]), Some(1.0));
    exporter.steer(|control| control.gpu(0).xids = vec![79]).unwrap();
    exporter
        .until("counted", SOON, |scrape| {
            match scrape.need("gpu_xid_total", &[("gpu", "0"), ("xid", "79")])? {
                1.0 => Ok(()),
                other => Err(other.to_string()),
            }
        })
        .await
        .unwrap();
    exporter.steer(|control| control.gpu(0).xids.push(79)).unwrap();
    exporter
        .until("counted again", SOON, |scrape| {
            match scrape.need("gpu_xid_total", &[("gpu", "0"), ("xid", "79")])? {
                2.0 => Ok(()),
                other => Err(other.to_string()),
            }
        })
        .await
        .unwrap();
    absent(
        &exporter.scrape().await.unwrap(),
        "gpu_xid_total",
        &[("gpu", "1")],
    )
    .unwrap();
    exporter
        .until("health", Duration::from_secs(60), |scrape| {
            let score = scrape.need("gpu_health_score", &[("gpu", "0")])?;
            scrape.need("gpu_health_reason", &[("gpu", "0"), ("reason", "xid-hardware")])?;
            if score < 1.0 {
                Ok(())
            } else {
                Err(score.to_string())
            }
        })
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_kubelet_sockets_cost_the_pod_rows_only() {
    let mut exporter = Exporter::start(&ExporterOptions::default()).await.unwrap();
    exporter.steer(|control| control.gpu(0).busy = Some(0.4)).unwrap();
    exporter
        .until("device values", SOON, |scrape| {
            near(scrape.need("gpu_busy_ratio", &[("gpu", "0")])?, 0.4)
        })
        .await
        .unwrap();
    absent(&exporter.scrape().await.unwrap(), "gpu_pod_allocation", &[]).unwrap();
    for api in ["allocations", "pods"] {
        exporter
            .until_health("the reason", SOON, |health| {
                health.need(
                    "forewarm_exporter_attribution_errors_total",
                    &[("api", api), ("reason", "socket-missing")],
                )
            })
            .await
            .unwrap();
    }
    let kubelet = Kubelet::start(&exporter.kubelet_dir()).unwrap();
    kubelet.put(Pod::running("ml", "web-0", "uid-0", &[&Exporter::uuid(0)]));
    exporter
        .until("pod values", SOON, |scrape| near(busy(scrape, "uid-0")?, 0.4))
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_kubelet_is_followed_and_meanwhile_the_last_answer_is_kept() {
    let (exporter, kubelet) = node().await;
    kubelet.close(Api::PodResources);
    kubelet.close(Api::Pods);
    exporter
        .until_health("the reason", SOON, |health| {
            health.need(
                "forewarm_exporter_attribution_errors_total",
                &[("api", "allocations"), ("reason", "socket-missing")],
            )
        })
        .await
        .unwrap();
    near(busy(&exporter.scrape().await.unwrap(), "uid-0").unwrap(), 0.4).unwrap();

    let new = Kubelet::start(&exporter.kubelet_dir()).unwrap();
    new.put(Pod::running("ml", "web-9", "uid-9", &[&Exporter::uuid(0)]));
    exporter
        .until("the new kubelet's pod", SOON, |scrape| {
            absent(scrape, "gpu_pod_allocation", &[("pod_uid", "uid-0")])?;
            absent(scrape, "gpu_pod_allocation", &[("pod_uid", "uid-1")])?;
            near(busy(scrape, "uid-9")?, 0.4)
        })
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limited_or_garbled_or_oversized_kubelet_answer_keeps_the_last_one() {
    let (exporter, kubelet) = node().await;
    let (mut met, mut last_age) = (Vec::new(), 0.0);
    for (fault, reason) in [
        (KubeletFault::Garbage, "malformed"),
        (KubeletFault::Padded(17 << 20), "answer-too-large"),
        (KubeletFault::Hang, "deadline-exceeded"),
        (KubeletFault::RateLimited, "rate-limited"),
    ] {
        kubelet.fault(Call::List, Some(fault));
        exporter
            .until_health(reason, SOON, |health| {
                health.need(
                    "forewarm_exporter_attribution_errors_total",
                    &[("api", "allocations"), ("reason", reason)],
                )
            })
            .await
            .unwrap();
        let scrape = exporter.scrape().await.unwrap();
        near(busy(&scrape, "uid-0").unwrap(), 0.4).unwrap();
        near(busy(&scrape, "uid-1").unwrap(), 0.7).unwrap();
        let age = exporter
            .health()
            .await
            .unwrap()
            .need(
                "forewarm_exporter_attribution_age_seconds",
                &[("api", "allocations")],
            )
            .unwrap();
        // No answer was taken since the first fault: its age grows, over one fault and the next.
        assert!(age > last_age, "{reason}: {age} after {last_age}");
        last_age = age;
        met.push(reason);
        let health = exporter.health().await.unwrap();
        let counted: std::collections::BTreeSet<_> = health
            .all(
                "forewarm_exporter_attribution_errors_total",
                &[("api", "allocations")],
            )
            .filter(|errors| errors.value > 0.0 && errors.label("reason") != "socket-missing")
            .map(|errors| errors.label("reason"))
            .collect();
        assert_eq!(
            counted,
            met.iter().copied().collect(),
            "each fault under its own reason"
        );
    }
    // Over gRPC's default of 4 MiB is fine.
    kubelet.fault(Call::List, Some(KubeletFault::Padded(5 << 20)));
    kubelet.remove("uid-1");
    exporter
        .until("the large answer is read", Duration::from_secs(60), |scrape| {
            absent(scrape, "gpu_pod_allocation", &[("pod_uid", "uid-1")])?;
            near(busy(scrape, "uid-0")?, 0.4)
        })
        .await
        .unwrap();
    exporter
        .until_health("a fresh answer", Duration::from_secs(60), |health| {
            let age = health.need(
                "forewarm_exporter_attribution_age_seconds",
                &[("api", "allocations")],
            )?;
            if age < 6.0 { Ok(()) } else { Err(age.to_string()) }
        })
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_claimed_by_two_containers_gives_neither_its_values() {
    let (exporter, kubelet) = node().await;
    kubelet.put(Pod::running("ml", "thief", "uid-2", &[&Exporter::uuid(0)]));
    exporter
        .until("withdrawn from both", SOON, |scrape| {
            for uid in ["uid-0", "uid-2"] {
                scrape.need("gpu_pod_allocation", &[("pod_uid", uid)])?;
                absent(scrape, "gpu_pod_busy_ratio", &[("pod_uid", uid)])?;
            }
            near(busy(scrape, "uid-1")?, 0.7)
        })
        .await
        .unwrap();
    exporter
        .until_health("the reason", SOON, |health| {
            match health.need(
                "forewarm_exporter_attribution_gaps",
                &[("reason", "claimed-twice")],
            )? {
                2.0 => Ok(()),
                other => Err(other.to_string()),
            }
        })
        .await
        .unwrap();
    near(
        exporter
            .scrape()
            .await
            .unwrap()
            .need("gpu_busy_ratio", &[("gpu", "0")])
            .unwrap(),
        0.4,
    )
    .unwrap();
}
