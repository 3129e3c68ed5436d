//! Quantities in base units, one type each.
//!
//! Invariants: a [`Ratio`] lies in 0..=1 and every float here is finite; what is outside is rejected where it is
//! made, with the reason.

use crate::reading::{Gap, Reading, Rejection};

macro_rules! quantities {
    ($( $(#[$doc:meta])* $name:ident($inner:ty); )*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
            pub struct $name($inner);

            impl $name {
                /// The number, in the unit that the type names.
                #[must_use]
                pub const fn get(self) -> $inner {
                    self.0
                }
            }
        )*
    };
}

quantities! {
    /// A share from 0 to 1.
    Ratio(f64);
    /// Bytes.
    Bytes(u64);
    /// Bytes each second.
    BytesPerSecond(f64);
    /// Watts.
    Watts(f64);
    /// Joules.
    Joules(f64);
    /// Degrees Celsius.
    Celsius(f64);
    /// Hertz.
    Hertz(f64);
    /// Seconds.
    Seconds(f64);
}

impl Ratio {
    /// From NVML's percent. Above 100 is rejected, not clamped: a device that says 129 knows nothing about the load.
    pub fn from_percent(percent: f64) -> Reading<Self> {
        if !percent.is_finite() {
            Err(Gap::Rejected(Rejection::NotFinite))
        } else if percent < 0.0 {
            Err(Gap::Rejected(Rejection::Negative))
        } else if percent > 100.0 {
            Err(Gap::Rejected(Rejection::AboveFull))
        } else {
            Ok(Self(percent / 100.0))
        }
    }
}

impl Bytes {
    /// A number of bytes.
    #[must_use]
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// From KiB, the unit of NVLink counters.
    pub fn from_kib(kib: u64) -> Reading<Self> {
        kib.checked_mul(1024)
            .map(Self)
            .ok_or(Gap::Rejected(Rejection::Sentinel))
    }
}

impl BytesPerSecond {
    /// A rate; negative and non-finite ones are rejected.
    pub fn new(rate: f64) -> Reading<Self> {
        not_negative(rate).map(Self)
    }
}

impl Watts {
    /// The most a device can plausibly draw. Over twice the largest board of 2026 (1400 W); blanks are far above.
    const MOST_MILLIWATTS: u64 = 10_000_000;

    /// From milliwatts.
    pub fn from_milliwatts(milliwatts: u64) -> Reading<Self> {
        if milliwatts > Self::MOST_MILLIWATTS {
            return Err(Gap::Rejected(Rejection::Implausible));
        }
        #[allow(clippy::cast_precision_loss, reason = "bounded above, exact in f64")]
        let watts = milliwatts as f64 / 1000.0;
        Ok(Self(watts))
    }
}

impl Joules {
    /// 285 years at 1000 W, since a driver was loaded; blanks are above.
    const MOST_MILLIJOULES: u64 = 1 << 53;

    /// From millijoules.
    pub fn from_millijoules(millijoules: u64) -> Reading<Self> {
        if millijoules > Self::MOST_MILLIJOULES {
            return Err(Gap::Rejected(Rejection::Implausible));
        }
        #[allow(clippy::cast_precision_loss, reason = "bounded above, exact in f64")]
        let joules = millijoules as f64 / 1000.0;
        Ok(Self(joules))
    }
}

impl Celsius {
    /// Silicon outside this range is not running; DCGM and drivers use large numbers as blanks.
    const PLAUSIBLE: std::ops::RangeInclusive<i64> = -60..=200;

    /// From whole degrees. All ones in a signed word is a blank, though a cold room could be at minus one degree:
    /// no running GPU is.
    pub fn from_degrees(degrees: i64) -> Reading<Self> {
        if degrees == -1 {
            return Err(Gap::Rejected(Rejection::Sentinel));
        }
        if !Self::PLAUSIBLE.contains(&degrees) {
            return Err(Gap::Rejected(Rejection::Implausible));
        }
        #[allow(clippy::cast_precision_loss, reason = "bounded above, exact in f64")]
        let value = degrees as f64;
        Ok(Self(value))
    }
}

impl Hertz {
    /// No clock of a GPU is above 20 GHz.
    const MOST_MEGAHERTZ: u64 = 20_000;

    /// From megahertz.
    pub fn from_megahertz(megahertz: u64) -> Reading<Self> {
        if megahertz > Self::MOST_MEGAHERTZ {
            return Err(Gap::Rejected(Rejection::Implausible));
        }
        #[allow(clippy::cast_precision_loss, reason = "bounded above, exact in f64")]
        let hertz = megahertz as f64 * 1e6;
        Ok(Self(hertz))
    }
}

impl Seconds {
    /// From nanoseconds.
    #[must_use]
    pub fn from_nanoseconds(nanoseconds: u64) -> Self {
        #[allow(
            clippy::cast_precision_loss,
            reason = "exact below 2^53 ns, which is 104 days, then to the microsecond"
        )]
        let seconds = nanoseconds as f64 / 1e9;
        Self(seconds)
    }
}

fn not_negative(value: f64) -> Reading<f64> {
    if !value.is_finite() {
        Err(Gap::Rejected(Rejection::NotFinite))
    } else if value < 0.0 {
        Err(Gap::Rejected(Rejection::Negative))
    } else {
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_ratio_is_never_outside_its_range(percent in proptest::num::f64::ANY) {
            match Ratio::from_percent(percent) {
                Ok(ratio) => {
                    prop_assert!((0.0..=1.0).contains(&ratio.get()));
                    prop_assert!((0.0..=100.0).contains(&percent));
                }
                Err(gap) => {
                    prop_assert!(matches!(gap, Gap::Rejected(_)));
                    prop_assert!(!(0.0..=100.0).contains(&percent));
                }
            }
        }
    }

    #[test]
    fn garbage_is_rejected_with_its_reason() {
        assert_eq!(
            Ratio::from_percent(129.0),
            Err(Gap::Rejected(Rejection::AboveFull))
        );
        assert_eq!(
            Ratio::from_percent(f64::NAN),
            Err(Gap::Rejected(Rejection::NotFinite))
        );
        assert_eq!(Ratio::from_percent(-1.0), Err(Gap::Rejected(Rejection::Negative)));
        assert_eq!(
            Watts::from_milliwatts(u64::from(u32::MAX)),
            Err(Gap::Rejected(Rejection::Implausible))
        );
        assert_eq!(
            Celsius::from_degrees(i64::from(i32::MAX)),
            Err(Gap::Rejected(Rejection::Implausible))
        );
        assert_eq!(
            Hertz::from_megahertz(u64::from(u32::MAX)),
            Err(Gap::Rejected(Rejection::Implausible))
        );
        assert_eq!(
            Joules::from_millijoules(1 << 60),
            Err(Gap::Rejected(Rejection::Implausible))
        );
        assert_eq!(Bytes::from_kib(u64::MAX), Err(Gap::Rejected(Rejection::Sentinel)));
    }

    #[test]
    fn units_become_base_units() {
        assert_eq!(Ratio::from_percent(50.0).map(Ratio::get), Ok(0.5));
        assert_eq!(Watts::from_milliwatts(1500).map(Watts::get), Ok(1.5));
        assert_eq!(Hertz::from_megahertz(1980).map(Hertz::get), Ok(1.98e9));
        assert_eq!(Bytes::from_kib(3).map(Bytes::get), Ok(3072));
    }
}
