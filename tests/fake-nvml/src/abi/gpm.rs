//! GPM: activity and bandwidth between two samples.
//!
//! A sample is a copy of the GPU's integrals, so a metric is the exact mean over the time between the two; two
//! samples of the same moment give NaN (0/0), which a client has to survive.

use std::ffi::{CStr, c_uint};

use nvml_wrapper_sys::bindings::{
    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_SUPPORT_VERSION, nvmlGpmMetric_t, nvmlGpmMetricsGet_t,
    nvmlGpmSample_t, nvmlGpmSupport_t, nvmlReturn_t,
};

use super::{View, device_call, guard, put, supported, system_call, version_of};
use crate::code::Code;
use crate::gpu::Integrals;
use crate::state::{Sample, State, Target};

/// Most metrics a client can ask for at once: the largest array of any published header.
const MOST_METRICS: u32 = 477;
/// Samples a client can hold: far above any use, so that a leak is noticed.
const MOST_SAMPLES: usize = 65_536;
/// First metric id that no published header has.
const METRIC_END: u32 = 477;
const MIB: f64 = 1_048_576.0;

fn token(sample: nvmlGpmSample_t) -> usize {
    sample.addr()
}

fn filled(state: &State, sample: nvmlGpmSample_t) -> Result<&Sample, Code> {
    state
        .samples
        .get(&token(sample))
        .and_then(Option::as_ref)
        .ok_or(Code::INVALID_ARGUMENT)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpmSampleAlloc(sample: *mut nvmlGpmSample_t) -> nvmlReturn_t {
    system_call("nvmlGpmSampleAlloc", |state| {
        if sample.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        if state.samples.len() >= MOST_SAMPLES {
            return Err(Code::INSUFFICIENT_RESOURCES);
        }
        let token = state.token();
        state.samples.insert(token, None);
        // SAFETY: not null; valid by NVML's contract.
        unsafe { put(sample, std::ptr::without_provenance_mut(token)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmSampleFree(sample: nvmlGpmSample_t) -> nvmlReturn_t {
    if sample.is_null() {
        return 0;
    }
    system_call("nvmlGpmSampleFree", |state| {
        state
            .samples
            .remove(&token(sample))
            .map(drop)
            .ok_or(Code::INVALID_ARGUMENT)
    })
}

/// Takes a sample of the GPU or of one of its instances.
fn take(view: &mut View<'_>, gi: Option<u32>, sample: nvmlGpmSample_t) -> Result<(), Code> {
    supported(view.profile().gpm)?;
    let integrals = match gi {
        None => view.gpu().integrals.clone(),
        Some(gi) => {
            view.gpu().layout.instance(gi).ok_or(Code::INVALID_ARGUMENT)?;
            // Nothing runs where there is no compute instance.
            view.gpu().load.instances.get(&gi).ok_or(Code::NO_DATA)?;
            view.gpu().instances.get(&gi).cloned().unwrap_or_default()
        }
    };
    let taken = Sample {
        target: Target {
            gpu: view.at,
            mig: view.mig,
        },
        gi,
        at_us: view.state.now_us,
        integrals,
    };
    *view
        .state
        .samples
        .get_mut(&token(sample))
        .ok_or(Code::INVALID_ARGUMENT)? = Some(taken);
    Ok(())
}

device_call! {
    nvmlGpmQueryDeviceSupport(support: *mut nvmlGpmSupport_t) |view| {
        if version_of(support)? != NVML_GPM_SUPPORT_VERSION {
            return Err(Code::VERSION_MISMATCH);
        }
        put(&raw mut (*support).isSupportedDevice, u32::from(view.profile().gpm))
    };
    nvmlGpmSampleGet(sample: nvmlGpmSample_t) |view| {
        let gi = view.mig_device().map(|device| device.gi);
        take(view, gi, sample)
    };
    nvmlGpmMigSampleGet(instance: c_uint, sample: nvmlGpmSample_t) |view| {
        supported(view.gpu().layout.enabled)?;
        take(view, Some(instance), sample)
    };
    nvmlGpmQueryIfStreamingEnabled(enabled: *mut c_uint) |view| {
        supported(view.profile().gpm)?;
        put(enabled, 0)
    };
    nvmlGpmSetStreamingEnabled(enabled: c_uint) |view| {
        _ = enabled;
        supported(view.profile().gpm)
    };
}

/// Value of metric `id` between two samples, before any garbage; none for what the GPU lacks.
fn metric(id: u32, from: &Integrals, to: &Integrals, links: u32) -> Option<f64> {
    let seconds = to.seconds - from.seconds;
    let percent = |part: fn(&Integrals) -> f64| (part(to) - part(from)) / seconds * 100.0;
    let bandwidth = |part: fn(&Integrals) -> f64| (part(to) - part(from)) / seconds / MIB;
    let link = |part: fn(&Integrals) -> f64| (links > 0).then(|| bandwidth(part) / f64::from(links.max(1)));
    Some(match id {
        1 => percent(|integrals| integrals.busy),
        2 => percent(|integrals| integrals.sm_active),
        3 => percent(|integrals| integrals.sm_occupancy),
        // The pipes beside tensor: a plain share of the SM's activity that tensor leaves.
        4 | 12 | 13 => percent(|integrals| (integrals.sm_active - integrals.tensor).max(0.0) * 0.3),
        5 | 7 => percent(|integrals| integrals.tensor),
        6 | 8 | 9 | 11 => percent(|_| 0.0),
        10 => percent(|integrals| integrals.dram),
        20 => bandwidth(|integrals| integrals.pcie_tx_bytes),
        21 => bandwidth(|integrals| integrals.pcie_rx_bytes),
        30..=36 => percent(|integrals| integrals.decoder),
        40..=46 | 50 => percent(|_| 0.0),
        60 => return (links > 0).then(|| bandwidth(|integrals| integrals.nvlink_rx_bytes)),
        61 => return (links > 0).then(|| bandwidth(|integrals| integrals.nvlink_tx_bytes)),
        62..=97 if (id - 62) / 2 < links => {
            return if id.is_multiple_of(2) {
                link(|integrals| integrals.nvlink_rx_bytes)
            } else {
                link(|integrals| integrals.nvlink_tx_bytes)
            };
        }
        _ => return None,
    })
}

/// Short name, long name and unit of a metric.
const fn about(id: u32) -> (&'static CStr, &'static CStr, &'static CStr) {
    match id {
        1 => (c"GRACT", c"Graphics Activity", c"%"),
        2 => (c"SMUTL", c"SM Activity", c"%"),
        3 => (c"SMOCC", c"SM Occupancy", c"%"),
        5 => (c"TENSO", c"Tensor Activity", c"%"),
        10 => (c"DRAMA", c"DRAM Activity", c"%"),
        20 => (c"PCITX", c"PCIe Transmit Bandwidth", c"MiB/s"),
        21 => (c"PCIRX", c"PCIe Receive Bandwidth", c"MiB/s"),
        60 => (c"NVLRX", c"NVLink Receive Bandwidth", c"MiB/s"),
        61 => (c"NVLTX", c"NVLink Transmit Bandwidth", c"MiB/s"),
        62..=97 => (c"NVLLK", c"NVLink Bandwidth of one link", c"MiB/s"),
        _ => (c"OTHER", c"Other", c"%"),
    }
}

/// Answers every metric of the request.
///
/// # Safety
/// `metrics` is valid for reads and writes of `count` metrics.
unsafe fn answer(view: &View<'_>, metrics: *mut nvmlGpmMetric_t, count: u32, from: &Sample, to: &Sample) {
    let links = view.profile().nvlink_links();
    for nth in 0..count as usize {
        // SAFETY: `nth` is below `count`; the metric is a plain struct of the client's.
        let asked = unsafe { &mut *metrics.add(nth) };
        let (short, long, unit) = about(asked.metricId);
        asked.metricInfo.shortName = short.as_ptr().cast_mut();
        asked.metricInfo.longName = long.as_ptr().cast_mut();
        asked.metricInfo.unit = unit.as_ptr().cast_mut();
        if let Err(Code(code)) = view.begin_entry(asked.metricId) {
            (asked.nvmlReturn, asked.value) = (code, 0.0);
            continue;
        }
        let value = metric(asked.metricId, &from.integrals, &to.integrals, links);
        (asked.nvmlReturn, asked.value) = match value {
            Some(value) => (0, view.double(value)),
            None if asked.metricId == 0 || asked.metricId >= METRIC_END => (Code::INVALID_ARGUMENT.0, 0.0),
            None => (Code::NOT_SUPPORTED.0, 0.0),
        };
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpmMetricsGet(request: *mut nvmlGpmMetricsGet_t) -> nvmlReturn_t {
    // SAFETY: the struct begins with its version word.
    match unsafe { version_of(request) } {
        Ok(NVML_GPM_METRICS_GET_VERSION) => {}
        Ok(_) => return Code::VERSION_MISMATCH.0,
        Err(Code(code)) => return code,
    }
    // SAFETY: not null (checked above) and of the version this struct has. The array at its end may be shorter or
    // longer than in these bindings, so the struct is never referenced as a whole.
    let (count, first, second, metrics) = unsafe {
        (
            (*request).numMetrics,
            (*request).sample1,
            (*request).sample2,
            (&raw mut (*request).metrics).cast(),
        )
    };
    if count > MOST_METRICS {
        return guard(|| Err(Code::INVALID_ARGUMENT));
    }
    super::call_about(
        "nvmlGpmMetricsGet",
        |state| {
            let (first, second) = (filled(state, first)?, filled(state, second)?);
            if (first.target.gpu, first.gi) == (second.target.gpu, second.gi) {
                Ok(first.target)
            } else {
                Err(Code::INVALID_ARGUMENT)
            }
        },
        |view| {
            let (first, second) = (
                filled(view.state, first)?.clone(),
                filled(view.state, second)?.clone(),
            );
            let (from, to) = if first.at_us <= second.at_us {
                (first, second)
            } else {
                (second, first)
            };
            if to.integrals.seconds < from.integrals.seconds {
                // The instance was made anew in between, or the counters were reset.
                return Err(Code::INVALID_ARGUMENT);
            }
            // SAFETY: the client's array holds `numMetrics` metrics.
            unsafe { answer(view, metrics, count, &from, &to) };
            Ok(())
        },
    )
}
