//! Families about pods and the node's inventory, from the join of attribution and devices.
//!
//! Invariants: only fresh readings reach the join; a row without a value has no line.

use std::time::Instant;

use forewarm_signals::label::{
    ALLOCATOR, CONTAINER, DIRECTION, Direction, GPU, NAMESPACE, POD, POD_UID, REPLICA, RESOURCE, SHARING,
    SOURCE, UUID,
};
use forewarm_signals::{Family, Group, pod};

use super::device::Device;
use super::page::AgeLine;
use super::text::{self, Samples};
use crate::attribution::join::{DeviceView, Joined, PodReadings, PodRow, Reading};

/// What the join needs to know of the devices.
#[must_use]
pub(super) fn views(devices: &[Device]) -> Vec<DeviceView<'_>> {
    devices
        .iter()
        .filter(|device| !device.snapshot.uuid().is_empty())
        .map(view)
        .collect()
}

fn view(device: &Device) -> DeviceView<'_> {
    let snapshot = &device.snapshot;
    let fresh = |group: Group, value: Option<f64>| {
        let taken_at = snapshot
            .measured_at(group)
            .filter(|_| device.standing.is_fresh(group))?;
        Some(Reading {
            value: value?,
            taken_at,
        })
    };
    #[allow(clippy::cast_precision_loss, reason = "device memory is far below 2^53 bytes")]
    let bytes = |bytes: forewarm_nvml::Bytes| bytes.get() as f64;
    let utilization = snapshot.utilization.as_ref().map(|timed| timed.value);
    let gpm = snapshot.gpm.as_ref().map(|timed| timed.value);
    let memory = snapshot.memory.as_ref().map(|timed| timed.value);
    let nvlink = snapshot.nvlink.as_ref().map(|timed| timed.value);
    let power = snapshot.power.as_ref().map(|timed| timed.value);
    DeviceView {
        index: snapshot.index,
        uuid: snapshot.uuid(),
        minor: snapshot
            .identity
            .as_ref()
            .and_then(|identity| identity.facts.minor),
        slices: &[],
        busy_ratio: fresh(
            Group::Utilization,
            utilization.and_then(|rates| rates.busy).map(|ratio| ratio.get()),
        ),
        sm_active_ratio: fresh(
            Group::Gpm,
            gpm.and_then(|gpm| gpm.sm_active).map(|ratio| ratio.get()),
        ),
        memory_used_bytes: fresh(Group::Memory, memory.map(|memory| bytes(memory.used))),
        memory_total_bytes: fresh(Group::Memory, memory.map(|memory| bytes(memory.total))),
        nvlink_rx_bytes_per_second: fresh(
            Group::Nvlink,
            nvlink.and_then(|nvlink| nvlink.rate.rx).map(|rate| rate.get()),
        ),
        nvlink_tx_bytes_per_second: fresh(
            Group::Nvlink,
            nvlink.and_then(|nvlink| nvlink.rate.tx).map(|rate| rate.get()),
        ),
        power_watts: fresh(
            Group::Power,
            power.and_then(|power| power.power).map(|watts| watts.get()),
        ),
    }
}

/// A family and what a row says in it.
type Write = fn(&PodRow<'_>, &mut Samples<'_>);

/// Families with one row per container and device, in the order of `signals::pod`.
pub(super) const ROWS: &[(&Family, Write)] = &[
    (&pod::ALLOCATION, |row, out| {
        let allocation = row.allocation;
        out.count(
            &[
                (RESOURCE, allocation.resource.as_str()),
                (REPLICA, allocation.replica.as_deref().unwrap_or_default()),
                (SHARING, row.sharing.as_str()),
                (ALLOCATOR, allocation.allocator.as_str()),
            ],
            1,
        );
    }),
    (&pod::READY, |row, out| {
        if let Some(ready) = row.allocation.ready.filter(|_| row.is_first_of_device) {
            out.count(&[], u64::from(ready));
        }
    }),
    (&pod::BUSY_RATIO, |row, out| {
        reading(row, out, |readings| readings.busy_ratio);
    }),
    (&pod::SM_ACTIVE_RATIO, |row, out| {
        reading(row, out, |readings| readings.sm_active_ratio);
    }),
    (&pod::MEMORY_USED_BYTES, |row, out| {
        reading(row, out, |readings| readings.memory_used_bytes);
    }),
    (&pod::MEMORY_TOTAL_BYTES, |row, out| {
        reading(row, out, |readings| readings.memory_total_bytes);
    }),
    (&pod::NVLINK_BYTES_PER_SECOND, |row, out| {
        let Some(readings) = &row.readings else { return };
        let directions = [
            (Direction::Rx, readings.nvlink_rx_bytes_per_second),
            (Direction::Tx, readings.nvlink_tx_bytes_per_second),
        ];
        for (direction, rate) in directions {
            if let Some(rate) = rate {
                out.with(
                    &[
                        (SOURCE, readings.source.as_str()),
                        (DIRECTION, direction.as_str()),
                    ],
                    rate,
                );
            }
        }
    }),
    (&pod::POWER_WATTS, |row, out| {
        reading(row, out, |readings| readings.power_watts);
    }),
];

/// Families of the node's inventory.
pub(super) const INVENTORY: [&Family; 3] = [&pod::NODE_ALLOCATABLE, &pod::NODE_ALLOCATED, &pod::NODE_IDLE];

/// The labels of a row, escaped.
#[must_use]
pub(super) fn identity(row: &PodRow<'_>) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    let gpu = row.gpu.map(|index| index.to_string()).unwrap_or_default();
    let held = [
        (NAMESPACE, row.allocation.namespace.as_str()),
        (POD, row.allocation.pod.as_str()),
        (CONTAINER, row.allocation.container.as_str()),
        (POD_UID, row.pod_uid),
        (GPU, gpu.as_str()),
        (UUID, row.uuid.unwrap_or_default()),
    ];
    let Some(slice) = row.slice else {
        text::labels(&mut out, held);
        return out;
    };
    let number = |id: Option<u32>| id.map(|id| id.to_string()).unwrap_or_default();
    let (gi, ci) = (number(slice.gi), number(slice.ci));
    let slice = [
        ("mig_uuid", slice.uuid.unwrap_or_default()),
        ("gi", gi.as_str()),
        ("ci", ci.as_str()),
    ];
    text::labels(&mut out, held.into_iter().chain(slice));
    out
}

/// Writes the inventory.
pub(super) fn inventory(family: &'static Family, joined: &Joined<'_>, out: &mut Vec<u8>) {
    for entry in &joined.inventory {
        let count = match family.name {
            name if name == pod::NODE_ALLOCATABLE.name => entry.allocatable,
            name if name == pod::NODE_ALLOCATED.name => entry.allocated,
            _ => entry.idle,
        };
        if let Some(count) = count {
            Samples::new(out, family, b"").count(&[(RESOURCE, entry.resource)], count);
        }
    }
}

/// The age lines of pods.
pub(super) fn ages(joined: &Joined<'_>, out: &mut Vec<AgeLine>) {
    for age in &joined.ages {
        let mut prefix = Vec::with_capacity(128);
        prefix.extend_from_slice(pod::SAMPLE_AGE_SECONDS.name.as_bytes());
        prefix.push(b'{');
        text::labels(
            &mut prefix,
            [(POD_UID, age.pod_uid), (SOURCE, age.source.as_str())],
        );
        prefix.extend_from_slice(b"} ");
        let at: Instant = age.oldest;
        out.push(AgeLine {
            prefix,
            group: None,
            at,
        });
    }
}

fn reading(row: &PodRow<'_>, out: &mut Samples<'_>, pick: fn(&PodReadings) -> Option<f64>) {
    if let Some(readings) = &row.readings
        && let Some(value) = pick(readings)
    {
        out.with(&[(SOURCE, readings.source.as_str())], value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pod_family_has_a_writer() {
        let mut written: Vec<_> = ROWS.iter().map(|(family, _)| family.name).collect();
        written.extend(INVENTORY.map(|family| family.name));
        written.push(pod::SAMPLE_AGE_SECONDS.name);
        written.sort_unstable();
        let mut known: Vec<_> = pod::FAMILIES.iter().map(|family| family.name).collect();
        known.sort_unstable();
        assert_eq!(written, known);
    }
}
