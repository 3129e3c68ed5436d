//! Exact quantities in thousandths, as an HPA reads them.
//!
//! Purpose: turns a measured number into the integer-milli text (`539m`, `85250m`, `42`) that Go's
//! `MilliValue()` reads back without rounding of its own.
//! Inputs: a finite number in the metric's unit.
//! Invariants: a number that has no such text (not finite, or beyond an `i64` of thousandths) is refused, never
//! clamped or zeroed; rounding is up to the next thousandth, as `MilliValue()` does.

use std::fmt;

/// A quantity in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Quantity {
    millis: i64,
}

/// Why a number cannot be served as a quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// NaN or an infinity.
    #[error("the value is not a finite number")]
    NotFinite,
    /// More thousandths than an `i64` holds: an HPA would overflow.
    #[error("the value does not fit a quantity (more than about 9.2e15)")]
    Overflow,
}

/// Relative error that sums and means of doubles bring along; ceiling must not turn it into a thousandth.
const NOISE: f64 = 16.0 * f64::EPSILON;

/// First double beyond the range of `i64`.
const LIMIT: f64 = 9_223_372_036_854_775_808.0;

impl Quantity {
    /// From thousandths.
    #[must_use]
    pub const fn from_millis(millis: i64) -> Self {
        Self { millis }
    }

    /// Thousandths.
    #[must_use]
    pub const fn millis(self) -> i64 {
        self.millis
    }

    /// Rounds a number up to the next thousandth.
    ///
    /// # Errors
    /// [`QuantityError`] for NaN, infinities and numbers beyond the range.
    pub fn from_f64(value: f64) -> Result<Self, QuantityError> {
        if !value.is_finite() {
            return Err(QuantityError::NotFinite);
        }
        let scaled = value * 1000.0;
        let nearest = scaled.round();
        let rounded = if (scaled - nearest).abs() <= scaled.abs() * NOISE {
            nearest
        } else {
            scaled.ceil()
        };
        if !(-LIMIT..LIMIT).contains(&rounded) {
            return Err(QuantityError::Overflow);
        }
        #[allow(clippy::cast_possible_truncation, reason = "range checked above")]
        let millis = rounded as i64;
        Ok(Self { millis })
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.millis % 1000 == 0 {
            write!(f, "{}", self.millis / 1000)
        } else {
            write!(f, "{}m", self.millis)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(value: f64) -> String {
        Quantity::from_f64(value).map_or_else(|error| error.to_string(), |quantity| quantity.to_string())
    }

    #[test]
    fn numbers_read_as_an_hpa_reads_them() {
        for (value, expected) in [
            (0.0, "0"),
            (-0.0, "0"),
            (0.0001, "1m"),
            (0.539, "539m"),
            (85.25, "85250m"),
            (42.0, "42"),
            (1e6, "1000000"),
            (9e15, "9000000000000000"),
            (-1.0, "-1"),
            (-0.0005, "0"),
            (1e-12, "1m"),
        ] {
            assert_eq!(text(value), expected, "{value}");
        }
    }

    #[test]
    fn noise_of_doubles_is_not_a_thousandth() {
        assert_eq!(text(0.07 * 100.0), "7");
        assert_eq!(text((0.1 + 0.2) * 100.0), "30");
        assert_eq!(text((0.1 + 0.7 + 0.7) / 3.0 * 100.0), "50");
    }

    #[test]
    fn what_has_no_text_is_refused() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert_eq!(Quantity::from_f64(value), Err(QuantityError::NotFinite));
        }
        for value in [1e30, -1e30, 9.3e15, f64::MAX] {
            assert_eq!(Quantity::from_f64(value), Err(QuantityError::Overflow));
        }
    }

    proptest! {
        #[test]
        fn thousandths_survive_the_way_there_and_back(millis in -9_000_000_000_000_i64..9_000_000_000_000) {
            #[allow(clippy::cast_precision_loss, reason = "below 2^53")]
            let value = millis as f64 / 1000.0;
            prop_assert_eq!(Quantity::from_f64(value), Ok(Quantity::from_millis(millis)));
        }

        #[test]
        fn the_result_is_less_than_a_thousandth_above(value in -1e12_f64..1e12) {
            let quantity = Quantity::from_f64(value).unwrap();
            #[allow(clippy::cast_precision_loss, reason = "below 2^53")]
            let back = quantity.millis() as f64;
            let over = back - value * 1000.0;
            prop_assert!(over >= -value.abs() * 1000.0 * NOISE && over < 1.0, "{value} gave {quantity}");
        }
    }
}
