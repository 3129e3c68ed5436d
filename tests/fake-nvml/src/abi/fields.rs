//! `nvmlDeviceGetFieldValues`: many small readings in one call.
//!
//! Ids that moved between 12.x and 13.0 Update 1 are understood in the numbering of the driver level only: asked
//! by the wrong number, a driver answers another field or NOT_SUPPORTED, never the one that was meant. An id past
//! the level's last one is INVALID_ARGUMENT. Codes are per entry; the call itself succeeds.

use std::ffi::c_int;

use nvml_wrapper_sys::bindings::{field_id, nvmlDevice_t, nvmlFieldValue_t, nvmlReturn_t, nvmlValue_t};

use super::power::{milliwatts, violation_ns};
use super::{View, errors, links};
use crate::code::Code;
use crate::control::Throttle;
use crate::driver_level::canonical_field_id;

/// Scope of a link field that asks for the sum of all links.
const ALL_LINKS: u32 = u32::MAX;
const KIB: f64 = 1024.0;
/// Raw NVLink traffic over payload: headers and CRC.
const RAW_OVERHEAD: f64 = 1.125;

/// A typed field value.
#[derive(Debug, Clone, Copy)]
enum Value {
    Unsigned(u32),
    Long(u64),
    Signed(i32),
}

/// Bytes of all links as KiB of the links in `scope`. Traffic is spread evenly over all links, up or down, so that
/// a link that goes down does not take bytes back from the others.
fn link_kib(view: &View<'_>, scope: u32, bytes: f64) -> Result<Value, Code> {
    let links = view.profile().nvlink_links();
    if scope == ALL_LINKS && links > 0 {
        return Ok(Value::Long((bytes / KIB) as u64));
    }
    links::link(view, scope)?;
    Ok(Value::Long((bytes / KIB / f64::from(links)) as u64))
}

fn link_errors(view: &View<'_>, scope: u32, counter: u32) -> Result<Value, Code> {
    links::errors(view, if scope == ALL_LINKS { 0 } else { scope }, counter).map(Value::Long)
}

/// A power reading of the GPU; module and memory power are not modelled yet.
fn power(scope: u32, watts: f64) -> Result<Value, Code> {
    if scope == 0 {
        Ok(Value::Unsigned(milliwatts(watts)))
    } else {
        Err(Code::NOT_SUPPORTED)
    }
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
        field_id::NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL => link_errors(view, ALL_LINKS, 2),
        field_id::NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL => link_errors(view, ALL_LINKS, 3),
        field_id::NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL => link_errors(view, ALL_LINKS, 0),
        field_id::NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL => link_errors(view, ALL_LINKS, 1),
        field_id::NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_TOTAL => link_errors(view, ALL_LINKS, 4),
        field_id::NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY => link_errors(view, scope, 0),
        field_id::NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY => link_errors(view, scope, 1),
        field_id::NVML_FI_DEV_NVLINK_ERROR_DL_CRC => link_errors(view, scope, 2),
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
            Ok(Value::Long((integrals.energy_joules * 1000.0) as u64))
        }
        field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON => {
            links::link(view, 0).map(|nvlink| Value::Unsigned(nvlink.speed_mbps))
        }
        field_id::NVML_FI_DEV_NVLINK_LINK_COUNT => {
            links::link(view, 0).map(|nvlink| Value::Unsigned(nvlink.links))
        }
        field_id::NVML_FI_DEV_PCIE_REPLAY_COUNTER => Ok(Value::Unsigned(totals.pcie_replays as u32)),
        field_id::NVML_FI_DEV_PCIE_REPLAY_ROLLOVER_COUNTER
        | field_id::NVML_FI_DEV_PCIE_L0_TO_RECOVERY_COUNTER
        | field_id::NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS..=field_id::NVML_FI_DEV_PCIE_COUNT_LANE_ERROR => {
            Ok(Value::Unsigned(0))
        }
        field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX => link_kib(view, scope, integrals.nvlink_tx_bytes),
        field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX => link_kib(view, scope, integrals.nvlink_rx_bytes),
        field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_TX => {
            link_kib(view, scope, integrals.nvlink_tx_bytes * RAW_OVERHEAD)
        }
        field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_RX => {
            link_kib(view, scope, integrals.nvlink_rx_bytes * RAW_OVERHEAD)
        }
        field_id::NVML_FI_DEV_REMAPPED_COR => remapped(view, totals.remapped.correctable),
        field_id::NVML_FI_DEV_REMAPPED_UNC => remapped(view, totals.remapped.uncorrectable),
        field_id::NVML_FI_DEV_REMAPPED_PENDING => remapped(view, u32::from(totals.remapped.pending)),
        field_id::NVML_FI_DEV_REMAPPED_FAILURE => remapped(view, u32::from(totals.remapped.failure)),
        field_id::NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT => {
            links::link(view, 0).map(|nvlink| Value::Unsigned(if nvlink.switched { nvlink.links } else { 0 }))
        }
        field_id::NVML_FI_DEV_NVLINK_GET_SPEED => links::link(view, scope)
            .map(|nvlink| Value::Unsigned(if load.link_up(scope) { nvlink.speed_mbps } else { 0 })),
        field_id::NVML_FI_DEV_NVLINK_GET_STATE => {
            links::link(view, scope).map(|_| Value::Unsigned(u32::from(load.link_up(scope))))
        }
        field_id::NVML_FI_DEV_NVLINK_GET_VERSION => {
            links::link(view, scope).map(|nvlink| Value::Unsigned(nvlink.version))
        }
        field_id::NVML_FI_DEV_POWER_AVERAGE => {
            super::supported(power_figures.average_supported)?;
            power(scope, load.power_watts)
        }
        field_id::NVML_FI_DEV_POWER_INSTANT => power(scope, load.power_watts),
        field_id::NVML_FI_DEV_POWER_MIN_LIMIT => power(scope, power_figures.min_limit_watts),
        field_id::NVML_FI_DEV_POWER_MAX_LIMIT => power(scope, power_figures.max_limit_watts),
        field_id::NVML_FI_DEV_POWER_DEFAULT_LIMIT
        | field_id::NVML_FI_DEV_POWER_CURRENT_LIMIT
        | field_id::NVML_FI_DEV_POWER_REQUESTED_LIMIT => power(scope, power_figures.limit_watts),
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
        field_id::NVML_FI_DEV_PCIE_COUNT_TX_BYTES => Ok(Value::Long(integrals.pcie_tx_bytes as u64)),
        field_id::NVML_FI_DEV_PCIE_COUNT_RX_BYTES => Ok(Value::Long(integrals.pcie_rx_bytes as u64)),
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
    let value = if known {
        read(
            view,
            canonical_field_id(driver.renumbered_fields(), entry.fieldId),
            entry.scopeId,
        )
    } else {
        Err(Code::INVALID_ARGUMENT)
    };
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
