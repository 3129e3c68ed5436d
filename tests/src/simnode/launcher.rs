//! Turns a re-execution of the testbed's own binary into a simulated container.
//!
//! Input: a file that describes the container ([`Container`], JSON). The process leaves the mount
//! namespace, builds the container's root on a tmpfs out of bind mounts, changes its root and becomes the
//! program: the child that the node started *is* the container, with the same pid.
//!
//! ```text
//! /            tmpfs, read-only when the pod asks for it
//! /usr /bin …  the machine's, read-only, in place of the image's base layers
//! /<program>   the binary under test, in place of the image's entry point
//! /etc /dev /tmp   made here; /proc is the testbed's own
//! <mountPath>  the pod's volumes
//! /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1   what NVIDIA's runtime would inject
//! ```
//! Not isolated on purpose: user, pids, capabilities and cgroups. Invariant: the machine's mount table
//! and files stay as they are.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::SigSet;
use nix::unistd::{chdir, chroot, sethostname};
use serde::{Deserialize, Serialize};

/// First argument of such a re-execution; the second is the file with the [`Container`].
pub const ARGUMENT: &str = "__container";
/// Exit code when the container could not be made, as container runtimes use it.
pub const CANNOT_RUN: u8 = 128;
/// Folder inside the container with everything of the injected driver.
const DRIVER: &str = "/run/nvidia-driver";
/// What the injected driver consists of; the last two are how the stand-in is told what to simulate.
const DRIVER_FILES: [&str; 3] = ["libnvidia-ml.so.1", "fake-nvml.toml", "control.json"];
/// Where libraries are found without configuration, by distribution.
const LIBRARY_FOLDERS: [&str; 3] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
];
/// Top-level folders of the machine that stand in for an image's base layers.
const BASE: [&str; 6] = ["usr", "bin", "sbin", "lib", "lib64", "lib32"];

/// One container to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// An empty folder to build the root on.
    pub root: PathBuf,
    /// The program and its arguments as the container sees them.
    pub argv: Vec<String>,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    /// Working directory inside.
    pub directory: PathBuf,
    /// Bind mounts, parents before children.
    pub mounts: Vec<Bind>,
    /// Folder outside with the driver's files, when the driver is injected.
    pub driver: Option<PathBuf>,
    /// `readOnlyRootFilesystem`.
    pub read_only_root: bool,
    /// Content of `/etc/hosts`.
    pub hosts: String,
    /// Host name.
    pub hostname: String,
}

/// One bind mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// File or folder outside.
    pub source: PathBuf,
    /// Absolute path inside.
    pub target: PathBuf,
    /// Whether writes are refused.
    pub read_only: bool,
}

/// Runs a container when this process was started for that; `None` otherwise.
#[must_use]
#[allow(
    clippy::print_stderr,
    reason = "standard error is the container's log, where its failure to start belongs"
)]
pub fn run_if_asked() -> Option<ExitCode> {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let [_, argument, file] = arguments.as_slice() else {
        return None;
    };
    if argument != ARGUMENT {
        return None;
    }
    let problem = match become_container(Path::new(file)) {
        Ok(never) => match never {},
        Err(problem) => problem,
    };
    eprintln!("cannot run the container: {problem}");
    Some(ExitCode::from(CANNOT_RUN))
}

/// A step of making the container that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
struct Problem {
    step: String,
    source: io::Error,
}

fn during<E: Into<io::Error>>(step: impl Into<String>) -> impl FnOnce(E) -> Problem {
    move |source| Problem {
        step: step.into(),
        source: source.into(),
    }
}

fn become_container(file: &Path) -> Result<std::convert::Infallible, Problem> {
    let text = fs::read(file).map_err(during("read the description"))?;
    let container: Container = serde_json::from_slice(&text).map_err(during("parse the description"))?;
    // A testbed that waits for SIGTERM itself has it blocked, and programs inherit that.
    SigSet::empty()
        .thread_set_mask()
        .map_err(during("take signals again"))?;
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS)
        .map_err(during("leave the mount namespace"))?;
    mount(
        None::<&str>,
        "/",
        None::<&str>,
        MsFlags::MS_REC | MsFlags::MS_PRIVATE,
        None::<&str>,
    )
    .map_err(during("make mounts private"))?;
    sethostname(&container.hostname).map_err(during("set the host name"))?;
    build_root(&container)?;
    chroot(&container.root).map_err(during("change the root"))?;
    chdir(&container.directory).map_err(during(format!("enter {}", container.directory.display())))?;
    let (program, arguments) = container
        .argv
        .split_first()
        .ok_or_else(|| io::Error::other("no command"))
        .map_err(during("find the program"))?;
    let failure = Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(&container.env)
        .exec();
    Err(during(format!("execute {program}"))(failure))
}

fn build_root(container: &Container) -> Result<(), Problem> {
    let root = &container.root;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(
        Some("tmpfs"),
        root,
        Some("tmpfs"),
        flags,
        Some("mode=755,size=64m"),
    )
    .map_err(during("mount the root"))?;
    for name in BASE {
        base_layer(root, name)?;
    }
    for folder in ["etc", "dev", "proc", "tmp", "run", "var/run", "var/lib"] {
        create_folder(&root.join(folder))?;
    }
    fs::write(root.join("etc/hosts"), &container.hosts).map_err(during("write /etc/hosts"))?;
    if Path::new("/etc/ssl").is_dir() {
        bind(Path::new("/etc/ssl"), &root.join("etc/ssl"), true)?;
    }
    for device in ["null", "zero", "full", "random", "urandom", "tty"] {
        bind(
            &Path::new("/dev").join(device),
            &root.join("dev").join(device),
            false,
        )?;
    }
    bind(Path::new("/proc"), &root.join("proc"), false)?;
    mount(
        Some("tmpfs"),
        &root.join("tmp"),
        Some("tmpfs"),
        flags,
        Some("mode=1777,size=64m"),
    )
    .map_err(during("mount /tmp"))?;
    if let Some(driver) = &container.driver {
        inject_driver(root, driver)?;
    }
    for one in &container.mounts {
        let target = one.target.strip_prefix("/").unwrap_or(&one.target);
        bind(&one.source, &root.join(target), one.read_only)?;
    }
    if container.read_only_root {
        let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY | flags;
        mount(None::<&str>, root, None::<&str>, read_only, None::<&str>)
            .map_err(during("make the root read-only"))?;
    }
    Ok(())
}

/// A folder of the machine, or the same symbolic link where the machine has merged it into `/usr`.
fn base_layer(root: &Path, name: &str) -> Result<(), Problem> {
    let outside = Path::new("/").join(name);
    let inside = root.join(name);
    if let Ok(target) = fs::read_link(&outside) {
        return std::os::unix::fs::symlink(target, inside).map_err(during(format!("link /{name}")));
    }
    if outside.is_dir() {
        bind(&outside, &inside, true)
    } else {
        Ok(())
    }
}

/// Puts the driver where NVIDIA's runtime puts it, over a copy (by links) of the machine's library folder,
/// which cannot be written to.
fn inject_driver(root: &Path, driver: &Path) -> Result<(), Problem> {
    bind(driver, &root.join(DRIVER.trim_start_matches('/')), true)?;
    let folder = LIBRARY_FOLDERS
        .into_iter()
        .find(|folder| root.join(folder).is_dir())
        .ok_or_else(|| io::Error::other("no known library folder"))
        .map_err(during("inject the driver"))?;
    let libraries = root.join(folder);
    let machine = root.join("run/machine-libraries");
    bind(&libraries, &machine, true)?;
    mount(
        Some("tmpfs"),
        &libraries,
        Some("tmpfs"),
        MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
        Some("mode=755"),
    )
    .map_err(during("cover the library folder"))?;
    for entry in fs::read_dir(&machine).map_err(during("list the library folder"))? {
        let name = entry.map_err(during("list the library folder"))?.file_name();
        // The machine's own driver, where it has one, is not in the image.
        if !name.to_string_lossy().starts_with("libnvidia-") {
            link(
                &Path::new("/run/machine-libraries").join(&name),
                &libraries.join(&name),
            )?;
        }
    }
    for name in DRIVER_FILES {
        link(&Path::new(DRIVER).join(name), &libraries.join(name))?;
    }
    Ok(())
}

fn link(target: &Path, at: &Path) -> Result<(), Problem> {
    std::os::unix::fs::symlink(target, at).map_err(during(format!("link {}", at.display())))
}

fn create_folder(path: &Path) -> Result<(), Problem> {
    fs::create_dir_all(path).map_err(during(format!("create {}", path.display())))
}

fn bind(source: &Path, target: &Path, read_only: bool) -> Result<(), Problem> {
    let step = || format!("mount {} at {}", source.display(), target.display());
    if source.is_dir() {
        create_folder(target)?;
    } else {
        if let Some(parent) = target.parent() {
            create_folder(parent)?;
        }
        if !target.exists() {
            fs::File::create(target).map_err(during(step()))?;
        }
    }
    mount(
        Some(source),
        target,
        None::<&str>,
        MsFlags::MS_BIND | MsFlags::MS_REC,
        None::<&str>,
    )
    .map_err(during(step()))?;
    if read_only {
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
        // Inside a user namespace the kernel may lock the flags of the machine's own mounts; they are then
        // protected by their owner instead.
        let _ = mount(None::<&str>, target, None::<&str>, flags, None::<&str>);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_survives_its_file() {
        let container = Container {
            root: "/tmp/root".into(),
            argv: vec!["/program".into(), "--listen=10.77.1.10:9410".into()],
            env: BTreeMap::from([("A".into(), "b".into())]),
            directory: "/".into(),
            mounts: vec![Bind {
                source: "/a".into(),
                target: "/b".into(),
                read_only: true,
            }],
            driver: Some("/driver".into()),
            read_only_root: true,
            hosts: "127.0.0.1 localhost\n".into(),
            hostname: "pod".into(),
        };
        let text = serde_json::to_string(&container).unwrap();
        assert_eq!(serde_json::from_str::<Container>(&text).unwrap(), container);
    }
}
