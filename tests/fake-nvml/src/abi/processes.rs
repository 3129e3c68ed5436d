//! Processes on a GPU: who holds memory, who uses its time.
//!
//! Utilisation samples are taken once a second per process, each process at its own moment of the second, so
//! time stamps differ within one answer as they do on real hardware. `lastSeenTimeStamp = 0` returns the whole
//! ring, exited processes included; nothing newer than asked is NOT_FOUND, not an error of the client's.

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlAccountingStats_t, nvmlEnableState_t, nvmlProcessInfo_t, nvmlProcessInfo_v1_t,
    nvmlProcessUtilizationInfo_v1_t, nvmlProcessUtilizationSample_t, nvmlProcessesUtilizationInfo_t,
};

use super::{View, device_call, expect_version, put, supported};
use crate::accounting::BUFFER;
use crate::code::Code;
use crate::gpu::HISTORY_US;
use crate::identity::splitmix64;
use crate::process::{Process, ProcessKind, share};

/// Time between two samples of one process.
const PERIOD_US: u64 = 1_000_000;
/// No MIG instance.
const NO_INSTANCE: u32 = u32::MAX;
/// Memory that the driver cannot tell.
const UNKNOWN_MEMORY: u64 = u64::MAX;

fn info(view: &View<'_>, process: &Process, ids: Option<(u32, u32)>) -> nvmlProcessInfo_t {
    let (gi, ci) = ids.unwrap_or((NO_INSTANCE, NO_INSTANCE));
    nvmlProcessInfo_t {
        pid: process.listed_pid.unwrap_or(process.pid),
        usedGpuMemory: if process.memory_unknown {
            UNKNOWN_MEMORY
        } else {
            view.long(process.memory_bytes)
        },
        gpuInstanceId: gi,
        computeInstanceId: ci,
    }
}

/// Processes of a MIG device, or of the whole GPU: with MIG on, those of all devices are for administrators.
fn running(view: &View<'_>, kind: ProcessKind) -> Result<Vec<nvmlProcessInfo_t>, Code> {
    let device = view.mig_device().map(|device| (device.gi, device.ci));
    if device.is_none() && view.gpu().layout.enabled && !view.state.control.privileged {
        return Err(Code::NO_PERMISSION);
    }
    Ok(view
        .load()
        .all_processes()
        .filter(|(process, ids)| process.kind == kind && (device.is_none() || *ids == device))
        .map(|(process, ids)| info(view, process, ids))
        .collect())
}

/// Newest visible sample of each process after `after_us`, with its time.
fn samples(view: &View<'_>, after_us: u64) -> Vec<(u64, Process)> {
    let now = view.state.now_us;
    let horizon = now.saturating_sub(HISTORY_US).max(after_us);
    // Lag by pid, as the newest load that knows the process says.
    let lags: BTreeMap<u32, u64> = view
        .gpu()
        .history
        .iter()
        .flat_map(|(_, load)| &load.processes)
        .map(|process| (process.pid, process.lag_us()))
        .collect();
    let newest = |(pid, lag): (u32, u64)| {
        let phase = splitmix64(u64::from(pid)) % PERIOD_US;
        let visible = now.checked_sub(lag)?;
        let last = visible.checked_sub(phase)? / PERIOD_US * PERIOD_US + phase;
        (0..=HISTORY_US / PERIOD_US)
            .map_while(|back| last.checked_sub(back * PERIOD_US))
            .take_while(|at| *at > horizon)
            .find_map(|at| {
                let process = view
                    .gpu()
                    .load_at(at)?
                    .processes
                    .iter()
                    .find(|process| process.pid == pid && process.uses_an_engine())?;
                Some((at, process.clone()))
            })
    };
    lags.into_iter().filter_map(newest).collect()
}

/// Fills an array with what `samples` found, or says that there is nothing newer.
///
/// # Safety
/// As [`super::put_list`].
unsafe fn put_samples<T: Copy>(
    view: &View<'_>,
    array: *mut T,
    count: *mut c_uint,
    samples: &[T],
) -> Result<(), Code> {
    // SAFETY: the caller's promise, for every call here.
    unsafe {
        if array.is_null()
            && let Some(claimed) = view.gpu().control.claimed_process_samples
        {
            put(count, claimed)?;
            return Err(Code::INSUFFICIENT_SIZE);
        }
        if samples.is_empty() {
            put(count, 0)?;
            return Err(Code::NOT_FOUND);
        }
        view.put_list(array, count, samples)
    }
}

fn account_of(view: &View<'_>, pid: u32) -> Result<nvmlAccountingStats_t, Code> {
    supported(view.gpu().control.accounting)?;
    let account = view.gpu().accounts.0.get(&pid).ok_or(Code::NOT_FOUND)?;
    let mean = |part: f64| {
        if account.seconds > 0.0 {
            view.percent(share(part / account.seconds))
        } else {
            0
        }
    };
    // The life is told once it is over.
    let life_us = account
        .ended_us
        .map_or(0, |ended| ended.saturating_sub(account.started_us));
    Ok(nvmlAccountingStats_t {
        gpuUtilization: mean(account.busy),
        memoryUtilization: mean(account.memory_busy),
        maxMemoryUsage: view.long(account.most_memory),
        time: life_us / 1000,
        startTime: account.started_us,
        isRunning: u32::from(account.ended_us.is_none()),
        reserved: [0; 5],
    })
}

device_call! {
    nvmlDeviceGetComputeRunningProcesses_v3(count: *mut c_uint, infos: *mut nvmlProcessInfo_t) |view|
        view.put_list(infos, count, &running(view, ProcessKind::Compute)?);
    nvmlDeviceGetGraphicsRunningProcesses_v3(count: *mut c_uint, infos: *mut nvmlProcessInfo_t) |view|
        view.put_list(infos, count, &running(view, ProcessKind::Graphics)?);
    nvmlDeviceGetMPSComputeRunningProcesses_v3(count: *mut c_uint, infos: *mut nvmlProcessInfo_t) |view|
        view.put_list(infos, count, &running(view, ProcessKind::Mps)?);
    nvmlDeviceGetComputeRunningProcesses_v2(count: *mut c_uint, infos: *mut nvmlProcessInfo_t) |view|
        view.put_list(infos, count, &running(view, ProcessKind::Compute)?);
    nvmlDeviceGetGraphicsRunningProcesses_v2(count: *mut c_uint, infos: *mut nvmlProcessInfo_t) |view|
        view.put_list(infos, count, &running(view, ProcessKind::Graphics)?);
    nvmlDeviceGetMPSComputeRunningProcesses_v2(count: *mut c_uint, infos: *mut nvmlProcessInfo_t) |view|
        view.put_list(infos, count, &running(view, ProcessKind::Mps)?);
    nvmlDeviceGetComputeRunningProcesses(count: *mut c_uint, infos: *mut nvmlProcessInfo_v1_t) |view| {
        let infos_v1: Vec<nvmlProcessInfo_v1_t> = running(view, ProcessKind::Compute)?
            .iter()
            .map(|info| nvmlProcessInfo_v1_t { pid: info.pid, usedGpuMemory: info.usedGpuMemory })
            .collect();
        view.put_list(infos, count, &infos_v1)
    };
    nvmlDeviceGetProcessUtilization(
        utilization: *mut nvmlProcessUtilizationSample_t, count: *mut c_uint, after_us: c_ulonglong,
    ) |view| {
        let samples: Vec<nvmlProcessUtilizationSample_t> = samples(view, after_us)
            .into_iter()
            .map(|(at, process)| nvmlProcessUtilizationSample_t {
                pid: process.pid,
                timeStamp: at,
                smUtil: view.percent(share(process.sm)),
                memUtil: view.percent(process.memory_share()),
                encUtil: view.percent(share(process.encoder.unwrap_or(0.0))),
                decUtil: view.percent(share(process.decoder.unwrap_or(0.0))),
            })
            .collect();
        put_samples(view, utilization, count, &samples)
    };
    nvmlDeviceGetProcessesUtilizationInfo(info: *mut nvmlProcessesUtilizationInfo_t) |view| {
        expect_version(info, 1)?;
        let samples: Vec<nvmlProcessUtilizationInfo_v1_t> = samples(view, (*info).lastSeenTimeStamp)
            .into_iter()
            .map(|(at, process)| nvmlProcessUtilizationInfo_v1_t {
                timeStamp: at,
                pid: process.pid,
                smUtil: view.percent(share(process.sm)),
                memUtil: view.percent(process.memory_share()),
                encUtil: view.percent(share(process.encoder.unwrap_or(0.0))),
                decUtil: view.percent(share(process.decoder.unwrap_or(0.0))),
                jpgUtil: 0,
                ofaUtil: 0,
            })
            .collect();
        put_samples(view, (*info).procUtilArray, &raw mut (*info).processSamplesCount, &samples)
    };
    nvmlDeviceGetAccountingMode(mode: *mut nvmlEnableState_t) |view|
        put(mode, u32::from(view.gpu().control.accounting));
    nvmlDeviceGetAccountingBufferSize(size: *mut c_uint) |view| put(size, BUFFER as c_uint);
    nvmlDeviceGetAccountingPids(count: *mut c_uint, pids: *mut c_uint) |view| {
        supported(view.gpu().control.accounting)?;
        let known: Vec<c_uint> = view.gpu().accounts.0.keys().copied().collect();
        view.put_list(pids, count, &known)
    };
    nvmlDeviceGetAccountingStats(pid: c_uint, stats: *mut nvmlAccountingStats_t) |view|
        put(stats, account_of(view, pid)?);
}
