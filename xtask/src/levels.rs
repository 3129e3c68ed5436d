//! `cargo xtask test`: the unit, process and apiserver levels, and what they add up to.
//!
//! Inputs: cargo's metadata (which test target belongs to which level), the levels asked for. Invariants: the
//! runners' output is passed through untouched; the last line on stdout is one JSON object; a failed level
//! does not keep the next one from running; where `CI` is set, a level that ran nothing or skipped something
//! fails.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use cargo_metadata::{Metadata, TargetKind};
use clap::ValueEnum;
use serde::Serialize;
use serde_json::json;

use crate::gobuild::{self, Found};
use crate::libtest::{self, Counts};
use crate::report::{note, result};
use crate::repository::{build, cargo, metadata, run, variable};

/// A test level of `make test`, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    /// No I/O: tests inside the crates, their pure integration tests, doc tests.
    Unit,
    /// Real binaries, fake NVML, fake kubelet sockets, loopback.
    Process,
    /// Real etcd, kube-apiserver, controller manager and scheduler.
    Apiserver,
}

impl Level {
    const ALL: [Self; 3] = [Self::Unit, Self::Process, Self::Apiserver];

    const fn name(self) -> &'static str {
        match self {
            Self::Unit => "unit",
            Self::Process => "process",
            Self::Apiserver => "apiserver",
        }
    }

    /// The level of an integration test target: by its prefix in the tests crate, unit elsewhere.
    fn of(package: &str, target: &str) -> Option<Self> {
        match target.split('_').next() {
            Some("apiserver") => Some(Self::Apiserver),
            Some("process") => Some(Self::Process),
            // These levels have their own command, `cargo xtask test-cluster`.
            Some("node" | "cluster" | "device") => None,
            _ if package == TESTS_PACKAGE => None,
            _ => Some(Self::Unit),
        }
    }
}

/// The package whose test files carry their level as prefix.
const TESTS_PACKAGE: &str = "forewarm-tests";

/// Arguments of `cargo xtask test`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TestArgs {
    /// Run only these levels; all three when absent.
    #[arg(long = "level", value_name = "LEVEL")]
    levels: Vec<Level>,

    /// Passed on to every runner, for example a name filter.
    #[arg(last = true, value_name = "ARGS")]
    runner: Vec<OsString>,
}

/// Runs the levels.
pub(crate) fn test(root: &Path, args: &TestArgs) -> Result<()> {
    let levels: Vec<Level> = Level::ALL
        .into_iter()
        .filter(|level| args.levels.is_empty() || args.levels.contains(level))
        .collect();
    let targets = targets(&metadata(root)?);
    // Without peers the levels that need none still run.
    let (peers, walker) = prepare(root, &levels, &targets)?;

    let mut counts = BTreeMap::new();
    let mut failed = Vec::new();
    for level in &levels {
        let started = Instant::now();
        note(format!("── {} level", level.name()));
        if *level == Level::Apiserver
            && let Err(error) = &peers
        {
            failed.push(format!("the apiserver level cannot run: {error:#}"));
            counts.insert(*level, Counts::default());
            continue;
        }
        let programs = Programs {
            peers: peers.as_ref().ok(),
            walker: walker.as_deref(),
        };
        let (sum, passed) = run_level(root, *level, &targets, &programs, &args.runner)?;
        note(format!(
            "── {} level: {} s",
            level.name(),
            started.elapsed().as_secs()
        ));
        if !passed {
            failed.push(format!("the {} level failed", level.name()));
        }
        failed.extend(promises_broken(*level, &sum, variable("CI").is_some()));
        counts.insert(*level, sum);
    }
    result(summary(&counts)?);
    if failed.is_empty() {
        Ok(())
    } else {
        bail!("{}", failed.join("; "))
    }
}

/// What the levels need besides cargo.
#[derive(Debug, Default)]
struct Peers {
    control_plane: Option<Found>,
    kustomize: Option<PathBuf>,
}

/// What the tests of a level are told of.
#[derive(Debug)]
struct Programs<'prepared> {
    peers: Option<&'prepared Peers>,
    /// NVIDIA's Go client, made to walk the fake NVML; without it the test that needs it skips.
    walker: Option<&'prepared Path>,
}

/// Builds the walker of the fake NVML; a machine that cannot is no reason to run nothing.
fn walker(root: &Path, levels: &[Level]) -> Option<PathBuf> {
    if !levels.contains(&Level::Process) {
        return None;
    }
    gobuild::nvml_walker(root)
        .inspect_err(|error| note(format!("NVML walker: {error:#}")))
        .ok()
}

/// Compiles everything while Go builds what is missing; tests start when both are done, on a quiet machine.
fn prepare(
    root: &Path,
    levels: &[Level],
    targets: &BTreeMap<Level, Vec<String>>,
) -> Result<(Result<Peers>, Option<PathBuf>)> {
    let needs_peers = levels.contains(&Level::Apiserver);
    std::thread::scope(|scope| {
        let peers = scope.spawn(move || {
            let walker = walker(root, levels);
            let build = || {
                if !needs_peers {
                    return Ok(Peers::default());
                }
                Ok(Peers {
                    kustomize: Some(gobuild::kustomize(root)?),
                    control_plane: Some(gobuild::control_plane(root)?),
                })
            };
            (build(), walker)
        });
        let mut compile = cargo(root);
        compile.args(["test", "--locked", "--no-run", "--lib", "--bins"]);
        for target in levels.iter().filter_map(|level| targets.get(level)).flatten() {
            compile.args(["--test", target]);
        }
        // The programs that process and apiserver tests start: the testbed builds them too, but then its first
        // test would wait for a linker.
        let programs = ["--lib", "--bin", "forewarm-exporter", "--bin", "forewarm-adapter"];
        let compiled = run(&mut compile).and_then(|()| {
            if levels.iter().any(|level| *level != Level::Unit) {
                build(root, &programs)?;
            }
            Ok(())
        });
        let peers = match peers.join() {
            Ok(peers) => peers,
            Err(_) => bail!("building the peers panicked"),
        };
        compiled?;
        Ok(peers)
    })
}

fn run_level(
    root: &Path,
    level: Level,
    targets: &BTreeMap<Level, Vec<String>>,
    programs: &Programs<'_>,
    runner: &[OsString],
) -> Result<(Counts, bool)> {
    let none = Vec::new();
    let named = targets.get(&level).unwrap_or(&none);
    let mut commands = Vec::new();
    let mut tests = cargo(root);
    tests.args(["test", "--locked", "--no-fail-fast"]);
    if level == Level::Unit {
        tests.args(["--lib", "--bins"]);
    }
    for target in named {
        tests.args(["--test", target]);
    }
    if level == Level::Unit || !named.is_empty() {
        commands.push(tests);
    }
    if level == Level::Unit {
        let mut docs = cargo(root);
        docs.args(["test", "--locked", "--no-fail-fast", "--doc"]);
        commands.push(docs);
    }
    let mut sum = Counts::default();
    let mut passed = true;
    for mut command in commands {
        if let Some(found) = programs.peers.and_then(|peers| peers.control_plane.as_ref()) {
            found.tell(&mut command);
        }
        if let Some(kustomize) = programs.peers.and_then(|peers| peers.kustomize.as_ref()) {
            command.env("FOREWARM_KUSTOMIZE", kustomize);
        }
        if let Some(walker) = programs.walker {
            command.env("FOREWARM_GO_NVML", walker);
        }
        if !runner.is_empty() {
            command.arg("--").args(runner);
        }
        let (status, counts) = libtest::count(&mut command)?;
        passed &= status.success() && counts.failed == 0;
        sum.add(&counts);
    }
    Ok((sum, passed))
}

/// Why a level that CI promises does not count as run.
fn promises_broken(level: Level, counts: &Counts, ci: bool) -> Option<String> {
    let name = level.name();
    if !ci {
        return None;
    }
    if counts.passed + counts.failed == 0 {
        return Some(format!("the {name} level ran no test"));
    }
    (counts.skipped > 0).then(|| format!("the {name} level skipped {}", counts.skipped))
}

/// The last line: `{"tests":{"unit":{"passed":n,"skipped":0},…},"recordings_skipped":n}`.
#[derive(Debug, Serialize)]
struct Summary {
    tests: BTreeMap<Level, LevelSummary>,
    recordings_skipped: u64,
}

#[derive(Debug, Serialize)]
struct LevelSummary {
    passed: u64,
    skipped: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<u64>,
}

fn summary(counts: &BTreeMap<Level, Counts>) -> Result<String> {
    let tests = counts.iter().map(|(level, counts)| {
        let level_summary = LevelSummary {
            passed: counts.passed,
            skipped: counts.skipped,
            failed: (counts.failed > 0).then_some(counts.failed),
        };
        (*level, level_summary)
    });
    let summary = Summary {
        tests: tests.collect(),
        recordings_skipped: counts.values().map(|counts| counts.recordings_skipped).sum(),
    };
    serde_json::to_string(&summary).context("writing the summary")
}

/// The integration test targets of each level.
fn targets(metadata: &Metadata) -> BTreeMap<Level, Vec<String>> {
    let mut targets: BTreeMap<Level, Vec<String>> = BTreeMap::new();
    for package in metadata.workspace_packages() {
        for target in package
            .targets
            .iter()
            .filter(|target| target.kind.contains(&TargetKind::Test))
        {
            if let Some(level) = Level::of(&package.name, &target.name) {
                targets.entry(level).or_default().push(target.name.clone());
            }
        }
    }
    targets.values_mut().for_each(|names| names.sort());
    targets
}

/// Says which of the heavier levels exist, without pretending.
pub(crate) fn test_cluster(root: &Path) -> Result<()> {
    let metadata = metadata(root).context("reading the workspace")?;
    let exists = |prefix: &str| {
        metadata.workspace_packages().iter().any(|package| {
            package
                .targets
                .iter()
                .any(|target| target.kind.contains(&TargetKind::Test) && target.name.starts_with(prefix))
        })
    };
    for (level, peers) in [
        ("node", "a real kubelet, containerd and runc"),
        (
            "cluster",
            "kwok, Prometheus, prometheus-adapter, Kueue, Karpenter",
        ),
    ] {
        if exists(level) {
            bail!("there are {level} tests, but this command cannot run them yet");
        }
        note(format!(
            "the {level} level ({peers}) does not exist yet: nothing was run"
        ));
    }
    result(json!({"tests": {}, "absent": ["node", "cluster"]}));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_belongs_to_the_level_of_its_prefix() {
        assert_eq!(Level::of("forewarm-tests", "apiserver"), Some(Level::Apiserver));
        assert_eq!(
            Level::of("forewarm-tests", "process_exporter_faults"),
            Some(Level::Process)
        );
        assert_eq!(Level::of("forewarm-tests", "cluster_kueue"), None);
        assert_eq!(Level::of("forewarm-tests", "unlabelled"), None);
        assert_eq!(Level::of("forewarm-adapter", "grammar"), Some(Level::Unit));
    }

    #[test]
    fn the_last_line_has_the_promised_shape() {
        let counts = |passed, recordings_skipped| Counts {
            passed,
            recordings_skipped,
            ..Counts::default()
        };
        let all = BTreeMap::from([
            (Level::Unit, counts(3, 0)),
            (Level::Process, counts(2, 1)),
            (Level::Apiserver, counts(1, 1)),
        ]);
        assert_eq!(
            summary(&all).unwrap(),
            r#"{"tests":{"unit":{"passed":3,"skipped":0},"process":{"passed":2,"skipped":0},"apiserver":{"passed":1,"skipped":0}},"recordings_skipped":2}"#
        );
    }

    #[test]
    fn ci_refuses_a_level_that_ran_nothing_or_skipped() {
        let ran = Counts {
            passed: 1,
            ..Counts::default()
        };
        let skipped = Counts {
            passed: 1,
            skipped: 1,
            ..Counts::default()
        };
        assert_eq!(promises_broken(Level::Unit, &ran, true), None);
        assert!(promises_broken(Level::Process, &Counts::default(), true).is_some());
        assert!(promises_broken(Level::Process, &skipped, true).is_some());
        assert_eq!(promises_broken(Level::Process, &skipped, false), None);
    }
}
