//! `cargo xtask lint`: every check that needs no test run, each timed, all of them run.
//!
//! Inputs: the repository. Invariants: a failed check does not hide the next one; the summary at the end
//! names what failed; nothing here needs the internet once dependencies are fetched.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::report::{note, table};
use crate::repository::{cargo, run, xtask_with_programs};
use crate::{dashboards, deny, gobuild, tidy};

type Check = fn(&Path) -> Result<()>;

const CHECKS: [(&str, Check); 7] = [
    ("tidy", |root| none(&tidy::problems(root)?)),
    ("dashboards", |root| none(&dashboards::problems(root)?)),
    ("deny", |root| none(&deny::problems(root)?)),
    ("fmt", |root| run(cargo(root).args(["fmt", "--all", "--check"]))),
    ("clippy", |root| {
        run(cargo(root).args(["clippy", "--locked", "--all-targets", "--", "-D", "warnings"]))
    }),
    ("generated", |root| {
        run(&mut xtask_with_programs(root, &["generate", "--check"])?)
    }),
    ("manifests", |root| {
        let kustomize = gobuild::kustomize(root)?;
        run(xtask_with_programs(root, &["manifests"])?.env("FOREWARM_KUSTOMIZE", kustomize))
    }),
];

/// Runs all checks.
pub(crate) fn lint(root: &Path) -> Result<()> {
    let mut rows = Vec::new();
    let mut failed = Vec::new();
    for (name, check) in CHECKS {
        note(format!("── lint: {name}"));
        let started = Instant::now();
        let outcome = check(root);
        if let Err(error) = &outcome {
            note(format!("{error:#}"));
            failed.push(name);
        }
        rows.push(vec![
            format!("lint: {name}"),
            if outcome.is_ok() { "ok" } else { "FAILED" }.to_owned(),
            format!("{:.1} s", started.elapsed().as_secs_f64()),
        ]);
    }
    table(&rows);
    if failed.is_empty() {
        Ok(())
    } else {
        bail!("lint failed: {}", failed.join(", "))
    }
}

/// Prints the problems and fails if there are any.
pub(crate) fn none(problems: &[String]) -> Result<()> {
    for problem in problems {
        note(format!("error: {problem}"));
    }
    if problems.is_empty() {
        Ok(())
    } else {
        bail!("{} problems", problems.len())
    }
}
