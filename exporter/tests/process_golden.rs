//! The whole text of a node under virtual time: names, labels, units and order are a contract.
//!
//! To accept a wanted change: `INSTA_UPDATE=always cargo test -p forewarm-exporter --test process_golden`, then read
//! the difference and note it in the changelog.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test binary: helpers fail the test they serve"
)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use forewarm_exporter::attribution::device_id::DeviceRef;
use forewarm_exporter::attribution::{Allocation, Attribution, AttributionView};
use forewarm_exporter::poll::PollCounts;
use forewarm_exporter::poll::collect::{Collector, Verdict};
use forewarm_exporter::render::Renderer;
use forewarm_exporter::render::page::{Page, Selection};
use forewarm_exporter::render::text::Format;
use forewarm_exporter::snapshot::{Fleet, FleetState, Identity, LibraryState};
use forewarm_fake_nvml::control::{Control, EccErrors, GpuControl, NvlinkErrors, RemappedRows, Throttle};
use forewarm_fake_nvml::library;
use forewarm_fake_nvml::settings::Settings;
use forewarm_nvml::{Device, InFlight, Library, Nvml as _};
use forewarm_signals::label::{Allocator, Sharing};

const INTERVAL: Duration = Duration::from_secs(1);
const DEADLINE: Duration = Duration::from_secs(20);
/// A moment of virtual time.
const EPOCH_MS: u64 = 1_700_000_000_000;

struct Golden {
    device: Box<dyn Device>,
    folder: tempfile::TempDir,
    control: Control,
    collector: Collector,
    fleet: Arc<Fleet>,
    renderer: Renderer,
    now: Instant,
    ticks: u64,
}

impl Golden {
    fn new(profile: &str, driver: &str, gpu: GpuControl) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let settings = Settings {
            profile: Some(profile.to_owned()),
            driver: Some(driver.to_owned()),
            control: Some("control.json".into()),
            call_cost_us: Some(0),
            gpus: Some(1),
            virtual_time: Some(true),
            ..Settings::default()
        };
        let cdylib = std::env::current_exe()
            .unwrap()
            .with_file_name("libforewarm_fake_nvml.so");
        let path = library::prepare_with(&cdylib, folder.path(), &settings, &[]).unwrap();
        let control = Control {
            now_ms: Some(EPOCH_MS),
            gpus: BTreeMap::from([(0, gpu)]),
            ..Control::default()
        };
        control.write(&folder.path().join("control.json")).unwrap();
        let library = Library::open(Some(&path), Arc::default(), &InFlight::default()).unwrap();
        let mut device = library.device(0, Arc::default()).unwrap();
        let facts = device.facts().unwrap();
        let uuid = facts.uuid.clone();
        let identity = Arc::new(Identity {
            facts,
            driver_version: library.driver_version().unwrap(),
        });
        let fleet = Fleet::new(INTERVAL);
        let library = LibraryState::Open {
            driver_version: driver.to_owned(),
        };
        fleet.store(FleetState {
            library,
            devices: vec![fleet.slot(0)],
        });
        let counts = Arc::<PollCounts>::default();
        counts.opens.store(1, std::sync::atomic::Ordering::Relaxed);
        Self {
            device,
            folder,
            control,
            collector: Collector::new(0, identity, INTERVAL, Arc::clone(&counts)),
            renderer: Renderer::new(Arc::clone(&fleet), AttributionView::of(held(&uuid)), counts),
            fleet,
            now: Instant::now(),
            ticks: 0,
        }
    }

    /// One tick, one second of virtual time after the one before.
    fn tick(&mut self) {
        // The used memory marks the tick, to see when the stand-in has read its control file.
        let used = (1 << 30) + (self.ticks << 20);
        self.control.now_ms = Some(EPOCH_MS + self.ticks * 1000);
        self.control.gpus.get_mut(&0).unwrap().memory_used_bytes = Some(used);
        self.control
            .write(&self.folder.path().join("control.json"))
            .unwrap();
        let start = Instant::now();
        while self.device.memory().unwrap().used.get() != used {
            assert!(start.elapsed() < DEADLINE, "the control file is read");
            std::thread::yield_now();
        }
        self.now += INTERVAL;
        let now = self.now;
        let (snapshot, verdict) = self.collector.tick(self.device.as_mut(), None, || now);
        assert_eq!(verdict, Verdict::Continue);
        self.fleet.load().devices[0].store(snapshot);
        self.ticks += 1;
    }

    fn page(&self) -> Arc<Page> {
        self.renderer.page(self.answered()).0
    }

    fn answered(&self) -> Instant {
        self.now + Duration::from_millis(250)
    }

    fn text(&self, format: Format) -> String {
        let body = self.page().body(format, Selection::All, self.answered());
        // The program's own version changes without the contract.
        String::from_utf8(body)
            .unwrap()
            .replace(env!("CARGO_PKG_VERSION"), "VERSION")
    }
}

fn held(uuid: &str) -> Attribution {
    let allocation = Allocation {
        namespace: "serving".to_owned(),
        pod: "llm-0".to_owned(),
        container: "server".to_owned(),
        pod_uid: Some("11111111-2222-3333-4444-555555555555".to_owned()),
        ready: Some(true),
        resource: "nvidia.com/gpu".to_owned(),
        device_id: uuid.to_owned(),
        device: Some(DeviceRef::Gpu(uuid.to_owned())),
        replica: None,
        sharing: Sharing::None,
        allocator: Allocator::DevicePlugin,
    };
    Attribution {
        allocations: vec![allocation],
        handed_out: Some(BTreeMap::from([("nvidia.com/gpu".to_owned(), 1)])),
        allocatable: Some(BTreeMap::from([("nvidia.com/gpu".to_owned(), 1)])),
        idle: Some(BTreeMap::from([("nvidia.com/gpu".to_owned(), 0)])),
        answered_at: Some(Instant::now()),
        ..Attribution::default()
    }
}

fn busy_h100() -> GpuControl {
    GpuControl {
        busy: Some(0.75),
        sm_active: Some(0.5),
        sm_occupancy: Some(0.25),
        tensor: Some(0.3),
        dram: Some(0.4),
        nvlink_tx_bytes_per_second: Some(1.8e10),
        nvlink_rx_bytes_per_second: Some(0.9e10),
        pcie_tx_bytes_per_second: Some(2e9),
        pcie_rx_bytes_per_second: Some(1e9),
        power_watts: Some(512.0),
        temperature_celsius: Some(61.0),
        throttle: vec![Throttle::SwPowerCap],
        ecc: Some(EccErrors {
            corrected: 12,
            ..EccErrors::default()
        }),
        remapped_rows: Some(RemappedRows {
            correctable: 1,
            pending: true,
            ..RemappedRows::default()
        }),
        nvlink_errors: Some(NvlinkErrors {
            replay: 3,
            ..NvlinkErrors::default()
        }),
        ..GpuControl::default()
    }
}

#[test]
fn an_h100_that_one_pod_holds() {
    let mut golden = Golden::new("h100-sxm", "580.95.05", busy_h100());
    golden.tick();
    golden.tick();
    insta::assert_snapshot!("h100_text", golden.text(Format::Text));
    insta::assert_snapshot!("h100_openmetrics", golden.text(Format::OpenMetrics));
}

#[test]
fn the_detail_of_an_h100() {
    let mut golden = Golden::new("h100-sxm", "580.95.05", busy_h100());
    golden.tick();
    let now = golden.answered();
    let body = golden
        .renderer
        .detail(now)
        .body(Format::Text, Selection::All, now);
    insta::assert_snapshot!("h100_detail", String::from_utf8(body).unwrap());
}

#[test]
fn a_t4_with_an_old_driver() {
    let gpu = GpuControl {
        busy: Some(1.7),
        power_watts: Some(66.0),
        ..GpuControl::default()
    };
    let mut golden = Golden::new("t4", "535.183.06", gpu);
    golden.tick();
    golden.tick();
    insta::assert_snapshot!("t4_text", golden.text(Format::Text));
}

#[test]
fn a_gpu_stays_within_its_budget_of_series() {
    let mut golden = Golden::new("h100-sxm", "580.95.05", busy_h100());
    golden.tick();
    golden.tick();
    let text = golden.text(Format::Text);
    let own = |line: &&str| {
        line.starts_with("gpu_") && !line.starts_with("gpu_pod_") && !line.starts_with("gpu_node_")
    };
    let series = text.lines().filter(own).count();
    assert!(series <= 80, "{series} series a GPU");
    let pod = text.lines().filter(|line| line.starts_with("gpu_pod_")).count();
    assert!(pod <= 12, "{pod} series a container and device");
}

#[test]
fn values_vanish_and_ages_stay_when_a_gpu_falls_silent() {
    let mut golden = Golden::new("h100-sxm", "580.95.05", busy_h100());
    golden.tick();
    golden.tick();
    golden.now += 4 * INTERVAL;
    let text = golden.text(Format::Text);
    assert!(
        text.contains("gpu_up{")
            && !text.contains("gpu_busy_ratio{")
            && !text.contains("gpu_pod_busy_ratio{")
    );
    assert!(text.contains("group=\"memory\"} 4.25\n"), "{text}");
    assert!(
        text.contains("gpu_pod_allocation{"),
        "the pod still holds the device"
    );
    assert!(!text.contains("gpu_pod_sample_age_seconds{"));
}

#[test]
fn versions_of_the_fleet_grow_with_each_store() {
    let version = Arc::new(AtomicU64::new(0));
    let slot = forewarm_exporter::snapshot::DeviceSlot::new(0, Arc::clone(&version));
    slot.store(forewarm_exporter::snapshot::DeviceSnapshot::unseen(0));
    assert!(slot.note_xid(79, Instant::now()));
    assert_eq!(version.load(std::sync::atomic::Ordering::Relaxed), 2);
}
