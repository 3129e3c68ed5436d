//! The real implementation of the traits against the stand-in for `libnvidia-ml.so.1`, loaded as a client loads it.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test binary: helpers fail the test they serve"
)]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forewarm_fake_nvml::control::{Block, Control, EccErrors, Effect, Fault, Garbage, GpuControl, Throttle};
use forewarm_fake_nvml::settings::Settings;
use forewarm_fake_nvml::{gpu_uuid, library};
use forewarm_nvml::{
    Call, CallLog, ClockDomain, Code, Device, EventKind, FabricState, Field, FieldQuery, Gap, InFlight,
    Library, Number, Nvml, Rejection, Scope,
};

const DEADLINE: Duration = Duration::from_secs(20);

struct Fake {
    folder: tempfile::TempDir,
    library: PathBuf,
    control: Control,
    log: Arc<CallLog>,
}

impl Fake {
    fn new(profile: &str, driver: &str) -> Self {
        Self::without(profile, driver, &[])
    }

    fn without(profile: &str, driver: &str, missing: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let settings = Settings {
            profile: Some(profile.to_owned()),
            driver: Some(driver.to_owned()),
            control: Some("control.json".into()),
            call_cost_us: Some(0),
            gpus: Some(2),
            ..Settings::default()
        };
        let cdylib = std::env::current_exe()
            .unwrap()
            .with_file_name("libforewarm_fake_nvml.so");
        let library = library::prepare_with(&cdylib, folder.path(), &settings, missing).unwrap();
        Self {
            folder,
            library,
            control: Control::default(),
            log: Arc::default(),
        }
    }

    fn h100() -> Self {
        Self::new("h100-sxm", "580.95.05")
    }

    fn set(&mut self, change: impl FnOnce(&mut Control)) {
        change(&mut self.control);
        self.control
            .write(&self.folder.path().join("control.json"))
            .unwrap();
    }

    fn gpu(&mut self, index: u32, change: impl FnOnce(&mut GpuControl)) {
        self.set(|control| change(control.gpus.entry(index).or_default()));
    }

    fn open(&self) -> Library {
        Library::open(Some(&self.library), Arc::clone(&self.log), &InFlight::default()).unwrap()
    }
}

fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ask() {
            return value;
        }
        assert!(start.elapsed() < DEADLINE, "{what}");
        std::thread::yield_now();
    }
}

fn device(library: &Library, index: u32) -> Box<dyn Device> {
    library.device(index, Arc::default()).unwrap()
}

fn field(device: &mut dyn Device, field: Field, scope: Scope) -> Result<Number, Gap> {
    let mut queries = [FieldQuery::new(field, scope)];
    device.fields(&mut queries)?;
    queries[0].answer
}

#[test]
fn facts_of_a_device_are_told() {
    let fake = Fake::h100();
    let library = fake.open();
    assert_eq!(library.driver_version().unwrap(), "580.95.05");
    assert_eq!(library.device_count(), Ok(2));
    let facts = device(&library, 1).facts().unwrap();
    assert_eq!(facts.uuid, gpu_uuid("forewarm", 1));
    assert_eq!(
        (facts.architecture, facts.compute_capability, facts.minor),
        ("hopper", Some((9, 0)), Some(1))
    );
    assert!(facts.model.contains("H100"), "{}", facts.model);
}

#[test]
fn readings_follow_the_device_in_base_units() {
    let mut fake = Fake::h100();
    fake.gpu(0, |gpu| {
        gpu.busy = Some(0.25);
        gpu.memory_used_bytes = Some(3 << 30);
        gpu.power_watts = Some(321.5);
        gpu.temperature_celsius = Some(61.0);
        gpu.sm_clock_mhz = Some(1755);
    });
    let library = fake.open();
    let mut gpu = device(&library, 0);
    let busy = wait_for("utilisation shows the load", || {
        gpu.utilization()
            .unwrap()
            .busy
            .ok()
            .filter(|busy| busy.get() > 0.0)
    });
    assert!((busy.get() - 0.25).abs() < 0.02, "{busy:?}");
    let memory = gpu.memory().unwrap();
    assert_eq!(memory.used.get(), 3 << 30);
    assert!(memory.reserved.is_some());
    assert!((gpu.temperature().unwrap().get() - 61.0).abs() < 1e-9);
    assert!((gpu.clock(ClockDomain::Sm).unwrap().get() - 1.755e9).abs() < 1.0);
    let power = field(gpu.as_mut(), Field::POWER_INSTANT, Scope::Gpu)
        .unwrap()
        .milliwatts()
        .unwrap();
    assert!((power.get() - 321.5).abs() < 0.1, "{power:?}");
    let fabric = gpu.fabric().unwrap();
    assert_eq!(fabric.state, FabricState::Completed);
    assert!(!gpu.remapped_rows().unwrap().pending);
}

#[test]
fn one_batch_answers_each_scope_by_itself() {
    let mut fake = Fake::h100();
    fake.gpu(0, |gpu| gpu.nvlink_tx_bytes_per_second = Some(9e9));
    let library = fake.open();
    let mut gpu = device(&library, 0);
    let mut queries = [
        FieldQuery::new(Field::NVLINK_TX_KIB, Scope::AllLinks),
        FieldQuery::new(Field::NVLINK_TX_KIB, Scope::Link(3)),
        FieldQuery::new(Field::NVLINK_STATE, Scope::Link(3)),
        FieldQuery::new(Field::NVLINK_TX_KIB, Scope::Link(40)),
    ];
    let (sum, link) = wait_for("traffic counts", || {
        gpu.fields(&mut queries).unwrap();
        let [sum, link, ..] = &queries;
        let link = link.answer.unwrap().unsigned().unwrap();
        (link > 10_000).then(|| (sum.answer.unwrap().unsigned().unwrap(), link))
    });
    assert!(
        (17..=19).contains(&(sum / link)),
        "18 links share the traffic: {sum} {link}"
    );
    assert_eq!(queries[2].answer.unwrap().unsigned(), Ok(1));
    assert!(queries[3].answer.is_err(), "there is no link 40");
}

#[test]
fn throttle_times_are_read_under_both_numberings() {
    for driver in ["570.86.15", "580.95.05"] {
        let mut fake = Fake::new("h100-sxm", driver);
        fake.gpu(0, |gpu| gpu.throttle = vec![Throttle::HwThermal]);
        let library = fake.open();
        let mut gpu = device(&library, 0);
        let held = wait_for("time held by heat grows", || {
            let held = field(gpu.as_mut(), Field::HELD_BY_HW_THERMAL, Scope::Gpu)
                .unwrap()
                .unsigned()
                .unwrap();
            (held > 0).then_some(held)
        });
        let brake = field(gpu.as_mut(), Field::HELD_BY_POWER_BRAKE, Scope::Gpu)
            .unwrap()
            .unsigned()
            .unwrap();
        assert!(held > brake, "{driver}: {held} {brake}");
        assert!(gpu.clock_events().unwrap().is_hardware_slowdown(), "{driver}");
    }
}

#[test]
fn gpm_needs_two_samples_and_reuses_its_buffers() {
    let mut fake = Fake::h100();
    fake.gpu(0, |gpu| {
        gpu.busy = Some(1.0);
        gpu.sm_active = Some(0.6);
    });
    let library = fake.open();
    let mut gpu = device(&library, 0);
    assert_eq!(gpu.gpm(), Err(Gap::NotYet));
    let share = wait_for("sm activity shows the load", || {
        let gpm = gpu.gpm().ok()?;
        gpm.sm_active.ok().filter(|share| share.get() > 0.5)
    });
    assert!((share.get() - 0.6).abs() < 0.05, "{share:?}");
    let allocations = fake
        .log
        .figures()
        .iter()
        .find(|figures| figures.call == Call::GpmSampleAlloc)
        .unwrap()
        .count;
    assert_eq!(allocations, 2);
}

#[test]
fn what_an_old_card_lacks_is_unsupported_and_not_failed() {
    let fake = Fake::new("t4", "535.183.06");
    let library = fake.open();
    let mut gpu = device(&library, 0);
    assert_eq!(gpu.gpm(), Err(Gap::Unsupported));
    assert_eq!(
        gpu.fabric().map(|fabric| fabric.state),
        Ok(FabricState::NotSupported)
    );
    assert_eq!(gpu.remapped_rows(), Err(Gap::Unsupported));
    assert_eq!(
        field(gpu.as_mut(), Field::NVLINK_TX_KIB, Scope::AllLinks),
        Err(Gap::Unsupported)
    );
    assert_eq!(
        field(gpu.as_mut(), Field::RECOVERY_ACTION, Scope::Gpu),
        Err(Gap::Unsupported)
    );
    assert!(gpu.memory().is_ok() && gpu.utilization().is_ok() && gpu.temperature().is_ok());
    assert_eq!(fake.log.failures(), []);
}

#[test]
fn garbage_never_becomes_a_value() {
    for (garbage, reasons) in [
        (
            Garbage::OutOfRange,
            &[Rejection::AboveFull, Rejection::Implausible, Rejection::Sentinel][..],
        ),
        (
            Garbage::Sentinel,
            &[Rejection::Sentinel, Rejection::NotFinite, Rejection::Implausible][..],
        ),
    ] {
        let mut fake = Fake::h100();
        let library = fake.open();
        let mut gpu = device(&library, 0);
        assert_eq!(gpu.gpm(), Err(Gap::NotYet));
        fake.set(|control| control.faults = vec![Fault::on_gpu(0, Effect::Garbage(garbage))]);
        wait_for("garbage arrives", || gpu.memory().is_err().then_some(()));
        let rejected = |gap: Gap, of: &str| match gap {
            Gap::Rejected(reason) => assert!(reasons.contains(&reason), "{of}: {reason:?} for {garbage:?}"),
            other => panic!("{of}: {other} for {garbage:?}"),
        };
        rejected(gpu.memory().unwrap_err(), "memory");
        let rates = gpu.utilization().unwrap();
        rejected(rates.busy.unwrap_err(), "busy");
        rejected(rates.memory_bandwidth.unwrap_err(), "memory bandwidth");
        let gpm = gpu.gpm().unwrap();
        rejected(gpm.sm_active.unwrap_err(), "sm active");
        rejected(gpm.dram_active.unwrap_err(), "dram active");
        rejected(gpu.temperature().unwrap_err(), "temperature");
        rejected(gpu.clock(ClockDomain::Sm).unwrap_err(), "clock");
        let power = field(gpu.as_mut(), Field::POWER_INSTANT, Scope::Gpu).and_then(Number::milliwatts);
        rejected(power.unwrap_err(), "power");
    }
}

#[test]
fn a_lost_gpu_says_so_and_leaves_the_other_alone() {
    let mut fake = Fake::h100();
    let library = fake.open();
    let (mut lost, mut good) = (device(&library, 0), device(&library, 1));
    fake.set(|control| control.faults = vec![Fault::on_gpu(0, Effect::Lost)]);
    let gap = wait_for("the loss shows", || lost.memory().err());
    assert_eq!(gap.code(), Some(Code::GPU_IS_LOST));
    assert_eq!(lost.utilization().unwrap_err().code(), Some(Code::GPU_IS_LOST));
    assert!(good.memory().is_ok());
    let failures = fake.log.failures();
    assert!(
        failures
            .iter()
            .any(|(call, code, _)| (*call, *code) == (Call::MemoryInfo, Code::GPU_IS_LOST))
    );
}

#[test]
fn a_blocked_call_can_be_named_while_it_blocks() {
    let mut fake = Fake::h100();
    let library = fake.open();
    let in_flight = Arc::<InFlight>::default();
    let mut gpu = library.device(0, Arc::clone(&in_flight)).unwrap();
    let call = "nvmlDeviceGetUtilizationRates";
    fake.set(|control| control.faults = vec![Fault::on_call(0, call, Effect::Block(Block::Forever))]);
    let blocked = std::thread::spawn(move || {
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            if gpu.utilization().is_err() {
                break;
            }
            // The fault has come and gone once a call took long.
            if start.elapsed() > Duration::from_millis(50) && gpu.memory().is_ok() {
                std::thread::yield_now();
            }
        }
    });
    let (named, _) = wait_for("the call is seen blocking", || {
        in_flight
            .current(Instant::now())
            .filter(|(call, age)| *call == Call::UtilizationRates && *age > Duration::from_millis(300))
    });
    assert_eq!(named.symbol(), call);
    fake.set(|control| control.faults = vec![Fault::on_gpu(0, Effect::Error(999))]);
    blocked.join().unwrap();
}

#[test]
fn an_xid_names_its_device() {
    let mut fake = Fake::h100();
    let library = fake.open();
    let mut devices = [device(&library, 0), device(&library, 1)];
    for gpu in &mut devices {
        gpu.subscribe().unwrap();
    }
    assert_eq!(library.wait_event(Duration::from_millis(1)), Ok(None));
    fake.gpu(1, |gpu| gpu.xids = vec![79]);
    let event = wait_for("the xid arrives", || {
        library.wait_event(Duration::from_millis(100)).unwrap()
    });
    assert_eq!(
        (event.device, event.kind, event.data),
        (devices[1].key(), EventKind::Xid, 79)
    );
}

#[test]
fn a_library_without_its_releasing_symbols_is_dropped_without_a_panic() {
    let missing = ["nvmlShutdown", "nvmlEventSetFree", "nvmlGpmSampleFree"];
    let fake = Fake::without("h100-sxm", "580.95.05", &missing);
    let library = fake.open();
    let mut gpu = device(&library, 0);
    assert_eq!(gpu.gpm(), Err(Gap::NotYet));
    drop(library);
    assert!(gpu.memory().is_ok(), "a device keeps its library open");
    drop(gpu);
}

#[test]
fn missing_symbols_cost_only_their_own_reading() {
    let missing = [
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetTemperatureV",
        "nvmlGpmMetricsGet",
    ];
    let fake = Fake::without("h100-sxm", "550.54.15", &missing);
    let library = fake.open();
    let mut gpu = device(&library, 0);
    assert!(gpu.temperature().is_ok(), "the older call steps in");
    assert!(gpu.utilization().is_ok());
    assert_eq!(gpu.gpm(), Err(Gap::NotYet));
    assert_eq!(gpu.gpm(), Err(Gap::Unsupported));
}

#[test]
fn after_a_driver_reload_a_reopened_library_works() {
    let mut fake = Fake::h100();
    let library = fake.open();
    let mut gpu = device(&library, 0);
    assert!(gpu.memory().is_ok());
    fake.set(|control| control.driver_loaded = Some(false));
    let gap = wait_for("the driver is gone", || gpu.memory().err());
    assert!(gap.code().unwrap().asks_for_reopening(), "{gap}");
    fake.set(|control| control.driver_loaded = Some(true));
    let code = wait_for("the driver is back", || {
        let code = gpu.memory().unwrap_err().code().unwrap();
        (code == Code::UNINITIALIZED).then_some(code)
    });
    assert!(code.asks_for_reopening());
    drop((gpu, library));
    fake.set(|control| control.driver_loaded = Some(false));
    let refused = Library::open(Some(&fake.library), Arc::clone(&fake.log), &InFlight::default());
    assert_eq!(refused.err().unwrap().gap.code(), Some(Code::DRIVER_NOT_LOADED));
    fake.set(|control| control.driver_loaded = Some(true));
    let library = fake.open();
    assert!(device(&library, 0).memory().is_ok());
}

#[test]
fn ecc_totals_are_counters() {
    let mut fake = Fake::h100();
    fake.gpu(0, |gpu| {
        gpu.ecc = Some(EccErrors {
            corrected: 12,
            uncorrected: 3,
            ..EccErrors::default()
        });
    });
    let library = fake.open();
    let mut gpu = device(&library, 0);
    let corrected = wait_for("errors show", || {
        let count = field(gpu.as_mut(), Field::ECC_CORRECTED_AGGREGATE, Scope::Gpu)
            .unwrap()
            .unsigned()
            .unwrap();
        (count > 0).then_some(count)
    });
    assert_eq!(corrected, 12);
    let uncorrected = field(gpu.as_mut(), Field::ECC_UNCORRECTED_AGGREGATE, Scope::Gpu)
        .unwrap()
        .unsigned();
    assert_eq!(uncorrected, Ok(3));
}
