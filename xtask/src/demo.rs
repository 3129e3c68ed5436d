//! `cargo xtask demo`: builds, gets a control plane, runs the whole loop.
//!
//! Inputs: `CONTROL_PLANE=none` for the exporter and adapter alone, `NVML=real` for a real driver; every
//! argument goes to `forewarm-demo`. Invariants: the demo starts at once and does not wait for Go: it is told
//! the folder in which the control plane will appear by one rename.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::gobuild::{self, Found};
use crate::report::note;
use crate::repository::{build, variable};

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
    let standalone = variable("CONTROL_PLANE").is_some_and(|value| value.as_os_str() == "none");
    let asks_for_help = args.demo.iter().any(|arg| arg == "--help" || arg == "-h");
    if standalone || asks_for_help {
        return finish(&mut command);
    }
    command.env("FOREWARM_KUSTOMIZE", gobuild::kustomize(root)?);
    if let Some(found) = gobuild::find_control_plane(root)? {
        found.tell(&mut command);
        return finish(&mut command);
    }
    let found = show_while_building(root, &program)?;
    found.tell(&mut command);
    finish(&mut command)
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
    let built = gobuild::control_plane(root);
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

fn finish(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("{} did not start", command.get_program().to_string_lossy()))?;
    if !status.success() {
        bail!("the demo ended with {status}");
    }
    Ok(())
}
