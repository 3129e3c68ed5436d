//! NVML return codes.

use nvml_wrapper_sys::bindings as sys;

/// A return code other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) u32);

impl Code {
    pub(crate) const UNINITIALIZED: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
    pub(crate) const INVALID_ARGUMENT: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    pub(crate) const NOT_SUPPORTED: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
    pub(crate) const NO_PERMISSION: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION);
    pub(crate) const RESET_REQUIRED: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED);
    pub(crate) const NO_DATA: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_NO_DATA);
    pub(crate) const NOT_FOUND: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND);
    pub(crate) const INSUFFICIENT_SIZE: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    pub(crate) const DRIVER_NOT_LOADED: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED);
    pub(crate) const TIMEOUT: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT);
    pub(crate) const GPU_IS_LOST: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST);
    pub(crate) const INSUFFICIENT_RESOURCES: Self =
        Self(sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES);
    pub(crate) const VERSION_MISMATCH: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    pub(crate) const UNKNOWN: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN);

    /// Text of `nvmlErrorString` for any code.
    pub(crate) const fn text(code: u32) -> &'static std::ffi::CStr {
        match code {
            0 => c"Success",
            1 => c"Uninitialized",
            2 => c"Invalid Argument",
            3 => c"Not Supported",
            4 => c"Insufficient Permissions",
            5 => c"Already Initialized",
            6 => c"Not Found",
            7 => c"Insufficient Size",
            8 => c"Insufficient External Power",
            9 => c"Driver Not Loaded",
            10 => c"Timeout",
            11 => c"Interrupt Request Issue",
            12 => c"NVML Shared Library Not Found",
            13 => c"Function Not Found",
            14 => c"Corrupted infoROM",
            15 => c"GPU is lost",
            16 => c"GPU requires reset",
            17 => c"GPU access blocked by the operating system",
            18 => c"Driver/library version mismatch",
            19 => c"In use by another client",
            20 => c"Insufficient memory",
            21 => c"No data",
            23 => c"Insufficient resources",
            25 => c"Argument version mismatch",
            26 => c"Deprecated",
            27 => c"Not Ready",
            28 => c"GPU not found",
            29 => c"Invalid state",
            _ => c"Unknown Error",
        }
    }
}
