//! The real library: opened, counted, and closed after its last user.
//!
//! Invariants: `Inner` is dropped last, because every device and wait holds an `Arc` of it; nothing is called after
//! `nvmlShutdown`; a library without the symbol that would release something is left mapped instead.

mod device;
mod gpm;
mod variants;

use std::ffi::OsStr;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nvml_wrapper::FieldIdScheme;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::{
    NvmlLib, nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t, nvmlEventTypeXidCriticalError, nvmlReturn_t,
};

use crate::call::{self, Call, CallLog, InFlight};
use crate::field::Numbering;
use crate::model::{Device, DeviceKey, Event, EventKind, Nvml};
use crate::reading::{Code, Gap, Reading, Rejection};
use device::RealDevice;

/// What the driver's container runtime injects, found through the loader's path.
pub const DEFAULT_LIBRARY: &str = "libnvidia-ml.so.1";

/// An opened `libnvidia-ml.so.1`.
pub struct Library {
    inner: Arc<Inner>,
}

/// Why a library did not open, with the loader's words where it has any.
#[derive(Debug, thiserror::Error)]
#[error("{gap}: {detail}")]
pub struct OpenError {
    /// What went wrong, for branching and counting.
    pub gap: Gap,
    /// The words of the loader or wrapper.
    pub detail: String,
}

impl Library {
    /// Opens and initialises the library. `log` outlives it, so counts go on across re-opening.
    pub fn open(path: Option<&Path>, log: Arc<CallLog>, in_flight: &InFlight) -> Result<Self, OpenError> {
        let path: &OsStr = path.map_or_else(|| OsStr::new(DEFAULT_LIBRARY), Path::as_os_str);
        let mut detail = String::new();
        let nvml = call::run(&log, Some(in_flight), Call::Init, || {
            nvml_wrapper::Nvml::builder()
                .lib_path(path)
                .init()
                .map_err(|error| {
                    detail = error.to_string();
                    gap(&error, Call::Init)
                })
        })
        .map_err(|gap| OpenError { gap, detail })?;
        let numbering = match nvml.field_id_scheme() {
            FieldIdScheme::V12 => Numbering::V12,
            FieldIdScheme::V13Update1 => Numbering::V13Update1,
        };
        let mut inner = Inner {
            nvml: ManuallyDrop::new(nvml),
            events: None,
            log,
            numbering,
        };
        inner.events = inner.create_event_set().ok();
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Which numbering of field ids the driver uses.
    #[must_use]
    pub fn numbering(&self) -> Numbering {
        self.inner.numbering
    }
}

impl Nvml for Library {
    fn driver_version(&self) -> Reading<String> {
        self.inner
            .cold(None, Call::DriverVersion, || self.inner.nvml.sys_driver_version())
    }

    fn device_count(&self) -> Reading<u32> {
        self.inner
            .cold(None, Call::Count, || self.inner.nvml.device_count())
    }

    fn device(&self, index: u32, in_flight: Arc<InFlight>) -> Reading<Box<dyn Device>> {
        let mut handle: nvmlDevice_t = std::ptr::null_mut();
        let call = Call::HandleByIndex;
        self.inner
            .hot(
                Some(&in_flight),
                call,
                &self.inner.lib().nvmlDeviceGetHandleByIndex_v2,
                |symbol| {
                    // SAFETY: the out pointer is valid for the call.
                    unsafe { symbol(index, &raw mut handle) }
                },
            )
            .map_err(|code| code.gap(call))?;
        if handle.is_null() {
            return Err(Gap::Rejected(Rejection::Sentinel));
        }
        Ok(Box::new(RealDevice::new(
            Arc::clone(&self.inner),
            handle,
            in_flight,
        )))
    }

    fn wait_event(&self, patience: Duration) -> Reading<Option<Event>> {
        let set = self.inner.events.as_ref().ok_or(Gap::Unsupported)?;
        let symbol = self
            .inner
            .lib()
            .nvmlEventSetWait_v2
            .as_ref()
            .map_err(|_| Gap::Unsupported)?;
        let mut data = nvmlEventData_t {
            device: std::ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: 0,
            computeInstanceId: 0,
        };
        let milliseconds = u32::try_from(patience.as_millis()).unwrap_or(u32::MAX);
        // SAFETY: the set lives as long as `inner`, which `self` holds; the out pointer is valid for the call.
        // Not timed: the wait is meant to take its time.
        let code = Code(unsafe { symbol(set.0, &raw mut data, milliseconds) });
        match code {
            Code(0) => {
                let xid = u64::from(nvmlEventTypeXidCriticalError);
                let kind = if data.eventType & xid != 0 {
                    EventKind::Xid
                } else {
                    EventKind::Other(data.eventType)
                };
                Ok(Some(Event {
                    device: key(data.device),
                    kind,
                    data: data.eventData,
                }))
            }
            Code::TIMEOUT => Ok(None),
            other => {
                self.inner.log.failed(Call::EventSetWait, other);
                Err(other.gap(Call::EventSetWait))
            }
        }
    }
}

/// The event set of a library.
struct EventSet(nvmlEventSet_t);

// SAFETY: NVML documents itself as thread-safe; the handle is a token that only NVML looks behind.
unsafe impl Send for EventSet {}
// SAFETY: as above.
unsafe impl Sync for EventSet {}

struct Inner {
    nvml: ManuallyDrop<nvml_wrapper::Nvml>,
    events: Option<EventSet>,
    log: Arc<CallLog>,
    numbering: Numbering,
}

impl Inner {
    fn lib(&self) -> &NvmlLib {
        self.nvml.lib()
    }

    /// One raw call. A symbol that the library lacks answers as NVML itself would: function not found.
    fn hot<F: Copy, E>(
        &self,
        in_flight: Option<&InFlight>,
        call: Call,
        symbol: &Result<F, E>,
        body: impl FnOnce(F) -> nvmlReturn_t,
    ) -> Result<(), Code> {
        let symbol = *symbol.as_ref().map_err(|_| Code::FUNCTION_NOT_FOUND)?;
        call::run(&self.log, in_flight, call, || match body(symbol) {
            0 => Ok(()),
            code => Err(Code(code)),
        })
    }

    /// One call through the safe wrapper.
    fn cold<T>(
        &self,
        in_flight: Option<&InFlight>,
        call: Call,
        body: impl FnOnce() -> Result<T, NvmlError>,
    ) -> Reading<T> {
        call::run(&self.log, in_flight, call, || {
            body().map_err(|error| gap(&error, call))
        })
    }

    fn create_event_set(&self) -> Result<EventSet, Code> {
        let mut set: nvmlEventSet_t = std::ptr::null_mut();
        self.hot(
            None,
            Call::EventSetCreate,
            &self.lib().nvmlEventSetCreate,
            |symbol| {
                // SAFETY: the out pointer is valid for the call.
                unsafe { symbol(&raw mut set) }
            },
        )?;
        if set.is_null() {
            Err(Code::NO_DATA)
        } else {
            Ok(EventSet(set))
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let (Some(set), Ok(free)) = (self.events.take(), self.lib().nvmlEventSetFree.as_ref()) {
            // SAFETY: the set came from this library, and no wait runs: each holds an `Arc` of this value.
            let _ = unsafe { free(set.0) };
        }
        // SAFETY: taken once, here; nothing uses the field afterwards.
        let nvml = unsafe { ManuallyDrop::take(&mut self.nvml) };
        if nvml.lib().nvmlShutdown.is_err() {
            // The wrapper's drop panics without this symbol. Leaving the library mapped costs a few MiB once.
            std::mem::forget(nvml);
        } else if let Err(error) = nvml.shutdown() {
            tracing::debug!(%error, "nvml shutdown failed");
        }
    }
}

fn key(handle: nvmlDevice_t) -> DeviceKey {
    DeviceKey(handle.addr())
}

/// The wrapper's error as a gap. Its `UnexpectedVariant` carries return codes 23–30, which it has no names for.
fn gap(error: &NvmlError, call: Call) -> Gap {
    let code = match error {
        NvmlError::Utf8Error(_) | NvmlError::NulError(_) | NvmlError::StringTooLong { .. } => {
            return Gap::Rejected(Rejection::Malformed);
        }
        NvmlError::IncorrectBits(_) => return Gap::Rejected(Rejection::UnexpectedType),
        NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound => Code::LIBRARY_NOT_FOUND,
        NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => Code::FUNCTION_NOT_FOUND,
        NvmlError::UnexpectedVariant(code) => Code(*code),
        NvmlError::Uninitialized => Code::UNINITIALIZED,
        NvmlError::InvalidArg => Code::INVALID_ARGUMENT,
        NvmlError::NotSupported => Code::NOT_SUPPORTED,
        NvmlError::NoPermission => Code::NO_PERMISSION,
        NvmlError::NotFound => Code::NOT_FOUND,
        NvmlError::InsufficientSize(_) => Code(7),
        NvmlError::InsufficientPower => Code(8),
        NvmlError::DriverNotLoaded => Code::DRIVER_NOT_LOADED,
        NvmlError::Timeout => Code::TIMEOUT,
        NvmlError::IrqIssue => Code(11),
        NvmlError::CorruptedInfoROM => Code(14),
        NvmlError::GpuLost => Code::GPU_IS_LOST,
        NvmlError::ResetRequired => Code(16),
        NvmlError::OperatingSystem => Code(17),
        NvmlError::LibRmVersionMismatch => Code::LIB_RM_VERSION_MISMATCH,
        NvmlError::InUse => Code(19),
        NvmlError::InsufficientMemory => Code(20),
        NvmlError::NoData => Code::NO_DATA,
        _ => Code::UNKNOWN,
    };
    code.gap(call)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_the_wrapper_has_no_name_for_are_classified() {
        assert_eq!(
            gap(&NvmlError::UnexpectedVariant(25), Call::FabricInfoV),
            Gap::Unsupported
        );
        assert_eq!(
            gap(&NvmlError::UnexpectedVariant(28), Call::Uuid)
                .code()
                .map(Code::is_lost),
            Some(true)
        );
    }

    #[test]
    fn a_library_that_is_not_there_says_so() {
        let opened = Library::open(
            Some(Path::new("/nonexistent/libnvidia-ml.so.1")),
            Arc::default(),
            &InFlight::default(),
        );
        let error = opened.err().unwrap();
        assert_eq!(error.gap.code(), Some(Code::LIBRARY_NOT_FOUND));
        assert!(
            error.detail.contains("/nonexistent/libnvidia-ml.so.1"),
            "{}",
            error.detail
        );
    }
}
