//! From the kubelet's answers to one attribution.
//!
//! Purpose: read a List answer, give each allocation its pod's UID, and put together what readers see.
//! Inputs: answers of PodResources, facts about pods before and after the call, and the time.
//! Invariants: pure. A UID is bound when the answer arrives and only if the facts told the same pod before and after
//! the call; later facts can withdraw it and never change it. Devices of ended pods are free.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::{Duration, Instant};

use forewarm_signals::label::{Allocator, Sharing};
use forewarm_signals::resource;

use super::allocation::{Allocation, Attribution, Gap, Gaps};
use super::device_id::DeviceId;
use super::pods::Facts;
use super::wire::podresources::{
    AllocatableResourcesResponse, ContainerResources, ListPodResourcesResponse, PodResources,
};

/// A kubelet that has not answered for this long may have started and stopped pods meanwhile. Long enough for a
/// restart with image clean-up, short enough that a wedged kubelet does not keep rows alive for hours.
const KEPT: Duration = Duration::from_secs(300);
/// 110 pods on 16 GPUs shared 48 times each are 768; twice that is a kubelet gone wrong.
const MOST_ALLOCATIONS: usize = 2_048;
/// A namespace, name or resource is at most 253 characters; ids are looked at up to 256.
const LONGEST_TEXT: usize = 256;
/// NVIDIA's DRA driver for GPUs; its driver for compute domains hands out no GPUs.
const GPU_DRA_DRIVER: &str = "gpu.nvidia.com";

/// An answer with its UIDs bound.
#[derive(Debug, Clone, Default)]
pub(super) struct Listed {
    bound: Vec<(Allocation, Result<String, Gap>)>,
    dropped: u64,
    answered_at: Option<Instant>,
}

impl Listed {
    /// Reads an answer and binds the UIDs. `before` and `after` are the facts around the call, `now` its end.
    pub(super) fn read(
        answer: &ListPodResourcesResponse,
        sharing: Sharing,
        before: &Facts,
        after: &Facts,
        now: Instant,
    ) -> Self {
        let mut listed = Self {
            answered_at: Some(now),
            ..Self::default()
        };
        let mut seen = HashSet::new();
        for pod in &answer.pod_resources {
            let uid = bind(pod, before, after, now);
            for container in &pod.containers {
                for allocation in allocations(pod, container, sharing) {
                    let identity = (
                        (pod.namespace.as_str(), pod.name.as_str(), container.name.as_str()),
                        allocation.resource.clone(),
                        allocation.device_id.clone(),
                        allocation.replica.clone(),
                    );
                    if !seen.insert(identity) {
                        continue; // an answer that names one device twice says nothing new
                    }
                    if listed.bound.len() >= MOST_ALLOCATIONS || is_oversized(&allocation) {
                        listed.dropped += 1;
                        continue;
                    }
                    listed.bound.push((allocation, uid.clone()));
                }
            }
        }
        listed
    }

    /// What readers see now.
    pub(super) fn assemble(
        &self,
        allocatable: Option<&BTreeMap<String, u64>>,
        facts: &Facts,
        now: Instant,
    ) -> Attribution {
        let mut attribution = Attribution {
            allocatable: allocatable.cloned(),
            answered_at: self.answered_at,
            ..Attribution::default()
        };
        let Some(answered_at) = self.answered_at else {
            return attribution;
        };
        if now.saturating_duration_since(answered_at) > KEPT {
            count(
                &mut attribution.gaps,
                Gap::AllocationsStale,
                self.bound.len() as u64,
            );
            return attribution;
        }
        count(&mut attribution.gaps, Gap::TooMany, self.dropped + facts.dropped);

        let mut handed_out: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for (allocation, uid) in &self.bound {
            let (pod_uid, ready) = match uid {
                Err(gap) => {
                    count(&mut attribution.gaps, *gap, 1);
                    (None, None)
                }
                Ok(uid) => match present(allocation, uid, facts) {
                    Present::Here { ready } => (Some(uid.clone()), Some(ready)),
                    Present::Ended => continue,
                    Present::Replaced => {
                        count(&mut attribution.gaps, Gap::PodReplaced, 1);
                        (None, None)
                    }
                },
            };
            if allocation.allocator == Allocator::DevicePlugin {
                handed_out
                    .entry(allocation.resource.clone())
                    .or_default()
                    .insert(&allocation.device_id);
            }
            attribution.allocations.push(Allocation {
                pod_uid,
                ready,
                ..allocation.clone()
            });
        }
        attribution.handed_out = Some(
            handed_out
                .into_iter()
                .map(|(resource, ids)| (resource, ids.len() as u64))
                .collect(),
        );
        attribution
    }
}

/// NVIDIA's devices that the kubelet may hand out, by resource.
pub(super) fn allocatable(answer: &AllocatableResourcesResponse) -> BTreeMap<String, u64> {
    let mut ids: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for device in &answer.devices {
        if resource::is_nvidia(&device.resource_name) && device.resource_name.len() <= LONGEST_TEXT {
            ids.entry(&device.resource_name)
                .or_default()
                .extend(device.device_ids.iter().map(String::as_str));
        }
    }
    ids.into_iter()
        .map(|(resource, ids)| (resource.to_owned(), ids.len() as u64))
        .collect()
}

/// The UID of a listed pod, if the facts are sure of it.
fn bind(pod: &PodResources, before: &Facts, after: &Facts, now: Instant) -> Result<String, Gap> {
    let told_before = before.by_name(&pod.namespace, &pod.name, now)?;
    let told_after = after.by_name(&pod.namespace, &pod.name, now)?;
    if told_before.uid == told_after.uid {
        Ok(told_after.uid.clone())
    } else {
        Err(Gap::PodReplaced)
    }
}

enum Present {
    Here { ready: bool },
    Ended,
    Replaced,
}

/// What has become of the pod an allocation was bound to.
fn present(allocation: &Allocation, uid: &str, facts: &Facts) -> Present {
    let namesake = facts.living(&allocation.namespace, &allocation.pod);
    match facts.by_uid(uid) {
        Some(pod) if pod.has_ended() => Present::Ended,
        Some(pod) if namesake.is_some_and(|namesake| namesake.uid == uid) => {
            Present::Here { ready: pod.ready }
        }
        // Two living pods of one name, or another one under it.
        Some(_) => Present::Replaced,
        None if namesake.is_some() => Present::Replaced,
        None => Present::Ended,
    }
}

/// What one container holds of NVIDIA's devices.
fn allocations(
    pod: &PodResources,
    container: &ContainerResources,
    shared_as: Sharing,
) -> impl Iterator<Item = Allocation> {
    let of =
        move |resource: &str, device_id: &str, id: Option<DeviceId>, replica: Option<&str>, allocator| {
            Allocation {
                namespace: pod.namespace.clone(),
                pod: pod.name.clone(),
                container: container.name.clone(),
                pod_uid: None,
                ready: None,
                resource: resource.to_owned(),
                device_id: device_id.to_owned(),
                replica: id
                    .as_ref()
                    .map_or(replica, |id| id.replica.as_deref())
                    .map(ToOwned::to_owned),
                sharing: id.as_ref().map_or(Sharing::None, |id| id.sharing(shared_as)),
                device: id.map(|id| id.device),
                allocator,
            }
        };
    let plugin = container
        .devices
        .iter()
        .filter(|devices| resource::is_nvidia(&devices.resource_name))
        .flat_map(move |devices| {
            devices.device_ids.iter().map(move |id| {
                of(
                    &devices.resource_name,
                    id,
                    DeviceId::from_plugin(id).ok(),
                    None,
                    Allocator::DevicePlugin,
                )
            })
        });
    let dra = container
        .dynamic_resources
        .iter()
        .flat_map(|claim| &claim.claim_resources)
        .filter(|device| device.driver_name == GPU_DRA_DRIVER)
        .map(move |device| {
            of(
                GPU_DRA_DRIVER,
                &device.device_name,
                DeviceId::from_dra(&device.device_name, device.share_id.as_deref()).ok(),
                device.share_id.as_deref(),
                Allocator::Dra,
            )
        });
    plugin.chain(dra)
}

fn is_oversized(allocation: &Allocation) -> bool {
    [
        &allocation.namespace,
        &allocation.pod,
        &allocation.container,
        &allocation.resource,
        &allocation.device_id,
    ]
    .into_iter()
    .chain(&allocation.replica)
    .any(|text| text.len() > LONGEST_TEXT)
}

fn count(gaps: &mut Gaps, gap: Gap, by: u64) {
    if by > 0 {
        *gaps.entry(gap).or_default() += by;
    }
}

#[cfg(test)]
mod tests {
    use super::super::pods::{Phase, Pod, PodSource};
    use super::super::wire::podresources::{ClaimResource, ContainerDevices, DynamicResource};
    use super::*;

    const GPU: &str = "GPU-0b5d8f3e-1c2d-4e5f-8a9b-0c1d2e3f4a5b";

    fn answer(pod: &str, resource: &str, ids: &[&str]) -> ListPodResourcesResponse {
        ListPodResourcesResponse {
            pod_resources: vec![PodResources {
                name: pod.into(),
                namespace: "ml".into(),
                containers: vec![ContainerResources {
                    name: "main".into(),
                    devices: vec![ContainerDevices {
                        resource_name: resource.into(),
                        device_ids: ids.iter().map(ToString::to_string).collect(),
                        topology: None,
                    }],
                    ..ContainerResources::default()
                }],
                ..PodResources::default()
            }],
        }
    }

    fn facts(pods: &[(&str, &str, Phase, bool)]) -> Facts {
        let mut facts = Facts::of(PodSource::Kubelet);
        for (uid, name, phase, ready) in pods {
            facts.apply(Pod {
                uid: (*uid).into(),
                namespace: "ml".into(),
                name: (*name).into(),
                phase: *phase,
                ready: *ready,
            });
        }
        facts
    }

    fn read(answer: &ListPodResourcesResponse, before: &Facts, after: &Facts, now: Instant) -> Listed {
        Listed::read(answer, Sharing::TimeSlicing, before, after, now)
    }

    #[test]
    fn an_allocation_carries_the_uid_and_readiness_of_its_pod() {
        let now = Instant::now();
        let pods = facts(&[("1", "web-0", Phase::Running, true)]);
        let listed = read(&answer("web-0", "nvidia.com/gpu", &[GPU]), &pods, &pods, now);
        let inventory = BTreeMap::from([("nvidia.com/gpu".to_owned(), 4)]);
        let seen = listed.assemble(Some(&inventory), &pods, now);
        assert_eq!(seen.allocations[0].pod_uid.as_deref(), Some("1"));
        assert_eq!(seen.allocations[0].ready, Some(true));
        assert_eq!(seen.handed_out.unwrap()["nvidia.com/gpu"], 1);
        assert_eq!(seen.allocatable.unwrap()["nvidia.com/gpu"], 4);
        assert!(seen.gaps.is_empty());

        let unready = facts(&[("1", "web-0", Phase::Running, false)]);
        assert_eq!(
            listed.assemble(None, &unready, now).allocations[0].ready,
            Some(false)
        );
    }

    #[test]
    fn a_pod_that_ended_holds_nothing() {
        let now = Instant::now();
        let running = facts(&[("1", "job", Phase::Running, true)]);
        let listed = read(&answer("job", "nvidia.com/gpu", &[GPU]), &running, &running, now);
        for later in [facts(&[("1", "job", Phase::Ended, false)]), facts(&[])] {
            let seen = listed.assemble(None, &later, now);
            assert!(seen.allocations.is_empty() && seen.gaps.is_empty(), "{seen:?}");
            assert_eq!(seen.handed_out, Some(BTreeMap::new()));
        }
    }

    #[test]
    fn a_pod_recreated_under_its_name_never_gets_the_old_uid_or_its_devices() {
        let now = Instant::now();
        let old = facts(&[("1", "web-0", Phase::Running, true)]);
        let new = facts(&[("2", "web-0", Phase::Running, true)]);
        let listing = answer("web-0", "nvidia.com/gpu", &[GPU]);

        // Listed for the old pod, then replaced: withdrawn until the next answer.
        let seen = read(&listing, &old, &old, now).assemble(None, &new, now);
        assert_eq!(seen.allocations[0].pod_uid, None);
        assert_eq!(seen.gaps, Gaps::from([(Gap::PodReplaced, 1)]));
        // Replaced during the call: bound to neither.
        let seen = read(&listing, &old, &new, now).assemble(None, &new, now);
        assert_eq!(seen.allocations[0].pod_uid, None);
        assert_eq!(seen.gaps, Gaps::from([(Gap::PodReplaced, 1)]));
        // The next answer is the new pod's.
        let seen = read(&listing, &new, &new, now).assemble(None, &new, now);
        assert_eq!(seen.allocations[0].pod_uid.as_deref(), Some("2"));
        // Both at once, as while an event is on its way.
        let both = facts(&[
            ("1", "web-0", Phase::Running, true),
            ("2", "web-0", Phase::Running, true),
        ]);
        let seen = read(&listing, &both, &both, now).assemble(None, &both, now);
        assert_eq!(seen.gaps, Gaps::from([(Gap::PodAmbiguous, 1)]));
        let seen = read(&listing, &old, &old, now).assemble(None, &both, now);
        assert_eq!(seen.allocations[0].pod_uid, None);
    }

    #[test]
    fn without_facts_there_is_a_reason_and_no_uid() {
        let now = Instant::now();
        let listing = answer("web-0", "nvidia.com/gpu", &[GPU]);
        for (before, gap) in [
            (Facts::default(), Gap::PodsUnknown),
            (facts(&[]), Gap::PodUnknown),
        ] {
            let seen = read(&listing, &before, &before, now).assemble(None, &before, now);
            assert_eq!(seen.gaps, Gaps::from([(gap, 1)]));
            assert_eq!(seen.allocations[0].pod_uid, None);
            assert_eq!(
                seen.handed_out.unwrap()["nvidia.com/gpu"],
                1,
                "it is handed out all the same"
            );
        }
    }

    #[test]
    fn the_last_answer_is_kept_for_minutes_and_then_withdrawn() {
        let now = Instant::now();
        let pods = facts(&[("1", "web-0", Phase::Running, true)]);
        let listed = read(&answer("web-0", "nvidia.com/gpu", &[GPU]), &pods, &pods, now);
        let kept = listed.assemble(None, &pods, now + KEPT);
        assert_eq!((kept.allocations.len(), kept.answered_at), (1, Some(now)));
        let gone = listed.assemble(None, &pods, now + KEPT + Duration::from_secs(1));
        assert!(gone.allocations.is_empty() && gone.handed_out.is_none());
        assert_eq!(gone.gaps, Gaps::from([(Gap::AllocationsStale, 1)]));
    }

    #[test]
    fn only_nvidia_devices_are_read_and_dra_among_them() {
        let now = Instant::now();
        let pods = facts(&[("1", "web-0", Phase::Running, true)]);
        let mut listing = answer("web-0", "intel.com/nic", &["GPU-x"]);
        let claim = |driver: &str, device: &str| DynamicResource {
            claim_resources: vec![ClaimResource {
                driver_name: driver.into(),
                device_name: device.into(),
                ..ClaimResource::default()
            }],
            ..DynamicResource::default()
        };
        listing.pod_resources[0].containers[0].dynamic_resources = vec![
            claim("compute-domain.nvidia.com", "channel-0"),
            claim(GPU_DRA_DRIVER, "gpu-2"),
        ];
        let seen = read(&listing, &pods, &pods, now).assemble(None, &pods, now);
        assert_eq!(seen.allocations.len(), 1);
        assert_eq!(seen.allocations[0].allocator, Allocator::Dra);
        assert_eq!(seen.allocations[0].resource, GPU_DRA_DRIVER);
        assert_eq!(
            seen.handed_out,
            Some(BTreeMap::new()),
            "DRA has no inventory here"
        );
    }

    #[test]
    fn an_endless_or_repetitive_answer_is_bounded_and_counted() {
        let now = Instant::now();
        let pods = facts(&[("1", "web-0", Phase::Running, true)]);
        let ids: Vec<String> = (0..MOST_ALLOCATIONS + 7).map(|n| format!("{GPU}::{n}")).collect();
        let ids: Vec<&str> = ids.iter().chain(&ids).map(String::as_str).collect();
        let seen =
            read(&answer("web-0", "nvidia.com/gpu", &ids), &pods, &pods, now).assemble(None, &pods, now);
        assert_eq!(seen.allocations.len(), MOST_ALLOCATIONS);
        assert_eq!(seen.gaps[&Gap::TooMany], 7, "each once");
        let seen = read(
            &answer("web-0", "nvidia.com/gpu", &[&"x".repeat(300)]),
            &pods,
            &pods,
            now,
        )
        .assemble(None, &pods, now);
        assert_eq!((seen.allocations.len(), seen.gaps[&Gap::TooMany]), (0, 1));
    }

    #[test]
    fn the_inventory_counts_each_device_once() {
        let devices = |resource: &str, ids: &[&str]| ContainerDevices {
            resource_name: resource.into(),
            device_ids: ids.iter().map(ToString::to_string).collect(),
            topology: None,
        };
        let answer = AllocatableResourcesResponse {
            devices: vec![
                devices("nvidia.com/gpu", &["a", "b"]),
                devices("nvidia.com/gpu", &["b", "c"]),
                devices("intel.com/nic", &["n"]),
            ],
            ..AllocatableResourcesResponse::default()
        };
        assert_eq!(
            allocatable(&answer),
            BTreeMap::from([("nvidia.com/gpu".to_owned(), 3)])
        );
    }
}
