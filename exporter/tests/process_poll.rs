//! Threads, supervisor and renderer with the real library implementation over the stand-in driver.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test binary: helpers fail the test they serve"
)]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forewarm_exporter::attribution::AttributionView;
use forewarm_exporter::poll::{self, Opener, PollCounts, Supervision};
use forewarm_exporter::render::Renderer;
use forewarm_exporter::render::page::Selection;
use forewarm_exporter::render::text::Format;
use forewarm_exporter::snapshot::{Fleet, LibraryState, Standing};
use forewarm_fake_nvml::control::{Block, Control, Effect, Fault, Garbage};
use forewarm_fake_nvml::library;
use forewarm_fake_nvml::settings::Settings;
use forewarm_nvml::{CallLog, InFlight, Library, Nvml};
use forewarm_runtime::status::Status;
use forewarm_signals::Group;

/// Longest wait for something that comes within seconds.
const DEADLINE: Duration = Duration::from_secs(40);
const INTERVAL: Duration = Duration::from_millis(200);

struct Node {
    folder: tempfile::TempDir,
    control: Control,
    fleet: Arc<Fleet>,
    counts: Arc<PollCounts>,
    renderer: Renderer,
    status: Status,
}

impl Node {
    fn start(gpus: u32, prepare: impl FnOnce(&mut Control)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let settings = Settings {
            profile: Some("h100-sxm".to_owned()),
            control: Some("control.json".into()),
            call_cost_us: Some(0),
            gpus: Some(gpus),
            ..Settings::default()
        };
        let cdylib = std::env::current_exe()
            .unwrap()
            .with_file_name("libforewarm_fake_nvml.so");
        let library: PathBuf = library::prepare_with(&cdylib, folder.path(), &settings, &[]).unwrap();
        let mut control = Control::default();
        prepare(&mut control);
        control.write(&folder.path().join("control.json")).unwrap();

        let fleet = Fleet::new(INTERVAL);
        let counts = Arc::<PollCounts>::default();
        let status = Status::new();
        let calls = Arc::<CallLog>::default();
        let opener: Opener = Box::new(move |in_flight: &InFlight| {
            let opened = Library::open(Some(&library), Arc::clone(&calls), in_flight)?;
            Ok(Arc::new(opened) as Arc<dyn Nvml>)
        });
        let supervision = Supervision {
            fleet: Arc::clone(&fleet),
            counts: Arc::clone(&counts),
            heartbeat: status.liveness.heartbeat("supervisor", DEADLINE),
            driver: status.readiness.condition("driver"),
            lost_access: status.liveness.fault("device-access"),
        };
        poll::start(opener, supervision).unwrap();
        let renderer = Renderer::new(
            Arc::clone(&fleet),
            AttributionView::default(),
            Arc::clone(&counts),
        );
        Self {
            folder,
            control,
            fleet,
            counts,
            renderer,
            status,
        }
    }

    fn set(&mut self, change: impl FnOnce(&mut Control)) {
        change(&mut self.control);
        self.control
            .write(&self.folder.path().join("control.json"))
            .unwrap();
    }

    fn text(&self) -> String {
        let now = Instant::now();
        String::from_utf8(self.renderer.page(now).0.body(Format::Text, Selection::All, now)).unwrap()
    }

    /// The value of a family for one GPU.
    fn value(&self, family: &str, gpu: u32) -> Option<f64> {
        let start = format!("{family}{{gpu=\"{gpu}\",");
        let text = self.text();
        let line = text.lines().find(|line| line.starts_with(&start))?;
        line.rsplit_once(' ')?.1.parse().ok()
    }

    fn ready(&self) -> String {
        self.status.readiness.verdict().body(true)
    }

    fn standing(&self, gpu: usize) -> Option<Standing> {
        let state = self.fleet.load();
        let snapshot = state.devices.get(gpu)?.load();
        Some(Standing::of(&snapshot, Instant::now(), INTERVAL))
    }

    fn wait(&self, what: &str, mut is_so: impl FnMut(&Self) -> bool) -> Duration {
        let start = Instant::now();
        while !is_so(self) {
            assert!(start.elapsed() < DEADLINE, "{what}\n{}", self.text());
            std::thread::park_timeout(Duration::from_millis(2));
        }
        start.elapsed()
    }

    fn wait_up(&self, gpus: u32) {
        self.wait("all gpus are up", |node| {
            (0..gpus).all(|gpu| node.value("gpu_up", gpu) == Some(1.0))
        });
    }
}

#[test]
fn readings_appear_with_their_ages() {
    let node = Node::start(2, |control| {
        control.gpus.entry(1).or_default().memory_used_bytes = Some(5 << 30);
    });
    node.wait_up(2);
    node.wait("memory of gpu 1", |node| {
        node.value("gpu_memory_used_bytes", 1) == Some(5_368_709_120.0)
    });
    let text = node.text();
    let age = text
        .lines()
        .find(|line| line.contains("gpu=\"1\"") && line.contains("group=\"memory\""))
        .unwrap();
    let age: f64 = age.rsplit_once(' ').unwrap().1.parse().unwrap();
    assert!(age < 1.0, "{age}");
    assert!(node.status.readiness.is_ready());
}

#[test]
fn a_driver_that_comes_late_is_found() {
    let mut node = Node::start(1, |control| control.driver_loaded = Some(false));
    node.wait("the first try is over", |node| node.status.readiness.is_ready());
    assert!(node.text().contains("forewarm_exporter_nvml_up 0\n"));
    assert_eq!(node.value("gpu_up", 0), None);
    assert!(
        matches!(&node.fleet.load().library, LibraryState::Waiting(reason) if reason.contains("driver-not-loaded"))
    );
    node.set(|control| control.driver_loaded = Some(true));
    node.wait_up(1);
    assert!(node.text().contains("forewarm_exporter_nvml_up 1\n"));
}

#[test]
fn a_reloaded_driver_is_opened_anew() {
    let mut node = Node::start(2, |_| {});
    node.wait_up(2);
    node.set(|control| control.driver_loaded = Some(false));
    node.wait("all values are gone", |node| {
        node.value("gpu_up", 0) == Some(0.0) && node.value("gpu_memory_used_bytes", 0).is_none()
    });
    node.wait("the library is closed", |node| {
        node.text().contains("forewarm_exporter_nvml_up 0\n")
    });
    node.set(|control| control.driver_loaded = Some(true));
    node.wait_up(2);
    assert!(node.counts.opens.load(Ordering::Relaxed) >= 2);
}

#[test]
fn a_blocked_gpu_is_down_while_the_others_stay_at_most_an_interval_old() {
    let mut node = Node::start(4, |_| {});
    node.wait_up(4);
    node.set(|control| control.faults = vec![Fault::on_gpu(2, Effect::Block(Block::Forever))]);
    node.wait("the blocked gpu is down", |node| {
        node.value("gpu_up", 2) == Some(0.0)
    });
    assert_eq!(node.value("gpu_memory_used_bytes", 2), None);
    assert_eq!(node.value("gpu_health_score", 2), Some(0.0));
    node.wait("its call is reported", |node| {
        node.counts.stuck.load(Ordering::Relaxed) == 1
    });
    // The fresh moment moves on for the others; a whole second passes with every look at most an interval old, plus
    // what a loaded machine adds.
    let start = Instant::now();
    let mut oldest = Duration::ZERO;
    let mut seen = std::collections::BTreeSet::new();
    node.wait("the others go on", |node| {
        for gpu in [0, 1, 3] {
            let at = node.fleet.load().devices[gpu]
                .load()
                .measured_at(Group::Memory)
                .unwrap();
            oldest = oldest.max(at.elapsed());
            seen.insert((gpu, at));
        }
        start.elapsed() > Duration::from_secs(2)
    });
    assert!(
        seen.len() >= 3 * 8,
        "ten ticks of three gpus in two seconds, not {}",
        seen.len()
    );
    assert!(oldest < 2 * INTERVAL, "{oldest:?}");
    node.set(|control| control.faults.clear());
    node.wait_up(4);
    node.wait("nothing is stuck any more", |node| {
        node.counts.stuck.load(Ordering::Relaxed) == 0
    });
}

#[test]
fn a_lost_gpu_is_withdrawn_and_comes_back() {
    let mut node = Node::start(2, |_| {});
    node.wait_up(2);
    node.set(|control| control.faults = vec![Fault::on_gpu(0, Effect::Lost)]);
    node.wait("the lost gpu is down", |node| {
        node.value("gpu_up", 0) == Some(0.0)
    });
    assert_eq!(node.value("gpu_power_watts", 0), None);
    assert!(node.text().contains("reason=\"unreachable\"} 1"));
    assert_eq!(node.value("gpu_up", 1), Some(1.0));
    node.wait("the withdrawal is counted", |node| {
        node.counts
            .withdrawn
            .iter()
            .any(|count| count.load(Ordering::Relaxed) > 0)
    });
    node.set(|control| control.faults.clear());
    node.wait_up(2);
    assert_eq!(
        node.counts.opens.load(Ordering::Relaxed),
        1,
        "a lost gpu is no reason to open the library anew"
    );
}

#[test]
fn a_gpu_that_blocks_from_the_start_does_not_keep_the_others_from_starting() {
    let mut node = Node::start(3, |control| {
        control.faults = vec![Fault::on_gpu(0, Effect::Block(Block::Forever))];
    });
    node.wait("the others are up", |node| {
        node.value("gpu_up", 1) == Some(1.0) && node.value("gpu_up", 2) == Some(1.0)
    });
    assert_eq!(node.value("gpu_up", 0), Some(0.0));
    node.set(|control| control.faults.clear());
    node.wait_up(3);
}

#[test]
fn garbage_is_absent_and_counted() {
    let mut node = Node::start(1, |_| {});
    node.wait_up(1);
    node.wait("gpm has two samples", |node| {
        node.value("gpu_sm_active_ratio", 0).is_some()
    });
    node.set(|control| control.faults = vec![Fault::on_gpu(0, Effect::Garbage(Garbage::OutOfRange))]);
    node.wait("garbage is withheld", |node| {
        [
            "gpu_busy_ratio",
            "gpu_sm_active_ratio",
            "gpu_memory_used_bytes",
            "gpu_power_watts",
        ]
        .iter()
        .all(|family| node.value(family, 0).is_none())
    });
    assert!(node.counts.rejected().any(|(_, count)| count > 0));
    assert_eq!(
        node.value("gpu_up", 0),
        Some(1.0),
        "a gpu that talks nonsense still talks"
    );
    node.set(|control| control.faults.clear());
    node.wait("values come back", |node| {
        node.value("gpu_busy_ratio", 0).is_some()
    });
}

#[test]
fn an_xid_is_counted_and_lowers_health() {
    let mut node = Node::start(2, |_| {});
    node.wait_up(2);
    node.wait("health is told", |node| {
        node.value("gpu_health_score", 1) == Some(1.0)
    });
    node.set(|control| control.gpus.entry(1).or_default().xids = vec![31, 79]);
    node.wait("xids are counted", |node| {
        let text = node.text();
        text.contains("xid=\"31\"} 1\n") && text.contains("xid=\"79\"} 1\n")
    });
    node.wait("health falls", |node| {
        node.value("gpu_health_score", 1) == Some(0.5)
    });
    assert_eq!(node.value("gpu_health_score", 0), Some(1.0));
    assert!(node.standing(1).unwrap().up);
}

#[test]
fn a_gpu_that_refuses_every_call_leaves_the_others_alone() {
    let mut node = Node::start(2, |_| {});
    node.wait_up(2);
    node.wait("both are told to answer", |node| {
        node.ready()
            .contains("[+]driver ok: 580.95.05 loaded, 2 of 2 gpus answer")
    });
    node.set(|control| control.faults = vec![Fault::on_gpu(0, Effect::Error(999))]);
    node.wait("the refusal is told", |node| {
        node.ready()
            .contains("1 of 2 gpus answer: gpu 0 refuses every call")
    });
    assert_eq!(node.value("gpu_up", 0), Some(0.0));
    assert_eq!(node.value("gpu_up", 1), Some(1.0));
    node.set(|control| control.faults.clear());
    node.wait_up(2);
    assert_eq!(
        node.counts.opens.load(Ordering::Relaxed),
        1,
        "one sick gpu is no reason to open the library anew"
    );
    assert!(node.status.liveness.verdict().passed);
}

#[test]
fn gpus_that_all_refuse_make_the_library_be_opened_anew() {
    for code in [999, 4] {
        let mut node = Node::start(2, |_| {});
        node.wait_up(2);
        node.set(|control| {
            control.faults = (0..2)
                .map(|gpu| Fault::on_gpu(gpu, Effect::Error(code)))
                .collect();
        });
        node.wait("the library is opened anew", |node| {
            node.counts.opens.load(Ordering::Relaxed) >= 2
        });
        assert_eq!(node.value("gpu_up", 1), Some(0.0));
        node.set(|control| control.faults.clear());
        node.wait_up(2);
    }
}

#[test]
fn gpus_that_cannot_be_counted_are_down_and_not_gone() {
    let mut node = Node::start(2, |_| {});
    node.wait_up(2);
    node.set(|control| control.driver_loaded = Some(false));
    node.wait("the driver is told to be lost", |node| {
        node.ready().contains("[!]driver degraded: lost:")
    });
    node.wait("both are down", |node| {
        node.value("gpu_up", 0) == Some(0.0) && node.value("gpu_up", 1) == Some(0.0)
    });
    assert!(node.status.readiness.is_ready(), "and can still be scraped");
    node.set(|control| control.driver_loaded = Some(true));
    node.wait_up(2);
}
