//! `cargo xtask fuzz`: random bodies against the exposition readers.
//!
//! Inputs: `adapter/fuzz`, a workspace of its own. Invariants: the pinned compiler is enough, because coverage needs
//! no nightly flag (sanitizers would; safe code gains little from them); what was found and what it grew from lie in
//! the cache folder, so that the next run goes on from there.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::report::note;
use crate::repository::{cache, cargo, run};

/// Coverage as libFuzzer wants it; the same flags as cargo-fuzz without a sanitizer.
const COVERAGE: [&str; 7] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "--cfg=fuzzing",
    // The table of places and the counters of a unit must not be split.
    "-Ccodegen-units=1",
];
/// Bodies beyond this only repeat lines.
const LONGEST_BODY: u32 = 8192;
/// Real bodies to begin with.
const SEEDS: &str = "exporter/tests/snapshots";

/// Arguments of `cargo xtask fuzz`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct FuzzArgs {
    /// How long to look for a body that breaks a reader.
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u32,
}

/// Builds with coverage and runs.
pub(crate) fn fuzz(root: &Path, args: &FuzzArgs) -> Result<()> {
    let folder = cache()?.join("fuzz");
    let corpus = folder.join("exposition");
    fs::create_dir_all(&corpus).with_context(|| format!("creating {}", corpus.display()))?;
    let host = host()?;
    note(format!("fuzz: corpus and findings in {}", folder.display()));
    run(cargo(&root.join("adapter/fuzz"))
        // With a named target the flags do not reach build scripts, which could not be linked with them.
        .args(["run", "--locked", "--release", "--bin", "exposition", "--target", &host])
        .env("RUSTFLAGS", COVERAGE.join(" "))
        .env("CARGO_TARGET_DIR", folder.join("target"))
        .arg("--")
        .args([&corpus, &root.join(SEEDS)])
        .arg(format!("-max_total_time={}", args.seconds))
        .arg(format!("-max_len={LONGEST_BODY}"))
        .arg("-print_final_stats=1")
        .arg(format!("-artifact_prefix={}/", folder.display())))
}

/// The triple that the compiler builds for.
fn host() -> Result<String> {
    let output = Command::new("rustc")
        .arg("-vV")
        .output()
        .context("rustc did not start")?;
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .map(str::to_owned)
        .context("rustc does not tell its host")
}
