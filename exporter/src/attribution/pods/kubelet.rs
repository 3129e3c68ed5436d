//! Pods as the kubelet's own Pods API tells them.
//!
//! Inputs: the `WatchPods` stream, whose pods are serialised `v1.Pod`.
//! Invariants: the facts of an earlier stream stay until a new one has synced; a stream does not live for ever,
//! because the kubelet may drop events without telling.

use std::time::Duration;

use prost::Message;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::Streaming;

use super::{Facts, Phase, Pod, PodSource};
use crate::attribution::call::{CallError, DEADLINE, LARGEST_ANSWER, Reason, within_deadline};
use crate::attribution::socket::Socket;
use crate::attribution::wire::corev1;
use crate::attribution::wire::pods::pods_client::PodsClient;
use crate::attribution::wire::pods::{EventType, WatchPodsEvent, WatchPodsRequest};

/// The kubelet's broadcaster drops events when its buffer is full and does not say so: a fresh sync repairs that.
const RESYNC: Duration = Duration::from_secs(600);
/// A name of two pods for longer than a replacement takes means that an event was lost.
const AMBIGUITY: Duration = Duration::from_secs(10);
/// Between two looks at the socket's inode while nothing arrives.
const LOOK: Duration = Duration::from_secs(1);

/// Reads one stream from its first sync to its end and publishes each change.
pub(super) async fn follow(socket: &mut Socket, mut publish: impl FnMut(Facts)) -> Result<(), CallError> {
    let channel = socket.channel()?;
    let mut client = PodsClient::new(channel).max_decoding_message_size(LARGEST_ANSWER);
    let mut stream = within_deadline(client.watch_pods(WatchPodsRequest {})).await?;

    let mut facts = Facts::of(PodSource::Kubelet);
    let synced_by = Instant::now() + DEADLINE;
    loop {
        let event = timeout_at(synced_by, stream.message()).await.map_err(|_| {
            CallError::new(
                Reason::DeadlineExceeded,
                format!("no initial sync within {DEADLINE:?}"),
            )
        })?;
        if apply(&mut facts, event?)? {
            break;
        }
    }
    publish(facts.clone());

    let resync_at = Instant::now() + RESYNC;
    let mut ambiguous_since = None;
    while Instant::now() < resync_at {
        if let Some(event) = next(&mut stream, socket).await? {
            apply(&mut facts, Some(event))?;
            publish(facts.clone());
        }
        if !facts.has_ambiguous_names() {
            ambiguous_since = None;
        } else if ambiguous_since.get_or_insert_with(Instant::now).elapsed() > AMBIGUITY {
            tracing::warn!("two pods bear one name for long, reading all pods again");
            break;
        }
    }
    Ok(())
}

/// The next event, or none when it is time to look around.
async fn next(
    stream: &mut Streaming<WatchPodsEvent>,
    socket: &Socket,
) -> Result<Option<WatchPodsEvent>, CallError> {
    match timeout(LOOK, stream.message()).await {
        Ok(Ok(Some(event))) => Ok(Some(event)),
        Ok(Ok(None)) => Err(ended()),
        Ok(Err(status)) => Err(status.into()),
        Err(_) if socket.has_moved() => Err(CallError::new(Reason::StreamEnded, "the socket was replaced")),
        Err(_) => Ok(None),
    }
}

fn ended() -> CallError {
    CallError::new(Reason::StreamEnded, "the kubelet ended the stream")
}

/// Applies one event; true when it ends the initial sync.
fn apply(facts: &mut Facts, event: Option<WatchPodsEvent>) -> Result<bool, CallError> {
    let event = event.ok_or_else(ended)?;
    match event.r#type() {
        EventType::InitialSyncComplete => return Ok(true),
        EventType::Added | EventType::Modified => facts.apply(read(&event.pod)?),
        EventType::Deleted => facts.remove(&read(&event.pod)?.uid),
        // A later kubelet's event that says nothing about a pod's identity is none of ours.
        EventType::Unspecified => {}
    }
    Ok(false)
}

fn read(bytes: &[u8]) -> Result<Pod, CallError> {
    let malformed = |message: String| CallError::new(Reason::Malformed, message);
    let pod = corev1::Pod::decode(bytes).map_err(|error| malformed(format!("pod: {error}")))?;
    let metadata = pod.metadata.unwrap_or_default();
    let status = pod.status.unwrap_or_default();
    match (metadata.uid, metadata.namespace, metadata.name) {
        (Some(uid), Some(namespace), Some(name)) if !uid.is_empty() && !name.is_empty() => Ok(Pod {
            phase: Phase::read(status.phase()),
            ready: status
                .conditions
                .iter()
                .any(|condition| condition.r#type() == "Ready" && condition.status() == "True"),
            uid,
            namespace,
            name,
        }),
        _ => Err(malformed("pod without uid, namespace or name".to_owned())),
    }
}
