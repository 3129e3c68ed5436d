//! `nvmlDeviceGetFieldValues`: many small readings in one call.
//!
//! Ids that moved between 12.x and 13.0 Update 1 are understood in the numbering of the driver level only: asked
//! by the wrong number, a driver answers another field or NOT_SUPPORTED, never the one that was meant. An id past
//! the level's last one is INVALID_ARGUMENT. Codes are per entry; the call itself succeeds.

use std::ffi::c_int;

use nvml_wrapper_sys::bindings::{field_id, nvmlDevice_t, nvmlFieldValue_t, nvmlReturn_t, nvmlValue_t};

use super::power::{milliwatts, violation_ns};
use super::{View, errors, link_fields};
use crate::code::Code;
use crate::control::Throttle;
use crate::driver_level::canonical_field_id;
use crate::profile::Virtualization;

/// Scopes of a power field.
const GPU: u32 = 0;
const MODULE: u32 = 1;

/// A typed field value.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Value {
    Unsigned(u32),
    Long(u64),
    /// Traffic or energy, which can be made to wrap.
    Counter(u64),
    Signed(i32),
}

/// A power reading of the GPU or, where the board tells it, of the whole module.
fn power(view: &View<'_>, scope: u32, watts: f64) -> Result<Value, Code> {
    match scope {
        GPU => Ok(Value::Unsigned(milliwatts(watts))),
        MODULE => {
            let watts = view.load().module_watts.ok_or(Code::NOT_SUPPORTED)?;
            Ok(Value::Unsigned(milliwatts(watts)))
        }
        _ => Err(Code::NOT_SUPPORTED),
    }
}

/// A power limit: limits are the GPU's.
fn power_limit(scope: u32, watts: f64) -> Result<Value, Code> {
    super::supported(scope == GPU)?;
    Ok(Value::Unsigned(milliwatts(watts)))
}

fn remapped(view: &View<'_>, value: u32) -> Result<Value, Code> {
    super::supported(view.profile().ecc.row_remapping).map(|()| Value::Unsigned(value))
}

fn margin(view: &View<'_>, limit: Option<u32>, current: f64) -> Result<Value, Code> {
    super::supported(view.profile().temperature.margins)?;
    limit
        .map(|limit| Value::Signed(limit as i32 - current.round() as i32))
        .ok_or(Code::NOT_SUPPORTED)
}

/// Reads field `id`, canonical numbering.
fn read(view: &View<'_>, id: u32, scope: u32) -> Result<Value, Code> {
    let (load, totals, integrals) = (view.load(), &view.gpu().totals, &view.gpu().integrals);
    let (profile, power_figures) = (view.profile(), &view.profile().power);
    let temperature = &profile.temperature;
    // A guest is told of its ECC mode, and of nothing else of the board.
    let of_ecc_mode = matches!(
        id,
        field_id::NVML_FI_DEV_ECC_CURRENT | field_id::NVML_FI_DEV_ECC_PENDING
    );
    super::supported(profile.virtualization != Virtualization::Vgpu || of_ecc_mode)?;
    if let Some(value) = link_fields::read(view, id, scope) {
        return value;
    }
    match id {
        field_id::NVML_FI_DEV_ECC_CURRENT | field_id::NVML_FI_DEV_ECC_PENDING => {
            super::supported(profile.ecc.supported).map(|()| Value::Unsigned(1))
        }
        // Single-bit totals are odd ids, double-bit totals even ones; volatile, then aggregate.
        field_id::NVML_FI_DEV_ECC_SBE_VOL_TOTAL..=field_id::NVML_FI_DEV_ECC_DBE_AGG_TOTAL => {
            errors::ecc_total(view, id.is_multiple_of(2)).map(Value::Long)
        }
        field_id::NVML_FI_DEV_RETIRED_SBE | field_id::NVML_FI_DEV_RETIRED_DBE => {
            super::supported(profile.ecc.retired_pages)?;
            let double = id == field_id::NVML_FI_DEV_RETIRED_DBE;
            Ok(Value::Long(u64::from(if double {
                totals.retired.double_bit
            } else {
                totals.retired.single_bit
            })))
        }
        field_id::NVML_FI_DEV_RETIRED_PENDING
        | field_id::NVML_FI_DEV_RETIRED_PENDING_SBE
        | field_id::NVML_FI_DEV_RETIRED_PENDING_DBE => {
            super::supported(profile.ecc.retired_pages)?;
            Ok(Value::Unsigned(u32::from(totals.retired.pending)))
        }
        field_id::NVML_FI_DEV_PERF_POLICY_POWER..=field_id::NVML_FI_DEV_PERF_POLICY_RELIABILITY => {
            violation_ns(view, id - field_id::NVML_FI_DEV_PERF_POLICY_POWER).map(Value::Long)
        }
        field_id::NVML_FI_DEV_PERF_POLICY_TOTAL_APP_CLOCKS => violation_ns(view, 10).map(Value::Long),
        field_id::NVML_FI_DEV_PERF_POLICY_TOTAL_BASE_CLOCKS => violation_ns(view, 11).map(Value::Long),
        field_id::NVML_FI_DEV_MEMORY_TEMP => {
            super::supported(temperature.memory_sensor)?;
            Ok(Value::Unsigned(load.memory_temperature.round().max(0.0) as u32))
        }
        field_id::NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION | field_id::NVML_FI_DEV_ENERGY => {
            Ok(Value::Counter((integrals.energy_joules * 1000.0) as u64))
        }
        field_id::NVML_FI_DEV_PCIE_REPLAY_COUNTER => Ok(Value::Unsigned(totals.pcie_replays as u32)),
        field_id::NVML_FI_DEV_PCIE_REPLAY_ROLLOVER_COUNTER
        | field_id::NVML_FI_DEV_PCIE_L0_TO_RECOVERY_COUNTER
        | field_id::NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS..=field_id::NVML_FI_DEV_PCIE_COUNT_LANE_ERROR => {
            Ok(Value::Unsigned(0))
        }
        field_id::NVML_FI_DEV_REMAPPED_COR => remapped(view, totals.remapped.correctable),
        field_id::NVML_FI_DEV_REMAPPED_UNC => remapped(view, totals.remapped.uncorrectable),
        field_id::NVML_FI_DEV_REMAPPED_PENDING => remapped(view, u32::from(totals.remapped.pending)),
        field_id::NVML_FI_DEV_REMAPPED_FAILURE => remapped(view, u32::from(totals.remapped.failure)),
        field_id::NVML_FI_DEV_POWER_AVERAGE => {
            super::supported(power_figures.average_supported)?;
            power(view, scope, load.power_watts)
        }
        field_id::NVML_FI_DEV_POWER_INSTANT => power(view, scope, load.power_watts),
        field_id::NVML_FI_DEV_POWER_MIN_LIMIT => power_limit(scope, power_figures.min_limit_watts),
        field_id::NVML_FI_DEV_POWER_MAX_LIMIT => power_limit(scope, power_figures.max_limit_watts),
        field_id::NVML_FI_DEV_POWER_DEFAULT_LIMIT
        | field_id::NVML_FI_DEV_POWER_CURRENT_LIMIT
        | field_id::NVML_FI_DEV_POWER_REQUESTED_LIMIT => power_limit(scope, power_figures.limit_watts),
        field_id::NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT => {
            margin(view, Some(temperature.shutdown_celsius), load.temperature)
        }
        field_id::NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT => {
            margin(view, Some(temperature.slowdown_celsius), load.temperature)
        }
        field_id::NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT => {
            margin(view, temperature.memory_max_celsius, load.memory_temperature)
        }
        field_id::NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT => {
            margin(view, Some(temperature.gpu_max_celsius), load.temperature)
        }
        field_id::NVML_FI_DEV_PCIE_COUNT_TX_BYTES => Ok(Value::Counter(integrals.pcie_tx_bytes as u64)),
        field_id::NVML_FI_DEV_PCIE_COUNT_RX_BYTES => Ok(Value::Counter(integrals.pcie_rx_bytes as u64)),
        field_id::NVML_FI_DEV_RESET_STATUS | field_id::NVML_FI_DEV_DRAIN_AND_RESET_STATUS => {
            Ok(Value::Unsigned(0))
        }
        field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION => Ok(Value::Unsigned(view.gpu().recovery_action)),
        field_id::NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN => {
            Ok(Value::Long(integrals.throttled_ns(Throttle::SwThermal)))
        }
        field_id::NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN => {
            Ok(Value::Long(integrals.throttled_ns(Throttle::HwThermal)))
        }
        field_id::NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN => {
            Ok(Value::Long(integrals.throttled_ns(Throttle::HwPowerBrake)))
        }
        _ => Err(Code::NOT_SUPPORTED),
    }
}

/// Answers one entry in place.
fn answer(view: &View<'_>, entry: &mut nvmlFieldValue_t, latency_us: u64) {
    let driver = &view.state.settings.driver;
    let known = entry.fieldId > 0 && entry.fieldId < driver.field_id_end();
    let canonical = canonical_field_id(driver.renumbered_fields(), entry.fieldId);
    let value = view.begin_entry(entry.fieldId).and_then(|()| {
        if known {
            read(view, canonical, entry.scopeId)
        } else {
            Err(Code::INVALID_ARGUMENT)
        }
    });
    entry.timestamp = view.state.now_us as i64;
    entry.latencyUsec = latency_us as i64;
    entry.value = nvmlValue_t { ullVal: 0 };
    (entry.valueType, entry.nvmlReturn) = match value {
        Ok(Value::Unsigned(value)) => {
            entry.value.uiVal = view.int(value);
            (1, 0)
        }
        Ok(Value::Long(value)) => {
            entry.value.ullVal = view.long(value);
            (3, 0)
        }
        Ok(Value::Counter(value)) => {
            entry.value.ullVal = view.long(view.counter(value));
            (3, 0)
        }
        Ok(Value::Signed(value)) => {
            entry.value.siVal = value;
            (5, 0)
        }
        Err(Code(code)) => (0, code),
    };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetFieldValues(
    device: nvmlDevice_t,
    count: c_int,
    values: *mut nvmlFieldValue_t,
) -> nvmlReturn_t {
    super::about_device("nvmlDeviceGetFieldValues", device, |view| {
        let count = usize::try_from(count).map_err(|_| Code::INVALID_ARGUMENT)?;
        if values.is_null() || count == 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        let latency_us = view.state.settings.call_cost_us;
        for nth in 0..count {
            // SAFETY: the client passes `count` entries.
            answer(view, unsafe { &mut *values.add(nth) }, latency_us);
        }
        Ok(())
    })
}
