//! Where things are: the repository, cargo's metadata, the cache folder.
//!
//! Inputs: the environment and `cargo metadata`. Invariants: every path starts at the repository root, so a
//! task does the same from any folder; what is built once lies under one cache folder of the user.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use cargo_metadata::{Metadata, MetadataCommand};

/// The repository root: the folder above this crate.
pub(crate) fn root() -> Result<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    // A binary that was built elsewhere and copied still works from within a checkout.
    if here.is_dir() {
        return Ok(here.parent().context("xtask lies in no folder")?.to_owned());
    }
    std::env::current_dir().context("no current folder")
}

/// Everything that cargo knows about the workspace, dependencies included.
pub(crate) fn metadata(root: &Path) -> Result<Metadata> {
    metadata_for(root, &[])
}

/// The same, with the dependencies of these targets only; of all targets when none is named.
pub(crate) fn metadata_for(root: &Path, targets: &[String]) -> Result<Metadata> {
    let mut options = vec!["--locked".to_owned()];
    for target in targets {
        options.extend(["--filter-platform".to_owned(), target.clone()]);
    }
    MetadataCommand::new()
        .manifest_path(root.join("Cargo.toml"))
        .other_options(options)
        .exec()
        .context("cargo metadata failed; is Cargo.lock up to date?")
}

/// A value of the environment that is set and not empty.
pub(crate) fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// The cache folder of all that is built once: `FOREWARM_CACHE_DIR`, else `forewarm` in the user's cache.
pub(crate) fn cache() -> Result<PathBuf> {
    if let Some(folder) = variable("FOREWARM_CACHE_DIR") {
        return Ok(folder);
    }
    if let Some(caches) = variable("XDG_CACHE_HOME") {
        return Ok(caches.join("forewarm"));
    }
    match variable("HOME") {
        Some(home) => Ok(home.join(".cache/forewarm")),
        None => bail!("no cache folder: set FOREWARM_CACHE_DIR, XDG_CACHE_HOME or HOME"),
    }
}

/// The cargo that runs us.
pub(crate) fn cargo(root: &Path) -> Command {
    let mut command = Command::new(variable("CARGO").unwrap_or_else(|| PathBuf::from("cargo")));
    command.current_dir(root);
    for name in std::env::vars_os().map(|(name, _)| name) {
        if is_about_the_running_package(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    command
}

/// Variables by which `cargo run` tells a program what it is. ring's build script runs again when they change,
/// so a nested cargo that sees them compiles TLS and all that hangs on it again, and the next one once more.
fn is_about_the_running_package(name: &str) -> bool {
    ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

/// Runs a command to its end with our own streams.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("{} did not start", described(command)))?;
    if !status.success() {
        bail!("{} failed ({status})", described(command));
    }
    Ok(())
}

/// A command as one would type it.
pub(crate) fn described(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut words = vec![
        program
            .file_name()
            .unwrap_or(command.get_program())
            .to_string_lossy()
            .into_owned(),
    ];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy().into_owned()));
    words.join(" ")
}

/// Selects a tiny test beside what is built. cargo resolves features with those of dev-dependencies as soon
/// as a test is selected; without this, `cargo test` would compile tokio, kube and all that hangs on them a
/// second time with other features. For the same reason nothing is selected by `--package`.
pub(crate) const FEATURES_AS_TESTS: [&str; 2] = ["--test", "stable_names"];

/// Builds targets in the dev profile and returns the folder that programs are in.
pub(crate) fn build(root: &Path, targets: &[&str]) -> Result<PathBuf> {
    let mut command = cargo(root);
    command
        .args(["build", "--locked"])
        .args(targets)
        .args(FEATURES_AS_TESTS);
    run(&mut command)?;
    Ok(metadata(root)?.target_directory.join("debug").into_std_path_buf())
}

/// This very program, built with the programs that it asks about.
pub(crate) fn xtask_with_programs(root: &Path, args: &[&str]) -> Result<Command> {
    let mut command = Command::new(build(root, &["--bin", "xtask"])?.join("xtask"));
    command.current_dir(root).args(args);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nested_cargo_does_not_learn_who_runs_it() {
        for name in [
            "CARGO_PKG_NAME",
            "CARGO_MANIFEST_DIR",
            "CARGO_MANIFEST_LINKS",
            "CARGO_BIN_EXE_xtask",
        ] {
            assert!(is_about_the_running_package(name), "{name}");
        }
        for name in [
            "CARGO_HOME",
            "CARGO_TARGET_DIR",
            "CARGO_INCREMENTAL",
            "CARGO_TERM_COLOR",
            "CARGO",
        ] {
            assert!(!is_about_the_running_package(name), "{name}");
        }
        // cargo runs this very test with such variables.
        let scrubbed = cargo(Path::new("."));
        assert!(
            scrubbed
                .get_envs()
                .any(|(name, value)| name == "CARGO_MANIFEST_DIR" && value.is_none())
        );
    }
}
