//! Power, energy, temperature, clocks and what holds the clocks down.

use std::ffi::{c_int, c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlClockId_t, nvmlClockType_t, nvmlEnableState_t, nvmlMarginTemperature_t, nvmlPerfPolicyType_t,
    nvmlPstates_t, nvmlTemperature_t, nvmlTemperatureSensors_t, nvmlTemperatureThresholds_t,
    nvmlViolationTime_t,
};

use super::{View, device_call, expect_version, put, supported, version_word};
use crate::code::Code;
use crate::control::Throttle;

/// Watts as NVML's milliwatts.
pub(crate) fn milliwatts(watts: f64) -> u32 {
    (watts.max(0.0) * 1000.0).round() as u32
}

/// Degrees to the nearest limit that slows the GPU down.
fn margin(view: &View<'_>) -> i32 {
    view.profile().temperature.gpu_max_celsius as i32 - view.load().temperature.round() as i32
}

fn clock(view: &View<'_>, kind: nvmlClockType_t) -> Result<u32, Code> {
    match kind {
        0 | 1 => Ok(view.load().sm_clock),
        2 => Ok(view.load().memory_clock),
        3 => Ok(view.load().video_clock),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

fn max_clock(view: &View<'_>, kind: nvmlClockType_t) -> Result<u32, Code> {
    let clocks = &view.profile().clocks;
    match kind {
        0 | 1 => Ok(clocks.sm_max_mhz),
        2 => Ok(clocks.memory_max_mhz),
        3 => Ok(clocks.video_max_mhz),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

fn threshold(view: &View<'_>, kind: nvmlTemperatureThresholds_t) -> Result<u32, Code> {
    let temperature = &view.profile().temperature;
    match kind {
        0 => Ok(temperature.shutdown_celsius),
        1 => Ok(temperature.slowdown_celsius),
        2 => temperature.memory_max_celsius.ok_or(Code::NOT_SUPPORTED),
        3 => Ok(temperature.gpu_max_celsius),
        4..=7 => Err(Code::NOT_SUPPORTED),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

/// Nanoseconds lost to a performance policy so far, by its number.
pub(crate) fn violation_ns(view: &View<'_>, policy: nvmlPerfPolicyType_t) -> Result<u64, Code> {
    let integrals = &view.gpu().integrals;
    Ok(match policy {
        0 => integrals.throttled_ns(Throttle::SwPowerCap),
        1 => integrals.throttled_ns(Throttle::SwThermal) + integrals.throttled_ns(Throttle::HwThermal),
        2 => integrals.throttled_ns(Throttle::SyncBoost),
        3 => integrals.throttled_ns(Throttle::HwSlowdown),
        4 => (integrals.low_utilization * 1e9) as u64,
        5 => integrals.throttled_ns(Throttle::HwPowerBrake),
        10 => integrals.throttled_ns(Throttle::ApplicationClocks),
        // Below base clocks whenever the hardware itself slows down.
        11 => integrals.throttled_ns(Throttle::HwSlowdown),
        _ => return Err(Code::INVALID_ARGUMENT),
    })
}

/// Reasons this board can give: all but the display's.
const SUPPORTED_REASONS: u64 = 0xff;

device_call! {
    nvmlDeviceGetPowerUsage(power: *mut c_uint) |view| put(power, view.int(milliwatts(view.load().power_watts)));
    nvmlDeviceGetEnforcedPowerLimit(limit: *mut c_uint) |view|
        put(limit, view.int(milliwatts(view.profile().power.limit_watts)));
    nvmlDeviceGetPowerManagementLimit(limit: *mut c_uint) |view|
        put(limit, view.int(milliwatts(view.profile().power.limit_watts)));
    nvmlDeviceGetPowerManagementDefaultLimit(limit: *mut c_uint) |view|
        put(limit, view.int(milliwatts(view.profile().power.limit_watts)));
    nvmlDeviceGetPowerManagementLimitConstraints(min: *mut c_uint, max: *mut c_uint) |view| {
        put(min, view.int(milliwatts(view.profile().power.min_limit_watts)))?;
        put(max, view.int(milliwatts(view.profile().power.max_limit_watts)))
    };
    nvmlDeviceGetPowerManagementMode(mode: *mut nvmlEnableState_t) |view| put(mode, 1);
    nvmlDeviceGetTotalEnergyConsumption(energy: *mut c_ulonglong) |view|
        put(energy, view.long(view.counter((view.gpu().integrals.energy_joules * 1000.0) as u64)));
    nvmlDeviceGetTemperature(sensor: nvmlTemperatureSensors_t, temperature: *mut c_uint) |view| {
        if sensor != 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        put(temperature, view.int(view.load().temperature.round().max(0.0) as u32))
    };
    nvmlDeviceGetTemperatureV(temperature: *mut nvmlTemperature_t) |view| {
        expect_version(temperature, 1)?;
        if (*temperature).sensorType != 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        put(&raw mut (*temperature).temperature, view.int(view.load().temperature.round().max(0.0) as u32) as c_int)
    };
    nvmlDeviceGetTemperatureThreshold(kind: nvmlTemperatureThresholds_t, temperature: *mut c_uint) |view|
        put(temperature, view.int(threshold(view, kind)?));
    nvmlDeviceGetMarginTemperature(info: *mut nvmlMarginTemperature_t) |view| {
        expect_version(info, 1)?;
        supported(view.profile().temperature.margins)?;
        put(info, nvmlMarginTemperature_t {
            version: version_word::<nvmlMarginTemperature_t>(1),
            marginTemperature: margin(view),
        })
    };
    nvmlDeviceGetClockInfo(kind: nvmlClockType_t, mhz: *mut c_uint) |view| put(mhz, view.int(clock(view, kind)?));
    nvmlDeviceGetClock(kind: nvmlClockType_t, id: nvmlClockId_t, mhz: *mut c_uint) |view| match id {
        0 => put(mhz, view.int(clock(view, kind)?)),
        1..=3 => put(mhz, view.int(max_clock(view, kind)?)),
        _ => Err(Code::INVALID_ARGUMENT),
    };
    nvmlDeviceGetMaxClockInfo(kind: nvmlClockType_t, mhz: *mut c_uint) |view|
        put(mhz, view.int(max_clock(view, kind)?));
    nvmlDeviceGetApplicationsClock(kind: nvmlClockType_t, mhz: *mut c_uint) |view|
        put(mhz, view.int(max_clock(view, kind)?));
    nvmlDeviceGetPerformanceState(state: *mut nvmlPstates_t) |view|
        put(state, view.int(view.load().performance_state));
    nvmlDeviceGetPowerState(state: *mut nvmlPstates_t) |view| put(state, view.int(view.load().performance_state));
    nvmlDeviceGetCurrentClocksThrottleReasons(reasons: *mut c_ulonglong) |view|
        put(reasons, view.load().throttle_bits());
    nvmlDeviceGetSupportedClocksThrottleReasons(reasons: *mut c_ulonglong) |view| {
        put(reasons, SUPPORTED_REASONS)
    };
    nvmlDeviceGetCurrentClocksEventReasons(reasons: *mut c_ulonglong) |view|
        put(reasons, view.load().throttle_bits());
    nvmlDeviceGetSupportedClocksEventReasons(reasons: *mut c_ulonglong) |view| {
        put(reasons, SUPPORTED_REASONS)
    };
    nvmlDeviceGetViolationStatus(policy: nvmlPerfPolicyType_t, time: *mut nvmlViolationTime_t) |view|
        put(time, nvmlViolationTime_t {
            referenceTime: view.state.now_us,
            violationTime: view.long(violation_ns(view, policy)?),
        });
}
