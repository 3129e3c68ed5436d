//! What a loaded library knows: settings, control, GPUs, samples and event sets.
//!
//! Invariants: handles are checked before use; sample and event-set tokens are never reused, so a freed one is unknown,
//! not another's. There is no thread of our own: whoever calls next looks at the control file, at most
//! [`LOOK_EVERY`] apart.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use crate::code::Code;
use crate::control::{Control, Effect, Garbage, GpuControl};
use crate::control_file::{ControlFile, epoch_us};
use crate::event::{self, Event, EventKind, EventSet, SystemSet};
use crate::fault::Faults;
use crate::gpu::{Gpu, Integrals};
use crate::handle::Handle;
use crate::identity;
use crate::mig;
use crate::settings::Resolved;

/// Time between looks at the control file: well within the promised 100 ms.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(10);

/// System events: a GPU lost its driver, a GPU got one.
pub(crate) const UNBIND: u64 = 1;
pub(crate) const BIND: u64 = 2;

/// A filled GPM sample.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pub(crate) target: Target,
    /// GPU instance it was taken of.
    pub(crate) gi: Option<u32>,
    pub(crate) at_us: u64,
    pub(crate) integrals: Integrals,
}

/// What a call is about: a GPU, or a MIG device of it by its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) gpu: usize,
    pub(crate) mig: Option<u32>,
}

impl Target {
    pub(crate) const fn gpu(gpu: usize) -> Self {
        Self { gpu, mig: None }
    }
}

/// What faults do to the answer of a call that goes through.
#[derive(Debug, Clone, Default)]
pub(crate) struct Struck {
    pub(crate) garbage: Option<Garbage>,
    /// Items by which lists grow between sizing and filling.
    pub(crate) growth: u32,
    /// Effects on single entries, by field or metric id.
    pub(crate) entries: Vec<(u32, Effect)>,
}

/// Everything behind the lock.
pub(crate) struct State {
    pub(crate) settings: Resolved,
    pub(crate) control: Control,
    /// Every GPU of the node, bound to the driver or not.
    pub(crate) gpus: Vec<Gpu>,
    /// The GPUs that this client sees, by NVML index: those bound when it initialised.
    pub(crate) order: Vec<usize>,
    pub(crate) samples: BTreeMap<usize, Option<Sample>>,
    pub(crate) event_sets: BTreeMap<usize, EventSet>,
    pub(crate) system_sets: BTreeMap<usize, SystemSet>,
    pub(crate) now_us: u64,
    faults: Faults,
    /// GPUs that were unbound while this client saw them: lost to it, bound again or not.
    pub(crate) gone: BTreeSet<usize>,
    /// Which MIG device each MIG handle was given out for, by GPU and MIG index.
    pub(crate) given: BTreeMap<(usize, u32), String>,
    file: Option<ControlFile>,
    pub(crate) looked: Option<Instant>,
    next_token: usize,
    /// The driver went away while a client held it: that client has to shut down and start anew.
    pub(crate) withdrawn: bool,
}

impl State {
    pub(crate) fn new(settings: Resolved) -> Self {
        let now_us = if settings.virtual_time { 0 } else { epoch_us() };
        let gpus: Vec<Gpu> = (0..settings.gpus)
            .filter_map(|index| {
                let uuid = identity::gpu_uuid(&settings.uuid_seed, index);
                Some(Gpu::new(index, uuid, settings.profile_of(index)?, now_us))
            })
            .collect();
        Self {
            file: settings.control.clone().map(ControlFile::new),
            settings,
            control: Control::default(),
            order: (0..gpus.len()).collect(),
            gpus,
            samples: BTreeMap::new(),
            event_sets: BTreeMap::new(),
            system_sets: BTreeMap::new(),
            now_us,
            faults: Faults::default(),
            gone: BTreeSet::new(),
            given: BTreeMap::new(),
            looked: None,
            // Nowhere near null, and odd multiples of 16 as an allocator would give.
            next_token: 0x4e56_0010,
            withdrawn: false,
        }
    }

    pub(crate) fn driver_loaded(&self) -> bool {
        self.control.driver_loaded.unwrap_or(true)
    }

    /// Brings time and control up to date; true if there is a new control.
    pub(crate) fn refresh(&mut self) -> bool {
        if !self.settings.virtual_time {
            self.now_us = self.now_us.max(epoch_us());
        }
        let due =
            self.settings.virtual_time || self.looked.is_none_or(|looked| looked.elapsed() >= LOOK_EVERY);
        if !due {
            return false;
        }
        self.looked = Some(Instant::now());
        let Some(change) = self.file.as_mut().and_then(ControlFile::changed) else {
            return false;
        };
        if self.settings.virtual_time {
            let begins = self.now_us == 0;
            let told = change.control.now_ms.unwrap_or(0);
            self.now_us = self.now_us.max(told.saturating_mul(1000));
            if begins {
                self.gpus.iter_mut().for_each(|gpu| gpu.begin(self.now_us));
            }
        }
        let from_us = if self.settings.virtual_time {
            self.now_us
        } else {
            change.written_us.min(self.now_us)
        };
        self.control = change.control;
        self.withdrawn |= !self.driver_loaded();
        self.faults.replace(&self.control.faults, from_us);
        for at in 0..self.gpus.len() {
            self.apply(at, from_us);
        }
        true
    }

    /// Puts the control of one GPU in force and tells what happened by it.
    fn apply(&mut self, at: usize, from_us: u64) {
        let gpu = &mut self.gpus[at];
        let idle = GpuControl::default();
        let control = self.control.gpus.get(&gpu.index).unwrap_or(&idle);
        let (was_bound, bound) = (gpu.is_bound(), control.bound.unwrap_or(true));
        let news = gpu.apply(
            control,
            self.settings.driver.legacy_mig_uuids(),
            self.control.encode_time_in_memory,
            from_us,
        );
        for refused in news.refused {
            // Nothing to do if stderr is closed.
            _ = writeln!(io::stderr(), "fake-nvml: GPU {}: {refused}", gpu.index);
        }
        if news.layout_changed {
            let event = Event::of(at, EventKind::MigConfig, 0);
            event::deliver(&mut self.event_sets, event);
        }
        for entry in &news.events {
            event::deliver(&mut self.event_sets, Event::told(at, entry));
        }
        if was_bound != bound {
            let id = identity::pci_bus(gpu.index) << 8;
            event::deliver_system(&mut self.system_sets, if bound { BIND } else { UNBIND }, id);
        }
        if !bound && self.order.contains(&at) {
            self.gone.insert(at);
        }
    }

    /// What the device handle `device` stands for, if that exists now.
    pub(crate) fn target<T>(&self, device: *mut T) -> Result<Target, Code> {
        match Handle::of(device) {
            Some(Handle::Gpu(gpu)) if self.order.contains(&gpu) => Ok(Target::gpu(gpu)),
            // A handle of a device that was destroyed is invalid until the index is asked for anew.
            Some(Handle::Mig(gpu, index)) if self.order.contains(&gpu) => self.gpus[gpu]
                .mig_device(index)
                .filter(|device| self.given.get(&(gpu, index)) == Some(&device.uuid))
                .map(|_| Target {
                    gpu,
                    mig: Some(index),
                })
                .ok_or(Code::INVALID_ARGUMENT),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    /// The GPU behind `device`, which is not a MIG device.
    pub(crate) fn gpu_at<T>(&self, device: *mut T) -> Result<usize, Code> {
        match self.target(device)? {
            Target { gpu, mig: None } => Ok(gpu),
            Target { .. } => Err(Code::INVALID_ARGUMENT),
        }
    }

    /// Gives out the handle of a MIG device that exists.
    pub(crate) fn give_mig(&mut self, gpu: usize, index: u32) -> Result<Handle, Code> {
        let device = self.gpus[gpu].mig_device(index).ok_or(Code::NOT_FOUND)?;
        self.given.insert((gpu, index), device.uuid.clone());
        Ok(Handle::Mig(gpu, index))
    }

    /// The GPU that has NVML index `index` now.
    pub(crate) fn by_index(&self, index: u32) -> Option<usize> {
        self.order.get(index as usize).copied()
    }

    /// A token that was never given before.
    pub(crate) fn token(&mut self) -> usize {
        self.next_token += 32;
        self.next_token
    }

    /// What faults do to `call` on `target` now.
    pub(crate) fn strike(&mut self, target: Option<Target>, call: &str, counted: bool) -> Vec<Effect> {
        self.faults.strike(self.named(target), call, self.now_us, counted)
    }

    /// What faults do to single entries of `call` on `target` now.
    pub(crate) fn strike_entries(&mut self, target: Option<Target>, call: &str) -> Vec<(u32, Effect)> {
        self.faults.strike_entries(self.named(target), call, self.now_us)
    }

    /// GPU and MIG index of a target, as the control file names them.
    fn named(&self, target: Option<Target>) -> (Option<u32>, Option<u32>) {
        let index = target.map(|target| self.gpus[target.gpu].index);
        (index, target.and_then(|target| target.mig))
    }

    /// Codes that a call meets before it is answered.
    pub(crate) fn refusal(&self, target: Option<Target>, call: &str) -> Result<(), Code> {
        let Some(target) = target else {
            return Ok(());
        };
        if self.gone.contains(&target.gpu) {
            return Err(Code::GPU_IS_LOST);
        }
        let enabled = self.gpus[target.gpu].layout.enabled;
        let profile = &self.gpus[target.gpu].profile;
        if !mig::answered(call, target.mig.is_some(), enabled)
            || profile
                .unsupported_calls
                .iter()
                .any(|unsupported| unsupported == call)
            || self.settings.driver.dropped(profile.architecture, call)
        {
            return Err(Code::NOT_SUPPORTED);
        }
        Ok(())
    }
}
