//! What a reading is when there is no value: unsupported, failed, rejected, or not yet there.
//!
//! Invariants: [`Code`] keeps the number NVML gave, also one newer than this build, and classifies it once for all.

use crate::call::Call;

/// A value, or the reason why there is none.
pub type Reading<T> = Result<T, Gap>;

/// Why there is no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Gap {
    /// This device or driver does not offer it. Asking again soon is a waste.
    #[error("not supported by this device or driver")]
    Unsupported,
    /// The call failed.
    #[error("{call} failed: {code}")]
    Failed {
        /// What NVML returned.
        code: Code,
        /// Which call returned it.
        call: Call,
    },
    /// The call succeeded with a value that cannot be true.
    #[error("value rejected: {}", .0.as_str())]
    Rejected(Rejection),
    /// The value needs an earlier sample that is not there yet.
    #[error("waits for a second sample")]
    NotYet,
}

impl Gap {
    /// The code, where a call failed.
    #[must_use]
    pub const fn code(self) -> Option<Code> {
        match self {
            Self::Failed { code, .. } => Some(code),
            _ => None,
        }
    }
}

/// Why a value was rejected: label `reason` of the count of rejected values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rejection {
    /// A share above 100 %.
    AboveFull,
    /// Below zero where that cannot be.
    Negative,
    /// NaN or infinite.
    NotFinite,
    /// A blank that stands for "no value", such as `u32::MAX` or DCGM's 64-bit blanks.
    Sentinel,
    /// Contradicts the device's own limits or its other values.
    Implausible,
    /// Not the type this quantity comes in.
    UnexpectedType,
    /// Not text, or not terminated.
    Malformed,
}

impl Rejection {
    /// Every reason.
    pub const ALL: [Self; 7] = [
        Self::AboveFull,
        Self::Negative,
        Self::NotFinite,
        Self::Sentinel,
        Self::Implausible,
        Self::UnexpectedType,
        Self::Malformed,
    ];

    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AboveFull => "above-full",
            Self::Negative => "negative",
            Self::NotFinite => "not-finite",
            Self::Sentinel => "sentinel",
            Self::Implausible => "implausible",
            Self::UnexpectedType => "unexpected-type",
            Self::Malformed => "malformed",
        }
    }
}

/// An NVML return code, whatever its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Code(pub u32);

impl Code {
    /// The library was not initialised, or lost its driver.
    pub const UNINITIALIZED: Self = Self(1);
    /// An argument was wrong.
    pub const INVALID_ARGUMENT: Self = Self(2);
    /// The device does not offer this.
    pub const NOT_SUPPORTED: Self = Self(3);
    /// The caller may not do this.
    pub const NO_PERMISSION: Self = Self(4);
    /// Nothing there.
    pub const NOT_FOUND: Self = Self(6);
    /// The kernel driver is not loaded.
    pub const DRIVER_NOT_LOADED: Self = Self(9);
    /// The time given ran out.
    pub const TIMEOUT: Self = Self(10);
    /// The shared library is not there.
    pub const LIBRARY_NOT_FOUND: Self = Self(12);
    /// The library lacks the symbol.
    pub const FUNCTION_NOT_FOUND: Self = Self(13);
    /// The GPU fell off the bus.
    pub const GPU_IS_LOST: Self = Self(15);
    /// The library and the kernel driver differ in version.
    pub const LIB_RM_VERSION_MISMATCH: Self = Self(18);
    /// There is no data.
    pub const NO_DATA: Self = Self(21);
    /// The driver does not know this version of the argument.
    pub const ARGUMENT_VERSION_MISMATCH: Self = Self(25);
    /// The call is gone from this driver.
    pub const DEPRECATED: Self = Self(26);
    /// Anything else.
    pub const UNKNOWN: Self = Self(999);

    /// NVML's name, lower case with dashes; `other` for a code newer than this build.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self.0 {
            0 => "success",
            1 => "uninitialized",
            2 => "invalid-argument",
            3 => "not-supported",
            4 => "no-permission",
            6 => "not-found",
            7 => "insufficient-size",
            8 => "insufficient-power",
            9 => "driver-not-loaded",
            10 => "timeout",
            11 => "irq-issue",
            12 => "library-not-found",
            13 => "function-not-found",
            14 => "corrupted-inforom",
            15 => "gpu-is-lost",
            16 => "reset-required",
            17 => "operating-system",
            18 => "lib-rm-version-mismatch",
            19 => "in-use",
            20 => "memory",
            21 => "no-data",
            23 => "insufficient-resources",
            25 => "argument-version-mismatch",
            26 => "deprecated",
            27 => "not-ready",
            28 => "gpu-not-found",
            29 => "invalid-state",
            999 => "unknown",
            _ => "other",
        }
    }

    /// Whether the device or driver does not offer what was asked.
    #[must_use]
    pub const fn is_unsupported(self) -> bool {
        matches!(
            self,
            Self::NOT_SUPPORTED
                | Self::FUNCTION_NOT_FOUND
                | Self::ARGUMENT_VERSION_MISMATCH
                | Self::DEPRECATED
        )
    }

    /// Whether the GPU is gone from the bus.
    #[must_use]
    pub const fn is_lost(self) -> bool {
        matches!(self, Self::GPU_IS_LOST | Self(28))
    }

    /// Whether the driver refuses this process, as it does once the container has lost its device access.
    #[must_use]
    pub const fn is_refusal(self) -> bool {
        matches!(self, Self::UNKNOWN | Self::NO_PERMISSION)
    }

    /// Whether the code is a sign that the whole library must be opened anew, as after a driver reload.
    #[must_use]
    pub const fn asks_for_reopening(self) -> bool {
        matches!(
            self,
            Self::UNINITIALIZED | Self::UNKNOWN | Self::DRIVER_NOT_LOADED | Self::LIB_RM_VERSION_MISMATCH
        )
    }

    /// The gap that this code of `call` makes.
    #[must_use]
    pub const fn gap(self, call: Call) -> Gap {
        if self.is_unsupported() {
            Gap::Unsupported
        } else {
            Gap::Failed { code: self, call }
        }
    }
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_is_told_from_failed() {
        for code in [3, 13, 25, 26] {
            assert_eq!(Code(code).gap(Call::FieldValues), Gap::Unsupported, "{code}");
        }
        for code in [1, 4, 6, 15, 27, 28, 999, 4242] {
            assert_eq!(
                Code(code).gap(Call::FieldValues),
                Gap::Failed {
                    code: Code(code),
                    call: Call::FieldValues
                },
                "{code}"
            );
        }
    }

    #[test]
    fn a_code_newer_than_this_build_keeps_its_number() {
        assert_eq!(Code(77).to_string(), "other (77)");
        assert_eq!(
            Code(77).gap(Call::Temperature).to_string(),
            "nvmlDeviceGetTemperature failed: other (77)"
        );
    }
}
