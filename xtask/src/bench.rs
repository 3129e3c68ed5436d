//! `cargo xtask bench`: release artefacts, the figures as JSON lines, a table for people.
//!
//! Inputs: `forewarm-bench`, which measures and prints one JSON object a line. Invariants: the lines reach
//! stdout as they were printed; a missed budget or a figure without a value fails the command.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use crate::report::{note, result, table};
use crate::repository::{cargo, metadata, run};

/// Arguments of `cargo xtask bench`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct BenchArgs {
    /// Parts whose figures are wanted (exporter, adapter, …); all when absent.
    #[arg(value_name = "PART")]
    parts: Vec<String>,
}

/// One figure as the bench prints it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Figure {
    name: String,
    value: f64,
    unit: String,
    budget: f64,
    better: Better,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Better {
    Lower,
    Higher,
}

impl Figure {
    fn is_within_budget(&self) -> bool {
        match self.better {
            Better::Lower => self.value <= self.budget,
            Better::Higher => self.value >= self.budget,
        }
    }

    fn row(&self) -> Vec<String> {
        let side = match self.better {
            Better::Lower => "≤",
            Better::Higher => "≥",
        };
        vec![
            self.name.clone(),
            format!("{:.3}", self.value),
            self.unit.clone(),
            format!("{side} {}", self.budget),
            if self.is_within_budget() { "ok" } else { "MISSED" }.to_owned(),
        ]
    }
}

/// Builds, measures, compares.
pub(crate) fn bench(root: &Path, args: &BenchArgs) -> Result<()> {
    // No `--package`: features resolve for all members, as the testbed's own builds do, so that the programs
    // which the bench asks for are these very ones.
    run(cargo(root).args([
        "build",
        "--locked",
        "--release",
        "--lib",
        "--bin",
        "forewarm-exporter",
        "--bin",
        "forewarm-adapter",
        "--bin",
        "forewarm-bench",
    ]))?;
    let program = metadata(root)?.target_directory.join("release/forewarm-bench");
    let mut child = Command::new(&program)
        .current_dir(root)
        .args(&args.parts)
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("{program} did not start"))?;
    let mut figures = Vec::new();
    let mut unreadable = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line.context("reading figures")?;
            result(&line);
            match serde_json::from_str::<Figure>(&line) {
                Ok(figure) => figures.push(figure),
                Err(error) => unreadable.push(format!("{line:?} is no figure: {error}")),
            }
        }
    }
    let status = child.wait().context("waiting for the bench")?;
    let mut rows = vec![
        ["figure", "value", "unit", "budget", ""]
            .map(str::to_owned)
            .to_vec(),
    ];
    rows.extend(figures.iter().map(Figure::row));
    note("");
    table(&rows);
    let missed: Vec<&str> = figures
        .iter()
        .filter(|figure| !figure.is_within_budget())
        .map(|figure| figure.name.as_str())
        .collect();
    if !status.success() {
        bail!("the bench ended with {status}");
    }
    if !unreadable.is_empty() {
        bail!("{}", unreadable.join("; "));
    }
    if figures.is_empty() {
        bail!(
            "no part measured anything; parts asked for: {}",
            args.parts.join(" ")
        );
    }
    if !missed.is_empty() {
        bail!("budgets missed: {}", missed.join(", "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(value: f64, better: &str) -> Figure {
        serde_json::from_str(&format!(
            r#"{{"name":"exporter_rss","value":{value},"unit":"MiB","budget":15,"better":"{better}"}}"#
        ))
        .unwrap()
    }

    #[test]
    fn a_budget_has_a_side() {
        assert!(figure(15.0, "lower").is_within_budget());
        assert!(!figure(15.1, "lower").is_within_budget());
        assert!(figure(15.1, "higher").is_within_budget());
        assert!(!figure(14.0, "higher").is_within_budget());
        assert!(figure(15.1, "lower").row().contains(&"MISSED".to_owned()));
    }

    #[test]
    fn a_figure_without_value_is_no_figure() {
        assert!(
            serde_json::from_str::<Figure>(
                r#"{"name":"x","value":null,"unit":"s","budget":1,"better":"lower"}"#
            )
            .is_err()
        );
    }
}
