//! Finds the management library of this machine's driver.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

/// Where drivers put the library, by distribution.
const DRIVER_FOLDERS: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
];

/// The driver's library on this machine.
pub(super) fn library() -> anyhow::Result<PathBuf> {
    const NAME: &str = "libnvidia-ml.so.1";
    let known = DRIVER_FOLDERS
        .iter()
        .map(|folder| Path::new(folder).join(NAME))
        .find(|path| path.exists());
    known.or_else(|| cached_library(NAME)).with_context(|| {
        format!(
            "NVML=real: there is no {NAME} on this machine (looked in {} and in ldconfig's cache); install NVIDIA's \
             driver, or leave NVML out for simulated GPUs",
            DRIVER_FOLDERS.join(", ")
        )
    })
}

/// What the dynamic linker would find, by `ldconfig -p`.
fn cached_library(name: &str) -> Option<PathBuf> {
    let output = ["/sbin/ldconfig", "ldconfig"]
        .into_iter()
        .find_map(|program| Command::new(program).arg("-p").output().ok())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines()
        .find(|line| line.trim_start().starts_with(name))
        .and_then(|line| line.rsplit_once("=> "))
        .map(|(_, path)| PathBuf::from(path.trim()))
}
