//! Processes: their lists, their samples with a lag of their own, their life, accounting.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, outside #[test] functions"
)]
#![allow(
    unsafe_code,
    reason = "sizing is tested with raw calls; pointers are to locals of the right type"
)]

mod support;

use std::ptr::null_mut;

use forewarm_fake_nvml::control::{Process, ProcessKind};
use nvml_wrapper::Device;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use support::Fake;

const SECOND: u64 = 1_000_000;

fn process(pid: u32, sm: f64) -> Process {
    Process {
        pid,
        sm,
        memory_bytes: 1 << 30,
        ..Process::default()
    }
}

/// Pid, time in µs and SM share of each sample newer than `after`.
fn samples(device: &Device<'_>, after: u64) -> Vec<(u32, u64, u32)> {
    match device.process_utilization_stats(after) {
        Ok(samples) => samples
            .iter()
            .map(|sample| (sample.pid, sample.timestamp, sample.sm_util))
            .collect(),
        Err(NvmlError::NotFound) => Vec::new(),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn time_slices_add_up_and_saturate() {
    let mut fake = Fake::h100();
    fake.set(|control| {
        control.gpu(0).processes = vec![process(1, 0.25), process(2, 0.5)];
        control.gpu(1).processes = vec![process(3, 0.75), process(4, 0.75)];
    });
    let nvml = fake.nvml();
    let busy = |index| {
        nvml.device_by_index(index)
            .unwrap()
            .utilization_rates()
            .unwrap()
            .gpu
    };
    assert_eq!((busy(0), busy(1)), (75, 100));
}

#[test]
fn a_sample_becomes_visible_after_the_lag_of_its_process() {
    let mut fake = Fake::virtual_time();
    fake.set(|control| {
        control.now_ms = Some(100_000);
        control.gpu(0).processes = vec![
            process(11, 0.3),
            Process {
                lag_ms: Some(8_000),
                ..process(12, 0.6)
            },
        ];
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    device.utilization_rates().unwrap();
    fake.set(|control| control.now_ms = Some(104_000));
    let pids: Vec<u32> = samples(&device, 0).iter().map(|sample| sample.0).collect();
    assert_eq!(pids, [11], "the other's samples are 8 s late");
    fake.set(|control| control.now_ms = Some(112_000));
    let now = samples(&device, 0);
    let age = |pid: u32| 112 * SECOND - now.iter().find(|sample| sample.0 == pid).unwrap().1;
    assert!(age(11) < SECOND, "{now:?}");
    assert!((8 * SECOND..9 * SECOND).contains(&age(12)), "{now:?}");

    // A cursor at the newest sample of one pid loses the pid that is behind: the trap of a single cursor.
    let newest = now.iter().map(|sample| sample.1).max().unwrap();
    fake.set(|control| control.now_ms = Some(114_000));
    let later: Vec<u32> = samples(&device, newest).iter().map(|sample| sample.0).collect();
    assert_eq!(later, [11]);
}

#[test]
fn processes_start_and_exit_by_themselves() {
    let mut fake = Fake::virtual_time();
    fake.set(|control| {
        control.now_ms = Some(10_000);
        control.gpu(0).accounting = true;
        control.gpu(0).power_watts = Some(100.0);
        control.gpu(0).processes = vec![Process {
            start_ms: Some(12_000),
            exit_ms: Some(15_000),
            ..process(77, 0.5)
        }];
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let listed = || device.running_compute_processes().unwrap().len();
    assert_eq!((listed(), device.utilization_rates().unwrap().gpu), (0, 0));
    fake.set(|control| control.now_ms = Some(14_000));
    assert_eq!((listed(), device.utilization_rates().unwrap().gpu), (1, 50));
    assert!(device.accounting_stats_for(77).unwrap().is_running);
    fake.set(|control| control.now_ms = Some(18_000));
    assert_eq!((listed(), device.utilization_rates().unwrap().gpu), (0, 0));
    let left = samples(&device, 0);
    assert_eq!(left.len(), 1, "the ring keeps a process that exited");
    assert!(left[0].1 < 15 * SECOND);
    assert!(samples(&device, 15 * SECOND).is_empty(), "idle is NOT_FOUND");

    let account = device.accounting_stats_for(77).unwrap();
    assert!(!account.is_running);
    assert_eq!((account.start_time, account.time), (12 * SECOND, 3_000));
    assert_eq!(
        (account.gpu_utilization, account.max_memory_usage),
        (Some(50), Some(1 << 30))
    );
    assert_eq!(device.accounting_pids().unwrap(), [77]);
    assert!(matches!(
        device.accounting_stats_for(78),
        Err(NvmlError::NotFound)
    ));
    let other = nvml.device_by_index(1).unwrap();
    assert!(!other.is_accounting_enabled().unwrap());
    assert!(matches!(other.accounting_pids(), Err(NvmlError::NotSupported)));
}

#[test]
fn a_pid_can_be_used_again() {
    let mut fake = Fake::virtual_time();
    fake.set(|control| {
        control.now_ms = Some(10_000);
        control.gpu(0).accounting = true;
        control.gpu(0).processes = vec![
            Process {
                exit_ms: Some(13_000),
                ..process(50, 0.2)
            },
            Process {
                start_ms: Some(16_000),
                memory_bytes: 7 << 30,
                ..process(50, 0.9)
            },
        ];
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    device.utilization_rates().unwrap();
    let mut seen_at = |seconds: u64| {
        fake.set(|control| control.now_ms = Some(seconds * 1000));
        let share = samples(&device, 0).first().map(|sample| sample.2);
        let started = device.accounting_stats_for(50).unwrap().start_time / SECOND;
        (device.running_compute_processes().unwrap().len(), share, started)
    };
    assert_eq!(seen_at(12), (1, Some(20), 10));
    assert_eq!(seen_at(15), (0, Some(20), 10), "the ring keeps the first one");
    assert_eq!(seen_at(19), (1, Some(90), 16));
    assert_eq!(device.memory_info().unwrap().used, 7 << 30);
}

#[test]
fn lists_are_by_kind_and_may_show_other_pids_than_the_samples() {
    let mut fake = Fake::virtual_time();
    fake.set(|control| {
        control.now_ms = Some(10_000);
        control.gpu(0).processes = vec![
            Process {
                listed_pid: Some(7),
                ..process(4_242, 0.4)
            },
            Process {
                kind: ProcessKind::Graphics,
                memory_unknown: true,
                ..process(5, 0.1)
            },
            Process {
                kind: ProcessKind::Mps,
                encoder: Some(0.2),
                ..process(6, 0.0)
            },
        ];
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    fake.set(|control| control.now_ms = Some(15_000));
    let pids = |list: Vec<nvml_wrapper::struct_wrappers::device::ProcessInfo>| -> Vec<u32> {
        list.iter().map(|info| info.pid).collect()
    };
    assert_eq!(pids(device.running_compute_processes().unwrap()), [7]);
    assert_eq!(pids(device.mps_running_compute_processes().unwrap()), [6]);
    let graphics = device.running_graphics_processes().unwrap();
    assert_eq!(graphics[0].used_gpu_memory, UsedGpuMemory::Unavailable);
    let sampled: Vec<u32> = samples(&device, 0).iter().map(|sample| sample.0).collect();
    assert_eq!(sampled, [5, 6, 4_242], "an encoder is an engine too");
}

#[test]
fn a_sizing_call_may_claim_more_than_there_is() {
    let mut fake = Fake::virtual_time();
    fake.set(|control| {
        control.now_ms = Some(10_000);
        control.gpu(0).claimed_process_samples = Some(100);
        control.gpu(0).processes = vec![process(9, 0.5)];
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    fake.set(|control| control.now_ms = Some(12_000));
    let mut count = 0;
    // SAFETY: no array, so only the count is written.
    let code = unsafe {
        nvml.lib()
            .nvmlDeviceGetProcessUtilization(device.handle(), null_mut(), &raw mut count, 0)
    };
    assert_eq!((code, count), (7, 100));
    assert_eq!(samples(&device, 0).len(), 1);
}
