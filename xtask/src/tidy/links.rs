//! Documents point only to what exists.
//!
//! Inputs: Markdown files and a way to ask whether a path exists. Invariants: relative links are followed from
//! the document's folder; in ARCHITECTURE.md paths in backticks are followed from the root, because it is the
//! map that people navigate by.

use std::path::{Component, Path, PathBuf};

use super::Findings;

/// Folders that a path in the map starts with.
const TOP_FOLDERS: [&str; 9] = [
    "signals/",
    "runtime/",
    "exporter/",
    "adapter/",
    "tests/",
    "xtask/",
    "manifests/",
    "dashboards/",
    "docs/",
];

/// Checks one document.
pub(super) fn check(path: &str, text: &str, exists: impl Fn(&Path) -> bool, findings: &mut Findings) {
    if !path.ends_with(".md") {
        return;
    }
    let folder = Path::new(path).parent().unwrap_or(Path::new(""));
    for target in links(text) {
        let resolved = normal(&folder.join(target));
        if !exists(&resolved) {
            findings
                .problems
                .push(format!("{path}: links to {target}, which does not exist"));
        }
    }
    if path == "ARCHITECTURE.md" {
        for target in mapped(text).filter(|target| !exists(Path::new(target))) {
            findings
                .problems
                .push(format!("{path}: maps {target}, which does not exist"));
        }
    }
}

/// Targets of relative links, without anchors.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
        .map(|target| target.split('#').next().unwrap_or(target))
        .filter(|target| !target.is_empty() && !target.contains("://") && !target.starts_with("mailto:"))
}

/// Paths in backticks; patterns name several files and are not followed.
fn mapped(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2).filter(|word| {
        TOP_FOLDERS.iter().any(|top| word.starts_with(top)) && !word.contains(['*', ' ', '\n'])
    })
}

/// The path without `..` and `.`.
fn normal(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                parts.pop();
            }
            Component::CurDir => {}
            other => parts.push(other),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(path: &str, text: &str) -> Vec<String> {
        let mut findings = Findings::default();
        let exists = |path: &Path| {
            ["README.md", "docs/a.md", "adapter/src/api.rs"]
                .iter()
                .any(|known| Path::new(known) == path)
        };
        check(path, text, exists, &mut findings);
        findings.problems
    }

    #[test]
    fn relative_links_are_followed() {
        assert!(problems("README.md", "[a](docs/a.md#part) [b](https://x/y) [c](#here)").is_empty());
        assert!(problems("docs/a.md", "[home](../README.md)").is_empty());
        assert_eq!(problems("docs/a.md", "[gone](b.md)").len(), 1);
    }

    #[test]
    fn the_map_names_existing_files_only() {
        assert!(
            problems(
                "ARCHITECTURE.md",
                "`adapter/src/api.rs` and `*/src/args.rs` and `make tidy`"
            )
            .is_empty()
        );
        assert_eq!(problems("ARCHITECTURE.md", "`adapter/src/gone.rs`").len(), 1);
        assert!(problems("README.md", "`adapter/src/gone.rs`").is_empty());
    }
}
