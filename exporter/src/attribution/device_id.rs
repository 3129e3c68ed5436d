//! Device ids as kubelet hands them out, told apart by form.
//!
//! Purpose: turn an id string of a device plugin or a DRA driver into the device it names.
//! Inputs: the id, and for DRA the device name in its pool.
//! Invariants: pure and total; a form that is not known is an error and never a guess; what parses prints back
//! to the same text.

use std::fmt;

use forewarm_signals::label::Sharing;

/// Longest id that is looked at: the longest known form has 62 characters.
const LONGEST_ID: usize = 256;

/// The device behind an id.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceRef {
    /// A whole GPU by UUID: `GPU-<uuid>`, kept with its prefix as NVML spells it.
    Gpu(String),
    /// A whole GPU by minor number: `nvidia<n>` of GKE's plugin, `gpu-<n>` of the DRA driver.
    Minor(u32),
    /// A MIG device by UUID: `MIG-<uuid>`, kept with its prefix.
    Mig(String),
    /// A MIG device as drivers before R470 name it: `MIG-GPU-<uuid>/<gi>/<ci>`.
    MigOfGpu {
        /// The parent's UUID with its `GPU-` prefix.
        gpu: String,
        /// GPU instance id.
        gi: u32,
        /// Compute instance id.
        ci: u32,
    },
    /// A MIG GPU instance by its parent's minor number: `nvidia<n>/gi<k>` of GKE's plugin.
    MigOfMinor {
        /// The parent's minor number.
        minor: u32,
        /// GPU instance id.
        gi: u32,
    },
    /// A MIG placement on a parent: `gpu-<n>-mig-<profile>-<profile id>-<start>` of the DRA driver.
    MigPlacement {
        /// The parent's minor number.
        minor: u32,
        /// Profile as the driver spells it in a device name.
        profile: String,
        /// NVML's GPU instance profile id.
        profile_id: u32,
        /// First memory slice.
        start: u32,
    },
}

impl DeviceRef {
    /// Whether the id names a whole GPU.
    #[must_use]
    pub const fn is_whole(&self) -> bool {
        matches!(self, Self::Gpu(_) | Self::Minor(_))
    }
}

/// An id read apart.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DeviceId {
    /// The device.
    pub device: DeviceRef,
    /// Replica number of a shared device, as text.
    pub replica: Option<String>,
    form: Form,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Form {
    Nvidia,
    Gke,
    Dra,
}

/// Why an id is not attributed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnknownForm {
    /// None of the known forms.
    #[error("no known form of device id")]
    Form,
    /// A GPU handed to a virtual machine, which NVML on this node cannot see.
    #[error("device is passed through to a virtual machine")]
    PassedThrough,
}

impl DeviceId {
    /// Reads an id of a device plugin: NVIDIA's (`GPU-…`, `MIG-…`, each with an optional `::<n>`) or GKE's
    /// (`nvidia<n>[/gi<k>][/vgpu<m>]`).
    ///
    /// # Errors
    /// The id has none of these forms.
    pub fn from_plugin(id: &str) -> Result<Self, UnknownForm> {
        if id.len() > LONGEST_ID {
            return Err(UnknownForm::Form);
        }
        if let Some(rest) = id.strip_prefix("nvidia") {
            return gke(rest);
        }
        let (base, replica) = match id.split_once("::") {
            Some((base, replica)) => (base, Some(number(replica)?)),
            None => (id, None),
        };
        Ok(Self {
            device: nvidia(base)?,
            replica: replica.map(|n| n.to_string()),
            form: Form::Nvidia,
        })
    }

    /// Reads the name of a device in a pool of NVIDIA's DRA driver; `share` is the share id of consumable
    /// capacity, where there is one.
    ///
    /// # Errors
    /// The name has none of the driver's forms, or names a device this node's NVML cannot see.
    pub fn from_dra(name: &str, share: Option<&str>) -> Result<Self, UnknownForm> {
        if name.len() > LONGEST_ID || share.is_some_and(|share| share.is_empty() || share.len() > LONGEST_ID)
        {
            return Err(UnknownForm::Form);
        }
        let rest = name.strip_prefix("gpu-").ok_or(UnknownForm::Form)?;
        if rest.starts_with("vfio-") {
            return Err(UnknownForm::PassedThrough);
        }
        let device = match rest.split_once("-mig-") {
            None => DeviceRef::Minor(number(rest)?),
            Some((minor, placement)) => {
                let mut parts = placement.rsplitn(3, '-');
                let (start, profile_id, profile) = (parts.next(), parts.next(), parts.next());
                DeviceRef::MigPlacement {
                    minor: number(minor)?,
                    profile: profile
                        .filter(|profile| is_profile(profile))
                        .ok_or(UnknownForm::Form)?
                        .to_owned(),
                    profile_id: number(profile_id.unwrap_or_default())?,
                    start: number(start.unwrap_or_default())?,
                }
            }
        };
        Ok(Self {
            device,
            replica: share.map(ToOwned::to_owned),
            form: Form::Dra,
        })
    }

    /// How the device is shared, as far as the id tells: a slice is `mig`; a replica is `shared_as`, which the
    /// id does not say; everything else is whole.
    #[must_use]
    pub const fn sharing(&self, shared_as: Sharing) -> Sharing {
        if !self.device.is_whole() {
            Sharing::Mig
        } else if self.replica.is_some() {
            shared_as
        } else {
            Sharing::None
        }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.device, self.form) {
            (DeviceRef::Gpu(uuid) | DeviceRef::Mig(uuid), _) => f.write_str(uuid)?,
            (DeviceRef::MigOfGpu { gpu, gi, ci }, _) => write!(f, "MIG-{gpu}/{gi}/{ci}")?,
            (DeviceRef::Minor(minor), Form::Dra) => write!(f, "gpu-{minor}")?,
            (DeviceRef::Minor(minor), _) => write!(f, "nvidia{minor}")?,
            (DeviceRef::MigOfMinor { minor, gi }, _) => write!(f, "nvidia{minor}/gi{gi}")?,
            (
                DeviceRef::MigPlacement {
                    minor,
                    profile,
                    profile_id,
                    start,
                },
                _,
            ) => write!(f, "gpu-{minor}-mig-{profile}-{profile_id}-{start}")?,
        }
        match (&self.replica, self.form) {
            (Some(replica), Form::Nvidia) => write!(f, "::{replica}"),
            (Some(replica), Form::Gke) => write!(f, "/vgpu{replica}"),
            (Some(_), Form::Dra) | (None, _) => Ok(()),
        }
    }
}

fn nvidia(base: &str) -> Result<DeviceRef, UnknownForm> {
    if let Some(uuid) = base.strip_prefix("GPU-") {
        return is_uuid(uuid)
            .then(|| DeviceRef::Gpu(base.to_owned()))
            .ok_or(UnknownForm::Form);
    }
    let rest = base.strip_prefix("MIG-").ok_or(UnknownForm::Form)?;
    if is_uuid(rest) {
        return Ok(DeviceRef::Mig(base.to_owned()));
    }
    let mut parts = rest.split('/');
    let (Some(gpu), Some(gi), Some(ci), None) = (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(UnknownForm::Form);
    };
    if !gpu.strip_prefix("GPU-").is_some_and(is_uuid) {
        return Err(UnknownForm::Form);
    }
    Ok(DeviceRef::MigOfGpu {
        gpu: gpu.to_owned(),
        gi: number(gi)?,
        ci: number(ci)?,
    })
}

fn gke(rest: &str) -> Result<DeviceId, UnknownForm> {
    let mut parts = rest.split('/');
    let minor = number(parts.next().unwrap_or_default())?;
    let mut gi = None;
    let mut replica = None;
    for part in parts {
        if let Some(n) = part
            .strip_prefix("gi")
            .filter(|_| gi.is_none() && replica.is_none())
        {
            gi = Some(number(n)?);
        } else if let Some(n) = part.strip_prefix("vgpu").filter(|_| replica.is_none()) {
            replica = Some(number(n)?.to_string());
        } else {
            return Err(UnknownForm::Form);
        }
    }
    Ok(DeviceId {
        device: match gi {
            Some(gi) => DeviceRef::MigOfMinor { minor, gi },
            None => DeviceRef::Minor(minor),
        },
        replica,
        form: Form::Gke,
    })
}

/// A decimal number in the one spelling that prints back to itself.
fn number(text: &str) -> Result<u32, UnknownForm> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    text.parse().ok().filter(|_| plain).ok_or(UnknownForm::Form)
}

fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(at, b)| match at {
            8 | 13 | 18 | 23 => b == b'-',
            _ => b.is_ascii_hexdigit(),
        })
}

fn is_profile(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'+' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UUID: &str = "0b5d8f3e-1c2d-4e5f-8a9b-0c1d2e3f4a5b";

    fn plugin(id: &str) -> DeviceId {
        DeviceId::from_plugin(id).unwrap()
    }

    #[test]
    fn whole_gpus_and_replicas_of_nvidias_plugin() {
        let whole = plugin(&format!("GPU-{UUID}"));
        assert_eq!(whole.device, DeviceRef::Gpu(format!("GPU-{UUID}")));
        assert_eq!(whole.replica, None);
        assert_eq!(whole.sharing(Sharing::TimeSlicing), Sharing::None);

        let replica = plugin(&format!("GPU-{UUID}::3"));
        assert_eq!(replica.device, whole.device);
        assert_eq!(replica.replica.as_deref(), Some("3"));
        assert_eq!(replica.sharing(Sharing::TimeSlicing), Sharing::TimeSlicing);
        assert_eq!(replica.sharing(Sharing::Mps), Sharing::Mps);
    }

    #[test]
    fn mig_devices_of_both_spellings() {
        let uuid = plugin(&format!("MIG-{UUID}"));
        assert_eq!(uuid.device, DeviceRef::Mig(format!("MIG-{UUID}")));
        assert_eq!(uuid.sharing(Sharing::TimeSlicing), Sharing::Mig);
        let sliced = plugin(&format!("MIG-{UUID}::1"));
        assert_eq!(sliced.replica.as_deref(), Some("1"));
        assert_eq!(sliced.sharing(Sharing::TimeSlicing), Sharing::Mig);
        let old = plugin(&format!("MIG-GPU-{UUID}/7/0"));
        assert_eq!(
            old.device,
            DeviceRef::MigOfGpu {
                gpu: format!("GPU-{UUID}"),
                gi: 7,
                ci: 0
            }
        );
    }

    #[test]
    fn minors_of_gkes_plugin() {
        assert_eq!(plugin("nvidia0").device, DeviceRef::Minor(0));
        assert_eq!(plugin("nvidia0").sharing(Sharing::TimeSlicing), Sharing::None);
        assert_eq!(
            plugin("nvidia2/gi1").device,
            DeviceRef::MigOfMinor { minor: 2, gi: 1 }
        );
        assert_eq!(plugin("nvidia0/vgpu2").replica.as_deref(), Some("2"));
        assert_eq!(
            plugin("nvidia0/vgpu2").sharing(Sharing::TimeSlicing),
            Sharing::TimeSlicing
        );
        let both = plugin("nvidia0/gi1/vgpu0");
        assert_eq!(both.device, DeviceRef::MigOfMinor { minor: 0, gi: 1 });
        assert_eq!(both.replica.as_deref(), Some("0"));
    }

    #[test]
    fn device_names_of_the_dra_driver() {
        let whole = DeviceId::from_dra("gpu-3", None).unwrap();
        assert_eq!(whole.device, DeviceRef::Minor(3));
        assert_eq!(whole.sharing(Sharing::TimeSlicing), Sharing::None);
        let share = DeviceId::from_dra("gpu-3", Some("a1")).unwrap();
        assert_eq!(share.sharing(Sharing::TimeSlicing), Sharing::TimeSlicing);
        assert_eq!(
            DeviceId::from_dra("gpu-0-mig-1g10gb-me-19-2", None)
                .unwrap()
                .device,
            DeviceRef::MigPlacement {
                minor: 0,
                profile: "1g10gb-me".into(),
                profile_id: 19,
                start: 2
            }
        );
        assert_eq!(
            DeviceId::from_dra("gpu-vfio-0", None),
            Err(UnknownForm::PassedThrough)
        );
    }

    #[test]
    fn unknown_forms_are_not_guessed() {
        for id in [
            "",
            "GPU-",
            "GPU-1",
            "gpu-0",
            "MIG-",
            "nvidia",
            "nvidia-0",
            "nvidia0/",
            "nvidia00",
            "nvidia0/vgpu1/gi0",
            "nvidia4294967296",
            "hami-0-1",
            &format!("GPU-{UUID}::"),
            &format!("GPU-{UUID}::x"),
            &format!("GPU-{UUID}::1::2"),
            &format!("MIG-GPU-{UUID}/1"),
            &format!("MIG-GPU-{UUID}/1/2/3"),
            &format!(" GPU-{UUID}"),
            &"x".repeat(100_000),
        ] {
            assert!(DeviceId::from_plugin(id).is_err(), "{id:.60}");
        }
        for name in [
            "",
            "gpu-",
            "gpu-x",
            "gpu-0-mig-",
            "gpu-0-mig-1g-1",
            "mig-0",
            "channel-0",
        ] {
            assert!(DeviceId::from_dra(name, None).is_err(), "{name}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_and_never_changed(id in "\\PC{0,80}") {
            if let Ok(parsed) = DeviceId::from_plugin(&id) {
                prop_assert_eq!(parsed.to_string(), id.clone());
            }
            if let Ok(parsed) = DeviceId::from_dra(&id, None) {
                prop_assert_eq!(parsed.to_string(), id);
            }
        }

        #[test]
        fn text_near_the_known_forms_is_read_or_refused_and_never_changed(
            id in "(GPU-|MIG-|MIG-GPU-|nvidia|gpu-)?([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9]{1,11})?(-mig-[0-9]g[0-9]{1,2}gb-[0-9]{1,2}-[0-9])?(/[0-9]{1,2}){0,3}(/gi[0-9])?(/vgpu[0-9])?(::[0-9]{0,3})?"
        ) {
            if let Ok(parsed) = DeviceId::from_plugin(&id) {
                prop_assert_eq!(parsed.to_string(), id.clone());
            }
            if let Ok(parsed) = DeviceId::from_dra(&id, None) {
                prop_assert_eq!(parsed.to_string(), id);
            }
        }

        #[test]
        fn what_is_written_is_read_back(minor in 0u32..64, gi in proptest::option::of(0u32..15), vgpu in proptest::option::of(0u32..48)) {
            let mut id = format!("nvidia{minor}");
            if let Some(gi) = gi { id.push_str(&format!("/gi{gi}")); }
            if let Some(vgpu) = vgpu { id.push_str(&format!("/vgpu{vgpu}")); }
            let parsed = DeviceId::from_plugin(&id).unwrap();
            prop_assert_eq!(parsed.device.is_whole(), gi.is_none());
            prop_assert_eq!(parsed.to_string(), id);
            prop_assert_eq!(parsed.replica, vgpu.map(|n| n.to_string()));
        }
    }
}
