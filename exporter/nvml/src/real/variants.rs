//! Readings that newer and older drivers answer by different calls.
//!
//! Invariants: the older call is used only where the newer is unknown to the library or driver; "not supported" by
//! the device is final for both.

use nvml_wrapper_sys::bindings::{
    nvmlGpuFabricInfo_t, nvmlGpuFabricInfo_v3_t, nvmlMemory_t, nvmlMemory_v2_t, nvmlReturn_t,
    nvmlTemperature_v1_t,
};

use super::device::RealDevice;
use crate::call::Call;
use crate::model::{Fabric, FabricState, Memory};
use crate::reading::{Code, Gap, Reading, Rejection};

/// Which of two calls for the same thing the driver knows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Variant {
    Newer,
    Older,
}

impl RealDevice {
    pub(super) fn memory_v2(&self) -> Result<Reading<Memory>, Code> {
        let mut memory = nvmlMemory_v2_t {
            version: versioned::<nvmlMemory_v2_t>(2),
            total: 0,
            reserved: 0,
            free: 0,
            used: 0,
        };
        self.hot(
            Call::MemoryInfo,
            &self.inner.lib().nvmlDeviceGetMemoryInfo_v2,
            |symbol| {
                // SAFETY: handle of this library; the struct has the layout its version word says.
                unsafe { symbol(self.handle, &raw mut memory) }
            },
        )?;
        Ok(Memory::checked(
            memory.total,
            memory.used,
            memory.free,
            Some(memory.reserved),
        ))
    }

    pub(super) fn memory_v1(&self) -> Result<Reading<Memory>, Code> {
        let mut memory = nvmlMemory_t {
            total: 0,
            free: 0,
            used: 0,
        };
        self.hot(
            Call::MemoryInfo,
            &self.inner.lib().nvmlDeviceGetMemoryInfo,
            |symbol| {
                // SAFETY: handle of this library; the out pointer is valid for the call.
                unsafe { symbol(self.handle, &raw mut memory) }
            },
        )?;
        Ok(Memory::checked(memory.total, memory.used, memory.free, None))
    }

    pub(super) fn temperature_v(&self) -> Result<i64, Code> {
        let mut temperature = nvmlTemperature_v1_t {
            version: versioned::<nvmlTemperature_v1_t>(1),
            sensorType: 0,
            temperature: i32::MAX,
        };
        self.hot(
            Call::TemperatureV,
            &self.inner.lib().nvmlDeviceGetTemperatureV,
            |symbol| {
                // SAFETY: handle of this library; the struct has the layout its version word says.
                unsafe { symbol(self.handle, &raw mut temperature) }
            },
        )?;
        Ok(i64::from(temperature.temperature))
    }

    pub(super) fn temperature_v1(&self) -> Result<i64, Code> {
        let mut degrees = u32::MAX;
        self.hot(
            Call::Temperature,
            &self.inner.lib().nvmlDeviceGetTemperature,
            |symbol| {
                // SAFETY: handle of this library; the out pointer is valid for the call.
                unsafe { symbol(self.handle, 0, &raw mut degrees) }
            },
        )?;
        Ok(i64::from(degrees))
    }

    pub(super) fn fabric_v3(&self) -> Result<Reading<Fabric>, Code> {
        let mut info = nvmlGpuFabricInfo_v3_t {
            version: versioned::<nvmlGpuFabricInfo_v3_t>(3),
            clusterUuid: [0; 16],
            status: 0,
            cliqueId: 0,
            state: 0,
            healthMask: 0,
            healthSummary: 0,
        };
        self.hot(
            Call::FabricInfoV,
            &self.inner.lib().nvmlDeviceGetGpuFabricInfoV,
            |symbol| {
                // SAFETY: handle of this library; the struct has the layout its version word says.
                unsafe { symbol(self.handle, &raw mut info) }
            },
        )?;
        Ok(fabric(info.state, info.clusterUuid, info.cliqueId, info.status))
    }

    pub(super) fn fabric_v1(&self) -> Result<Reading<Fabric>, Code> {
        let mut info = nvmlGpuFabricInfo_t {
            clusterUuid: [0; 16],
            status: 0,
            cliqueId: 0,
            state: 0,
        };
        self.hot(
            Call::FabricInfo,
            &self.inner.lib().nvmlDeviceGetGpuFabricInfo,
            |symbol| {
                // SAFETY: handle of this library; the out pointer is valid for the call.
                unsafe { symbol(self.handle, &raw mut info) }
            },
        )?;
        Ok(fabric(info.state, info.clusterUuid, info.cliqueId, info.status))
    }
}

/// Asks by the newer call, else by the older one, and says which one the driver knows.
///
/// Only a missing symbol or an unknown version leads to the older call; "not supported" by the device is final.
pub(super) fn either<T>(
    known: Variant,
    call: Call,
    newer: impl FnOnce() -> Result<T, Code>,
    older: impl FnOnce() -> Result<T, Code>,
) -> (Variant, Reading<T>) {
    if known == Variant::Newer {
        match newer() {
            Err(Code::FUNCTION_NOT_FOUND | Code::ARGUMENT_VERSION_MISMATCH | Code::DEPRECATED) => {}
            other => return (known, other.map_err(|code| code.gap(call))),
        }
    }
    let outcome = older();
    let known = if outcome.is_ok() { Variant::Older } else { known };
    (known, outcome.map_err(|code| code.gap(call)))
}

/// NVML's version word: size in the low 24 bits, version above.
const fn versioned<T>(version: u32) -> u32 {
    #[allow(
        clippy::cast_possible_truncation,
        reason = "sizes of NVML structs are far below 2^24"
    )]
    let size = size_of::<T>() as u32;
    size | version << 24
}

fn fabric(state: u8, cluster: [u8; 16], clique: u32, status: nvmlReturn_t) -> Reading<Fabric> {
    let state = match state {
        0 => FabricState::NotSupported,
        1 => FabricState::NotStarted,
        2 => FabricState::InProgress,
        3 => FabricState::Completed,
        _ => return Err(Gap::Rejected(Rejection::Implausible)),
    };
    Ok(Fabric {
        state,
        cluster: (cluster != [0; 16]).then_some(cluster),
        clique,
        joined: state == FabricState::Completed && status == 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fabric_without_cluster_has_no_domain() {
        let joined = fabric(3, [0; 16], 7, 0).unwrap();
        assert_eq!(joined.cluster, None);
        assert!(joined.joined);
        assert!(!fabric(2, [1; 16], 7, 0).unwrap().joined);
        assert_eq!(
            fabric(9, [1; 16], 7, 0),
            Err(Gap::Rejected(Rejection::Implausible))
        );
    }

    #[test]
    fn the_older_call_is_used_only_when_the_newer_is_unknown() {
        let ask = |newer| either(Variant::Newer, Call::MemoryInfo, || newer, || Ok(1));
        assert!(ask(Err(Code::NOT_SUPPORTED)) == (Variant::Newer, Err(Gap::Unsupported)));
        assert!(ask(Err(Code::FUNCTION_NOT_FOUND)) == (Variant::Older, Ok(1)));
        assert!(ask(Ok(2)) == (Variant::Newer, Ok(2)));
    }
}
