//! Asks the kubelet who holds what, and keeps the last good answer.
//!
//! Purpose: one List each interval, at once after a (re)connection and after a pod changed; the inventory each minute.
//! Inputs: the PodResources socket and the facts about pods.
//! Invariants: no call overlaps another; a failure keeps the last answer; the kubelet's rate limit is met by asking
//! less, not more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forewarm_signals::label::Sharing;
use tokio::sync::watch;
use tokio::time::sleep_until;

use super::assemble::{Inventory, Listed};
use super::call::{CallError, LARGEST_ANSWER, Reason, within_deadline};
use super::metrics::{Api, Metrics};
use super::pods::Facts;
use super::socket::Socket;
use super::view::{AttributionView, Health};
use super::wire::podresources::pod_resources_lister_client::PodResourcesListerClient;
use super::wire::podresources::{AllocatableResourcesRequest, ListPodResourcesRequest};

/// Between two looks at the socket's inode and at what has become too old.
const LOOK: Duration = Duration::from_secs(1);
/// Least time between two Lists, however many pods change: far below the kubelet's limit of 100 a second.
const LEAST_GAP: Duration = Duration::from_millis(250);
/// The inventory changes when a device plugin restarts or a device turns unhealthy.
const INVENTORY: Duration = Duration::from_secs(60);
/// First pause after the kubelet's rate limit; doubles each time.
const FIRST_BACKOFF: Duration = Duration::from_secs(10);
/// Longest pause after the kubelet's rate limit.
const LONGEST_BACKOFF: Duration = Duration::from_secs(40);

/// Polls the kubelet.
#[derive(Debug)]
pub(super) struct Poller {
    socket: Socket,
    interval: Duration,
    shared_as: Sharing,
    facts: watch::Receiver<Arc<Facts>>,
    view: AttributionView,
    metrics: Metrics,

    listed: Listed,
    inventory: Option<Inventory>,
    /// Changes of the facts that the last List has taken in.
    changes_listed: u64,
    last_list: Option<Instant>,
    list_due: Instant,
    allocatable_due: Instant,
    backoff: Option<Duration>,
    last_reason: [Option<Reason>; 2],
}

impl Poller {
    pub(super) fn new(
        socket: Socket,
        interval: Duration,
        shared_as: Sharing,
        facts: watch::Receiver<Arc<Facts>>,
        view: AttributionView,
        metrics: Metrics,
    ) -> Self {
        let now = Instant::now();
        Self {
            socket,
            interval,
            shared_as,
            facts,
            view,
            metrics,
            listed: Listed::default(),
            inventory: None,
            changes_listed: 0,
            last_list: None,
            list_due: now,
            allocatable_due: now,
            backoff: None,
            last_reason: [None; 2],
        }
    }

    /// Runs until nobody tells about pods any more, which is at shutdown.
    pub(super) async fn run(mut self) {
        loop {
            let now = Instant::now();
            if self.socket.has_moved() {
                (self.list_due, self.allocatable_due, self.backoff) = (now, now, None);
            }
            let told = self.facts.borrow().changes;
            // While the kubelet limits us, a changed pod waits for its turn like everything else.
            if told != self.changes_listed && self.backoff.is_none() {
                let earliest = self.last_list.map_or(now, |last| last + LEAST_GAP);
                self.list_due = self.list_due.min(earliest);
            }
            if self.list_due <= now {
                self.list().await;
            }
            if self.allocatable_due <= now {
                self.ask_inventory().await;
            }
            self.publish();

            let wake = self.list_due.min(self.allocatable_due).min(Instant::now() + LOOK);
            tokio::select! {
                () = sleep_until(wake.into()) => {}
                changed = self.facts.changed() => if changed.is_err() { return },
            }
        }
    }

    async fn list(&mut self) {
        let started = Instant::now();
        self.changes_listed = self.facts.borrow().changes;
        self.last_list = Some(started);
        let before = Arc::clone(&self.facts.borrow());
        let answer = match self.socket.channel() {
            Ok(channel) => {
                let mut client =
                    PodResourcesListerClient::new(channel).max_decoding_message_size(LARGEST_ANSWER);
                within_deadline(client.list(ListPodResourcesRequest {})).await
            }
            Err(error) => Err(error),
        };
        let now = Instant::now();
        match answer {
            Ok(answer) => {
                let after = Arc::clone(&self.facts.borrow());
                self.listed = Listed::read(&answer, self.shared_as, &self.listed, &before, &after, now);
                self.backoff = None;
                self.list_due = started + self.interval;
                self.succeeded(Api::Allocations, 0);
            }
            Err(error) => {
                self.list_due = now + self.pause_after(error.reason);
                self.failed(Api::Allocations, 0, &error);
            }
        }
    }

    async fn ask_inventory(&mut self) {
        let answer = match self.socket.channel() {
            Ok(channel) => {
                let mut client =
                    PodResourcesListerClient::new(channel).max_decoding_message_size(LARGEST_ANSWER);
                within_deadline(client.get_allocatable_resources(AllocatableResourcesRequest {})).await
            }
            Err(error) => Err(error),
        };
        let now = Instant::now();
        match answer {
            Ok(answer) => {
                self.inventory = Some(Inventory::read(&answer, now));
                self.allocatable_due = now + INVENTORY;
                self.succeeded(Api::Allocatable, 1);
            }
            Err(error) => {
                self.allocatable_due = now + self.pause_after(error.reason);
                self.failed(Api::Allocatable, 1, &error);
            }
        }
    }

    /// How long to leave the kubelet alone after a failure.
    fn pause_after(&mut self, reason: Reason) -> Duration {
        match reason {
            Reason::RateLimited => {
                let pause = self
                    .backoff
                    .map_or(FIRST_BACKOFF, |last| (last * 2).min(LONGEST_BACKOFF));
                self.backoff = Some(pause);
                pause
            }
            // Nothing was asked of anybody: look again soon.
            Reason::SocketMissing | Reason::ConnectionFailed | Reason::NotReady => LOOK,
            _ => self.interval,
        }
    }

    fn succeeded(&mut self, api: Api, slot: usize) {
        if let Some(reason) = self.last_reason.get_mut(slot).and_then(Option::take) {
            tracing::info!(
                api = api.as_str(),
                reason = reason.as_str(),
                "kubelet answers again"
            );
        }
    }

    fn failed(&mut self, api: Api, slot: usize, error: &CallError) {
        self.metrics.failed(api, error.reason);
        if error.reason == Reason::DeadlineExceeded {
            self.socket.disconnect(); // the connection may be what hangs
        }
        let last = self
            .last_reason
            .get_mut(slot)
            .and_then(|last| last.replace(error.reason));
        if last != Some(error.reason) {
            tracing::warn!(
                api = api.as_str(), reason = error.reason.as_str(), %error,
                "kubelet does not answer; its last answer, if there was one, is kept"
            );
        }
    }

    fn publish(&self) {
        let facts = Arc::clone(&self.facts.borrow());
        let attribution = self
            .listed
            .assemble(self.inventory.as_ref(), &facts, Instant::now());
        let health = Health {
            allocatable_at: self.inventory.as_ref().map(|inventory| inventory.answered_at),
            pods: facts.source.map(|source| (source, facts.lost_at)),
        };
        self.view.store(attribution, health);
    }
}
