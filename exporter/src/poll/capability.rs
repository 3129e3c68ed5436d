//! What a device offers, learnt by asking: per reading, unknown, offered, not offered, or failing.
//!
//! Invariants: not offered is asked again every five minutes (MIG that was turned off may
//! bring it); failing is asked again
//! after a pause that doubles up to a bound, so a broken reading costs little and comes back soon.

use std::time::{Duration, Instant};

use forewarm_nvml::{Gap, Reading};

/// How long "not supported" is believed. MIG mode changes it without a reload of the driver, and a dozen calls in this
/// time cost nothing.
const BELIEVE_UNSUPPORTED: Duration = Duration::from_secs(300);
/// The first pause after a failure.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause: a reading that recovers is back within this time, and slow groups miss no turn by it.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Whether to ask for one reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Capability {
    /// Never answered.
    #[default]
    Unknown,
    /// Answers.
    Supported,
    /// The device or driver does not offer it.
    Unsupported {
        /// When to ask again.
        ask_at: Instant,
    },
    /// Fails.
    Failing {
        /// When to ask again.
        ask_at: Instant,
        /// The pause that led there.
        pause: Duration,
    },
}

impl Capability {
    /// Whether it is worth asking.
    #[must_use]
    pub(super) fn is_worth_asking(self, now: Instant) -> bool {
        match self {
            Self::Unknown | Self::Supported => true,
            Self::Unsupported { ask_at } | Self::Failing { ask_at, .. } => now >= ask_at,
        }
    }

    /// The state after an answer.
    #[must_use]
    pub(super) fn after<T>(self, answer: &Reading<T>, now: Instant) -> Self {
        match answer {
            // A rejected value shows that the device tries: asked again at once.
            Ok(_) | Err(Gap::NotYet | Gap::Rejected(_)) => Self::Supported,
            Err(Gap::Unsupported) => Self::Unsupported {
                ask_at: now + BELIEVE_UNSUPPORTED,
            },
            Err(Gap::Failed { .. }) => {
                let pause = match self {
                    Self::Failing { pause, .. } => (2 * pause).min(LONGEST_PAUSE),
                    _ => FIRST_PAUSE,
                };
                // Half a second early, so that a pause of n seconds ends before the n-th tick and not after it.
                let ask_at = now + pause.saturating_sub(Duration::from_millis(500));
                Self::Failing { ask_at, pause }
            }
        }
    }

    /// Yes, no, or not known.
    #[must_use]
    pub(super) const fn is_supported(self) -> Option<bool> {
        match self {
            Self::Supported => Some(true),
            Self::Unsupported { .. } => Some(false),
            Self::Unknown | Self::Failing { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forewarm_nvml::{Call, Code};

    const FAILED: Reading<()> = Err(Gap::Failed {
        code: Code(10),
        call: Call::FieldValues,
    });

    #[test]
    fn unsupported_is_asked_again_after_five_minutes() {
        let now = Instant::now();
        let state = Capability::default().after(&Err::<(), _>(Gap::Unsupported), now);
        assert_eq!(state.is_supported(), Some(false));
        assert!(!state.is_worth_asking(now + Duration::from_secs(299)));
        let later = now + BELIEVE_UNSUPPORTED;
        assert!(state.is_worth_asking(later));
        assert_eq!(state.after(&Ok(()), later).is_supported(), Some(true));
    }

    #[test]
    fn failing_is_asked_less_often_and_yet_seen_to_recover_within_five_seconds() {
        let mut now = Instant::now();
        let mut state = Capability::Supported;
        let mut pauses = Vec::new();
        for _ in 0..8 {
            state = state.after(&FAILED, now);
            let Capability::Failing { ask_at, pause } = state else {
                panic!("{state:?}")
            };
            assert!(!state.is_worth_asking(now));
            pauses.push(pause.as_secs());
            now = ask_at;
            assert!(state.is_worth_asking(now));
        }
        assert_eq!(pauses, [1, 2, 4, 5, 5, 5, 5, 5]);
        assert_eq!(state.after(&Ok(()), now), Capability::Supported);
    }

    #[test]
    fn a_rejected_value_is_asked_again_at_once() {
        let now = Instant::now();
        let rejected = Err::<(), _>(Gap::Rejected(forewarm_nvml::Rejection::AboveFull));
        assert!(Capability::Supported.after(&rejected, now).is_worth_asking(now));
    }
}
