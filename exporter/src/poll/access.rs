//! Whether this process may still use the driver at all: pure.
//!
//! Purpose: tell a container that lost its device access from a driver that is absent and from GPUs that are sick.
//! After `systemctl daemon-reload` or an update of the container's cgroup the kernel denies the device files for good;
//! NVML then says "unknown error" or "no permission" to everything, and only a new container may open them again.
//! Inputs: one [`Look`] a round of the supervisor, and its clock.
//! Invariants: what never worked is no loss, so a restart that cannot help is asked for once and not again and again;
//! an absent driver and a lost GPU are no refusal.

use std::time::{Duration, Instant};

use super::report::Tried;
use crate::snapshot::Presence;

/// Refusals within this time may belong to a driver that is being reloaded.
pub(super) const LONGEST_REFUSAL: Duration = Duration::from_secs(60);

/// What one look at the driver found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// At least one GPU answers.
    Works,
    /// No GPU answers, and what answers instead is a refusal.
    Refused,
    /// Nothing answers for other reasons: no driver, no GPUs, lost or failing ones.
    Absent,
    /// Not every GPU was tried since the library was opened.
    Unclear,
}

impl Look {
    /// What the GPUs of an opened library amount to.
    pub(super) fn at(gpus: impl Iterator<Item = Tried>) -> Self {
        let mut look = Self::Absent;
        let mut is_unclear = false;
        for gpu in gpus {
            match gpu {
                Tried::Up => return Self::Works,
                Tried::NotYet => is_unclear = true,
                Tried::Down(Presence::Refused) => look = Self::Refused,
                Tried::Down(_) => {}
            }
        }
        if is_unclear { Self::Unclear } else { look }
    }
}

/// What was found over time.
#[derive(Debug, Default)]
pub(super) struct Access {
    worked: bool,
    refused_since: Option<Instant>,
}

impl Access {
    /// Takes a look into account. Yields how long access has been lost, once that is for good.
    pub(super) fn note(&mut self, look: Look, now: Instant) -> Option<Duration> {
        match look {
            Look::Works => {
                self.worked = true;
                self.refused_since = None;
            }
            Look::Refused if self.worked => {
                self.refused_since.get_or_insert(now);
            }
            Look::Absent => self.refused_since = None,
            Look::Refused | Look::Unclear => {}
        }
        self.refused_since
            .map(|since| now.saturating_duration_since(since))
            .filter(|lost| *lost >= LONGEST_REFUSAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn lasting(before: &[Look], look: Look) -> Option<Duration> {
        let mut access = Access::default();
        let start = Instant::now();
        for look in before {
            access.note(*look, start);
        }
        access.note(look, start);
        assert_eq!(
            access.note(look, start + LONGEST_REFUSAL - SECOND),
            None,
            "a driver may be being reloaded"
        );
        access.note(look, start + LONGEST_REFUSAL)
    }

    #[test]
    fn a_refusal_that_lasts_after_the_driver_worked_is_a_loss() {
        assert_eq!(lasting(&[Look::Works], Look::Refused), Some(LONGEST_REFUSAL));
    }

    #[test]
    fn what_never_worked_is_no_loss() {
        assert_eq!(lasting(&[], Look::Refused), None);
        assert_eq!(lasting(&[Look::Absent], Look::Refused), None);
    }

    #[test]
    fn an_absent_driver_is_no_loss_however_long() {
        assert_eq!(lasting(&[Look::Works], Look::Absent), None);
        assert_eq!(lasting(&[Look::Works, Look::Refused], Look::Absent), None);
    }

    #[test]
    fn attempts_to_open_the_library_anew_do_not_start_the_time_over() {
        let mut access = Access::default();
        let start = Instant::now();
        access.note(Look::Works, start);
        for second in 0..60 {
            let look = if second % 2 == 0 {
                Look::Refused
            } else {
                Look::Unclear
            };
            assert_eq!(access.note(look, start + second * SECOND), None);
        }
        assert!(access.note(Look::Unclear, start + LONGEST_REFUSAL).is_some());
        assert_eq!(
            access.note(Look::Works, start + LONGEST_REFUSAL),
            None,
            "it works again"
        );
    }

    #[test]
    fn one_gpu_that_answers_is_enough_and_a_lost_one_is_no_refusal() {
        let refused = Tried::Down(Presence::Refused);
        let lost = Tried::Down(Presence::Lost);
        for (gpus, look) in [
            (vec![refused, Tried::Up], Look::Works),
            (vec![refused, refused], Look::Refused),
            (vec![lost, refused], Look::Refused),
            (vec![lost], Look::Absent),
            (vec![lost, lost], Look::Absent),
            (vec![Tried::Down(Presence::Failing)], Look::Absent),
            (vec![refused, Tried::NotYet], Look::Unclear),
            (vec![], Look::Absent),
        ] {
            assert_eq!(Look::at(gpus.iter().copied()), look, "{gpus:?}");
        }
    }
}
