//! What one GPU reads at a moment: the control of the GPU with the profile's defaults filled in.
//!
//! Pure. Values are as a healthy driver would tell them: shares within 0 to 1, numbers finite.

use std::collections::BTreeMap;

use crate::control::{GpuControl, Throttle};
use crate::mig::{Device, Layout};
use crate::process::{Process, share};
use crate::profile::Profile;

/// Everything that holds until the control changes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Load {
    pub(crate) busy: f64,
    pub(crate) sm_active: f64,
    pub(crate) sm_occupancy: f64,
    pub(crate) tensor: f64,
    pub(crate) dram: f64,
    pub(crate) encoder: f64,
    pub(crate) decoder: f64,
    pub(crate) memory_used: u64,
    pub(crate) time_in_memory: bool,
    pub(crate) power_watts: f64,
    /// Draw of GPU and CPU together, where the board tells it.
    pub(crate) module_watts: Option<f64>,
    pub(crate) temperature: f64,
    pub(crate) memory_temperature: f64,
    pub(crate) sm_clock: u32,
    pub(crate) memory_clock: u32,
    pub(crate) video_clock: u32,
    pub(crate) performance_state: u32,
    pub(crate) nvlink_tx: f64,
    pub(crate) nvlink_rx: f64,
    pub(crate) pcie_tx: f64,
    pub(crate) pcie_rx: f64,
    pub(crate) links_down: Vec<u32>,
    pub(crate) throttle: Vec<Throttle>,
    /// Processes outside MIG devices.
    pub(crate) processes: Vec<Process>,
    /// Load of each GPU instance that has a compute instance, by id, as shares of the instance.
    pub(crate) instances: BTreeMap<u32, Load>,
    /// Processes in MIG devices, each with its GPU and compute instance.
    pub(crate) mig_processes: Vec<(Process, (u32, u32))>,
    /// Used frame buffer of each GPU instance, bytes.
    pub(crate) mig_memory_used: BTreeMap<u32, u64>,
}

fn rate(value: Option<f64>) -> f64 {
    value
        .filter(|rate| rate.is_finite() && *rate > 0.0)
        .unwrap_or(0.0)
}

fn alive(processes: &[Process], at_us: u64) -> impl Iterator<Item = &Process> {
    processes.iter().filter(move |process| process.alive_at(at_us))
}

/// Load of one GPU instance: its compute instances, each by its part of the instance.
fn instance(devices: &[&Device], profile: &Profile, at_us: u64) -> Load {
    let alone = |device: &Device| {
        let control = GpuControl {
            busy: device.control.busy,
            sm_active: device.control.sm_active,
            sm_occupancy: device.control.sm_occupancy,
            tensor: device.control.tensor,
            dram: device.control.dram,
            processes: device.control.processes.clone(),
            ..GpuControl::default()
        };
        Load::of(&control, &Layout::default(), profile, false, at_us)
    };
    let loads: Vec<(f64, Load)> = devices
        .iter()
        .map(|device| {
            (
                f64::from(device.slices) / f64::from(device.profile.slices),
                alone(device),
            )
        })
        .collect();
    let by_part = |part: fn(&Load) -> f64| {
        loads
            .iter()
            .map(|(weight, load)| weight * part(load))
            .sum::<f64>()
    };
    let control = GpuControl {
        busy: Some(loads.iter().map(|(_, load)| load.busy).fold(0.0, f64::max)),
        sm_active: Some(by_part(|load| load.sm_active)),
        sm_occupancy: Some(by_part(|load| load.sm_occupancy)),
        tensor: Some(by_part(|load| load.tensor)),
        // Compute instances of one GPU instance share its memory.
        dram: Some(loads.iter().map(|(_, load)| load.dram).sum()),
        ..GpuControl::default()
    };
    Load::of(&control, &Layout::default(), profile, false, at_us)
}

fn instances(layout: &Layout, profile: &Profile, at_us: u64) -> BTreeMap<u32, Load> {
    layout
        .instances
        .iter()
        .filter_map(|made| {
            let devices: Vec<&Device> = layout.devices_of(made.gi).collect();
            (!devices.is_empty()).then(|| (made.gi, instance(&devices, profile, at_us)))
        })
        .collect()
}

/// A share of the whole GPU: each instance by its part of the streaming multiprocessors.
fn over_instances(
    instances: &BTreeMap<u32, Load>,
    layout: &Layout,
    profile: &Profile,
    part: fn(&Load) -> f64,
) -> f64 {
    let whole = profile
        .mig_profiles
        .iter()
        .map(|table| table.sms)
        .max()
        .unwrap_or(1);
    instances
        .iter()
        .filter_map(|(gi, load)| Some((layout.instance(*gi)?.profile.sms, part(load))))
        .map(|(sms, part)| f64::from(sms) / f64::from(whole) * part)
        .sum()
}

fn mig_memory(layout: &Layout, at_us: u64) -> BTreeMap<u32, u64> {
    layout
        .instances
        .iter()
        .map(|made| {
            let of = |device: &Device| {
                device.control.memory_used_bytes.unwrap_or_else(|| {
                    alive(&device.control.processes, at_us)
                        .map(|process| process.memory_bytes)
                        .sum()
                })
            };
            let used: u64 = layout.devices_of(made.gi).map(of).sum();
            (made.gi, used.min(made.profile.memory_mib << 20))
        })
        .collect()
}

impl Load {
    /// Every process with its GPU and compute instance, if it is in a MIG device.
    pub(crate) fn all_processes(&self) -> impl Iterator<Item = (&Process, Option<(u32, u32)>)> {
        let whole = self.processes.iter().map(|process| (process, None));
        let cut = self
            .mig_processes
            .iter()
            .map(|(process, ids)| (process, Some(*ids)));
        whole.chain(cut)
    }

    /// Load of a GPU of `profile` under `control` at `at_us`: processes come and go by themselves.
    pub(crate) fn of(
        control: &GpuControl,
        layout: &Layout,
        profile: &Profile,
        time_in_memory: bool,
        at_us: u64,
    ) -> Self {
        let instances = instances(layout, profile, at_us);
        let processes: Vec<Process> = alive(&control.processes, at_us).cloned().collect();
        let sum = |part: fn(&Process) -> f64| share(processes.iter().map(part).map(share).sum());
        // Under MIG the whole is what its instances make of it, unless the control says otherwise.
        let over = |part: fn(&Self) -> f64| over_instances(&instances, layout, profile, part);
        let under_mig = !instances.is_empty();
        let busy = share(control.busy.unwrap_or_else(|| {
            let busiest = instances.values().map(|load| load.busy).fold(0.0, f64::max);
            sum(|process| process.sm).max(busiest)
        }));
        let sm_active = share(control.sm_active.unwrap_or_else(|| {
            if under_mig {
                over(|load| load.sm_active)
            } else {
                0.8 * busy
            }
        }));
        let between = |idle: f64, load: f64| idle + (load - idle) * busy;
        let clock = |idle: u32, max: u32| if busy > 0.0 { max } else { idle };
        let temperature = control
            .temperature_celsius
            .unwrap_or_else(|| between(profile.temperature.idle_celsius, profile.temperature.load_celsius));
        let clocks = &profile.clocks;
        let mig_processes: Vec<(Process, (u32, u32))> = layout
            .devices
            .iter()
            .flat_map(|device| {
                let ids = (device.gi, device.ci);
                alive(&device.control.processes, at_us).map(move |process| (process.clone(), ids))
            })
            .collect();
        let mig_memory_used = mig_memory(layout, at_us);
        let held: u64 = processes.iter().map(|process| process.memory_bytes).sum::<u64>()
            + mig_memory_used.values().sum::<u64>();
        let idles_in_p0 = clocks.memory_idle_mhz == clocks.memory_max_mhz;
        Self {
            busy,
            sm_active,
            sm_occupancy: share(control.sm_occupancy.unwrap_or(0.5 * sm_active)),
            tensor: share(control.tensor.unwrap_or(0.6 * sm_active)),
            dram: share(control.dram.unwrap_or_else(|| {
                if under_mig {
                    over(|load| load.dram)
                } else {
                    0.5 * busy
                }
            })),
            encoder: share(
                control
                    .encoder
                    .unwrap_or_else(|| sum(|process| process.encoder.unwrap_or(0.0))),
            ),
            decoder: share(
                control
                    .decoder
                    .unwrap_or_else(|| sum(|process| process.decoder.unwrap_or(0.0))),
            ),
            memory_used: control
                .memory_used_bytes
                .unwrap_or(held)
                .min(profile.memory_usable_bytes()),
            time_in_memory: control.encode_time_in_memory.unwrap_or(time_in_memory),
            power_watts: control
                .power_watts
                .unwrap_or_else(|| between(profile.power.idle_watts, profile.power.load_watts)),
            module_watts: profile
                .power
                .module_idle_watts
                .zip(profile.power.module_load_watts)
                .map(|(idle, load)| between(idle, load)),
            temperature,
            memory_temperature: control.memory_temperature_celsius.unwrap_or(temperature + 6.0),
            sm_clock: control
                .sm_clock_mhz
                .unwrap_or_else(|| clock(clocks.sm_idle_mhz, clocks.sm_max_mhz)),
            memory_clock: control
                .memory_clock_mhz
                .unwrap_or_else(|| clock(clocks.memory_idle_mhz, clocks.memory_max_mhz)),
            video_clock: clock(clocks.video_idle_mhz, clocks.video_max_mhz),
            performance_state: control.performance_state.unwrap_or(if busy > 0.0 || idles_in_p0 {
                0
            } else {
                8
            }),
            nvlink_tx: rate(control.nvlink_tx_bytes_per_second),
            nvlink_rx: rate(control.nvlink_rx_bytes_per_second),
            pcie_tx: rate(control.pcie_tx_bytes_per_second),
            pcie_rx: rate(control.pcie_rx_bytes_per_second),
            links_down: control.nvlink_links_down.clone(),
            throttle: control.throttle.clone(),
            processes,
            instances,
            mig_processes,
            mig_memory_used,
        }
    }

    /// Clock event reasons mask; an idle GPU says so.
    pub(crate) fn throttle_bits(&self) -> u64 {
        let idle = u64::from(self.busy <= 0.0);
        self.throttle
            .iter()
            .fold(idle, |bits, reason| bits | reason.bit())
    }

    /// Whether `link` carries traffic.
    pub(crate) fn link_up(&self, link: u32) -> bool {
        !self.links_down.contains(&link)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_saturates_and_shares_stay_in_range() {
        let profile = Profile::load("h100-sxm").unwrap();
        let control = GpuControl {
            busy: Some(3.5),
            sm_active: Some(f64::NAN),
            tensor: Some(-1.0),
            ..GpuControl::default()
        };
        let load = Load::of(&control, &Layout::default(), &profile, false, 0);
        assert!((load.busy - 1.0).abs() < 1e-9);
        assert!(load.sm_active.abs() < 1e-9 && load.tensor.abs() < 1e-9);
        assert!((load.power_watts - profile.power.load_watts).abs() < 1e-9);
    }

    #[test]
    fn an_idle_gpu_says_so() {
        let load = Load::of(
            &GpuControl::default(),
            &Layout::default(),
            &Profile::load("t4").unwrap(),
            false,
            0,
        );
        assert_eq!(load.throttle_bits(), 1);
        assert_eq!(load.performance_state, 8);
        assert_eq!(load.memory_used, 0);
    }

    #[test]
    fn used_memory_defaults_to_what_processes_hold_and_never_exceeds_the_board() {
        let profile = Profile::load("t4").unwrap();
        let held = |bytes| GpuControl {
            processes: vec![Process {
                pid: 1,
                memory_bytes: bytes,
                ..Process::default()
            }],
            ..GpuControl::default()
        };
        assert_eq!(
            Load::of(&held(1 << 30), &Layout::default(), &profile, false, 0).memory_used,
            1 << 30
        );
        assert_eq!(
            Load::of(&held(1 << 40), &Layout::default(), &profile, false, 0).memory_used,
            profile.memory_usable_bytes()
        );
    }

    #[test]
    fn several_processes_add_up_to_a_full_gpu_at_most() {
        let profile = Profile::load("t4").unwrap();
        let shared = |shares: &[f64]| GpuControl {
            processes: shares
                .iter()
                .zip(1..)
                .map(|(sm, pid)| Process {
                    pid,
                    sm: *sm,
                    ..Process::default()
                })
                .collect(),
            ..GpuControl::default()
        };
        let busy = |shares: &[f64]| Load::of(&shared(shares), &Layout::default(), &profile, false, 0).busy;
        assert!((busy(&[0.2, 0.3]) - 0.5).abs() < 1e-9);
        assert!((busy(&[0.7, 0.6, 0.9]) - 1.0).abs() < 1e-9);
    }
}
