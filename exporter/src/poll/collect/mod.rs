//! One tick of one GPU: which groups to read, and what becomes of the answers.
//!
//! Purpose: turn a device and a moment into the next snapshot; pure apart from the calls it makes on the device.
//! Inputs: the device, the moment, what events told.
//! Invariants: a group is replaced whole or keeps its older readings with their older moment; a failing call or
//! field leaves the others alone; at the default interval a tick makes five calls, plus seven each fifth and four
//! each thirtieth.

mod slow;
mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use forewarm_nvml::{ClockDomain, Device, Field, FieldQuery, Number, Reading, Scope};
use forewarm_signals::Group;
use forewarm_signals::health::Reason;

use super::batch::Batch;
use super::capability::Capability;
use super::counter::{Continued, During, Rate};
use super::links::LinkReader;
use super::schedule::{self, Tier};
use super::tally::{PollCounts, Tally};
use crate::health::{Observation, Windows};
use crate::snapshot::{
    DeviceSnapshot, Directions, Gpm, Health, Identity, Nvlink, Pcie, Power, Presence, THROTTLE_REASONS,
    Timed, Utilization,
};

/// Throttle counters with their label values.
pub const THROTTLES: [(Field, &str); THROTTLE_REASONS] = [
    (Field::HELD_BY_POWER_CAP, "sw-power-cap"),
    (Field::HELD_BY_THERMAL_POLICY, "thermal-policy"),
    (Field::HELD_BY_SYNC_BOOST, "sync-boost"),
    (Field::HELD_BY_BOARD_LIMIT, "board-limit"),
    (Field::HELD_BY_RELIABILITY, "reliability"),
    (Field::HELD_BY_SW_THERMAL, "sw-thermal"),
    (Field::HELD_BY_HW_THERMAL, "hw-thermal"),
    (Field::HELD_BY_POWER_BRAKE, "hw-power-brake"),
];

/// After this many ticks in a row in which every call was refused, the device counts as refused.
const REFUSED_TICKS: u32 = 3;

/// What a tick asks of its surroundings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Go on.
    Continue,
    /// The device is lost: try to take hold of it anew.
    Lost,
    /// The device refuses every call: try to take hold of it anew. Whether the library is to be opened anew depends
    /// on the other devices.
    Refused,
    /// The library has lost its driver: open it anew.
    Reopen,
}

/// Reads one device, tick by tick.
#[derive(Debug)]
pub struct Collector {
    index: u32,
    interval: Duration,
    counts: Arc<PollCounts>,
    tick: u64,
    snapshot: DeviceSnapshot,
    calls: Capabilities,
    fast: Batch,
    medium: Batch,
    slow: Batch,
    links: LinkReader,
    nvlink_rate: Directions<Rate>,
    pcie_total: Directions<Continued>,
    windows: Windows,
    held_by_hardware: Duration,
    last_clock_events: Option<Instant>,
    last_gpm: Option<Instant>,
    refused_ticks: u32,
}

#[derive(Debug, Default)]
struct Capabilities {
    utilization: Capability,
    memory: Capability,
    gpm: Capability,
    power_usage: Capability,
    temperature: Capability,
    clocks: [Capability; ClockDomain::ALL.len()],
    clock_events: Capability,
    rows: Capability,
    fabric: Capability,
}

impl Collector {
    /// A collector for the device of this index.
    #[must_use]
    pub fn new(index: u32, identity: Arc<Identity>, interval: Duration, counts: Arc<PollCounts>) -> Self {
        let mut snapshot = DeviceSnapshot::unseen(index);
        snapshot.identity = Some(identity);
        Self {
            index,
            interval,
            counts,
            tick: 0,
            snapshot,
            calls: Capabilities::default(),
            fast: Batch::new([
                FieldQuery::new(Field::NVLINK_RX_KIB, Scope::AllLinks),
                FieldQuery::new(Field::NVLINK_TX_KIB, Scope::AllLinks),
                FieldQuery::new(Field::PCIE_RX_BYTES, Scope::Gpu),
                FieldQuery::new(Field::PCIE_TX_BYTES, Scope::Gpu),
                FieldQuery::new(Field::PCIE_REPLAYS, Scope::Gpu),
                FieldQuery::new(Field::ENERGY, Scope::Gpu),
                FieldQuery::new(Field::POWER_AVERAGE, Scope::Gpu),
                FieldQuery::new(Field::POWER_INSTANT, Scope::Gpu),
            ]),
            medium: Batch::new(
                std::iter::once(Field::MEMORY_TEMPERATURE)
                    .chain(THROTTLES.iter().map(|(field, _)| *field))
                    .map(|field| FieldQuery::new(field, Scope::Gpu)),
            ),
            slow: Batch::of_gpu(&[
                Field::ECC_CORRECTED_AGGREGATE,
                Field::ECC_UNCORRECTED_AGGREGATE,
                Field::ECC_UNCORRECTED_VOLATILE,
                Field::RECOVERY_ACTION,
            ]),
            links: LinkReader::default(),
            nvlink_rate: Directions {
                rx: Some(Rate::default()),
                tx: Some(Rate::default()),
            },
            pcie_total: Directions {
                rx: Some(Continued::default()),
                tx: Some(Continued::default()),
            },
            windows: Windows::default(),
            held_by_hardware: Duration::ZERO,
            last_clock_events: None,
            last_gpm: None,
            refused_ticks: 0,
        }
    }

    /// Reads what is due and yields the next snapshot.
    ///
    /// `clock` is asked before each group, so that slow calls do not make later groups look younger or older.
    pub fn tick(
        &mut self,
        device: &mut dyn Device,
        last_hardware_xid: Option<Instant>,
        mut clock: impl FnMut() -> Instant,
    ) -> (DeviceSnapshot, Verdict) {
        let counts = Arc::clone(&self.counts);
        let mut tally = Tally::new(&counts);
        let due = |tier: Tier| tier.is_due(self.tick, self.index, self.interval);
        let (is_medium, is_slow) = (due(Tier::Medium), due(Tier::Slow));
        self.read_memory(device, clock(), &mut tally);
        self.read_utilization(device, clock(), &mut tally);
        self.read_gpm(device, clock(), &mut tally);
        self.read_fast_fields(device, &mut clock, &mut tally);
        if is_medium && !tally.is_lost() {
            self.read_medium(device, clock(), &mut tally);
        }
        if is_slow && !tally.is_lost() {
            self.read_slow(device, clock(), &mut tally);
        }
        let now = clock();
        self.judge_health(now, last_hardware_xid);
        if is_slow {
            self.snapshot.support = Arc::new(self.support());
        }
        self.tick += 1;
        self.snapshot.ticks = self.tick;
        let verdict = self.judge(&tally, now);
        (self.snapshot.clone(), verdict)
    }

    fn judge(&mut self, tally: &Tally<'_>, now: Instant) -> Verdict {
        // A tick in which every reading pauses after a failure says nothing.
        if tally.is_all_refused() {
            self.refused_ticks += 1;
        } else if !tally.is_idle() {
            self.refused_ticks = 0;
        }
        if tally.is_lost() {
            self.snapshot.presence = Presence::Lost;
            return Verdict::Lost;
        }
        if tally.is_answered() {
            self.snapshot.presence = Presence::Answering;
            self.snapshot.answered_at = Some(now);
        } else if self.refused_ticks >= REFUSED_TICKS {
            self.snapshot.presence = Presence::Refused;
        } else if !tally.is_idle() {
            self.snapshot.presence = Presence::Failing;
        }
        if tally.is_uninitialized() {
            Verdict::Reopen
        } else if self.snapshot.presence == Presence::Refused {
            Verdict::Refused
        } else {
            Verdict::Continue
        }
    }

    fn read_memory(&mut self, device: &mut dyn Device, at: Instant, tally: &mut Tally<'_>) {
        if let Some(value) = gated(&mut self.calls.memory, at, tally, || device.memory()) {
            self.snapshot.memory = Some(Timed { at, value });
        }
    }

    fn read_utilization(&mut self, device: &mut dyn Device, at: Instant, tally: &mut Tally<'_>) {
        let Some(rates) = gated(&mut self.calls.utilization, at, tally, || device.utilization()) else {
            return;
        };
        let value = Utilization {
            busy: tally.part(rates.busy),
            memory_bandwidth: tally.part(rates.memory_bandwidth),
        };
        self.snapshot.utilization = Some(Timed { at, value });
    }

    fn read_gpm(&mut self, device: &mut dyn Device, at: Instant, tally: &mut Tally<'_>) {
        let before = self.last_gpm.replace(at);
        let Some(shares) = gated(&mut self.calls.gpm, at, tally, || device.gpm()) else {
            return;
        };
        // Shares are means since the sample before. After a pause they tell of the pause, not of now.
        let longest = schedule::age_limit(Group::Gpm, self.interval);
        if before.is_some_and(|before| at.saturating_duration_since(before) > longest) {
            return;
        }
        let value = Gpm {
            sm_active: tally.part(shares.sm_active),
            sm_occupancy: tally.part(shares.sm_occupancy),
            tensor_active: tally.part(shares.tensor_active),
            dram_active: tally.part(shares.dram_active),
        };
        self.snapshot.gpm = Some(Timed { at, value });
    }

    fn read_fast_fields(
        &mut self,
        device: &mut dyn Device,
        clock: &mut impl FnMut() -> Instant,
        tally: &mut Tally<'_>,
    ) {
        let at = clock();
        // One of the two is enough; the average is what the power family promises.
        let has_average = self.fast.is_supported(Field::POWER_AVERAGE);
        self.fast.want(Field::POWER_INSTANT, has_average == Some(false));
        self.fast.ask(device, at, tally);
        let during = During {
            before: at,
            after: clock(),
        };
        self.take_nvlink(during, tally);
        self.take_pcie(at, tally);
        self.take_power(device, at, tally);
    }

    fn take_nvlink(&mut self, during: During, tally: &mut Tally<'_>) {
        let longest = schedule::age_limit(Group::Nvlink, self.interval);
        let mut direction = |field, rate: &mut Option<Rate>| {
            let total = tally.part(self.fast.answer(field, Scope::AllLinks).and_then(Number::kib));
            let speed = match (rate.as_mut(), total) {
                (Some(rate), Some(total)) => tally.part(rate.advance(during, total, longest)),
                (Some(rate), None) => {
                    rate.forget();
                    None
                }
                (None, _) => None,
            };
            (total, speed)
        };
        let (rx, rx_rate) = direction(Field::NVLINK_RX_KIB, &mut self.nvlink_rate.rx);
        let (tx, tx_rate) = direction(Field::NVLINK_TX_KIB, &mut self.nvlink_rate.tx);
        if rx.is_some() || tx.is_some() {
            let value = Nvlink {
                bytes: Directions { rx, tx },
                rate: Directions {
                    rx: rx_rate,
                    tx: tx_rate,
                },
            };
            self.snapshot.nvlink = Some(Timed {
                at: during.before,
                value,
            });
        }
    }

    fn take_pcie(&mut self, at: Instant, tally: &mut Tally<'_>) {
        let mut direction = |field, total: &mut Option<Continued>| {
            let number = tally.part(self.fast.answer(field, Scope::Gpu))?;
            tally.part(total.as_mut()?.advance(at, number))
        };
        let rx = direction(Field::PCIE_RX_BYTES, &mut self.pcie_total.rx);
        let tx = direction(Field::PCIE_TX_BYTES, &mut self.pcie_total.tx);
        let replays = tally.part(
            self.fast
                .answer(Field::PCIE_REPLAYS, Scope::Gpu)
                .and_then(Number::unsigned),
        );
        if rx.is_some() || tx.is_some() || replays.is_some() {
            let value = Pcie {
                bytes: Directions { rx, tx },
                replays,
            };
            self.snapshot.pcie = Some(Timed { at, value });
        }
    }

    fn take_power(&mut self, device: &mut dyn Device, at: Instant, tally: &mut Tally<'_>) {
        let average = self.fast.answer(Field::POWER_AVERAGE, Scope::Gpu);
        let instant = self.fast.answer(Field::POWER_INSTANT, Scope::Gpu);
        let mut power = tally.part(average.or(instant).and_then(Number::milliwatts));
        let has_field = [Field::POWER_AVERAGE, Field::POWER_INSTANT]
            .map(|field| self.fast.is_supported(field) != Some(false));
        if !has_field.contains(&true) {
            power = gated(&mut self.calls.power_usage, at, tally, || device.power_usage());
        }
        let energy = tally.part(
            self.fast
                .answer(Field::ENERGY, Scope::Gpu)
                .and_then(Number::millijoules),
        );
        if power.is_some() || energy.is_some() {
            self.snapshot.power = Some(Timed {
                at,
                value: Power { power, energy },
            });
        }
    }

    /// Judges anew at each tick, because an Xid must not wait for the slow tier.
    fn judge_health(&mut self, now: Instant, last_hardware_xid: Option<Instant>) {
        let Some(health) = &self.snapshot.health else {
            return;
        };
        let ecc = self.snapshot.ecc.as_ref().map(|timed| timed.value);
        let links = self.snapshot.links.as_ref().map(|timed| &timed.value);
        let fabric_is_complete = health.value.fabric.is_some_and(|fabric| fabric.joined);
        let seen = Observation {
            recovery_action: health.value.recovery_action,
            rows: ecc.and_then(|ecc| ecc.rows),
            uncorrected_volatile: ecc.and_then(|ecc| ecc.uncorrected_volatile),
            last_hardware_xid,
            links_up: links.and_then(|links| links.up),
            links_expected: links
                .filter(|_| fabric_is_complete)
                .and_then(|links| u32::try_from(links.links.len()).ok()),
            link_errors: links.and_then(|links| {
                links
                    .errors
                    .kinds()
                    .iter()
                    .filter_map(|(_, count)| *count)
                    .reduce(u64::saturating_add)
            }),
            hardware_slowdown: Some(self.held_by_hardware),
        };
        let reasons: Vec<Reason> = self.windows.advance(now, &seen);
        if reasons != health.value.reasons {
            let changed = Health {
                reasons,
                ..Health::clone(&health.value)
            };
            self.snapshot.health = Some(Timed {
                at: health.at,
                value: Arc::new(changed),
            });
        }
    }
}

/// Asks if it is worth asking, and remembers what came of it.
fn gated<T>(
    capability: &mut Capability,
    now: Instant,
    tally: &mut Tally<'_>,
    ask: impl FnOnce() -> Reading<T>,
) -> Option<T> {
    if !capability.is_worth_asking(now) {
        return None;
    }
    let answer = ask();
    tally.note(&answer);
    *capability = capability.after(&answer, now);
    answer.ok()
}

#[cfg(test)]
mod tests;
