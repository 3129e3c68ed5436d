//! A library in the process itself, for unit tests of what polls devices.
//!
//! Invariants: answers only what a test put in; what was not set is unsupported, as on an old card.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::call::InFlight;
use crate::field::{Field, FieldQuery, Number, Scope};
use crate::model::{
    ClockDomain, ClockEvents, Device, DeviceKey, Event, Fabric, Facts, Gpm, Memory, Nvml, RemappedRows,
    Utilization,
};
use crate::quantity::{Celsius, Hertz, Watts};
use crate::reading::{Gap, Reading};

/// What one fake device answers.
#[derive(Debug, Clone)]
pub struct Answers {
    /// Answer of [`Device::facts`].
    pub facts: Reading<Facts>,
    /// Answer of [`Device::utilization`].
    pub utilization: Reading<Utilization>,
    /// Answer of [`Device::memory`].
    pub memory: Reading<Memory>,
    /// Whether the whole batch fails.
    pub batch: Reading<()>,
    /// Answers of fields by field and scope id; absent ones are unsupported.
    pub fields: BTreeMap<(Field, u32), Reading<Number>>,
    /// Answer of [`Device::gpm`].
    pub gpm: Reading<Gpm>,
    /// Answer of [`Device::power_usage`].
    pub power_usage: Reading<Watts>,
    /// Answer of [`Device::temperature`].
    pub temperature: Reading<Celsius>,
    /// Answers of [`Device::clock`]; absent ones are unsupported.
    pub clocks: BTreeMap<ClockDomain, Reading<Hertz>>,
    /// Answer of [`Device::clock_events`].
    pub clock_events: Reading<ClockEvents>,
    /// Answer of [`Device::remapped_rows`].
    pub remapped_rows: Reading<RemappedRows>,
    /// Answer of [`Device::fabric`].
    pub fabric: Reading<Fabric>,
    /// Answers of [`Device::link_is_up`]; absent ones are unsupported.
    pub links: BTreeMap<u32, Reading<bool>>,
    /// How many calls were made.
    pub calls: u64,
    /// How many entries were asked in batches.
    pub entries: u64,
}

impl Answers {
    /// A device that has a name and nothing else.
    #[must_use]
    pub fn bare(uuid: &str, model: &str) -> Self {
        Self {
            facts: Ok(Facts {
                uuid: uuid.to_owned(),
                model: model.to_owned(),
                architecture: "unknown",
                pci_bus_id: None,
                serial: None,
                minor: None,
                compute_capability: None,
            }),
            utilization: Err(Gap::Unsupported),
            memory: Err(Gap::Unsupported),
            batch: Ok(()),
            fields: BTreeMap::new(),
            gpm: Err(Gap::Unsupported),
            power_usage: Err(Gap::Unsupported),
            temperature: Err(Gap::Unsupported),
            clocks: BTreeMap::new(),
            clock_events: Err(Gap::Unsupported),
            remapped_rows: Err(Gap::Unsupported),
            fabric: Err(Gap::Unsupported),
            links: BTreeMap::new(),
            calls: 0,
            entries: 0,
        }
    }

    /// Sets a field of the whole GPU.
    pub fn set(&mut self, field: Field, number: Number) {
        self.set_scoped(field, Scope::Gpu, number);
    }

    /// Sets a field of a scope.
    pub fn set_scoped(&mut self, field: Field, scope: Scope, number: Number) {
        self.fields.insert((field, scope.id()), Ok(number));
    }

    /// Makes every call fail with the same gap.
    pub fn fail_all(&mut self, gap: Gap) {
        self.facts = Err(gap);
        self.utilization = Err(gap);
        self.memory = Err(gap);
        self.batch = Err(gap);
        self.gpm = Err(gap);
        self.power_usage = Err(gap);
        self.temperature = Err(gap);
        self.clock_events = Err(gap);
        self.remapped_rows = Err(gap);
        self.fabric = Err(gap);
        for answer in self.clocks.values_mut() {
            *answer = Err(gap);
        }
        for answer in self.links.values_mut() {
            *answer = Err(gap);
        }
    }
}

/// A fake device; clones share their answers.
#[derive(Debug, Clone)]
pub struct FakeDevice {
    key: DeviceKey,
    answers: Arc<Mutex<Answers>>,
}

impl FakeDevice {
    /// A device with these answers.
    #[must_use]
    pub fn new(key: usize, answers: Answers) -> Self {
        Self {
            key: DeviceKey(key),
            answers: Arc::new(Mutex::new(answers)),
        }
    }

    /// The answers, to look at or change.
    pub fn answers(&self) -> MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn asked(&self) -> MutexGuard<'_, Answers> {
        let mut answers = self.answers();
        answers.calls += 1;
        answers
    }
}

impl Device for FakeDevice {
    fn key(&self) -> DeviceKey {
        self.key
    }

    fn facts(&mut self) -> Reading<Facts> {
        self.asked().facts.clone()
    }

    fn utilization(&mut self) -> Reading<Utilization> {
        self.asked().utilization
    }

    fn memory(&mut self) -> Reading<Memory> {
        self.asked().memory
    }

    fn fields(&mut self, queries: &mut [FieldQuery]) -> Reading<()> {
        let mut answers = self.asked();
        answers.entries += u64::try_from(queries.len()).unwrap_or(u64::MAX);
        answers.batch?;
        for query in queries {
            query.answer = answers
                .fields
                .get(&(query.field, query.scope.id()))
                .copied()
                .unwrap_or(Err(Gap::Unsupported));
        }
        Ok(())
    }

    fn gpm(&mut self) -> Reading<Gpm> {
        self.asked().gpm
    }

    fn power_usage(&mut self) -> Reading<Watts> {
        self.asked().power_usage
    }

    fn temperature(&mut self) -> Reading<Celsius> {
        self.asked().temperature
    }

    fn clock(&mut self, domain: ClockDomain) -> Reading<Hertz> {
        self.asked()
            .clocks
            .get(&domain)
            .copied()
            .unwrap_or(Err(Gap::Unsupported))
    }

    fn clock_events(&mut self) -> Reading<ClockEvents> {
        self.asked().clock_events
    }

    fn remapped_rows(&mut self) -> Reading<RemappedRows> {
        self.asked().remapped_rows
    }

    fn fabric(&mut self) -> Reading<Fabric> {
        self.asked().fabric
    }

    fn link_is_up(&mut self, link: u32) -> Reading<bool> {
        self.asked()
            .links
            .get(&link)
            .copied()
            .unwrap_or(Err(Gap::Unsupported))
    }

    fn subscribe(&mut self) -> Reading<()> {
        self.asked().calls += 0;
        Err(Gap::Unsupported)
    }
}

/// A fake library.
#[derive(Debug, Clone, Default)]
pub struct FakeNvml {
    /// Its devices.
    pub devices: Vec<FakeDevice>,
}

impl Nvml for FakeNvml {
    fn driver_version(&self) -> Reading<String> {
        Ok("580.95.05".to_owned())
    }

    fn device_count(&self) -> Reading<u32> {
        Ok(u32::try_from(self.devices.len()).unwrap_or(u32::MAX))
    }

    fn device(&self, index: u32, _in_flight: Arc<InFlight>) -> Reading<Box<dyn Device>> {
        let at = usize::try_from(index).unwrap_or(usize::MAX);
        let device = self.devices.get(at).ok_or(Gap::Unsupported)?;
        Ok(Box::new(device.clone()))
    }

    fn wait_event(&self, _patience: Duration) -> Reading<Option<Event>> {
        Err(Gap::Unsupported)
    }
}
