//! Go programs that tests and the demo run, built once from pinned modules into the cache folder.
//!
//! Inputs: the `go.mod` of `tests/controlplane`, `tests/kustomize` and `tests/promtool`; `KUBEBUILDER_ASSETS`, the
//! cache, `PATH`.
//! Invariants: a folder counts only when it has all programs of its module; it appears by one rename, so a
//! reader never sees half of it; one build at a time (a lock file); an interrupted build goes on where it was.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::report::note;
use crate::repository::{cache, variable};

/// How often a long build says that it goes on.
const PROGRESS_EVERY: Duration = Duration::from_secs(30);
/// Oldest Kubernetes minor release taken from `PATH`.
const OLDEST_MINOR: u32 = 37;

/// One Go program: its name and its package.
type Program = (&'static str, &'static str);

const CONTROL_PLANE: [Program; 4] = [
    ("etcd", "go.etcd.io/etcd/server/v3"),
    ("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
    (
        "kube-controller-manager",
        "k8s.io/kubernetes/cmd/kube-controller-manager",
    ),
    ("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
];
/// Our own walk through the fake NVML by NVIDIA's client, from sources in this repository.
const NVML_WALKER: [Program; 1] = [("gonvml", ".")];
const KUSTOMIZE: [Program; 1] = [("kustomize", "sigs.k8s.io/kustomize/kustomize/v5")];
const PROMTOOL: [Program; 1] = [("promtool", "github.com/prometheus/prometheus/cmd/promtool")];

/// Where the programs of a control plane are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Found {
    /// All four in this folder.
    Folder(PathBuf),
    /// All four on `PATH`, new enough.
    Path,
}

impl Found {
    /// Tells a child process where to look.
    pub(crate) fn tell(&self, command: &mut Command) {
        if let Self::Folder(folder) = self {
            command.env("FOREWARM_CONTROLPLANE_DIR", folder);
        }
    }
}

/// Finds a control plane, building it when there is none.
pub(crate) fn control_plane(root: &Path) -> Result<Found> {
    if let Some(found) = find_control_plane(root)? {
        return Ok(found);
    }
    let module = control_plane_module(root)?;
    note(format!(
        "control plane: none found, building {} once from Go modules (10 to 15 minutes on two cores)",
        module.release
    ));
    Ok(Found::Folder(module.build()?))
}

/// Finds a control plane without building: `KUBEBUILDER_ASSETS`, the cache folder, `PATH`.
pub(crate) fn find_control_plane(root: &Path) -> Result<Option<Found>> {
    if let Some(folder) = variable("KUBEBUILDER_ASSETS") {
        if complete(&folder, &CONTROL_PLANE) {
            return Ok(Some(Found::Folder(folder)));
        }
        note(format!(
            "control plane: KUBEBUILDER_ASSETS={} lacks some of the four programs, looking elsewhere",
            folder.display()
        ));
    }
    let cached = control_plane_module(root)?.folder;
    if complete(&cached, &CONTROL_PLANE) {
        return Ok(Some(Found::Folder(cached)));
    }
    Ok(on_path().then_some(Found::Path))
}

/// The folder that a control plane built here appears in, by one rename.
pub(crate) fn control_plane_folder(root: &Path) -> Result<PathBuf> {
    Ok(control_plane_module(root)?.folder)
}

/// Finds kustomize (`FOREWARM_KUSTOMIZE`, the cache folder), building it when there is none.
pub(crate) fn kustomize(root: &Path) -> Result<PathBuf> {
    let module = "sigs.k8s.io/kustomize/kustomize/v5";
    single(root, "kustomize", "FOREWARM_KUSTOMIZE", module, &KUSTOMIZE)
}

/// Finds promtool (`FOREWARM_PROMTOOL`, the cache folder), building it when there is none: minutes, the first time.
pub(crate) fn promtool(root: &Path) -> Result<PathBuf> {
    let module = "github.com/prometheus/prometheus";
    single(root, "promtool", "FOREWARM_PROMTOOL", module, &PROMTOOL)
}

/// A program with a module of its own, `tests/NAME`: from where `named_by` says, else the cache, else built.
fn single(
    root: &Path,
    name: &'static str,
    named_by: &str,
    module: &str,
    programs: &'static [Program; 1],
) -> Result<PathBuf> {
    if let Some(named) = variable(named_by) {
        return Ok(named);
    }
    let source = root.join("tests").join(name);
    let release = required(&source, module)?;
    let module = Module {
        name,
        folder: cache()?.join(name).join(&release),
        release,
        source,
        programs,
        ldflags: "-s -w".to_owned(),
        cgo: false,
    };
    let folder = if complete(&module.folder, programs) {
        module.folder
    } else {
        module.build()?
    };
    Ok(folder.join(name))
}

/// Finds the walker of the fake NVML (`FOREWARM_GO_NVML`, the cache folder), building it when there is none.
pub(crate) fn nvml_walker(root: &Path) -> Result<PathBuf> {
    if let Some(named) = variable("FOREWARM_GO_NVML") {
        return Ok(named);
    }
    let module = nvml_walker_module(root)?;
    let folder = if complete(&module.folder, &NVML_WALKER) {
        module.folder
    } else {
        module.build()?
    };
    Ok(folder.join("gonvml"))
}

/// Keyed by what it is built from: the client's release and our sources.
fn nvml_walker_module(root: &Path) -> Result<Module> {
    let source = root.join("tests/gonvml");
    let client = required(&source, "github.com/NVIDIA/go-nvml")?;
    let mut sources: Vec<PathBuf> = fs::read_dir(&source)
        .with_context(|| format!("reading {}", source.display()))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    sources.sort();
    let mut hasher = DefaultHasher::new();
    for path in sources {
        fs::read(&path)
            .with_context(|| format!("reading {}", path.display()))?
            .hash(&mut hasher);
    }
    let release = format!("{client}-{:016x}", hasher.finish());
    Ok(Module {
        name: "NVML walker",
        folder: cache()?.join("gonvml").join(&release),
        release,
        source,
        programs: &NVML_WALKER,
        ldflags: "-s -w".to_owned(),
        cgo: true,
    })
}

fn control_plane_module(root: &Path) -> Result<Module> {
    let source = root.join("tests/controlplane");
    let kubernetes = required(&source, "k8s.io/kubernetes")?;
    let etcd = required(&source, "go.etcd.io/etcd/server/v3")?;
    let release = format!("{kubernetes}-etcd-{etcd}");
    Ok(Module {
        name: "control plane",
        folder: cache()?.join("controlplane").join(&release),
        release,
        source,
        programs: &CONTROL_PLANE,
        ldflags: version_ldflags(&kubernetes)?,
        cgo: false,
    })
}

/// The API server reports its version from these variables; without them it claims v0.0.0, and version gates
/// and clients go wrong.
fn version_ldflags(kubernetes: &str) -> Result<String> {
    let mut parts = kubernetes.trim_start_matches('v').split('.');
    let (Some(major), Some(minor)) = (parts.next(), parts.next()) else {
        bail!("{kubernetes} is no Kubernetes release");
    };
    let variable = |name: &str, value: &str| format!("-X k8s.io/component-base/version.{name}={value}");
    Ok([
        "-s -w".to_owned(),
        variable("gitVersion", kubernetes),
        variable("gitMajor", major),
        variable("gitMinor", minor),
        variable("gitTreeState", "clean"),
    ]
    .join(" "))
}

/// The release of a module that a go.mod requires.
fn required(source: &Path, module: &str) -> Result<String> {
    let path = source.join("go.mod");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    required_in(&text, module).with_context(|| format!("{} does not require {module}", path.display()))
}

fn required_in(go_mod: &str, module: &str) -> Option<String> {
    go_mod.lines().find_map(|line| {
        let mut words = line.trim().trim_start_matches("require ").split_whitespace();
        (words.next() == Some(module))
            .then(|| words.next())
            .flatten()
            .filter(|version| version.starts_with('v'))
            .map(str::to_owned)
    })
}

fn complete(folder: &Path, programs: &[Program]) -> bool {
    programs.iter().all(|(program, _)| folder.join(program).is_file())
}

fn on_path() -> bool {
    let version = |program: &str| {
        let output = Command::new(program).arg("--version").output().ok()?;
        output
            .status
            .success()
            .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    CONTROL_PLANE
        .iter()
        .all(|(program, _)| version(program).is_some_and(|text| *program == "etcd" || is_new_enough(&text)))
}

/// Whether `Kubernetes v1.38.0` is a release we accept.
fn is_new_enough(version: &str) -> bool {
    let mut parts = version
        .trim()
        .trim_start_matches("Kubernetes v")
        .split('.')
        .map(|part| part.parse::<u32>().ok());
    match (parts.next().flatten(), parts.next().flatten()) {
        (Some(1), Some(minor)) => minor >= OLDEST_MINOR,
        (Some(major), Some(_)) => major > 1,
        _ => false,
    }
}

/// A Go module and the folder its programs go to.
struct Module {
    name: &'static str,
    release: String,
    source: PathBuf,
    folder: PathBuf,
    programs: &'static [Program],
    ldflags: String,
    /// Needs a C compiler. Otherwise a program is static: it runs in any mount namespace of the testbed.
    cgo: bool,
}

impl Module {
    /// Builds what is missing, under the lock.
    fn build(&self) -> Result<PathBuf> {
        let parent = self.folder.parent().context("cache folder has no parent")?;
        fs::create_dir_all(parent).with_context(|| format!("creating {}", parent.display()))?;
        let lock_path = parent.join(format!("{}.lock", self.release));
        let lock = File::create(&lock_path).with_context(|| format!("creating {}", lock_path.display()))?;
        if lock.try_lock().is_err() {
            note(format!("{}: another build is running, waiting for it", self.name));
            lock.lock()
                .with_context(|| format!("locking {}", lock_path.display()))?;
        }
        if complete(&self.folder, self.programs) {
            return Ok(self.folder.clone());
        }
        let started = Instant::now();
        let building = parent.join(format!("{}.building", self.release));
        fs::create_dir_all(&building).with_context(|| format!("creating {}", building.display()))?;
        for (index, (program, package)) in self.programs.iter().enumerate() {
            let target = building.join(program);
            if target.is_file() {
                continue;
            }
            let step = format!(
                "{}: {program} ({} of {})",
                self.name,
                index + 1,
                self.programs.len()
            );
            let partial = building.join(format!("{program}.partial"));
            self.build_one(&step, package, &partial)?;
            fs::rename(&partial, &target).with_context(|| format!("naming {}", target.display()))?;
        }
        if self.folder.exists() {
            fs::remove_dir_all(&self.folder)
                .with_context(|| format!("removing {}", self.folder.display()))?;
        }
        fs::rename(&building, &self.folder).with_context(|| format!("naming {}", self.folder.display()))?;
        note(format!(
            "{}: {} ready after {} s in {}",
            self.name,
            self.release,
            started.elapsed().as_secs(),
            self.folder.display()
        ));
        Ok(self.folder.clone())
    }

    fn build_one(&self, step: &str, package: &str, output: &Path) -> Result<()> {
        note(format!("{step}: building"));
        let started = Instant::now();
        let mut child = Command::new("go")
            .current_dir(&self.source)
            .env("CGO_ENABLED", if self.cgo { "1" } else { "0" })
            // Go would look for gcc by that name; Rust needs a cc anyway.
            .env("CC", "cc")
            // go-nvml binds every symbol that a header ever had.
            .env("CGO_CFLAGS", "-O1 -Wno-deprecated-declarations")
            .args(["build", "-ldflags", &self.ldflags, "-o"])
            .arg(output)
            .arg(package)
            .stdin(Stdio::null())
            .spawn()
            .context("go did not start: install Go 1.26 or newer, or name a folder with etcd, kube-apiserver, kube-controller-manager and kube-scheduler in KUBEBUILDER_ASSETS")?;
        let (ended, end) = sync_channel(1);
        let waiter = std::thread::spawn(move || {
            let _receiver_waits = ended.send(child.wait());
        });
        let status = loop {
            match end.recv_timeout(PROGRESS_EVERY) {
                Ok(status) => break status.context("waiting for go")?,
                Err(RecvTimeoutError::Timeout) => {
                    note(format!(
                        "{step}: still building, {} s",
                        started.elapsed().as_secs()
                    ));
                }
                Err(RecvTimeoutError::Disconnected) => bail!("{step}: nobody waits for go"),
            }
        };
        if waiter.join().is_err() {
            bail!("{step}: waiting for go failed");
        }
        if !status.success() {
            bail!(
                "{step}: go build failed ({status}); the module is {}",
                self.source.display()
            );
        }
        note(format!("{step}: built in {} s", started.elapsed().as_secs()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repository::root;

    #[test]
    fn the_release_is_read_from_go_mod() {
        let text = "module x\n\nrequire (\n\tk8s.io/kubernetes v1.37.2\n\tother v1.0.0 // indirect\n)\nrequire single v2.0.0\nreplace k8s.io/api => k8s.io/api v0.37.2\n";
        assert_eq!(required_in(text, "k8s.io/kubernetes").as_deref(), Some("v1.37.2"));
        assert_eq!(required_in(text, "single").as_deref(), Some("v2.0.0"));
        assert_eq!(required_in(text, "k8s.io/api"), None);
        assert_eq!(required_in(text, "absent"), None);
    }

    #[test]
    fn the_api_server_learns_its_version() {
        let flags = version_ldflags("v1.37.2").unwrap();
        assert!(flags.contains("version.gitVersion=v1.37.2"), "{flags}");
        assert!(flags.contains("version.gitMinor=37"), "{flags}");
        assert!(version_ldflags("latest").is_err());
    }

    #[test]
    fn releases_on_path_are_compared_as_numbers() {
        assert!(is_new_enough("Kubernetes v1.37.2\n"));
        assert!(is_new_enough("Kubernetes v1.100.0"));
        assert!(!is_new_enough("Kubernetes v1.9.0"));
        assert!(!is_new_enough("something else"));
    }

    #[test]
    fn the_testbed_looks_where_we_build() {
        let root = root().unwrap();
        let binaries = fs::read_to_string(root.join("tests/src/controlplane/binaries.rs")).unwrap();
        let release = control_plane_module(&root).unwrap().release;
        assert!(binaries.contains(&format!("\"{release}\"")), "{release}");
        let kustomize = fs::read_to_string(root.join("tests/src/kustomize.rs")).unwrap();
        let release = required(
            &root.join("tests/kustomize"),
            "sigs.k8s.io/kustomize/kustomize/v5",
        )
        .unwrap();
        assert!(kustomize.contains(&format!("\"{release}\"")), "{release}");
    }

    #[test]
    fn a_folder_counts_only_when_complete() {
        let dir = tempfile::tempdir().unwrap();
        for (program, _) in CONTROL_PLANE {
            assert!(!complete(dir.path(), &CONTROL_PLANE));
            fs::write(dir.path().join(program), "").unwrap();
        }
        assert!(complete(dir.path(), &CONTROL_PLANE));
    }
}
