//! Faults that come late, go by themselves, strike once or one entry; lists that grow; counters that lie.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, outside #[test] functions"
)]
#![allow(
    unsafe_code,
    reason = "growth and system events are reached with raw calls; pointers are to locals of the right type"
)]

mod support;

use std::ptr::null_mut;
use std::time::{Duration, Instant};

use forewarm_fake_nvml::control::{Block, CounterControl, EccErrors, Effect, Fault, Garbage, Process};
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, MemoryLocation};
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::gpm_metrics_get;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::*;
use support::{Fake, wait_until};

const UTILIZATION: &str = "nvmlDeviceGetUtilizationRates";

#[test]
fn a_fault_can_wait_for_calls_and_strike_a_number_of_them() {
    let mut fake = Fake::virtual_time();
    fake.set(|control| {
        control.now_ms = Some(1_000);
        control.faults = vec![Fault {
            after_calls: Some(2),
            times: Some(3),
            ..Fault::on_call(0, UTILIZATION, Effect::ResetRequired)
        }];
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let outcomes: Vec<bool> = (0..7).map(|_| device.utilization_rates().is_ok()).collect();
    assert_eq!(outcomes, [true, true, false, false, false, true, true]);
    assert!(device.power_usage().is_ok());
}

#[test]
fn permission_can_be_lost_minutes_after_the_start() {
    let mut fake = Fake::virtual_time();
    fake.set(|control| {
        control.now_ms = Some(1_000);
        control.faults = vec![Fault {
            after_ms: Some(180_000),
            for_ms: Some(60_000),
            ..Fault::on_call(0, "nvmlGpmSampleGet", Effect::NoPermission)
        }];
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let mut sample_at = |seconds: u64| {
        fake.set(|control| control.now_ms = Some(1_000 + seconds * 1000));
        device.gpm_sample().map(drop)
    };
    assert!(sample_at(179).is_ok());
    assert!(matches!(sample_at(180), Err(NvmlError::NoPermission)));
    assert!(matches!(sample_at(239), Err(NvmlError::NoPermission)));
    assert!(sample_at(240).is_ok());
}

#[test]
fn a_list_can_grow_between_sizing_and_filling() {
    let mut fake = Fake::h100();
    fake.set(|control| {
        control.gpu(0).processes = (1..=3)
            .map(|pid| Process {
                pid,
                ..Process::default()
            })
            .collect();
        control.faults = vec![Fault {
            // The second call: the first one sizes.
            after_calls: Some(1),
            times: Some(1),
            ..Fault::on_call(0, "nvmlDeviceGetComputeRunningProcesses_v3", Effect::Grow(4))
        }];
    });
    let nvml = fake.nvml();
    let gpu = nvml.device_by_index(0).unwrap();
    // SAFETY: plain C data.
    let mut infos: [nvmlProcessInfo_t; 16] = unsafe { std::mem::zeroed() };
    let ask = |count: &mut u32, array| {
        // SAFETY: the array holds 16, more than any count here.
        unsafe {
            nvml.lib()
                .nvmlDeviceGetComputeRunningProcesses_v3(gpu.handle(), count, array)
        }
    };
    let mut count = 0;
    assert_eq!((ask(&mut count, null_mut()), count), (7, 3));
    assert_eq!((ask(&mut count, infos.as_mut_ptr()), count), (7, 7), "it grew");
    assert_eq!((ask(&mut count, infos.as_mut_ptr()), count), (0, 3));
}

#[test]
fn init_can_fail_for_a_while() {
    let mut fake = Fake::h100();
    fake.set(|control| {
        control.faults = vec![Fault {
            calls: vec!["nvmlInit_v2".into()],
            times: Some(2),
            effect: Effect::Error(12),
            ..Fault::default()
        }];
    });
    let library = fake.library.clone();
    let init = || Nvml::builder().lib_path(library.as_os_str()).init();
    // One load of the library for all tries: its count of calls lives as long as it is loaded.
    // SAFETY: loading the fake runs no code of its own.
    let _loaded = unsafe { NvmlLib::new(&fake.library) }.unwrap();
    assert!(matches!(init(), Err(NvmlError::LibraryNotFound)));
    assert!(matches!(init(), Err(NvmlError::LibraryNotFound)));
    assert!(init().is_ok());
}

#[test]
fn a_wait_for_events_and_an_init_can_be_held_up_past_their_time() {
    let mut fake = Fake::h100();
    let nvml = fake.nvml();
    let set = nvml.create_event_set().unwrap();
    let set = nvml
        .device_by_index(1)
        .unwrap()
        .register_events(nvml_wrapper::bitmasks::event::EventTypes::CRITICAL_XID_ERROR, set)
        .unwrap();
    assert!(matches!(set.wait(0), Err(NvmlError::Timeout)));
    fake.set(|control| {
        control.faults = vec![
            Fault::on_call(1, "nvmlEventSetWait_v2", Effect::Block(Block::Ms(400))),
            Fault {
                calls: vec!["nvmlInit_v2".into()],
                effect: Effect::Block(Block::Ms(300)),
                ..Fault::default()
            },
        ];
    });
    wait_until("the wait is held up", || {
        let started = Instant::now();
        assert!(matches!(set.wait(0), Err(NvmlError::Timeout)));
        started.elapsed() >= Duration::from_millis(400)
    });
    drop(set);
    drop(nvml);
    let started = Instant::now();
    drop(fake.nvml());
    assert!(started.elapsed() >= Duration::from_millis(300));
}

#[test]
fn blanks_of_other_tools_are_garbage_too() {
    let mut fake = Fake::h100();
    fake.set(|control| control.faults = vec![Fault::on_gpu(0, Effect::Garbage(Garbage::Blank))]);
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    assert_eq!(device.utilization_rates().unwrap().gpu, 2_147_483_632);
    assert_eq!(device.memory_info().unwrap().used, 9_223_372_036_854_775_792);
}

/// Field `id` of `device`, a 64-bit counter.
fn counter(nvml: &Nvml, device: &Device<'_>, id: u32) -> u64 {
    // SAFETY: plain C data; one entry; the field is 64 bits wide.
    unsafe {
        let mut value: nvmlFieldValue_t = std::mem::zeroed();
        (value.fieldId, value.scopeId) = (id, u32::from(id < 150) * u32::MAX);
        let code = nvml
            .lib()
            .nvmlDeviceGetFieldValues(device.handle(), 1, &raw mut value);
        assert_eq!((code, value.nvmlReturn), (0, 0));
        value.value.ullVal
    }
}

#[test]
fn counters_can_wrap_and_be_reset() {
    let mut fake = Fake::virtual_time();
    fake.set(|control| {
        control.now_ms = Some(1_000);
        let gpu = control.gpu(0);
        gpu.pcie_tx_bytes_per_second = Some(1_000.0);
        gpu.nvlink_tx_bytes_per_second = Some(1024.0);
        gpu.ecc = Some(EccErrors {
            corrected: 9,
            ..EccErrors::default()
        });
        gpu.counters = Some(CounterControl {
            bits: Some(32),
            start: u64::from(u32::MAX) - 1_500,
            ..CounterControl::default()
        });
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    fake.set(|control| control.now_ms = Some(2_000));
    assert_eq!(counter(&nvml, &device, 197), u64::from(u32::MAX) - 500);
    fake.set(|control| control.now_ms = Some(3_000));
    assert_eq!(counter(&nvml, &device, 197), 499, "wrapped");

    fake.set(|control| {
        let gpu = control.gpu(0);
        gpu.counters = Some(CounterControl {
            resets: 1,
            ..CounterControl::default()
        });
        gpu.ecc = None;
    });
    assert_eq!(
        (counter(&nvml, &device, 197), counter(&nvml, &device, 138)),
        (0, 0)
    );
    fake.set(|control| control.now_ms = Some(5_000));
    assert_eq!(
        (counter(&nvml, &device, 197), counter(&nvml, &device, 138)),
        (2_000, 2)
    );
    let errors = device.total_ecc_errors(MemoryError::Corrected, EccCounter::Volatile);
    assert_eq!(errors.unwrap(), 0);
}

#[test]
fn single_fields_and_metrics_can_be_struck() {
    let mut fake = Fake::h100();
    fake.set(|control| {
        let on = |call: &str, ids: &[u32], effect| Fault {
            ids: ids.to_vec(),
            ..Fault::on_call(0, call, effect)
        };
        control.gpu(0).nvlink_tx_bytes_per_second = Some(1e9);
        control.faults = vec![
            on(
                "nvmlDeviceGetFieldValues",
                &[138, 83],
                Effect::Garbage(Garbage::Sentinel),
            ),
            on("nvmlDeviceGetFieldValues", &[139], Effect::NoPermission),
            on("nvmlGpmMetricsGet", &[60, 61], Effect::NoPermission),
            on("nvmlGpmMetricsGet", &[3], Effect::Garbage(Garbage::OutOfRange)),
        ];
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    // SAFETY: plain C data; as many entries as are passed; the fields are 64 bits wide.
    unsafe {
        let mut values: [nvmlFieldValue_t; 4] = std::mem::zeroed();
        for (value, id) in values.iter_mut().zip([138, 139, 83, 91]) {
            value.fieldId = id;
        }
        let code = nvml
            .lib()
            .nvmlDeviceGetFieldValues(device.handle(), 4, values.as_mut_ptr());
        assert_eq!(code, 0);
        assert_eq!(values.map(|value| value.nvmlReturn), [0, 4, 0, 0]);
        assert_eq!(
            (values[0].value.ullVal, values[2].value.ullVal),
            (u64::MAX, u64::MAX)
        );
        assert_eq!(values[3].value.uiVal, 18);
    }
    let before = device.gpm_sample().unwrap();
    let after = device.gpm_sample().unwrap();
    let ids = [GpmMetricId::SmOccupancy, GpmMetricId::NvlinkTotalRxPerSec];
    let metrics = gpm_metrics_get(&nvml, &before, &after, &ids).unwrap();
    assert!((metrics[0].as_ref().unwrap().value - 129.0).abs() < 1e-9);
    assert!(
        matches!(metrics[1], Err(NvmlError::NoPermission)),
        "{:?}",
        metrics[1]
    );
}

#[test]
fn errors_are_counted_where_they_are() {
    let mut fake = Fake::h100();
    fake.set(|control| {
        control.gpu(0).ecc = Some(EccErrors {
            uncorrected: 5,
            sram_uncorrected: 2,
            ..EccErrors::default()
        });
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let at = |location| {
        device
            .memory_error_counter(MemoryError::Uncorrected, EccCounter::Aggregate, location)
            .unwrap()
    };
    assert_eq!((at(MemoryLocation::Device), at(MemoryLocation::SRAM)), (3, 2));
    assert_eq!(at(MemoryLocation::L2Cache), 0);
}
