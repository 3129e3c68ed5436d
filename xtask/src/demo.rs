//! `cargo xtask demo`: builds, gets a control plane, runs the whole loop.
//!
//! Inputs: `CONTROL_PLANE=none` for the exporter and adapter alone, `NVML=real` for a real driver; every
//! argument goes to `forewarm-demo`. Invariants: the demo starts at once and does not wait for Go: it is told
//! the folder in which the control plane will appear by one rename.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::gobuild::{self, Found};
use crate::report::note;
use crate::repository::build;

/// Arguments of `cargo xtask demo`.
#[derive(Debug, Clone, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct DemoArgs {
    /// Passed on to forewarm-demo; --help shows what it takes.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    demo: Vec<OsString>,
}

/// Builds and runs the demo.
pub(crate) fn demo(root: &Path, args: &DemoArgs) -> Result<()> {
    note("demo: building the programs");
    let program = build(
        root,
        &[
            "--lib",
            "--bin",
            "forewarm-exporter",
            "--bin",
            "forewarm-adapter",
            "--bin",
            "forewarm-demo",
        ],
    )?
    .join("forewarm-demo");
    let mut command = Command::new(&program);
    command.current_dir(root).args(&args.demo);
    if needs_no_control_plane(&args.demo, |name| std::env::var_os(name)) {
        return finish(&mut command);
    }
    let found = match gobuild::find_control_plane(root)? {
        Some(found) => found,
        None => show_while_building(root, &program)?,
    };
    found.tell(&mut command);
    command.env("FOREWARM_KUSTOMIZE", gobuild::kustomize(root)?);
    finish(&mut command)
}

/// Whether the demo that is asked for runs exporter and adapter alone, or only says something.
fn needs_no_control_plane(args: &[OsString], variable: impl Fn(&str) -> Option<OsString>) -> bool {
    let words: Vec<&str> = args.iter().filter_map(|arg| arg.to_str()).collect();
    let chosen = |flag: &str, name: &str| {
        let joined = words
            .iter()
            .find_map(|word| word.strip_prefix(flag)?.strip_prefix('='));
        let apart = words.windows(2).find(|pair| pair[0] == flag).map(|pair| pair[1]);
        joined.or(apart).map(OsString::from).or_else(|| variable(name))
    };
    let says_something = ["--help", "-h", "--version", "-V"];
    words.iter().any(|word| says_something.contains(word))
        || chosen("--control-plane", "CONTROL_PLANE").is_some_and(|value| value == "none")
        || chosen("--nvml", "NVML").is_some_and(|value| value == "real")
}

/// Builds the control plane and meanwhile shows the half that needs none.
fn show_while_building(root: &Path, program: &Path) -> Result<Found> {
    note("demo: exporter and adapter start now; the whole loop follows once the control plane is built");
    let mut half = Command::new(program)
        .current_dir(root)
        .arg("--while-building")
        .env("FOREWARM_CONTROLPLANE_DIR", gobuild::control_plane_folder(root)?)
        .spawn()
        .with_context(|| format!("{} did not start", program.display()))?;
    // The half ends when the control plane is there, so what else is needed is built before.
    let built = gobuild::kustomize(root).and_then(|_| gobuild::control_plane(root));
    if built.is_err() {
        // It waits for a folder that will not appear. Its own children die with it.
        let _ended_already = half.kill();
    }
    // A half that failed is no reason not to show the whole.
    let status = half.wait().context("waiting for the standalone half")?;
    if built.is_ok() && !status.success() {
        note(format!("demo: the standalone half ended with {status}"));
    }
    built
}

/// Becomes the demo: Ctrl-C then reaches it alone, and `make` waits until it has cleaned up.
fn finish(command: &mut Command) -> Result<()> {
    let error = command.exec();
    Err(error).with_context(|| format!("{} did not start", command.get_program().to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alone(args: &[&str], environment: &[(&str, &str)]) -> bool {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        needs_no_control_plane(&args, |name| {
            environment
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn the_whole_loop_is_the_default() {
        assert!(!alone(&[], &[]));
        assert!(!alone(
            &["--hold"],
            &[("CONTROL_PLANE", "real"), ("NVML", "fake")]
        ));
    }

    #[test]
    fn the_half_is_chosen_by_flag_or_environment() {
        assert!(alone(&[], &[("CONTROL_PLANE", "none")]));
        assert!(alone(&["--control-plane=none"], &[]));
        assert!(alone(&["--hold", "--control-plane", "none"], &[]));
        assert!(alone(&[], &[("NVML", "real")]));
        assert!(!alone(&["--control-plane", "real"], &[("CONTROL_PLANE", "none")]));
        assert!(alone(&["--help"], &[]));
    }
}
