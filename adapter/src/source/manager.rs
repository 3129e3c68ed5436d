//! Which loops run: follows the configuration and what is discovered.
//!
//! Invariants: a source whose configuration did not change keeps its loops, connections and rhythm across a
//! reload; a loop runs for exactly the targets that are known; readiness waits until every target known at
//! start was tried once, at most ten seconds, and never falls back.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use forewarm_runtime::status::Condition;
use forewarm_runtime::tasks::Tasks;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::Spec;
use super::client::ClientCell;
use super::discover::{self, Search};
use super::read::Wanted;
use super::target::{self, Shared};
use crate::config::watch::Handle;
use crate::config::{Config, Source, Targets};
use crate::index::{Message, Queue, TargetId};
use crate::metrics::Metrics;

/// How often credentials are read again.
const REFRESH: Duration = Duration::from_secs(5);
/// Readiness waits at most this long for first scrapes.
const FIRST_TRIES: Duration = Duration::from_secs(10);
/// Events that may wait.
const EVENTS: usize = 1024;

/// What sources need of a cluster.
#[derive(Clone)]
pub struct Cluster {
    /// Client.
    pub client: kube::Client,
    /// The adapter's own namespace, where exporters are looked for by default.
    pub namespace: String,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// News for the manager.
#[derive(Debug)]
pub(super) enum Event {
    /// The targets of a source, all of them.
    Targets {
        source: Arc<str>,
        generation: u64,
        specs: Vec<Spec>,
    },
    /// A target was tried.
    Tried(TargetId),
}

struct Running {
    definition: Source,
    families: Vec<Arc<str>>,
    generation: u64,
    shared: Arc<Shared>,
    token: CancellationToken,
    targets: BTreeMap<TargetId, (Spec, CancellationToken)>,
    /// Targets of the source before its definition changed: kept in the index until the new list is known, so
    /// that a reload does not make pods and values blink.
    inherited: BTreeSet<TargetId>,
    is_listed: bool,
}

struct Manager {
    cluster: Option<Cluster>,
    queue: Queue,
    metrics: Arc<Metrics>,
    tasks: Tasks,
    events: mpsc::Sender<Event>,
    running: Vec<Running>,
    generations: u64,
    untried: HashSet<TargetId>,
    condition: Option<Condition>,
}

/// Runs all sources until the tasks are stopped.
///
/// # Errors
/// Never.
pub async fn run(
    config: Handle,
    cluster: Option<Cluster>,
    queue: Queue,
    metrics: Arc<Metrics>,
    tasks: Tasks,
    condition: Condition,
) -> Result<(), std::convert::Infallible> {
    let token = tasks.token();
    let (events, mut incoming) = mpsc::channel(EVENTS);
    let mut changes = config.subscribe();
    let mut manager = Manager {
        cluster,
        queue,
        metrics,
        tasks,
        events,
        running: Vec::new(),
        generations: 0,
        untried: HashSet::new(),
        condition: Some(condition),
    };
    let first = Arc::clone(&changes.borrow_and_update());
    manager.configure(&first).await;
    let mut refresh = tokio::time::interval(REFRESH);
    let deadline = tokio::time::sleep(FIRST_TRIES);
    tokio::pin!(deadline);
    let mut is_following = true;
    loop {
        manager.report();
        tokio::select! {
            () = token.cancelled() => return Ok(()),
            changed = changes.changed(), if is_following => {
                is_following = changed.is_ok();
                if is_following {
                    let config = Arc::clone(&changes.borrow_and_update());
                    manager.queue.send(Message::Config(Arc::clone(&config))).await;
                    manager.configure(&config).await;
                }
            }
            Some(event) = incoming.recv() => manager.event(event).await,
            _ = refresh.tick() => {
                for source in &manager.running {
                    source.shared.client.refresh();
                }
            }
            () = &mut deadline, if manager.condition.is_some() => {
                if let Some(condition) = manager.condition.take() {
                    condition.ready();
                }
            }
        }
    }
}

impl Manager {
    /// Starts what is new, stops what is gone, leaves the rest alone.
    async fn configure(&mut self, config: &Config) {
        let mut kept = Vec::new();
        let mut left: BTreeMap<Arc<str>, BTreeSet<TargetId>> = BTreeMap::new();
        for running in std::mem::take(&mut self.running) {
            let name = Arc::clone(&running.definition.name);
            let definition = config.sources.iter().find(|source| source.name == name);
            if definition == Some(&running.definition) && config.families_of(&name) == running.families {
                kept.push(running);
                continue;
            }
            let targets = self.stop(running);
            if definition.is_some() {
                left.insert(name, targets);
            } else {
                self.remove(targets).await;
            }
        }
        self.running = kept;
        for source in &config.sources {
            let is_running = |running: &Running| running.definition.name == source.name;
            if !self.running.iter().any(is_running) {
                let inherited = left.remove(&source.name).unwrap_or_default();
                self.start(source, config.families_of(&source.name), inherited)
                    .await;
            }
        }
    }

    async fn start(&mut self, source: &Source, families: Vec<Arc<str>>, inherited: BTreeSet<TargetId>) {
        self.generations += 1;
        let generation = self.generations;
        let token = self.tasks.token().child_token();
        let shared = Arc::new(Shared {
            source: source.clone(),
            wanted: Wanted::new(families.clone(), source.name_filter, source.max_series),
            client: ClientCell::new(source),
            queue: self.queue.clone(),
            metrics: Arc::clone(&self.metrics),
            events: self.events.clone(),
        });
        self.running.push(Running {
            definition: source.clone(),
            families,
            generation,
            shared,
            token: token.clone(),
            targets: BTreeMap::new(),
            inherited,
            is_listed: false,
        });
        match (&source.targets, &self.cluster) {
            (Targets::Static(targets), _) => {
                let specs = targets
                    .iter()
                    .map(|target| Spec {
                        id: TargetId {
                            source: Arc::clone(&source.name),
                            name: Arc::from(target.address.as_str()),
                        },
                        address: target.address.clone(),
                        node: target.node.as_deref().map(Arc::from),
                        incarnation: Arc::from(""),
                    })
                    .collect();
                let source = Arc::clone(&source.name);
                self.event(Event::Targets {
                    source,
                    generation,
                    specs,
                })
                .await;
            }
            (
                Targets::Pods {
                    namespace,
                    selector,
                    port,
                },
                Some(cluster),
            ) => {
                let search = Search {
                    source: Arc::clone(&source.name),
                    namespace: namespace.clone().unwrap_or_else(|| cluster.namespace.clone()),
                    selector: selector.clone(),
                    port: port.clone(),
                    generation,
                };
                let events = self.events.clone();
                let metrics = Arc::clone(&self.metrics);
                self.tasks.spawn_work(
                    "discover",
                    discover::follow(cluster.client.clone(), search, events, metrics, token),
                );
            }
            // The configuration was checked for --standalone.
            (Targets::Pods { .. }, None) => tracing::error!(source = &*source.name, "source needs a cluster"),
        }
    }

    /// Ends the loops of a source. Returns the targets that the index still holds for it.
    fn stop(&mut self, running: Running) -> BTreeSet<TargetId> {
        running.token.cancel();
        self.metrics.targets(&running.definition.name, 0);
        let mut targets = running.inherited;
        targets.extend(running.targets.into_keys());
        self.untried.retain(|id| !targets.contains(id));
        targets
    }

    /// Targets are gone for good.
    async fn remove(&self, targets: impl IntoIterator<Item = TargetId>) {
        for id in targets {
            self.queue.send(Message::Removed(id)).await;
        }
    }

    async fn event(&mut self, event: Event) {
        match event {
            Event::Tried(id) => {
                self.untried.remove(&id);
            }
            Event::Targets {
                source,
                generation,
                specs,
            } => {
                let Some(running) = self
                    .running
                    .iter_mut()
                    .find(|running| running.definition.name == source && running.generation == generation)
                else {
                    return;
                };
                let is_first = !running.is_listed;
                running.is_listed = true;
                let mut gone = std::mem::take(&mut running.inherited);
                let mut before = std::mem::take(&mut running.targets);
                for spec in specs {
                    if let Some((old, token)) = before.remove(&spec.id) {
                        if old == spec {
                            running.targets.insert(spec.id.clone(), (old, token));
                            continue;
                        }
                        token.cancel();
                    }
                    let token = running.token.child_token();
                    if is_first && self.condition.is_some() {
                        self.untried.insert(spec.id.clone());
                    }
                    self.tasks.spawn_work(
                        "scrape",
                        target::follow(spec.clone(), Arc::clone(&running.shared), token.clone()),
                    );
                    running.targets.insert(spec.id.clone(), (spec, token));
                }
                self.metrics.targets(&source, running.targets.len());
                for (id, (_, token)) in before {
                    token.cancel();
                    gone.insert(id);
                }
                gone.retain(|id| !running.targets.contains_key(id));
                self.untried.retain(|id| !gone.contains(id));
                self.remove(gone).await;
            }
        }
    }

    /// Tells readiness how far the first tries are.
    fn report(&mut self) {
        let Some(condition) = &self.condition else { return };
        let unlisted = self.running.iter().filter(|running| !running.is_listed).count();
        if unlisted == 0 && self.untried.is_empty() {
            condition.ready();
            self.condition = None;
        } else {
            condition.waiting(format!(
                "{unlisted} sources without a list of targets, {} targets not tried yet",
                self.untried.len()
            ));
        }
    }
}
