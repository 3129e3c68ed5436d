//! The kubelet's Pods API from the state.
//!
//! Inputs: the state and its faults. Invariants: a stream begins with each pod as ADDED and INITIAL_SYNC_COMPLETE;
//! then each change comes once, deletions before additions, so that names stay unique to its reader.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;

use forewarm_exporter::attribution::wire::corev1;
use forewarm_exporter::attribution::wire::pods::pods_server::Pods;
use forewarm_exporter::attribution::wire::pods::{
    EventType, GetPodRequest, GetPodResponse, ListPodsRequest, ListPodsResponse, WatchPodsEvent,
    WatchPodsRequest,
};
use futures::Stream;
use prost::Message;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::faults::{Call, Fault, Faults};
use super::state::{Pod, State};

#[derive(Debug)]
pub(super) struct Service {
    state: watch::Sender<State>,
    faults: Arc<Faults>,
}

impl Service {
    pub(super) const fn new(state: watch::Sender<State>, faults: Arc<Faults>) -> Self {
        Self { state, faults }
    }
}

type Events = Pin<Box<dyn Stream<Item = Result<WatchPodsEvent, Status>> + Send>>;

#[tonic::async_trait]
impl Pods for Service {
    type WatchPodsStream = Events;

    async fn watch_pods(&self, _: Request<WatchPodsRequest>) -> Result<Response<Events>, Status> {
        let mut told = self.state.subscribe();
        let known = told.borrow_and_update().pods.clone();
        let mut queue: VecDeque<_> = known
            .values()
            .map(|pod| event(EventType::Added, encode(pod)))
            .collect();
        queue.push_back(WatchPodsEvent {
            r#type: EventType::InitialSyncComplete.into(),
            pod: Vec::new(),
        });
        let stream = Watching {
            told,
            known,
            queue,
            faults: Arc::clone(&self.faults),
        };
        Ok(Response::new(Box::pin(futures::stream::unfold(
            stream,
            |mut stream| async {
                let event = stream.next().await?;
                Some((Ok(event), stream))
            },
        ))))
    }

    async fn list_pods(&self, _: Request<ListPodsRequest>) -> Result<Response<ListPodsResponse>, Status> {
        let pods = self.state.borrow().pods.values().map(encode).collect();
        Ok(Response::new(ListPodsResponse { pods }))
    }

    async fn get_pod(&self, request: Request<GetPodRequest>) -> Result<Response<GetPodResponse>, Status> {
        let state = self.state.borrow();
        match state.pods.get(&request.into_inner().pod_uid) {
            Some(pod) => Ok(Response::new(GetPodResponse { pod: encode(pod) })),
            None => Err(Status::not_found("pod not found")),
        }
    }
}

/// One open stream.
struct Watching {
    told: watch::Receiver<State>,
    known: BTreeMap<String, Pod>,
    queue: VecDeque<WatchPodsEvent>,
    faults: Arc<Faults>,
}

impl Watching {
    async fn next(&mut self) -> Option<WatchPodsEvent> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(event);
            }
            self.told.changed().await.ok()?;
            if self.faults.get(Call::Watch) == Some(Fault::Hang) {
                continue;
            }
            let now = self.told.borrow_and_update().pods.clone();
            let gone = self.known.iter().filter(|(uid, _)| !now.contains_key(*uid));
            self.queue
                .extend(gone.map(|(_, pod)| event(EventType::Deleted, identity(pod))));
            for (uid, pod) in &now {
                match self.known.get(uid) {
                    None => self.queue.push_back(event(EventType::Added, encode(pod))),
                    Some(known) if known != pod => {
                        self.queue.push_back(event(EventType::Modified, encode(pod)));
                    }
                    Some(_) => {}
                }
            }
            self.known = now;
        }
    }
}

fn event(kind: EventType, pod: Vec<u8>) -> WatchPodsEvent {
    WatchPodsEvent {
        r#type: kind.into(),
        pod,
    }
}

/// All that a DELETED event tells.
fn identity(pod: &Pod) -> Vec<u8> {
    corev1::Pod {
        metadata: Some(metadata(pod)),
        ..corev1::Pod::default()
    }
    .encode_to_vec()
}

fn metadata(pod: &Pod) -> corev1::ObjectMeta {
    corev1::ObjectMeta {
        name: Some(pod.name.clone()),
        namespace: Some(pod.namespace.clone()),
        uid: Some(pod.uid.clone()),
    }
}

/// The pod as `v1.Pod` bytes, with fields the reader does not know, as every real pod has.
fn encode(pod: &Pod) -> Vec<u8> {
    let condition = |kind: &str, holds: bool| corev1::PodCondition {
        r#type: Some(kind.into()),
        status: Some(if holds { "True" } else { "False" }.into()),
    };
    let mut bytes = corev1::Pod {
        metadata: Some(metadata(pod)),
        spec: Some(corev1::PodSpec {
            node_name: Some("node-a".into()),
        }),
        status: Some(corev1::PodStatus {
            phase: Some(pod.phase.as_str().into()),
            conditions: vec![condition("PodScheduled", true), condition("Ready", pod.ready)],
        }),
    }
    .encode_to_vec();
    // Another piece of metadata, as protobuf allows: resourceVersion, which is field 6.
    bytes.extend_from_slice(&[0x0a, 0x04, 0x32, 0x02, b'4', b'2']);
    bytes
}
