//! Families about GPUs: which value of a snapshot goes into which family.
//!
//! Invariants: the table holds every family of `signals::gpu` once, in its order (tested); freshness is checked in
//! one place, by the family's own group.

use std::time::Instant;

use forewarm_nvml::ClockDomain;
use forewarm_signals::health::{self, Reason};
use forewarm_signals::label::{DIRECTION, Direction, KIND, REASON, SENSOR, XID};
use forewarm_signals::{Family, Group, MeasuredAt, gpu};

use super::text::{self, Samples};
use crate::poll::collect::THROTTLES;
use crate::snapshot::{DeviceSlot, DeviceSnapshot, Directions, Presence, Standing};

/// One GPU as the renderer sees it.
#[derive(Debug)]
pub struct Device {
    /// Its readings.
    pub snapshot: std::sync::Arc<DeviceSnapshot>,
    /// What of them may be shown.
    pub standing: Standing,
    /// `gpu="0",uuid="GPU-…"`.
    pub identity: Vec<u8>,
    xids: Vec<(u64, u64)>,
}

impl Device {
    /// Takes what is to be shown of a GPU at a moment.
    #[must_use]
    pub fn take(slot: &DeviceSlot, now: Instant, interval: std::time::Duration) -> Self {
        let snapshot = slot.load();
        let standing = Standing::of(&snapshot, now, interval);
        let mut identity = Vec::new();
        let index = itoa::Buffer::new().format(snapshot.index).to_owned();
        text::labels(
            &mut identity,
            [("gpu", index.as_str()), ("uuid", snapshot.uuid())],
        );
        let xids = slot.with_xids(|xids| xids.counts().collect());
        Self {
            snapshot,
            standing,
            identity,
            xids,
        }
    }

    /// Whether this device was seen and is gone now: then its health is known to be zero.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        !self.standing.up && self.snapshot.identity.is_some() && self.snapshot.presence != Presence::Unseen
    }

    /// When a group was measured, for its age line. An unreachable device's health is known right now.
    #[must_use]
    pub fn measured_at(&self, group: Group, now: Instant) -> Option<Instant> {
        if group == Group::Health && self.is_unreachable() {
            return Some(now);
        }
        self.snapshot.measured_at(group)
    }
}

/// Writes the samples of one family about one GPU.
pub type Write = fn(&Device, &mut Samples<'_>);

/// Writes what a device has to say in a family, if that may be shown.
pub fn write(family: &'static Family, write: Write, device: &Device, out: &mut Vec<u8>) {
    let may_show = match family.measured {
        MeasuredAt::Device(group) => {
            device.standing.is_fresh(group) || (device.is_unreachable() && tells_unreachable(family))
        }
        MeasuredAt::Now | MeasuredAt::Pod => true,
    };
    if may_show {
        write(device, &mut Samples::new(out, family, &device.identity));
    }
}

fn tells_unreachable(family: &Family) -> bool {
    [gpu::HEALTH_SCORE.name, gpu::HEALTH_REASON.name].contains(&family.name)
}

/// The families of `/metrics`. `gpu_sample_age_seconds` is written per response, not here.
pub const FAMILIES: &[(&Family, Write)] = &[
    (&gpu::UP, |device, out| {
        out.value(f64::from(u8::from(device.standing.up)));
    }),
    (&gpu::INFO, info),
    (&gpu::BUSY_RATIO, |device, out| {
        one(
            out,
            device
                .snapshot
                .utilization
                .as_ref()
                .and_then(|timed| timed.value.busy)
                .map(|ratio| ratio.get()),
        );
    }),
    (&gpu::MEMORY_BANDWIDTH_BUSY_RATIO, |device, out| {
        let ratio = device
            .snapshot
            .utilization
            .as_ref()
            .and_then(|timed| timed.value.memory_bandwidth);
        one(out, ratio.map(|ratio| ratio.get()));
    }),
    (&gpu::SM_ACTIVE_RATIO, |device, out| {
        one(
            out,
            device
                .snapshot
                .gpm
                .as_ref()
                .and_then(|timed| timed.value.sm_active)
                .map(|ratio| ratio.get()),
        );
    }),
    (&gpu::SM_OCCUPANCY_RATIO, |device, out| {
        one(
            out,
            device
                .snapshot
                .gpm
                .as_ref()
                .and_then(|timed| timed.value.sm_occupancy)
                .map(|ratio| ratio.get()),
        );
    }),
    (&gpu::TENSOR_ACTIVE_RATIO, |device, out| {
        one(
            out,
            device
                .snapshot
                .gpm
                .as_ref()
                .and_then(|timed| timed.value.tensor_active)
                .map(|ratio| ratio.get()),
        );
    }),
    (&gpu::DRAM_ACTIVE_RATIO, |device, out| {
        one(
            out,
            device
                .snapshot
                .gpm
                .as_ref()
                .and_then(|timed| timed.value.dram_active)
                .map(|ratio| ratio.get()),
        );
    }),
    (&gpu::MEMORY_USED_BYTES, |device, out| {
        count(
            out,
            device
                .snapshot
                .memory
                .as_ref()
                .map(|timed| timed.value.used.get()),
        );
    }),
    (&gpu::MEMORY_FREE_BYTES, |device, out| {
        count(
            out,
            device
                .snapshot
                .memory
                .as_ref()
                .map(|timed| timed.value.free.get()),
        );
    }),
    (&gpu::MEMORY_RESERVED_BYTES, |device, out| {
        count(
            out,
            device
                .snapshot
                .memory
                .as_ref()
                .and_then(|timed| timed.value.reserved)
                .map(|bytes| bytes.get()),
        );
    }),
    (&gpu::MEMORY_TOTAL_BYTES, |device, out| {
        count(
            out,
            device
                .snapshot
                .memory
                .as_ref()
                .map(|timed| timed.value.total.get()),
        );
    }),
    (&gpu::NVLINK_BYTES_TOTAL, |device, out| {
        let Some(nvlink) = &device.snapshot.nvlink else {
            return;
        };
        each_direction(&nvlink.value.bytes, |direction, bytes| {
            out.count(&[(DIRECTION, direction)], bytes.get());
        });
    }),
    (&gpu::NVLINK_BYTES_PER_SECOND, |device, out| {
        let Some(nvlink) = &device.snapshot.nvlink else {
            return;
        };
        each_direction(&nvlink.value.rate, |direction, rate| {
            out.with(&[(DIRECTION, direction)], rate.get());
        });
    }),
    (&gpu::NVLINK_ERRORS_TOTAL, |device, out| {
        let Some(links) = &device.snapshot.links else {
            return;
        };
        for (kind, errors) in links.value.errors.kinds() {
            labelled_count(out, (KIND, kind), errors);
        }
    }),
    (&gpu::NVLINK_LINKS_UP, |device, out| {
        count(
            out,
            device
                .snapshot
                .links
                .as_ref()
                .and_then(|timed| timed.value.up)
                .map(u64::from),
        );
    }),
    (&gpu::PCIE_BYTES_TOTAL, |device, out| {
        let Some(pcie) = &device.snapshot.pcie else { return };
        each_direction(&pcie.value.bytes, |direction, bytes| {
            out.count(&[(DIRECTION, direction)], bytes.get());
        });
    }),
    (&gpu::PCIE_REPLAY_TOTAL, |device, out| {
        count(
            out,
            device
                .snapshot
                .pcie
                .as_ref()
                .and_then(|timed| timed.value.replays),
        );
    }),
    (&gpu::POWER_WATTS, |device, out| {
        one(
            out,
            device
                .snapshot
                .power
                .as_ref()
                .and_then(|timed| timed.value.power)
                .map(|watts| watts.get()),
        );
    }),
    (&gpu::ENERGY_JOULES_TOTAL, |device, out| {
        one(
            out,
            device
                .snapshot
                .power
                .as_ref()
                .and_then(|timed| timed.value.energy)
                .map(|joules| joules.get()),
        );
    }),
    (&gpu::TEMPERATURE_CELSIUS, |device, out| {
        let Some(thermal) = &device.snapshot.thermal else {
            return;
        };
        for (sensor, degrees) in [("gpu", thermal.value.gpu), ("memory", thermal.value.memory)] {
            if let Some(degrees) = degrees {
                out.with(&[(SENSOR, sensor)], degrees.get());
            }
        }
    }),
    (&gpu::CLOCK_HERTZ, |device, out| {
        let Some(clocks) = &device.snapshot.clocks else {
            return;
        };
        for (domain, clock) in ClockDomain::ALL.into_iter().zip(clocks.value.clocks) {
            if let Some(clock) = clock {
                out.with(&[("domain", domain.as_str())], clock.get());
            }
        }
    }),
    (&gpu::THROTTLE_SECONDS_TOTAL, |device, out| {
        let Some(clocks) = &device.snapshot.clocks else {
            return;
        };
        for ((_, reason), held) in THROTTLES.iter().zip(clocks.value.throttled) {
            if let Some(held) = held {
                out.with(
                    &[(REASON, reason)],
                    forewarm_nvml::Seconds::from_nanoseconds(held).get(),
                );
            }
        }
    }),
    (&gpu::ECC_ERRORS_TOTAL, |device, out| {
        let Some(ecc) = &device.snapshot.ecc else { return };
        labelled_count(out, (KIND, "corrected"), ecc.value.corrected);
        labelled_count(out, (KIND, "uncorrected"), ecc.value.uncorrected);
    }),
    (&gpu::REMAPPED_ROWS, |device, out| {
        let Some(rows) = device.snapshot.ecc.as_ref().and_then(|timed| timed.value.rows) else {
            return;
        };
        out.count(&[(KIND, "correctable")], u64::from(rows.correctable));
        out.count(&[(KIND, "uncorrectable")], u64::from(rows.uncorrectable));
        out.count(&[(KIND, "pending")], u64::from(rows.pending));
        out.count(&[(KIND, "failure")], u64::from(rows.failed));
    }),
    (&gpu::XID_TOTAL, |device, out| {
        for (xid, count) in &device.xids {
            out.count(&[(XID, itoa::Buffer::new().format(*xid))], *count);
        }
    }),
    (&gpu::RECOVERY_ACTION, |device, out| {
        count(
            out,
            device
                .snapshot
                .health
                .as_ref()
                .and_then(|timed| timed.value.recovery_action),
        );
    }),
    (&gpu::HEALTH_SCORE, |device, out| {
        one(out, reasons(device).map(health::score));
    }),
    (&gpu::HEALTH_REASON, |device, out| {
        for reason in reasons(device).unwrap_or_default() {
            out.with(&[(REASON, reason.as_str())], reason.weight());
        }
    }),
    (&gpu::FABRIC_INFO, |device, out| {
        let Some(fabric) = device
            .snapshot
            .health
            .as_ref()
            .and_then(|timed| timed.value.fabric)
        else {
            return;
        };
        if fabric.state == forewarm_nvml::FabricState::NotSupported {
            return;
        }
        let cluster = fabric.cluster.map(uuid).unwrap_or_default();
        let clique = if fabric.cluster.is_some() {
            fabric.clique.to_string()
        } else {
            String::new()
        };
        let labels = [
            ("cluster_uuid", cluster.as_str()),
            ("clique", clique.as_str()),
            ("state", fabric.state.as_str()),
        ];
        out.count(&labels, 1);
    }),
];

fn one(out: &mut Samples<'_>, value: Option<f64>) {
    if let Some(value) = value {
        out.value(value);
    }
}

fn count(out: &mut Samples<'_>, count: Option<u64>) {
    if let Some(count) = count {
        out.count(&[], count);
    }
}

fn labelled_count(out: &mut Samples<'_>, label: (&str, &str), count: Option<u64>) {
    if let Some(count) = count {
        out.count(&[label], count);
    }
}

pub(super) fn each_direction<T: Copy>(directions: &Directions<T>, mut write: impl FnMut(&'static str, T)) {
    for (direction, value) in [(Direction::Rx, directions.rx), (Direction::Tx, directions.tx)] {
        if let Some(value) = value {
            write(direction.as_str(), value);
        }
    }
}

fn reasons(device: &Device) -> Option<&[Reason]> {
    if device.is_unreachable() {
        return Some(&[Reason::Unreachable]);
    }
    device
        .snapshot
        .health
        .as_ref()
        .map(|timed| timed.value.reasons.as_slice())
}

fn info(device: &Device, out: &mut Samples<'_>) {
    let Some(identity) = &device.snapshot.identity else {
        return;
    };
    let facts = &identity.facts;
    let minor = facts.minor.map(|minor| minor.to_string()).unwrap_or_default();
    let capability = facts
        .compute_capability
        .map(|(major, minor)| format!("{major}.{minor}"))
        .unwrap_or_default();
    out.count(
        &[
            ("model", facts.model.as_str()),
            ("architecture", facts.architecture),
            ("driver_version", identity.driver_version.as_str()),
            ("pci_bus_id", facts.pci_bus_id.as_deref().unwrap_or_default()),
            ("serial", facts.serial.as_deref().unwrap_or_default()),
            ("minor", minor.as_str()),
            ("compute_capability", capability.as_str()),
        ],
        1,
    );
}

/// 8-4-4-4-12 in lower-case hexadecimal.
fn uuid(bytes: [u8; 16]) -> String {
    use std::fmt::Write as _;
    let mut out = String::with_capacity(36);
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            out.push('-');
        }
        let _infallible = write!(out, "{byte:02x}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_family_has_a_writer() {
        let written: Vec<_> = FAMILIES.iter().map(|(family, _)| family.name).collect();
        let known: Vec<_> = gpu::FAMILIES
            .iter()
            .map(|family| family.name)
            .filter(|name| *name != gpu::SAMPLE_AGE_SECONDS.name)
            .collect();
        assert_eq!(written, known);
    }

    #[test]
    fn a_cluster_is_spelt_as_a_uuid() {
        let bytes = std::array::from_fn(|at| u8::try_from(at).unwrap() * 17);
        assert_eq!(uuid(bytes), "00112233-4455-6677-8899-aabbccddeeff");
    }
}
