//! From the kubelet's answers to one attribution.
//!
//! Purpose: read a List answer, give each allocation its pod's UID, and put together what readers see.
//! Inputs: answers of PodResources, facts about pods before and after the call, and the time.
//! Invariants: pure. A UID is bound when the answer arrives and only if the facts told the same pod before and after
//! the call; later facts can withdraw it and never change it. A pod that ended has no rows; its devices are free once
//! the kubelet says so.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::{Duration, Instant};

use forewarm_signals::label::{Allocator, Sharing};
use forewarm_signals::resource;

use super::allocation::{Allocation, Attribution, Gap, Gaps};
use super::device_id::DeviceId;
use super::pods::{Facts, PodSource};
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

/// Device ids by resource, and when the kubelet told them.
#[derive(Debug, Clone)]
pub(super) struct Inventory {
    ids: BTreeMap<String, BTreeSet<String>>,
    pub(super) answered_at: Instant,
}

/// An answer with its UIDs bound.
#[derive(Debug, Clone, Default)]
pub(super) struct Listed {
    bound: Vec<(Allocation, Result<String, Gap>)>,
    dropped: u64,
    answered_at: Option<Instant>,
}

impl Listed {
    /// Reads an answer and binds the UIDs. `last` is the answer before, `before` and `after` are the facts around the
    /// call, `now` its end.
    pub(super) fn read(
        answer: &ListPodResourcesResponse,
        sharing: Sharing,
        last: &Self,
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
                    let uid = match &uid {
                        // While nobody tells about pods the name may be another pod's by now: only what was bound
                        // to the UID already is believed.
                        Ok(uid) if after.lost_at.is_some() && !last.has_bound(&allocation, uid) => {
                            Err(Gap::PodsStale)
                        }
                        uid => uid.clone(),
                    };
                    listed.bound.push((allocation, uid));
                }
            }
        }
        listed
    }

    fn has_bound(&self, allocation: &Allocation, uid: &str) -> bool {
        self.bound
            .iter()
            .any(|(bound, to)| bound == allocation && to.as_deref() == Ok(uid))
    }

    /// What readers see now.
    pub(super) fn assemble(&self, inventory: Option<&Inventory>, facts: &Facts, now: Instant) -> Attribution {
        let is_kept = |answered_at| now.saturating_duration_since(answered_at) <= KEPT;
        let inventory = inventory.filter(|inventory| is_kept(inventory.answered_at));
        let mut attribution = Attribution {
            allocatable: inventory.map(|inventory| counts(&inventory.ids)),
            answered_at: self.answered_at,
            ..Attribution::default()
        };
        let Some(answered_at) = self.answered_at else {
            return attribution;
        };
        if !is_kept(answered_at) {
            count(
                &mut attribution.gaps,
                Gap::AllocationsStale,
                self.bound.len() as u64,
            );
            return attribution;
        }
        count(&mut attribution.gaps, Gap::TooMany, self.dropped + facts.dropped);

        let mut handed_out: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (allocation, uid) in &self.bound {
            let (pod_uid, ready, has_ended) = match uid {
                Err(gap) => {
                    count(&mut attribution.gaps, *gap, 1);
                    (None, None, false)
                }
                Ok(uid) => match present(allocation, uid, facts) {
                    Present::Here { ready } => (Some(uid.clone()), Some(ready), false),
                    Present::Ended { holds: true } => (None, None, true),
                    Present::Ended { holds: false } => continue,
                    Present::Replaced => {
                        count(&mut attribution.gaps, Gap::PodReplaced, 1);
                        (None, None, false)
                    }
                },
            };
            if allocation.allocator == Allocator::DevicePlugin {
                handed_out
                    .entry(allocation.resource.clone())
                    .or_default()
                    .insert(allocation.device_id.clone());
            }
            if has_ended {
                continue;
            }
            attribution.allocations.push(Allocation {
                pod_uid,
                ready,
                ..allocation.clone()
            });
        }
        if self.dropped == 0 {
            attribution.idle = inventory.map(|inventory| inventory.without(&handed_out));
            attribution.handed_out = Some(counts(&handed_out));
        }
        attribution
    }
}

impl Inventory {
    /// NVIDIA's devices of an answer that arrived at `now`.
    pub(super) fn read(answer: &AllocatableResourcesResponse, now: Instant) -> Self {
        let mut ids: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for device in &answer.devices {
            if resource::is_nvidia(&device.resource_name) && device.resource_name.len() <= LONGEST_TEXT {
                ids.entry(device.resource_name.clone())
                    .or_default()
                    .extend(device.device_ids.iter().cloned());
            }
        }
        Self {
            ids,
            answered_at: now,
        }
    }

    /// How many devices of each resource are not among the given ones.
    fn without(&self, handed_out: &BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, u64> {
        let none = BTreeSet::new();
        let left = |(resource, ids): (&String, &BTreeSet<String>)| {
            let held = handed_out.get(resource).unwrap_or(&none);
            (resource.clone(), ids.difference(held).count() as u64)
        };
        self.ids.iter().map(left).collect()
    }
}

fn counts(ids: &BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, u64> {
    ids.iter()
        .map(|(resource, ids)| (resource.clone(), ids.len() as u64))
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
    Here {
        ready: bool,
    },
    /// `holds`: its devices are not free yet.
    Ended {
        holds: bool,
    },
    Replaced,
}

/// What has become of the pod an allocation was bound to.
fn present(allocation: &Allocation, uid: &str, facts: &Facts) -> Present {
    let namesake = facts.living(&allocation.namespace, &allocation.pod);
    match facts.by_uid(uid) {
        // The kubelet calls a pod that it evicts Failed at once, while the containers may take their grace period: its
        // Pods API tells the end by removing the pod, and since 1.34, before there was one, it lists active pods only.
        // The API server hears of the end after the containers, and older kubelets list such pods for ever.
        Some(pod) if pod.has_ended() => Present::Ended {
            holds: facts.source == Some(PodSource::Kubelet),
        },
        Some(pod) if namesake.is_some_and(|namesake| namesake.uid == uid) => {
            Present::Here { ready: pod.ready }
        }
        // Two living pods of one name, or another one under it.
        Some(_) => Present::Replaced,
        None if namesake.is_some() => Present::Replaced,
        None => Present::Ended { holds: false },
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

    fn inventory(resource: &str, ids: &[&str], now: Instant) -> Inventory {
        let devices = ids.iter().map(|id| ContainerDevices {
            resource_name: resource.into(),
            device_ids: vec![(*id).into()],
            topology: None,
        });
        let answer = AllocatableResourcesResponse {
            devices: devices.collect(),
            ..AllocatableResourcesResponse::default()
        };
        Inventory::read(&answer, now)
    }

    fn read(answer: &ListPodResourcesResponse, before: &Facts, after: &Facts, now: Instant) -> Listed {
        Listed::read(
            answer,
            Sharing::TimeSlicing,
            &Listed::default(),
            before,
            after,
            now,
        )
    }

    #[test]
    fn an_allocation_carries_the_uid_and_readiness_of_its_pod() {
        let now = Instant::now();
        let pods = facts(&[("1", "web-0", Phase::Running, true)]);
        let listed = read(&answer("web-0", "nvidia.com/gpu", &[GPU]), &pods, &pods, now);
        let inventory = inventory("nvidia.com/gpu", &[GPU, "b", "c", "d"], now);
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
    fn a_pod_that_ended_has_no_row_and_holds_nothing_once_the_kubelet_says_so() {
        let now = Instant::now();
        let running = facts(&[("1", "job", Phase::Running, true)]);
        let inventory = inventory("nvidia.com/gpu", &[GPU, "b"], now);
        let listed = read(&answer("job", "nvidia.com/gpu", &[GPU]), &running, &running, now);
        let ended = facts(&[("1", "job", Phase::Ended, false)]);
        let mut ended_at_the_api_server = ended.clone();
        ended_at_the_api_server.source = Some(PodSource::ApiServer);
        for (later, held) in [
            // Evicted, and its containers still have their grace period.
            (ended, 1),
            (ended_at_the_api_server, 0),
            (facts(&[]), 0),
        ] {
            let seen = listed.assemble(Some(&inventory), &later, now);
            assert!(seen.allocations.is_empty() && seen.gaps.is_empty(), "{seen:?}");
            let handed_out = seen.handed_out.unwrap();
            assert_eq!(
                handed_out.get("nvidia.com/gpu").copied().unwrap_or_default(),
                held
            );
            assert_eq!(seen.idle.unwrap()["nvidia.com/gpu"], 2 - held);
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
    fn an_inventory_that_is_not_told_any_more_is_withdrawn_too() {
        let now = Instant::now();
        let pods = facts(&[("1", "web-0", Phase::Running, true)]);
        let inventory = inventory("nvidia.com/gpu", &[GPU, "b"], now);
        let later = now + KEPT + Duration::from_secs(1);
        let listed = read(&answer("web-0", "nvidia.com/gpu", &[GPU]), &pods, &pods, later);
        let seen = listed.assemble(Some(&inventory), &pods, later);
        assert_eq!((seen.allocatable, seen.idle), (None, None));
        assert_eq!(seen.handed_out.unwrap()["nvidia.com/gpu"], 1);
    }

    #[test]
    fn a_device_that_turned_unhealthy_while_held_makes_no_other_device_less_idle() {
        let now = Instant::now();
        let pods = facts(&[("1", "web-0", Phase::Running, true)]);
        let healthy = inventory("nvidia.com/gpu", &["b", "c"], now);
        let seen = read(&answer("web-0", "nvidia.com/gpu", &[GPU]), &pods, &pods, now).assemble(
            Some(&healthy),
            &pods,
            now,
        );
        assert_eq!(seen.allocatable.unwrap()["nvidia.com/gpu"], 2);
        assert_eq!(seen.handed_out.unwrap()["nvidia.com/gpu"], 1);
        assert_eq!(seen.idle.unwrap()["nvidia.com/gpu"], 2);
    }

    #[test]
    fn while_pods_are_not_told_a_name_keeps_its_devices_and_gets_no_others() {
        let now = Instant::now();
        let told = facts(&[("1", "web-0", Phase::Running, true)]);
        let listed = read(&answer("web-0", "nvidia.com/gpu", &[GPU]), &told, &told, now);
        let mut lost = told.clone();
        lost.lost_at = Some(now);
        let read = |device: &str| {
            let answer = answer("web-0", "nvidia.com/gpu", &[device]);
            Listed::read(&answer, Sharing::TimeSlicing, &listed, &told, &lost, now).assemble(None, &lost, now)
        };
        assert_eq!(read(GPU).allocations[0].pod_uid.as_deref(), Some("1"));
        // A new pod of the name, perhaps, or the old one with another container.
        let seen = read("GPU-1b5d8f3e-1c2d-4e5f-8a9b-0c1d2e3f4a5b");
        assert_eq!(seen.allocations[0].pod_uid, None);
        assert_eq!(seen.gaps, Gaps::from([(Gap::PodsStale, 1)]));
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
        assert_eq!(
            (seen.handed_out, seen.idle),
            (None, None),
            "no count of a part of them"
        );
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
            counts(&Inventory::read(&answer, Instant::now()).ids),
            BTreeMap::from([("nvidia.com/gpu".to_owned(), 3)])
        );
    }
}
