//! Whose processes use the GPUs: a cache by process id and start.
//!
//! Purpose: look up each process of the snapshots once, and publish who owns which.
//! Inputs: the processes that snapshots name now, the time, and a way to look one up.
//! Invariants: an entry belongs to a pid *and* a start, so a pid that is used again is another process; look-ups per
//! call and entries are bounded, what is not kept is counted; what named no pod is looked up again after some seconds,
//! because a process may be named before it has been moved to its container's cgroup.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use super::cgroup::{NoPod, Owner};
use super::proc::Unread;

/// Look-ups of one call: some 30 µs each, so a node full of new processes takes 10 ms of each quarter of a second.
const MOST_LOOKUPS: usize = 256;
/// 64 processes on each of 16 GPUs shared 16 times.
const MOST_ENTRIES: usize = 16_384;
/// When an answer that names no pod, or no container, is asked for again.
const RETRIED_AFTER: Duration = Duration::from_secs(5);
/// An entry that no snapshot names any more goes after this; a GPU that was silent for some ticks does not lose its own.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(30);

/// A process, told apart from later ones of its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessKey {
    /// Id in the host's process namespace.
    pub pid: u32,
    /// Field 22 of `/proc/<pid>/stat`.
    pub start_ticks: u64,
}

/// Whose process it is, or why that is not known. The value of label `owner` of `forewarm_exporter_gpu_processes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// A pod's.
    Pod(Owner),
    /// Not a pod's, or not told.
    NoPod(NoPod),
    /// Its files may not be read.
    Unreadable,
}

/// Label values of [`Found`], and `pending` for a process that was not looked up yet.
pub const OWNERS: [&str; 7] = [
    "pod",
    "host",
    "hidden",
    "ambiguous",
    "malformed",
    "unreadable",
    PENDING,
];
const PENDING: &str = "pending";

impl Found {
    /// The label value.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Pod(_) => "pod",
            Self::NoPod(NoPod::Host) => "host",
            Self::NoPod(NoPod::Hidden) => "hidden",
            Self::NoPod(NoPod::Ambiguous) => "ambiguous",
            Self::NoPod(NoPod::Malformed) => "malformed",
            Self::Unreadable => "unreadable",
        }
    }

    /// Whether another look may tell more.
    const fn is_final(&self) -> bool {
        matches!(self, Self::Pod(owner) if owner.container_id.is_some())
    }
}

/// Who owns which process, as published.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owners {
    by_process: HashMap<ProcessKey, Found>,
}

impl Owners {
    /// Owners that a test sets.
    #[must_use]
    pub fn of(found: impl IntoIterator<Item = (ProcessKey, Found)>) -> Self {
        Self {
            by_process: found.into_iter().collect(),
        }
    }

    /// The pod and container of a process; absent where none is known.
    #[must_use]
    pub fn owner(&self, process: ProcessKey) -> Option<&Owner> {
        match self.by_process.get(&process) {
            Some(Found::Pod(owner)) => Some(owner),
            _ => None,
        }
    }

    /// How many of these processes are whose, by [`OWNERS`].
    #[must_use]
    pub fn count(&self, processes: &[ProcessKey]) -> BTreeMap<&'static str, u64> {
        let mut counts: BTreeMap<_, _> = OWNERS.into_iter().map(|owner| (owner, 0)).collect();
        for process in processes {
            let owner = self.by_process.get(process).map_or(PENDING, Found::as_str);
            *counts.entry(owner).or_default() += 1;
        }
        counts
    }
}

#[derive(Debug)]
struct Entry {
    found: Found,
    looked_at: Instant,
    named_at: Instant,
}

/// The cache behind [`Owners`].
#[derive(Debug, Default)]
pub struct Cache {
    entries: HashMap<ProcessKey, Entry>,
    /// Processes that found no room, since the start.
    dropped: u64,
}

impl Cache {
    /// Takes in the processes that are named at `now` and looks up those that are due. The new owners, where they are
    /// others than before.
    pub fn advance(
        &mut self,
        now: Instant,
        named: &[ProcessKey],
        mut look_up: impl FnMut(ProcessKey) -> Result<Result<Owner, NoPod>, Unread>,
    ) -> Option<Owners> {
        let mut is_changed = self.forget(now, named);
        for process in self.due(now, named) {
            let found = match look_up(process) {
                Ok(Ok(owner)) => Found::Pod(owner),
                Ok(Err(why)) => Found::NoPod(why),
                Err(Unread::Gone) => {
                    is_changed |= self.entries.remove(&process).is_some();
                    continue;
                }
                Err(Unread::Malformed) => Found::NoPod(NoPod::Malformed),
                Err(Unread::Refused | Unread::Failed(_)) => Found::Unreadable,
            };
            is_changed |= self.keep(process, found, now);
        }
        is_changed.then(|| self.owners())
    }

    /// Processes that found no room, since the start.
    #[must_use]
    pub const fn dropped(&self) -> u64 {
        self.dropped
    }

    fn forget(&mut self, now: Instant, named: &[ProcessKey]) -> bool {
        for process in named {
            if let Some(entry) = self.entries.get_mut(process) {
                entry.named_at = now;
            }
        }
        let before = self.entries.len();
        self.entries
            .retain(|_, entry| now.saturating_duration_since(entry.named_at) <= FORGOTTEN_AFTER);
        self.entries.len() != before
    }

    /// New ones first, then those whose answer may have changed, the oldest answer first.
    fn due(&self, now: Instant, named: &[ProcessKey]) -> Vec<ProcessKey> {
        let mut due: Vec<(Option<Instant>, ProcessKey)> = named
            .iter()
            .filter_map(|process| match self.entries.get(process) {
                None => Some((None, *process)),
                Some(entry) if entry.found.is_final() => None,
                Some(entry) => (now.saturating_duration_since(entry.looked_at) >= RETRIED_AFTER)
                    .then_some((Some(entry.looked_at), *process)),
            })
            .collect();
        due.sort_unstable();
        due.dedup();
        due.truncate(MOST_LOOKUPS);
        due.into_iter().map(|(_, process)| process).collect()
    }

    fn keep(&mut self, process: ProcessKey, found: Found, now: Instant) -> bool {
        if let Some(entry) = self.entries.get_mut(&process) {
            entry.looked_at = now;
            let is_news = entry.found != found;
            entry.found = found;
            return is_news;
        }
        if self.entries.len() >= MOST_ENTRIES {
            self.dropped += 1;
            return false;
        }
        let entry = Entry {
            found,
            looked_at: now,
            named_at: now,
        };
        self.entries.insert(process, entry);
        true
    }

    fn owners(&self) -> Owners {
        Owners::of(
            self.entries
                .iter()
                .map(|(process, entry)| (*process, entry.found.clone())),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn key(pid: u32, start_ticks: u64) -> ProcessKey {
        ProcessKey { pid, start_ticks }
    }

    fn owner(uid: &str) -> Owner {
        Owner {
            pod_uid: uid.to_owned(),
            container_id: Some("c".to_owned()),
        }
    }

    #[test]
    fn a_known_process_is_looked_up_once() {
        let (start, mut cache, mut looks) = (Instant::now(), Cache::default(), 0);
        for second in 0..100 {
            let news = cache.advance(start + second * SECOND, &[key(1, 7)], |_| {
                looks += 1;
                Ok(Ok(owner("a")))
            });
            assert_eq!(news.is_some(), second == 0);
        }
        assert_eq!(looks, 1);
    }

    #[test]
    fn a_pid_that_is_used_again_is_another_process() {
        let (now, mut cache) = (Instant::now(), Cache::default());
        let _ = cache.advance(now, &[key(1, 7)], |_| Ok(Ok(owner("a"))));
        let owners = cache
            .advance(now + SECOND, &[key(1, 9)], |_| Ok(Ok(owner("b"))))
            .unwrap();
        assert_eq!(owners.owner(key(1, 9)), Some(&owner("b")));
        assert_eq!(
            owners.owner(key(1, 7)),
            Some(&owner("a")),
            "samples of the earlier one are still its own"
        );
        assert_eq!(owners.owner(key(1, 8)), None);
    }

    #[test]
    fn what_named_no_pod_is_asked_again_after_seconds_and_not_before() {
        let (start, mut cache, mut looks) = (Instant::now(), Cache::default(), 0);
        for tenth in 0..60 {
            let now = start + tenth * SECOND / 10;
            let _ = cache.advance(now, &[key(1, 7), key(1, 7)], |_| {
                looks += 1;
                Ok(Err(NoPod::Host))
            });
        }
        assert_eq!(looks, 2);
        let owners = cache.advance(start + 20 * SECOND, &[key(1, 7)], |_| Ok(Ok(owner("a"))));
        assert_eq!(owners.unwrap().owner(key(1, 7)), Some(&owner("a")));
    }

    #[test]
    fn a_process_that_ended_is_not_kept_and_one_that_is_named_no_more_goes_later() {
        let (start, mut cache) = (Instant::now(), Cache::default());
        let named = [key(1, 7), key(2, 7)];
        let news = cache.advance(start, &named, |process| match process.pid {
            1 => Ok(Ok(owner("a"))),
            _ => Err(Unread::Gone),
        });
        assert_eq!(news.unwrap().by_process.len(), 1);
        let nobody = |_: ProcessKey| -> Result<Result<Owner, NoPod>, Unread> { Err(Unread::Gone) };
        assert_eq!(cache.advance(start + FORGOTTEN_AFTER, &[], nobody), None);
        let news = cache.advance(start + FORGOTTEN_AFTER + SECOND, &[], nobody);
        assert_eq!(news, Some(Owners::default()));
    }

    #[test]
    fn work_and_memory_are_bounded() {
        let (start, mut cache, mut most) = (Instant::now(), Cache::default(), 0);
        let named: Vec<_> = (0..20_000).map(|pid| key(pid, 1)).collect();
        for call in 0..100 {
            let mut looks = 0;
            let _ = cache.advance(start + call * SECOND / 100, &named, |_| {
                looks += 1;
                Ok(Ok(owner("a")))
            });
            most = most.max(looks);
        }
        assert_eq!(most, MOST_LOOKUPS);
        assert_eq!(cache.entries.len(), MOST_ENTRIES);
        assert!(cache.dropped() > 0);
    }

    #[test]
    fn every_process_is_counted_under_one_owner() {
        let owners = Owners::of([
            (key(1, 1), Found::Pod(owner("a"))),
            (key(2, 1), Found::NoPod(NoPod::Host)),
            (key(3, 1), Found::Unreadable),
        ]);
        let counts = owners.count(&[key(1, 1), key(2, 1), key(3, 1), key(4, 1)]);
        assert_eq!(counts.len(), OWNERS.len());
        assert_eq!(counts.values().sum::<u64>(), 4);
        assert_eq!((counts["pod"], counts["host"], counts["pending"]), (1, 1, 1));
    }
}
