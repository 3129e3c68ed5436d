//! One GPU of the real library.
//!
//! Invariants: the handle is used only while `inner` keeps its library open; which variant of a call a driver knows
//! is found once and remembered.

use std::sync::Arc;

use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::enums::device::DeviceArchitecture;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlEventTypeXidCriticalError, nvmlFieldValue_t, nvmlReturn_t, nvmlUtilization_t,
    nvmlValue_t,
};

use super::gpm::Sampler;
use super::variants::{Variant, either};
use super::{Inner, key};
use crate::call::{Call, InFlight};
use crate::field::{FieldQuery, Number};
use crate::model::{
    ClockDomain, ClockEvents, Device, DeviceKey, Fabric, Facts, Gpm, Memory, RemappedRows, Utilization,
};
use crate::quantity::{Celsius, Hertz, Ratio, Watts};
use crate::reading::{Code, Gap, Reading, Rejection};

/// A GPU's handle with what is remembered about it.
pub(super) struct RealDevice {
    pub(super) inner: Arc<Inner>,
    pub(super) handle: nvmlDevice_t,
    in_flight: Arc<InFlight>,
    values: Vec<nvmlFieldValue_t>,
    gpm: Sampler,
    memory_call: Variant,
    temperature_call: Variant,
    reasons_call: Variant,
    fabric_call: Variant,
}

// SAFETY: NVML is thread-safe and its handles may move between threads; this type is used by one thread at a time.
unsafe impl Send for RealDevice {}

impl RealDevice {
    pub(super) fn new(inner: Arc<Inner>, handle: nvmlDevice_t, in_flight: Arc<InFlight>) -> Self {
        Self {
            gpm: Sampler::new(Arc::clone(&inner), handle, Arc::clone(&in_flight)),
            inner,
            handle,
            in_flight,
            values: Vec::new(),
            memory_call: Variant::Newer,
            temperature_call: Variant::Newer,
            reasons_call: Variant::Newer,
            fabric_call: Variant::Newer,
        }
    }

    pub(super) fn hot<F: Copy, E>(
        &self,
        call: Call,
        symbol: &Result<F, E>,
        body: impl FnOnce(F) -> nvmlReturn_t,
    ) -> Result<(), Code> {
        self.inner.hot(Some(&self.in_flight), call, symbol, body)
    }

    fn cold<'inner, T>(
        &'inner self,
        call: Call,
        body: impl FnOnce(&nvml_wrapper::Device<'inner>) -> Result<T, NvmlError>,
    ) -> Reading<T> {
        // SAFETY: the handle came from this very library.
        let device = unsafe { nvml_wrapper::Device::new(self.handle, &self.inner.nvml) };
        self.inner.cold(Some(&self.in_flight), call, || body(&device))
    }
}

impl Device for RealDevice {
    fn key(&self) -> DeviceKey {
        key(self.handle)
    }

    fn facts(&mut self) -> Reading<Facts> {
        let uuid = self.cold(Call::Uuid, nvml_wrapper::Device::uuid)?;
        let architecture = self.cold(Call::Architecture, |device| match device.architecture() {
            // The wrapper calls an architecture it does not know an error; to us it is a name we do not have.
            Err(NvmlError::UnexpectedVariant(_)) => Ok(DeviceArchitecture::Unknown),
            other => other,
        });
        Ok(Facts {
            uuid,
            model: self
                .cold(Call::Name, nvml_wrapper::Device::name)
                .unwrap_or_else(|_| "unknown".to_owned()),
            architecture: architecture.as_ref().map_or("unknown", architecture_name),
            pci_bus_id: self
                .cold(Call::PciInfo, nvml_wrapper::Device::pci_info)
                .ok()
                .map(|pci| pci.bus_id),
            serial: self
                .cold(Call::Serial, nvml_wrapper::Device::serial)
                .ok()
                .filter(|serial| !serial.is_empty()),
            minor: self
                .cold(Call::MinorNumber, nvml_wrapper::Device::minor_number)
                .ok(),
            compute_capability: self
                .cold(
                    Call::ComputeCapability,
                    nvml_wrapper::Device::cuda_compute_capability,
                )
                .ok()
                .and_then(|pair| Some((u32::try_from(pair.major).ok()?, u32::try_from(pair.minor).ok()?))),
        })
    }

    fn utilization(&mut self) -> Reading<Utilization> {
        let mut rates = nvmlUtilization_t {
            gpu: u32::MAX,
            memory: u32::MAX,
        };
        let call = Call::UtilizationRates;
        self.hot(call, &self.inner.lib().nvmlDeviceGetUtilizationRates, |symbol| {
            // SAFETY: handle of this library; the out pointer is valid for the call.
            unsafe { symbol(self.handle, &raw mut rates) }
        })
        .map_err(|code| code.gap(call))?;
        Ok(Utilization {
            busy: percent(rates.gpu),
            memory_bandwidth: percent(rates.memory),
        })
    }

    fn memory(&mut self) -> Reading<Memory> {
        let (known, outcome) = either(
            self.memory_call,
            Call::MemoryInfo,
            || self.memory_v2(),
            || self.memory_v1(),
        );
        self.memory_call = known;
        outcome?
    }

    fn fields(&mut self, queries: &mut [FieldQuery]) -> Reading<()> {
        let numbering = self.inner.numbering;
        self.values.clear();
        self.values.extend(queries.iter().map(|query| nvmlFieldValue_t {
            fieldId: query.field.id(numbering),
            scopeId: query.scope.id(),
            timestamp: 0,
            latencyUsec: 0,
            valueType: u32::MAX,
            // An entry that the driver leaves untouched must not look like a success.
            nvmlReturn: Code::NO_DATA.0,
            value: nvmlValue_t { ullVal: 0 },
        }));
        if self.values.is_empty() {
            return Ok(());
        }
        let count = i32::try_from(self.values.len()).unwrap_or(i32::MAX);
        let values = self.values.as_mut_ptr();
        let call = Call::FieldValues;
        self.hot(call, &self.inner.lib().nvmlDeviceGetFieldValues, |symbol| {
            // SAFETY: handle of this library; `values` points to `count` initialised entries.
            unsafe { symbol(self.handle, count, values) }
        })
        .map_err(|code| code.gap(call))?;
        for (query, value) in queries.iter_mut().zip(&self.values) {
            query.answer = decode(value);
            if let Err(Gap::Failed { code, call }) = query.answer {
                self.inner.log.failed(call, code);
            }
        }
        Ok(())
    }

    fn gpm(&mut self) -> Reading<Gpm> {
        self.gpm.read()
    }

    fn power_usage(&mut self) -> Reading<Watts> {
        let mut milliwatts = u32::MAX;
        let call = Call::PowerUsage;
        self.hot(call, &self.inner.lib().nvmlDeviceGetPowerUsage, |symbol| {
            // SAFETY: handle of this library; the out pointer is valid for the call.
            unsafe { symbol(self.handle, &raw mut milliwatts) }
        })
        .map_err(|code| code.gap(call))?;
        Watts::from_milliwatts(u64::from(milliwatts))
    }

    fn temperature(&mut self) -> Reading<Celsius> {
        let (known, outcome) = either(
            self.temperature_call,
            Call::Temperature,
            || self.temperature_v(),
            || self.temperature_v1(),
        );
        self.temperature_call = known;
        Celsius::from_degrees(outcome?)
    }

    fn clock(&mut self, domain: ClockDomain) -> Reading<Hertz> {
        let clock = match domain {
            ClockDomain::Graphics => Clock::Graphics,
            ClockDomain::Sm => Clock::SM,
            ClockDomain::Memory => Clock::Memory,
            ClockDomain::Video => Clock::Video,
        };
        Hertz::from_megahertz(u64::from(
            self.cold(Call::ClockInfo, |device| device.clock_info(clock))?,
        ))
    }

    fn clock_events(&mut self) -> Reading<ClockEvents> {
        let ask = |call, newer: bool| {
            let mut mask = u64::MAX;
            let lib = self.inner.lib();
            let symbol = if newer {
                &lib.nvmlDeviceGetCurrentClocksEventReasons
            } else {
                &lib.nvmlDeviceGetCurrentClocksThrottleReasons
            };
            self.hot(call, symbol, |symbol| {
                // SAFETY: handle of this library; the out pointer is valid for the call.
                unsafe { symbol(self.handle, &raw mut mask) }
            })?;
            Ok(mask)
        };
        let (known, outcome) = either(
            self.reasons_call,
            Call::ClocksEventReasons,
            || ask(Call::ClocksEventReasons, true),
            || ask(Call::ClocksThrottleReasons, false),
        );
        self.reasons_call = known;
        let mask = outcome?;
        if mask == u64::MAX {
            Err(Gap::Rejected(Rejection::Sentinel))
        } else {
            Ok(ClockEvents(mask))
        }
    }

    fn remapped_rows(&mut self) -> Reading<RemappedRows> {
        let (mut correctable, mut uncorrectable, mut pending, mut failed) =
            (u32::MAX, u32::MAX, u32::MAX, u32::MAX);
        let call = Call::RemappedRows;
        self.hot(call, &self.inner.lib().nvmlDeviceGetRemappedRows, |symbol| {
            // SAFETY: handle of this library; the out pointers are valid for the call.
            unsafe {
                symbol(
                    self.handle,
                    &raw mut correctable,
                    &raw mut uncorrectable,
                    &raw mut pending,
                    &raw mut failed,
                )
            }
        })
        .map_err(|code| code.gap(call))?;
        if correctable == u32::MAX || uncorrectable == u32::MAX {
            return Err(Gap::Rejected(Rejection::Sentinel));
        }
        if pending > 1 || failed > 1 {
            return Err(Gap::Rejected(Rejection::Implausible));
        }
        Ok(RemappedRows {
            correctable,
            uncorrectable,
            pending: pending == 1,
            failed: failed == 1,
        })
    }

    fn fabric(&mut self) -> Reading<Fabric> {
        let (known, outcome) = either(
            self.fabric_call,
            Call::FabricInfoV,
            || self.fabric_v3(),
            || self.fabric_v1(),
        );
        self.fabric_call = known;
        outcome?
    }

    fn link_is_up(&mut self, link: u32) -> Reading<bool> {
        let mut active = u32::MAX;
        let call = Call::NvLinkState;
        self.hot(call, &self.inner.lib().nvmlDeviceGetNvLinkState, |symbol| {
            // SAFETY: handle of this library; the out pointer is valid for the call.
            unsafe { symbol(self.handle, link, &raw mut active) }
        })
        .map_err(|code| code.gap(call))?;
        match active {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Gap::Rejected(Rejection::Implausible)),
        }
    }

    fn subscribe(&mut self) -> Reading<()> {
        let set = self.inner.events.as_ref().ok_or(Gap::Unsupported)?;
        let call = Call::RegisterEvents;
        self.hot(call, &self.inner.lib().nvmlDeviceRegisterEvents, |symbol| {
            // SAFETY: handle and set of this library. Raw, because the wrapper frees the set when one device refuses.
            unsafe { symbol(self.handle, u64::from(nvmlEventTypeXidCriticalError), set.0) }
        })
        .map_err(|code| code.gap(call))
    }
}

fn percent(value: u32) -> Reading<Ratio> {
    if value == u32::MAX {
        return Err(Gap::Rejected(Rejection::Sentinel));
    }
    Ratio::from_percent(f64::from(value))
}

fn decode(value: &nvmlFieldValue_t) -> Reading<Number> {
    match Code(value.nvmlReturn) {
        Code(0) => {}
        // A field id or link that this driver does not know.
        Code::INVALID_ARGUMENT => return Err(Gap::Unsupported),
        code => return Err(code.gap(Call::FieldValues)),
    }
    let union = value.value;
    // SAFETY: every bit pattern is valid for every member, and the whole union was initialised before the call.
    let number = unsafe {
        match value.valueType {
            0 => Number::F64(union.dVal),
            1 => Number::U32(union.uiVal),
            2 => Number::U64(union.ulVal),
            3 => Number::U64(union.ullVal),
            4 => Number::I64(union.sllVal),
            5 => Number::I32(union.siVal),
            6 => Number::U32(u32::from(union.usVal)),
            _ => return Err(Gap::Rejected(Rejection::UnexpectedType)),
        }
    };
    Ok(number)
}

fn architecture_name(architecture: &DeviceArchitecture) -> &'static str {
    match architecture {
        DeviceArchitecture::Kepler => "kepler",
        DeviceArchitecture::Maxwell => "maxwell",
        DeviceArchitecture::Pascal => "pascal",
        DeviceArchitecture::Volta => "volta",
        DeviceArchitecture::Turing => "turing",
        DeviceArchitecture::Ampere => "ampere",
        DeviceArchitecture::Ada => "ada",
        DeviceArchitecture::Hopper => "hopper",
        DeviceArchitecture::Blackwell => "blackwell",
        DeviceArchitecture::Unknown => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_entry_the_driver_did_not_touch_is_no_value() {
        let value = nvmlFieldValue_t {
            fieldId: 1,
            scopeId: 0,
            timestamp: 0,
            latencyUsec: 0,
            valueType: u32::MAX,
            nvmlReturn: 0,
            value: nvmlValue_t { ullVal: 0 },
        };
        assert_eq!(decode(&value), Err(Gap::Rejected(Rejection::UnexpectedType)));
    }
}
