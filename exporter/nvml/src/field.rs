//! Field values: ids with their renumbering, scopes, and the decoding of NVML's tagged union.
//!
//! Invariants: an id is translated for the driver that runs (several moved with 580.82); a blank never becomes a
//! number.

use crate::quantity::{Bytes, Joules, Watts};
use crate::reading::{Gap, Reading, Rejection};

/// Which numbering of field ids the driver uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Numbering {
    /// Before driver 580.82.
    V12,
    /// Driver 580.82 (CUDA 13.0 update 1) and newer: ids 251–273 moved.
    V13Update1,
}

/// A field of `nvmlDeviceGetFieldValues`, by its number before 580.82.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Field {
    v12: u32,
    name: &'static str,
}

macro_rules! fields {
    ($( $(#[$doc:meta])* $ident:ident = $id:literal, $name:literal; )*) => {
        impl Field {
            $( $(#[$doc])* pub const $ident: Self = Self { v12: $id, name: $name }; )*
        }
    };
}

fields! {
    /// Uncorrected ECC errors since the driver was loaded.
    ECC_UNCORRECTED_VOLATILE = 4, "ecc-uncorrected-volatile";
    /// Corrected ECC errors over the life of the device.
    ECC_CORRECTED_AGGREGATE = 5, "ecc-corrected-aggregate";
    /// Uncorrected ECC errors over the life of the device.
    ECC_UNCORRECTED_AGGREGATE = 6, "ecc-uncorrected-aggregate";
    /// NVLink CRC errors in flits, all links (before Hopper).
    NVLINK_CRC_FLIT_TOTAL = 38, "nvlink-crc-flit-total";
    /// NVLink CRC errors in data, all links (before Hopper).
    NVLINK_CRC_DATA_TOTAL = 45, "nvlink-crc-data-total";
    /// NVLink replays, all links (before Hopper).
    NVLINK_REPLAY_TOTAL = 52, "nvlink-replay-total";
    /// NVLink recoveries, all links (before Hopper).
    NVLINK_RECOVERY_TOTAL = 59, "nvlink-recovery-total";
    /// Nanoseconds held down by the software power cap.
    HELD_BY_POWER_CAP = 74, "throttle-sw-power-cap";
    /// Nanoseconds held down by the thermal policy.
    HELD_BY_THERMAL_POLICY = 75, "throttle-thermal-policy";
    /// Nanoseconds held down to stay in step with other GPUs.
    HELD_BY_SYNC_BOOST = 76, "throttle-sync-boost";
    /// Nanoseconds held down by a board limit.
    HELD_BY_BOARD_LIMIT = 77, "throttle-board-limit";
    /// Nanoseconds held down for reliability.
    HELD_BY_RELIABILITY = 79, "throttle-reliability";
    /// Temperature of device memory.
    MEMORY_TEMPERATURE = 82, "memory-temperature";
    /// Millijoules since the driver was loaded.
    ENERGY = 83, "energy";
    /// How many NVLink links the device has.
    NVLINK_COUNT = 91, "nvlink-count";
    /// PCIe replays.
    PCIE_REPLAYS = 94, "pcie-replays";
    /// NVLink payload sent, KiB; per link or summed.
    NVLINK_TX_KIB = 138, "nvlink-tx";
    /// NVLink payload received, KiB; per link or summed.
    NVLINK_RX_KIB = 139, "nvlink-rx";
    /// NVLink replays of one link.
    NVLINK_REPLAY = 161, "nvlink-replay";
    /// NVLink recoveries of one link.
    NVLINK_RECOVERY = 162, "nvlink-recovery";
    /// NVLink CRC errors of one link.
    NVLINK_CRC = 163, "nvlink-crc";
    /// Whether one link is up.
    NVLINK_STATE = 165, "nvlink-state";
    /// Milliwatts, averaged over one second.
    POWER_AVERAGE = 185, "power-average";
    /// Milliwatts right now.
    POWER_INSTANT = 186, "power-instant";
    /// PCIe bytes sent; may wrap.
    PCIE_TX_BYTES = 197, "pcie-tx";
    /// PCIe bytes received; may wrap.
    PCIE_RX_BYTES = 198, "pcie-rx";
    /// The recovery that the driver asks for.
    RECOVERY_ACTION = 230, "recovery-action";
    /// Nanoseconds held down by software for heat (moved with 580.82).
    HELD_BY_SW_THERMAL = 251, "throttle-sw-thermal";
    /// Nanoseconds held down by hardware for heat (moved with 580.82).
    HELD_BY_HW_THERMAL = 252, "throttle-hw-thermal";
    /// Nanoseconds held down by the hardware power brake (moved with 580.82).
    HELD_BY_POWER_BRAKE = 253, "throttle-hw-power-brake";
}

impl Field {
    /// A name for logs and for label `field`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.name
    }

    /// The number that the driver knows this field by.
    #[must_use]
    pub const fn id(self, numbering: Numbering) -> u32 {
        match (numbering, self.v12) {
            (Numbering::V13Update1, 251..=255) => self.v12 + 18,
            (Numbering::V13Update1, 256..=273) => self.v12 - 5,
            (_, id) => id,
        }
    }
}

/// What a field value is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The GPU.
    Gpu,
    /// One NVLink link.
    Link(u32),
    /// All NVLink links, summed by the driver.
    AllLinks,
}

impl Scope {
    /// NVML's scope id.
    #[must_use]
    pub const fn id(self) -> u32 {
        match self {
            Self::Gpu => 0,
            Self::Link(link) => link,
            Self::AllLinks => u32::MAX,
        }
    }
}

/// One entry of a batched question, and its answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FieldQuery {
    /// Which field.
    pub field: Field,
    /// About what.
    pub scope: Scope,
    /// The answer of the last call.
    pub answer: Reading<Number>,
}

impl FieldQuery {
    /// A question without an answer yet.
    #[must_use]
    pub const fn new(field: Field, scope: Scope) -> Self {
        Self {
            field,
            scope,
            answer: Err(Gap::NotYet),
        }
    }
}

/// A number as NVML tagged it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Number {
    /// 16 or 32 bits, unsigned.
    U32(u32),
    /// 64 bits, unsigned.
    U64(u64),
    /// 32 bits, signed.
    I32(i32),
    /// 64 bits, signed.
    I64(i64),
    /// Double.
    F64(f64),
}

/// DCGM and drivers mark "no value" by the last 16 numbers below the signed maximum of each width.
const BLANKS_64: std::ops::RangeInclusive<u64> = 0x7fff_ffff_ffff_fff0..=0x7fff_ffff_ffff_ffff;
const BLANKS_32: std::ops::RangeInclusive<u64> = 0x7fff_fff0..=0x7fff_ffff;

impl Number {
    /// As a count or amount that cannot be negative. Blanks and the all-ones patterns are rejected.
    pub fn unsigned(self) -> Reading<u64> {
        let sentinel = Err(Gap::Rejected(Rejection::Sentinel));
        match self {
            Self::U32(u32::MAX) | Self::U64(u64::MAX) => sentinel,
            Self::U32(value) if BLANKS_32.contains(&u64::from(value)) => sentinel,
            Self::U64(value) if BLANKS_64.contains(&value) => sentinel,
            Self::U32(value) => Ok(u64::from(value)),
            Self::U64(value) => Ok(value),
            Self::I32(_) | Self::I64(_) => {
                u64::try_from(self.signed()?).map_err(|_| Gap::Rejected(Rejection::Negative))
            }
            Self::F64(value) if !value.is_finite() => Err(Gap::Rejected(Rejection::NotFinite)),
            Self::F64(value) if value < 0.0 => Err(Gap::Rejected(Rejection::Negative)),
            Self::F64(_) => Err(Gap::Rejected(Rejection::UnexpectedType)),
        }
    }

    /// As a whole number with sign.
    pub fn signed(self) -> Reading<i64> {
        let sentinel = Err(Gap::Rejected(Rejection::Sentinel));
        match self {
            Self::I32(i32::MIN) | Self::I64(i64::MIN) => sentinel,
            Self::I32(value) if value > 0 && BLANKS_32.contains(&u64::from(value.unsigned_abs())) => sentinel,
            Self::I64(value) if value > 0 && BLANKS_64.contains(&value.unsigned_abs()) => sentinel,
            Self::I32(value) => Ok(i64::from(value)),
            Self::I64(value) => Ok(value),
            Self::U32(_) | Self::U64(_) => {
                i64::try_from(self.unsigned()?).map_err(|_| Gap::Rejected(Rejection::Sentinel))
            }
            Self::F64(_) => Err(Gap::Rejected(Rejection::UnexpectedType)),
        }
    }

    /// Whether the counter behind this number is 32 bits wide and so wraps early.
    #[must_use]
    pub const fn is_narrow(self) -> bool {
        matches!(self, Self::U32(_) | Self::I32(_))
    }

    /// As milliwatts.
    pub fn milliwatts(self) -> Reading<Watts> {
        Watts::from_milliwatts(self.unsigned()?)
    }

    /// As millijoules.
    pub fn millijoules(self) -> Reading<Joules> {
        Joules::from_millijoules(self.unsigned()?)
    }

    /// As KiB.
    pub fn kib(self) -> Reading<Bytes> {
        Bytes::from_kib(self.unsigned()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn throttle_fields_move_with_driver_580_82() {
        assert_eq!(Field::HELD_BY_SW_THERMAL.id(Numbering::V12), 251);
        assert_eq!(Field::HELD_BY_SW_THERMAL.id(Numbering::V13Update1), 269);
        assert_eq!(Field::HELD_BY_POWER_BRAKE.id(Numbering::V13Update1), 271);
        assert_eq!(Field::RECOVERY_ACTION.id(Numbering::V13Update1), 230);
        assert_eq!(Field::NVLINK_TX_KIB.id(Numbering::V13Update1), 138);
    }

    #[test]
    fn blanks_are_rejected_in_every_width() {
        let blanks = [
            Number::U32(u32::MAX),
            Number::U64(u64::MAX),
            Number::I32(0x7fff_fff0),
            Number::I64(9_223_372_036_854_775_794), // DCGM_INT64_NOT_FOUND, seen in Prometheus
            Number::I64(i64::MIN),
            Number::U64(0x7fff_ffff_ffff_fff2),
        ];
        for blank in blanks {
            assert_eq!(
                blank.unsigned(),
                Err(Gap::Rejected(Rejection::Sentinel)),
                "{blank:?}"
            );
        }
        assert_eq!(
            Number::I64(-5).unsigned(),
            Err(Gap::Rejected(Rejection::Negative))
        );
        assert_eq!(
            Number::F64(f64::NAN).unsigned(),
            Err(Gap::Rejected(Rejection::NotFinite))
        );
        assert_eq!(
            Number::F64(1.0).unsigned(),
            Err(Gap::Rejected(Rejection::UnexpectedType))
        );
    }

    proptest! {
        #[test]
        fn ordinary_counters_pass_unchanged(value in 0..0x7fff_fff0_u32) {
            prop_assert_eq!(Number::U32(value).unsigned(), Ok(u64::from(value)));
            prop_assert_eq!(Number::U64(u64::from(value)).unsigned(), Ok(u64::from(value)));
            prop_assert_eq!(Number::I64(i64::from(value)).signed(), Ok(i64::from(value)));
        }
    }
}
