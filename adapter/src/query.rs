//! From a question and a state to values or a refusal. Pure.
//!
//! Purpose: everything an HPA may ask, answered from one immutable [`State`].
//! Inputs: the state, the question, the time.
//! Invariants: a value older than its limit is never returned; the fresh part of the matching pods is, because
//! an HPA knows what to do about missing ones; readiness that nobody has confirmed for a minute is not believed;
//! where nothing is left the refusal names metric, selector, age and cause. A timestamp is never later than the
//! reading.

mod external;
mod gap;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

pub use external::external;
use gap::{Gap, seconds, usable};

use crate::config::{Across, Metric, Per, PodFilter};
use crate::index::{Index, State, Value};
use crate::metrics::Metrics;
use crate::provider::{Catalog, CustomValue, ExternalValue, ObjectQuery, ObjectRef, Provider, Refusal};
use crate::quantity::Quantity;
use crate::selector::Selector;

/// How long the readiness of pods is believed while their watch is broken. An API server that restarts is back
/// sooner, and the cluster itself believes a silent kubelet's readiness for about as long (50 s).
const READINESS_HOLDS: Duration = Duration::from_secs(60);
/// Pods that a refusal names one by one; the rest are counted.
const NAMED: usize = 3;

/// Answers from the index.
#[derive(Debug, Clone)]
pub struct Answers {
    index: Index,
    metrics: Arc<Metrics>,
}

impl Answers {
    /// Over an index; ages of served values are observed in `metrics`.
    #[must_use]
    pub fn new(index: Index, metrics: Arc<Metrics>) -> Self {
        Self { index, metrics }
    }

    fn observe(&self, metric: &str, clock: Clock, measured: impl Iterator<Item = SystemTime>) {
        for at in measured {
            let age = clock.wall.duration_since(at).unwrap_or_default();
            self.metrics.served(metric, age);
        }
    }
}

impl Provider for Answers {
    fn custom(
        &self,
        query: &ObjectQuery<'_>,
        metric: &str,
        metric_selector: &Selector,
        now: Instant,
    ) -> Result<Vec<CustomValue>, Refusal> {
        let clock = Clock::at(now);
        let values = custom(&self.index.load(), query, metric, metric_selector, clock)?;
        self.observe(metric, clock, values.iter().map(|value| value.measured_at));
        Ok(values)
    }

    fn external(
        &self,
        namespace: &str,
        metric: &str,
        selector: &Selector,
        now: Instant,
    ) -> Result<Vec<ExternalValue>, Refusal> {
        let clock = Clock::at(now);
        let values = external(&self.index.load(), namespace, metric, selector, clock)?;
        self.observe(metric, clock, values.iter().map(|value| value.measured_at));
        Ok(values)
    }

    fn catalog(&self) -> Arc<Catalog> {
        Arc::clone(&self.index.load().catalog)
    }
}

/// One moment on both clocks: ages are counted on the monotonic one, timestamps are told on the other.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// Monotonic.
    pub now: Instant,
    /// Wall clock.
    pub wall: SystemTime,
}

impl Clock {
    /// The wall clock's reading at a moment of the recent past.
    #[must_use]
    pub fn at(now: Instant) -> Self {
        let wall = SystemTime::now();
        Self {
            now,
            wall: wall.checked_sub(now.elapsed()).unwrap_or(wall),
        }
    }

    fn age(&self, measured_at: Instant) -> Duration {
        self.now.saturating_duration_since(measured_at)
    }

    fn wall_of(&self, measured_at: Instant) -> SystemTime {
        self.wall.checked_sub(self.age(measured_at)).unwrap_or(self.wall)
    }
}

/// Values of a custom metric.
///
/// # Errors
/// A [`Refusal`] where not a single honest value can be given.
pub fn custom(
    state: &State,
    query: &ObjectQuery<'_>,
    metric: &str,
    metric_selector: &Selector,
    clock: Clock,
) -> Result<Vec<CustomValue>, Refusal> {
    let unknown = |resource: String| Refusal::UnknownMetric {
        metric: metric.to_owned(),
        resource,
    };
    let found = |per: Per, resource: &str| {
        state
            .metric(per, metric)
            .ok_or_else(|| unknown(resource.to_owned()))
    };
    let position = match query {
        ObjectQuery::Pods { .. } => found(Per::Pods, "pods")?,
        ObjectQuery::Namespace { namespace } => found(Per::Namespaces, &format!("namespaces {namespace}"))?,
        ObjectQuery::Object { resource, name, .. } => {
            let per = match (resource.group.as_str(), resource.resource.as_str()) {
                ("", "nodes" | "node") => Per::Nodes,
                ("", "namespaces" | "namespace") => Per::Namespaces,
                ("", "pods" | "pod") => Per::Pods,
                _ => return Err(unknown(resource.to_string())),
            };
            found(
                per,
                &name.map_or_else(|| resource.to_string(), |name| format!("{resource} {name}")),
            )?
        }
    };
    if !metric_selector.is_everything() {
        // Values of one object are one number: no labels of series are left to select on.
        return Err(Refusal::BadSelector(format!(
            "metricLabelSelector \"{metric_selector}\" cannot be applied: {metric} has one value for each object and no labels of its own"
        )));
    }
    match query {
        ObjectQuery::Pods {
            namespace,
            name,
            selector,
        } => pods(state, position, namespace, *name, selector, clock),
        ObjectQuery::Namespace { namespace } => {
            one_namespace(state, position, namespace, clock).map(|value| vec![value])
        }
        ObjectQuery::Object {
            namespace,
            resource,
            name,
            selector,
        } => match state.config.metrics[position].per {
            Per::Pods => pods(
                state,
                position,
                namespace.unwrap_or_default(),
                *name,
                selector,
                clock,
            ),
            Per::Nodes => nodes(state, position, *name, selector, clock),
            // The access review was about the path's namespace, so no other may be read through it.
            Per::Namespaces => match (name, namespace) {
                (Some(name), None) => one_namespace(state, position, name, clock).map(|value| vec![value]),
                (Some(name), Some(reviewed)) if name == reviewed => {
                    one_namespace(state, position, name, clock).map(|value| vec![value])
                }
                (Some(name), Some(_)) => Err(unknown(format!("{resource} {name}"))),
                (None, _) => Err(unknown(format!("{resource} *"))),
            },
        },
    }
}

/// Refuses a metric of ready pods once nobody knows any more which pods are ready.
fn readiness(state: &State, metric: &Metric, clock: Clock) -> Result<(), Refusal> {
    let silence = state.pods_silent_since.map(|since| clock.age(since));
    match silence.filter(|silence| metric.pods == PodFilter::Ready && *silence > READINESS_HOLDS) {
        None => Ok(()),
        Some(silence) => Err(Refusal::Unavailable(format!(
            "{} is withheld: which pods are ready was last known {} ago, longer than {}, because the watch of pods is broken (pods: ready)",
            metric.name,
            seconds(silence),
            seconds(READINESS_HOLDS)
        ))),
    }
}

fn pods(
    state: &State,
    position: usize,
    namespace: &str,
    name: Option<&str>,
    selector: &Selector,
    clock: Clock,
) -> Result<Vec<CustomValue>, Refusal> {
    let metric = &state.config.metrics[position];
    if !state.pods_known {
        return Err(Refusal::Unavailable(format!(
            "{} cannot be told yet: the pods of the cluster are not known, the first list has not come",
            metric.name
        )));
    }
    readiness(state, metric, clock)?;
    let asked = match name {
        Some(name) => format!("name {name}"),
        None if selector.is_everything() => "every pod".to_owned(),
        None => format!("selector {selector}"),
    };
    let matching: Vec<_> = state
        .pods
        .get(namespace)
        .into_iter()
        .flat_map(|pods| pods.values())
        .filter(|pod| name.is_none_or(|name| *pod.name == *name))
        .filter(|pod| selector.matches(|key| pod.labels.get(key).map(String::as_str)))
        .collect();
    if matching.is_empty() {
        return Err(Refusal::NoPodsMatch {
            metric: metric.name.to_string(),
            resource: "running pod".to_owned(),
            namespace: namespace.to_owned(),
            selector: asked,
        });
    }
    let entries = state.custom[position].pods.get(namespace);
    let mut values = Vec::with_capacity(matching.len());
    let mut gaps = Vec::new();
    for pod in &matching {
        let entry = entries.and_then(|entries| entries.get(&pod.uid));
        match usable(entry, clock) {
            Ok(value) => values.push(item("Pod", Some(namespace), &pod.name, value, clock)),
            Err(gap) => gaps.push((&*pod.name, gap, pod.node.as_deref())),
        }
    }
    if values.is_empty() {
        let mut text = format!(
            "no fresh sample of {} for {} running pods in namespace {namespace} ({asked})",
            metric.name,
            matching.len()
        );
        for (i, (name, gap, node)) in gaps.iter().take(NAMED).enumerate() {
            let _infallible = write!(
                text,
                "{} pod {name} {}",
                if i == 0 { ":" } else { ";" },
                gap.text(state, &metric.source, *node, clock)
            );
        }
        if gaps.len() > NAMED {
            let _infallible = write!(text, "; and {} more", gaps.len() - NAMED);
        }
        return Err(Refusal::NoSample(text));
    }
    Ok(values)
}

fn nodes(
    state: &State,
    position: usize,
    name: Option<&str>,
    selector: &Selector,
    clock: Clock,
) -> Result<Vec<CustomValue>, Refusal> {
    let metric = &state.config.metrics[position];
    if !selector.is_everything() {
        return Err(Refusal::BadSelector(format!(
            "selector \"{selector}\": nodes cannot be selected by labels; name a node, or leave the selector out"
        )));
    }
    let entries = &state.custom[position].nodes;
    let mut values = Vec::new();
    let mut text = format!(
        "no fresh sample of {} for {}",
        metric.name,
        name.map_or_else(|| "any node".to_owned(), |name| format!("node {name}"))
    );
    let mut names: Vec<_> = entries
        .keys()
        .filter(|node| name.is_none_or(|name| ***node == *name))
        .collect();
    names.sort_unstable();
    for (i, node) in names.iter().enumerate() {
        match usable(entries.get(*node), clock) {
            Ok(value) => values.push(item("Node", None, node, value, clock)),
            Err(gap) if i < NAMED => {
                let _infallible = write!(
                    text,
                    "; node {node} {}",
                    gap.text(state, &metric.source, Some(node), clock)
                );
            }
            Err(_) => {}
        }
    }
    if !values.is_empty() {
        return Ok(values);
    }
    if names.is_empty() {
        let gap = Gap::Nothing;
        let _infallible = write!(text, ": it {}", gap.text(state, &metric.source, name, clock));
    }
    Err(Refusal::NoSample(text))
}

/// The value of a namespace: all its pods, or none, because a sum over some of them would be wrong.
fn one_namespace(
    state: &State,
    position: usize,
    namespace: &str,
    clock: Clock,
) -> Result<CustomValue, Refusal> {
    let metric = &state.config.metrics[position];
    readiness(state, metric, clock)?;
    let mut values: Vec<&Value> = Vec::new();
    let entries = state.custom[position].pods.get(namespace);
    for (uid, entry) in entries.into_iter().flat_map(|entries| entries.iter()) {
        match usable(Some(entry), clock) {
            Ok(value) => values.push(value),
            Err(Gap::Withheld(_)) => {}
            Err(gap) => {
                let pod = state
                    .pods
                    .get(namespace)
                    .and_then(|pods| pods.values().find(|pod| pod.uid == *uid));
                let (name, node) = pod.map_or(("?", None), |pod| (&*pod.name, pod.node.as_deref()));
                return Err(Refusal::NoSample(format!(
                    "no value of {} for namespace {namespace}: pod {name} {}",
                    metric.name,
                    gap.text(state, &metric.source, node, clock)
                )));
            }
        }
    }
    let Some(oldest) = values.iter().min_by_key(|value| value.measured_at) else {
        return Err(Refusal::NoSample(format!(
            "no fresh sample of {} in namespace {namespace}: no ready pod has one",
            metric.name
        )));
    };
    #[allow(
        clippy::cast_precision_loss,
        reason = "quantities below 2^53 thousandths; larger ones lose less than a part in 10^15"
    )]
    let numbers = values.iter().map(|value| value.quantity.millis() as f64 / 1000.0);
    #[allow(clippy::cast_precision_loss, reason = "a count of pods")]
    let combined = match metric.across_devices {
        Across::Sum => numbers.sum(),
        Across::Mean => numbers.sum::<f64>() / values.len() as f64,
        Across::Max => numbers.fold(f64::NEG_INFINITY, f64::max),
        Across::Min => numbers.fold(f64::INFINITY, f64::min),
    };
    let quantity = Quantity::from_f64(combined).map_err(|error| {
        Refusal::NoSample(format!(
            "no value of {} for namespace {namespace}: {error}",
            metric.name
        ))
    })?;
    let mut item = item("Namespace", None, namespace, oldest, clock);
    item.value = quantity;
    Ok(item)
}

fn item(kind: &str, namespace: Option<&str>, name: &str, value: &Value, clock: Clock) -> CustomValue {
    CustomValue {
        object: ObjectRef {
            kind: kind.to_owned(),
            api_version: "v1".to_owned(),
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
        },
        value: value.quantity,
        measured_at: clock.wall_of(value.measured_at),
        window: value.window,
    }
}

#[cfg(test)]
#[path = "query/tests.rs"]
mod tests;
