//! What the kubelet knows: pods, their devices, and which devices there are.
//!
//! Inputs: tests and the simulated node set it. Invariants: pods are kept by UID, as a kubelet does.

use std::collections::BTreeMap;

/// Everything the APIs tell.
#[derive(Debug, Clone, Default)]
pub struct State {
    /// Pods by UID.
    pub pods: BTreeMap<String, Pod>,
    /// Device ids by resource.
    pub allocatable: BTreeMap<String, Vec<String>>,
    /// Whether List also tells pods that ended, as kubelets before 1.34 did.
    pub lists_ended_pods: bool,
}

/// One pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// UID.
    pub uid: String,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Phase.
    pub phase: Phase,
    /// Whether the Ready condition is True.
    pub ready: bool,
    /// Its containers.
    pub containers: Vec<Container>,
}

/// Phase of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Not all containers have started.
    Pending,
    /// Running.
    Running,
    /// Ended well.
    Succeeded,
    /// Ended badly.
    Failed,
}

/// One container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// Name.
    pub name: String,
    /// What it holds.
    pub devices: Vec<Device>,
}

/// One device that a container holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// Handed out by a device plugin.
    Plugin {
        /// Resource name.
        resource: String,
        /// Id.
        id: String,
    },
    /// Handed out by a DRA driver.
    Dra {
        /// Driver name.
        driver: String,
        /// Device name in the pool.
        device: String,
        /// Share of consumable capacity.
        share: Option<String>,
    },
}

impl Phase {
    /// As the API spells it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
        }
    }

    /// Whether a pod does not leave it any more.
    #[must_use]
    pub const fn has_ended(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

impl Pod {
    /// A running and ready pod with one container `main` that holds the given `nvidia.com/gpu` ids.
    #[must_use]
    pub fn running(namespace: &str, name: &str, uid: &str, ids: &[&str]) -> Self {
        Self {
            uid: uid.into(),
            namespace: namespace.into(),
            name: name.into(),
            phase: Phase::Running,
            ready: true,
            containers: vec![Container {
                name: "main".into(),
                devices: ids
                    .iter()
                    .map(|id| Device::Plugin {
                        resource: forewarm_signals::resource::GPU.into(),
                        id: (*id).into(),
                    })
                    .collect(),
            }],
        }
    }
}
