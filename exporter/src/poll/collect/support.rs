//! What a device offers, reading by reading, as `/metrics/detail` tells it.
//!
//! Invariants: a reading that fails, or was never worth asking for, has no line; one that stands in for another (the old
//! power call, the clock mask) has its own, so that each absent family finds its reason.

use super::Collector;

impl Collector {
    pub(super) fn support(&self) -> Vec<(&'static str, bool)> {
        let calls = [
            ("utilization", self.calls.utilization),
            ("memory", self.calls.memory),
            ("gpm", self.calls.gpm),
            ("power-usage", self.calls.power_usage),
            ("temperature", self.calls.temperature),
            ("clock-events", self.calls.clock_events),
            ("remapped-rows", self.calls.rows),
            ("fabric", self.calls.fabric),
        ];
        let calls = calls
            .into_iter()
            .filter_map(|(name, capability)| Some((name, capability.is_supported()?)));
        let clocks = ["clock-graphics", "clock-sm", "clock-memory", "clock-video"]
            .into_iter()
            .zip(self.calls.clocks)
            .filter_map(|(name, capability)| Some((name, capability.is_supported()?)));
        let batches = self
            .fast
            .support()
            .chain(self.medium.support())
            .chain(self.slow.support());
        let mut all: Vec<_> = calls
            .chain(clocks)
            .chain(batches)
            .chain(self.links.support())
            .collect();
        // Traffic fields are asked in two scopes; offered in one is offered.
        all.sort_unstable_by_key(|(name, is_supported)| (*name, !*is_supported));
        all.dedup_by_key(|(name, _)| *name);
        all
    }
}
