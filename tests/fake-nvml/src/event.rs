//! Events: what the control file adds, and the sets in which they wait for a client.
//!
//! Invariants: an event goes once to every set registered for it at that moment and is never replayed; a queue is
//! bounded, its oldest event goes first.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

/// Events kept by a set that nobody waits on; older ones are dropped first.
const QUEUE: usize = 1024;

/// An event other than an Xid, as the control file tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventEntry {
    /// What happened.
    pub kind: EventKind,
    /// `eventData`: the Xid, the recovery action; else 0.
    #[serde(default)]
    pub data: u64,
    /// GPU instance it happened in; told to privileged clients only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gi: Option<u32>,
    /// Compute instance it happened in; told to privileged clients only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ci: Option<u32>,
}

/// Kinds of events, `nvmlEventType*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// Corrected ECC error (0x1).
    SingleBitEcc,
    /// Uncorrected ECC error (0x2).
    DoubleBitEcc,
    /// Performance state (0x4).
    Pstate,
    /// Xid (0x8).
    Xid,
    /// Clocks (0x10).
    Clock,
    /// Power source (0x80).
    PowerSource,
    /// MIG layout (0x100); given by itself when the layout changes.
    MigConfig,
    /// Storm of corrected errors (0x200).
    SingleBitEccStorm,
    /// DRAM retirement (0x400).
    DramRetirement,
    /// DRAM retirement failed (0x800).
    DramRetirementFailure,
    /// Poison, contained (0x1000).
    NonFatalPoison,
    /// Poison, fatal (0x2000).
    FatalPoison,
    /// GPU unavailable (0x4000).
    GpuUnavailable,
    /// Recovery action changed (0x8000).
    RecoveryAction,
}

impl EventKind {
    /// Bit in the NVML header.
    #[must_use]
    pub const fn bit(self) -> u64 {
        match self {
            Self::SingleBitEcc => 0x1,
            Self::DoubleBitEcc => 0x2,
            Self::Pstate => 0x4,
            Self::Xid => 0x8,
            Self::Clock => 0x10,
            Self::PowerSource => 0x80,
            Self::MigConfig => 0x100,
            Self::SingleBitEccStorm => 0x200,
            Self::DramRetirement => 0x400,
            Self::DramRetirementFailure => 0x800,
            Self::NonFatalPoison => 0x1000,
            Self::FatalPoison => 0x2000,
            Self::GpuUnavailable => 0x4000,
            Self::RecoveryAction => 0x8000,
        }
    }
}

/// An event on its way to a waiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) gpu: usize,
    pub(crate) kind: u64,
    pub(crate) data: u64,
    pub(crate) instance: Option<(u32, u32)>,
}

impl Event {
    /// An event of `kind` about the whole GPU.
    pub(crate) const fn of(gpu: usize, kind: EventKind, data: u64) -> Self {
        Self {
            gpu,
            kind: kind.bit(),
            data,
            instance: None,
        }
    }

    /// What the control file tells about GPU `gpu`.
    pub(crate) fn told(gpu: usize, entry: &EventEntry) -> Self {
        Self {
            instance: entry.gi.map(|gi| (gi, entry.ci.unwrap_or(u32::MAX))),
            ..Self::of(gpu, entry.kind, entry.data)
        }
    }
}

/// An event set: what it is registered for and what waits in it.
#[derive(Debug, Default)]
pub(crate) struct EventSet {
    pub(crate) registered: Vec<(usize, u64)>,
    pub(crate) queue: VecDeque<Event>,
}

/// Puts an event into every set registered for it; with none registered it is lost, as with the real library.
pub(crate) fn deliver(sets: &mut BTreeMap<usize, EventSet>, event: Event) {
    for set in sets.values_mut() {
        if set
            .registered
            .iter()
            .any(|(gpu, kinds)| *gpu == event.gpu && kinds & event.kind != 0)
        {
            push(&mut set.queue, event);
        }
    }
}

/// A set for what happens to the node: GPUs bound and unbound.
#[derive(Debug, Default)]
pub(crate) struct SystemSet {
    pub(crate) kinds: u64,
    /// Kind and GPU id of each event.
    pub(crate) queue: VecDeque<(u64, u32)>,
}

/// Puts a system event into every set registered for it.
pub(crate) fn deliver_system(sets: &mut BTreeMap<usize, SystemSet>, kind: u64, gpu_id: u32) {
    for set in sets.values_mut().filter(|set| set.kinds & kind != 0) {
        push(&mut set.queue, (kind, gpu_id));
    }
}

fn push<T>(queue: &mut VecDeque<T>, item: T) {
    if queue.len() >= QUEUE {
        queue.pop_front();
    }
    queue.push_back(item);
}

/// What a log adds to what was read of it before: its tail if it grew, else all of it.
pub(crate) fn added<'log, T: PartialEq>(before: &[T], log: &'log [T]) -> &'log [T] {
    log.strip_prefix(before).unwrap_or(log)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_keeps_the_newest_events() {
        let mut sets = BTreeMap::from([(
            1,
            EventSet {
                registered: vec![(0, EventKind::Xid.bit())],
                ..EventSet::default()
            },
        )]);
        for xid in 0..2000 {
            deliver(&mut sets, Event::of(0, EventKind::Xid, xid));
            deliver(&mut sets, Event::of(1, EventKind::Xid, xid));
        }
        let queue = &sets[&1].queue;
        assert_eq!(queue.len(), QUEUE);
        assert_eq!(queue.back().map(|event| event.data), Some(1999));
        assert_eq!(queue.front().map(|event| event.data), Some(2000 - QUEUE as u64));
    }

    #[test]
    fn a_log_that_grew_adds_its_tail_and_another_log_is_new() {
        assert_eq!(added(&[1, 2], &[1, 2, 3]), [3]);
        assert_eq!(added(&[1, 2], &[2]), [2]);
        assert!(added(&[1], &[1]).is_empty());
    }
}
