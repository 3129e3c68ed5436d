//! Watches that break and come back, by script.

use std::collections::VecDeque;
use std::sync::Mutex;

use futures::stream;
use tokio::sync::mpsc;

use super::*;
use crate::index::task::changes_for_test;

fn object(name: &str) -> SlimPod {
    let document = serde_json::json!({
        "metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}")},
        "spec": {}, "status": {"phase": "Running"},
    });
    serde_json::from_value(document).unwrap()
}

fn list(name: &str) -> Vec<Result<watcher::Event<SlimPod>, watcher::Error>> {
    vec![
        Ok(watcher::Event::Init),
        Ok(watcher::Event::InitApply(object(name))),
        Ok(watcher::Event::InitDone),
    ]
}

fn broken() -> Result<watcher::Event<SlimPod>, watcher::Error> {
    Err(watcher::Error::NoResourceVersion)
}

/// Runs one watch after another, each silent after its script. Returns what reaches the index.
fn relayed(scripts: Vec<Vec<Result<watcher::Event<SlimPod>, watcher::Error>>>) -> mpsc::Receiver<Message> {
    let (queue, changes) = changes_for_test();
    let scripts = Mutex::new(VecDeque::from(scripts));
    let watch = move || -> Events {
        let script = scripts.lock().unwrap().pop_front().unwrap_or_default();
        stream::iter(script).chain(stream::pending()).boxed()
    };
    let metrics = Arc::new(Metrics::default());
    let run = relay(watch, queue, metrics, CancellationToken::new());
    #[allow(
        clippy::disallowed_methods,
        reason = "a test's own task, which ends with its runtime"
    )]
    tokio::spawn(run);
    changes
}

async fn next(changes: &mut mpsc::Receiver<Message>) -> String {
    let message = tokio::time::timeout(Duration::from_secs(3600), changes.recv()).await;
    match message {
        Err(_) => "nothing".to_owned(),
        Ok(Some(Message::Pods(PodChange::Replace(pods)))) => {
            let names: Vec<&str> = pods.iter().map(|pod| &*pod.name).collect();
            format!("all: {}", names.join(" "))
        }
        Ok(Some(Message::Pods(PodChange::Apply(pod)))) => format!("one: {}", pod.name),
        Ok(Some(Message::Pods(PodChange::Silent(_)))) => "silent".to_owned(),
        Ok(other) => format!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_quiet_cluster_that_comes_back_is_noticed() {
    let mut first = list("a");
    first.extend([broken(), broken()]);
    let mut changes = relayed(vec![first, list("b")]);
    assert_eq!(next(&mut changes).await, "all: a");
    assert_eq!(next(&mut changes).await, "silent");
    let broke = tokio::time::Instant::now();
    // The first watch works again, and says nothing because nothing happens.
    assert_eq!(next(&mut changes).await, "all: b");
    assert!(broke.elapsed() <= PROOF * 2, "{:?}", broke.elapsed());
    assert_eq!(next(&mut changes).await, "nothing");
}

#[tokio::test(start_paused = true)]
async fn a_busy_cluster_that_comes_back_is_not_listed_again() {
    let mut first = list("a");
    first.extend([broken(), Ok(watcher::Event::Apply(object("b")))]);
    let mut changes = relayed(vec![first, list("never")]);
    assert_eq!(next(&mut changes).await, "all: a");
    assert_eq!(next(&mut changes).await, "silent");
    assert_eq!(next(&mut changes).await, "one: b");
    assert_eq!(next(&mut changes).await, "nothing");
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_under_way_is_not_cut_off_by_another() {
    let mut first = list("a");
    first.extend([broken(), Ok(watcher::Event::Init)]);
    let mut changes = relayed(vec![first, list("never")]);
    assert_eq!(next(&mut changes).await, "all: a");
    assert_eq!(next(&mut changes).await, "silent");
    assert_eq!(next(&mut changes).await, "nothing");
}
