//! `forewarm-bench`: figures with budgets, measured on release builds of the real programs.
//!
//! Inputs: parts to measure (all when none is named). Output: one JSON object a line,
//! `{"name","value","unit","budget","better"}`, each name beginning with its part; progress goes to stderr.
//! Invariants: a figure is printed once, its worst case where several loads stand behind it; a part that cannot
//! measure is an error, never a missing line.

pub mod adapter;
pub mod exporter;
pub mod floor;
pub mod usage;

use std::future::Future;
use std::io::Write;
use std::pin::Pin;

use anyhow::{Context, Result, bail};
use serde::Serialize;

/// Which side of the budget is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// At most the budget.
    Lower,
    /// At least the budget.
    Higher,
}

/// One figure.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    /// Name, beginning with its part.
    pub name: &'static str,
    /// What was measured.
    pub value: f64,
    /// Unit of value and budget.
    pub unit: &'static str,
    /// What it must keep to.
    pub budget: f64,
    /// Which side of the budget is good.
    pub better: Better,
}

impl Figure {
    /// A figure that should stay at or below its budget.
    #[must_use]
    pub const fn at_most(name: &'static str, value: f64, unit: &'static str, budget: f64) -> Self {
        Self {
            name,
            value,
            unit,
            budget,
            better: Better::Lower,
        }
    }
}

type Measuring = Pin<Box<dyn Future<Output = Result<Vec<Figure>>>>>;

/// Something that can be measured by itself.
struct Part {
    name: &'static str,
    measure: fn() -> Measuring,
}

/// All parts, in the order in which they run.
const PARTS: [Part; 2] = [
    Part {
        name: "exporter",
        measure: || Box::pin(exporter::measure()),
    },
    Part {
        name: "adapter",
        measure: || Box::pin(adapter::measure()),
    },
];

/// The parts behind the words of a command line: a part by its name, or by the name of one of its figures.
fn chosen(words: &[String]) -> Result<Vec<&'static Part>> {
    static ALL: [Part; 2] = PARTS;
    for word in words {
        let known = ALL.iter().any(|part| word.starts_with(part.name));
        if !known {
            bail!(
                "no part {word:?}; there are: {}",
                ALL.each_ref().map(|part| part.name).join(", ")
            );
        }
    }
    let wanted = |part: &&Part| words.is_empty() || words.iter().any(|word| word.starts_with(part.name));
    Ok(ALL.iter().filter(wanted).collect())
}

/// Measures the parts named by `words` and writes their figures to `out` as they come.
///
/// # Errors
/// An unknown part, or one that cannot measure; figures of parts before it are out by then.
pub async fn run(words: &[String], out: &mut impl Write) -> Result<()> {
    for part in chosen(words)? {
        let figures = (part.measure)()
            .await
            .with_context(|| format!("measuring {}", part.name))?;
        for figure in figures {
            if !figure.value.is_finite() {
                bail!("{} has no value", figure.name);
            }
            writeln!(out, "{}", serde_json::to_string(&figure)?)?;
            out.flush()?;
        }
    }
    Ok(())
}

/// Says on stderr what is going on: a part takes a minute or more.
pub fn progress(text: &str) {
    // Nothing to do if nobody listens.
    let _ = writeln!(std::io::stderr(), "bench: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(words: &[&str]) -> Vec<&'static str> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        chosen(&words).unwrap().iter().map(|part| part.name).collect()
    }

    #[test]
    fn parts_are_chosen_by_name_or_by_figure() {
        assert_eq!(names(&[]), ["exporter", "adapter"]);
        assert_eq!(names(&["adapter"]), ["adapter"]);
        assert_eq!(names(&["exporter_cpu"]), ["exporter"]);
        let error = chosen(&["planner".to_owned()]).map(drop).unwrap_err();
        assert!(error.to_string().contains("exporter, adapter"), "{error}");
    }

    #[test]
    fn a_figure_is_one_json_line() {
        let figure = Figure::at_most("exporter_rss", 7.5, "MiB", 15.0);
        assert_eq!(
            serde_json::to_string(&figure).unwrap(),
            r#"{"name":"exporter_rss","value":7.5,"unit":"MiB","budget":15.0,"better":"lower"}"#
        );
    }
}
