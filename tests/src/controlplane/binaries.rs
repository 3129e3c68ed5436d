//! Finds etcd, kube-apiserver, kube-controller-manager and kube-scheduler.
//!
//! Order: `FOREWARM_CONTROLPLANE_DIR` (set by `cargo xtask` after building), `KUBEBUILDER_ASSETS`, the
//! cache folder that `cargo xtask controlplane` fills, `PATH` at Kubernetes 1.37 or newer. A folder counts
//! only when it has all four: programs of different releases are not mixed.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The releases that `tests/controlplane/go.mod` builds; also the name of the cache folder.
pub const CACHE_NAME: &str = "v1.37.2-etcd-v3.7.3";
/// Programs of a control plane.
pub const PROGRAMS: [&str; 4] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
];
/// Oldest minor release taken from `PATH`.
const OLDEST_MINOR: u32 = 37;

/// Where the four programs are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binaries {
    folder: Option<PathBuf>,
}

/// No complete control plane was found.
#[derive(Debug, thiserror::Error)]
#[error(
    "no control plane found: build it once by `cargo xtask controlplane`, or name a folder with etcd, \
     kube-apiserver, kube-controller-manager and kube-scheduler in FOREWARM_CONTROLPLANE_DIR or \
     KUBEBUILDER_ASSETS (looked in: {looked})"
)]
pub struct NotFound {
    looked: String,
}

impl Binaries {
    /// Looks in all places.
    ///
    /// # Errors
    /// [`NotFound`] says what to run.
    pub fn find() -> Result<Self, NotFound> {
        let variable = |name: &str| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let folders: Vec<PathBuf> = [
            variable("FOREWARM_CONTROLPLANE_DIR"),
            variable("KUBEBUILDER_ASSETS"),
            cache_folder().map(|cache| cache.join("controlplane").join(CACHE_NAME)),
        ]
        .into_iter()
        .flatten()
        .collect();
        if let Some(folder) = folders.iter().find(|folder| complete(folder)) {
            return Ok(Self {
                folder: Some(folder.clone()),
            });
        }
        if on_path() {
            return Ok(Self { folder: None });
        }
        let mut looked: Vec<String> = folders
            .iter()
            .map(|folder| folder.display().to_string())
            .collect();
        looked.push("PATH".to_owned());
        Err(NotFound {
            looked: looked.join(", "),
        })
    }

    /// A command that runs one of [`PROGRAMS`].
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        Command::new(
            self.folder
                .as_ref()
                .map_or_else(|| PathBuf::from(program), |folder| folder.join(program)),
        )
    }
}

/// The cache folder of all that is built once: `FOREWARM_CACHE_DIR`, else `~/.cache/forewarm`.
#[must_use]
pub fn cache_folder() -> Option<PathBuf> {
    let variable = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    variable("FOREWARM_CACHE_DIR")
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("forewarm")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/forewarm")))
}

fn complete(folder: &Path) -> bool {
    PROGRAMS.iter().all(|program| folder.join(program).is_file())
}

fn on_path() -> bool {
    let version = |program: &str| {
        let output = Command::new(program).arg("--version").output().ok()?;
        output
            .status
            .success()
            .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    version("etcd").is_some()
        && PROGRAMS
            .iter()
            .skip(1)
            .all(|program| version(program).is_some_and(|text| is_new_enough(&text)))
}

/// Whether `Kubernetes v1.38.0` is a release we accept.
fn is_new_enough(version: &str) -> bool {
    let mut parts = version.trim().trim_start_matches("Kubernetes v").split('.');
    let major = parts.next().and_then(|part| part.parse::<u32>().ok());
    let minor = parts.next().and_then(|part| part.parse::<u32>().ok());
    match (major, minor) {
        (Some(1), Some(minor)) => minor >= OLDEST_MINOR,
        (Some(major), Some(_)) => major > 1,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_on_path_are_compared_as_numbers() {
        assert!(is_new_enough("Kubernetes v1.37.2\n"));
        assert!(is_new_enough("Kubernetes v1.100.0"));
        assert!(is_new_enough("Kubernetes v2.0.0"));
        assert!(!is_new_enough("Kubernetes v1.9.0"));
        assert!(!is_new_enough("etcd Version: 3.7"));
    }
}
