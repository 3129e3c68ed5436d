//! `check-config`: reads a file as the running adapter would, and shows what it makes of it.
//!
//! Invariants: reads the file only; touches neither cluster nor targets.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::json;

use super::{Config, Options, Rejected, Series, load};

/// How the outcome is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Output {
    /// For people.
    #[default]
    Table,
    /// For programs.
    Json,
}

/// Checks a file. Returns what to print, and whether the file may be used.
#[must_use]
pub fn check(path: &Path, options: Options, output: Output) -> (String, bool) {
    let outcome = load(path, options);
    let text = match output {
        Output::Table => table(path, &outcome),
        Output::Json => document(path, &outcome),
    };
    (text, outcome.is_ok())
}

fn made_of(series: &Series) -> String {
    match series {
        Series::Direct(name) => name.to_string(),
        Series::Ratio {
            numerator,
            denominator,
        } => format!("{numerator} / {denominator}"),
    }
}

fn table(path: &Path, outcome: &Result<Config, Rejected>) -> String {
    let config = match outcome {
        Ok(config) => config,
        Err(rejected) => return format!("{rejected}\n"),
    };
    let mut text = String::new();
    let width = config
        .metrics
        .iter()
        .map(|m| m.name.len())
        .chain(config.external.iter().map(|e| e.name.len()))
        .max()
        .unwrap_or(0);
    for metric in &config.metrics {
        let _infallible = writeln!(
            text,
            "{:width$}  {:10}  {:12}  {}",
            metric.name,
            metric.per.to_string(),
            metric.source,
            made_of(&metric.series)
        );
    }
    for external in &config.external {
        let _infallible = writeln!(
            text,
            "{:width$}  {:10}  {:12}  {}",
            external.name, "external", external.source, external.series
        );
    }
    for warning in &config.warnings {
        let _infallible = writeln!(text, "warning: {}: {warning}", path.display());
    }
    let _infallible = writeln!(
        text,
        "{}: ok, {} sources, {} metrics, {} external metrics",
        path.display(),
        config.sources.len(),
        config.metrics.len(),
        config.external.len()
    );
    text
}

fn document(path: &Path, outcome: &Result<Config, Rejected>) -> String {
    let document = match outcome {
        Ok(config) => json!({
            "file": path, "ok": true, "errors": [], "warnings": config.warnings,
            "sources": config.sources.iter().map(|source| &*source.name).collect::<Vec<_>>(),
            "metrics": config.metrics.iter().map(|metric| json!({
                "name": &*metric.name, "per": metric.per.to_string(), "source": &*metric.source, "series": made_of(&metric.series),
            })).collect::<Vec<_>>(),
            "external": config.external.iter().map(|external| json!({
                "name": &*external.name, "source": &*external.source, "series": &*external.series,
            })).collect::<Vec<_>>(),
        }),
        Err(rejected) => json!({"file": path, "ok": false, "errors": rejected.complaints, "warnings": []}),
    };
    format!("{document:#}\n")
}
