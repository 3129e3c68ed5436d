//! Which source tells about pods at the moment.
//!
//! Purpose: follow the kubelet's Pods API; where it is not served, follow the API server until it is.
//! Inputs: the socket path, and how to reach the API server.
//! Invariants: one source at a time publishes; what was told stays, marked as lost, while no source is connected.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forewarm_runtime::kube::ClientArgs;
use tokio::sync::watch;
use tokio::time::sleep;

use super::{Facts, PodSource, api_server, kubelet};
use crate::attribution::call::{CallError, Reason};
use crate::attribution::metrics::{Api, Metrics};
use crate::attribution::socket::Socket;

/// First pause after a failure: a kubelet that dropped a slow reader serves it again at once.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Longest pause for the kubelet: a new socket is noticed within this.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Longest pause for the API server, which serves every node.
const LONGEST_API_SERVER_PAUSE: Duration = Duration::from_secs(30);
/// A restarting kubelet has its sockets back within seconds; the API server is asked only after that.
const RESTART: Duration = Duration::from_secs(5);
/// Between two looks for a socket that was not there.
const LOOK: Duration = Duration::from_secs(1);

/// Follows the pods of this node.
#[derive(Debug)]
pub(in crate::attribution) struct Watch {
    pub(in crate::attribution) path: PathBuf,
    pub(in crate::attribution) api_server: ClientArgs,
    /// Without a node name there is no node-scoped watch.
    pub(in crate::attribution) node: Option<String>,
    pub(in crate::attribution) facts: watch::Sender<Arc<Facts>>,
    pub(in crate::attribution) metrics: Metrics,
}

impl Watch {
    /// Runs for ever.
    pub(in crate::attribution) async fn run(self) {
        let mut socket = Socket::new(self.path.clone());
        let mut pause = FIRST_PAUSE;
        let mut not_served_since = None;
        let mut last_reason = None;
        loop {
            let mut told = false;
            let followed = kubelet::follow(&mut socket, |facts| {
                told = true;
                self.publish(facts);
            })
            .await;
            if told {
                (pause, not_served_since) = (FIRST_PAUSE, None);
                if last_reason.take().is_some() {
                    tracing::info!(source = PodSource::Kubelet.as_str(), "pods are told again");
                }
            }
            let Err(error) = followed else {
                continue; // time for a fresh sync
            };
            socket.disconnect();
            self.lost(PodSource::Kubelet, &error, &mut last_reason);

            let since = *not_served_since.get_or_insert_with(Instant::now);
            match (error.reason, &self.node) {
                (Reason::NotServed, Some(node)) => self.fall_back(&mut socket, node).await,
                (Reason::SocketMissing, Some(node)) if since.elapsed() >= RESTART => {
                    self.fall_back(&mut socket, node).await;
                }
                (Reason::SocketMissing | Reason::NotServed, _) => sleep(pause).await,
                _ => {
                    not_served_since = None;
                    sleep(pause).await;
                }
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Follows the API server until the kubelet has a new socket.
    async fn fall_back(&self, socket: &mut Socket, node: &str) {
        // Remembers which socket was refused, if there is one, so that only another one ends the fallback.
        let _ = socket.channel();
        let mut pause = FIRST_PAUSE;
        let mut last_reason = None;
        loop {
            let attempt = async {
                let mut told = false;
                let followed = api_server::follow(&self.api_server, node, |facts| {
                    told = true;
                    self.publish(facts);
                })
                .await;
                if told {
                    pause = FIRST_PAUSE;
                }
                if let Err(error) = followed {
                    self.lost(PodSource::ApiServer, &error, &mut last_reason);
                }
                sleep(pause).await;
            };
            tokio::select! {
                () = moved(socket) => return,
                () = attempt => pause = (pause * 2).min(LONGEST_API_SERVER_PAUSE),
            }
        }
    }

    fn publish(&self, facts: Facts) {
        self.facts.send_if_modified(|told| match facts.follows(told) {
            Some(news) => {
                *told = Arc::new(news);
                true
            }
            None => false,
        });
    }

    /// Counts a failure, says it once, and marks what was told as lost.
    fn lost(&self, source: PodSource, error: &CallError, last_reason: &mut Option<Reason>) {
        let api = match source {
            PodSource::Kubelet => Api::Pods,
            PodSource::ApiServer => Api::ApiServerPods,
        };
        self.metrics.failed(api, error.reason);
        if last_reason.replace(error.reason) != Some(error.reason) {
            tracing::warn!(source = source.as_str(), reason = error.reason.as_str(), %error, "pods are not told");
        }
        self.facts.send_if_modified(|told| {
            let is_news = told.source.is_some() && told.lost_at.is_none();
            if is_news {
                Arc::make_mut(told).lost_at = Some(Instant::now());
            }
            is_news
        });
    }
}

/// Waits until the path leads to another socket.
async fn moved(socket: &Socket) {
    while !socket.has_moved() {
        sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Phase, Pod};
    use super::*;

    #[test]
    fn a_set_read_again_replaces_one_of_the_same_size() {
        let (facts, told) = watch::channel(Arc::new(Facts::default()));
        let watch = Watch {
            path: PathBuf::new(),
            api_server: ClientArgs::default(),
            node: None,
            facts,
            metrics: Metrics::default(),
        };
        let set = |uid: &str| {
            let mut facts = Facts::of(PodSource::Kubelet);
            facts.apply(Pod {
                uid: uid.into(),
                namespace: "ml".into(),
                name: "web-0".into(),
                phase: Phase::Running,
                ready: true,
            });
            facts
        };
        watch.publish(set("1"));
        let before = told.borrow().changes;
        // The kubelet dropped the events of a replacement; reading all pods again is what repairs that.
        watch.publish(set("2"));
        let after = told.borrow();
        assert!(after.by_uid("1").is_none() && after.by_uid("2").is_some());
        assert_ne!(after.changes, before, "the kubelet is asked who holds what");
    }
}
