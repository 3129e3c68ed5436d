//! A pod's worker on a node without an API server.

use std::collections::BTreeSet;
use std::sync::Mutex;

use forewarm_fake_nvml::settings::Settings;
use serde_json::json;

use super::super::devices::Devices;
use super::super::gpus::Driver;
use super::super::workload::{Idle, Tick, Workload, WorkloadContext, WorkloadFactory};
use super::super::{NvidiaRuntime, Run, SimNodeSpec};
use super::*;
use crate::kubelet::Kubelet;

const GPU_ID: &str = "GPU-0b5d8f3e-1c2d-4e5f-8a9b-0c1d2e3f4a5b";

/// Ends at once.
struct Done;

impl WorkloadFactory for Done {
    fn start(&self, _: WorkloadContext) -> Result<Box<dyn Workload>, String> {
        Ok(Box::new(Self))
    }
}

impl Workload for Done {
    fn tick(&mut self, _: &Tick) -> super::super::workload::Progress {
        super::super::workload::Progress {
            exit: Some(0),
            ..Default::default()
        }
    }
}

/// A node without an API server, and a worker for a pod that wants its one GPU.
fn worker(folder: &std::path::Path, image: &str) -> Worker {
    let refuse = |_: http::Request<kube::client::Body>| async {
        Err::<http::Response<kube::client::Body>, _>(std::io::Error::other("no API server"))
    };
    let images: BTreeMap<String, Run> = BTreeMap::from([
        ("done".to_owned(), Run::Workload(Arc::new(Done))),
        ("idle".to_owned(), Run::Workload(Arc::new(Idle::default()))),
    ]);
    let node = Node {
        spec: SimNodeSpec {
            name: "node-a".into(),
            index: 1,
            labels: BTreeMap::new(),
            images: Arc::new(images),
            driver: Driver::Fake {
                library: PathBuf::new(),
                settings: Settings::default(),
            },
            runtime: NvidiaRuntime::Default,
        },
        client: kube::Client::new(tower::service_fn(refuse), "default"),
        api_server: (Ipv4Addr::LOCALHOST, 1),
        folder: folder.to_owned(),
        devices: Mutex::new(Devices::new(vec![GPU_ID.to_owned()])),
        loads: Mutex::default(),
        slots: Mutex::new(BTreeSet::new()),
        failures: Mutex::default(),
        pids: Mutex::default(),
        kubelet: Kubelet::stopped(folder),
    };
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "job", "namespace": "ml", "uid": "1"},
        "spec": {"restartPolicy": "Never", "containers": [
            {"name": "main", "image": image, "resources": {"limits": {"nvidia.com/gpu": "1"}}},
        ]},
    }))
    .unwrap();
    Worker::new(&Arc::new(node), pod, "1".to_owned())
}

fn held(worker: &Worker) -> usize {
    lock(&worker.node.devices).held().count()
}

#[tokio::test]
async fn a_pod_that_ended_holds_no_device_while_its_object_stays() {
    let folder = tempfile::tempdir().unwrap();
    let mut worker = worker(folder.path(), "done");
    worker.admit().await;
    worker.tell_kubelet(&worker.observe());
    assert_eq!(held(&worker), 1);
    assert_eq!(
        worker.node.kubelet.state().pods["1"].containers[0].devices.len(),
        1
    );

    worker.advance(Instant::now()).await;
    assert_eq!(worker.observe().phase, "Succeeded");
    worker.tell_kubelet(&worker.observe());
    assert_eq!(held(&worker), 0);
    assert_eq!(
        worker.node.kubelet.state().pods["1"].phase,
        kubelet::Phase::Succeeded
    );
    for _ in 0..2 {
        worker.tell_kubelet(&worker.observe());
        assert!(worker.node.kubelet.state().pods.is_empty());
    }
}

#[tokio::test]
async fn a_shorter_grace_period_counts_and_a_longer_one_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let mut worker = worker(folder.path(), "idle");
    worker.admit().await;
    let start = Instant::now();
    worker.pod.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
        Timestamp::UNIX_EPOCH,
    ));
    for (grace, seconds_later, by) in [(30, 0, 30), (30, 1, 30), (5, 2, 7), (60, 3, 7)] {
        worker.pod.metadata.deletion_grace_period_seconds = Some(grace);
        worker.terminate_if_asked(start + Duration::from_secs(seconds_later));
        assert_eq!(worker.terminate_by, Some(start + Duration::from_secs(by)));
    }
}
