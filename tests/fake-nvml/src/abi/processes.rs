//! Processes on a GPU: who holds memory, who uses its time.
//!
//! Utilisation samples are taken once a second per process, each process at its own moment of the second, so
//! time stamps differ within one answer as they do on real hardware. `lastSeenTimeStamp = 0` returns the whole
//! ring, exited processes included; nothing newer than asked is NOT_FOUND, not an error of the client's.

use std::collections::BTreeSet;
use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlProcessInfo_t, nvmlProcessInfo_v1_t, nvmlProcessUtilizationInfo_v1_t, nvmlProcessUtilizationSample_t,
    nvmlProcessesUtilizationInfo_t,
};

use super::{View, device_call, expect_version, put, put_list};
use crate::code::Code;
use crate::control::{Process, ProcessKind};
use crate::gpu::HISTORY_US;
use crate::identity::splitmix64;

/// Time between two samples of one process.
const PERIOD_US: u64 = 1_000_000;
/// No MIG instance.
const NO_INSTANCE: u32 = u32::MAX;

fn running(view: &View<'_>, kind: ProcessKind) -> Vec<nvmlProcessInfo_t> {
    view.load()
        .processes
        .iter()
        .filter(|process| process.kind == kind)
        .map(|process| nvmlProcessInfo_t {
            pid: process.pid,
            usedGpuMemory: view.long(process.memory_bytes),
            gpuInstanceId: NO_INSTANCE,
            computeInstanceId: NO_INSTANCE,
        })
        .collect()
}

/// Newest sample of each process after `after_us`, with its time.
fn samples(view: &View<'_>, after_us: u64) -> Vec<(u64, Process)> {
    let now = view.state.now_us;
    let horizon = now.saturating_sub(HISTORY_US).max(after_us);
    let pids: BTreeSet<u32> = view
        .gpu()
        .history
        .iter()
        .flat_map(|(_, load)| &load.processes)
        .map(|process| process.pid)
        .collect();
    let newest = |pid: u32| {
        let phase = splitmix64(u64::from(pid)) % PERIOD_US;
        let last = (now.checked_sub(phase)?) / PERIOD_US * PERIOD_US + phase;
        (0..=HISTORY_US / PERIOD_US)
            .map_while(|back| last.checked_sub(back * PERIOD_US))
            .take_while(|at| *at > horizon)
            .find_map(|at| {
                let load = view.gpu().load_at(at)?;
                let process = load
                    .processes
                    .iter()
                    .find(|process| process.pid == pid && process.sm > 0.0)?;
                Some((at, process.clone()))
            })
    };
    pids.into_iter().filter_map(newest).collect()
}

fn memory_share(process: &Process) -> f64 {
    process.memory.unwrap_or(0.5 * process.sm).clamp(0.0, 1.0)
}

device_call! {
    nvmlDeviceGetComputeRunningProcesses_v3(count: *mut c_uint, infos: *mut nvmlProcessInfo_t) |view|
        put_list(infos, count, &running(view, ProcessKind::Compute));
    nvmlDeviceGetGraphicsRunningProcesses_v3(count: *mut c_uint, infos: *mut nvmlProcessInfo_t) |view|
        put_list(infos, count, &running(view, ProcessKind::Graphics));
    nvmlDeviceGetMPSComputeRunningProcesses_v3(count: *mut c_uint, infos: *mut nvmlProcessInfo_t) |view|
        put_list(infos, count, &running(view, ProcessKind::Mps));
    nvmlDeviceGetComputeRunningProcesses_v2(count: *mut c_uint, infos: *mut nvmlProcessInfo_t) |view|
        put_list(infos, count, &running(view, ProcessKind::Compute));
    nvmlDeviceGetComputeRunningProcesses(count: *mut c_uint, infos: *mut nvmlProcessInfo_v1_t) |view| {
        let infos_v1: Vec<nvmlProcessInfo_v1_t> = running(view, ProcessKind::Compute)
            .iter()
            .map(|info| nvmlProcessInfo_v1_t { pid: info.pid, usedGpuMemory: info.usedGpuMemory })
            .collect();
        put_list(infos, count, &infos_v1)
    };
    nvmlDeviceGetProcessUtilization(
        utilization: *mut nvmlProcessUtilizationSample_t, count: *mut c_uint, after_us: c_ulonglong,
    ) |view| {
        let samples: Vec<nvmlProcessUtilizationSample_t> = samples(view, after_us)
            .into_iter()
            .map(|(at, process)| nvmlProcessUtilizationSample_t {
                pid: process.pid,
                timeStamp: at,
                smUtil: view.percent(process.sm.clamp(0.0, 1.0)),
                memUtil: view.percent(memory_share(&process)),
                encUtil: 0,
                decUtil: 0,
            })
            .collect();
        if samples.is_empty() {
            put(count, 0)?;
            return Err(Code::NOT_FOUND);
        }
        put_list(utilization, count, &samples)
    };
    nvmlDeviceGetProcessesUtilizationInfo(info: *mut nvmlProcessesUtilizationInfo_t) |view| {
        expect_version(info, 1)?;
        let samples: Vec<nvmlProcessUtilizationInfo_v1_t> = samples(view, (*info).lastSeenTimeStamp)
            .into_iter()
            .map(|(at, process)| nvmlProcessUtilizationInfo_v1_t {
                timeStamp: at,
                pid: process.pid,
                smUtil: view.percent(process.sm.clamp(0.0, 1.0)),
                memUtil: view.percent(memory_share(&process)),
                encUtil: 0,
                decUtil: 0,
                jpgUtil: 0,
                ofaUtil: 0,
            })
            .collect();
        if samples.is_empty() {
            (*info).processSamplesCount = 0;
            return Err(Code::NOT_FOUND);
        }
        put_list((*info).procUtilArray, &raw mut (*info).processSamplesCount, &samples)
    };
}
