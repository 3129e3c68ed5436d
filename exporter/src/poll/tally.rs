//! What a tick's calls came to: enough to say whether the device lives and the library is sound.
//!
//! Invariants: "unsupported" is an answer, so a device that offers little is not a dead one.

use std::sync::atomic::{AtomicU64, Ordering};

use forewarm_nvml::{Code, Gap, Reading, Rejection};

/// Counts over the life of the exporter, shared by all poll threads.
#[derive(Debug, Default)]
pub struct PollCounts {
    rejected: [AtomicU64; Rejection::ALL.len()],
    /// Ticks left out.
    pub missed_ticks: AtomicU64,
    /// Xids not counted.
    pub xids_dropped: AtomicU64,
    /// Times the library was opened.
    pub opens: AtomicU64,
    /// Withdrawals by group, in the order of `Group::ALL`.
    pub withdrawn: [AtomicU64; forewarm_signals::Group::ALL.len()],
    /// GPUs with a call that has not returned for three intervals.
    pub stuck: AtomicU64,
}

impl PollCounts {
    fn reject(&self, reason: Rejection) {
        if let Some(count) = Rejection::ALL
            .iter()
            .position(|of_all| *of_all == reason)
            .and_then(|at| self.rejected.get(at))
        {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Rejected values by reason.
    pub fn rejected(&self) -> impl Iterator<Item = (Rejection, u64)> + '_ {
        Rejection::ALL
            .into_iter()
            .zip(&self.rejected)
            .map(|(reason, count)| (reason, count.load(Ordering::Relaxed)))
    }
}

/// What one tick's calls came to.
#[derive(Debug)]
pub(super) struct Tally<'a> {
    counts: &'a PollCounts,
    answered: u32,
    failed: u32,
    lost: bool,
    uninitialized: bool,
    refused: u32,
}

impl<'a> Tally<'a> {
    /// Nothing yet.
    #[must_use]
    pub(super) const fn new(counts: &'a PollCounts) -> Self {
        Self {
            counts,
            answered: 0,
            failed: 0,
            lost: false,
            uninitialized: false,
            refused: 0,
        }
    }

    /// Notes the outcome of a call.
    pub(super) fn note<T>(&mut self, reading: &Reading<T>) {
        match reading {
            Ok(_) | Err(Gap::Unsupported | Gap::NotYet) => self.answered += 1,
            Err(Gap::Rejected(reason)) => {
                self.answered += 1;
                self.counts.reject(*reason);
            }
            Err(Gap::Failed { code, .. }) => {
                self.failed += 1;
                self.note_code(*code);
            }
        }
    }

    /// Notes the outcome of an entry within a call that succeeded as a whole.
    pub(super) fn note_entry<T>(&mut self, reading: &Reading<T>) {
        match reading {
            Err(Gap::Rejected(reason)) => self.counts.reject(*reason),
            Err(Gap::Failed { code, .. }) => self.note_code(*code),
            _ => {}
        }
    }

    /// The value of a part, with its rejection counted.
    pub(super) fn part<T>(&mut self, reading: Reading<T>) -> Option<T> {
        self.note_entry(&reading);
        reading.ok()
    }

    const fn note_code(&mut self, code: Code) {
        if code.is_lost() {
            self.lost = true;
        }
        if code.is_refusal() {
            self.refused += 1;
        }
        if matches!(code, Code::UNINITIALIZED) {
            self.uninitialized = true;
        }
    }

    /// Whether NVML says that the GPU is gone.
    #[must_use]
    pub(super) const fn is_lost(&self) -> bool {
        self.lost
    }

    /// Whether at least one call got an answer.
    #[must_use]
    pub(super) const fn is_answered(&self) -> bool {
        self.answered > 0
    }

    /// Whether any call was made at all.
    #[must_use]
    pub(super) const fn is_idle(&self) -> bool {
        self.answered == 0 && self.failed == 0
    }

    /// Whether the library has lost its driver.
    #[must_use]
    pub(super) const fn is_uninitialized(&self) -> bool {
        self.uninitialized
    }

    /// Whether every call was refused ("unknown error" or "no permission"), as after a lost device cgroup or a
    /// driver reload.
    #[must_use]
    pub(super) const fn is_all_refused(&self) -> bool {
        self.answered == 0 && self.failed > 0 && self.refused >= self.failed
    }
}
