//! `cargo xtask fuzz`: random bodies against the exposition readers.
//!
//! Inputs: `adapter/fuzz`, a workspace of its own. Invariants: the pinned compiler is enough, because coverage needs
//! no nightly flag (sanitizers would; safe code gains little from them); what was found and what it grew from lie in
//! the cache folder, so that the next run goes on from there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::report::note;
use crate::repository::{cache, cargo, run};
use crate::tidy::files;

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
/// Real bodies to begin with: the exporter's golden answers, as insta keeps them.
const SEEDS: &str = "exporter/tests/snapshots";
/// Lines of a seed: a few families, since small bodies are changed in more telling ways.
const SEED_LINES: usize = 24;

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
    for (index, seed) in seeds(&files(&root.join(SEEDS))?)?.iter().enumerate() {
        let path = corpus.join(format!("seed-{index}"));
        fs::write(&path, seed).with_context(|| format!("writing {}", path.display()))?;
    }
    let host = host()?;
    note(format!("fuzz: corpus and findings in {}", folder.display()));
    run(cargo(&root.join("adapter/fuzz"))
        // With a named target the flags do not reach build scripts, which could not be linked with them.
        .args(["run", "--locked", "--release", "--bin", "exposition", "--target", &host])
        .env("RUSTFLAGS", COVERAGE.join(" "))
        .env("CARGO_TARGET_DIR", folder.join("target"))
        .arg("--")
        .arg(&corpus)
        .arg(format!("-max_total_time={}", args.seconds))
        .arg(format!("-max_len={LONGEST_BODY}"))
        .arg("-print_final_stats=1")
        .arg(format!("-artifact_prefix={}/", folder.display())))
}

fn seeds(snapshots: &[PathBuf]) -> Result<Vec<String>> {
    let mut seeds = Vec::new();
    for path in snapshots {
        let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        seeds.extend(pieces(&text));
    }
    Ok(seeds)
}

/// The body of a snapshot, which follows its head, in pieces of whole lines.
fn pieces(snapshot: &str) -> Vec<String> {
    let body = snapshot.splitn(3, "---\n").nth(2).unwrap_or(snapshot);
    let lines: Vec<&str> = body.lines().collect();
    lines
        .chunks(SEED_LINES)
        .map(|piece| piece.join("\n") + "\n")
        .collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_piece_of_a_body_without_the_snapshots_head() {
        let body: String = (0..30).map(|n| format!("gpu_up{{gpu=\"{n}\"}} 1\n")).collect();
        let pieces = pieces(&format!("---\nsource: x\nexpression: y\n---\n{body}"));
        assert_eq!(pieces.len(), 2);
        assert!(pieces[0].starts_with("gpu_up{gpu=\"0\"} 1\n"), "{}", pieces[0]);
        assert_eq!(pieces.concat(), body);
    }
}
