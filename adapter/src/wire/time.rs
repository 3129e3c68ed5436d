//! RFC 3339 timestamps in whole seconds, UTC.
//!
//! Purpose: writes when a value was measured in the only form that `metav1.Time` reads.
//! Inputs: a wall-clock time.
//! Invariants: rounds down, so a timestamp never claims to be newer than its sample.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Serialize, Serializer};

/// A moment, written as `2026-12-01T15:04:05Z`.
pub(super) struct Seconds(pub(super) SystemTime);

impl Seconds {
    fn timestamp(&self) -> jiff::Timestamp {
        let seconds = match self.0.duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
            Err(before) => {
                let before = before.duration();
                let whole = before.as_secs() + u64::from(before.subsec_nanos() > 0);
                i64::try_from(whole).map_or(i64::MIN, |whole| -whole)
            }
        };
        jiff::Timestamp::from_second(seconds).unwrap_or(jiff::Timestamp::UNIX_EPOCH)
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.timestamp())
    }
}

impl Serialize for Seconds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    #[test]
    fn a_timestamp_has_whole_seconds_and_a_z() {
        let at = UNIX_EPOCH + Duration::new(1_790_000_000, 999_999_999);
        assert_eq!(Seconds(at).to_string(), "2026-09-21T14:13:20Z");
        assert_eq!(
            Seconds(UNIX_EPOCH - Duration::from_millis(1)).to_string(),
            "1969-12-31T23:59:59Z"
        );
    }

    proptest! {
        #[test]
        fn a_timestamp_reads_back_as_the_second_it_lies_in(seconds in 0_u64..4_000_000_000, nanos in 0_u32..1_000_000_000) {
            let at = UNIX_EPOCH + Duration::new(seconds, nanos);
            let text = Seconds(at).to_string();
            let back: jiff::Timestamp = text.parse().unwrap();
            prop_assert_eq!(back.as_second(), i64::try_from(seconds).unwrap());
            prop_assert_eq!(back.subsec_nanosecond(), 0);
            prop_assert!(text.ends_with('Z') && text.len() == 20);
        }
    }
}
