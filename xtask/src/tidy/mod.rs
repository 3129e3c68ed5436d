//! `cargo xtask tidy`: structure that neither the compiler nor clippy checks.
//!
//! Inputs: cargo's metadata and the files of the repository. Invariants: each rule is a pure function over
//! names and texts, so it is tested on small fixtures; each problem is one line that says what to do.

mod edges;
mod links;
mod locks;
mod paths;
mod source;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::report::note;
use crate::repository::metadata;

/// Folders that hold nothing of ours.
const SKIPPED_FOLDERS: [&str; 3] = ["target", ".git", "node_modules"];

/// What tidy found.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// Must be mended.
    pub(crate) problems: Vec<String>,
    /// Should be mended.
    pub(crate) warnings: Vec<String>,
}

/// Checks everything; warnings are printed, problems returned.
pub(crate) fn problems(root: &Path) -> Result<Vec<String>> {
    let mut findings = Findings::default();
    let metadata = metadata(root)?;
    edges::check(&metadata, &mut findings);
    locks::check(root, &metadata, &mut findings)?;
    edges::check_toolchain(root, &mut findings)?;
    for path in files(root)? {
        let name = path.strip_prefix(root).unwrap_or(&path).to_owned();
        paths::check(&name, &mut findings);
        // Pictures and the like are not text, and nothing is checked in them.
        let Ok(text) = std::fs::read_to_string(&path) else {
            continue;
        };
        source::check(&name.to_string_lossy(), &text, &mut findings);
        links::check(
            &name.to_string_lossy(),
            &text,
            |target| root.join(target).exists(),
            &mut findings,
        );
    }
    for warning in &findings.warnings {
        note(format!("warning: {warning}"));
    }
    Ok(findings.problems)
}

/// Every file below a folder, sorted; none when the folder is absent.
pub(crate) fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        if !folder.is_dir() {
            continue;
        }
        let entries = std::fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("reading {}", folder.display()))?;
            let kind = entry.file_type().context("file type")?;
            if kind.is_dir()
                && !SKIPPED_FOLDERS
                    .iter()
                    .any(|skipped| entry.file_name() == *skipped)
            {
                open.push(entry.path());
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}
