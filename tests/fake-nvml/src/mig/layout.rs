//! A layout: which GPU instances and MIG devices there are. Pure.
//!
//! What does not fit the model (an unknown profile, a taken placement, an index used twice) is left out and named, as
//! a driver would have refused to create it.

use std::collections::BTreeSet;

use super::control::{MigControl, MigDeviceControl};
use super::table::MigProfile;
use crate::handle::MIG_DEVICES;
use crate::identity;
use crate::profile::Profile;

/// Highest GPU instance id and compute instance id that exist.
const MOST_GI: u32 = 14;
const MOST_CI: u32 = 7;

/// A GPU instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Instance {
    pub(crate) gi: u32,
    pub(crate) profile: MigProfile,
    pub(crate) start: u32,
}

/// A MIG device: a compute instance with the GPU instance it is in.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Device {
    pub(crate) index: u32,
    pub(crate) gi: u32,
    pub(crate) ci: u32,
    pub(crate) uuid: String,
    /// Name with the GPU's, for example `NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb`.
    pub(crate) name: String,
    pub(crate) slices: u32,
    pub(crate) profile: MigProfile,
    pub(crate) control: MigDeviceControl,
}

/// MIG of one GPU.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Layout {
    pub(crate) enabled: bool,
    pub(crate) pending: bool,
    pub(crate) instances: Vec<Instance>,
    pub(crate) devices: Vec<Device>,
    /// What was left out, and why.
    pub(crate) refused: Vec<String>,
}

impl Layout {
    /// Layout of a GPU of `profile` named `gpu_uuid` under `control`; `legacy_uuids` as before R470.
    pub(crate) fn of(
        control: Option<&MigControl>,
        profile: &Profile,
        gpu_uuid: &str,
        legacy_uuids: bool,
    ) -> Self {
        let Some(control) = control.filter(|_| profile.mig) else {
            return Self::default();
        };
        let enabled = control.enabled.unwrap_or(true);
        let mut layout = Self {
            enabled,
            pending: control.pending.unwrap_or(enabled),
            ..Self::default()
        };
        if !enabled {
            return layout;
        }
        for asked in &control.devices {
            if let Err(why) = layout.add(asked, profile, gpu_uuid, legacy_uuids) {
                layout
                    .refused
                    .push(format!("MIG device gi {} ci {:?}: {why}", asked.gi, asked.ci));
            }
        }
        layout
    }

    fn add(
        &mut self,
        asked: &MigDeviceControl,
        profile: &Profile,
        gpu_uuid: &str,
        legacy_uuids: bool,
    ) -> Result<(), String> {
        let instance = self.instance_for(asked, profile)?;
        let (gi, table) = (instance.gi, instance.profile.clone());
        if !self.instances.contains(&instance) {
            self.instances.push(instance);
        }
        let Some(ci) = asked.ci else {
            return Ok(());
        };
        if ci > MOST_CI
            || self
                .devices
                .iter()
                .any(|device| (device.gi, device.ci) == (gi, ci))
        {
            return Err("no such compute instance id, or it is taken".to_owned());
        }
        let slices = asked.compute_slices.unwrap_or(table.slices);
        let taken: u32 = self
            .devices
            .iter()
            .filter(|device| device.gi == gi)
            .map(|device| device.slices)
            .sum();
        if slices == 0 || taken + slices > table.slices {
            return Err(format!("{slices} compute slices do not fit"));
        }
        let index = asked
            .index
            .unwrap_or_else(|| self.devices.last().map_or(0, |before| before.index + 1));
        if index >= MIG_DEVICES || self.devices.iter().any(|device| device.index == index) {
            return Err(format!("index {index} does not exist, or is taken"));
        }
        let resource = if slices < table.slices {
            format!("{slices}c.{}", table.name)
        } else {
            table.name.clone()
        };
        self.devices.push(Device {
            index,
            gi,
            ci,
            uuid: asked.uuid.clone().unwrap_or_else(|| {
                if legacy_uuids {
                    format!("MIG-{gpu_uuid}/{gi}/{ci}")
                } else {
                    identity::mig_uuid(gpu_uuid, gi, ci)
                }
            }),
            name: format!("{} MIG {resource}", profile.name),
            slices,
            profile: table,
            control: asked.clone(),
        });
        Ok(())
    }

    /// The GPU instance that a device is in: there already, or placed now.
    fn instance_for(&self, asked: &MigDeviceControl, profile: &Profile) -> Result<Instance, String> {
        if let Some(there) = self.instances.iter().find(|instance| instance.gi == asked.gi) {
            return if there.profile.name == asked.profile {
                Ok(there.clone())
            } else {
                Err(format!("the instance is a {}", there.profile.name))
            };
        }
        let table = profile
            .mig_profiles
            .iter()
            .find(|table| table.name == asked.profile)
            .ok_or_else(|| format!("{} has no profile {:?}", profile.name, asked.profile))?;
        let taken: BTreeSet<u32> = self
            .instances
            .iter()
            .flat_map(|instance| instance.start..instance.start + instance.profile.size)
            .collect();
        let fits = |start: &u32| (*start..*start + table.size).all(|slice| !taken.contains(&slice));
        let start = match asked.start {
            Some(start) => Some(start).filter(|start| table.starts.contains(start) && fits(start)),
            None => table.starts.iter().copied().find(fits),
        };
        if asked.gi > MOST_GI {
            return Err(format!("GPU instance ids end at {MOST_GI}"));
        }
        // Clients size their lists by this number.
        let made = self
            .instances
            .iter()
            .filter(|instance| instance.profile.id == table.id);
        if made.count() >= table.instances as usize {
            return Err(format!("at most {} of {} fit", table.instances, table.name));
        }
        Ok(Instance {
            gi: asked.gi,
            profile: table.clone(),
            start: start.ok_or("no free placement")?,
        })
    }

    pub(crate) fn instance(&self, gi: u32) -> Option<&Instance> {
        self.instances.iter().find(|instance| instance.gi == gi)
    }

    pub(crate) fn devices_of(&self, gi: u32) -> impl Iterator<Item = &Device> {
        self.devices.iter().filter(move |device| device.gi == gi)
    }

    /// What clients can tell apart: changes of load are no change of layout.
    pub(crate) fn shape(&self) -> impl PartialEq {
        let instances: Vec<(u32, u32, u32)> = self
            .instances
            .iter()
            .map(|instance| (instance.gi, instance.profile.id, instance.start))
            .collect();
        let devices: Vec<(u32, u32, u32, u32, String)> = self
            .devices
            .iter()
            .map(|device| {
                (
                    device.index,
                    device.gi,
                    device.ci,
                    device.slices,
                    device.uuid.clone(),
                )
            })
            .collect();
        (self.enabled, self.pending, instances, devices)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn device(gi: u32, ci: u32, profile: &str) -> MigDeviceControl {
        MigDeviceControl {
            gi,
            ci: Some(ci),
            profile: profile.to_owned(),
            ..MigDeviceControl::default()
        }
    }

    fn layout(devices: Vec<MigDeviceControl>) -> Layout {
        let profile = Profile::load("a100-sxm4-40gb").unwrap();
        let control = MigControl {
            devices,
            ..MigControl::default()
        };
        Layout::of(Some(&control), &profile, "GPU-x", false)
    }

    #[test]
    fn instances_are_placed_where_they_fit() {
        let made = layout(vec![
            device(1, 0, "3g.20gb"),
            device(2, 0, "3g.20gb"),
            device(5, 0, "1g.5gb"),
        ]);
        let placed: Vec<(u32, u32)> = made
            .instances
            .iter()
            .map(|instance| (instance.gi, instance.start))
            .collect();
        assert_eq!(placed, [(1, 0), (2, 4)]);
        assert_eq!(made.refused.len(), 1, "{:?}", made.refused);
        assert!(made.refused[0].contains("no free placement"));
    }

    #[test]
    fn compute_instances_share_their_gpu_instance() {
        let half = |ci| MigDeviceControl {
            compute_slices: Some(1),
            ..device(1, ci, "3g.20gb")
        };
        let made = layout(vec![half(0), half(1), device(1, 2, "3g.20gb")]);
        assert_eq!(made.instances.len(), 1);
        assert_eq!(made.devices.len(), 2);
        assert!(made.devices[1].name.ends_with("MIG 1c.3g.20gb"));
        assert!(made.refused[0].contains("do not fit"), "{:?}", made.refused);
    }

    #[test]
    fn indices_may_have_holes_and_instances_no_device() {
        let made = layout(vec![
            device(7, 0, "1g.5gb"),
            MigDeviceControl {
                index: Some(3),
                ..device(9, 0, "1g.5gb")
            },
            MigDeviceControl {
                ci: None,
                ..device(10, 0, "2g.10gb")
            },
        ]);
        let indices: Vec<u32> = made.devices.iter().map(|device| device.index).collect();
        assert_eq!(indices, [0, 3]);
        assert_eq!(made.instances.len(), 3);
        assert!(made.instance(10).is_some() && made.devices_of(10).next().is_none());
    }

    #[test]
    fn a_profile_makes_no_more_instances_than_it_says() {
        let made = layout(vec![device(7, 0, "1g.5gb+me"), device(8, 0, "1g.5gb+me")]);
        assert_eq!(made.instances.len(), 1);
        assert!(made.refused[0].contains("at most 1"), "{:?}", made.refused);
    }

    #[test]
    fn a_model_without_mig_has_no_layout() {
        let profile = Profile::load("t4").unwrap();
        let control = MigControl::default();
        assert!(!Layout::of(Some(&control), &profile, "GPU-x", false).enabled);
    }

    proptest! {
        #[test]
        fn whatever_is_asked_for_the_layout_is_one_that_can_be(
            asked in prop::collection::vec(
                (0u32..17, prop::option::of(0u32..9), 0usize..8, prop::option::of(0u32..9), prop::option::of(0u32..9), 0u32..5),
                0..12,
            )
        ) {
            let profile = Profile::load("h100-sxm").unwrap();
            let devices = asked.into_iter().map(|(gi, ci, row, start, index, slices)| MigDeviceControl {
                gi,
                ci,
                profile: profile.mig_profiles.get(row).map_or("9g.99gb", |row| row.name.as_str()).to_owned(),
                start,
                index,
                compute_slices: (slices > 0).then_some(slices),
                ..MigDeviceControl::default()
            });
            let control = MigControl { devices: devices.collect(), ..MigControl::default() };
            let made = Layout::of(Some(&control), &profile, "GPU-x", false);
            let slices: Vec<u32> = made
                .instances
                .iter()
                .flat_map(|instance| instance.start..instance.start + instance.profile.size)
                .collect();
            let distinct: BTreeSet<u32> = slices.iter().copied().collect();
            prop_assert_eq!(distinct.len(), slices.len(), "placements overlap");
            prop_assert!(slices.iter().all(|slice| *slice < 8));
            let indices: BTreeSet<u32> = made.devices.iter().map(|device| device.index).collect();
            prop_assert_eq!(indices.len(), made.devices.len(), "an index twice");
            prop_assert!(indices.iter().all(|index| *index < MIG_DEVICES));
            for instance in &made.instances {
                let used: u32 = made.devices_of(instance.gi).map(|device| device.slices).sum();
                prop_assert!(used <= instance.profile.slices);
                let alike = made.instances.iter().filter(|other| other.profile.id == instance.profile.id);
                prop_assert!(alike.count() <= instance.profile.instances as usize);
            }
        }
    }
}
