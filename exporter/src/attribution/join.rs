//! Pods against devices: the rows about pods, from what the kubelet said and what NVML measured.
//!
//! Purpose: join one attribution with one view of the devices, each tick.
//! Inputs: an [`Attribution`] and the readings of every GPU that NVML shows.
//! Invariants: pure. A row needs a pod UID. Device readings go to a pod only where exactly one container holds the
//! whole GPU; they are never divided and never copied to two. A reading that the device does not have is absent.
//! No two rows have the same identity.

use std::collections::{BTreeMap, HashSet};
use std::time::Instant;

use forewarm_signals::label::{Sharing, Source};

use super::allocation::{Allocation, Attribution, Gap, Gaps};
use super::device_id::DeviceRef;

/// A value and when it was taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reading {
    /// The value in the family's base unit.
    pub value: f64,
    /// When NVML answered.
    pub taken_at: Instant,
}

/// What the join needs to know of one physical GPU. The filler leaves out what is too old, refused or unsupported.
#[derive(Debug, Clone, Default)]
pub struct DeviceView<'a> {
    /// NVML index.
    pub index: u32,
    /// UUID with its `GPU-` prefix.
    pub uuid: &'a str,
    /// Minor number, where NVML tells it.
    pub minor: Option<u32>,
    /// Its MIG devices, where NVML tells them.
    pub slices: &'a [SliceView<'a>],
    /// Share of time with a kernel resident.
    pub busy_ratio: Option<Reading>,
    /// Share of SM time in use.
    pub sm_active_ratio: Option<Reading>,
    /// Memory in use.
    pub memory_used_bytes: Option<Reading>,
    /// Memory in all.
    pub memory_total_bytes: Option<Reading>,
    /// NVLink data rate, received.
    pub nvlink_rx_bytes_per_second: Option<Reading>,
    /// NVLink data rate, sent.
    pub nvlink_tx_bytes_per_second: Option<Reading>,
    /// Power.
    pub power_watts: Option<Reading>,
}

/// What the join needs to know of one MIG device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceView<'a> {
    /// UUID with its `MIG-` prefix.
    pub uuid: &'a str,
    /// GPU instance id.
    pub gi: u32,
    /// Compute instance id.
    pub ci: u32,
}

/// The MIG device of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SliceLabels<'a> {
    /// UUID with its `MIG-` prefix, where known.
    pub uuid: Option<&'a str>,
    /// GPU instance id, where known.
    pub gi: Option<u32>,
    /// Compute instance id, where known.
    pub ci: Option<u32>,
}

/// One container and device.
#[derive(Debug, Clone)]
pub struct PodRow<'a> {
    /// Who holds it. `pod_uid` is always there.
    pub allocation: &'a Allocation,
    /// UID of the pod.
    pub pod_uid: &'a str,
    /// NVML index of the physical GPU; absent when NVML does not show it (then the label stays empty).
    pub gpu: Option<u32>,
    /// UUID of the physical GPU; absent when only the slice is known (then the label stays empty).
    pub uuid: Option<&'a str>,
    /// The MIG device, for slices.
    pub slice: Option<SliceLabels<'a>>,
    /// How the device is shared.
    pub sharing: Sharing,
    /// True for the first row of a container and device: `gpu_pod_ready` has no replica label, so it is written for
    /// this row only.
    pub is_first_of_device: bool,
    /// The pod's own readings; absent unless the container holds the whole GPU alone and at least one value is there.
    pub readings: Option<PodReadings>,
}

/// Readings of a GPU that one container holds alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PodReadings {
    /// How the values were obtained.
    pub source: Source,
    /// Share of time with a kernel resident.
    pub busy_ratio: Option<f64>,
    /// Share of SM time in use.
    pub sm_active_ratio: Option<f64>,
    /// Memory in use.
    pub memory_used_bytes: Option<f64>,
    /// Memory in all.
    pub memory_total_bytes: Option<f64>,
    /// NVLink data rate, received.
    pub nvlink_rx_bytes_per_second: Option<f64>,
    /// NVLink data rate, sent.
    pub nvlink_tx_bytes_per_second: Option<f64>,
    /// Power.
    pub power_watts: Option<f64>,
}

/// When the oldest reading behind a pod's values of one source was taken, for `gpu_pod_sample_age_seconds`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodAge<'a> {
    /// UID of the pod.
    pub pod_uid: &'a str,
    /// The source.
    pub source: Source,
    /// When the oldest reading was taken.
    pub oldest: Instant,
}

/// Devices of one resource on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inventory<'a> {
    /// Resource name.
    pub resource: &'a str,
    /// Devices the kubelet may hand out, where it said.
    pub allocatable: Option<u64>,
    /// Devices handed out, where the kubelet said.
    pub allocated: Option<u64>,
    /// Allocatable devices that are not handed out, where both are known.
    pub idle: Option<u64>,
}

/// Everything the join yields.
#[derive(Debug, Clone, Default)]
pub struct Joined<'a> {
    /// One row per container and device.
    pub rows: Vec<PodRow<'a>>,
    /// One age per pod and source that has a value.
    pub ages: Vec<PodAge<'a>>,
    /// One entry per resource.
    pub inventory: Vec<Inventory<'a>>,
    /// What could not be attributed, here and before, by reason.
    pub gaps: Gaps,
}

/// Joins an attribution with the devices.
#[must_use]
pub fn join<'a>(attribution: &'a Attribution, devices: &'a [DeviceView<'a>]) -> Joined<'a> {
    let targets: Vec<_> = attribution
        .allocations
        .iter()
        .map(|allocation| (allocation, locate(allocation, devices)))
        .collect();
    let claims = claims(&targets, devices);

    let mut joined = Joined {
        gaps: attribution.gaps.clone(),
        inventory: inventory(attribution),
        ..Joined::default()
    };
    let mut seen = HashSet::new();
    let mut seen_devices = HashSet::new();
    let mut oldest: BTreeMap<(&'a str, Source), Instant> = BTreeMap::new();
    for (allocation, target) in targets {
        let Some(pod_uid) = allocation.pod_uid.as_deref() else {
            continue; // counted where the UID was sought
        };
        let target = match target {
            Ok(target) => target,
            Err(gap) => {
                *joined.gaps.entry(gap).or_default() += 1;
                continue;
            }
        };
        if let Some(gap) = target.gap {
            *joined.gaps.entry(gap).or_default() += 1;
        }
        let held = (pod_uid, allocation.container.as_str(), target.uuid, target.slice);
        if !seen.insert((
            held,
            &allocation.resource,
            &allocation.replica,
            allocation.allocator,
        )) {
            *joined.gaps.entry(Gap::NamedTwice).or_default() += 1;
            continue;
        }
        let claimed = target
            .uuid
            .and_then(|uuid| claims.get(uuid))
            .copied()
            .unwrap_or_default();
        let is_divided = allocation.replica.is_some() || target.slice.is_some();
        let sharing = match allocation.sharing {
            // Contexts of several processes take turns on a GPU unless MPS says otherwise.
            Sharing::None if claimed > 1 => Sharing::TimeSlicing,
            told => told,
        };
        let readings = match target.device {
            Some(device) if !is_divided && claimed == 1 => exclusive(device),
            Some(_) if !is_divided => {
                *joined.gaps.entry(Gap::ClaimedTwice).or_default() += 1;
                None
            }
            _ => None,
        };
        if let Some((readings, taken_at)) = &readings {
            oldest
                .entry((pod_uid, readings.source))
                .and_modify(|oldest| *oldest = (*oldest).min(*taken_at))
                .or_insert(*taken_at);
        }
        joined.rows.push(PodRow {
            allocation,
            pod_uid,
            gpu: target.device.map(|device| device.index),
            uuid: target.uuid,
            slice: target.slice,
            sharing,
            is_first_of_device: seen_devices.insert(held),
            readings: readings.map(|(readings, _)| readings),
        });
    }
    joined.ages = oldest
        .into_iter()
        .map(|((pod_uid, source), oldest)| PodAge {
            pod_uid,
            source,
            oldest,
        })
        .collect();
    joined
}

/// Where an allocation lies on this node.
#[derive(Clone, Copy)]
struct Target<'a> {
    device: Option<&'a DeviceView<'a>>,
    uuid: Option<&'a str>,
    slice: Option<SliceLabels<'a>>,
    /// Set where the row stands but part of its identity is not known.
    gap: Option<Gap>,
}

fn locate<'a>(allocation: &'a Allocation, devices: &'a [DeviceView<'a>]) -> Result<Target<'a>, Gap> {
    let by_uuid = |uuid: &str| devices.iter().find(|device| device.uuid == uuid);
    let by_minor = |minor: u32| devices.iter().find(|device| device.minor == Some(minor));
    let of_parent = |device: Option<&'a DeviceView<'a>>, gi: u32, ci: Option<u32>| {
        let known = device.and_then(|device| {
            let mut slices = device
                .slices
                .iter()
                .filter(|slice| slice.gi == gi && ci.is_none_or(|ci| slice.ci == ci));
            slices.next().filter(|_| slices.next().is_none())
        });
        SliceLabels {
            uuid: known.map(|slice| slice.uuid),
            gi: Some(gi),
            ci: ci.or(known.map(|slice| slice.ci)),
        }
    };
    match allocation.device.as_ref().ok_or(Gap::IdUnknown)? {
        DeviceRef::Gpu(uuid) => {
            let device = by_uuid(uuid);
            Ok(Target {
                device,
                uuid: Some(uuid),
                slice: None,
                gap: device.is_none().then_some(Gap::DeviceUnknown),
            })
        }
        DeviceRef::Minor(minor) => {
            let device = by_minor(*minor).ok_or(Gap::DeviceUnknown)?;
            Ok(Target {
                device: Some(device),
                uuid: Some(device.uuid),
                slice: None,
                gap: None,
            })
        }
        DeviceRef::Mig(mig) => {
            let found = devices.iter().find_map(|device| {
                let slice = device.slices.iter().find(|slice| slice.uuid == mig)?;
                Some((device, slice))
            });
            Ok(Target {
                device: found.map(|(device, _)| device),
                uuid: found.map(|(device, _)| device.uuid),
                slice: Some(SliceLabels {
                    uuid: Some(mig),
                    gi: found.map(|(_, slice)| slice.gi),
                    ci: found.map(|(_, slice)| slice.ci),
                }),
                gap: found.is_none().then_some(Gap::SliceUnknown),
            })
        }
        DeviceRef::MigOfGpu { gpu, gi, ci } => {
            let device = by_uuid(gpu);
            Ok(Target {
                device,
                uuid: Some(gpu),
                slice: Some(of_parent(device, *gi, Some(*ci))),
                gap: device.is_none().then_some(Gap::DeviceUnknown),
            })
        }
        DeviceRef::MigOfMinor { minor, gi } => {
            let device = by_minor(*minor).ok_or(Gap::DeviceUnknown)?;
            Ok(Target {
                device: Some(device),
                uuid: Some(device.uuid),
                slice: Some(of_parent(Some(device), *gi, None)),
                gap: None,
            })
        }
        // The placement tells the slice only together with NVML's list of GPU instances, which is not read yet.
        DeviceRef::MigPlacement { .. } => Err(Gap::SliceUnknown),
    }
}

/// How many allocations lie on each GPU, by UUID: also those of pods that are not known, since they use it as well.
fn claims<'a>(
    targets: &[(&'a Allocation, Result<Target<'a>, Gap>)],
    devices: &'a [DeviceView<'a>],
) -> BTreeMap<&'a str, usize> {
    let mut claims = BTreeMap::new();
    let mut counted = HashSet::new();
    for (allocation, target) in targets {
        let uuid = match (target, &allocation.device) {
            (Ok(target), _) => target.uuid,
            // Which slice of the GPU it is does not matter here.
            (Err(_), Some(DeviceRef::MigPlacement { minor, .. })) => devices
                .iter()
                .find(|device| device.minor == Some(*minor))
                .map(|device| device.uuid),
            (Err(_), _) => None,
        };
        let Some(uuid) = uuid else {
            continue;
        };
        let holder = (&allocation.namespace, &allocation.pod, &allocation.container);
        if counted.insert((holder, uuid, &allocation.replica)) {
            *claims.entry(uuid).or_default() += 1;
        }
    }
    claims
}

/// The readings of a device for the one container that holds it, and when the oldest of them was taken.
fn exclusive(device: &DeviceView<'_>) -> Option<(PodReadings, Instant)> {
    let mut oldest: Option<Instant> = None;
    let mut take = |reading: Option<Reading>| {
        let reading = reading.filter(|reading| reading.value.is_finite())?;
        oldest = Some(oldest.map_or(reading.taken_at, |oldest| oldest.min(reading.taken_at)));
        Some(reading.value)
    };
    let readings = PodReadings {
        source: Source::Exclusive,
        busy_ratio: take(device.busy_ratio),
        sm_active_ratio: take(device.sm_active_ratio),
        memory_used_bytes: take(device.memory_used_bytes),
        memory_total_bytes: take(device.memory_total_bytes),
        nvlink_rx_bytes_per_second: take(device.nvlink_rx_bytes_per_second),
        nvlink_tx_bytes_per_second: take(device.nvlink_tx_bytes_per_second),
        power_watts: take(device.power_watts),
    };
    oldest.map(|oldest| (readings, oldest))
}

fn inventory(attribution: &Attribution) -> Vec<Inventory<'_>> {
    let resources: std::collections::BTreeSet<&str> = [&attribution.allocatable, &attribution.handed_out]
        .into_iter()
        .flatten()
        .flat_map(BTreeMap::keys)
        .map(String::as_str)
        .collect();
    let count = |of: &Option<BTreeMap<String, u64>>, resource: &str| {
        of.as_ref()
            .map(|counts| counts.get(resource).copied().unwrap_or_default())
    };
    resources
        .into_iter()
        .map(|resource| Inventory {
            resource,
            allocatable: count(&attribution.allocatable, resource),
            allocated: count(&attribution.handed_out, resource),
            idle: count(&attribution.idle, resource),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::device_id::DeviceId;
    use super::*;
    use forewarm_signals::label::Allocator;
    use std::time::Duration;

    const GPU_A: &str = "GPU-aaaaaaaa-1c2d-4e5f-8a9b-0c1d2e3f4a5b";
    const GPU_B: &str = "GPU-bbbbbbbb-1c2d-4e5f-8a9b-0c1d2e3f4a5b";
    const MIG: &str = "MIG-cccccccc-1c2d-4e5f-8a9b-0c1d2e3f4a5b";

    fn held(pod: &str, device_id: &str) -> Allocation {
        let id = DeviceId::from_plugin(device_id).ok();
        Allocation {
            namespace: "ml".into(),
            pod: pod.into(),
            container: "main".into(),
            pod_uid: Some(format!("uid-{pod}")),
            ready: Some(true),
            resource: "nvidia.com/gpu".into(),
            device_id: device_id.into(),
            replica: id.as_ref().and_then(|id| id.replica.clone()),
            sharing: id
                .as_ref()
                .map_or(Sharing::None, |id| id.sharing(Sharing::TimeSlicing)),
            device: id.map(|id| id.device),
            allocator: Allocator::DevicePlugin,
        }
    }

    fn of(allocations: Vec<Allocation>) -> Attribution {
        Attribution {
            allocations,
            ..Attribution::default()
        }
    }

    fn gpus(now: Instant) -> [DeviceView<'static>; 2] {
        let gpu = |index, uuid, busy, seconds| DeviceView {
            index,
            uuid,
            minor: Some(index),
            busy_ratio: Some(Reading {
                value: busy,
                taken_at: now - Duration::from_secs(seconds),
            }),
            power_watts: Some(Reading {
                value: 300.0,
                taken_at: now,
            }),
            ..DeviceView::default()
        };
        [gpu(0, GPU_A, 0.25, 1), gpu(1, GPU_B, 0.75, 2)]
    }

    fn busy(row: &PodRow<'_>) -> Option<f64> {
        row.readings.and_then(|readings| readings.busy_ratio)
    }

    #[test]
    fn the_one_holder_of_a_whole_gpu_gets_its_readings_and_their_age() {
        let now = Instant::now();
        let (devices, told) = (
            gpus(now),
            of(vec![held("a", GPU_A), held("a", GPU_B), held("b", "nvidia7")]),
        );
        let joined = join(&told, &devices);
        assert_eq!(joined.rows.len(), 2);
        assert_eq!((joined.rows[0].gpu, joined.rows[0].uuid), (Some(0), Some(GPU_A)));
        assert_eq!(
            (busy(&joined.rows[0]), busy(&joined.rows[1])),
            (Some(0.25), Some(0.75))
        );
        let age = joined.ages[0];
        assert_eq!((age.pod_uid, age.source), ("uid-a", Source::Exclusive));
        assert_eq!(
            age.oldest,
            now - Duration::from_secs(2),
            "the older of its two GPUs"
        );
        assert_eq!(
            joined.gaps,
            Gaps::from([(Gap::DeviceUnknown, 1)]),
            "no GPU has minor 7"
        );
    }

    #[test]
    fn two_claims_on_one_gpu_share_no_reading() {
        let (devices, told) = (
            gpus(Instant::now()),
            of(vec![held("a", GPU_A), held("b", "nvidia0")]),
        );
        let joined = join(&told, &devices);
        assert_eq!(joined.rows.len(), 2, "both still hold it");
        assert!(joined.rows.iter().all(|row| row.readings.is_none()));
        assert!(joined.rows.iter().all(|row| row.sharing == Sharing::TimeSlicing));
        assert_eq!(joined.gaps, Gaps::from([(Gap::ClaimedTwice, 2)]));
        assert!(joined.ages.is_empty());
    }

    #[test]
    fn a_claim_by_an_unknown_pod_counts_against_exclusiveness() {
        let mut unknown = held("b", GPU_A);
        unknown.pod_uid = None;
        let (devices, told) = (gpus(Instant::now()), of(vec![held("a", GPU_A), unknown]));
        let joined = join(&told, &devices);
        assert_eq!(joined.rows.len(), 1, "no row without a UID");
        assert_eq!(busy(&joined.rows[0]), None);
    }

    #[test]
    fn replicas_are_told_apart_and_get_no_device_reading() {
        let ids = [format!("{GPU_A}::0"), format!("{GPU_A}::1")];
        // One pod with two replicas, another with one; and one replica alone on the other GPU.
        let told = of(vec![
            held("a", &ids[0]),
            held("a", &ids[1]),
            held("b", &format!("{GPU_B}::0")),
        ]);
        let devices = gpus(Instant::now());
        let joined = join(&told, &devices);
        assert_eq!(joined.rows.len(), 3);
        assert!(
            joined
                .rows
                .iter()
                .all(|row| row.readings.is_none() && row.sharing == Sharing::TimeSlicing)
        );
        let first: Vec<bool> = joined.rows.iter().map(|row| row.is_first_of_device).collect();
        assert_eq!(
            first,
            [true, false, true],
            "readiness once per container and device"
        );
        assert!(joined.gaps.is_empty(), "sharing is no fault");
    }

    #[test]
    fn slices_carry_their_parent_where_it_is_known() {
        let slices = [SliceView {
            uuid: MIG,
            gi: 3,
            ci: 0,
        }];
        let mut devices = gpus(Instant::now());
        let old = format!("MIG-{GPU_B}/7/0");
        let told = of(vec![held("a", MIG), held("b", &old)]);

        let joined = join(&told, &devices);
        assert_eq!((joined.rows[0].gpu, joined.rows[0].uuid), (None, None));
        assert_eq!(joined.rows[0].slice.unwrap().uuid, Some(MIG));
        assert_eq!(joined.gaps, Gaps::from([(Gap::SliceUnknown, 1)]));
        assert_eq!(
            (joined.rows[1].gpu, joined.rows[1].slice.unwrap().gi),
            (Some(1), Some(7))
        );

        devices[0].slices = &slices;
        let joined = join(&told, &devices);
        assert_eq!(
            (joined.rows[0].gpu, joined.rows[0].slice.unwrap().gi),
            (Some(0), Some(3))
        );
        assert!(
            joined
                .rows
                .iter()
                .all(|row| row.sharing == Sharing::Mig && row.readings.is_none())
        );
        assert!(joined.gaps.is_empty());
    }

    #[test]
    fn a_device_without_values_leaves_the_pods_values_out() {
        let now = Instant::now();
        let mut devices = gpus(now);
        devices[0].busy_ratio = None;
        devices[1] = DeviceView {
            index: 1,
            uuid: GPU_B,
            ..DeviceView::default()
        };
        let told = of(vec![held("a", GPU_A), held("b", GPU_B)]);
        let joined = join(&told, &devices);
        assert_eq!(busy(&joined.rows[0]), None);
        assert_eq!(joined.rows[0].readings.unwrap().power_watts, Some(300.0));
        assert_eq!(joined.ages[0].oldest, now, "the age of what is present only");
        assert_eq!(joined.rows[1].readings, None);
        assert_eq!(joined.ages.len(), 1);
    }

    #[test]
    fn a_gpu_that_nvml_does_not_show_is_still_held() {
        let told = of(vec![held("a", GPU_A)]);
        let joined = join(&told, &[]);
        assert_eq!((joined.rows[0].gpu, joined.rows[0].uuid), (None, Some(GPU_A)));
        assert_eq!(joined.gaps, Gaps::from([(Gap::DeviceUnknown, 1)]));
    }

    #[test]
    fn no_two_rows_have_one_identity() {
        let told = of(vec![held("a", GPU_A), held("a", "nvidia0"), held("a", "hami-1")]);
        let devices = gpus(Instant::now());
        let joined = join(&told, &devices);
        assert_eq!(joined.rows.len(), 1);
        assert_eq!(
            busy(&joined.rows[0]),
            Some(0.25),
            "one container holds it, under two names"
        );
        assert_eq!(
            joined.gaps,
            Gaps::from([(Gap::NamedTwice, 1), (Gap::IdUnknown, 1)])
        );
    }

    #[test]
    fn a_slice_that_is_not_found_still_counts_against_exclusiveness() {
        let mut slice = held("b", "gpu-0");
        slice.device = DeviceId::from_dra("gpu-0-mig-1g10gb-19-0", None)
            .ok()
            .map(|id| id.device);
        slice.allocator = Allocator::Dra;
        let (devices, told) = (gpus(Instant::now()), of(vec![held("a", GPU_A), slice]));
        let joined = join(&told, &devices);
        assert_eq!(joined.rows.len(), 1);
        assert_eq!(busy(&joined.rows[0]), None);
        assert_eq!(
            joined.gaps,
            Gaps::from([(Gap::SliceUnknown, 1), (Gap::ClaimedTwice, 1)])
        );
    }

    #[test]
    fn the_inventory_is_told_by_resource_as_far_as_it_is_known() {
        let count = |n| Some(BTreeMap::from([("nvidia.com/gpu".to_owned(), n)]));
        let mut told = Attribution {
            handed_out: count(3),
            ..Attribution::default()
        };
        let entry = join(&told, &[]).inventory[0];
        assert_eq!(
            (entry.allocatable, entry.allocated, entry.idle),
            (None, Some(3), None)
        );
        (told.allocatable, told.idle) = (count(8), count(6));
        let entry = join(&told, &[]).inventory[0];
        assert_eq!(
            (entry.allocatable, entry.allocated, entry.idle),
            (Some(8), Some(3), Some(6)),
            "one that is handed out is not healthy"
        );
    }
}
