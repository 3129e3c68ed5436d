//! What the tasks say: progress for people on stderr, results for programs on stdout.
//!
//! Inputs: lines. Invariants: stdout carries only what a caller may parse, so progress never gets into it;
//! a closed pipe is not an error, because there is nobody left to tell.

use std::fmt;
use std::io::Write as _;

/// One line for people.
pub(crate) fn note(text: impl fmt::Display) {
    let _closed = writeln!(std::io::stderr().lock(), "{text}");
}

/// One line for programs.
pub(crate) fn result(text: impl fmt::Display) {
    let mut out = std::io::stdout().lock();
    let _closed = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// A table for people: columns as wide as their longest cell.
pub(crate) fn table(rows: &[Vec<String>]) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|column| {
            rows.iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        })
        .collect();
    for row in rows {
        let line: Vec<String> = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:<width$}"))
            .collect();
        note(line.join("  ").trim_end());
    }
}
