//! The only place where the index changes.
//!
//! Invariants: pure but for counting drops: time comes with the messages. Every row that is not served is
//! counted once, with its reason. Two targets that both claim a pod are judged by the pod's node; where nobody
//! knows the node, the pod has no value while both claim it.

#[cfg(test)]
use std::collections::BTreeMap;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forewarm_signals::{label, pod as pod_families};

use super::batch::{Batch, Failure};
use super::claims::Claims;
use super::evaluate::{self, CellKey, Cells, Held, Holding};
use super::fold::{Drops, Fold};
use super::pods::{Pod, PodChange, PodMode, Pods, Touched, reported_pods};
use super::{Entry, ExternalSeries, MetricState, State, TargetId, identify};
use crate::config::{Config, Function, Metric, Per, Series};
use crate::index::cell::Pushed;
use crate::metrics::{Drop, Metrics};

/// Cells without a reading for this long, and for ten times their maxAge, are forgotten; until then they
/// explain why there is no value.
const FORGET: Duration = Duration::from_secs(120);

/// What a cell belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Object {
    Pod(Arc<str>),
    Node(Arc<str>),
}

/// By source and pod UID: who says which devices the pod holds.
type Holdings = HashMap<(Arc<str>, Arc<str>), (TargetId, Holding)>;

/// Changes the index; [`Writer::state`] is what readers get.
#[derive(Debug)]
pub struct Writer {
    mode: PodMode,
    metrics: Arc<Metrics>,
    pods: Pods,
    cells: Vec<HashMap<Object, Cells>>,
    holdings: Holdings,
    claims: Claims,
    state: State,
}

impl Writer {
    /// An empty index.
    #[must_use]
    pub fn new(config: &Arc<Config>, mode: PodMode, metrics: Arc<Metrics>) -> Self {
        let mut state = State::empty(Arc::clone(config));
        let mut pods = Pods::default();
        // Where targets tell the pods, there is no list to wait for.
        pods.known = mode == PodMode::Reported;
        state.pods_known = pods.known;
        Self {
            mode,
            metrics,
            pods,
            cells: vec![HashMap::new(); config.metrics.len()],
            holdings: HashMap::new(),
            claims: Claims::default(),
            state,
        }
    }

    /// What is published now.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Cells held, for tests of what is forgotten.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        let objects = self.cells.iter().flat_map(HashMap::values);
        objects.map(BTreeMap::len).sum()
    }

    /// Takes a body.
    pub fn batch(&mut self, batch: &Batch) {
        let target = self.state.targets.entry(batch.target.clone()).or_default();
        target.node.clone_from(&batch.node);
        target.last_ok = Some(batch.at);
        target.failure = None;
        if self.mode == PodMode::Reported {
            let touched = self.pods.report(&batch.target, reported_pods(batch), batch.at);
            self.pods_touched(&touched, batch.at);
        }
        let mut drops = Drops::default();
        let whose = self.identify(batch, &mut drops);
        let mut dirty = self.hold(batch, &whose);
        let config = Arc::clone(&self.state.config);
        for (i, metric) in config.metrics.iter().enumerate() {
            if metric.source == batch.target.source {
                let touched = self.fold(i, metric, batch, &whose, &mut drops);
                for object in touched {
                    match object {
                        Object::Pod(uid) => {
                            dirty.insert(uid);
                        }
                        Object::Node(name) => {
                            if let Some(cells) = self.cells[i].get(&Object::Node(Arc::clone(&name))) {
                                self.state.custom[i]
                                    .nodes
                                    .insert(name, evaluate::node(metric, cells, batch.at));
                            }
                        }
                    }
                }
            }
        }
        for uid in dirty {
            self.evaluate(&uid, batch.at);
        }
        self.external(batch, &mut drops);
        drops.count(&self.metrics);
    }

    /// A scrape failed.
    pub fn failed(&mut self, target: &TargetId, node: Option<&Arc<str>>, failure: Failure) {
        let state = self.state.targets.entry(target.clone()).or_default();
        state.node = node.cloned();
        state.failure = Some(failure);
    }

    /// A target is gone. Its values age out; what only it reported about pods goes at once.
    pub fn target_removed(&mut self, target: &TargetId, now: Instant) {
        self.state.targets.remove(target);
        for lists in &mut self.state.external {
            lists.remove(target);
        }
        self.claims.forget_target(target);
        let touched = self.pods.forget(target);
        self.pods_touched(&touched, now);
    }

    /// Pods changed.
    pub fn pod_change(&mut self, change: PodChange, now: Instant) {
        let touched = self.pods.apply(change, now);
        self.pods_touched(&touched, now);
    }

    /// A new configuration. Readings of metrics that stay the same are kept.
    pub fn configure(&mut self, config: &Arc<Config>, now: Instant) {
        let old = Arc::clone(&self.state.config);
        let mut cells = vec![HashMap::new(); config.metrics.len()];
        let mut custom = vec![MetricState::default(); config.metrics.len()];
        for (i, metric) in config.metrics.iter().enumerate() {
            if let Some(j) = old.metrics.iter().position(|other| other == metric) {
                cells[i] = std::mem::take(&mut self.cells[j]);
                custom[i] = std::mem::take(&mut self.state.custom[j]);
            }
        }
        let mut external = vec![HashMap::new(); config.external.len()];
        for (i, metric) in config.external.iter().enumerate() {
            if let Some(j) = old.external.iter().position(|other| other == metric) {
                external[i] = std::mem::take(&mut self.state.external[j]);
            }
        }
        let is_source = |target: &TargetId| config.sources.iter().any(|source| source.name == target.source);
        let mut state = State::empty(Arc::clone(config));
        state.pods_known = self.state.pods_known;
        state.pods_silent_since = self.state.pods_silent_since;
        state.pods = std::mem::take(&mut self.state.pods);
        state.targets = std::mem::take(&mut self.state.targets);
        state.targets.retain(|target, _| is_source(target));
        state.custom = custom;
        state.external = external;
        self.cells = cells;
        self.state = state;
        self.holdings.retain(|_, (target, _)| is_source(target));
        let uids: HashSet<_> = self.holdings.keys().map(|(_, uid)| Arc::clone(uid)).collect();
        for uid in uids {
            self.evaluate(&uid, now);
        }
    }

    /// Forgets what has not been read for long, and refreshes the gauges.
    pub fn tidy(&mut self, now: Instant) {
        let config = Arc::clone(&self.state.config);
        for target in self.silent_targets(&config, now) {
            self.target_removed(&target, now);
        }
        let mut held = 0;
        for ((metric, objects), state) in config
            .metrics
            .iter()
            .zip(&mut self.cells)
            .zip(&mut self.state.custom)
        {
            let keep = FORGET.max(metric.max_age.longest() * 10);
            objects.retain(|object, cells| {
                cells.retain(|_, held| {
                    let newest = held.cell.newest().map_or(held.heard, |at| at.max(held.heard));
                    now.saturating_duration_since(newest) < keep
                });
                held += cells.len();
                if let (Object::Node(name), true) = (object, cells.is_empty()) {
                    state.nodes.remove(name);
                }
                !cells.is_empty()
            });
        }
        self.claims.tidy(&config, now);
        self.metrics.held(held, self.pods.len());
    }

    /// Targets that neither answered nor failed for long: a body that was queued when its target was removed brings
    /// the target back, and nothing else would remove it again.
    fn silent_targets(&self, config: &Config, now: Instant) -> Vec<TargetId> {
        let interval = |target: &TargetId| {
            let source = config.sources.iter().find(|source| source.name == target.source);
            source.map_or(Duration::ZERO, |source| source.interval)
        };
        self.state
            .targets
            .iter()
            .filter(|(target, state)| {
                let heard = state
                    .last_ok
                    .max(state.failure.as_ref().map(|failure| failure.at));
                let limit = FORGET.max(interval(target) * 10);
                heard.is_none_or(|at| now.saturating_duration_since(at) >= limit)
            })
            .map(|(target, _)| target.clone())
            .collect()
    }

    /// Whose each row is, looked up once for all metrics.
    fn identify(&mut self, batch: &Batch, drops: &mut Drops) -> Vec<Option<Arc<Pod>>> {
        let config = Arc::clone(&self.state.config);
        let per_pod: HashSet<&str> = config
            .metrics
            .iter()
            .filter(|metric| metric.source == batch.target.source && metric.per != Per::Nodes)
            .flat_map(|metric| metric.series.families())
            .map(|family| &**family)
            .chain([pod_families::ALLOCATION.name])
            .collect();
        let mut whose = Vec::with_capacity(batch.rows.len());
        for row in &batch.rows {
            if !per_pod.contains(&*row.family) {
                whose.push(None);
                continue;
            }
            let found = identify::pod(row, batch, &self.pods).map(Arc::clone);
            let found = found.and_then(|pod| {
                if self.claims.claim(&pod, batch, &config) {
                    Ok(pod)
                } else {
                    Err(Drop::Conflict)
                }
            });
            whose.push(found.map_err(|reason| drops.add(reason)).ok());
        }
        whose
    }

    /// Notes which devices the batch says are handed out. Returns the pods to look at.
    fn hold(&mut self, batch: &Batch, whose: &[Option<Arc<Pod>>]) -> HashSet<Arc<str>> {
        let mut dirty = HashSet::new();
        let mut fresh: HashMap<Arc<str>, Holding> = HashMap::new();
        for (row, pod) in batch.rows.iter().zip(whose) {
            if &*row.family == pod_families::ALLOCATION.name
                && let Some(pod) = pod
            {
                let held = (identify::device(row).into(), identify::container(row).into());
                fresh.entry(Arc::clone(&pod.uid)).or_default().insert(held);
            }
        }
        self.holdings.retain(|(_, uid), (target, _)| {
            let stays = *target != batch.target || fresh.contains_key(uid);
            if !stays {
                dirty.insert(Arc::clone(uid));
            }
            stays
        });
        for (uid, holding) in fresh {
            dirty.insert(Arc::clone(&uid));
            let key = (Arc::clone(&batch.target.source), uid);
            self.holdings.insert(key, (batch.target.clone(), holding));
        }
        dirty
    }

    /// Brings the rows of a batch into the cells of one metric. Returns the objects that changed.
    fn fold(
        &mut self,
        i: usize,
        metric: &Metric,
        batch: &Batch,
        whose: &[Option<Arc<Pod>>],
        drops: &mut Drops,
    ) -> HashSet<Object> {
        let (numerator, denominator) = match &metric.series {
            Series::Direct(name) => (name, None),
            Series::Ratio {
                numerator,
                denominator,
            } => (numerator, Some(denominator)),
        };
        let is_rate = metric
            .window
            .is_some_and(|window| window.function == Function::Rate);
        let node = batch.node.as_ref().unwrap_or(&batch.target.name);
        let mut folds: HashMap<(Object, CellKey), Fold> = HashMap::new();
        for (row, pod) in batch.rows.iter().zip(whose) {
            let is_numerator = row.family == *numerator;
            if !is_numerator && denominator != Some(&row.family) {
                continue;
            }
            let object = match (metric.per, pod) {
                (Per::Nodes, _) => Object::Node(Arc::clone(node)),
                (_, Some(pod)) => Object::Pod(Arc::clone(&pod.uid)),
                (_, None) => continue,
            };
            let key = CellKey {
                device: identify::device(row).into(),
                container: if metric.per == Per::Nodes {
                    "".into()
                } else {
                    identify::container(row).into()
                },
                source: row.label(label::SOURCE).and_then(label::Source::parse),
                teller: is_rate.then(|| batch.target.clone()),
            };
            let fold = folds
                .entry((object, key))
                .or_insert_with(|| Fold::new(row.measured_at));
            fold.add(row, is_numerator, &metric.sum, drops);
        }
        let mut touched = HashSet::new();
        for ((object, key), fold) in folds {
            let held = self.cells[i]
                .entry(object.clone())
                .or_default()
                .entry(key)
                .or_insert_with(|| Held {
                    cell: super::cell::Cell::default(),
                    target: batch.target.clone(),
                    heard: batch.at,
                    problem: None,
                });
            held.heard = batch.at;
            held.problem.clone_from(&fold.problem);
            let taken = fold.taken(batch.round_trip);
            let is_same_target = held.target == batch.target;
            let pushed = if fold.problem.is_some() || fold.is_spoilt {
                None
            } else if is_rate {
                Some(held.cell.count(taken, &fold.counters(), metric.window))
            } else {
                fold.value(denominator.is_some())
                    .map(|value| held.cell.push(taken, value, is_same_target, metric.window))
            };
            if pushed == Some(Pushed::Taken) {
                held.target = batch.target.clone();
            }
            if pushed == Some(Pushed::OutOfOrder) {
                drops.add(Drop::OutOfOrder);
            }
            touched.insert(object);
        }
        touched
    }

    fn external(&mut self, batch: &Batch, drops: &mut Drops) {
        let config = Arc::clone(&self.state.config);
        for (external, lists) in config.external.iter().zip(&mut self.state.external) {
            if external.source != batch.target.source {
                continue;
            }
            let mut series = Vec::new();
            for row in batch.rows.iter().filter(|row| row.family == external.series) {
                let value = row.value * external.scale;
                if !value.is_finite() {
                    drops.add(Drop::NotFinite);
                    continue;
                }
                let mut labels: std::collections::BTreeMap<String, String> = row
                    .labels
                    .iter()
                    .map(|(key, value)| (key.to_string(), value.to_string()))
                    .collect();
                if let Some(node) = &batch.node {
                    labels
                        .entry("node".to_owned())
                        .or_insert_with(|| node.to_string());
                }
                series.push(ExternalSeries {
                    labels,
                    value,
                    measured_at: row.measured_at,
                });
            }
            // The body is the whole truth: a series that it no longer has is gone.
            lists.insert(batch.target.clone(), Arc::new(series));
        }
    }

    fn pods_touched(&mut self, touched: &Touched, now: Instant) {
        self.state.pods_known = self.pods.known;
        self.state.pods_silent_since = self.pods.silent_since;
        if *touched == Touched::default() {
            return;
        }
        let config = Arc::clone(&self.state.config);
        for pod in &touched.gone {
            for source in &config.sources {
                self.holdings
                    .remove(&(Arc::clone(&source.name), Arc::clone(&pod.uid)));
            }
            self.claims.forget_pod(&pod.uid, &config);
            for (objects, state) in self.cells.iter_mut().zip(&mut self.state.custom) {
                objects.remove(&Object::Pod(Arc::clone(&pod.uid)));
                if let Some(entries) = state.pods.get_mut(&pod.namespace) {
                    Arc::make_mut(entries).remove(&pod.uid);
                    if entries.is_empty() {
                        state.pods.remove(&pod.namespace);
                    }
                }
            }
        }
        self.state.pods = self.pods.published();
        for uid in &touched.changed {
            self.evaluate(uid, now);
        }
    }

    /// Finishes the values of one pod for every metric that knows it.
    fn evaluate(&mut self, uid: &Arc<str>, now: Instant) {
        let Some(pod) = self.pods.get(uid).map(Arc::clone) else {
            return;
        };
        let config = Arc::clone(&self.state.config);
        for ((metric, objects), state) in config.metrics.iter().zip(&self.cells).zip(&mut self.state.custom) {
            if metric.per == Per::Nodes {
                continue;
            }
            let cells = objects.get(&Object::Pod(Arc::clone(uid)));
            let held = self
                .holdings
                .get(&(Arc::clone(&metric.source), Arc::clone(uid)))
                .map(|(_, holding)| holding);
            if cells.is_none() && held.is_none() {
                if let Some(entries) = state.pods.get_mut(&pod.namespace) {
                    Arc::make_mut(entries).remove(uid);
                }
                continue;
            }
            let dispute = self.claims.dispute(&metric.source, uid, &config, now);
            let entry = match dispute {
                Some((target, rival)) => Entry::Absent(Arc::from(format!(
                    "is claimed by two targets, {} and {}, and its node is not known",
                    target.name, rival.name
                ))),
                None => evaluate::pod(metric, &pod, cells, held, now),
            };
            let entries = state.pods.entry(Arc::clone(&pod.namespace)).or_default();
            Arc::make_mut(entries).insert(Arc::clone(uid), entry);
        }
    }
}
