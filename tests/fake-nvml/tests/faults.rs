//! Faults and driver levels, each after the right value was seen.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, outside #[test] functions"
)]
#![allow(
    unsafe_code,
    reason = "field scopes and missing symbols need raw calls; pointers are to locals"
)]

mod support;

use std::ffi::OsStr;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forewarm_fake_nvml::control::{Block, Control, Effect, Fault, Garbage, GpuControl, Throttle};
use forewarm_fake_nvml::settings::Settings;
use forewarm_fake_nvml::{driver_level, elf, library};
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::gpm_metrics_get;
use nvml_wrapper::structs::device::FieldId;
use proptest::prelude::*;
use support::{Fake, cdylib, wait_until};

const UTILIZATION: &str = "nvmlDeviceGetUtilizationRates";

fn busy(nvml: &Nvml, index: u32) -> Result<u32, NvmlError> {
    nvml.device_by_index(index)?
        .utilization_rates()
        .map(|rates| rates.gpu)
}

#[test]
fn a_lost_gpu_is_lost_to_every_call_and_the_others_go_on() {
    let mut fake = Fake::h100();
    fake.set(|control| {
        control.gpu(0).busy = Some(0.1);
        control.gpu(1).busy = Some(0.2);
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(1).unwrap();
    assert_eq!(device.utilization_rates().unwrap().gpu, 20);

    fake.set(|control| control.faults = vec![Fault::on_gpu(1, Effect::Lost)]);
    wait_until("lost", || {
        matches!(device.utilization_rates(), Err(NvmlError::GpuLost))
    });
    assert!(matches!(device.memory_info(), Err(NvmlError::GpuLost)));
    assert!(matches!(device.uuid(), Err(NvmlError::GpuLost)));
    assert!(matches!(
        nvml.device_by_index(1).map(drop),
        Err(NvmlError::GpuLost)
    ));
    assert_eq!(busy(&nvml, 0).unwrap(), 10);
    assert_eq!(nvml.device_count().unwrap(), 8);

    fake.set(|control| control.faults.clear());
    wait_until("back", || busy(&nvml, 1).is_ok_and(|busy| busy == 20));
}

#[test]
fn a_call_that_blocks_for_ever_holds_up_nobody_else_and_can_be_released() {
    let mut fake = Fake::h100();
    fake.set(|control| control.gpu(2).busy = Some(0.5));
    let nvml = fake.nvml();
    assert_eq!(busy(&nvml, 2).unwrap(), 50);
    let forever = Fault::on_call(2, UTILIZATION, Effect::Block(Block::Forever));
    fake.set(|control| control.faults = vec![forever]);

    let begun = Instant::now();
    let (entered_ms, released) = (AtomicU64::new(0), AtomicBool::new(false));
    let now_ms = || u64::try_from(begun.elapsed().as_millis()).unwrap();
    std::thread::scope(|scope| {
        let stuck = scope.spawn(|| {
            while !released.load(Ordering::SeqCst) {
                entered_ms.store(now_ms(), Ordering::SeqCst);
                assert_eq!(busy(&nvml, 2).unwrap(), 50);
            }
        });
        wait_until("the call is blocked", || {
            now_ms() > entered_ms.load(Ordering::SeqCst) + 300
        });
        let entered = entered_ms.load(Ordering::SeqCst);
        for _ in 0..200 {
            assert_eq!(busy(&nvml, 0).unwrap(), 0);
            nvml.device_by_index(2).unwrap().memory_info().unwrap();
        }
        assert!(!stuck.is_finished());
        assert_eq!(entered_ms.load(Ordering::SeqCst), entered, "still the same call");
        released.store(true, Ordering::SeqCst);
        fake.set(|control| control.faults.clear());
    });
}

#[test]
fn a_call_can_block_for_a_time() {
    let mut fake = Fake::h100();
    fake.set(|control| {
        control.gpu(0).busy = Some(0.3);
        control.faults = vec![Fault::on_call(0, UTILIZATION, Effect::Block(Block::Ms(120)))];
    });
    let nvml = fake.nvml();
    let started = Instant::now();
    assert_eq!(busy(&nvml, 0).unwrap(), 30);
    assert!(started.elapsed() >= Duration::from_millis(120));
}

#[test]
fn a_call_can_answer_any_code() {
    let mut fake = Fake::h100();
    let nvml_of = |fake: &Fake| fake.nvml();
    fake.set(|control| {
        control.faults = vec![
            Fault::on_call(0, "nvmlDeviceGetPowerUsage", Effect::Error(4)),
            Fault::on_call(0, "nvmlDeviceGetTotalEnergyConsumption", Effect::NotSupported),
            Fault::on_call(0, "nvmlDeviceGetClockInfo", Effect::Error(27)),
            Fault {
                calls: vec!["nvmlDeviceGetCount_v2".into()],
                effect: Effect::Error(999),
                ..Fault::default()
            },
        ];
    });
    let nvml = nvml_of(&fake);
    let device = nvml.device_by_index(0).unwrap();
    assert!(matches!(device.power_usage(), Err(NvmlError::NoPermission)));
    assert!(matches!(
        device.total_energy_consumption(),
        Err(NvmlError::NotSupported)
    ));
    let clock = device.clock_info(nvml_wrapper::enum_wrappers::device::Clock::SM);
    assert!(
        matches!(clock, Err(NvmlError::UnexpectedVariant(27))),
        "{clock:?}"
    );
    assert!(matches!(nvml.device_count(), Err(NvmlError::Unknown)));
    assert!(nvml.device_by_index(1).unwrap().power_usage().is_ok());
}

#[test]
fn garbage_is_out_of_range_or_a_sentinel() {
    let mut fake = Fake::h100();
    let of = |garbage| vec![Fault::on_gpu(0, Effect::Garbage(garbage))];
    fake.set(|control| control.faults = of(Garbage::OutOfRange));
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let (first, second) = (device.gpm_sample().unwrap(), device.gpm_sample().unwrap());
    let sm = || {
        gpm_metrics_get(&nvml, &first, &second, &[GpmMetricId::SmUtil])
            .unwrap()
            .remove(0)
            .unwrap()
            .value
    };
    assert_eq!(device.utilization_rates().unwrap().gpu, 129);
    let memory = device.memory_info().unwrap();
    assert!(memory.used > memory.total);
    assert!((sm() - 129.0).abs() < 1e-9);
    assert!(device.power_usage().unwrap() > 800_000_000);

    fake.set(|control| control.faults = of(Garbage::Sentinel));
    wait_until("sentinels", || {
        device.utilization_rates().unwrap().gpu == u32::MAX
    });
    assert_eq!(device.memory_info().unwrap().used, u64::MAX);
    assert!(sm().is_nan());
    assert_eq!(
        nvml.device_by_index(1).unwrap().utilization_rates().unwrap().gpu,
        0
    );
}

#[test]
fn a_driver_can_come_late_and_go_away() {
    let mut fake = Fake::h100();
    let try_init = |fake: &Fake| Nvml::builder().lib_path(fake.library.as_os_str()).init();
    fake.set(|control| control.driver_loaded = Some(false));
    assert!(matches!(try_init(&fake), Err(NvmlError::DriverNotLoaded)));
    fake.set(|control| control.driver_loaded = Some(true));
    let nvml = try_init(&fake).unwrap();
    assert_eq!(busy(&nvml, 0).unwrap(), 0);

    fake.set(|control| control.driver_loaded = Some(false));
    wait_until("the driver is gone", || {
        matches!(busy(&nvml, 0), Err(NvmlError::Unknown))
    });
    fake.set(|control| control.driver_loaded = Some(true));
    // As with the real library: back, but not for a client that held the old one.
    wait_until("a new driver is there", || {
        matches!(busy(&nvml, 0), Err(NvmlError::Uninitialized))
    });
    drop(nvml);
    let nvml = try_init(&fake).unwrap();
    assert_eq!(busy(&nvml, 0).unwrap(), 0);
    assert!(
        nvml.device_by_index(0)
            .unwrap()
            .total_energy_consumption()
            .unwrap()
            < 70_000,
        "counters begin with the driver"
    );
}

#[test]
fn init_can_fail_with_any_code() {
    let mut fake = Fake::h100();
    fake.set(|control| control.init_error = Some(18));
    let init = Nvml::builder().lib_path(fake.library.as_os_str()).init();
    assert!(matches!(init, Err(NvmlError::LibRmVersionMismatch)), "{init:?}");
    fake.set(|control| control.init_error = None);
    fake.nvml();
}

#[test]
fn a_symbol_can_be_missing() {
    let fake = Fake::without(Settings::default(), &["nvmlDeviceGetPowerUsage"]);
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    assert!(matches!(
        device.power_usage(),
        Err(NvmlError::FailedToLoadSymbol(_))
    ));
    assert!(device.utilization_rates().is_ok());
    assert!(device.enforced_power_limit().is_ok());
}

#[test]
fn an_old_driver_lacks_what_came_later() {
    let old = Fake::driver("535.183.06");
    let new = Fake::driver("580.95.05");
    let (old, new) = (old.nvml(), new.nvml());
    for (nvml, has) in [(&old, false), (&new, true)] {
        assert_eq!(nvml.lib().nvmlDeviceGetProcessesUtilizationInfo.is_ok(), has);
        assert_eq!(nvml.lib().nvmlDeviceGetGpuFabricInfoV.is_ok(), has);
        assert_eq!(nvml.lib().nvmlGpmQueryIfStreamingEnabled.is_ok(), has);
        assert!(nvml.lib().nvmlGpmSampleGet.is_ok());
        assert!(nvml.lib().nvmlDeviceGetMemoryInfo_v2.is_ok());
    }
}

#[test]
fn every_symbol_of_the_level_table_is_one_that_the_library_has() {
    let oldest = driver_level::Driver::parse("390.10").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let built = cdylib(folder.path());
    let exported = elf::exported_symbols(&std::fs::read(&built).unwrap()).unwrap();
    let absent = driver_level::absent_symbols(&oldest);
    assert!(absent.len() > 20);
    for name in &absent {
        assert!(exported.contains(*name), "{name}");
    }
    let path = library::prepare(&built, folder.path(), "390.10", &[]).unwrap();
    let left = elf::exported_symbols(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(left.len() + absent.len(), exported.len());
    assert!(library::prepare(&built, folder.path(), "390.10", &["nvmlNoSuchCall"]).is_err());
}

/// Value of field `id` asked raw: without the wrapper's renumbering.
fn raw_field(nvml: &Nvml, id: u32) -> Result<u64, u32> {
    use nvml_wrapper_sys::bindings::nvmlFieldValue_t;
    // SAFETY: plain C data.
    let mut value: nvmlFieldValue_t = unsafe { std::mem::zeroed() };
    value.fieldId = id;
    // SAFETY: one entry; the handle is used while `nvml` lives.
    let code = unsafe {
        nvml.lib()
            .nvmlDeviceGetFieldValues(nvml.device_by_index(0).unwrap().handle(), 1, &raw mut value)
    };
    assert_eq!(code, 0);
    // SAFETY: the fields asked for are 64 bits wide.
    if value.nvmlReturn == 0 {
        Ok(unsafe { value.value.ullVal })
    } else {
        Err(value.nvmlReturn)
    }
}

#[test]
fn field_ids_that_moved_answer_by_the_drivers_numbering_only() {
    for (driver, answers, silent) in [
        ("580.65.06", 251, 269),
        ("580.95.05", 269, 251),
        ("570.86.15", 253, 271),
    ] {
        let mut fake = Fake::new(Settings {
            driver: Some(driver.into()),
            virtual_time: Some(true),
            ..Settings::default()
        });
        fake.set(|control| {
            control.now_ms = Some(1_000);
            control.gpu(0).throttle = vec![Throttle::SwThermal, Throttle::HwPowerBrake];
        });
        let nvml = fake.nvml();
        fake.set(|control| control.now_ms = Some(3_000));
        assert_eq!(raw_field(&nvml, answers), Ok(2_000_000_000), "{driver}");
        assert_eq!(raw_field(&nvml, silent), Err(3), "{driver}");
        // The wrapper knows the trap: one constant reads the same field on every driver.
        let sw_thermal =
            nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN;
        let field = nvml
            .device_by_index(0)
            .unwrap()
            .field_values_for(&[FieldId(sw_thermal)])
            .unwrap()
            .remove(0);
        let value = field.unwrap().value.unwrap();
        assert_eq!(
            value,
            nvml_wrapper::enums::device::SampleValue::U64(2_000_000_000),
            "{driver}"
        );
    }
    let old = Fake::driver("535.183.06");
    let nvml = old.nvml();
    assert_eq!(raw_field(&nvml, 230), Err(2), "unknown to 535");
    assert_eq!(raw_field(&nvml, 253), Err(2));
    assert!(raw_field(&nvml, 186).is_ok());
}

fn event_set<'nvml>(nvml: &'nvml Nvml, gpus: &[u32]) -> nvml_wrapper::EventSet<'nvml> {
    gpus.iter().fold(nvml.create_event_set().unwrap(), |set, index| {
        nvml.device_by_index(*index)
            .unwrap()
            .register_events(EventTypes::CRITICAL_XID_ERROR, set)
            .unwrap()
    })
}

#[test]
fn an_event_wait_blocks_for_its_whole_timeout() {
    let fake = Fake::h100();
    let nvml = fake.nvml();
    let set = event_set(&nvml, &[0]);
    for timeout in [0, 150] {
        let started = Instant::now();
        assert!(matches!(set.wait(timeout), Err(NvmlError::Timeout)));
        assert!(started.elapsed() >= Duration::from_millis(u64::from(timeout)));
        assert!(started.elapsed() < Duration::from_millis(u64::from(timeout) + 2_000));
    }
}

#[test]
fn an_xid_wakes_every_set_once_and_is_not_replayed() {
    use nvml_wrapper::enums::event::XidError;
    let mut fake = Fake::h100();
    // Before anybody registered: lost, as with the real library.
    fake.set(|control| control.gpu(3).xids = vec![31]);
    let nvml = fake.nvml();
    let (mine, theirs, other) = (
        event_set(&nvml, &[2, 3]),
        event_set(&nvml, &[3]),
        event_set(&nvml, &[0]),
    );
    assert!(matches!(mine.wait(0), Err(NvmlError::Timeout)));

    // The set cannot cross threads, the control can.
    let waited = std::thread::scope(|scope| {
        scope.spawn(|| fake.set(|control| control.gpu(3).xids = vec![31, 79]));
        let started = Instant::now();
        let event = mine.wait(30_000).unwrap();
        (event.event_data, event.device.index().unwrap(), started.elapsed())
    });
    assert_eq!((waited.0, waited.1), (Some(XidError::Value(79)), 3));
    assert!(
        waited.2 < Duration::from_secs(10),
        "woken, not timed out: {:?}",
        waited.2
    );
    assert!(matches!(mine.wait(0), Err(NvmlError::Timeout)), "once");
    assert_eq!(
        theirs.wait(0).unwrap().event_data,
        Some(XidError::Value(79)),
        "each set has its own copy"
    );
    assert!(
        matches!(other.wait(0), Err(NvmlError::Timeout)),
        "not registered for that GPU"
    );
    // An unrelated change of the control delivers nothing anew.
    fake.set(|control| control.gpu(3).busy = Some(1.0));
    assert!(matches!(mine.wait(150), Err(NvmlError::Timeout)));
}

#[test]
fn a_wait_on_a_lost_gpu_says_so_after_what_came_before() {
    let mut fake = Fake::h100();
    let nvml = fake.nvml();
    let set = event_set(&nvml, &[0]);
    fake.set(|control| {
        control.gpu(0).xids = vec![79];
        control.faults = vec![Fault::on_gpu(0, Effect::Lost)];
    });
    // nvml-wrapper hides event and device behind one call: the Xid comes first, the loss after it.
    assert!(set.wait(10_000).is_ok());
    assert!(matches!(set.wait(10_000), Err(NvmlError::GpuLost)));
}

/// Marks the run of a test in a process of its own.
const CHILD: &str = "FAKE_NVML_TEST_CHILD";

/// Runs this test again in a process with its own environment and standard error; that one plays the child's part.
fn as_child(test: &str, envs: &[(&str, &OsStr)]) -> std::process::Output {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, "1")
        .envs(envs.iter().copied())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("1 passed"),
        "the child ran that one test"
    );
    output
}

#[test]
fn the_environment_configures_a_bare_copy() {
    if std::env::var_os(CHILD).is_some() {
        // Loaded by the well-known name, as an unmodified client does.
        let nvml = Nvml::builder()
            .lib_path("libnvidia-ml.so.1".as_ref())
            .init()
            .unwrap();
        assert_eq!(nvml.device_count().unwrap(), 3);
        assert_eq!(nvml.sys_driver_version().unwrap(), "550.54.15");
        assert_eq!(busy(&nvml, 1).unwrap(), 77);
        assert_eq!(
            nvml.device_by_index(0).unwrap().uuid().unwrap(),
            forewarm_fake_nvml::gpu_uuid("env", 0)
        );
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::rename(cdylib(folder.path()), folder.path().join(library::FILE_NAME)).unwrap();
    let control = folder.path().join("c.toml");
    let mut written = Control::default();
    written.gpu(1).busy = Some(0.77);
    written.write(&control).unwrap();
    as_child(
        "the_environment_configures_a_bare_copy",
        &[
            ("LD_LIBRARY_PATH", folder.path().as_os_str()),
            ("FAKE_NVML_PROFILE", "t4".as_ref()),
            ("FAKE_NVML_GPUS", "3".as_ref()),
            ("FAKE_NVML_DRIVER", "550.54.15".as_ref()),
            ("FAKE_NVML_CONTROL", control.as_os_str()),
            ("FAKE_NVML_CALL_COST_US", "0".as_ref()),
            ("FAKE_NVML_UUID_SEED", "env".as_ref()),
        ],
    );
}

#[test]
fn a_malformed_control_is_reported_once_and_the_last_good_one_stays() {
    if std::env::var_os(CHILD).is_some() {
        return meet_a_malformed_control();
    }
    let fake = Fake::h100();
    let output = as_child(
        "a_malformed_control_is_reported_once_and_the_last_good_one_stays",
        &[
            ("TEST_LIBRARY", fake.library.as_os_str()),
            ("TEST_CONTROL", fake.control_path().as_os_str()),
        ],
    );
    let stderr = String::from_utf8_lossy(&output.stderr);
    let reports: Vec<&str> = stderr
        .lines()
        .filter(|line| line.contains("fake-nvml:"))
        .collect();
    assert_eq!(reports.len(), 1, "{stderr}");
    assert!(
        reports[0].contains("bussy") && reports[0].contains("control.json"),
        "{stderr}"
    );
}

fn meet_a_malformed_control() {
    let control = std::path::PathBuf::from(std::env::var_os("TEST_CONTROL").unwrap());
    let mut good = Control::default();
    good.gpu(0).busy = Some(0.4);
    good.write(&control).unwrap();
    let nvml = Nvml::builder()
        .lib_path(&std::env::var_os("TEST_LIBRARY").unwrap())
        .init()
        .unwrap();
    assert_eq!(busy(&nvml, 0).unwrap(), 40);
    std::fs::write(&control, r#"{"gpus": {"0": {"bussy": 1}}}"#).unwrap();
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        assert_eq!(busy(&nvml, 0).unwrap(), 40);
    }
    good.gpu(0).busy = Some(0.6);
    good.write(&control).unwrap();
    wait_until("the next good control", || busy(&nvml, 0).unwrap() == 60);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn counters_of_the_library_never_go_back(
        steps in prop::collection::vec((1u64..5_000, 0.0f64..9e11, 0.0f64..700.0, any::<bool>()), 1..12)
    ) {
        let mut fake = Fake::virtual_time();
        fake.set(|control| control.now_ms = Some(1_000));
        let nvml = fake.nvml();
        let read = || {
            let ids = [83, 91, 138, 139, 140, 141, 74, 75, 78, 197, 198, 269, 270, 271];
            ids.map(|id| raw_field(&nvml, id).unwrap())
        };
        let (mut now, mut before) = (1_000, read());
        for (wait, rate, watts, throttled) in steps {
            now += wait;
            fake.set(|control| {
                control.now_ms = Some(now);
                control.gpus.insert(0, GpuControl {
                    nvlink_tx_bytes_per_second: Some(rate),
                    nvlink_rx_bytes_per_second: Some(rate / 2.0),
                    pcie_tx_bytes_per_second: Some(rate / 10.0),
                    power_watts: Some(watts),
                    throttle: if throttled { vec![Throttle::SwPowerCap, Throttle::SwThermal] } else { Vec::new() },
                    ..GpuControl::default()
                });
            });
            let after = read();
            prop_assert!(before.iter().zip(&after).all(|(before, after)| before <= after), "{before:?} {after:?}");
            before = after;
        }
    }
}
