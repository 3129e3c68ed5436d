//! From cells to one value, or the reason why there is none. Pure.
//!
//! Invariants: a value is made of every device that the object holds, or there is none: a mean over the devices
//! that happen to answer would be a wrong value. It is as old as its oldest reading. Of several ways of measuring
//! the most exact that is fresh counts; what will still be fresh when it no longer is stands behind it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forewarm_signals::label::Source;

use super::cell::Cell;
use super::pods::Pod;
use super::{Entry, TargetId, Value};
use crate::config::{Across, Metric, PodFilter, RelativeTo, Series};
use crate::quantity::Quantity;

/// What tells the cells of one object apart.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct CellKey {
    pub(super) device: Box<str>,
    pub(super) container: Box<str>,
    pub(super) source: Option<Source>,
    /// Who counts, where the cell holds counters: two targets count from different starts.
    pub(super) teller: Option<TargetId>,
}

/// A cell and where it comes from.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) cell: Cell,
    pub(super) target: TargetId,
    /// When a body last spoke of it.
    pub(super) heard: Instant,
    /// Why the newest body could not be used for it.
    pub(super) problem: Option<Arc<str>>,
}

impl Held {
    /// Until when its newest reading may be served.
    fn end(&self, metric: &Metric, source: Option<Source>) -> Option<Instant> {
        Some(self.cell.newest()? + metric.max_age.of(source))
    }
}

/// Cells of one object.
pub(super) type Cells = BTreeMap<CellKey, Held>;

/// Devices that containers of a pod hold: `(device, container)`.
pub(super) type Holding = BTreeSet<(Box<str>, Box<str>)>;

fn absent(text: String) -> Entry {
    Entry::Absent(Arc::from(text))
}

fn families(metric: &Metric) -> String {
    match &metric.series {
        Series::Direct(name) => name.to_string(),
        Series::Ratio {
            numerator,
            denominator,
        } => format!("{numerator} and {denominator}"),
    }
}

/// The value of a pod at `now`.
pub(super) fn pod(
    metric: &Metric,
    pod: &Pod,
    cells: Option<&Cells>,
    holding: Option<&Holding>,
    now: Instant,
) -> Entry {
    if metric.pods == PodFilter::Ready {
        match pod.ready {
            Some(true) => {}
            Some(false) => {
                return Entry::Withheld(Arc::from("is not ready, so its value is withheld (pods: ready)"));
            }
            None => {
                return Entry::Withheld(Arc::from(
                    "has no known readiness, so its value is withheld (pods: ready; use pods: all to serve it)",
                ));
            }
        }
    }
    let since = pod.ready_since.filter(|_| metric.pods == PodFilter::Ready);
    let none = Cells::new();
    let cells = cells.unwrap_or(&none);
    if let Some(holding) = holding {
        for (device, container) in holding {
            if !cells
                .keys()
                .any(|key| key.device == *device && key.container == *container)
            {
                return absent(format!(
                    "has no reading of {} for device {device}",
                    families(metric)
                ));
            }
        }
    }
    let relevant = cells.iter().filter(|(key, _)| {
        holding.is_none_or(|holding| {
            holding
                .iter()
                .any(|(device, container)| key.device == *device && key.container == *container)
        })
    });
    lasting(metric, &slots(relevant), since, now)
}

/// The value of a node at `now`: all its devices count.
pub(super) fn node(metric: &Metric, cells: &Cells, now: Instant) -> Entry {
    lasting(metric, &slots(cells.iter()), None, now)
}

/// Ways of measuring, by device and container.
type Slots<'a> = BTreeMap<(&'a str, &'a str), Vec<(&'a CellKey, &'a Held)>>;

fn slots<'a>(cells: impl Iterator<Item = (&'a CellKey, &'a Held)>) -> Slots<'a> {
    let mut slots = Slots::new();
    for (key, held) in cells {
        slots
            .entry((&key.device, &key.container))
            .or_default()
            .push((key, held));
    }
    slots
}

/// The value at `now`, and behind it the one that outlives it, where there is another way of measuring.
fn lasting(metric: &Metric, slots: &Slots<'_>, since: Option<Instant>, now: Instant) -> Entry {
    let mut entry = combine(metric, slots, since, now);
    if let Entry::Value(value) = &mut entry
        && value.end() >= now
        && slots.values().any(|ways| ways.len() > 1)
        && let Entry::Value(later) = lasting(metric, slots, since, value.end() + Duration::from_nanos(1))
        && later.end() > value.end()
    {
        value.then = Some(Arc::new(later));
    }
    entry
}

/// Orders ways of measuring: usable now before not, then exact before less exact, then the longest lasting.
fn rank(
    metric: &Metric,
    (key, held): (&CellKey, &Held),
    since: Option<Instant>,
    now: Instant,
) -> (bool, u8, Option<Instant>) {
    let end = held.end(metric, key.source);
    let is_usable = held.problem.is_none()
        && end.is_some_and(|end| end >= now)
        && held.cell.value(metric.window, since).is_some();
    let exactness = if is_usable { exactness(key.source) } else { 0 };
    (is_usable, exactness, end)
}

fn combine(metric: &Metric, slots: &Slots<'_>, since: Option<Instant>, now: Instant) -> Entry {
    let best = slots.iter().filter_map(|(place, ways)| {
        let best = ways
            .iter()
            .copied()
            .max_by_key(|way| rank(metric, *way, since, now))?;
        Some((*place, best))
    });
    let mut devices: BTreeMap<&str, f64> = BTreeMap::new();
    let mut oldest: Option<(Instant, Duration, &Held)> = None;
    for ((device, _), (key, held)) in best {
        if let Some(problem) = &held.problem {
            return Entry::Absent(Arc::clone(problem));
        }
        if metric.relative_to == RelativeTo::Share && key.source == Some(Source::Process) {
            return absent(format!(
                "shares device {device}, and relativeTo: share of a shared device is not in this version"
            ));
        }
        let Some(value) = held.cell.value(metric.window, since) else {
            return absent(match since {
                Some(_) => "became ready just now and has no reading since".to_owned(),
                None => format!("has too few readings of {} yet", families(metric)),
            });
        };
        *devices.entry(device).or_insert(0.0) += value;
        if let Some(newest) = held.cell.newest() {
            let max_age = metric.max_age.of(key.source);
            if oldest.is_none_or(|(at, age, _)| newest + max_age < at + age) {
                oldest = Some((newest, max_age, held));
            }
        }
    }
    let Some((measured_at, max_age, held)) = oldest else {
        return absent(format!("has no reading of {}", families(metric)));
    };
    #[allow(clippy::cast_precision_loss, reason = "a handful of devices")]
    let count = devices.len() as f64;
    let values = devices.into_values();
    let combined = match metric.across_devices {
        Across::Sum => values.sum(),
        Across::Mean => values.sum::<f64>() / count,
        Across::Max => values.fold(f64::NEG_INFINITY, f64::max),
        Across::Min => values.fold(f64::INFINITY, f64::min),
    };
    match Quantity::from_f64(combined * metric.scale) {
        Ok(quantity) => Entry::Value(Value {
            quantity,
            measured_at,
            max_age,
            window: metric.window.map(|window| window.length),
            target: held.target.clone(),
            then: None,
        }),
        Err(error) => absent(format!("has an unservable value: {error}")),
    }
}

fn exactness(source: Option<Source>) -> u8 {
    match source {
        Some(Source::Exclusive) => 3,
        Some(Source::MigGpm) => 2,
        Some(Source::Process) => 1,
        None => 0,
    }
}
