//! From cells to one value, or the reason why there is none. Pure.
//!
//! Invariants: a value is made of every device that the object holds, or there is none: a mean over the devices
//! that happen to answer would be a wrong value. It is as old as its oldest reading.

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
}

/// A cell and where it comes from.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) cell: Cell,
    pub(super) target: TargetId,
    /// Why the newest body could not be used for it.
    pub(super) problem: Option<Arc<str>>,
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

/// The value of a pod.
pub(super) fn pod(metric: &Metric, pod: &Pod, cells: Option<&Cells>, holding: Option<&Holding>) -> Entry {
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
    combine(metric, relevant, since)
}

/// The value of a node: all its devices count.
pub(super) fn node(metric: &Metric, cells: &Cells) -> Entry {
    combine(metric, cells.iter(), None)
}

fn combine<'a>(
    metric: &Metric,
    cells: impl Iterator<Item = (&'a CellKey, &'a Held)>,
    since: Option<Instant>,
) -> Entry {
    // One way of measuring per container and device: the most exact that has a reading.
    let mut best: BTreeMap<(&str, &str), (&CellKey, &Held)> = BTreeMap::new();
    for (key, held) in cells {
        let slot = best.entry((&key.device, &key.container)).or_insert((key, held));
        if exactness(key.source) > exactness(slot.0.source) {
            *slot = (key, held);
        }
    }
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
