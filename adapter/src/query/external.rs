//! External metrics: series with labels, fenced by namespace, then selected, then reduced.
//!
//! Invariants: who may not read a metric does not learn that it exists; a series older than its limit takes no part;
//! what two exporters of one node both say counts once.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use forewarm_signals::label;

use super::Clock;
use super::gap::{failure_of, failures, seconds};
use crate::config::{External, Reduce};
use crate::index::{ExternalSeries, State, TargetId};
use crate::provider::{ExternalValue, Refusal};
use crate::quantity::Quantity;
use crate::selector::Selector;

/// Values of an external metric.
///
/// # Errors
/// A [`Refusal`] where not a single honest value can be given.
pub fn external(
    state: &State,
    namespace: &str,
    metric: &str,
    selector: &Selector,
    clock: Clock,
) -> Result<Vec<ExternalValue>, Refusal> {
    let config = &state.config.external;
    // Who may not read a metric does not learn that it exists.
    let is_visible = |external: &External| {
        external.namespaces.is_empty() || external.namespaces.iter().any(|allowed| allowed == namespace)
    };
    let position = config
        .iter()
        .position(|external| &*external.name == metric && is_visible(external))
        .ok_or_else(|| Refusal::UnknownMetric {
            metric: metric.to_owned(),
            resource: format!("namespace {namespace}"),
        })?;
    let external = &config[position];
    let mut newest_stale: Option<(Duration, &TargetId)> = None;
    let mut fresh: Vec<&ExternalSeries> = Vec::new();
    for (target, list) in &state.external[position] {
        for series in list.iter() {
            let own = external
                .namespace_label
                .as_ref()
                .is_none_or(|label| series.labels.get(label).is_some_and(|value| value == namespace));
            if !own || !selector.matches(|key| series.labels.get(key).map(String::as_str)) {
                continue;
            }
            let age = clock.age(series.measured_at);
            if age <= external.max_age {
                fresh.push(series);
            } else if newest_stale.is_none_or(|(other, _)| age < other) {
                newest_stale = Some((age, target));
            }
        }
    }
    let asked = if selector.is_everything() {
        "without selector".to_owned()
    } else {
        format!("selector {selector}")
    };
    if fresh.is_empty() {
        let cause = match newest_stale {
            Some((age, target)) => format!(
                "last sample {} ago, older than maxAge {}{}",
                seconds(age),
                seconds(external.max_age),
                failure_of(state, target, clock)
            ),
            None => format!("no series match{}", failures(state, &external.source, clock)),
        };
        return Err(Refusal::NoSample(format!(
            "no fresh sample of external metric {metric} in namespace {namespace} ({asked}): {cause}"
        )));
    }
    let answer = |labels: BTreeMap<String, String>, value: f64, measured_at: Instant| {
        let value = Quantity::from_f64(value)
            .map_err(|error| Refusal::NoSample(format!("no value of external metric {metric}: {error}")))?;
        Ok(ExternalValue {
            labels,
            value,
            measured_at: clock.wall_of(measured_at),
            window: None,
        })
    };
    fresh.sort_by(|left, right| {
        let by_age = right.measured_at.cmp(&left.measured_at);
        left.labels.cmp(&right.labels).then(by_age)
    });
    fresh.dedup_by(|later, first| {
        later.labels == first.labels && is_one_fact(&external.series, &first.labels)
    });
    let oldest = fresh
        .iter()
        .map(|series| series.measured_at)
        .min()
        .unwrap_or(clock.now);
    match external.reduce {
        Reduce::None => fresh
            .into_iter()
            .map(|series| answer(series.labels.clone(), series.value, series.measured_at))
            .collect(),
        Reduce::Only => match fresh.as_slice() {
            [one] => Ok(vec![answer(one.labels.clone(), one.value, one.measured_at)?]),
            several => Err(Refusal::Ambiguous(format!(
                "external metric {metric} has {} series in namespace {namespace} ({asked}), and reduce: only promises one: narrow the selector, or set reduce",
                several.len()
            ))),
        },
        Reduce::Max => {
            let largest = fresh
                .iter()
                .map(|series| series.value)
                .fold(f64::NEG_INFINITY, f64::max);
            Ok(vec![answer(common_labels(&fresh), largest, oldest)?])
        }
        Reduce::Sum => {
            let sum = fresh.iter().map(|series| series.value).sum();
            Ok(vec![answer(common_labels(&fresh), sum, oldest)?])
        }
    }
}

/// Whether two targets that say this, as during a rolling update, say the same: series of devices do, where the
/// labels name the device or its node. Of other series nobody knows.
fn is_one_fact(family: &str, labels: &BTreeMap<String, String>) -> bool {
    let is_of_devices = family.starts_with("gpu_") && forewarm_signals::by_name(family).is_some();
    is_of_devices
        && [label::UUID, "mig_uuid", "node"]
            .iter()
            .any(|key| labels.contains_key(*key))
}

/// Labels that all series agree on.
fn common_labels(series: &[&ExternalSeries]) -> BTreeMap<String, String> {
    let Some((first, rest)) = series.split_first() else {
        return BTreeMap::new();
    };
    let agreed =
        |(key, value): &(&String, &String)| rest.iter().all(|other| other.labels.get(*key) == Some(*value));
    first
        .labels
        .iter()
        .filter(agreed)
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}
