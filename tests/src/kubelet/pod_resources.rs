//! PodResources v1 from the state.
//!
//! Inputs: the state and its faults. Invariants: as a real kubelet answers: no UIDs, one entry per resource and
//! container, containers without devices listed, ended pods left out (unless the state says otherwise).

use std::collections::BTreeMap;
use std::sync::Arc;

use forewarm_exporter::attribution::wire::podresources::pod_resources_lister_server::PodResourcesLister;
use forewarm_exporter::attribution::wire::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ClaimResource, ContainerDevices,
    ContainerResources, DynamicResource, GetPodResourcesRequest, GetPodResourcesResponse,
    ListPodResourcesRequest, ListPodResourcesResponse, NumaNode, PodResources, TopologyInfo,
};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::faults::{Call, Fault, Faults};
use super::state::{Device, Pod, State};

/// Bytes of one padding pod: a name as long as Kubernetes allows.
const PADDING: usize = 253;

#[derive(Debug)]
pub(super) struct Service {
    state: watch::Sender<State>,
    faults: Arc<Faults>,
}

impl Service {
    pub(super) const fn new(state: watch::Sender<State>, faults: Arc<Faults>) -> Self {
        Self { state, faults }
    }

    fn listed(&self) -> Vec<PodResources> {
        let state = self.state.borrow();
        state
            .pods
            .values()
            .filter(|pod| state.lists_ended_pods || !pod.phase.has_ended())
            .map(resources)
            .collect()
    }
}

#[tonic::async_trait]
impl PodResourcesLister for Service {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let mut pod_resources = self.listed();
        if let Some(Fault::Padded(bytes)) = self.faults.get(Call::List) {
            let padding = PodResources {
                name: "p".repeat(PADDING),
                namespace: "padding".into(),
                ..PodResources::default()
            };
            pod_resources.extend(std::iter::repeat_n(padding, bytes.div_ceil(PADDING)));
        }
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        let padding = match self.faults.get(Call::Allocatable) {
            Some(Fault::Padded(bytes)) => bytes.div_ceil(PADDING),
            _ => 0,
        };
        let state = self.state.borrow();
        let devices = state
            .allocatable
            .iter()
            // The kubelet tells each device in an entry of its own, with its NUMA node.
            .flat_map(|(resource, ids)| ids.iter().map(move |id| devices(resource, vec![id.clone()])))
            .chain(std::iter::repeat_n(
                devices(&"r".repeat(PADDING), Vec::new()),
                padding,
            ))
            .collect();
        Ok(Response::new(AllocatableResourcesResponse {
            devices,
            ..AllocatableResourcesResponse::default()
        }))
    }

    async fn get(
        &self,
        request: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        let asked = request.into_inner();
        let found = self
            .listed()
            .into_iter()
            .find(|pod| pod.name == asked.pod_name && pod.namespace == asked.pod_namespace);
        match found {
            Some(pod) => Ok(Response::new(GetPodResourcesResponse {
                pod_resources: Some(pod),
            })),
            None => Err(Status::unknown("pod not found")),
        }
    }
}

fn resources(pod: &Pod) -> PodResources {
    let containers = pod
        .containers
        .iter()
        .map(|container| {
            let mut by_resource: BTreeMap<&str, Vec<String>> = BTreeMap::new();
            let mut dynamic_resources = Vec::new();
            for device in &container.devices {
                match device {
                    Device::Plugin { resource, id } => {
                        by_resource.entry(resource).or_default().push(id.clone());
                    }
                    Device::Dra {
                        driver,
                        device,
                        share,
                    } => dynamic_resources.push(DynamicResource {
                        claim_name: format!("{}-gpu", pod.name),
                        claim_namespace: pod.namespace.clone(),
                        claim_resources: vec![ClaimResource {
                            driver_name: driver.clone(),
                            pool_name: "node-a".into(),
                            device_name: device.clone(),
                            share_id: share.clone(),
                            ..ClaimResource::default()
                        }],
                    }),
                }
            }
            ContainerResources {
                name: container.name.clone(),
                devices: by_resource
                    .into_iter()
                    .map(|(resource, ids)| devices(resource, ids))
                    .collect(),
                dynamic_resources,
                ..ContainerResources::default()
            }
        })
        .collect();
    PodResources {
        name: pod.name.clone(),
        namespace: pod.namespace.clone(),
        containers,
        ..PodResources::default()
    }
}

fn devices(resource: &str, ids: Vec<String>) -> ContainerDevices {
    ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: ids,
        // NUMA node 0 arrives as an empty message.
        topology: Some(TopologyInfo {
            nodes: vec![NumaNode::default()],
        }),
    }
}
