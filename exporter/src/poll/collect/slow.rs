//! The groups that are not read every tick: temperatures, clocks, errors, links, health.
//!
//! Invariants: as for every group, replaced whole or kept with its older moment.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forewarm_nvml::{ClockDomain, Device, FabricState, Field, Gap, Number, Reading, Rejection, Scope};

use super::{Collector, THROTTLES, gated};
use crate::poll::schedule::Tier;
use crate::poll::tally::Tally;
use crate::snapshot::{Clocks, Ecc, Health, THROTTLE_REASONS, Thermal, Timed};

/// Six kinds of advice are defined; a driver newer than this build may have a few more, garbage is far above.
const MOST_ADVICE: u64 = 63;

fn known_advice(advice: u64) -> Reading<u64> {
    if advice > MOST_ADVICE {
        Err(Gap::Rejected(Rejection::Implausible))
    } else {
        Ok(advice)
    }
}

impl Collector {
    pub(super) fn read_medium(&mut self, device: &mut dyn Device, at: Instant, tally: &mut Tally<'_>) {
        self.medium.ask(device, at, tally);
        let gpu = gated(&mut self.calls.temperature, at, tally, || device.temperature());
        let memory = self
            .medium
            .answer(Field::MEMORY_TEMPERATURE, Scope::Gpu)
            .and_then(Number::signed);
        let memory = tally.part(memory.and_then(forewarm_nvml::Celsius::from_degrees));
        if gpu.is_some() || memory.is_some() {
            self.snapshot.thermal = Some(Timed {
                at,
                value: Thermal { gpu, memory },
            });
        }
        let mut clocks = [None; ClockDomain::ALL.len()];
        for ((domain, slot), capability) in ClockDomain::ALL
            .into_iter()
            .zip(&mut clocks)
            .zip(&mut self.calls.clocks)
        {
            *slot = gated(capability, at, tally, || device.clock(domain));
        }
        let throttled = THROTTLES
            .map(|(field, _)| tally.part(self.medium.answer(field, Scope::Gpu).and_then(Number::unsigned)));
        if clocks.iter().any(Option::is_some) || throttled.iter().any(Option::is_some) {
            self.snapshot.clocks = Some(Timed {
                at,
                value: Clocks { clocks, throttled },
            });
        }
        self.take_hardware_slowdown(device, at, tally, &throttled);
    }

    /// Time held down by hardware: by the counters where the driver has them, else estimated from the mask.
    fn take_hardware_slowdown(
        &mut self,
        device: &mut dyn Device,
        at: Instant,
        tally: &mut Tally<'_>,
        throttled: &[Option<u64>; THROTTLE_REASONS],
    ) {
        if let [.., thermal, brake] = throttled
            && (thermal.is_some() || brake.is_some())
        {
            self.held_by_hardware =
                Duration::from_nanos(thermal.unwrap_or(0).saturating_add(brake.unwrap_or(0)));
            return;
        }
        let events = gated(&mut self.calls.clock_events, at, tally, || device.clock_events());
        let since = self
            .last_clock_events
            .replace(at)
            .map_or(Duration::ZERO, |then| at.saturating_duration_since(then));
        if events.is_some_and(forewarm_nvml::ClockEvents::is_hardware_slowdown) {
            self.held_by_hardware += since.min(Tier::Medium.period(self.interval) * 2);
        }
    }

    pub(super) fn read_slow(&mut self, device: &mut dyn Device, at: Instant, tally: &mut Tally<'_>) {
        self.slow.ask(device, at, tally);
        let rows = gated(&mut self.calls.rows, at, tally, || device.remapped_rows());
        let mut count = |field| tally.part(self.slow.answer(field, Scope::Gpu).and_then(Number::unsigned));
        let value = Ecc {
            corrected: count(Field::ECC_CORRECTED_AGGREGATE),
            uncorrected: count(Field::ECC_UNCORRECTED_AGGREGATE),
            uncorrected_volatile: count(Field::ECC_UNCORRECTED_VOLATILE),
            rows,
        };
        let advice = self
            .slow
            .answer(Field::RECOVERY_ACTION, Scope::Gpu)
            .and_then(Number::unsigned)
            .and_then(known_advice);
        let recovery_action = tally.part(advice);
        if value.corrected.is_some() || value.uncorrected.is_some() || rows.is_some() {
            self.snapshot.ecc = Some(Timed { at, value });
        }
        let fabric = gated(&mut self.calls.fabric, at, tally, || match device.fabric() {
            // The call works everywhere; a fabric is what it is about.
            Ok(fabric) if fabric.state == FabricState::NotSupported => Err(Gap::Unsupported),
            other => other,
        });
        if let Some(links) = self.links.read(device, at, tally) {
            self.snapshot.links = Some(Timed {
                at,
                value: Arc::new(links),
            });
        }
        // A driver that once advised and now fails to answer has not withdrawn its advice: the older one stays, and ages.
        let is_advice_missing = matches!(advice, Err(Gap::Failed { .. } | Gap::Rejected(_) | Gap::NotYet))
            && self
                .snapshot
                .health
                .as_ref()
                .is_some_and(|health| health.value.recovery_action.is_some());
        if tally.is_answered() && !is_advice_missing {
            let reasons = Vec::new();
            let health = Health {
                recovery_action,
                fabric,
                reasons,
            };
            self.snapshot.health = Some(Timed {
                at,
                value: Arc::new(health),
            });
        }
    }
}
