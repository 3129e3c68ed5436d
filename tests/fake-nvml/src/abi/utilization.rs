//! Utilisation, memory and sample rings.

use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlMemory_t, nvmlMemory_v2_t, nvmlSample_t, nvmlSamplingType_t, nvmlUtilization_t, nvmlValue_t,
    nvmlValueType_t,
};

use super::{View, device_call, expect_version, put, supported, version_word};
use crate::code::Code;
use crate::gpu::HISTORY_US;

/// Sampling period of encoder and decoder, as drivers report it.
const CODEC_PERIOD_US: u32 = 167_000;

/// Samples in a ring.
const RING: u64 = 120;
/// Time between two samples of a ring: 1/6 s.
const RING_PERIOD_US: u64 = HISTORY_US / RING;

/// Highest kinds of samples: power of the module, JPEG, optical flow.
const MODULE_POWER_SAMPLES: nvmlSamplingType_t = 7;
const OFA_SAMPLES: nvmlSamplingType_t = 9;

const VALUE_UNSIGNED_INT: nvmlValueType_t = 1;

fn ring_value(view: &View<'_>, kind: nvmlSamplingType_t, at_us: u64) -> Option<u32> {
    let load = view.gpu().load_at(at_us)?;
    Some(match kind {
        0 => view.int((load.power_watts.max(0.0) * 1000.0) as u32),
        1 => view.percent(load.busy),
        2 => view.percent(load.dram),
        3 => view.percent(load.encoder),
        4 => view.percent(load.decoder),
        5 => view.int(load.sm_clock),
        6 => view.int(load.memory_clock),
        MODULE_POWER_SAMPLES => view.int((load.module_watts? * 1000.0) as u32),
        8 | 9 => view.percent(0.0),
        _ => return None,
    })
}

fn ring(view: &View<'_>, kind: nvmlSamplingType_t, after_us: u64) -> Vec<nvmlSample_t> {
    let last = view.state.now_us / RING_PERIOD_US;
    (last.saturating_sub(RING - 1)..=last)
        .map(|tick| tick * RING_PERIOD_US)
        .filter(|at| *at > after_us)
        .filter_map(|at| {
            let value = ring_value(view, kind, at)?;
            Some(nvmlSample_t {
                timeStamp: at,
                sampleValue: nvmlValue_t { uiVal: value },
            })
        })
        .collect()
}

device_call! {
    nvmlDeviceGetUtilizationRates(utilization: *mut nvmlUtilization_t) |view| put(utilization, nvmlUtilization_t {
        gpu: view.percent(view.load().busy),
        memory: view.percent(view.load().dram),
    });
    nvmlDeviceGetEncoderUtilization(utilization: *mut c_uint, period_us: *mut c_uint) |view| {
        put(utilization, view.percent(view.load().encoder))?;
        put(period_us, CODEC_PERIOD_US)
    };
    nvmlDeviceGetDecoderUtilization(utilization: *mut c_uint, period_us: *mut c_uint) |view| {
        put(utilization, view.percent(view.load().decoder))?;
        put(period_us, CODEC_PERIOD_US)
    };
    nvmlDeviceGetMemoryInfo_v2(memory: *mut nvmlMemory_v2_t) |view| {
        expect_version(memory, 2)?;
        let (total, reserved, used) = view.memory();
        put(memory, nvmlMemory_v2_t {
            version: version_word::<nvmlMemory_v2_t>(2),
            total,
            reserved,
            free: total - reserved - used,
            used: view.long(used),
        })
    };
    // The first version counts the reserved part as used.
    nvmlDeviceGetMemoryInfo(memory: *mut nvmlMemory_t) |view| {
        let (total, reserved, used) = view.memory();
        let used = used + reserved;
        put(memory, nvmlMemory_t { total, free: total - used, used: view.long(used) })
    };
    nvmlDeviceGetSamples(
        kind: nvmlSamplingType_t,
        after_us: c_ulonglong,
        value_type: *mut nvmlValueType_t,
        count: *mut c_uint,
        samples: *mut nvmlSample_t,
    ) |view| {
        if count.is_null() || value_type.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        if kind > OFA_SAMPLES {
            return Err(Code::INVALID_ARGUMENT);
        }
        let of_utilization = matches!(kind, 1..=4 | 8..=9);
        supported(!(of_utilization && view.gpu().layout.enabled))?;
        supported(kind != MODULE_POWER_SAMPLES || view.profile().power.module_load_watts.is_some())?;
        put(value_type, VALUE_UNSIGNED_INT)?;
        if samples.is_null() {
            // Sizing: the length of the ring, whatever it holds.
            return put(count, RING as c_uint);
        }
        let ring = ring(view, kind, after_us);
        if ring.is_empty() {
            return Err(Code::NOT_FOUND);
        }
        let taken = ring.len().min(count.read() as usize);
        // The newest ones, if the buffer is short of the ring.
        std::ptr::copy_nonoverlapping(ring[ring.len() - taken..].as_ptr(), samples, taken);
        put(count, taken as c_uint)
    };
}
