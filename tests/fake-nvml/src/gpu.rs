//! State of one GPU over time: the present load, integrals of it, and recent history.
//!
//! Invariants: time never goes back; an integral never goes back; a total is the highest one seen. History is
//! kept for [`HISTORY_US`], bounded in length, and serves sample rings and process samples.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::accounting::Accounts;
use crate::control::{
    EccErrors, FabricControl, GpuControl, NvlinkErrors, RemappedRows, RetiredPages, Throttle,
};
use crate::event::{EventEntry, EventKind, added};
use crate::load::Load;
use crate::mig::{self, Layout};
use crate::process::Process;
use crate::profile::Profile;

/// How far back sample rings reach, µs.
pub(crate) const HISTORY_US: u64 = 20_000_000;

/// Loads kept at most, should a test rewrite the control very often.
const HISTORY_LENGTH: usize = 2048;

/// Integrals over time since driver load. Shares are in share × seconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Integrals {
    pub(crate) seconds: f64,
    pub(crate) busy: f64,
    pub(crate) sm_active: f64,
    pub(crate) sm_occupancy: f64,
    pub(crate) tensor: f64,
    pub(crate) dram: f64,
    pub(crate) encoder: f64,
    pub(crate) decoder: f64,
    pub(crate) energy_joules: f64,
    pub(crate) nvlink_tx_bytes: f64,
    pub(crate) nvlink_rx_bytes: f64,
    pub(crate) pcie_tx_bytes: f64,
    pub(crate) pcie_rx_bytes: f64,
    /// Seconds by throttle reason, in the order of [`Throttle::ALL`].
    pub(crate) throttled: [f64; Throttle::ALL.len()],
    /// Seconds below full utilisation because the GPU had nothing to do.
    pub(crate) low_utilization: f64,
}

impl Integrals {
    fn advance(&mut self, load: &Load, seconds: f64) {
        self.seconds += seconds;
        self.busy += load.busy * seconds;
        self.sm_active += load.sm_active * seconds;
        self.sm_occupancy += load.sm_occupancy * seconds;
        self.tensor += load.tensor * seconds;
        self.dram += load.dram * seconds;
        self.encoder += load.encoder * seconds;
        self.decoder += load.decoder * seconds;
        self.energy_joules += load.power_watts.max(0.0) * seconds;
        self.nvlink_tx_bytes += load.nvlink_tx * seconds;
        self.nvlink_rx_bytes += load.nvlink_rx * seconds;
        self.pcie_tx_bytes += load.pcie_tx * seconds;
        self.pcie_rx_bytes += load.pcie_rx * seconds;
        self.low_utilization += (1.0 - load.busy) * seconds;
        for (total, reason) in self.throttled.iter_mut().zip(Throttle::ALL) {
            if load.throttle.contains(&reason) {
                *total += seconds;
            }
        }
    }

    /// Nanoseconds held down for `reason` so far.
    pub(crate) fn throttled_ns(&self, reason: Throttle) -> u64 {
        let at = Throttle::ALL
            .iter()
            .position(|known| *known == reason)
            .unwrap_or_default();
        (self.throttled[at] * 1e9) as u64
    }
}

/// Totals since driver load.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) nvlink: NvlinkErrors,
    pub(crate) ecc: EccErrors,
    pub(crate) remapped: RemappedRows,
    pub(crate) retired: RetiredPages,
    pub(crate) pcie_replays: u64,
}

impl Totals {
    /// Raises each total to what `control` says; flags follow it.
    fn raise(&mut self, control: &GpuControl) {
        fn up<N: Ord + Copy>(total: &mut N, to: N) {
            *total = (*total).max(to);
        }
        if let Some(errors) = &control.nvlink_errors {
            up(&mut self.nvlink.replay, errors.replay);
            up(&mut self.nvlink.recovery, errors.recovery);
            up(&mut self.nvlink.crc_flit, errors.crc_flit);
            up(&mut self.nvlink.crc_data, errors.crc_data);
            up(&mut self.nvlink.ecc_data, errors.ecc_data);
            up(&mut self.nvlink.recovery_failed, errors.recovery_failed);
            up(&mut self.nvlink.effective, errors.effective);
            up(&mut self.nvlink.symbol, errors.symbol);
        }
        if let Some(errors) = &control.ecc {
            up(&mut self.ecc.corrected, errors.corrected);
            up(&mut self.ecc.uncorrected, errors.uncorrected);
            up(&mut self.ecc.sram_corrected, errors.sram_corrected);
            up(&mut self.ecc.sram_uncorrected, errors.sram_uncorrected);
            self.ecc.sram_threshold_exceeded = errors.sram_threshold_exceeded;
        }
        if let Some(rows) = &control.remapped_rows {
            up(&mut self.remapped.correctable, rows.correctable);
            up(&mut self.remapped.uncorrectable, rows.uncorrectable);
            self.remapped.pending = rows.pending;
            self.remapped.failure = rows.failure;
        }
        if let Some(pages) = &control.retired_pages {
            up(&mut self.retired.single_bit, pages.single_bit);
            up(&mut self.retired.double_bit, pages.double_bit);
            self.retired.pending = pages.pending;
        }
        up(&mut self.pcie_replays, control.pcie_replays.unwrap_or(0));
    }
}

/// What a new control brings about beside readings.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct News {
    /// Events it adds, Xids among them.
    pub(crate) events: Vec<EventEntry>,
    /// GPU instances, MIG devices or the mode are others now.
    pub(crate) layout_changed: bool,
    /// Parts of the MIG layout that cannot be.
    pub(crate) refused: Vec<String>,
}

/// One simulated GPU.
#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    pub(crate) index: u32,
    pub(crate) uuid: String,
    pub(crate) profile: Arc<Profile>,
    pub(crate) load: Arc<Load>,
    pub(crate) integrals: Integrals,
    pub(crate) layout: Arc<Layout>,
    /// Integrals of each GPU instance that has a compute instance, since the instance was made.
    pub(crate) instances: BTreeMap<u32, Integrals>,
    pub(crate) totals: Totals,
    pub(crate) recovery_action: u32,
    pub(crate) fabric: FabricControl,
    /// Loads with the moment each began, oldest first; the last is the present one.
    pub(crate) history: VecDeque<(u64, Arc<Load>)>,
    /// What the control file says about this GPU.
    pub(crate) control: Arc<GpuControl>,
    pub(crate) accounts: Accounts,
    /// Loads to come, with the moment each begins: processes start and exit by themselves.
    coming: VecDeque<(u64, Arc<Load>)>,
    at_us: u64,
}

impl Gpu {
    pub(crate) fn new(index: u32, uuid: String, profile: Arc<Profile>, at_us: u64) -> Self {
        let load = Arc::new(Load::of(
            &GpuControl::default(),
            &Layout::default(),
            &profile,
            false,
            at_us,
        ));
        Self {
            index,
            uuid,
            profile,
            history: VecDeque::from([(at_us, Arc::clone(&load))]),
            load,
            integrals: Integrals::default(),
            layout: Arc::default(),
            instances: BTreeMap::new(),
            totals: Totals::default(),
            recovery_action: 0,
            fabric: FabricControl::default(),
            control: Arc::default(),
            accounts: Accounts::default(),
            coming: VecDeque::new(),
            at_us,
        }
    }

    /// Starts the clock at `at_us` without integrating what was before it: the driver was loaded then.
    pub(crate) fn begin(&mut self, at_us: u64) {
        self.at_us = at_us;
        self.history = VecDeque::from([(at_us, Arc::clone(&self.load))]);
    }

    /// Integrates the load up to `now_us`, over every process that comes or goes on the way.
    pub(crate) fn advance(&mut self, now_us: u64) {
        while let Some((at_us, load)) = self.coming.pop_front_if(|(at_us, _)| *at_us <= now_us) {
            self.integrate(at_us);
            self.begin_load(load);
        }
        self.integrate(now_us);
    }

    fn integrate(&mut self, now_us: u64) {
        if now_us > self.at_us {
            let seconds = (now_us - self.at_us) as f64 / 1e6;
            if self.control.accounting {
                let load = Arc::clone(&self.load);
                let processes = load.all_processes().map(|(process, _)| process);
                self.accounts.book(processes, self.at_us, now_us);
            }
            self.at_us = now_us;
            self.integrals.advance(&self.load, seconds);
            for (gi, load) in &self.load.instances {
                self.instances.entry(*gi).or_default().advance(load, seconds);
            }
        }
    }

    fn begin_load(&mut self, load: Arc<Load>) {
        if load != self.load {
            self.history.push_back((self.at_us, Arc::clone(&load)));
            self.load = load;
        }
        let horizon = self.at_us.saturating_sub(HISTORY_US);
        // The load in force at the horizon stays, so the second one must be past it before the first can go.
        while self.history.len() > HISTORY_LENGTH
            || self.history.get(1).is_some_and(|(since, _)| *since <= horizon)
        {
            self.history.pop_front();
        }
    }

    /// Puts `control` in force from `from_us` on; returns what it brings about.
    pub(crate) fn apply(
        &mut self,
        control: &GpuControl,
        legacy_mig_uuids: bool,
        time_in_memory: bool,
        from_us: u64,
    ) -> News {
        self.advance(from_us);
        let before = std::mem::replace(&mut self.control, Arc::new(control.clone()));
        let mut news = News::default();
        if before.mig != control.mig {
            let layout = Layout::of(control.mig.as_ref(), &self.profile, &self.uuid, legacy_mig_uuids);
            news.layout_changed = layout.shape() != self.layout.shape();
            news.refused.clone_from(&layout.refused);
            let kept = |gi: &u32| {
                layout.instance(*gi).is_some() && layout.instance(*gi) == self.layout.instance(*gi)
            };
            self.instances.retain(|gi, _| kept(gi));
            self.layout = Arc::new(layout);
        }
        if before.counters.as_ref().map_or(0, |counters| counters.resets)
            != control.counters.as_ref().map_or(0, |counters| counters.resets)
        {
            self.integrals = Integrals::default();
            self.totals = Totals::default();
        }
        let (layout, profile) = (Arc::clone(&self.layout), Arc::clone(&self.profile));
        let load_at = |at_us| Arc::new(Load::of(control, &layout, &profile, time_in_memory, at_us));
        self.begin_load(load_at(self.at_us));
        let in_mig = layout.devices.iter().flat_map(|device| &device.control.processes);
        let mut turns: Vec<u64> = control
            .processes
            .iter()
            .chain(in_mig)
            .flat_map(Process::turns)
            .collect();
        turns.retain(|turn| *turn > self.at_us);
        turns.sort_unstable();
        turns.dedup();
        self.coming = turns.into_iter().map(|turn| (turn, load_at(turn))).collect();
        self.totals.raise(control);
        self.recovery_action = control.recovery_action.unwrap_or(0);
        self.fabric = control.fabric.clone().unwrap_or_default();
        let xid = |data: &u64| EventEntry {
            kind: EventKind::Xid,
            data: *data,
            gi: None,
            ci: None,
        };
        news.events = added(&before.xids, &control.xids)
            .iter()
            .map(xid)
            .chain(added(&before.events, &control.events).iter().cloned())
            .collect();
        news
    }

    /// Whether the driver has this GPU.
    pub(crate) fn is_bound(&self) -> bool {
        self.control.bound.unwrap_or(true)
    }

    /// The MIG device with MIG index `index`.
    pub(crate) fn mig_device(&self, index: u32) -> Option<&mig::Device> {
        self.layout.devices.iter().find(|device| device.index == index)
    }

    /// Load that was in force at `at_us`, if history reaches back so far.
    pub(crate) fn load_at(&self, at_us: u64) -> Option<&Load> {
        let after = self.history.partition_point(|(since, _)| *since <= at_us);
        after
            .checked_sub(1)
            .and_then(|at| self.history.get(at))
            .map(|(_, load)| &**load)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gpu() -> Gpu {
        Gpu::new(0, String::new(), Arc::new(Profile::load("h100-sxm").unwrap()), 0)
    }

    #[test]
    fn integrals_are_rate_times_time() {
        let mut gpu = gpu();
        let control = GpuControl {
            nvlink_tx_bytes_per_second: Some(1e9),
            power_watts: Some(500.0),
            throttle: vec![Throttle::SwPowerCap],
            ..GpuControl::default()
        };
        gpu.apply(&control, false, false, 0);
        gpu.advance(2_000_000);
        gpu.apply(&GpuControl::default(), false, false, 3_000_000);
        gpu.advance(10_000_000);
        assert!((gpu.integrals.nvlink_tx_bytes - 3e9).abs() < 1.0);
        assert!((gpu.integrals.energy_joules - (1500.0 + 7.0 * gpu.profile.power.idle_watts)).abs() < 1e-6);
        assert_eq!(gpu.integrals.throttled_ns(Throttle::SwPowerCap), 3_000_000_000);
    }

    #[test]
    fn xids_are_new_once() {
        let mut gpu = gpu();
        let mut deliver = |xids: &[u64]| {
            gpu.apply(
                &GpuControl {
                    xids: xids.to_vec(),
                    ..GpuControl::default()
                },
                false,
                false,
                0,
            )
            .events
            .iter()
            .map(|event| event.data)
            .collect::<Vec<u64>>()
        };
        assert_eq!(deliver(&[79]), [79]);
        assert!(deliver(&[79]).is_empty());
        assert_eq!(deliver(&[79, 31, 79]), [31, 79]);
        assert!(deliver(&[]).is_empty());
        assert_eq!(deliver(&[79]), [79]);
        assert_eq!(deliver(&[63]), [63]);
    }

    #[test]
    fn history_answers_for_the_past_and_stays_bounded() {
        let mut gpu = gpu();
        for step in 0..5000_u64 {
            let control = GpuControl {
                busy: Some((step % 100) as f64 / 100.0),
                ..GpuControl::default()
            };
            gpu.apply(&control, false, false, step * 100_000);
        }
        assert!(gpu.history.len() <= HISTORY_LENGTH);
        let now = 4999 * 100_000;
        let then = gpu.load_at(now - 10_000_000).unwrap();
        assert!((then.busy - 0.99).abs() < 1e-9);
        assert!(gpu.load_at(now - 2 * HISTORY_US).is_none());
    }

    proptest! {
        #[test]
        fn counters_never_go_back(
            steps in prop::collection::vec((0u64..5_000_000, 0.0f64..2e12, 0.0f64..900.0, 0u64..50, any::<bool>()), 1..40)
        ) {
            let mut gpu = gpu();
            let (mut now, mut before) = (0u64, (gpu.integrals.clone(), gpu.totals.clone()));
            for (wait, rate, watts, errors, back) in steps {
                // Time that is handed in may go back; the GPU's own never does.
                now = if back { now.saturating_sub(wait) } else { now + wait };
                let control = GpuControl {
                    nvlink_rx_bytes_per_second: Some(rate),
                    pcie_tx_bytes_per_second: Some(rate / 3.0),
                    power_watts: Some(watts),
                    ecc: Some(EccErrors { corrected: errors, ..EccErrors::default() }),
                    ..GpuControl::default()
                };
                gpu.apply(&control, false, false, now);
                gpu.advance(now + 1000);
                let after = (gpu.integrals.clone(), gpu.totals.clone());
                prop_assert!(after.0.nvlink_rx_bytes >= before.0.nvlink_rx_bytes);
                prop_assert!(after.0.pcie_tx_bytes >= before.0.pcie_tx_bytes);
                prop_assert!(after.0.energy_joules >= before.0.energy_joules);
                prop_assert!(after.1.ecc.corrected >= before.1.ecc.corrected);
                before = after;
            }
        }
    }
}
