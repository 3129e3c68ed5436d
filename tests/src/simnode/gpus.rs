//! The simulated node's driver: where its files lie, and how pods' load reaches its GPUs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forewarm_fake_nvml::control::{Control, GpuControl};
use forewarm_fake_nvml::library::{FILE_NAME, prepare_with};
use forewarm_fake_nvml::settings::Settings;

use super::workload::GpuLoad;
use super::{Node, lock};

/// Where a node without NVIDIA's runtime keeps the driver; the manifests' `host-driver` component mounts it.
const HOST_FOLDER: &str = "home/kubernetes/bin/nvidia/lib64";
/// File name of the control file, beside the library.
const CONTROL: &str = "control.json";
/// GPUs of a node whose settings do not say.
const GPUS: u32 = 8;
/// How often load is written: the fake reads within 100 ms.
const PERIOD: Duration = Duration::from_millis(100);

/// Folder of the driver's files below a node's root folder.
pub(super) fn folder(root: &Path) -> PathBuf {
    root.join(HOST_FOLDER)
}

/// Which driver a node has.
#[derive(Debug, Clone)]
pub enum Driver {
    /// The stand-in.
    Fake {
        /// The built `libforewarm_fake_nvml.so`.
        library: PathBuf,
        /// Profile, number of GPUs, driver version; control file and UUID seed are set by the node.
        settings: Settings,
    },
    /// The machine's own driver. Its GPUs' load is what it is.
    Real {
        /// Path of `libnvidia-ml.so.1`.
        library: PathBuf,
        /// UUIDs of the GPUs to hand out, by index.
        uuids: Vec<String>,
    },
}

/// The GPUs of one node.
#[derive(Debug)]
pub struct Gpus {
    uuids: Vec<String>,
    folder: PathBuf,
    /// What tests inject, under the pods' load; `None` with a real driver.
    base: Option<Arc<Mutex<Control>>>,
}

impl Gpus {
    /// Puts the driver's files under the node's root folder.
    pub(super) fn install(driver: &Driver, node: &str, root: &Path) -> io::Result<Self> {
        let folder = folder(root);
        fs::create_dir_all(&folder)?;
        match driver {
            Driver::Fake { library, settings } => {
                let settings = Settings {
                    gpus: Some(settings.gpus.unwrap_or(GPUS)),
                    control: Some(CONTROL.into()),
                    uuid_seed: Some(node.to_owned()),
                    ..settings.clone()
                };
                prepare_with(library, &folder, &settings, &[]).map_err(io::Error::other)?;
                let base = Control::default();
                base.write(&folder.join(CONTROL))?;
                let uuids = (0..settings.gpus.unwrap_or(GPUS))
                    .map(|index| forewarm_fake_nvml::gpu_uuid(node, index))
                    .collect();
                Ok(Self {
                    uuids,
                    folder,
                    base: Some(Arc::new(Mutex::new(base))),
                })
            }
            Driver::Real { library, uuids } => {
                fs::copy(library, folder.join(FILE_NAME))?;
                Ok(Self {
                    uuids: uuids.clone(),
                    folder,
                    base: None,
                })
            }
        }
    }

    /// Folder with the library.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// UUIDs by index.
    #[must_use]
    pub fn uuids(&self) -> Vec<String> {
        self.uuids.clone()
    }

    /// Changes what lies under the pods' load: faults, errors, temperatures. Takes effect within 200 ms.
    pub fn inject(&self, change: impl FnOnce(&mut Control)) {
        if let Some(base) = &self.base {
            change(&mut lock(base));
        }
    }

    /// Writes the control file whenever load or faults change, until the task is aborted.
    pub(super) fn drive(&self, node: Arc<Node>) -> impl Future<Output = ()> + Send + use<> {
        let base = self.base.clone();
        let path = self.folder.join(CONTROL);
        async move {
            let Some(base) = base else { return };
            let mut written = None;
            loop {
                let mut control = lock(&base).clone();
                for (&index, load) in &*lock(&node.loads) {
                    put(control.gpus.entry(index).or_default(), load);
                }
                if written.as_ref() != Some(&control) {
                    match control.write(&path) {
                        Ok(()) => written = Some(control),
                        Err(error) => node.fail(format!("cannot write {}: {error}", path.display())),
                    }
                }
                tokio::time::sleep(PERIOD).await;
            }
        }
    }
}

/// A pod's load over what a test has injected; an injected value wins.
fn put(gpu: &mut GpuControl, load: &GpuLoad) {
    gpu.busy = gpu.busy.or(load.busy);
    gpu.sm_active = gpu.sm_active.or(load.sm_active);
    gpu.sm_occupancy = gpu.sm_occupancy.or(load.sm_occupancy);
    gpu.tensor = gpu.tensor.or(load.tensor);
    gpu.dram = gpu.dram.or(load.dram);
    gpu.memory_used_bytes = gpu.memory_used_bytes.or(load.memory_used_bytes);
    gpu.nvlink_rx_bytes_per_second = gpu.nvlink_rx_bytes_per_second.or(load.nvlink_rx_bytes_per_second);
    gpu.nvlink_tx_bytes_per_second = gpu.nvlink_tx_bytes_per_second.or(load.nvlink_tx_bytes_per_second);
    gpu.power_watts = gpu.power_watts.or(load.power_watts);
}
