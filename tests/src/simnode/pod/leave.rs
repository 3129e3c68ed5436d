//! How a pod leaves: its containers are asked and then made to end, and what it held is given back.

use std::time::{Duration, Instant};

use super::super::container::Machine;
use super::super::lock;
use super::Worker;

impl Worker {
    /// Returns devices and their load. A pod that ended holds none, even while its object stays: the scheduler counts
    /// them as free.
    pub(super) fn give_back(&mut self) {
        let mut loads = lock(&self.node.loads);
        for index in std::mem::take(&mut self.gpus).into_values().flatten() {
            loads.remove(&index);
        }
        drop(loads);
        lock(&self.node.devices).release(&self.uid);
    }

    /// Returns the address.
    pub(super) fn free(&mut self) {
        if let Some(slot) = self.slot.take() {
            lock(&self.node.slots).remove(&slot);
        }
        lock(&self.node.pids).retain(|key, _| {
            (key.namespace.as_str(), key.pod.as_str())
                != (
                    self.pod.metadata.namespace.as_deref().unwrap_or_default(),
                    self.pod.metadata.name.as_deref().unwrap_or_default(),
                )
        });
    }

    pub(super) fn terminate_if_asked(&mut self, now: Instant) {
        if self.pod.metadata.deletion_timestamp.is_none() {
            return;
        }
        let grace = self.pod.metadata.deletion_grace_period_seconds.unwrap_or(30);
        let asked = now + Duration::from_secs(u64::try_from(grace).unwrap_or_default());
        // Asked again with a shorter grace period, a pod ends earlier, and never later.
        let by = self.terminate_by.map_or(asked, |by| by.min(asked));
        self.terminate_by = Some(by);
        self.all().for_each(Machine::ask_to_end);
        if now >= by {
            self.all().for_each(Machine::kill);
        }
    }
}
